"""The environment of a process that is about to be started, so that its first thread team is already right."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["rank_environment"]


def rank_environment(threads: int, rank: int, ranks: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of rank ``rank``: ``environ`` with its thread count and its place among the ranks.

    ``threads`` is a share, which never exceeds an ``OMP_NUM_THREADS`` that the user set.
    """
    return {
        **(os.environ if environ is None else environ),
        "OMP_NUM_THREADS": str(threads),
        "LOADMASTER_LOCAL_RANK": str(rank),
        "LOADMASTER_LOCAL_SIZE": str(ranks),
    }
