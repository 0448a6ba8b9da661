"""An executor for loaders: its workers and their teams together stay inside the share."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.threads.pool import divide_pool
from threads.conftest import counts, mkl_threads, needs_two_cpus, os_threads, wait_until


def in_each_worker(pool: Any, workers: int, function: Callable[[], Any]) -> list[Any]:
    """Call ``function`` in every worker; they all run at the same time."""
    meeting = threading.Barrier(workers)

    def work() -> Any:
        meeting.wait(60)
        return function()

    return [future.result() for future in [pool.submit(work) for _ in range(workers)]]


def most_at_once(pool: Any, tasks: int) -> int:
    """Hand ``tasks`` in that each stay a moment, and see how many run at the same time."""
    lock, inside, seen = threading.Lock(), set(), []

    def work() -> None:
        with lock:
            inside.add(threading.get_ident())
            seen.append(len(inside))
        time.sleep(0.002)
        with lock:
            inside.discard(threading.get_ident())

    for future in [pool.submit(work) for _ in range(tasks)]:
        future.result()
    return max(seen)


@pytest.mark.parametrize(
    ("threads", "max_workers", "workers", "team"),
    [
        (1, None, 1, 1),
        (4, None, 4, 1),
        (4, 32, 4, 1),
        (4, 2, 2, 2),
        (4, 3, 3, 1),
        (4, 1, 1, 4),
        (7, 2, 2, 3),
        (1, 32, 1, 1),
    ],
)
def test_workers_and_their_teams(threads: int, max_workers: int | None, workers: int, team: int) -> None:
    assert divide_pool(threads, max_workers) == (workers, team)


@given(threads=st.integers(1, 300), max_workers=st.none() | st.integers(1, 300))
def test_workers_times_team_is_inside_the_share_and_one_more_each_would_not_be(
    threads: int, max_workers: int | None
) -> None:
    workers, team = divide_pool(threads, max_workers)
    assert 1 <= workers <= (max_workers or threads)
    assert workers * team <= threads < workers * (team + 1)


@needs_two_cpus
@pytest.mark.parametrize(("before", "max_workers", "workers", "team"), [(2, 32, 2, 1), (1, 32, 2, 1), (1, 1, 1, 2)])
def test_the_workers_have_their_teams_and_what_they_start_is_no_larger(
    before: int, max_workers: int, workers: int, team: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(before)
    with caplog.at_level(logging.INFO, "loadmaster"), lm.load_pool(max_workers, 2) as pool:
        assert pool._max_workers == workers
        assert in_each_worker(pool, workers, counts) == [(team, min(before, team))] * workers
        assert set(in_each_worker(pool, workers, mkl_threads)) <= {team, None}
        assert counts() == (2, min(before, team))
    assert counts() == (before, before)
    assert [line for line in caplog.messages if line.startswith(f"load pool: {workers} workers with {team} threads")]


@needs_two_cpus
def test_a_worker_keeps_its_team_after_it_has_worked() -> None:
    def load() -> int:
        torch.ones(1 << 18).add_(1)
        return torch.get_num_threads()

    with lm.load_pool(threads=2) as pool:
        assert in_each_worker(pool, 2, load) == [1, 1]
        assert in_each_worker(pool, 2, load) == [1, 1]


def test_auto_is_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    with lm.load_pool(max_workers=8) as pool:
        assert pool.submit(counts).result() == (1, 1)
        assert most_at_once(pool, 8) == 1
    assert counts() == (2, 2)


def test_the_tasks_are_waited_for() -> None:
    done = []
    gate = threading.Event()

    def load(number: int) -> None:
        gate.wait(60)
        done.append(number)

    with lm.load_pool(1, 1) as pool:
        for number in range(5):
            pool.submit(load, number)
        gate.set()
    assert done == list(range(5))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_cancels_what_has_not_begun(kind: type[BaseException]) -> None:
    begun, gate = threading.Event(), threading.Event()
    futures = []

    def load() -> None:
        begun.set()
        gate.wait(60)

    def fail() -> None:
        with lm.load_pool(1, 1) as pool:
            futures.extend([pool.submit(load) for _ in range(4)])
            begun.wait(60)
            threading.Thread(target=lambda: (wait_until(futures[-1].cancelled), gate.set())).start()
            raise kind("of the engine")

    with pytest.raises(kind, match="of the engine"):
        fail()
    assert [future.cancelled() for future in futures] == [False, True, True, True]
    assert counts() == (2, 2)


@needs_two_cpus
@pytest.mark.parametrize("max_workers", [1, 2])
def test_no_thread_is_left(max_workers: int) -> None:
    """Neither a worker nor a member of a worker's team."""

    def load() -> set[str]:
        torch.ones(1 << 20).add_(1)
        return os_threads()

    before = os_threads()
    with lm.load_pool(max_workers, 2) as pool:
        new = set().union(*in_each_worker(pool, max_workers, load)) - before
    assert len(new) >= 2
    assert wait_until(lambda: not new & os_threads())


def test_an_error_of_a_task_is_the_callers_to_ask_for() -> None:
    with lm.load_pool(1, 1) as pool:
        future = pool.submit(int, "no number")
        with pytest.raises(ValueError, match="no number"):
            future.result()
    assert counts() == (2, 2)


@pytest.mark.parametrize("max_workers", [0, -1, 1.5, True, "2"], ids=repr)
def test_a_number_of_workers_that_is_none_is_an_error_that_names_it(max_workers: Any) -> None:
    with pytest.raises(InputError, match="max_workers must be a positive") as caught, lm.load_pool(max_workers):
        pytest.fail("the block is not to run")
    assert repr(max_workers) in str(caught.value)


def test_a_number_of_threads_that_is_none_is_an_error() -> None:
    with pytest.raises(InputError, match="threads must be a positive integer or 'auto'"), lm.load_pool(1, 0):
        pytest.fail("the block is not to run")
    assert counts() == (2, 2)


def test_a_pool_within_a_scope_and_a_scope_within_a_worker() -> None:
    def load() -> tuple[int, int]:
        with lm.load_threads(1):
            within = torch.get_num_threads()
        return within, torch.get_num_threads()

    with contextlib.ExitStack() as stack:
        stack.enter_context(lm.load_threads(1))
        pool = stack.enter_context(lm.load_pool(threads=1))
        assert pool.submit(load).result() == (1, 1)
    assert counts() == (2, 2)
