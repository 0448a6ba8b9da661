"""The errors that Loadmaster raises on purpose: one human sentence each, and the exit code of the command.

Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "FetchCancelledError",
    "FetchError",
    "InputError",
    "LoadmasterError",
    "MissingDependencyError",
    "PlacementError",
    "RankError",
    "SharedMemoryError",
]


class LoadmasterError(Exception):
    """An expected failure. ``str(error)`` is one sentence: what was wanted, what was found, what to do next."""

    exit_code = 1


class InputError(LoadmasterError):
    """A setting, an argument or a path that cannot be used as it is."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint that cannot be opened or read; names the file, the tensor and the offset where there is one."""


class PlacementError(InputError):
    """A tensor that cannot be placed as asked: a dimension that does not divide, a target of another shape."""


class MissingDependencyError(InputError):
    """An optional package that this call needs is not installed; names the command that installs it."""


class RankError(LoadmasterError):
    """One or more ranks failed while they ran; one sentence per rank, signals decoded."""


class FetchError(LoadmasterError):
    """Weights could not be fetched; names the tensors, and how each fetcher failed."""


class FetchCancelledError(FetchError):
    """A fetch was given up for a newer version, or since the fetchers were closed."""


class SharedMemoryError(LoadmasterError):
    """Shared memory that is not to be had, or that is gone; says how much was asked, or whose it was."""
