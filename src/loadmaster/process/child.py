"""A process of ours, seen from its parent: a fresh interpreter, a line to it, and how it ended.

Never a fork: an OpenMP run time does not survive one. The two sides speak over a socket pair whose end is the only sign
of life needed: a parent that dies in any way takes its children with it (`loadmaster.process.line`), and a child that
dies in any way is seen at once, its exit signal decoded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO

from loadmaster.errors import RankError

__all__ = ["POLL_SECONDS", "Child", "decode_exit", "stop_children"]

POLL_SECONDS = 0.2
"""How often children are looked at where the system cannot tell of their end."""

STOP_SECONDS = 1.0
"""How long a child that was told to end may take before it is killed; it holds nothing that needs putting away."""

_IMPORT_PATH = "LOADMASTER_IMPORT_PATH"
_BOOTSTRAP = (
    f"import importlib, json, os, sys; sys.path[:] = json.loads(os.environ.pop('{_IMPORT_PATH}')); "
    "importlib.import_module(sys.argv[2]).main()"
)
"""A child imports from where its parent does. PYTHONPATH would not do: it goes before the standard library."""

_CAUSES = {
    "SIGKILL": "possibly out of memory",
    "SIGBUS": "a mapped file was truncated or its storage failed",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGXCPU": "the limit of CPU time was reached",
}


@dataclass
class Child:
    """One process, seen from the parent. ``watch`` is a descriptor that becomes readable when the process ends."""

    name: str
    process: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes]
    watch: int | None

    @classmethod
    def start(cls, name: str, module: str, environment: Mapping[str, str], label: str) -> Child:
        """Start ``main()`` of ``module`` in a fresh interpreter with the whole ``environment``.

        ``name`` is for messages (``rank 0``), ``label`` for the command line that ``ps`` shows (``rank=0``).

        Raises
        ------
        RankError
            The process could not be started.
        """
        import_path = json.dumps([os.fsdecode(folder) for folder in sys.path])
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop_children
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), module, label],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**environment, _IMPORT_PATH: import_path},
            )
        except OSError as refused:
            output.close()
            ours.close()
            raise RankError(f"{name} could not be started: {refused.strerror or refused}") from None
        finally:
            theirs.close()
        return cls(name, process, Connection(ours.detach()), output, _watch(process))

    def death(self) -> str:
        """Say how this child, whose line has ended, came to its end: ``rank 0 was killed by SIGKILL, ...``."""
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its connection and hangs"
        return f"{self.name} {decode_exit(code)}{self.kept_output()}"

    def written(self) -> str:
        """What it has written to standard output and standard error."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace").strip()

    def kept_output(self) -> str:
        """Keep what it wrote, such as the stack of a crash, and say where; nothing where it wrote nothing."""
        text = self.written()
        if not text:
            return ""
        prefix = f"loadmaster-{self.name.replace(' ', '')}-"
        with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".log", delete=False) as kept:
            kept.write(text + "\n")
        return f"; its output is in {kept.name}"

    def close(self) -> None:
        """Close everything that the parent holds of a child that has ended."""
        self.connection.close()
        self.output.close()
        if self.watch is not None:
            os.close(self.watch)
            self.watch = None


def _watch(process: subprocess.Popen[bytes]) -> int | None:
    """A descriptor that becomes readable when the process ends, None where the system has none (before Linux 5.3).

    The end of the connection alone would not tell: a process that the child has started may hold it open.
    """
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


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


def stop_children(children: Sequence[Child], finished: Iterable[Child] = ()) -> None:
    """End what still runs and close everything; those ``finished`` end by themselves and are not told to."""
    finished = list(finished)
    for child in children:
        if child.process.poll() is None and not any(child is other for other in finished):
            child.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
        child.close()
