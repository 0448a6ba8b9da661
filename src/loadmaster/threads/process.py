"""The counts that belong to the whole process, lowered while scopes are open and restored by the last one out.

    what new threads begin with     torch.set_num_threads
    OpenBLAS's pool                 openblas_set_num_threads

Each is the least of what it was and what the open scopes want. They are never raised: threads that start meanwhile, an
engine's pool of 32, would each begin with the raised count, and an OpenBLAS pool that was grown keeps its threads.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from loadmaster.threads.importing import import_torch
from loadmaster.threads.openmp import counts_here, run_times, set_counts_here, threads_of_new_threads

__all__ = ["ProcessCounts", "process_counts"]


class ProcessCounts:
    """The process-wide counts, and what each open scope wants them to be at most."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._wanted: dict[object, int] = {}
        self._default = self._current = 0  # 0: no scope is open
        self._pools: list[tuple[Any, int]] = []

    def join(self, scope: object, threads: int | None) -> None:
        """Lower what is above ``threads`` until ``scope`` leaves; None wants nothing lowered."""
        with self.lock:
            if not self._default:
                self._pools = [(pool, pool.num_threads) for pool in _process_wide_pools()]
                self._default = self._current = threads_of_new_threads()
            self._wanted[scope] = _NO_BOUND if threads is None else threads
            self._apply()

    def leave(self, scope: object) -> None:
        """Take back what ``scope`` wanted; the last one out restores everything. Harmless when repeated."""
        with self.lock:
            self._wanted.pop(scope, None)
            if self._default:
                if not self._wanted:
                    self._current = threads_of_new_threads()  # a loader may have set it
                self._apply()
                if not self._wanted:
                    self._default = 0

    def set_for_good(self, threads: int) -> None:
        """Make ``threads`` the count of new threads and the most of each pool, also after the scopes that are open."""
        with self.lock:
            if not self._default:
                import_torch().set_num_threads(threads)
                for pool in _process_wide_pools():
                    _set_pool(pool, min(threads, pool.num_threads))
                return
            self._default = threads
            self._pools = [(pool, min(before, threads)) for pool, before in self._pools]
            self._apply()

    def _apply(self) -> None:
        """Set each count to the least that is wanted.

        ``torch.set_num_threads`` also changes the calling thread, whose count is put back.
        """
        bound = min(self._wanted.values(), default=_NO_BOUND)
        default = min(self._default, bound)
        if self._current != default:
            here = counts_here()
            import_torch().set_num_threads(default)
            self._current = default
            set_counts_here(here)
        for pool, before in self._pools:
            _set_pool(pool, min(before, bound))


_NO_BOUND = 1 << 30

_of_process: tuple[int, ProcessCounts] | None = None


def process_counts() -> ProcessCounts:
    """Return this process's counts. A forked child begins anew: its parent's scopes are not open in it."""
    global _of_process
    pid = os.getpid()
    found = _of_process
    if found is None or found[0] != pid:
        found = _of_process = _made.setdefault(pid, (pid, ProcessCounts()))
    return found[1]


_made: dict[int, tuple[int, ProcessCounts]] = {}
"""By process number, so that two threads that come first at the same time get the same one."""


def _process_wide_pools() -> list[Any]:
    """OpenBLAS with threads of its own; every other BLAS follows OpenMP or has a count per thread."""
    return [row for row in run_times().blas if row.internal_api == "openblas"]


def _set_pool(pool: Any, threads: int) -> None:
    if pool.num_threads != threads:
        pool.set_num_threads(threads)
