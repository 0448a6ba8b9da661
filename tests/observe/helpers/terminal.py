"""Runs a program whose standard error is a terminal, and returns what the terminal got."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Mapping, Sequence


def run_on_terminal(words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return the exit code, the text on standard output, and what a terminal of 120 columns got."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # EIO: nobody has the terminal open any more
                return
            if not block:
                return
            shown.extend(block)

    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
        )
    finally:
        os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    stdout, _ = process.communicate()
    reader.join()
    os.close(ours)
    return process.returncode, stdout, shown.decode(errors="replace")
