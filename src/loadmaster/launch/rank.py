"""The main of a rank's process; started by `loadmaster.launch.spawn`, never by hand."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from loadmaster.errors import LoadmasterError
from loadmaster.process.line import open_line

__all__ = ["RankContext", "main"]


class RankContext:
    """A rank's line to its parent.

    Attributes
    ----------
    rank : int
        The number of this rank, from 0.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self._connection = connection
        self._go = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="loadmaster-parent", daemon=True).start()

    def barrier(self) -> None:
        """Wait until every rank that still runs has come here.

        What there is by then, the million objects of imported modules above all, is left out of garbage collection
        from here on: a pass over them takes 60 to 90 ms of a core, and one is due just when a load has begun.
        """
        gc.freeze()
        self._go.clear()
        self.send("barrier", None)
        self._go.wait()

    def progress(self, value: Any) -> None:
        """Tell the parent how far this rank is."""
        self.send("progress", value)

    def send(self, kind: str, value: Any) -> None:
        """Send one message; a parent that is gone ends this process."""
        try:
            with self._sending:
                self._connection.send((kind, value))
        except OSError:
            os._exit(1)

    def _listen(self) -> None:
        """Take the parent's "go"; its end, however it came, is also the end of this rank."""
        try:
            while True:
                self._connection.recv()
                self._go.set()
        except (EOFError, OSError):
            os._exit(1)


def main() -> None:
    """Receive the function and its job, run it, and send back what became of it."""
    connection = open_line()
    try:
        function, rank = connection.recv()
        job = connection.recv_bytes()
    except EOFError:
        os._exit(1)
    context = RankContext(rank, connection)
    try:
        result = _find(function)(pickle.loads(job), context)
        sys.stdout.flush()  # the parent looks at what was written as soon as it has the result
        context.send("result", result)
    except LoadmasterError as expected:
        context.send("error", str(expected))
    except MemoryError as full:
        context.send("error", f"memory is exhausted: {full}")
    except BaseException as error:
        traceback.print_exc()
        context.send("bug", f"{type(error).__name__}: {error}")


def _find(function: str) -> Callable[[Any, RankContext], Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
