"""How much memory this process has held at most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["peak_rss"]


def peak_rss(status: Path = Path("/proc/self/status")) -> int:
    """Return the largest resident set of this process so far, in bytes.

    On Linux ``VmHWM`` of proc(5) and not ``ru_maxrss``, which a program inherits from the process that started it.
    """
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
