"""Runs one function in N fresh processes, its ranks.

    parent                                     rank r: a fresh python, loadmaster.launch.rank
    ------                                     ----------------------------------------------
    run_ranks  --- job ---------------------->  import, call function(job, context)
               <-- barrier / progress --------  context.barrier(), context.progress(...)
               --- go, when all are there --->
               <-- result | one sentence -----  returns | raises
               (end of stream) -------------->  the parent is gone: the rank ends itself at once

How the processes are started and how their end is seen: `loadmaster.process.child`.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from loadmaster.errors import RankError
from loadmaster.process.child import POLL_SECONDS, Child, stop_children

__all__ = ["RanksStoppedError", "run_ranks"]


class RanksStoppedError(RankError):
    """The ranks were stopped since the time that they were given was over."""


@dataclass
class _Rank:
    """One process, seen from the parent."""

    number: int
    child: Child
    waiting: bool = False
    finished: bool = False
    result: Any = None
    failure: RankError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.finished or self.failure is not None


def run_ranks(
    function: str,
    jobs: Sequence[Any],
    *,
    environments: Sequence[Mapping[str, str]],
    on_progress: Callable[[int, Any], None] | None = None,
    on_output: Callable[[int, str], None] | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call ``function(job, context)`` in one process per job and return what each returned, in order.

    Parameters
    ----------
    function : str
        What to call in the rank, as ``package.module:name``; its jobs and results are pickled.
    environments : sequence of mapping
        The whole environment of each rank.
    on_progress : callable, optional
        Called with the rank and what it gave to ``context.progress``.
    on_output : callable, optional
        Called with the rank and its text on standard error, where it ended well and wrote any.
    timeout_seconds : float, optional
        Stop all ranks when so much time has passed since this call, their start included.

    Raises
    ------
    RanksStoppedError
        The time was over before every rank was done.
    RankError
        A rank raised, was killed or ended without a result: one sentence per failed rank. The others were stopped.
    """
    ranks: list[_Rank] = []
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    messages = [pickle.dumps(job) for job in jobs]
    try:
        for number, (message, environment) in enumerate(zip(messages, environments, strict=True)):
            ranks.append(_start(number, function, message, environment))
        _attend(ranks, on_progress, deadline)
        failed = [rank for rank in ranks if rank.failure is not None]
        if failed:
            raise _summary(failed, len(ranks))
        for rank in ranks:
            text = rank.child.written()
            if text and on_output is not None:
                on_output(rank.number, text)
        return [rank.result for rank in ranks]
    finally:
        stop_children([rank.child for rank in ranks], finished=[rank.child for rank in ranks if rank.finished])


def _start(number: int, function: str, message: bytes, environment: Mapping[str, str]) -> _Rank:
    child = Child.start(f"rank {number}", "loadmaster.launch.rank", environment, f"rank={number}")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as its end by _attend
        child.connection.send((function, number))
        child.connection.send_bytes(message)
    return _Rank(number, child)


def _attend(
    ranks: Sequence[_Rank], on_progress: Callable[[int, Any], None] | None, deadline: float | None = None
) -> None:
    """Serve all ranks until each has finished or one has failed, or ``deadline`` of the monotonic clock is over."""
    while any(not rank.ended for rank in ranks):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise RanksStoppedError("the ranks were not done in their time and were stopped")
        _serve([rank for rank in ranks if not rank.ended], on_progress, left)
        if any(rank.failure is not None for rank in ranks):
            return
        running = [rank for rank in ranks if not rank.ended]
        if running and all(rank.waiting for rank in running):
            for rank in running:
                rank.waiting = False
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rank.child.connection.send("go")


def _serve(
    ranks: Sequence[_Rank], on_progress: Callable[[int, Any], None] | None, at_most: float | None = None
) -> None:
    """Wait until something happens, and take one message of each rank that has sent one, and every death."""
    watched = [rank.child.watch for rank in ranks if rank.child.watch is not None]
    if len(watched) < len(ranks):
        at_most = POLL_SECONDS if at_most is None else min(at_most, POLL_SECONDS)
    ready = wait([*(rank.child.connection for rank in ranks), *watched], at_most)
    for rank in ranks:
        if rank.child.connection in ready:
            _receive(rank, on_progress)
    for rank in ranks:
        if rank.child.process.poll() is not None:
            _receive_rest(rank, on_progress)


def _receive_rest(rank: _Rank, on_progress: Callable[[int, Any], None] | None) -> None:
    """Take what a rank has sent before it ended; without a result, its end is its failure."""
    while not rank.ended:
        if rank.child.connection.poll():
            _receive(rank, on_progress)
        else:
            rank.failure = RankError(rank.child.death())


def _receive(rank: _Rank, on_progress: Callable[[int, Any], None] | None) -> None:
    try:
        kind, value = rank.child.connection.recv()
    except (EOFError, OSError):  # OSError: it ended within a message
        rank.failure = RankError(rank.child.death())
        return
    except Exception as unreadable:
        rank.failure = RankError(f"rank {rank.number} sent what cannot be received: {unreadable}")
        return
    if kind == "progress":
        if on_progress is not None:
            on_progress(rank.number, value)
    elif kind == "barrier":
        rank.waiting = True
    elif kind == "result":
        rank.result, rank.finished = value, True
    elif kind == "error":
        rank.failure = RankError(f"rank {rank.number}: {value}")
    else:
        rank.failure = RankError(f"rank {rank.number} failed: {value}{rank.child.kept_output()}")


def _summary(failed: Sequence[_Rank], ranks: int) -> RankError:
    sentences = [str(rank.failure) for rank in failed]
    others = ranks - len(failed)
    if others:
        sentences[-1] += f"; the other {others} ranks were stopped" if others > 1 else "; the other rank was stopped"
    return RankError("\n".join(sentences))
