"""An executor whose workers and their teams together stay inside the share of this process.

    share of 4 threads    max_workers=32 -> 4 workers with 1 thread each
                          max_workers=2  -> 2 workers with 2 threads each

Engines run a pool of module loaders over a checkpoint; each worker starts a team of its own, and 32 workers with teams
of 8 are 256 threads. Workers beyond the share would only wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from loadmaster.errors import InputError
from loadmaster.threads.openmp import set_threads_here, torch_backend
from loadmaster.threads.process import process_counts
from loadmaster.threads.scope import Threads, load_threads

__all__ = ["divide_pool", "load_pool"]

_log = logging.getLogger(__name__)


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
    with load_threads(threads) as share, contextlib.ExitStack() as stack:
        workers, team = divide_pool(share.threads, max_workers)
        if torch_backend() == "OpenMP":
            pool = object()
            stack.callback(process_counts().leave, pool)
            process_counts().join(pool, team)  # threads that a task starts
        _log.info("load pool: %d workers with %d threads each (%s)", workers, team, share.why)
        executor = ThreadPoolExecutor(
            workers, thread_name_prefix="loadmaster-pool", initializer=set_threads_here, initargs=(team,)
        )
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise
        executor.shutdown(wait=True)


def divide_pool(threads: int, max_workers: int | None) -> tuple[int, int]:
    """Return the number of workers and the size of each one's team."""
    workers = min(threads, max_workers or threads)
    return workers, max(1, threads // workers)
