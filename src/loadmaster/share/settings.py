"""What the user set about threads, and what only looks as if the user had set it.

Source for ``OMP_NUM_THREADS``: OpenMP 5.2, section 21.1.2 (a list gives one number per nesting level), and libgomp's
``env.c``, which reports a value that it cannot use, ignores it, and starts one thread per CPU of the affinity mask.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from loadmaster.host.limits import parse_count

__all__ = ["USER_OMP_VARIABLE", "Bound", "Settings", "parse_omp_num_threads", "ray_assigned_cpus", "read_settings"]


USER_OMP_VARIABLE = "LOADMASTER_OMP_NUM_THREADS"
"""Where our launchers set ``OMP_NUM_THREADS`` to a share, this has what the user set: a number, or nothing."""


class Bound(NamedTuple):
    """A number of threads, and the words that name where it comes from."""

    threads: int
    reason: str


class Settings(NamedTuple):
    """What bears on the number of threads, besides the host and its ranks.

    Attributes
    ----------
    explicit
        The number that the user asked for, or None.
    bounds
        Upper bounds, such as an ``OMP_NUM_THREADS`` of the user.
    raised
        Words on a number that is not the user's, and so does not bind; else empty.
    problems
        Sentences on values that cannot be used.
    """

    explicit: Bound | None = None
    bounds: tuple[Bound, ...] = ()
    raised: str = ""
    problems: tuple[str, ...] = ()


def read_settings(threads: int | None, environ: Mapping[str, str], assigned_cpus: float | None = None) -> Settings:
    """Read what the user set.

    Parameters
    ----------
    threads
        The argument; comes before ``LOADMASTER_THREADS``, which comes before ``OMP_NUM_THREADS``.
    assigned_cpus
        CPUs that Ray assigned to this actor or task, or None.

    Raises
    ------
    InputError
        If ``threads`` or ``LOADMASTER_THREADS`` is no number of at least 1.
    """
    ours = environ.get("LOADMASTER_THREADS", "").strip()  # blank is as good as unset
    if threads is not None:
        return Settings(explicit=Bound(parse_count(threads, "--threads"), "--threads"))
    if ours:
        return Settings(explicit=Bound(parse_count(ours, "LOADMASTER_THREADS"), "LOADMASTER_THREADS"))
    bounds = [] if not assigned_cpus else [Bound(max(1, int(assigned_cpus)), f"Ray assigned {assigned_cpus:g} CPUs")]
    text = environ.get(USER_OMP_VARIABLE, environ.get("OMP_NUM_THREADS"))
    if text is None or (not text and USER_OMP_VARIABLE in environ):
        return Settings(bounds=tuple(bounds))
    number = parse_omp_num_threads(text)
    if number is None:
        return Settings(bounds=tuple(bounds), problems=(_unusable(text),))
    setter = _setter_of_one(environ) if number == 1 else ""
    if setter:
        return Settings(bounds=tuple(bounds), raised=f"OMP_NUM_THREADS=1 is {setter}'s default")
    return Settings(bounds=(*bounds, Bound(number, f"OMP_NUM_THREADS={text.strip()}")))


def parse_omp_num_threads(text: str) -> int | None:
    """Return the number for the outermost level, or None where the OpenMP run time cannot use the value."""
    numbers = [number.strip(" \t\n\v\f\r") for number in text.split(",")]
    if not all(re.fullmatch(r"\+?[0-9]{1,9}", number) and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def ray_assigned_cpus(modules: Mapping[str, Any] = sys.modules) -> float | None:
    """Return the CPUs that Ray assigned to this actor or task; None outside of Ray, or where it was assigned none.

    Ray is asked only if this process has imported it already.
    """
    ray = modules.get("ray")
    if ray is None:
        return None
    try:
        return float(ray.get_runtime_context().get_assigned_resources()["CPU"]) or None
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        # Not connected, or a driver, to which nothing is assigned: Ray says so in various ways.
        return None


def _setter_of_one(environ: Mapping[str, str]) -> str:
    """Who sets ``OMP_NUM_THREADS=1`` where the user did not: torchrun for several ranks, Ray for each worker."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "Ray" if any(name.startswith("RAY_") for name in environ) else ""


def _unusable(text: str) -> str:
    return (
        f"OMP_NUM_THREADS={text[:40]!r} is no number of threads: the OpenMP run time reports it as invalid and starts "
        "one thread per CPU; it is not counted here"
    )
