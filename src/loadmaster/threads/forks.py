"""Whether this process is a fork of one that had torch loaded: there a large operation may hang for ever.

A fork copies the OpenMP run time's record of its team and not the team's threads, so the next parallel region waits for
members that do not exist. Nothing in the process says whether its parent had used a team, so a parent that had torch
loaded counts as one that did.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

__all__ = ["forked_with_torch", "library_address"]

_FORKED_WITHOUT_EXEC = 0x40
"""``PF_FORKNOEXEC`` of Linux (include/linux/sched.h), in field 9 of /proc/PID/stat (proc(5))."""

_LIBRARY = "libtorch_cpu"


def forked_with_torch() -> bool:
    """Whether this process was forked, without an exec, from one that had torch loaded."""
    return sys.modules.get("torch") is not None and _forked_with_torch(os.getpid())


@functools.lru_cache(maxsize=1)
def _forked_with_torch(pid: int) -> bool:
    """The answer for this process, ``pid``; torch is loaded."""
    if not _forked_without_exec():
        return False
    parent = os.getppid()
    own = _library_address("self")
    if own is None or _program("self") != _program(str(parent)):
        return True  # the parent is gone, or cannot be seen: the safe answer
    # An address that parent and child share was inherited. Both may also have loaded it after the fork, since a fork is
    # laid out as its parent is: that cannot be told apart, and the answer is the safe one.
    return own == _library_address(str(parent))


def _forked_without_exec() -> bool:
    try:
        text = Path("/proc/self/stat").read_text()
        return bool(int(text.rpartition(")")[2].split()[6]) & _FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


def _program(process: str) -> str:
    try:
        return str(Path("/proc", process, "exe").readlink())
    except OSError:
        return ""


def _library_address(process: str) -> str | None:
    try:
        return library_address(Path("/proc", process, "maps").read_text(errors="replace"), _LIBRARY)
    except OSError:
        return None


def library_address(maps: str, name: str) -> str | None:
    """Return where the library whose file name begins with ``name`` is mapped, from the text of /proc/PID/maps."""
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].rpartition("/")[2].startswith(name):
            return parts[0].partition("-")[0]
    return None
