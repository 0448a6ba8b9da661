"""An executor whose workers and their teams together stay inside the share of this process.

    share of 4 threads    max_workers=32 -> 4 workers with 1 thread each
                          max_workers=2  -> 2 workers with 2 threads each

Engines run a pool of module loaders over a checkpoint; each worker starts a team of its own, and 32 workers with teams
of 8 are 256 threads. Workers beyond the share would only wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from loadmaster.errors import InputError
from loadmaster.threads.openmp import set_threads_here, torch_backend
from loadmaster.threads.process import process_counts
from loadmaster.threads.scope import LoadThreads, Threads, load_threads

__all__ = ["divide_pool", "load_pool"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

WAIT_SECONDS = 0.1
"""How often a worker that waits for its place looks whether the share has grown."""


@contextlib.contextmanager
def load_pool(max_workers: int | None = None, threads: Threads = "auto") -> Iterator[ThreadPoolExecutor]:
    """Run the block with an executor for loaders: ``workers * threads of each`` is at most this process's share.

    Parameters
    ----------
    max_workers : int, optional
        The most workers; default as many as the share has threads. Fewer leave each a larger team.
    threads : int or "auto"
        As for `load_threads`.

    Yields
    ------
    concurrent.futures.ThreadPoolExecutor
        At the end of the block its tasks are waited for; when the block fails, those that have not begun are cancelled.

    Raises
    ------
    InputError
        ``max_workers`` or ``threads`` is no positive integer.
    """
    if max_workers is not None and (type(max_workers) is not int or max_workers < 1):
        raise InputError(f"load_pool: max_workers must be a positive integer, not {max_workers!r}")
    scope = load_threads(threads)
    with scope as share, contextlib.ExitStack() as stack:
        gate = _Gate(scope, max_workers)
        if torch_backend() == "OpenMP":
            stack.callback(process_counts().leave, gate)
            process_counts().join(gate, gate.team)  # threads that a task starts
        gate.say()
        most = len(share.cpus) if threads == "auto" else share.threads
        executor = _GatedExecutor(gate, max(gate.workers, min(most, max_workers or most)))
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise
        executor.shutdown(wait=True)


class _Gate:
    """Lets as many tasks run at once as the share of this moment allows, each with its part of it as a team."""

    def __init__(self, scope: LoadThreads, max_workers: int | None) -> None:
        self._scope = scope
        self._max_workers = max_workers
        self._changed = threading.Condition()
        self._running = 0
        self._seen = scope.share
        self.workers, self.team = divide_pool(self._seen.threads, max_workers)

    def __enter__(self) -> None:
        with self._changed:
            self._look()
            while self._running >= self.workers:
                self._changed.wait(WAIT_SECONDS)
                self._look()
            self._running += 1
            team = self.team
        set_threads_here(team)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify()

    def _look(self) -> None:
        now = self._scope.share_now()
        if now is not self._seen:
            self._seen = now
            before = self.workers, self.team
            self.workers, self.team = divide_pool(now.threads, self._max_workers)
            if before != (self.workers, self.team):
                self.say()

    def say(self) -> None:
        """Log the pool's form and the reason for it."""
        _log.info("load pool: %d workers with %d threads each (%s)", self.workers, self.team, self._seen.why)


class _GatedExecutor(ThreadPoolExecutor):
    """A pool whose tasks pass the gate; the workers that a smaller share has no place for wait there."""

    def __init__(self, gate: _Gate, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="loadmaster-pool")
        self._gate = gate

    def submit(self, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """As of `ThreadPoolExecutor`."""
        return super().submit(self._pass, function, *args, **kwargs)

    def _pass(self, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result:
        with self._gate:
            return function(*args, **kwargs)


def divide_pool(threads: int, max_workers: int | None) -> tuple[int, int]:
    """Return the number of workers and the size of each one's team."""
    workers = min(threads, max_workers or threads)
    return workers, max(1, threads // workers)
