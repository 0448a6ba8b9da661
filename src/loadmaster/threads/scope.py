"""The scope: torch runs with the share of this process while somebody else's loader loads.

    other processes       see that this one loads                                  `Lease`
    this thread           raised or lowered, through the OpenMP run time           `_Thread`
    threads that start    lowered, never raised; and BLAS pools of the process     `ProcessCounts`
    threads that run      cannot be changed from here

Scopes may nest, and overlap in several threads. A thread's count is that of its innermost open scope; the process-wide
counts are the least that any open scope wants. The contract, with the facts behind it: docs/openmp.md.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from loadmaster.errors import InputError
from loadmaster.host import Host, recent_host
from loadmaster.host.notices import warn_once
from loadmaster.share import Share
from loadmaster.share.lease import Lease
from loadmaster.threads.binding import binding_problem
from loadmaster.threads.forks import forked_with_torch
from loadmaster.threads.importing import import_torch, kept_affinity
from loadmaster.threads.openmp import (
    CountsHere,
    counts_here,
    release_idle_team,
    set_counts_here,
    set_threads_here,
    torch_backend,
)
from loadmaster.threads.process import process_counts

__all__ = ["LoadThreads", "load_threads"]

_log = logging.getLogger(__name__)

Threads = int | Literal["auto"]
Only = Literal["raise", "lower"]
_Function = TypeVar("_Function", bound=Callable[..., Any])

FORKED = (
    "this process was forked from one that had torch loaded, where a team of threads can wait for ever: torch runs "
    "with 1 thread here; start processes with the method 'spawn'"
)


def load_threads(threads: Threads = "auto", *, only: Only | None = None) -> LoadThreads:
    """Run a block, or a decorated function, with torch's intra-op threads at this process's share.

    The calling thread is raised or lowered, threads that start inside are lowered and never raised, and all is as
    before when the block ends, however it ends. Threads that run already keep their counts.

    Parameters
    ----------
    threads : int or "auto"
        ``auto`` is the share of this host; a number is explicit and is capped at the usable CPUs.
    only : "raise" or "lower", optional
        Leave the counts alone where they would have to move the other way.

    Returns
    -------
    LoadThreads
        Entering it gives the `Share` in force, with its reason.

    Raises
    ------
    InputError
        ``threads`` is neither ``auto`` nor a positive integer, or ``only`` is something else.
    """
    return LoadThreads(threads, only=only)


class LoadThreads:
    """The scope that `load_threads` returns: a context manager, and a decorator of functions and generator functions.

    Building one changes nothing. One object can be entered again after it was left.
    """

    def __init__(self, threads: Threads = "auto", *, only: Only | None = None) -> None:
        if threads != "auto" and (type(threads) is not int or threads < 1):
            raise InputError(f"load_threads: threads must be a positive integer or 'auto', not {threads!r}")
        if only not in (None, "raise", "lower"):
            raise InputError(f"load_threads: only must be 'raise' or 'lower', not {only!r}")
        self._threads = threads
        self._only = only
        self._entered = False
        self._share: Share | None = None
        self._wanted = self._seen = _NO_SHARE
        self._lease: Lease | None = None
        self._thread: _Thread | None = None
        self._affinity = kept_affinity()
        self._forced = False
        self._before = self._used = 0
        self._started = 0.0

    def __enter__(self) -> Share:
        if self._entered:
            raise InputError("load_threads: this scope is entered already; make one for each block")
        self._entered = True
        self._affinity = kept_affinity()
        self._affinity.__enter__()
        try:
            return self._enter()
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __call__(self, function: _Function) -> _Function:
        """Decorate ``function``: each call is a scope of its own, for a generator from its first item to its end."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InputError(
                "load_threads cannot decorate an async function: other tasks of its thread would run in the scope; "
                "use it in the function that loads"
            )
        threads, only = self._threads, self._only
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                with LoadThreads(threads, only=only):
                    return (yield from function(*args, **kwargs))

            return generate  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with LoadThreads(threads, only=only):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    def follow(self) -> Share:
        """Look at the share again, and move the counts if it has changed; an explicit number never follows.

        Nor does anything move from another thread, such as one that goes on with an iterator of `paced`: the count
        that would move is that thread's own.
        """
        assert self._share is not None
        assert self._lease is not None
        now = self._lease.look()
        if now is self._seen or self._forced or self._thread is None or not self._thread.is_here:
            return self._share
        self._seen = now
        if now.threads != self._wanted.threads:
            _log.info("torch intra-op threads: %d -> %d (%s)", self._used, now.threads, now.why)
            self._apply(now)
        return self._share

    @property
    def share(self) -> Share:
        """The share in force."""
        assert self._share is not None
        return self._share

    def share_now(self) -> Share:
        """The share at this moment, whatever is in force here; the same object as long as nothing has changed."""
        assert self._lease is not None
        return self.share if self._threads != "auto" or self._forced or self._thread is None else self._lease.look()

    def _enter(self) -> Share:
        self._started = time.monotonic()
        torch = import_torch()
        here = recent_host()
        wanted = self._decide(here)
        self._before = self._used = torch.get_num_threads()
        untouchable = _why_left_alone(sys.platform, torch_backend(), self._threads != "auto")
        if untouchable:
            self._share = replace(wanted, threads=self._before, why=untouchable)
            return self._share
        problem = binding_problem(here, wanted.threads, os.environ)
        if problem:
            warn_once(__name__, problem)
        self._thread = thread_counts()
        self._thread.open(self)
        self._before = self._thread.now
        return self._apply(wanted)

    def _decide(self, here: Host) -> Share:
        self._forced = forked_with_torch()
        self._lease = Lease(threads=None if self._threads == "auto" else self._threads, host=here, logs=False)
        self._lease.join()
        part = self._seen = self._first_look(self._lease)
        if self._forced:
            warn_once(__name__, FORKED)
            return replace(part, threads=1, why=FORKED)
        if self._threads == "auto":
            return part
        part = replace(part, why=part.why.replace("--threads", "load_threads"))
        if part.threads < self._threads:
            _log.info("load_threads(%d): %d, since only so many CPUs are usable", self._threads, part.threads)
        return part

    def _first_look(self, held: Lease) -> Share:
        """The share to begin with: a loader inside may never look again, so the first scope of a process settles."""
        pid = os.getpid()
        if self._threads != "auto" or pid in _settled or self._forced:
            return held.look()
        part = held.settle()
        _settled.add(pid)
        return part

    def _apply(self, wanted: Share) -> Share:
        """Bring this thread and the process to a share, as far as ``only`` lets them move; return what is in force."""
        assert self._thread is not None
        only = None if self._forced else self._only
        threads = wanted.threads
        if only is not None:
            threads = max(threads, self._before) if only == "raise" else min(threads, self._before)
        process_counts().join(self, None if only == "raise" else wanted.threads)
        if threads < self._before:
            _say_what_runs_already()
        self._thread.set(self, threads)
        self._wanted, self._used = wanted, threads
        left = "" if threads == wanted.threads else f", left at {threads} since only a {only} is wanted"
        self._share = replace(wanted, threads=threads, why=wanted.why + left) if left else wanted
        return self._share

    def _leave(self) -> None:
        """Undo what `_enter` did, all of it or the part that it came to."""
        try:
            try:
                self._undo()
            except KeyboardInterrupt:  # a second Ctrl-C: every step can be repeated
                self._undo()
                raise
            if self._thread is not None and self._share is not None:
                self._log_end(self._share)
        finally:
            self._thread = self._share = None
            self._entered = False

    def _undo(self) -> None:
        try:
            if self._thread is not None:
                process_counts().leave(self)
        finally:
            try:
                if self._thread is not None:
                    self._thread.close(self)
            finally:
                if self._lease is not None:
                    self._lease.leave()
                self._affinity.__exit__(None, None, None)

    def _log_end(self, part: Share) -> None:
        seconds = time.monotonic() - self._started
        if self._used == self._before:
            _log.debug("torch intra-op threads: %d, as before (%s), for %.1f s", self._used, part.why, seconds)
        else:
            _log.info(_CHANGED, self._before, self._used, part.why, self._before, seconds)


_settled: set[int] = set()
"""This process's number, once its first scope has settled."""

_NO_SHARE = Share(threads=0, cpus=(), workers=0, why="")
_CHANGED = "torch intra-op threads: %d -> %d (%s), restored to %d after %.1f s"


class _Thread:
    """The open scopes of one thread, and its counts from before the first of them."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._before: CountsHere | None = None
        self._wanted: dict[LoadThreads, int] = {}

    @staticmethod
    def _lock() -> threading.RLock:
        """This process's lock: in a forked child that leaves its parent's scope, the parent's may be held for ever."""
        return process_counts().lock

    @property
    def is_here(self) -> bool:
        """Whether this is the record of the calling thread."""
        return threading.get_ident() == self._ident

    @property
    def now(self) -> int:
        """The count that is in force in this thread."""
        return import_torch().get_num_threads()  # type: ignore[no-any-return]

    def open(self, scope: LoadThreads) -> None:
        """Note a scope that is about to set this thread's count."""
        with self._lock():
            if not self._wanted and self._before is not None:
                self._restore()  # its last scope was left in another thread
            if self._before is None:
                self._before = counts_here()
            self._wanted[scope] = self.now

    def set(self, scope: LoadThreads, threads: int) -> None:
        """Set what a scope wants; the innermost one's is what counts."""
        with self._lock():
            self._wanted[scope] = threads
            self._move(next(reversed(self._wanted.values())))

    def close(self, scope: LoadThreads) -> None:
        """Forget a scope: the count is that of the innermost one left, or as before. Harmless when repeated."""
        with self._lock():
            self._wanted.pop(scope, None)
            if not self.is_here:  # a generator that another thread closes, or collects
                warn_once(
                    __name__,
                    "load_threads: a scope was left in another thread than it was entered in; the first one keeps its "
                    "count until its next scope",
                )
            elif self._wanted:
                self._move(next(reversed(self._wanted.values())))
            elif self._before is not None:
                self._restore()

    def set_for_good(self, threads: int) -> None:
        """Set this thread's count, also for after the scopes that are open in it."""
        with self._lock():
            if self._before is not None:
                self._before = CountsHere(threads, threads)
            set_threads_here(threads)

    def _move(self, threads: int) -> None:
        now = self.now
        if now != threads:
            set_threads_here(threads)
            self._release(now, threads)

    def _restore(self) -> None:
        assert self._before is not None
        now = self.now
        set_counts_here(self._before)
        self._release(now, self._before.threads)
        self._before = None

    def _release(self, now: int, then: int) -> None:
        """When a raise ends, let the members go that are now idle."""
        before = then if self._before is None else self._before.threads
        if now > then and now > before and not forked_with_torch():
            release_idle_team()


_here = threading.local()


def thread_counts() -> _Thread:
    """Return the calling thread's record; a forked child's begins anew."""
    found: _Thread | None = getattr(_here, "counts", None)
    pid = os.getpid()
    if found is None or getattr(_here, "pid", None) != pid:
        found = _here.counts = _Thread()
        _here.pid = pid
    return found


def _why_left_alone(platform: str, backend: str, explicit: bool) -> str:
    """Why torch's count is not to be changed here, in words; empty where it may be."""
    if backend and backend != "OpenMP":
        reason = f"torch was built with a {backend}, which keeps its first count for ever"
        warn_once(__name__, f"load_threads: {reason}: its threads are left as they are; set OMP_NUM_THREADS at start")
        return reason
    if platform == "darwin" and not explicit:
        return "on macOS the count is not changed at run time unless a number is given"
    return ""


def _say_what_runs_already() -> None:
    """Threads that run keep their counts; said once, where there are any that may use torch."""
    others = [
        thread.name
        for thread in threading.enumerate()
        if thread.ident != threading.get_ident() and not thread.name.startswith("loadmaster-")
    ]
    if others and not _said:
        _said.append(True)
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        _log.info("threads that run already keep their intra-op count if they have used torch: %s", names)


_said: list[bool] = []
