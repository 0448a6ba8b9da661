"""The one place that imports torch, so that its absence is one sentence everywhere."""

from __future__ import annotations

from types import ModuleType

from loadmaster.errors import MissingDependencyError

__all__ = ["import_torch"]


def import_torch() -> ModuleType:
    """Return the torch module, or raise one sentence with the command that installs it."""
    try:
        import torch
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise MissingDependencyError(
            "torch is not installed, and this needs it: pip install 'loadmaster[torch]'"
        ) from None
    return torch
