"""The fetchers of actor systems: their parts become weights, their failures sentences, and no wait is without an end.

Real processes run `FetchWorker` and send plain handles; what an actor system would do in between is a line to each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkpoint.helpers.files import assert_all_same, random_tensor, write_file
from loadmaster.errors import CheckpointError, FetchError, InputError, SharedMemoryError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.parts import _natural, weights_of
from loadmaster.fetch.worker import FetchedPart
from loadmaster.launch import actors as module
from loadmaster.launch.actors import (
    ActorFetchers,
    actor_environments,
    actor_worker,
    answers_of,
    check_actor_request,
    run_here,
)

TESTS = Path(__file__).parent.parent
FETCHERS = 2


def serve() -> None:
    """In the process of a fetcher: answer calls of a `FetchWorker`, one after the other, until the line ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    worker = actor_worker(*pickle.load(requests))
    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = getattr(worker, method)(*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


class Line:
    """A process that runs `serve`, and the line to it."""

    def __init__(self, source: object, fetcher: int, fetchers: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", "from launch.test_actors import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.fspath(TESTS)},
        )
        self._turn = threading.Lock()
        self._tell((source, fetcher, fetchers, environment))

    def _tell(self, message: object) -> None:
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method there and return its answer; the error that it raises is raised here, as is the line's end."""
        assert self.process.stdout is not None
        with self._turn:
            self._tell((method, arguments))
            answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for line in (self.process.stdin, self.process.stdout):
            assert line is not None
            line.close()


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, in natural order: some of every size, so that every fetcher gets some."""
    found = {"empty": torch.empty((0, 3), dtype=torch.int32)}
    for number in range(12):
        found[f"layers.{number}.weight"] = random_tensor((150, 301), seed=100 * version + number)
    found["odd"] = random_tensor((3, 1, 7), torch.uint8, version)
    found["scalar"] = random_tensor((), torch.float64, version)
    return found


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of four versions."""
    folder = tmp_path_factory.mktemp("versions")
    for version in range(1, 5):
        write_file(folder / f"step-{version}.safetensors", tensors_of(version))
    return os.fspath(folder / "step-{version}.safetensors")


def start_lines(pattern: str, fetchers: int, started: list[Line]) -> list[Line]:
    for number, environment in enumerate(actor_environments(fetchers)):
        started.append(Line(CheckpointSource(pattern), number, fetchers, environment))
    return started


@pytest.fixture
def lines(pattern: str) -> Iterator[list[Line]]:
    """Fetchers over the checkpoint, of this test alone."""
    started: list[Line] = []
    try:
        yield start_lines(pattern, FETCHERS, started)
    finally:
        for line in started:
            line.end()


@pytest.fixture(scope="module")
def steady(pattern: str) -> Iterator[list[Line]]:
    """Fetchers over the checkpoint, for all tests that leave them as they are."""
    started: list[Line] = []
    try:
        yield start_lines(pattern, FETCHERS, started)
    finally:
        for line in started:
            line.end()


def fetch(lines: list[Line], version: int | None) -> list[FetchedPart]:
    return [line.ask("fetch", version) for line in lines]


def mappings() -> int:
    """How many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:loadmaster-weights")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No mapping and no open arena is left by any test."""
    before = mappings(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    gc.collect()
    assert (mappings(), len(list(Path("/proc/self/fd").iterdir()))) == before


# Weights from parts.


@pytest.mark.processes
def test_the_parts_of_a_version_are_all_of_its_tensors_in_place_and_in_order(steady: list[Line]) -> None:
    for version in (1, 2, 3):
        parts = fetch(steady, version)
        assert all(part.handles for part in parts)
        with weights_of(parts[::-1], seconds=0.25) as weights:
            assert_all_same(dict(weights), tensors_of(version))
            assert mappings() == FETCHERS
            assert (weights.version, weights.report.version, weights.report.tensors) == (version, version, len(weights))
            assert [row.pid for row in weights.report.fetchers] == [line.process.pid for line in steady]
            assert weights.report.num_bytes == sum(tensor.nbytes for tensor in weights.values())
            assert weights.report.seconds == 0.25
        assert mappings() == 0


@pytest.mark.processes
def test_what_is_written_by_one_consumer_is_seen_by_another(steady: list[Line]) -> None:
    parts = fetch(steady, 1)
    with weights_of(parts) as one, weights_of(parts) as other:
        one["odd"].fill_(7)
        assert other["odd"].eq(7).all()


@pytest.mark.processes
def test_weights_of_one_fetcher_among_one(pattern: str) -> None:
    started: list[Line] = []
    try:
        start_lines(pattern, 1, started)
        (part,) = fetch(started, 4)
        with weights_of([part]) as weights:
            assert_all_same(dict(weights), tensors_of(4))
            assert weights.report.seconds == sum(part.report.seconds.values()) > 0
    finally:
        started[0].end()


@pytest.mark.processes
def test_weights_outlive_the_fetchers_and_handles_do_not(lines: list[Line]) -> None:
    parts = fetch(lines, 1)
    with weights_of(parts) as weights:
        for line in lines:
            line.end()
        assert_all_same(dict(weights), tensors_of(1))
    pids = "|".join(str(line.process.pid) for line in lines)
    with pytest.raises(SharedMemoryError, match=rf"process ({pids}), which held these weights, is gone"):
        weights_of(parts)


@pytest.mark.processes
def test_a_version_that_newer_ones_have_pushed_out_cannot_be_opened_any_more(
    steady: list[Line],
) -> None:
    first, second, _ = (fetch(steady, version) for version in (1, 2, 3))
    with pytest.raises(SharedMemoryError, match=r"process \d+ has closed these weights; fetch them again"):
        weights_of(first)
    with weights_of(second) as weights:
        assert_all_same(dict(weights), tensors_of(2))


@pytest.mark.processes
def test_closing_one_of_two_leaves_the_other_alone(steady: list[Line], caplog: pytest.LogCaptureFixture) -> None:
    parts = fetch(steady, 1)
    one, other = weights_of(parts), weights_of(parts)
    one.close()
    assert_all_same(dict(other), tensors_of(1))
    again = weights_of(parts)
    assert_all_same(dict(again), tensors_of(1))
    other.close()
    again.close()
    assert mappings() == 0
    assert caplog.records == []


@pytest.mark.processes
def test_weights_that_are_closed_while_a_tensor_is_used_keep_its_memory_and_say_so(
    steady: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(fetch(steady, 1))
    kept = weights["layers.3.weight"]
    weights.close()
    assert mappings() == 1
    (record,) = caplog.records
    assert (record.levelno, "while tensors of them are in use" in record.message) == (logging.WARNING, True)
    assert_all_same({"kept": kept}, {"kept": tensors_of(1)["layers.3.weight"]})


@pytest.fixture
def parts(steady: list[Line]) -> list[FetchedPart]:
    return fetch(steady, 1)


@pytest.mark.processes
def test_parts_that_do_not_belong_together_are_refused(parts: list[FetchedPart]) -> None:
    zero, one = parts
    wrong: dict[str, list[FetchedPart]] = {
        "there are no weights without the part of at least one fetcher": [],
        "parts of versions 1 and 2 cannot be put together; fetch one version from all fetchers": [
            zero,
            one._replace(version=2),
        ],
        "parts of versions None and 1 cannot be put together; fetch one version from all fetchers": [
            one,
            zero._replace(version=None),
        ],
        "the part of fetcher 0 is missing of version 1: one part of each fetcher is needed": [one],
        "the part of fetcher 1 is missing of version 1: one part of each fetcher is needed": [zero],
        "the fetchers saw different tensors in version 1; the source changed meanwhile, fetch it again": [
            zero,
            one._replace(digest="another"),
        ],
        "fetcher 0 gave two parts of version 1: one part of each fetcher is needed": [zero, one, zero],
    }
    for sentence, listed in wrong.items():
        with pytest.raises(FetchError, match=f"^{re.escape(sentence)}$"):
            weights_of(listed)


@pytest.mark.processes
def test_a_name_that_comes_twice_is_refused(parts: list[FetchedPart]) -> None:
    zero, one = parts
    name = next(iter(zero.handles))
    one.handles[name] = zero.handles[name]
    with pytest.raises(FetchError, match=f"tensor '{name}' came from two fetchers, so they saw different tensors"):
        weights_of([zero, one])


# The process of an actor.


def test_an_actor_is_told_its_place_whatever_it_has_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("LOADMASTER_LOCAL_RANK", "5"), ("LOADMASTER_LOCAL_SIZE", "6"), ("OMP_NUM_THREADS", "7")):
        monkeypatch.setenv(name, value)
    found = actor_environments(3)
    assert [row["LOADMASTER_LOCAL_RANK"] for row in found] == ["0", "1", "2"]
    assert {row["LOADMASTER_OMP_NUM_THREADS"] for row in found} == {"7"}  # what the user set stays known
    assert {row["LOADMASTER_DIR"] for row in found} == {os.environ["LOADMASTER_DIR"]}
    (group,) = {row["LOADMASTER_GROUP"] for row in found}
    assert {row["LOADMASTER_GROUP"] for row in actor_environments(3)} != {group}
    assert "PATH" not in found[0]
    monkeypatch.setenv("LOADMASTER_GROUP", "another")
    worker = actor_worker(CheckpointSource(tmp_path), 1, 3, found[1])
    assert (worker.fetcher, worker.fetchers) == (1, 3)
    assert [os.environ[f"LOADMASTER_{name}"] for name in ("LOCAL_RANK", "LOCAL_SIZE", "GROUP")] == ["1", "3", group]


@pytest.mark.processes
def test_a_fetcher_in_an_actor_has_its_share_and_a_repeated_setup_changes_nothing(
    steady: list[Line],
) -> None:
    shares = [line.ask("setup") for line in steady]
    assert [(share.rank, share.workers) for share in shares] == [(0, FETCHERS), (1, FETCHERS)]
    assert [line.ask("setup") for line in steady] == shares


@pytest.mark.parametrize("procs", [0, -1, True, 2.0, "8"])
def test_a_number_of_fetchers_is_a_positive_integer(procs: Any) -> None:
    with pytest.raises(InputError, match=f"the number of fetchers must be a positive integer, not {procs!r}"):
        check_actor_request(CheckpointSource("x"), procs)


def test_a_source_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="str is no source of tensors"):
        check_actor_request("ckpt", 2)  # type: ignore[arg-type]


# Waiting for answers.


async def soon(value: object) -> Any:
    await asyncio.sleep(0.01)
    if isinstance(value, Exception):
        raise value
    return value


def ask_all(*values: object, processes: Any = (), seconds: float = 5.0) -> list[Any]:
    async def ask() -> list[Any]:
        return await answers_of("it failed", [soon(value) for value in values], processes, seconds)

    return run_here(ask(), "await it")


class RemoteError(Exception):
    """As an actor system raises it: the text of a traceback, and the error that was raised there."""

    def __init__(self, text: str, **inner: Exception) -> None:
        super().__init__(text)
        self.__dict__.update(inner)


WORDS = {
    "one of ours": (CheckpointError("x.safetensors is gone"), "x.safetensors is gone"),
    "another": (ValueError("no good"), "no good"),
    "of Monarch": (RemoteError("Traceback", exception=CheckpointError("x is gone")), "x is gone"),
    "of Ray": (RemoteError("Traceback", cause=ValueError("no good")), "ValueError: no good"),
    "without words": (RuntimeError(), "RuntimeError"),
    "a death": (RemoteError("The actor failed:\n  it was killed\n\n"), "it was killed"),
    "a long one": (RemoteError("word " * 200), "word " * 58 + "word ..."),
}


@pytest.mark.parametrize(("error", "words"), WORDS.values(), ids=WORDS)
def test_an_answer_that_is_an_error_is_told_in_the_words_of_who_raised_it(error: Exception, words: str) -> None:
    with pytest.raises(FetchError) as caught:
        ask_all(1, error)
    assert str(caught.value) == f"it failed: fetcher 1: {words}"
    assert caught.value.__cause__ is error


def test_answers_come_in_order() -> None:
    assert ask_all("a", "b", None) == ["a", "b", None]


def test_an_answer_that_never_comes_is_given_up_in_time() -> None:
    async def ask() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await answers_of("it failed", [soon(1), never, never], [], 0.3)

    started = time.monotonic()
    with pytest.raises(FetchError) as caught:
        run_here(ask(), "await it")
    assert str(caught.value) == ("it failed: fetcher 1 gave no answer in 0.3 s; fetcher 2 gave no answer in 0.3 s")
    assert time.monotonic() - started < 5


@pytest.mark.processes
def test_a_process_that_dies_is_seen_although_its_answer_never_comes() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        processes = [psutil.Process(), psutil.Process(sleeper.pid)]

        async def ask() -> None:
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.2, sleeper.kill)
            await answers_of("it failed", [never, never], processes, 60)

        started = time.monotonic()
        with pytest.raises(FetchError) as caught:
            run_here(ask(), "await it")
        gone = f"its process {sleeper.pid} is gone, possibly killed, possibly out of memory"
        assert str(caught.value) == f"it failed: fetcher 1: {gone}"
        assert time.monotonic() - started < 10
        with pytest.raises(FetchError, match=gone):  # the actor system's own words of it are not better
            ask_all(1, RemoteError("it died"), processes=processes)
        with pytest.raises(FetchError, match=r"^it failed: fetcher 0: it was unwell$"):  # this one lives
            ask_all(RemoteError("it was unwell"), 1, processes=processes[:1] * 2)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_where_an_event_loop_runs_a_call_that_blocks_names_the_other() -> None:
    async def inside() -> None:
        with pytest.raises(InputError, match=r"this thread runs an event loop, .*; await that instead"):
            run_here(soon(1), "await that")

    asyncio.run(inside())


def test_an_interrupt_ends_what_was_waited_for() -> None:
    ended: list[str] = []

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.05, interrupt)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(wait(), "await it")
    assert ended == ["waiting"]


@pytest.mark.processes
def test_a_death_that_is_told_before_the_process_is_gone_is_one() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        told = RemoteError("Worker exit type: SYSTEM_ERROR")

        async def ask() -> None:
            asyncio.get_running_loop().call_later(0.1, sleeper.kill)
            await answers_of("it failed", [soon(told)], [psutil.Process(sleeper.pid)], 60)

        with pytest.raises(FetchError, match=f"fetcher 0: its process {sleeper.pid} is gone") as caught:
            run_here(ask(), "await it")
        assert caught.value.__cause__ is told
    finally:
        sleeper.kill()
        sleeper.wait()


# A frontend: processes with a line to each stand in for an actor system, so that this runs without one.


class LineFetchers(ActorFetchers):
    """Fetchers behind plain lines; each call waits in a thread of its own."""

    def __init__(self, lines: list[Line], seconds: float = 60.0) -> None:
        super().__init__([line.process.pid for line in lines], seconds)
        self.lines = lines
        self.stopping: Exception | None = None

    def _ask(self, fetcher: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def put(value: Any) -> None:
            if not answer.done():
                if isinstance(value, Exception):
                    answer.set_exception(value)
                else:
                    answer.set_result(value)

        def ask() -> None:
            try:
                value = self.lines[fetcher].ask(method, *arguments)
            except EOFError:
                return  # an actor system may not say anything for long
            except Exception as error:
                value = error
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(put, value)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    async def _stop(self) -> None:
        if self.stopping is not None:
            raise self.stopping
        for line in self.lines:
            line.process.terminate()


@pytest.mark.processes
def test_fetchers_fetch_version_after_version_and_end_their_processes(lines: list[Line]) -> None:
    with LineFetchers(lines) as fetchers:
        run_here(fetchers.set_up(), "await it")
        assert [share.rank for share in fetchers.shares] == [0, 1]
        assert fetchers.pids() == [line.process.pid for line in lines]
        for version in (1, 2, 1):
            with fetchers.fetch(version) as weights:
                assert_all_same(dict(weights), tensors_of(version))
                slowest = max(sum(row.seconds.values()) for row in weights.report.fetchers)
                assert weights.report.seconds >= slowest * 0.5

        async def both() -> None:
            with await fetchers.afetch(3) as weights:
                assert_all_same(dict(weights), tensors_of(3))
            with pytest.raises(InputError, match="await afetch instead"):
                fetchers.fetch(3)

        asyncio.run(both())
    assert [line.process.wait(10) for line in lines] == [-signal.SIGTERM] * FETCHERS
    fetchers.close()
    with pytest.raises(FetchError, match="these fetchers are closed"):
        fetchers.fetch(1)


@pytest.mark.processes
def test_a_fetcher_that_raises_is_named_and_fetches_again(lines: list[Line]) -> None:
    with LineFetchers(lines) as fetchers:
        for _ in range(2):
            with pytest.raises(
                FetchError, match=r"version 9 could not be fetched: fetcher \d: .*step-9.* does not exist"
            ):
                fetchers.fetch(9)
        with fetchers.fetch(2) as weights:
            assert_all_same(dict(weights), tensors_of(2))


@pytest.mark.processes
def test_a_fetcher_that_dies_between_two_versions_is_named_at_once(lines: list[Line]) -> None:
    with LineFetchers(lines) as fetchers:
        fetchers.fetch(1).close()
        lines[0].process.kill()
        lines[0].process.wait()
        with pytest.raises(FetchError) as caught:
            fetchers.fetch(2)
        assert str(caught.value) == (
            f"version 2 could not be fetched: fetcher 0: its process {lines[0].process.pid} is gone, possibly killed, "
            "possibly out of memory; close these fetchers and start new ones"
        )


@pytest.mark.processes
def test_a_fetcher_that_is_stopped_is_given_up_in_time_and_ended(
    lines: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    fetchers = LineFetchers(lines, seconds=1.0)
    run_here(fetchers.set_up(), "await it")
    lines[1].process.send_signal(signal.SIGSTOP)
    with pytest.raises(FetchError, match=r"^version 1 could not be fetched: fetcher 1 gave no answer in 1 s$"):
        fetchers.fetch(1)
    fetchers.stopping = RuntimeError("the controller is gone")
    fetchers.close()
    assert [line.process.wait(10) for line in lines] == [-signal.SIGKILL] * FETCHERS
    assert "the fetchers were not ended by their actor system: the controller is gone" in caplog.text


def test_natural_order_of_a_hundred_thousand_names_is_quick() -> None:
    names = [f"model.layers.{layer}.experts.{expert}.weight" for layer in range(100) for expert in range(1000)]
    started = time.perf_counter()
    assert sorted(sorted(names), key=_natural) == names
    assert time.perf_counter() - started < 10


@pytest.mark.processes
@pytest.mark.parametrize("versions", [(1, 2, 3, 4), (1, 1, 1)], ids=["four", "the same again"])
def test_a_fetcher_keeps_the_memory_of_two_versions_and_no_more(lines: list[Line], versions: tuple[int, ...]) -> None:
    for number, version in enumerate(versions, 1):
        lines[0].ask("fetch", version)
        maps = Path(f"/proc/{lines[0].process.pid}/maps").read_text()
        assert maps.count("memfd:loadmaster-weights") == min(2, number)
