"""Runs one function in N fresh processes, its ranks.

    parent                                     rank r: a fresh python, loadmaster.launch.rank
    ------                                     ----------------------------------------------
    run_ranks  --- job ---------------------->  import, call function(job, context)
               <-- barrier / progress --------  context.barrier(), context.progress(...)
               --- go, when all are there --->
               <-- result | one sentence -----  returns | raises
               (end of stream) -------------->  the parent is gone: the rank ends itself at once

Each rank is a fresh interpreter, never a fork: an OpenMP run time does not survive one. The two sides speak over a
socket pair whose end is the only sign of life needed: a parent that dies in any way takes its ranks with it, and a rank
that dies in any way is seen at once, its exit signal decoded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from loadmaster.errors import RankError

__all__ = ["RanksStoppedError", "decode_exit", "run_ranks"]

POLL_SECONDS = 0.2
"""How often ranks are looked at where the system cannot tell of their end."""

STOP_SECONDS = 1.0
"""How long a rank that was told to end may take before it is killed; it holds nothing that needs putting away."""

_IMPORT_PATH = "LOADMASTER_IMPORT_PATH"
_BOOTSTRAP = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('{_IMPORT_PATH}')); "
    "from loadmaster.launch.rank import main; main()"
)
"""A rank imports from where its parent does. PYTHONPATH would not do: it goes before the standard library."""

_CAUSES = {
    "SIGKILL": "possibly out of memory",
    "SIGBUS": "a mapped file was truncated or its storage failed",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGXCPU": "the limit of CPU time was reached",
}


class RanksStoppedError(RankError):
    """The ranks were stopped since the time that they were given was over."""


@dataclass
class _Rank:
    """One process, seen from the parent."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes]
    watch: int | None
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
            text = _output_of(rank)
            if text and on_output is not None:
                on_output(rank.number, text)
        return [rank.result for rank in ranks]
    finally:
        _stop(ranks)


def _start(number: int, function: str, message: bytes, environment: Mapping[str, str]) -> _Rank:
    import_path = json.dumps([os.fsdecode(folder) for folder in sys.path])
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed by _stop
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), f"rank={number}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            env={**environment, _IMPORT_PATH: import_path},
        )
    except OSError as refused:
        output.close()
        ours.close()
        raise RankError(f"rank {number} could not be started: {refused.strerror or refused}") from None
    finally:
        theirs.close()
    rank = _Rank(number, process, Connection(ours.detach()), output, _watch(process))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as its end by _attend
        rank.connection.send((function, number))
        rank.connection.send_bytes(message)
    return rank


def _watch(process: subprocess.Popen[bytes]) -> int | None:
    """A descriptor that becomes readable when the process ends, None where the system has none (before Linux 5.3).

    The end of the connection alone would not tell: a process that the rank has started may hold it open.
    """
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


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
                    rank.connection.send("go")


def _serve(
    ranks: Sequence[_Rank], on_progress: Callable[[int, Any], None] | None, at_most: float | None = None
) -> None:
    """Wait until something happens, and take one message of each rank that has sent one, and every death."""
    watched = [rank.watch for rank in ranks if rank.watch is not None]
    if len(watched) < len(ranks):
        at_most = POLL_SECONDS if at_most is None else min(at_most, POLL_SECONDS)
    ready = wait([*(rank.connection for rank in ranks), *watched], at_most)
    for rank in ranks:
        if rank.connection in ready:
            _receive(rank, on_progress)
    for rank in ranks:
        if rank.process.poll() is not None:
            _receive_rest(rank, on_progress)


def _receive_rest(rank: _Rank, on_progress: Callable[[int, Any], None] | None) -> None:
    """Take what a rank has sent before it ended; without a result, its end is its failure."""
    while not rank.ended:
        if rank.connection.poll():
            _receive(rank, on_progress)
        else:
            rank.failure = _death(rank)


def _receive(rank: _Rank, on_progress: Callable[[int, Any], None] | None) -> None:
    try:
        kind, value = rank.connection.recv()
    except (EOFError, OSError):  # OSError: it ended within a message
        rank.failure = _death(rank)
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
        rank.failure = RankError(f"rank {rank.number} failed: {value}{_kept_output(rank)}")


def _death(rank: _Rank) -> RankError:
    try:
        code = rank.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return RankError(f"rank {rank.number} closed its connection and hangs")
    return RankError(f"rank {rank.number} {decode_exit(code)}{_kept_output(rank)}")


def decode_exit(code: int) -> str:
    """Say in words how a process ended: ``was killed by SIGKILL, possibly out of memory``."""
    if code >= 0:
        return f"ended with exit code {code} before it was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was killed by signal {-code}"
    cause = _CAUSES.get(name)
    return f"was killed by {name}" + (f", {cause}" if cause else "")


def _output_of(rank: _Rank) -> str:
    rank.output.seek(0)
    return rank.output.read().decode(errors="replace").strip()


def _kept_output(rank: _Rank) -> str:
    """Keep what a failed rank wrote, such as the stack of a crash, and say where; nothing where it wrote nothing."""
    text = _output_of(rank)
    if not text:
        return ""
    with tempfile.NamedTemporaryFile("w", prefix=f"loadmaster-rank{rank.number}-", suffix=".log", delete=False) as kept:
        kept.write(text + "\n")
    return f"; its output is in {kept.name}"


def _summary(failed: Sequence[_Rank], ranks: int) -> RankError:
    sentences = [str(rank.failure) for rank in failed]
    others = ranks - len(failed)
    if others:
        sentences[-1] += f"; the other {others} ranks were stopped" if others > 1 else "; the other rank was stopped"
    return RankError("\n".join(sentences))


def _stop(ranks: Sequence[_Rank]) -> None:
    """End what still runs and close everything."""
    for rank in ranks:
        if rank.process.poll() is None and not rank.finished:
            rank.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()
        rank.connection.close()
        rank.output.close()
        if rank.watch is not None:
            os.close(rank.watch)
