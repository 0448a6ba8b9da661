"""One fetcher: set up once, then it reads bundles of tensors from its source into shared memory.

`FetchWorker` is what every frontend runs. Plain processes run it under `main` below, which `loadmaster.fetch.pool`
talks to over a line; the actors of an actor system call ``setup`` once and ``fetch`` for each version.

    parent                                            fetcher
    ------                                            -------
    hello: number, source                    ------>  set up
                                             <------  ready: threads and why
    arena: a descriptor                      ------>
    work: a bundle                           ------>  reserve its memory, read
                                             <------  done | failed | skipped
    cancel | end                             ------>  stop at the next piece | give the lease back
                                             <------  beat, twice a second, whatever it does
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

from loadmaster.errors import LoadmasterError
from loadmaster.fetch.deal import deal
from loadmaster.fetch.shared_memory import Handle, SharedArena, check_available
from loadmaster.fetch.source import Part, Source, SourceReader
from loadmaster.observe.fetch_report import FetcherReport
from loadmaster.process.line import open_line
from loadmaster.share import Share, share
from loadmaster.share.lease import Lease, lease
from loadmaster.threads.setup import set_process_threads

__all__ = ["BEAT_SECONDS", "FetchWorker", "FetchedPart", "Hello", "Work", "main"]

BEAT_SECONDS = 0.5
"""How often a fetcher says that it lives."""


class Hello(NamedTuple):
    """The first message to a fetcher: its number among ``fetchers``, and the bytes of the pickled source.

    The descriptor of an arena with the source follows.
    """

    fetcher: int
    fetchers: int
    source_bytes: int


class Work(NamedTuple):
    """A bundle to read for job ``job``, into bytes ``start`` to ``stop`` of an arena.

    ``parts`` as plain tuples, or what the source has ``located`` of them.
    """

    job: int
    version: int | None
    bundle: int
    arena: int
    start: int
    stop: int
    parts: list[tuple[Any, ...]]
    located: Any


class FetchedPart(NamedTuple):
    """What one fetcher of an actor system has fetched: handles into its memory, and what it did. It is picklable."""

    version: int | None
    handles: dict[str, Handle]
    report: FetcherReport
    fetchers: int
    """How many fetchers there are: as many parts are a version."""
    digest: str
    """Of all names and entries that this fetcher saw: parts of one version have the same."""


@dataclass
class FetchWorker:
    """Reads its part of every version from ``source`` into shared memory.

    Parameters
    ----------
    source : Source
        Where the tensors come from; see `loadmaster.fetch.source`.
    fetcher, fetchers : int
        The number of this fetcher, from 0, and how many there are on this host.
    """

    source: Source
    fetcher: int = 0
    fetchers: int = 1
    _reader: SourceReader | None = None
    _set_up: Share | None = None
    _held: Lease | None = None
    _version: tuple[int | None] | None = None
    _kept: list[SharedArena] = field(default_factory=list)

    def setup(self) -> Share:
        """Give this process its share of the host: intra-op and inter-op threads, once. A repeat changes nothing.

        The share of all fetchers on the host is divided among them, and what engines and other pools hold at this
        moment is left to these.
        """
        if self._set_up is None:
            self._reader = SourceReader(self.source)
            # Whatever this process has inherited: its parent may be a rank itself.
            os.environ["LOADMASTER_LOCAL_RANK"] = str(self.fetcher)
            os.environ["LOADMASTER_LOCAL_SIZE"] = str(self.fetchers)
            self._set_up = share()
            set_process_threads(self._set_up, inter_op=True)
        return self._set_up

    def fetch(self, version: int | None = None) -> FetchedPart:
        """Fetch this fetcher's part of ``version`` into memory of its own, and return handles to it.

        All fetchers deal the names in the same way, so nobody has to tell them their part. The memory of this version
        and of the one before it is kept; older ones are given back, once their consumers have closed them too.
        """
        self.setup()
        started = time.perf_counter()
        self.look()
        tensors = self._asked().tensors(version)
        dealt = deal(tensors, self.fetchers, can_split=False)
        mine = dealt.queues[self.fetcher]
        num_bytes = dealt.arena_bytes[self.fetcher]
        while len(self._kept) > 1:  # the one before stays, and with the new one there are two
            self._kept.pop(0).close()
        check_available(num_bytes, f"fetcher {self.fetcher}: the weights of version {version}")
        arena = SharedArena.create(num_bytes)
        report = FetcherReport(fetcher=self.fetcher, pid=os.getpid())
        report.seconds["opening"] = time.perf_counter() - started
        try:
            for bundle in mine:
                seconds = self.read(bundle.parts, arena, bundle.start, bundle.stop, lambda: False)
                report.bundles += 1
                report.num_bytes += bundle.num_bytes
                for phase, spent in seconds.items():
                    report.seconds[phase] += spent
            now = self.look()
            report.threads, report.why = now.threads, now.why
        finally:
            self.end()
        self._kept.append(arena)
        here = arena.handle()
        handles = {
            name: Handle(here, place.offset, place.dtype, place.shape)
            for name, place in dealt.places.items()
            if place.arena == self.fetcher
        }
        report.tensors = len(handles)
        digest = hashlib.blake2b(repr(tensors).encode(), digest_size=16).hexdigest()
        return FetchedPart(version, handles, report, self.fetchers, digest)

    def begin(self, version: int | None) -> None:
        """Begin a version: claim this process's part of the host, and tell the source."""
        self.look()
        self._asked().names(version)
        self._version = (version,)

    def _asked(self) -> SourceReader:
        if self._reader is None:
            self.setup()
        assert self._reader is not None
        return self._reader

    def look(self) -> Share:
        """The share of this moment; the lease that it is asked of is held until `end`."""
        if self._held is None:
            held = lease()
            held.join()
            self._held = held
        return self._held.look()

    def read(
        self,
        parts: list[Part],
        arena: SharedArena,
        start: int,
        stop: int,
        stopped: Callable[[], bool],
        located: Any = None,
    ) -> Mapping[str, float]:
        """Read ``parts``, or what is ``located``, into bytes ``start`` to ``stop`` of ``arena``; seconds by phase."""
        threads = self.look().threads
        reader = self._asked()
        if hasattr(reader, "threads"):
            reader.threads = threads
        before = time.perf_counter()
        arena.reserve(start, stop - start)
        if located is None:
            assembling = reader.read_parts(parts, arena.buffer, stopped)
        else:
            assembling = reader.read_located(located, arena.buffer, stopped)
        spent = time.perf_counter() - before
        return {"reading": spent - assembling, "assembling": assembling}

    def begun(self, version: int | None) -> bool:
        """Whether the source is at ``version``."""
        return self._version == (version,)

    def end(self) -> None:
        """Give this process's part of the host back, until the next version."""
        self._version = None
        held, self._held = self._held, None
        if held is not None:
            held.leave()


class _Process:
    """A fetcher as a plain process: one thread takes messages, one works, one says that it lives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arenas: dict[int, SharedArena] = {}
        self._cancelled = -1

    def run(self) -> None:
        hello = Hello._make(self._connection.recv())
        told = SharedArena.from_descriptor(recv_handle(self._connection), hello.source_bytes)
        threading.Thread(target=self._beat, name="loadmaster-beat", daemon=True).start()
        try:
            worker = FetchWorker(pickle.loads(told.buffer), hello.fetcher, hello.fetchers)
            told.close()
            share = worker.setup()
        except BaseException as error:
            self._send("broken", _sentence(error))
            return
        self._send("ready", (share.threads, share.why))
        threading.Thread(target=self._listen, name="loadmaster-parent", daemon=True).start()
        while True:
            waited = time.perf_counter()
            message = self._todo.get()
            if isinstance(message, Work):
                self._work(worker, message, time.perf_counter() - waited)
            else:
                worker.end()

    def _work(self, worker: FetchWorker, work: Work, waited: float) -> None:
        seconds = {"waiting": waited}
        try:
            if self._cancelled >= work.job:
                self._send("skipped", (work.job, work.bundle))
                return
            if work.located is None and not worker.begun(work.version):
                before = time.perf_counter()
                worker.begin(work.version)
                seconds["opening"] = time.perf_counter() - before
            parts = [Part._make(part) for part in work.parts]
            arena = self._arenas[work.arena]
            stopped = functools.partial(self._is_cancelled, work.job)
            seconds.update(worker.read(parts, arena, work.start, work.stop, stopped, work.located))
            now = worker.look()
        except BaseException as error:
            self._send("failed", (work.job, work.bundle, _sentence(error)))
        else:
            answer = "skipped" if self._cancelled >= work.job else "done"
            more = (seconds, now.threads, now.why) if answer == "done" else ()
            self._send(answer, (work.job, work.bundle, *more))

    def _is_cancelled(self, job: int) -> bool:
        return self._cancelled >= job

    def _listen(self) -> None:
        """Take messages; the parent's end, however it came, is also the end of this process."""
        try:
            while True:
                kind, value = self._connection.recv()
                if kind == "work":
                    self._todo.put(Work._make(value))
                elif kind == "arena":
                    key, num_bytes = value
                    self._arenas[key] = SharedArena.from_descriptor(recv_handle(self._connection), num_bytes)
                elif kind == "drop":
                    arena = self._arenas.pop(value, None)
                    if arena is not None:
                        arena.close()
                elif kind == "cancel":
                    self._cancelled = max(self._cancelled, value)
                else:
                    self._todo.put(None)
        except (EOFError, OSError):
            os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._send("beat", None)

    def _send(self, kind: str, value: Any) -> None:
        try:
            with self._sending:
                self._connection.send((kind, value))
        except OSError:
            os._exit(1)


def _sentence(error: BaseException) -> str:
    if isinstance(error, LoadmasterError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Serve the parent until it is gone; started by `loadmaster.fetch.pool`, never by hand."""
    connection = open_line()
    with contextlib.suppress(EOFError):
        _Process(connection).run()
    os._exit(1)
