"""The one place that imports torch, so that its absence is one sentence everywhere."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from loadmaster.errors import MissingDependencyError

__all__ = ["import_torch", "require_torch"]

_MISSING = "torch is not installed, and this needs it: pip install 'loadmaster[torch]'"


def import_torch() -> ModuleType:
    """Return the torch module, or raise one sentence with the command that installs it."""
    try:
        import torch
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise MissingDependencyError(_MISSING) from None
    return torch


def require_torch() -> None:
    """Raise the same sentence if torch is missing, without the second or two that its import takes."""
    try:
        found = importlib.util.find_spec("torch")
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise MissingDependencyError(_MISSING)
