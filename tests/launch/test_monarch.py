"""Fetchers as Monarch actors: started for real where Monarch is installed, each test in a process of its own.

Monarch keeps threads and sockets in a process that has used it, so the tests look at such a process from outside. What
is below `scenarios` is shared with the tests of Ray.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkpoint.helpers.files import assert_all_same, random_tensor, write_file
from launch.helpers.leftovers import alive_at_the_end, is_alive
from loadmaster.errors import FetchError, InputError, MissingDependencyError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.parts import weights_of
from loadmaster.fetch.source import SourceEntry
from loadmaster.launch import monarch
from loadmaster.launch.actors import ActorFetchers

needs_monarch = pytest.mark.skipif(
    importlib.util.find_spec("monarch") is None, reason="Monarch is not installed: pip install 'loadmaster[monarch]'"
)
TESTS = Path(__file__).parent.parent
SECONDS = 100


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, in natural order."""
    found = {f"layers.{number}.weight": random_tensor((150, 301), seed=100 * version + number) for number in range(12)}
    found["norm"] = random_tensor((3, 1, 7), torch.uint8, version)
    return found


class SlowSource(CheckpointSource):
    """A checkpoint whose version 3 takes longer than anybody waits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SlowSource, (self.path,)

    def names(self, version: int | None) -> list[str]:
        if version == 3:
            time.sleep(300)
        return super().names(version)


class ThreadsSource:
    """Tells how many threads torch has where it is read."""

    def names(self, version: int | None) -> Iterable[str]:
        return ["a", "b"]

    def entry(self, name: str) -> SourceEntry:
        return SourceEntry((2,), "I64")

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        destination[0] = torch.get_num_threads()
        destination[1] = torch.get_num_interop_threads()


class BrokenSource(ThreadsSource):
    """Cannot be set up by any fetcher."""

    def __setstate__(self, state: object) -> None:
        self.broken = True

    def __getstate__(self) -> object:
        return {"pickled": True}

    def __getattribute__(self, name: str) -> Any:
        if name == "entry" and "broken" in object.__getattribute__(self, "__dict__"):
            raise ValueError("it cannot be used here")
        return object.__getattribute__(self, name)


def fetch_versions(spawn: Callable[..., ActorFetchers], pattern: str, linger: float = 0.0) -> dict[str, Any]:
    """Two fetchers fetch two versions, one after the other; then one is killed while they are at work."""
    told: dict[str, Any] = {}
    fetchers = spawn(SlowSource(pattern), 2)
    pids = fetchers.pids()
    told["ranks"] = [(share.rank, share.workers) for share in fetchers.shares]
    run = asyncio.new_event_loop()
    run.run_until_complete(fetchers.set_up())  # a repeat is harmless
    run.close()
    for version in (1, 2):
        with fetchers.fetch(version) as weights:
            assert_all_same(dict(weights), tensors_of(version))
            assert [row.pid for row in weights.report.fetchers] == pids

    async def fetch() -> None:
        with await fetchers.afetch(1) as weights:
            assert_all_same(dict(weights), tensors_of(1))
        with pytest.raises(InputError, match="await afetch instead"):
            fetchers.fetch(1)

    asyncio.run(fetch())
    kept = fetchers.fetch(2)
    told["missing"] = failure(lambda: fetchers.fetch(9))

    async def fetch_while_one_is_killed() -> None:
        asyncio.get_running_loop().call_later(0.5, os.kill, pids[1], signal.SIGKILL)
        await fetchers.afetch(3)

    started = time.monotonic()
    told["killed"] = failure(lambda: asyncio.run(fetch_while_one_is_killed()))
    told["later"] = failure(lambda: fetchers.fetch(1))
    told["seconds"] = time.monotonic() - started
    time.sleep(linger)
    told["processes"] = pids + [process.pid for process in psutil.Process().children(recursive=True)]
    fetchers.close()
    fetchers.close()
    told["alive"] = [pid for pid in pids if is_alive(pid)]
    told["closed"] = failure(lambda: fetchers.fetch(1))
    with kept:
        assert_all_same(dict(kept), tensors_of(2))
    told["pids"] = pids
    return told


def fetch_threads(spawn: Callable[..., ActorFetchers]) -> dict[str, Any]:
    """A source of the test's own, which sees the threads of each fetcher; and one that no fetcher can use."""
    with spawn(ThreadsSource(), 2) as fetchers:
        with fetchers.fetch() as weights:
            found = {name: tensor.tolist() for name, tensor in weights.items()}
        wanted = [share.threads for share in fetchers.shares]
        pids = fetchers.pids()
    broken = failure(lambda: spawn(BrokenSource(), 2))
    held = ThreadsSource()
    held.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(InputError) as unsent:
        spawn(held, 2)
    left = [process.pid for process in psutil.Process().children(recursive=True)]
    told = {"found": found, "wanted": wanted, "broken": broken, "unsent": str(unsent.value)}
    return {**told, "processes": pids + left}


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(FetchError) as caught:
        call()
    return str(caught.value)


def versions(folder: Path) -> str:
    for version in (1, 2):
        write_file(folder / f"step-{version}.safetensors", tensors_of(version))
    return os.fspath(folder / "step-{version}.safetensors")


def run_scenario(name: str, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Call ``module.function`` of these tests in a fresh process, warnings as errors; what it tells, and nothing left.

    ``processes`` of what it tells are those that must have ended by then.
    """
    module, _, function = name.rpartition(".")
    code = f"import sys; from {module} import {function}, tell; tell({function}(*sys.argv[1:]))"
    before = shared_files()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(TESTS), **(environment or {})},
    )
    with process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            end_tree(process)
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert alive_at_the_end(told["processes"]) == []
    deadline = time.monotonic() + 5
    while (left := shared_files() - before) and time.monotonic() < deadline:
        time.sleep(0.05)  # of another process of this machine, which has such a file for a moment
    assert left == set()
    return told


def end_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process that is late, and all that it has started."""
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()


def tell(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def shared_files() -> set[str]:
    """Files of ours in /dev/shm; the folder of the leases, which is named after the user, is none."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if re.fullmatch(r"(loadmaster-.*\D.*|plasma.*)", name)}


def check_versions(told: dict[str, Any]) -> None:
    """What `fetch_versions` has to tell."""
    assert told["ranks"] == [[0, 2], [1, 2]]
    assert re.fullmatch(
        r"version 9 could not be fetched: fetcher \d: .*step-9.safetensors does not exist.*", told["missing"]
    )
    gone = f"fetcher 1: its process {told['pids'][1]} is gone, possibly killed, possibly out of memory"
    assert told["killed"] == f"version 3 could not be fetched: {gone}"
    assert told["later"] == f"version 1 could not be fetched: {gone}; close these fetchers and start new ones"
    assert told["seconds"] < 10
    assert told["alive"] == []
    assert told["closed"] == "these fetchers are closed"


def check_threads(told: dict[str, Any]) -> None:
    """What `fetch_threads` has to tell."""
    assert told["found"] == {name: [threads, threads] for name, threads in zip("ab", told["wanted"], strict=True)}
    assert told["broken"].startswith("the fetchers could not be started: fetcher ")
    assert "ValueError: it cannot be used here" in told["broken"]
    assert told["unsent"].startswith("the source ThreadsSource cannot be sent to the fetchers: ")
    assert "lock" in told["unsent"]


# Monarch.


def fetch_with_monarch(pattern: str) -> dict[str, Any]:
    """Monarch tells of a death after about 10 s, and would end this process for it: so it lingers."""
    return fetch_versions(monarch.spawn_fetchers, pattern, linger=12.0)


def fetch_threads_with_monarch() -> dict[str, Any]:
    return fetch_threads(monarch.spawn_fetchers)


def fetch_in_a_generator(pattern: str) -> dict[str, Any]:
    """An actor of somebody else's starts fetchers; and the fetch actors on a mesh of somebody else's."""
    from monarch.actor import Actor, endpoint, this_host

    class Generator(Actor):
        @endpoint
        async def generate(self, pattern: str) -> list[int]:
            async with await monarch.aspawn_fetchers(CheckpointSource(pattern), 2) as fetchers:
                for version in (1, 2):
                    with await fetchers.afetch(version) as weights:
                        assert_all_same(dict(weights), tensors_of(version))
                return fetchers.pids()

    own = this_host().spawn_procs(per_host={"generators": 1})
    pids = own.spawn("generator", Generator).generate.call_one(pattern).get(timeout=60)
    mesh = this_host().spawn_procs(per_host={"any": 2})
    actors = mesh.spawn("fetchers", monarch.FetchActor, CheckpointSource(pattern))
    shares = actors.setup.call().get(timeout=60)
    for version in (1, 2):
        with weights_of(list(actors.fetch.call(version).get(timeout=30).values())) as weights:
            assert_all_same(dict(weights), tensors_of(version))
    left = [process.pid for process in psutil.Process().children(recursive=True)]
    for one in (mesh, own):
        one.stop().get(timeout=30)
    ranks = sorted((share.rank, share.workers) for share in shares.values())
    return {"processes": pids + left, "ranks": ranks}


def fetch_from_a_store() -> dict[str, Any]:
    """The tensors are those of an actor, which an async source asks: so do stores that are made of Monarch actors."""
    from monarch.actor import Actor, endpoint, this_host

    class Store(Actor):
        @endpoint
        async def get(self, name: str) -> torch.Tensor:
            return torch.full((4, 5), float(name))

    class StoreSource:
        def __init__(self, store: Any) -> None:
            self.store = store

        async def names(self, version: int | None) -> list[str]:
            return [str(number) for number in range(6)]

        async def entry(self, name: str) -> torch.Tensor:
            return await self.store.get.call_one(name)  # type: ignore[no-any-return]

        async def get(self, name: str) -> torch.Tensor:
            return await self.store.get.call_one(name)  # type: ignore[no-any-return]

    procs = this_host().spawn_procs(per_host={"stores": 1})
    with monarch.spawn_fetchers(StoreSource(procs.spawn("store", Store)), 2) as fetchers:  # type: ignore[arg-type]
        with fetchers.fetch() as weights:
            found = {name: tensor.unique().tolist() for name, tensor in weights.items()}
        left = [process.pid for process in psutil.Process().children(recursive=True)]
    procs.stop().get(timeout=30)
    return {"processes": left, "found": found}


@needs_monarch
@pytest.mark.processes
def test_fetchers_fetch_versions_and_one_that_dies_is_named_and_ends_nobody_else(tmp_path: Path) -> None:
    check_versions(run_scenario("launch.test_monarch.fetch_with_monarch", versions(tmp_path)))


@needs_monarch
@pytest.mark.processes
def test_fetchers_have_their_threads_and_a_source_that_cannot_be_used_is_a_sentence() -> None:
    check_threads(run_scenario("launch.test_monarch.fetch_threads_with_monarch"))


@needs_monarch
@pytest.mark.processes
def test_an_actor_can_start_fetchers_and_any_mesh_can_have_fetch_actors(tmp_path: Path) -> None:
    told = run_scenario("launch.test_monarch.fetch_in_a_generator", versions(tmp_path))
    assert told["ranks"] == [[0, 2], [1, 2]]


@needs_monarch
@pytest.mark.processes
def test_a_source_may_ask_actors_itself() -> None:
    told = run_scenario("launch.test_monarch.fetch_from_a_store")
    assert told["found"] == {str(number): [float(number)] for number in range(6)}


@pytest.fixture
def without_monarch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for maker in (monarch._fetch_actor_class, monarch._owner_class):
        maker.cache_clear()
    for name in ("monarch", "monarch.actor"):
        monkeypatch.setitem(sys.modules, name, None)
    yield
    for maker in (monarch._fetch_actor_class, monarch._owner_class):
        maker.cache_clear()


SENTENCE = r"^Monarch is not installed, and this needs it: pip install 'loadmaster\[monarch\]'$"


@pytest.mark.usefixtures("without_monarch")
def test_without_monarch_each_use_names_the_command_that_installs_it() -> None:
    with pytest.raises(MissingDependencyError, match=SENTENCE):
        monarch.spawn_fetchers(CheckpointSource("x"))
    with pytest.raises(MissingDependencyError, match=SENTENCE):
        asyncio.run(monarch.aspawn_fetchers(CheckpointSource("x")))
    with pytest.raises(MissingDependencyError, match=SENTENCE):
        _ = monarch.FetchActor


def test_the_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match=r"module 'loadmaster.launch.monarch' has no attribute 'Actor'"):
        _ = monarch.Actor


def test_the_import_brings_neither_an_actor_system_nor_torch() -> None:
    code = (
        "import sys; import loadmaster.launch.monarch, loadmaster.launch.ray; "
        "print(*{'monarch', 'ray', 'torch'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@needs_monarch
@pytest.mark.parametrize("procs", [0, True, "8"])
def test_a_wrong_request_starts_nothing(procs: Any) -> None:
    code = (
        "import sys; from loadmaster.launch.monarch import spawn_fetchers\n"
        "from loadmaster.errors import InputError\n"
        "from loadmaster.fetch.checkpoint_source import CheckpointSource\n"
        f"try: spawn_fetchers(CheckpointSource('x'), {procs!r})\n"
        "except InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout == f"the number of fetchers must be a positive integer, not {procs!r}\n"
