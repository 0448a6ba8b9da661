"""The processes behind `loadmaster.fetch.fetchers.Fetchers`, and the one thread that attends them.

    request --> attendant --> a thread asks the source: names, entries --deal--> queues of bundles, one per fetcher
                   |                                                                |
                   | arenas: descriptors                                            | two bundles at a time; who is done
                   v                                                                v takes over from the longest queue
                fetchers --done, failed, beat, end of the line--> attendant --all bundles are there--> Weights

No wait is without an end: a fetcher that dies is seen by its line, one that is stopped by its missing beats. What it
had not finished goes to the others, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import Any

from loadmaster.checkpoint.folder import paused_garbage_collection
from loadmaster.errors import FetchCancelledError, FetchError, LoadmasterError
from loadmaster.fetch.arenas import ArenaKeeper, KeyedArena
from loadmaster.fetch.deal import Bundle, Deal, deal
from loadmaster.fetch.shared_memory import SharedArena
from loadmaster.fetch.source import Source, SourceReader, can_split
from loadmaster.fetch.weights import Weights
from loadmaster.fetch.worker import Hello, Work
from loadmaster.host import host
from loadmaster.observe.fetch_report import FetcherReport, FetchReport
from loadmaster.process.child import POLL_SECONDS, Child, stop_children
from loadmaster.share import plan_shares
from loadmaster.threads.environment import rank_environment

__all__ = ["Job", "Pool"]

_log = logging.getLogger(__name__)

SILENCE_SECONDS = 6.0
"""A fetcher that has not said for so long that it lives is stopped or frozen: it is ended, and others do its work."""

START_SECONDS = 180.0
"""How long a fetcher may take to start: it imports torch, and many do so at once."""

SEND_SECONDS = 3
"""How long a fetcher may leave a message unread before it is taken for stopped."""

IN_FLIGHT = 2
"""Bundles that a fetcher is given at a time: the next one is there when it has done the first."""

TRIES = 2
"""How often a bundle is tried, by different fetchers."""

_NAMES_SHOWN = 3

Progress = Callable[[int, int], None]


@dataclass
class _Fetcher:
    """One process, seen from the attendant.

    ``doing`` are job and bundle of what it has been given, in the order in which it does them; ``deaf`` is one that
    could not be told something.
    """

    number: int
    child: Child
    heard: float
    ready: bool = False
    threads: int = 1
    why: str = ""
    doing: dict[tuple[int, int], None] = field(default_factory=dict)
    has: set[int] = field(default_factory=set)
    broken: str = ""
    deaf: bool = False


def _running() -> Future[Weights]:
    """A future that nobody can cancel: a job is given up through the pool."""
    future: Future[Weights] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class Job:
    """One version that is being fetched; ``future`` is what becomes of it."""

    number: int
    version: int | None
    progress: Progress | None
    started: float
    future: Future[Weights] = field(default_factory=_running)
    dealt: Deal | None = None
    arenas: list[KeyedArena] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    own: list[range] = field(default_factory=list)
    queues: list[deque[int]] = field(default_factory=list)
    again: deque[tuple[int, int | None]] = field(default_factory=deque)
    left: set[int] = field(default_factory=set)
    causes: dict[int, list[str]] = field(default_factory=dict)
    reports: dict[int, FetcherReport] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    placed: int = 0
    plan_seconds: float = 0.0
    restarted: bool = False

    def next_for(self, fetcher: int, alone: bool) -> int | None:
        """The next bundle of a fetcher: one that another one has failed, its own, or the last of the longest queue."""
        for position, (bundle, failed_by) in enumerate(self.again):
            if failed_by != fetcher or alone:
                del self.again[position]
                return bundle
        if self.queues[fetcher]:
            return self.queues[fetcher].popleft()
        longest = max(self.queues, key=lambda queue: sum(self.bundles[bundle].num_bytes for bundle in queue))
        return longest.pop() if longest else None


class Pool:
    """``procs`` fetchers, started by the first request, and what they share.

    Its methods are for any thread; what begins with an underscore is for the attendant alone.
    """

    def __init__(self, source: Source, procs: int, keep_memory: bool) -> None:
        self._reader = SourceReader(source)
        self._pickled = pickle.dumps(source)
        self._told: SharedArena | None = None
        self._procs = procs
        self._group = f"{os.getpid()}-{time.time_ns()}"
        self._arenas = ArenaKeeper(keep_memory)
        self._keep_memory = keep_memory
        self._lock = threading.RLock()  # the collector may close weights while this very thread holds it
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._waking: Connection | None = None
        self._woken: Connection | None = None
        self._fetchers: list[_Fetcher] = []
        self._job: Job | None = None
        self._number = 0
        self._planning = threading.Lock()
        self._ready: deque[Future[None]] = deque()
        self._lost: list[str] = []
        self._closing = False
        self._ended = False
        _pools.add(self)

    def start(self) -> None:
        """Start the processes, without waiting until they are ready.

        Raises
        ------
        FetchError
            The pool is closed.
        """
        with self._lock:
            if self._closing:
                raise FetchError("these fetchers are closed")
            if self._thread is not None:
                return
            self._woken, self._waking = Pipe(duplex=False)
            self._thread = threading.Thread(target=self._attend, name="loadmaster-fetchers", daemon=True)
            self._thread.start()
        self._tell(self._start_first)

    def wait_ready(self) -> None:
        """Wait until every fetcher is set up.

        Raises
        ------
        FetchError
            One has failed to start, or the pool was closed.
        """
        ready: Future[None] = Future()
        self._ready.append(ready)
        if not self._tell(lambda: None):
            raise FetchError("these fetchers are closed")
        ready.result()

    def _answer_ready(self) -> None:
        """Tell those who wait for all fetchers."""
        lost = "" if self._closing or not self._lost else "; ".join(self._lost)
        if self._closing or lost:
            error = FetchError(lost or "the fetchers were closed before they were ready")
        elif len(self._fetchers) == self._procs and all(fetcher.ready for fetcher in self._fetchers):
            error = None
        else:
            return
        while self._ready:
            waiting = self._ready.popleft()
            waiting.set_exception(error) if error else waiting.set_result(None)

    def request(self, version: int | None, progress: Progress | None) -> Job:
        """Ask for a version. An older one that is not complete yet is given up for it."""
        self.start()
        with self._lock:
            job = Job(self._number, version, progress, time.perf_counter())
            self._number += 1
        if not self._tell(lambda: self._begin(job)):
            job.future.set_exception(FetchError("these fetchers are closed"))
        return job

    def cancel(self, job: Job, why: str) -> None:
        """Give a job up, unless it is done."""
        self._tell(lambda: self._fail(job, FetchCancelledError(why)))

    def pids(self) -> list[int]:
        """The process numbers of the fetchers."""
        return [fetcher.child.process.pid for fetcher in list(self._fetchers)]

    def close(self) -> None:
        """End all processes; what is being fetched is given up. Weights that were handed out stay."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._tell(lambda: None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._arenas.close()
        if self._planning.acquire(blocking=False):  # else the source is being asked, and may never answer
            with contextlib.suppress(Exception):
                self._reader.close()
            self._planning.release()

    def close_lines(self) -> None:
        """Close the lines in a process that was forked from this one: they are not its own."""
        for fetcher in self._fetchers:
            with contextlib.suppress(OSError):
                fetcher.child.connection.close()

    def _tell(self, what: Callable[[], None]) -> bool:
        """Have the attendant do something; False where it has ended, or never began."""
        with self._lock:
            if self._ended or self._waking is None:
                return False
            self._inbox.append(what)
            self._waking.send_bytes(b"")
            return True

    def _give_back(self, arenas: list[KeyedArena]) -> bool:
        free = self._arenas.give_back(arenas)
        self._tell(lambda: self._drop(self._arenas.stale()))
        return free

    # The attendant.

    def _attend(self) -> None:
        assert self._woken is not None
        try:
            while not self._closing:
                self._serve(self._woken)
        except BaseException as bug:
            self._closing = True
            if self._job is not None:
                self._fail(self._job, bug)
            raise
        finally:
            with self._lock:
                self._ended = True
            while self._inbox:  # requests that came too late
                self._inbox.popleft()()
            if self._job is not None:
                self._fail(self._job, FetchCancelledError("the fetchers were closed before the weights were complete"))
            self._closing = True
            self._answer_ready()
            stop_children([fetcher.child for fetcher in self._fetchers])
            self._fetchers.clear()
            self._woken.close()
            assert self._waking is not None
            self._waking.close()
            if self._told is not None:
                self._told.close()

    def _serve(self, woken: Connection) -> None:
        """Wait until something happens, and do what it asks for."""
        watched = [fetcher.child.watch for fetcher in self._fetchers if fetcher.child.watch is not None]
        timeout = 0.5 if len(watched) == len(self._fetchers) else POLL_SECONDS
        lines = {fetcher.child.connection: fetcher for fetcher in self._fetchers}
        ready = wait([woken, *lines, *watched], timeout if self._fetchers else None)
        now = time.monotonic()
        if woken in ready:
            woken.recv_bytes()
        for line, fetcher in lines.items():
            if line in ready:
                self._receive(fetcher)
        while self._inbox:
            self._inbox.popleft()()
        for fetcher in list(self._fetchers):
            if fetcher.child.process.poll() is not None:
                self._receive_rest(fetcher)
            elif fetcher.deaf:
                self._lose(fetcher, f"{fetcher.child.name} did not take its messages and was ended")
            elif now - fetcher.heard > (SILENCE_SECONDS if fetcher.ready else START_SECONDS):
                self._lose(fetcher, f"{fetcher.child.name} said nothing for {now - fetcher.heard:.0f} s and was ended")
        self._dispatch()
        if self._ready:
            self._answer_ready()

    def _start_first(self) -> None:
        try:
            self._start_missing()
        except LoadmasterError as refused:  # the first fetch tries again, and says so
            self._lost.append(str(refused))

    def _start_missing(self) -> None:
        self._lost.clear()
        numbers = {fetcher.number for fetcher in self._fetchers}
        missing = [number for number in range(self._procs) if number not in numbers]
        if not missing:
            return
        if self._told is None:  # in memory and not over the line: it may be large, and nobody reads it yet
            self._told = SharedArena.create(len(self._pickled), "source")
            self._told.buffer[:] = self._pickled
        here = host()
        shares = plan_shares(here, self._procs)
        for number in missing:
            environment = rank_environment(shares[number].threads, number, self._procs, cores=here.compute_cpus)
            environment["LOADMASTER_GROUP"] = self._group
            child = Child.start(f"fetcher {number}", "loadmaster.fetch.worker", environment, f"fetcher={number}")
            fetcher = _Fetcher(number, child, time.monotonic())
            self._fetchers.append(fetcher)
            _bound_waiting(child.connection)
            self._send(fetcher, tuple(Hello(number, self._procs, len(self._pickled))))
            self._send_descriptor(fetcher, self._told)

    def _begin(self, job: Job) -> None:
        if self._job is not None:
            given_up = f"version {self._job.version} was given up for version {job.version}"
            self._fail(self._job, FetchCancelledError(given_up))
        for fetcher in list(self._fetchers):
            if fetcher.child.process.poll() is not None:  # while nobody had any work for it
                self._receive_rest(fetcher)
        self._job = job
        if self._closing:
            return
        try:
            self._start_missing()
        except LoadmasterError as refused:
            self._fail(job, refused)
            return
        threading.Thread(target=self._plan, args=(job,), name="loadmaster-plan", daemon=True).start()

    def _plan(self, job: Job) -> None:
        """Ask the source what there is; in a thread of its own, since a source may take its time."""
        try:
            with self._planning:  # one version at a time: a source remembers which one it is at
                if job.future.done():
                    return
                tensors = self._reader.tensors(job.version)  # may take its time: the collector is not kept still for it
                with paused_garbage_collection():
                    dealt = deal(tensors, self._procs, can_split(self._reader))
        except BaseException as error:
            failure = error if isinstance(error, LoadmasterError) else _unexpected("the source failed", error)
            self._tell(lambda: self._fail(job, failure))
        else:
            planned = time.perf_counter() - job.started
            self._tell(lambda: self._start_work(job, dealt, planned))

    def _start_work(self, job: Job, dealt: Deal, planned: float) -> None:
        if job is not self._job:
            return
        try:
            job.arenas = self._arenas.take(job.version, dealt.arena_bytes)
        except BaseException as error:
            self._fail(job, error if isinstance(error, LoadmasterError) else _unexpected("the fetch failed", error))
            return
        finally:
            self._drop(self._arenas.stale())
        job.dealt, job.plan_seconds = dealt, planned
        for queue in dealt.queues:
            first = len(job.bundles)
            job.bundles += queue
            job.own.append(range(first, len(job.bundles)))
            job.queues.append(deque(job.own[-1]))
        job.left = set(range(len(job.bundles)))
        if not job.left:
            self._finish(job)

    def _dispatch(self) -> None:
        job = self._job
        if job is None or job.dealt is None:
            return
        # One that is still at a version that was given up may be so for long: nothing is put behind that.
        waiting = [
            fetcher
            for fetcher in self._fetchers
            if fetcher.ready and all(number == job.number for number, _ in fetcher.doing)
        ]
        for round_ in range(1, IN_FLIGHT + 1):
            for fetcher in waiting:
                if len(fetcher.doing) < round_ and fetcher in self._fetchers and job is self._job:
                    bundle = job.next_for(fetcher.number, alone=len(self._fetchers) == 1)
                    if bundle is not None:
                        self._give(fetcher, job, bundle)

    def _give(self, fetcher: _Fetcher, job: Job, number: int) -> None:
        bundle = job.bundles[number]
        key, arena = job.arenas[bundle.arena]
        fetcher.doing[job.number, number] = None
        try:
            located = self._reader.locate(bundle.parts)
        except Exception as error:
            self._fail(job, error if isinstance(error, LoadmasterError) else _unexpected("the source failed", error))
            return
        parts = [tuple(part) for part in bundle.parts] if located is None else []
        work = Work(job.number, job.version, number, key, bundle.start, bundle.stop, parts, located)
        if key not in fetcher.has:
            fetcher.has.add(key)
            self._send(fetcher, ("arena", (key, arena.num_bytes)))
            self._send_descriptor(fetcher, arena)
        self._send(fetcher, ("work", tuple(work)))

    def _send(self, fetcher: _Fetcher, message: Any) -> None:
        """Send one message. A fetcher that is gone, or does not take it in time, is lost at the next look."""
        if not fetcher.deaf:
            try:
                fetcher.child.connection.send(message)
            except OSError:
                fetcher.deaf = True

    def _send_descriptor(self, fetcher: _Fetcher, arena: SharedArena) -> None:
        if not fetcher.deaf:
            try:
                send_handle(fetcher.child.connection, arena.descriptor, fetcher.child.process.pid)
            except OSError:
                fetcher.deaf = True

    def _drop(self, keys: list[int]) -> None:
        for fetcher in self._fetchers:
            for key in fetcher.has & {*keys}:
                fetcher.has.discard(key)
                self._send(fetcher, ("drop", key))

    # What fetchers say.

    def _receive(self, fetcher: _Fetcher) -> None:
        try:
            kind, value = fetcher.child.connection.recv()
        except (EOFError, OSError):
            self._lose(fetcher, "")
            return
        except Exception as unreadable:
            self._lose(fetcher, f"{fetcher.child.name} sent what cannot be received: {unreadable}")
            return
        fetcher.heard = time.monotonic()
        if kind == "ready":
            fetcher.ready = True
            fetcher.threads, fetcher.why = value
        elif kind == "broken":
            fetcher.broken = f"{fetcher.child.name}: {value}"
        elif kind in ("done", "failed", "skipped"):
            self._take_answer(fetcher, kind, *value)

    def _receive_rest(self, fetcher: _Fetcher) -> None:
        """Take what a fetcher has sent before it ended."""
        while fetcher in self._fetchers:
            try:
                more = fetcher.child.connection.poll()
            except OSError:
                more = False
            if more:
                self._receive(fetcher)
            else:
                self._lose(fetcher, "")

    def _take_answer(self, fetcher: _Fetcher, kind: str, number: int, bundle: int, *value: Any) -> None:
        fetcher.doing.pop((number, bundle), None)
        job = self._job
        if job is None or job.number != number:
            return  # of a job that was given up
        if kind == "done":
            self._note(job, fetcher, bundle, *value)
        elif kind == "failed":
            self._retry(job, fetcher, bundle, f"{fetcher.child.name}: {value[0]}")

    def _note(
        self, job: Job, fetcher: _Fetcher, number: int, seconds: dict[str, float], threads: int, why: str
    ) -> None:
        bundle = job.bundles[number]
        report = job.reports.setdefault(
            fetcher.number, FetcherReport(fetcher=fetcher.number, pid=fetcher.child.process.pid)
        )
        report.bundles += 1
        report.stolen += number not in job.own[fetcher.number]
        report.tensors += sum(part.start == 0 for part in bundle.parts)  # a split one counts where it begins
        report.num_bytes += bundle.num_bytes
        report.threads, report.why = threads, why
        for phase, spent in seconds.items():
            report.seconds[phase] += spent
        job.left.discard(number)
        job.placed += bundle.num_bytes
        if job.progress is not None and job.dealt is not None:
            try:
                job.progress(job.placed, job.dealt.num_bytes)
            except BaseException as error:
                self._fail(job, error)
                return
        if not job.left:
            self._finish(job)

    def _retry(self, job: Job, fetcher: _Fetcher, bundle: int, cause: str) -> None:
        causes = job.causes.setdefault(bundle, [])
        causes.append(cause)
        job.failures.append(cause)
        names = _names(part.name for part in job.bundles[bundle].parts)
        if len(causes) >= TRIES:
            told = "; ".join(dict.fromkeys(causes))
            self._fail(job, FetchError(f"{names} of version {job.version} could not be fetched: {told}"))
        else:
            _log.warning("%s; %s of version %s goes to another fetcher", cause, names, job.version)
            job.again.append((bundle, fetcher.number))

    def _lose(self, fetcher: _Fetcher, why: str) -> None:
        """A fetcher is gone, or has to go: what it had not finished goes to the others."""
        self._fetchers.remove(fetcher)
        if why:
            fetcher.child.process.kill()
        cause = fetcher.broken or why or fetcher.child.death()
        stop_children([fetcher.child])
        if not fetcher.ready:
            self._lost.append(cause)
        job = self._job
        if job is None:
            _log.warning("%s", cause)
            return
        given = [bundle for number, bundle in fetcher.doing if number == job.number]
        job.again.extendleft((bundle, None) for bundle in reversed(given[1:]))
        if given:  # the one that it was at; those behind it are not to blame
            self._retry(job, fetcher, given[0], cause)
        else:
            job.failures.append(cause)
        if job is self._job and not self._fetchers:
            if fetcher.ready and not job.reports and not job.restarted:
                self._restart(job)
                return
            told = "; ".join(dict.fromkeys(job.failures))
            self._fail(job, FetchError(f"no fetcher is left to fetch version {job.version}: {told}"))

    def _restart(self, job: Job) -> None:
        """Start all fetchers anew, once: they have died before anything was done, most likely before the request."""
        job.restarted = True
        try:
            self._start_missing()
        except LoadmasterError as refused:
            self._fail(job, refused)

    # The end of a job.

    def _finish(self, job: Job) -> None:
        assert job.dealt is not None
        self._leave(job)
        report = FetchReport(
            version=job.version,
            tensors=len(job.dealt.places),
            num_bytes=job.dealt.num_bytes,
            seconds=time.perf_counter() - job.started,
            plan_seconds=job.plan_seconds,
            fetchers=[job.reports[number] for number in sorted(job.reports)],
            failures=tuple(job.failures),
        )
        arenas = job.arenas
        weights = Weights(job.dealt.places, [one.arena for one in arenas], report, lambda: self._give_back(arenas))
        job.future.set_result(weights)

    def _fail(self, job: Job, failure: BaseException) -> None:
        if job.future.done():
            return
        if job is self._job:
            for fetcher in self._fetchers:
                self._send(fetcher, ("cancel", job.number))
            self._leave(job)
        if job.arenas:
            self._arenas.give_back(job.arenas, complete=False)
        self._drop(self._arenas.stale())
        job.future.set_exception(failure)

    def _leave(self, job: Job) -> None:
        """A job is over: fetchers give their part of the host back, and let go of memory that is not kept."""
        self._job = None
        keys = [] if self._keep_memory else [one.key for one in job.arenas]
        self._drop([*keys, *self._arenas.stale()])
        for fetcher in self._fetchers:
            self._send(fetcher, ("end", None))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _close_lines() -> None:
    for pool in list(_pools):
        pool.close_lines()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_lines)


def _bound_waiting(connection: Connection) -> None:
    """Let no read or write of a line wait for ever: a process that is stopped neither reads nor writes."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            line.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SEND_SECONDS, 0))


def _names(names: Any) -> str:
    """``tensor 'a'`` or ``1200 tensors ('a', 'b', 'c', ...)``."""
    listed = list(dict.fromkeys(names))
    if len(listed) == 1:
        return f"tensor {listed[0]!r}"
    more = ", ..." if len(listed) > _NAMES_SHOWN else ""
    return f"{len(listed)} tensors ({', '.join(map(repr, listed[:_NAMES_SHOWN]))}{more})"


def _unexpected(what: str, error: BaseException) -> FetchError:
    failure = FetchError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
