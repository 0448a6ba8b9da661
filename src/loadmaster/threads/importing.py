"""The one place that imports torch, so that its absence is one sentence everywhere, and its import leaves no trace."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from loadmaster.errors import MissingDependencyError

__all__ = ["import_torch", "kept_affinity", "require_torch"]

_MISSING = "torch is not installed, and this needs it: pip install 'loadmaster[torch]'"


def import_torch() -> ModuleType:
    """Return the torch module, or raise one sentence with the command that installs it.

    With ``OMP_PROC_BIND`` the OpenMP run time binds the importing thread to one place, often one CPU, and everything
    that this thread starts later inherits that; the mask from before the import is given back.
    """
    first = sys.modules.get("torch") is None
    try:
        with kept_affinity() if first else contextlib.nullcontext():
            import torch
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise MissingDependencyError(_MISSING) from None
    return torch


@contextlib.contextmanager
def kept_affinity() -> Iterator[None]:
    """Give the calling thread its affinity mask back after the block, where that changed it.

    A block that ends in another thread, such as a generator's that another thread closes, leaves that one's mask alone.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    thread, before = threading.get_ident(), os.sched_getaffinity(0)
    try:
        yield
    finally:
        if threading.get_ident() == thread and os.sched_getaffinity(0) != before:
            with contextlib.suppress(OSError):  # the CPUs went away meanwhile
                os.sched_setaffinity(0, before)


def require_torch() -> None:
    """Raise the same sentence if torch is missing, without the second or two that its import takes."""
    try:
        found = importlib.util.find_spec("torch")
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise MissingDependencyError(_MISSING)
