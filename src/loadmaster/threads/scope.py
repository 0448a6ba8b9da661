"""The scope: torch runs with the share of this process while somebody else's loader loads.

torch intra-op threads    raise: the calling thread alone, through the OpenMP run time
                          lower: the calling thread and threads that start meanwhile, through torch
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Literal

from loadmaster.errors import InputError
from loadmaster.share import Share, share
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
    import torch

    before = torch.get_num_threads()
    _set(part.threads, before)
    started = time.monotonic()
    try:
        yield part
    finally:
        if part.threads < before:
            torch.set_num_threads(before)
        set_threads_here(before)
        if part.threads != before:
            _log.info(
                "torch intra-op threads: %d -> %d (%s), restored to %d after %.1f s",
                before,
                part.threads,
                part.why,
                before,
                time.monotonic() - started,
            )


def _share_of(threads: int | Literal["auto"]) -> Share:
    if threads == "auto":
        return share()
    if type(threads) is not int or threads < 1:
        raise InputError(f"load_threads: threads must be a positive integer or 'auto', not {threads!r}")
    return share(threads=threads)


def _set(threads: int, before: int) -> None:
    import torch

    if threads < before or not set_threads_here(threads):
        torch.set_num_threads(threads)
