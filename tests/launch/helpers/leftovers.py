"""What a run of ranks may not leave behind: processes, open files, temporary files, threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

DEADLINE_SECONDS = 20.0


def open_files() -> set[tuple[str, str]]:
    """The open descriptors of this process, each with what it leads to."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.add((descriptor.name, os.readlink(descriptor)))  # noqa: PTH115  pipes and sockets are no paths
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def child_processes() -> set[int]:
    """The processes that descend from this one, ended but not yet waited for included."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def thread_names() -> set[tuple[str, int | None]]:
    """The threads of this process."""
    return {(thread.name, thread.ident) for thread in threading.enumerate()}


def is_alive(process: int) -> bool:
    """Whether a process still runs; one that has ended and that nobody has waited for does not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive_at_the_end(processes: Iterable[int], seconds: float = DEADLINE_SECONDS) -> list[int]:
    """The processes that still run after at most ``seconds``; returns as soon as none does."""
    deadline = time.monotonic() + seconds
    processes = list(processes)
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return alive


def taken_text(folder: Path, sentence: str) -> str:
    """Return the text of the kept output that ``sentence`` names, which lies in ``folder``, and remove it."""
    (name,) = [word.rstrip(";") for word in sentence.split() if word.startswith(os.fspath(folder))]
    path = Path(name)
    text = path.read_text()
    path.unlink()
    return text
