"""The scope: torch runs with the share of this process while somebody else's loader loads.

torch intra-op threads    raise: the calling thread alone, through the OpenMP run time
                          lower: the calling thread and threads that start meanwhile, through torch
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Literal

from loadmaster.errors import InputError
from loadmaster.share import Share, share
from loadmaster.threads.importing import import_torch
from loadmaster.threads.openmp import set_threads_here

__all__ = ["load_threads"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def load_threads(threads: int | Literal["auto"] = "auto") -> Iterator[Share]:
    """Run the block, or the decorated function, with torch's intra-op threads at this process's share.

    Parameters
    ----------
    threads : int or "auto"
        ``auto`` is the share of this host; a number is explicit and is capped at the usable CPUs.

    Yields
    ------
    Share
        The share in force, with its reason.

    Raises
    ------
    InputError
        ``threads`` is neither ``auto`` nor a positive integer.
    """
    part = _share_of(threads)
    torch = import_torch()
    before = torch.get_num_threads()
    default = _threads_of_new_threads()
    lowered = part.threads < default
    if lowered or not set_threads_here(part.threads):
        torch.set_num_threads(part.threads)
    started = time.monotonic()
    try:
        yield part
    finally:
        if lowered or not set_threads_here(before):
            torch.set_num_threads(default)
            set_threads_here(before)
        if part.threads != before:
            seconds = time.monotonic() - started
            _log.info(_CHANGED, before, part.threads, part.why, before, seconds)


_CHANGED = "torch intra-op threads: %d -> %d (%s), restored to %d after %.1f s"


def _threads_of_new_threads() -> int:
    """What a thread that starts now begins with; torch tells it only to such a thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(import_torch().get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def _share_of(threads: int | Literal["auto"]) -> Share:
    if threads == "auto":
        return share()
    if type(threads) is not int or threads < 1:
        raise InputError(f"load_threads: threads must be a positive integer or 'auto', not {threads!r}")
    return share(threads=threads)
