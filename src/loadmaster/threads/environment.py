"""The environment of a process that is about to be started, so that its first thread team is already right.

The wait policy is left alone: spinning is what makes a team fast while every member has a core. Only where processes
outnumber the cores, members spin against threads that have work; then the spinning is shortened, with the variable of
the run time that is really there, and never against what the user set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from loadmaster.share.settings import USER_OMP_VARIABLE

__all__ = ["openmp_of_torch", "rank_environment", "wait_policy"]

_USER_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")

_KNOBS = {
    "libgomp": ("GOMP_SPINCOUNT", "1000"),
    "libomp": ("KMP_BLOCKTIME", "0"),
    "libiomp": ("KMP_BLOCKTIME", "0"),
}
"""libgomp spins 1000 rounds by itself when its own process has more threads than CPUs (libgomp manual, GOMP_SPINCOUNT);
milliseconds before a member sleeps in the LLVM and Intel run times. Measured with a 400 KB copy: docs/openmp.md."""


def rank_environment(
    threads: int, rank: int, ranks: int, environ: Mapping[str, str] | None = None, *, cores: int | None = None
) -> dict[str, str]:
    """Return the environment of rank ``rank``: ``environ`` with its thread count and its place among the ranks.

    ``threads`` is a share, which never exceeds an ``OMP_NUM_THREADS`` that the user set; what the user set is passed on
    beside it, so that ours is not taken for a bound when the share grows. ``cores`` are those that the
    ranks share; without it the wait policy is left alone.
    """
    base = os.environ if environ is None else environ
    shortened = wait_policy(base, openmp_of_torch()) if cores is not None and ranks > cores else {}
    return {
        **base,
        **shortened,
        "OMP_NUM_THREADS": str(threads),
        USER_OMP_VARIABLE: base.get(USER_OMP_VARIABLE, base.get("OMP_NUM_THREADS", "")),
        "LOADMASTER_LOCAL_RANK": str(rank),
        "LOADMASTER_LOCAL_SIZE": str(ranks),
    }


def wait_policy(environ: Mapping[str, str], run_time: str) -> dict[str, str]:
    """Return the variable that shortens the spinning of ``run_time``, if it is known and the user has set none."""
    if run_time not in _KNOBS or any(name in environ for name in _USER_POLICIES):
        return {}
    name, value = _KNOBS[run_time]
    return {name: value}


def openmp_of_torch() -> str:
    """The OpenMP run time of the installed torch: ``libgomp``, ``libomp``, ``libiomp``, or empty where it is not known.

    What is loaded tells; else the libraries beside torch do, so that torch need not be imported for it.
    """
    if sys.modules.get("torch") is not None:
        from loadmaster.threads.openmp import run_times

        names = {Path(row.filepath).name for row in run_times().openmp}
    else:
        try:
            found = find_spec("torch")
        except (ModuleNotFoundError, ValueError):
            found = None
        package = Path(found.origin).parent if found is not None and found.origin else None
        names = set() if package is None else _library_names(package)
    known = {prefix for prefix in _KNOBS for name in names if name.startswith(prefix)}
    return known.pop() if len(known) == 1 else ""


def _library_names(package: Path) -> set[str]:
    """The libraries that a wheel of torch brings along, in either of the two places that wheels use."""
    folders = (package / "lib", package.parent / "torch.libs")
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
