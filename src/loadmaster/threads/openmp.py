"""The OpenMP run time that torch has really loaded, and its count for the calling thread.

An OpenMP thread count belongs to the calling thread. ``torch.set_num_threads`` changes it and, besides, what threads
that start later begin with; the run time's own ``omp_set_num_threads`` changes the calling thread alone.
"""

from __future__ import annotations

import logging
from typing import Any

from loadmaster.threads.importing import import_torch

__all__ = ["openmp_controllers", "set_threads_here", "use_one_thread_here"]

_log = logging.getLogger(__name__)


def openmp_controllers() -> list[Any]:
    """Return threadpoolctl's controllers of the OpenMP run times loaded in this process, none without one."""
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="openmp").lib_controllers)


def set_threads_here(threads: int) -> bool:
    """Set the intra-op threads of the calling thread alone; False where no OpenMP run time is loaded.

    torch sets a thread's count when the thread first asks for it (``at::internal::lazy_init_num_threads``), so it is
    asked first and told after.
    """
    import_torch().get_num_threads()
    controllers = openmp_controllers()
    for controller in controllers:
        controller.set_num_threads(threads)
    return bool(controllers)


def use_one_thread_here() -> None:
    """Let torch run with one thread in the calling thread, and only there."""
    if not set_threads_here(1):
        _log.debug("no OpenMP run time is loaded: torch's threads are left as they are")
