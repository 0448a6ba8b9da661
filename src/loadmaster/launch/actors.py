"""What fetchers have in common when an actor system runs them: the worker there, the calls, and the weights here.

    consumer                                             actors, one process each
    --------                                             ------------------------
    actor_environments       ------ spawn ------->       actor_worker(...).setup(), once
    ActorFetchers.fetch      ------ version ----->       FetchWorker.fetch: reads into memory of its own
    weights_of               <----- handles ------       FetchedPart
      opens each arena once

No wait is without an end: whether the processes live is looked up while the answers are awaited, since an actor system
may take half a minute to tell, and a process that is only stopped is given up when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import textwrap
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import psutil

from loadmaster.errors import FetchError, InputError, LoadmasterError
from loadmaster.fetch.parts import weights_of
from loadmaster.fetch.source import Source, check_source
from loadmaster.fetch.weights import Weights
from loadmaster.fetch.worker import FetchedPart, FetchWorker
from loadmaster.host import host
from loadmaster.share import Share, plan_shares
from loadmaster.threads.environment import rank_environment

__all__ = [
    "DEFAULT_PROCS",
    "FETCH_SECONDS",
    "NOT_STARTED",
    "START_SECONDS",
    "ActorFetchers",
    "actor_environments",
    "actor_worker",
    "answers_of",
    "check_actor_request",
    "end_in_time",
    "run_here",
]

_log = logging.getLogger(__name__)

DEFAULT_PROCS = 8

FETCH_SECONDS = 600.0
"""How long a version may take, unless the caller says otherwise."""

START_SECONDS = 180.0
"""How long the actors may take to start: each imports torch, and many do so at once."""

STOP_SECONDS = 15.0
"""How long an actor system may take to end its processes before they are killed."""

LOOK_SECONDS = 0.25
"""How often the processes are looked after while their answers are awaited."""

DYING_SECONDS = 0.5
"""How long a process that is being killed may still be there after its sockets are closed."""

NOT_STARTED = "the fetchers could not be started"

_CAUSE_LENGTH = 300

_T = TypeVar("_T")


def actor_environments(fetchers: int) -> list[dict[str, str]]:
    """Return what each of ``fetchers`` actors has to find in its environment; see `actor_worker`.

    These are the variables of Loadmaster as they are here, the place among the fetchers, and what differs from here.
    """
    here = host()
    group = f"{os.getpid()}-{time.time_ns()}"
    found = []
    for number, share in enumerate(plan_shares(here, fetchers)):
        whole = rank_environment(share.threads, number, fetchers, cores=here.compute_cpus)
        whole["LOADMASTER_GROUP"] = group
        changed = {name: value for name, value in whole.items() if os.environ.get(name) != value}
        found.append({name: whole[name] for name in whole if name in changed or name.startswith("LOADMASTER_")})
    return found


def actor_worker(
    source: Source, fetcher: int, fetchers: int, environment: Mapping[str, str] | None = None
) -> FetchWorker:
    """Return the worker of an actor whose process is its own.

    The process is told its place among the fetchers, whatever it has inherited: its parent may be a rank itself, and
    an actor system may start it with the environment of another process. Best before torch is imported there.
    """
    own = {"LOADMASTER_LOCAL_RANK": str(fetcher), "LOADMASTER_LOCAL_SIZE": str(fetchers)}
    os.environ.update({**(environment or {}), **own})
    return FetchWorker(source, fetcher, fetchers)


# The calls.


def check_actor_request(source: Source, procs: int) -> None:
    """Raise an `InputError` if ``procs`` is no positive integer or ``source`` no source."""
    if type(procs) is not int or procs < 1:
        raise InputError(f"the number of fetchers must be a positive integer, not {procs!r}")
    check_source(source)


class ActorFetchers:
    """Fetchers that an actor system runs; what is the same for all of them. Made by a frontend's ``spawn_fetchers``.

    Use it as a context manager, or `close` it. Weights that were handed out stay until they are closed themselves.

    Parameters
    ----------
    pids : sequence of int
        The process of each fetcher, in order.
    timeout_seconds : float
        How long a version may take.

    Attributes
    ----------
    shares : list of Share
        What each fetcher had of the host when it was set up: threads, and why.
    """

    def __init__(self, pids: Sequence[int], timeout_seconds: float) -> None:
        self._pids = list(pids)
        self._processes = [_process(pid) for pid in pids]
        self._timeout_seconds = timeout_seconds
        self._closed = False
        self.shares: list[Share] = []

    def _ask(self, fetcher: int, method: str, *arguments: Any) -> Awaitable[Any]:
        """Begin to call a method of one actor."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Have the actor system end the actors and their processes."""
        raise NotImplementedError

    def __enter__(self) -> ActorFetchers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> ActorFetchers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def pids(self) -> list[int]:
        """The process numbers of the fetchers."""
        return list(self._pids)

    def fetch(self, version: int | None = None) -> Weights:
        """Fetch ``version`` and return its tensors by name, all of them complete.

        Raises
        ------
        FetchError
            A fetcher raised, is gone or did not answer in time, or they are closed; names the fetcher and the cause.
        SharedMemoryError
            The memory of a fetcher cannot be opened here.
        InputError
            This thread runs an event loop; there `afetch` is awaited.
        """
        return run_here(self.afetch(version), "await afetch")

    async def afetch(self, version: int | None = None) -> Weights:
        """Fetch as `fetch`, without blocking the event loop."""
        if self._closed:
            raise FetchError("these fetchers are closed")
        started = time.perf_counter()
        what = f"version {version} could not be fetched"
        _check_alive(what, self._processes)
        answers: list[Awaitable[FetchedPart]]
        answers = [self._ask(number, "fetch", version) for number in range(len(self._pids))]
        parts = await answers_of(what, answers, self._processes, self._timeout_seconds)
        return weights_of(parts, seconds=time.perf_counter() - started)

    async def set_up(self) -> None:
        """Have each fetcher take its share of the host; a repeat is harmless. The frontends do it after the start."""
        answers = [self._ask(number, "setup") for number in range(len(self._pids))]
        self.shares = await answers_of(NOT_STARTED, answers, self._processes, START_SECONDS)

    def close(self) -> None:
        """End the actors and their processes; a repeat does nothing."""
        run_here(self.aclose(), "await aclose")

    async def aclose(self) -> None:
        """Close as `close`, without blocking the event loop."""
        if self._closed:
            return
        self._closed = True
        await end_in_time(self._stop())
        await _end(self._processes)


def run_here(work: Coroutine[Any, Any, _T], instead: str) -> _T:
    """Run a coroutine to its end in a thread without an event loop; the thread's own loop, if any, is left alone."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        work.close()
        raise InputError(f"this thread runs an event loop, which a call that blocks would stop; {instead} instead")
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)  # an interrupt leaves the work behind
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def end_in_time(work: Awaitable[None]) -> None:
    """Have an actor system end what it runs; what it does not end in its time is left to `ActorFetchers.aclose`."""
    try:
        await asyncio.wait_for(work, STOP_SECONDS)
    except Exception as refused:
        _log.info("the fetchers were not ended by their actor system: %s", _words(refused))


async def answers_of(
    what: str,
    answers: Sequence[Awaitable[_T]],
    processes: Sequence[psutil.Process | None],
    timeout_seconds: float,
    who: str = "fetcher {}",
) -> list[_T]:
    """Wait for the answer of each fetcher, in order.

    Parameters
    ----------
    what : str
        How an error begins, such as ``version 4 could not be fetched``.
    answers : sequence of awaitable
        One of each fetcher.
    processes : sequence
        The process of each, None for one that is gone; empty while they are not known.
    who : str
        What an error calls each of them, by its number.

    Raises
    ------
    FetchError
        The first fetchers that raise or whose processes are gone, or those that have not answered in time.
    """
    deadline = time.monotonic() + timeout_seconds
    tasks = [asyncio.ensure_future(_awaited(answer)) for answer in answers]
    gone: set[int] = set()
    try:
        while True:
            left = deadline - time.monotonic()
            await asyncio.wait(tasks, timeout=max(0.0, min(LOOK_SECONDS, left)), return_when=asyncio.FIRST_EXCEPTION)
            await _check_answers(what, tasks, processes, who)
            waiting = [number for number, task in enumerate(tasks) if not task.done()]
            if not waiting:
                return [task.result() for task in tasks]
            now_gone = {number for number in waiting if processes and not _lives(processes[number])}
            if gone & now_gone:  # seen twice: an answer that was on its way when the process ended is there by now
                raise FetchError(f"{what}: {'; '.join(_gone(number, processes) for number in sorted(gone & now_gone))}")
            gone = now_gone
            if left <= 0:
                silent = "; ".join(
                    f"{who.format(number)} gave no answer in {timeout_seconds:g} s" for number in waiting
                )
                raise FetchError(f"{what}: {silent}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(answer: Awaitable[_T]) -> _T:
    return await answer


async def _check_answers(
    what: str, tasks: Sequence[asyncio.Future[_T]], processes: Sequence[psutil.Process | None], who: str
) -> None:
    failed = [(number, error) for number, task in enumerate(tasks) if task.done() and (error := task.exception())]
    if not failed:
        return
    told = []
    for number, error in failed:
        lost = bool(processes) and await _is_lost(processes[number], error)
        told.append(_gone(number, processes) if lost else f"{who.format(number)}: {_words(error)}")
    raise FetchError(f"{what}: {'; '.join(told)}") from failed[0][1]


async def _is_lost(process: psutil.Process | None, error: BaseException) -> bool:
    """Whether ``error`` tells of the process's death, of which an actor system may hear before the process is gone."""
    deadline = time.monotonic() + (0.0 if _raised_there(error) else DYING_SECONDS)
    while _lives(process):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def _raised_there(error: BaseException) -> BaseException | None:
    """What an actor raised, unless the error is the actor system's own: Monarch's ``exception``, Ray's ``cause``."""
    inner = getattr(error, "exception", None) or getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else None


def _words(error: BaseException) -> str:
    """The cause in the words of whoever raised first; of a death, actor systems tell in many lines, the cause last."""
    inner = _raised_there(error)
    error = error if inner is None else inner
    if isinstance(error, LoadmasterError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if inner is not None or not lines:
        return f"{type(error).__name__}: {error}" if lines else type(error).__name__
    return textwrap.shorten(lines[-1], _CAUSE_LENGTH, placeholder=" ...")


# The processes.


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _lives(process: psutil.Process | None) -> bool:
    """Whether it is still there; one that has ended and that nobody has waited for is not."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _check_alive(what: str, processes: Sequence[psutil.Process | None]) -> None:
    told = [_gone(number, processes) for number, process in enumerate(processes) if not _lives(process)]
    if told:
        raise FetchError(f"{what}: {'; '.join(told)}; close these fetchers and start new ones")


def _gone(number: int, processes: Sequence[psutil.Process | None]) -> str:
    process = processes[number]
    which = "" if process is None else f" {process.pid}"
    return f"fetcher {number}: its process{which} is gone, possibly killed, possibly out of memory"


async def _end(processes: Sequence[psutil.Process | None]) -> None:
    """Wait until the processes are gone; kill those that stay."""
    for patience in (2.0, 5.0):
        deadline = time.monotonic() + patience
        while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for process in alive:
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
