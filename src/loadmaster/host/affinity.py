"""The CPUs that the operating system lets this process run on: the one file where platforms differ.

Linux tells. macOS has no affinity, and Windows' own is not read: there all CPUs count, and the limit says so.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

__all__ = ["Affinity", "read_affinity", "read_num_cores"]


class Affinity(NamedTuple):
    """CPUs that this process may run on, and who said so; ``known`` is False where the platform does not tell."""

    cpus: frozenset[int]
    where: str
    known: bool


def read_affinity(system: Any = os) -> Affinity:
    """Return the affinity of the calling thread.

    Parameters
    ----------
    system
        Has the functions of the module ``os``; tests pass one of another platform.
    """
    try:
        return Affinity(frozenset(system.sched_getaffinity(0)), "sched_getaffinity", known=True)
    except (AttributeError, OSError):
        # process_cpu_count came with Python 3.13, and sched_getaffinity may be forbidden by a sandbox.
        name = "process_cpu_count" if hasattr(system, "process_cpu_count") else "cpu_count"
        count = getattr(system, name)() or 1
        return Affinity(frozenset(range(count)), f"os.{name}: the affinity is unknown here", known=False)


def read_num_cores() -> int | None:
    """Return the number of physical cores where there is no sysfs to read (macOS, Windows), or None."""
    import psutil  # not needed on Linux, and slow to import

    cores: int | None = psutil.cpu_count(logical=False)
    return cores
