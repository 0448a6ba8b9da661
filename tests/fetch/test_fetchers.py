"""Fetchers that go well: the bytes are right, the processes are set up once, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import loadmaster as lm
from checkpoint.helpers.files import assert_all_same, random_tensor, write_shards
from checkpoint.helpers.waiting import in_time
from launch.helpers.leftovers import child_processes, open_files, thread_names
from loadmaster.checkpoint.dtypes import DTYPES, torch_dtype
from loadmaster.errors import CheckpointError, FetchCancelledError, FetchError, InputError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.fetchers import Fetchers
from loadmaster.host import host
from loadmaster.share import plan_shares
from loadmaster.share.lease import live_leases

from .fetch_sources import Ordered, Orders, arenas_of, check_weights, order, until

pytestmark = pytest.mark.processes

PROCS = 2


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def progress() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def pool(orders: Orders, progress: list[tuple[int, int]]) -> Iterator[Fetchers]:
    """One pool for the tests that end with all its fetchers alive; it starts with the first fetch."""
    before = open_files(), child_processes(), thread_names()
    made = Fetchers(orders.source, PROCS, progress=lambda done, total: progress.append((done, total)))
    yield made
    made.close()
    gc.collect()
    after = open_files(), child_processes(), thread_names()
    assert [sorted(new - old, key=str) for new, old in zip(after, before, strict=True)] == [[], [], []]


def fetch(pool: Fetchers, version: int | None = None, seconds: float = 30.0) -> Any:
    return in_time(lambda: pool.fetch(version), pool.close, seconds)


@pytest.fixture(autouse=True)
def before() -> set[int]:
    """The arenas that are mapped here before a test."""
    gc.collect()
    return arenas_of(os.getpid())


def check_nothing_mapped(pool: Fetchers, before: set[int]) -> None:
    gc.collect()
    until(lambda: arenas_of(os.getpid()) <= before, 5, "memory is still mapped here")
    until(lambda: not any(arenas_of(process) for process in pool.pids()), 5, "memory is still mapped in fetchers")


def all_kinds(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """A checkpoint of two files with every dtype, a large tensor, and tensors without elements or dimensions."""
    names = [name for name, dtype in DTYPES.items() if dtype.torch_name and dtype.bits >= 8 and "FNUZ" not in name]
    first = {name: random_tensor((3, 7), torch_dtype(name), seed + number) for number, name in enumerate(names)}
    second = {
        "large": random_tensor((700, 999), torch.bfloat16, seed),
        "none": torch.empty((0, 4)),
        "scalar": random_tensor((), torch.float32, seed),
        **{f"small{number}": random_tensor((number, 3), torch.float32, seed) for number in range(50)},
    }
    return {"a.safetensors": first, "b.safetensors": second}


def test_the_bytes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    for version in (1, 2):
        write_shards(tmp_path / f"step-{version}", all_kinds(version))
    with Fetchers(CheckpointSource(tmp_path / "step-{version}"), 3) as pool:
        for version in (1, 2, 1):
            shards = all_kinds(version)
            with fetch(pool, version) as weights:
                assert weights.version == version
                wanted = {**shards["a.safetensors"], **shards["b.safetensors"]}
                assert_all_same({name: weights[name] for name in wanted}, wanted)
                assert set(weights) == set(wanted)
        with pytest.raises(CheckpointError):
            fetch(pool, 7)
        fetch(pool, 2).close()


def test_one_process_is_enough_and_weights_outlive_it(orders: Orders, before: set[int]) -> None:
    orders.give()
    with Fetchers(orders.source, 1) as pool:
        weights = fetch(pool, 3)
        pool.prefetch(4)  # nobody takes it
        until(lambda: sum(line.startswith("4 ") for line in orders.log()) == 12, 30)
    assert len(weights) == 12
    check_weights(weights, 3)
    weights.close()
    gc.collect()
    assert arenas_of(os.getpid()) <= before


def test_a_large_tensor_is_read_by_several(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "meet", PROCS), tensors={"large": (1001, 997), "little": (3, 3)})
    with fetch(pool, 4) as weights:
        check_weights(weights, 4)
    assert {line.split()[-1] for line in orders.log() if " large " in line} == {"0", "1"}


@pytest.mark.parametrize(
    "tensors",
    [{}, {"one": (5,)}, {"none": (0, 3)}, {"scalar": ()}, {"none": (7, 0), "scalar": (), "one": (1 << 17,)}],
    ids=len,
)
def test_fewer_tensors_than_fetchers(tensors: dict[str, tuple[int, ...]], pool: Fetchers, orders: Orders) -> None:
    orders.give(tensors=tensors)
    with fetch(pool, 5) as weights:
        assert list(weights) == list(tensors)
        check_weights(weights, 5)


def test_many_small_tensors(pool: Fetchers, orders: Orders) -> None:
    orders.give(tensors={f"n{number}": (number % 7, 5) for number in range(5000)})
    with fetch(pool, 6) as weights:
        assert len(weights) == 5000
        check_weights(weights, 6)


def test_a_version_may_be_none(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    with fetch(pool) as weights:
        assert weights.version is None
        check_weights(weights, None)


def test_the_same_version_again_is_read_again(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    for _ in range(3):
        with fetch(pool, 8) as weights:
            check_weights(weights, 8)
    assert len(orders.log()) == 3 * 12


def test_weights_keep_the_order_of_the_source(pool: Fetchers, orders: Orders) -> None:
    tensors = {f"n{number}": (size, 5) for number, size in enumerate([3, 90_000, 0, 1, 40_000, 7])}
    orders.give(tensors=tensors)
    with fetch(pool, 9) as weights:
        assert list(weights) == list(tensors)


def test_progress_only_rises_and_ends_with_all(pool: Fetchers, orders: Orders, progress: list[tuple[int, int]]) -> None:
    orders.give()
    progress.clear()
    with fetch(pool, 10) as weights:
        total = weights.report.num_bytes
    placed = [done for done, _ in progress]
    assert {row[1] for row in progress} == {total}
    assert placed == sorted(set(placed))
    assert placed[-1] == total == 12 * 128 << 10


def test_the_report_adds_up(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "meet", PROCS))
    with fetch(pool, 11) as weights:
        report = weights.report
    assert (report.version, report.tensors, report.num_bytes, report.failures) == (11, 12, 12 * 128 << 10, ())
    assert [row.fetcher for row in report.fetchers] == [0, 1]
    assert sorted(row.pid for row in report.fetchers) == sorted(pool.pids())
    assert sum(row.num_bytes for row in report.fetchers) == report.num_bytes
    assert sum(row.bundles for row in report.fetchers) == 12
    assert sum(row.tensors for row in report.fetchers) == 12
    for row in report.fetchers:
        assert 0 <= row.stolen <= row.bundles
        assert sum(row.seconds.values()) <= report.seconds + 1
        assert row.threads >= 1
        assert row.why


def test_a_part_of_a_tensor_counts_as_one_tensor_in_all(pool: Fetchers, orders: Orders) -> None:
    orders.give(tensors={"large": (1001, 997)})
    with fetch(pool, 12) as weights:
        report = weights.report
    assert report.tensors == 1
    assert sum(row.num_bytes for row in report.fetchers) == 1001 * 997


def test_fetchers_are_set_up_once_with_their_share(pool: Fetchers, orders: Orders) -> None:
    shares = [share.threads for share in plan_shares(host(), PROCS)]
    found = []
    for version in (13, 14):
        orders.give(tensors={"threads": (4,)})
        with fetch(pool, version) as weights:
            found.append(weights["threads"].tolist())
    for intra, inter, process, parent in found:
        assert intra in shares
        assert inter == intra
        assert process in pool.pids()
        assert parent == os.getpid()


def test_fetchers_are_spawned_and_never_forked(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    fetch(pool, 15).close()
    for number, process in enumerate(pool.pids()):
        command = psutil.Process(process).cmdline()
        assert command[-2:] == ["loadmaster.fetch.worker", f"fetcher={number}"]


def test_fetchers_hold_leases_while_they_fetch_and_no_longer(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "wait", "go"))
    pool.prefetch(16)
    until(lambda: orders.waiting("go") == [0, 1], 30)
    held = sorted(row.pid for row in live_leases())
    orders.sign("go")
    fetch(pool, 16).close()
    assert held == sorted(pool.pids())
    until(lambda: live_leases() == [])


def test_fetchers_let_the_memory_go(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    orders.give()
    with fetch(pool, 17) as weights:
        until(lambda: not any(arenas_of(process) for process in pool.pids()))
        check_weights(weights, 17)
    check_nothing_mapped(pool, before)


def test_handles_open_elsewhere_while_the_weights_are_open(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    with fetch(pool, 18) as weights:
        check_weights({name: handle.open() for name, handle in weights.handles().items()}, 18)


# Without a wait, in other ways, and at the wrong time.


def test_an_event_loop_is_not_blocked(pool: Fetchers, orders: Orders) -> None:
    async def run() -> int:
        orders.give(order("*", "wait", "go"))
        task = asyncio.ensure_future(pool.afetch(20))
        turns = 0
        while orders.waiting("go") == []:
            turns += 1
            await asyncio.sleep(0.01)
        orders.sign("go")
        with await asyncio.wait_for(task, 30) as weights:
            check_weights(weights, 20)
        return turns

    assert asyncio.run(run()) >= 1


def test_a_cancelled_task_gives_its_fetch_up(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    async def run() -> None:
        orders.give(order("*", "wait", "go", version=21))
        task = asyncio.ensure_future(pool.afetch(21))
        while orders.waiting("go") == []:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        orders.sign("go")
        with await asyncio.wait_for(pool.afetch(22), 30) as weights:
            check_weights(weights, 22)

    asyncio.run(run())
    check_nothing_mapped(pool, before)


def test_a_cancelled_task_whose_fetch_is_done_leaves_nothing(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    async def run() -> None:
        orders.give()
        task = asyncio.ensure_future(pool.afetch(23))
        await asyncio.sleep(0)
        end = time.monotonic() + 30
        while len(orders.log()) < 12 and time.monotonic() < end:  # blocks the loop until the fetch is over
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    check_nothing_mapped(pool, before)


def test_threads_may_fetch_at_once(pool: Fetchers, orders: Orders) -> None:
    """A later request gives an earlier one up; what comes back is right, and one of them gets there."""
    orders.give(order("*", "sleep", 0.002))
    got: list[int] = []
    given_up: list[str] = []
    unforeseen: list[BaseException] = []

    def run(version: int) -> None:
        try:
            with pool.fetch(version) as weights:
                check_weights(weights, version)
                got.append(version)
        except FetchCancelledError as error:
            given_up.append(str(error))
        except BaseException as error:
            unforeseen.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(version,), daemon=True) for version in (30, 31, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        hung = any(thread.is_alive() for thread in threads)
        if hung:
            pool.close()
        assert not hung, "a fetch hangs"
        assert unforeseen == []
    assert len(got) >= 3
    assert len(got) + len(given_up) == 9


def test_making_a_pool_starts_nothing(orders: Orders) -> None:
    before = child_processes(), thread_names(), open_files()
    pool = Fetchers(orders.source, 4)
    assert (child_processes(), thread_names(), open_files()) == before
    assert pool.pids() == []
    pool.close()
    pool.close()
    assert (child_processes(), thread_names(), open_files()) == before


def test_a_pool_that_is_closed_refuses(orders: Orders) -> None:
    pool = Fetchers(orders.source, 1)
    pool.close()
    for call in (pool.start, pool.prefetch, pool.fetch):
        with pytest.raises(FetchError, match="these fetchers are closed"):
            in_time(call, lambda: None)
    with pytest.raises(FetchError, match="these fetchers are closed"), pool:
        raise AssertionError("a closed pool was entered")


def test_closing_gives_up_what_is_being_fetched(orders: Orders) -> None:
    orders.give(order("*", "wait", "never"))
    before = child_processes()
    pool = Fetchers(orders.source, 1)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            pool.fetch(1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: orders.waiting("never") == [0], 30)
    in_time(pool.close, lambda: None)
    thread.join(5)
    assert [type(error) for error in caught] == [FetchCancelledError]
    assert child_processes() == before


def test_a_request_that_comes_while_the_pool_closes_is_answered(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.give()
    pool = Fetchers(orders.source, 1)
    inner = pool._pool
    start = inner.start

    def start_and_close() -> None:
        """Another thread closes the pool between the check and the request."""
        start()
        closing = threading.Thread(target=inner.close)
        closing.start()
        closing.join(10)

    monkeypatch.setattr(inner, "start", start_and_close)
    done = threading.Event()
    caught: list[BaseException] = []

    def run() -> None:
        try:
            pool.fetch(1)
        except BaseException as error:
            caught.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    answered = done.wait(15)
    pool.close()
    assert answered, "this fetch waits for ever"
    assert isinstance(caught[0], FetchError)


@pytest.mark.parametrize("procs", [0, -1, 1.0, True, "2", None])
def test_the_number_of_fetchers_is_checked(procs: Any, orders: Orders) -> None:
    with pytest.raises(InputError, match="must be a positive integer"):
        Fetchers(orders.source, procs)


def test_a_source_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="it lacks names and entry and one of"):
        Fetchers(object(), 1)  # type: ignore[arg-type]


def test_a_source_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    source = Ordered(tmp_path)
    source.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"the source Ordered cannot be pickled for the fetchers: .*lock"):
        Fetchers(source, 1)


def test_the_names_are_public() -> None:
    assert lm.Fetchers is Fetchers


class AsyncOrdered(Ordered):
    """The same with async functions."""

    closed = 0

    async def names(self, version: int | None) -> list[str]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().names(version)

    async def close(self) -> None:
        type(self).closed += 1


@pytest.mark.filterwarnings("error")
def test_an_async_source_is_closed_with_its_loop(orders: Orders) -> None:
    orders.give()
    AsyncOrdered.closed = 0
    with Fetchers(AsyncOrdered(orders.folder), 1) as pool, fetch(pool, 3) as weights:
        check_weights(weights, 3)
    assert AsyncOrdered.closed == 1
    del pool, weights
    gc.collect()


def test_progress_that_raises_ends_this_fetch_and_not_the_pool(orders: Orders) -> None:
    orders.give()
    wrong = [True]

    def progress(done: int, total: int) -> None:
        if wrong:
            wrong.clear()
            raise ZeroDivisionError("no progress")

    with Fetchers(orders.source, 1, progress=progress) as pool:
        with pytest.raises((ZeroDivisionError, FetchError), match="no progress"):
            fetch(pool, 1)
        with fetch(pool, 2) as weights:
            check_weights(weights, 2)


def test_a_large_source_reaches_fetchers_that_start_slowly(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits into a socket, to a process that takes longer to start than a message may lie unread."""
    orders.give()
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(4)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = Ordered(orders.folder)
    source.payload = b"x" * (4 << 20)  # type: ignore[attr-defined]
    with Fetchers(source, 1) as pool, fetch(pool, 2, seconds=40) as weights:
        check_weights(weights, 2)


class AsksForTheCollector:
    """Tells whether garbage is collected while a source is asked, which may take long."""

    def names(self, version: int | None) -> list[str]:
        raise InputError(f"the collector is {'on' if gc.isenabled() else 'off'}")

    def entry(self, name: str) -> object:
        raise NotImplementedError

    def get(self, name: str) -> object:
        raise NotImplementedError


def test_the_collector_of_the_consumer_goes_on_while_a_source_is_asked() -> None:
    with Fetchers(AsksForTheCollector(), 1) as fetchers, pytest.raises(InputError, match="the collector is on"):
        fetchers.fetch()
