"""Processes that hold leases as a test tells them; see ``lease_child.py``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("lease_child.py")
SECONDS = 30.0


class Process:
    """One such process; ``process.look()`` calls ``look`` there and returns its answer."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.child = subprocess.Popen(
            [sys.executable, os.fspath(CHILD)],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a line that waits in a buffer of ours would not be seen by select
        )
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Its number; waits until it is ready."""
        if self._pid is None:
            self._pid = self.answer()
        return self._pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.answer()

        return call

    def send(self, name: str, *arguments: Any) -> None:
        assert self.pid
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.child.stdin.flush()

    def answer(self) -> Any:
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], SECONDS)
        assert ready, "no answer"
        line = self.child.stdout.readline()
        assert line, f"the process has ended with {self.child.wait()}"
        found = json.loads(line)
        assert not (isinstance(found, dict) and "error" in found), found["error"]
        return found

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def close(self) -> int:
        """Let it end as a program does."""
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()
        return self.child.wait(SECONDS)


Start = Callable[..., Process]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Ask again and again until it holds; return how many seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, "it does not come true"
    return time.monotonic() - begin
