"""Two versions at a time: prefetched, given up for newer ones, refused, and memory that is used again."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint.helpers.waiting import in_time
from loadmaster.errors import FetchCancelledError, FetchError
from loadmaster.fetch.fetchers import Fetchers
from loadmaster.fetch.weights import Weights

from .fetch_sources import Orders, arenas_of, check_weights, order, truth, until

pytestmark = pytest.mark.processes

PROCS = 2


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def pools(orders: Orders) -> Iterator[dict[bool, Fetchers]]:
    """A pool that gives memory back and one that keeps it; each starts with its first fetch."""
    made = {keeps: Fetchers(orders.source, PROCS, keep_memory=keeps) for keeps in (False, True)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def pool(pools: dict[bool, Fetchers]) -> Fetchers:
    return pools[False]


@pytest.fixture
def keeping(pools: dict[bool, Fetchers]) -> Fetchers:
    return pools[True]


@pytest.fixture(autouse=True)
def before() -> set[int]:
    """The arenas that are mapped here before a test."""
    gc.collect()
    return arenas_of(os.getpid())


def fetch(pool: Fetchers, version: int | None, seconds: float = 30.0) -> Weights:
    found: Weights = in_time(lambda: pool.fetch(version), pool.close, seconds)
    return found


class Fetching:
    """A fetch in a thread; ``end`` gives what became of it."""

    def __init__(self, pool: Fetchers, version: int) -> None:
        self._pool = pool
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(version,), daemon=True)
        self._thread.start()

    def _run(self, version: int) -> None:
        try:
            self._found.append(self._pool.fetch(version))
        except BaseException as error:
            self._found.append(error)

    def end(self, seconds: float = 15.0) -> Any:
        self._thread.join(seconds)
        hung = self._thread.is_alive()
        if hung:
            self._pool.close()
        assert not hung, "this fetch hangs"
        return self._found.pop()


def inodes(weights: Weights) -> set[int]:
    return {handle.arena.inode for handle in weights.handles().values()}


def reads_of(orders: Orders, version: int) -> int:
    return sum(line.startswith(f"{version} ") for line in orders.log())


def check_nothing_mapped(pool: Fetchers, before: set[int]) -> None:
    gc.collect()
    until(lambda: arenas_of(os.getpid()) <= before, 5, "memory is still mapped here")
    until(lambda: not any(arenas_of(process) for process in pool.pids()), 5, "memory is still mapped in fetchers")


def test_fetch_waits_for_what_is_prefetched(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("t05", "wait", "go"))
    pool.prefetch(1)
    until(lambda: orders.waiting("go"), 30)
    fetching = Fetching(pool, 1)
    orders.sign("go")
    with fetching.end() as weights:
        check_weights(weights, 1)
    assert reads_of(orders, 1) == 12


def test_what_is_prefetched_is_read_once(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    pool.prefetch(2)
    pool.prefetch(2)
    until(lambda: reads_of(orders, 2) == 12, 30)
    with fetch(pool, 2) as weights:
        check_weights(weights, 2)
        with fetch(pool, 2) as again:  # taken once, and read anew now
            check_weights(again, 2)
    assert reads_of(orders, 2) == 24


def test_one_version_is_served_while_the_next_is_prefetched(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    orders.give()
    weights = fetch(pool, 10)
    for version in range(11, 15):
        pool.prefetch(version)
        check_weights(weights, version - 1)
        weights.close()
        weights = fetch(pool, version)
        check_weights(weights, version)
    weights.close()
    check_nothing_mapped(pool, before)


def test_another_version_than_the_prefetched_one(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    orders.give(order("*", "wait", "go", version=20))
    pool.prefetch(20)
    until(lambda: orders.waiting("go") == [0, 1], 30)
    fetching = Fetching(pool, 21)
    orders.sign("go")
    with fetching.end() as weights:
        check_weights(weights, 21)
    assert reads_of(orders, 20) == 2  # only what was under way
    check_nothing_mapped(pool, before)


def test_a_complete_version_that_was_prefetched_for_nothing_is_forgotten(
    pool: Fetchers, orders: Orders, before: set[int]
) -> None:
    orders.give()
    with fetch(pool, 22):
        pool.prefetch(23)
        until(lambda: reads_of(orders, 23) == 12, 30)
        with fetch(pool, 24) as weights:  # would be the third otherwise
            check_weights(weights, 24)
    check_nothing_mapped(pool, before)


def test_a_newer_version_gives_up_the_one_that_is_being_fetched(
    pool: Fetchers, orders: Orders, before: set[int]
) -> None:
    orders.give(order("*", "wait", "go", version=30))
    older = Fetching(pool, 30)
    until(lambda: orders.waiting("go") == [0, 1], 30)
    newer = Fetching(pool, 31)
    error = older.end()
    assert isinstance(error, FetchCancelledError)
    assert str(error) == "version 30 was given up for version 31"
    orders.sign("go")
    with newer.end() as weights:
        check_weights(weights, 31)
        assert reads_of(orders, 31) == 12
    assert reads_of(orders, 30) == 2
    check_nothing_mapped(pool, before)


def test_many_versions_one_after_the_other_and_only_the_last_counts(
    pool: Fetchers, orders: Orders, before: set[int]
) -> None:
    orders.give(order("*", "sleep", 0.003))
    fetchings = {version: Fetching(pool, version) for version in range(40, 52)}
    found = {version: fetching.end() for version, fetching in fetchings.items()}
    complete = {version: weights for version, weights in found.items() if isinstance(weights, Weights)}
    assert complete
    for version, weights in complete.items():
        check_weights(weights, version)
        weights.close()
    assert {type(error) for version, error in found.items() if version not in complete} <= {
        FetchCancelledError,
        FetchError,  # where two versions were complete and not closed yet
    }
    check_nothing_mapped(pool, before)


def test_a_version_that_is_given_up_again_and_again_can_still_be_fetched(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "sleep", 0.01))
    for _ in range(5):
        pool.prefetch(60)
        pool.prefetch(61)
    with fetch(pool, 60) as weights:
        check_weights(weights, 60)


def test_a_third_version_is_refused_until_one_is_closed(pool: Fetchers, orders: Orders, before: set[int]) -> None:
    orders.give()
    first, second = fetch(pool, 70), fetch(pool, 71)
    with pytest.raises(FetchError) as caught:
        fetch(pool, 72)
    sentence = "versions 70 and 71 are still in memory; close one of them before version 72 is fetched"
    assert str(caught.value) == sentence
    check_weights(first, 70)
    first.close()
    with fetch(pool, 72) as third:
        check_weights(third, 72)
        check_weights(second, 71)
    second.close()
    check_nothing_mapped(pool, before)


def test_weights_that_are_collected_make_room(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    held = [fetch(pool, 73)]
    other = fetch(pool, 74)
    with pytest.warns(ResourceWarning, match=r"<Weights version 73: 12 tensors, .*> was never closed"):
        held.clear()
    fetch(pool, 75).close()
    other.close()


def test_a_prefetch_that_fails_is_tried_again_by_fetch(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("names", "fail", "not yet", parent=True, once="failed"))
    pool.prefetch(76)
    until(lambda: (orders.folder / "failed").exists())
    found = Fetching(pool, 76).end()
    if isinstance(found, FetchError):  # it was quick, and found the one that fails
        assert "not yet" in str(found)
        found = fetch(pool, 76)
    with found as weights:
        check_weights(weights, 76)


def test_tensors_in_use_keep_the_memory_of_their_version(
    pool: Fetchers, orders: Orders, before: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    orders.give()
    weights = fetch(pool, 77)
    tensor = weights["t03"]
    weights.close()
    assert "weights of version 77 were closed while tensors of them are in use" in caplog.text
    for version in (78, 79):
        with fetch(pool, version) as others:
            check_weights(others, version)
    check_weights({"t03": tensor}, 77)
    del tensor
    check_nothing_mapped(pool, before)


# Memory that is kept.


def test_kept_memory_is_used_again_and_holds_the_next_version(keeping: Fetchers, orders: Orders) -> None:
    orders.give()
    with fetch(keeping, 1) as weights:
        check_weights(weights, 1)
        first = inodes(weights)
    for version in (2, 3):
        with fetch(keeping, version) as weights:
            check_weights(weights, version)
            assert inodes(weights) == first


def test_kept_memory_is_not_used_while_a_tensor_of_it_is(keeping: Fetchers, orders: Orders) -> None:
    orders.give()
    weights = fetch(keeping, 4)
    before, tensor = inodes(weights), weights["t07"]
    weights.close()
    for version in (5, 6):
        with fetch(keeping, version) as others:
            assert inodes(others).isdisjoint(before)
            check_weights(others, version)
            check_weights({"t07": tensor}, 4)
    del tensor


def test_kept_memory_is_not_used_while_a_handle_of_it_is_open(keeping: Fetchers, orders: Orders) -> None:
    """In this process; of other processes nobody here knows."""
    orders.give()
    weights = fetch(keeping, 7)
    tensor = weights.handle("t01").open()
    assert tensor.equal(truth("t01", 7, tuple(tensor.shape)))
    del tensor
    weights.close()


def test_larger_and_smaller_versions(keeping: Fetchers, orders: Orders) -> None:
    for version, rows in ((8, 300), (9, 100), (10, 900), (11, 900)):
        orders.give(tensors={f"t{number}": (rows, 256) for number in range(5)})
        with fetch(keeping, version) as weights:
            check_weights(weights, version)
            assert {tuple(tensor.shape) for tensor in weights.values()} == {(rows, 256)}


def test_a_late_read_of_a_cancelled_version_does_not_reach_the_next_one(keeping: Fetchers, orders: Orders) -> None:
    """A fetcher still reads version 20 when the others have read version 21 to where it writes."""
    orders.give()
    fetch(keeping, 19).close()
    orders.give(order("t08", "wait", "go", version=20))
    keeping.prefetch(20)
    (stuck,) = until(lambda: orders.waiting("go"), 30)
    fetching = Fetching(keeping, 21)
    until(lambda: any(line.startswith("21 t08 ") for line in orders.log()), 30, "nobody reads t08 of version 21")
    assert all(line.split()[-1] != str(stuck) for line in orders.log() if line.startswith("21 "))
    orders.sign("go")
    with fetching.end(30) as weights:
        until(lambda: any(line.startswith("20 t08 ") for line in orders.log()))
        check_weights(weights, 21)


def test_fetchers_let_go_of_memory_that_is_not_kept(keeping: Fetchers, orders: Orders) -> None:
    """Two versions are closed and one is kept: the other one's memory is given back, without another fetch."""
    orders.give()
    with fetch(keeping, 30) as first, fetch(keeping, 31) as second:
        arenas = inodes(first), inodes(second)
    for process in [os.getpid(), *keeping.pids()]:
        until(
            lambda process=process: not all(held & arenas_of(process) for held in arenas),
            5,
            "both versions are still in memory",
        )


def test_kept_memory_goes_with_the_pool(orders: Orders, before: set[int]) -> None:
    orders.give()
    with Fetchers(orders.source, 1, keep_memory=True) as pool:
        fetch(pool, 1).close()
        left = fetch(pool, 2)
    left.close()
    gc.collect()
    assert arenas_of(os.getpid()) <= before
