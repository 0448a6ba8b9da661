"""The counts of a process that does nothing but load, set once for its whole life."""

from __future__ import annotations

import logging

from loadmaster.errors import InputError
from loadmaster.host.notices import warn_once
from loadmaster.share import Share
from loadmaster.threads.forks import forked_with_torch
from loadmaster.threads.importing import import_torch
from loadmaster.threads.openmp import torch_backend
from loadmaster.threads.process import process_counts
from loadmaster.threads.scope import FORKED, thread_counts

__all__ = ["set_process_threads"]

_log = logging.getLogger(__name__)


def set_process_threads(share: Share | int, inter_op: bool = False) -> None:
    """Set torch's threads for the whole process: this thread, threads that start later, and BLAS pools.

    For a process that was spawned to load and does nothing else, such as a fetcher. There is nothing to restore;
    calling it again is harmless.

    Parameters
    ----------
    share : Share or int
        The share of this process, or its number of threads.
    inter_op : bool
        Set the inter-op threads too. torch lets this be done once in a process, before it uses them; where that is
        over, they are left as they are and the log says so.

    Raises
    ------
    InputError
        ``share`` is neither a `Share` nor a positive integer.
    """
    threads = share.threads if isinstance(share, Share) else share
    if type(threads) is not int or threads < 1:
        raise InputError(f"set_process_threads: a share or a positive integer is needed, not {share!r}")
    if forked_with_torch():
        warn_once(__name__, FORKED)
        threads = 1
    torch = import_torch()
    if torch_backend() in ("OpenMP", ""):
        before = torch.get_num_threads()
        process_counts().set_for_good(threads)
        thread_counts().set_for_good(threads)
        why = share.why if isinstance(share, Share) else "as asked for"
        _log.info("torch intra-op threads: %d -> %d (%s), for this process", before, threads, why)
    else:
        warn_once(__name__, f"torch was built with a {torch_backend()}: its intra-op threads are left as they are")
    if inter_op:
        _set_inter_op(threads)


def _set_inter_op(threads: int) -> None:
    torch = import_torch()
    before = torch.get_num_interop_threads()
    try:
        torch.set_num_interop_threads(threads)
    except RuntimeError:
        instead = "" if before == threads else f" instead of {threads}"
        _log.info(
            "torch inter-op threads: left at %d%s, since torch lets them be set once, before they are used",
            before,
            instead,
        )
    else:
        _log.info("torch inter-op threads: %d -> %d, for this process", before, threads)
