"""Fetchers: processes that bring new weights into shared memory, with their share of the host.

source = lm.CheckpointSource("ckpt/step-{version}")
with lm.Fetchers(source, procs=8) as fetchers:
    fetchers.prefetch(4)                    while version 3 is still served
    with fetchers.fetch(4) as weights:      name -> tensor in shared memory
        model.load_state_dict(weights)
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from types import TracebackType

from loadmaster.errors import InputError
from loadmaster.fetch.pool import Job, Pool, Progress
from loadmaster.fetch.source import Source, check_source
from loadmaster.fetch.weights import Weights

__all__ = ["Fetchers"]

DEFAULT_PROCS = 8


class Fetchers:
    """A pool of fetcher processes over one source.

    Nothing is started before `start`, ``with`` or the first fetch, and all of it ends with `close`. The processes are
    spawned, never forked; each sets its intra-op and inter-op threads once, to its share of what the fetchers of the
    host may have, and holds a lease while it fetches, so that shares follow engines and other pools.

    Parameters
    ----------
    source : Source
        Where the weights come from: `CheckpointSource`, `DcpSource`, `TorchStoreSource`, or anything with the protocol
        of `loadmaster.fetch.source`. It is pickled.
    procs : int
        Number of processes.
    keep_memory : bool
        Keep the memory of closed weights for the next version, which is then read about three times as fast; otherwise
        it goes back to the system. Either way at most two versions are in memory.
    progress : callable, optional
        Called with (bytes placed, bytes in all) while a version is fetched, in a thread of the pool.

    Raises
    ------
    InputError
        ``procs`` is no positive integer, or ``source`` is no source or cannot be pickled.
    """

    def __init__(
        self,
        source: Source,
        procs: int = DEFAULT_PROCS,
        *,
        keep_memory: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if type(procs) is not int or procs < 1:
            raise InputError(f"the number of fetchers must be a positive integer, not {procs!r}")
        check_source(source)
        try:
            self._pool = Pool(source, procs, keep_memory)
        except Exception as refused:
            raise InputError(
                f"the source {type(source).__name__} cannot be pickled for the fetchers: {refused}"
            ) from None
        self._progress = progress
        self._lock = threading.Lock()
        self._ahead: list[Job] = []
        self._finalizer = weakref.finalize(self, self._pool.close)

    def __enter__(self) -> Fetchers:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Fetchers:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def start(self, wait: bool = False) -> None:
        """Start the processes and return at once, or ``wait`` until all of them are set up.

        Raises
        ------
        FetchError
            The fetchers are closed, or one of those that are waited for could not be set up.
        """
        self._pool.start()
        if wait:
            self._pool.wait_ready()

    def prefetch(self, version: int | None = None) -> None:
        """Begin to fetch ``version`` and return at once; `fetch` then waits for what is left of it.

        An older version that is not complete yet is given up, and one that nobody has asked for is forgotten.

        Raises
        ------
        FetchError
            The fetchers are closed.
        """
        self._job_for(version, asked=False)

    def fetch(self, version: int | None = None) -> Weights:
        """Fetch ``version`` and return its tensors by name, all of them complete.

        Raises
        ------
        FetchError
            Tensors could not be fetched, by two fetchers; two versions are in memory already; or the fetchers are
            closed. ``FetchCancelledError`` where a newer version was asked for meanwhile.
        SharedMemoryError
            There is not enough memory.
        CheckpointError
            The source could not be opened or read.
        """
        job = self._job_for(version, asked=True)
        try:
            return job.future.result()
        except BaseException:
            self._give_up(job)
            raise

    async def afetch(self, version: int | None = None) -> Weights:
        """Fetch as `fetch`, without blocking the event loop. A task that is cancelled gives the fetch up."""
        job = self._job_for(version, asked=True)
        try:
            return await asyncio.wrap_future(job.future)
        except BaseException:
            self._give_up(job)
            raise

    def close(self) -> None:
        """End the processes. What is being fetched is given up; weights that were handed out stay until they close."""
        self._finalizer()
        self._forget(None)

    def pids(self) -> list[int]:
        """The process numbers of the fetchers that run now."""
        return self._pool.pids()

    def _job_for(self, version: int | None, asked: bool) -> Job:
        """The job that fetches ``version``: one that was prefetched, or a new one."""
        with self._lock:
            known = next((job for job in self._ahead if job.version == version and not _is_over(job)), None)
            if known is None:
                self._forget(version)
                known = self._pool.request(version, self._progress)
                if not asked:
                    self._ahead.append(known)
            elif asked:
                self._ahead.remove(known)
            return known

    def _forget(self, version: int | None) -> None:
        """Give back versions that were prefetched and are not wanted any more."""
        ahead, self._ahead = self._ahead, []
        for job in ahead:
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        if not job.future.done():
            self._pool.cancel(job, f"version {job.version} was given up before it was complete")
        job.future.add_done_callback(_close_result)


def _is_over(job: Job) -> bool:
    return job.future.done() and (job.future.cancelled() or job.future.exception() is not None)


def _close_result(future: object) -> None:
    """Close weights that nobody will take."""
    if not future.cancelled() and future.exception() is None:  # type: ignore[attr-defined]
        future.result().close()  # type: ignore[attr-defined]
