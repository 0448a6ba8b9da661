"""The limits on CPUs as rows of a table, which of them binds, and the two numbers that follow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadmaster.errors import InputError

__all__ = ["Hint", "Limit", "compute_threads", "io_threads", "mark_binding", "parse_count", "read_hint"]

# Of limits that come to the same number the cause is named: a set of CPUs that was narrowed, then the hardware, then
# the rest. A weight shares out what is contended, and is shown only.
_PRECEDENCE = ("cpuset", "affinity", "cores", "quota", "hint", "online")


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that limits, or might limit, the CPUs of this process.

    Attributes
    ----------
    name
        ``online``, ``affinity``, ``cpuset``, ``cores``, ``quota``, ``hint`` or ``weight``.
    value
        In CPUs; a weight has no unit.
    where
        The file, variable or call that it was read from.
    binding
        Whether this is the one that decides.
    """

    name: str
    value: float
    where: str
    binding: bool = False


class Hint(NamedTuple):
    """An upper bound from the user, in CPUs, and what it was set with."""

    cpus: int
    where: str


def read_hint(cpus: int | None, environ: Mapping[str, str]) -> Hint | None:
    """Return the user's upper bound: the argument if there is one, else ``LOADMASTER_CPUS``.

    Raises
    ------
    InputError
        If it is no whole number of at least 1.
    """
    if cpus is not None:
        return Hint(parse_count(cpus, "--cpus"), "--cpus")
    text = environ.get("LOADMASTER_CPUS")
    return None if text is None else Hint(parse_count(text, "LOADMASTER_CPUS"), "LOADMASTER_CPUS")


def parse_count(value: int | str, name: str) -> int:
    """Return a whole number of at least 1.

    Raises
    ------
    InputError
        For anything else; names the setting and its value.
    """
    text = str(value).strip()
    # Nine digits are enough for any count here, and no text makes the conversion slow.
    if not re.fullmatch(r"\+?[0-9]{1,9}", text) or int(text) < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {text[:40]!r}")
    return int(text)


def mark_binding(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Return the limits with exactly one marked as the one that binds."""
    online = next((limit.value for limit in limits if limit.name == "online"), math.inf)

    def rank(limit: Limit) -> tuple[int, int, float]:
        narrowed = limit.value < online or limit.name not in ("cpuset", "affinity")
        place = _PRECEDENCE.index(limit.name) if narrowed else len(_PRECEDENCE)
        return math.floor(limit.value), place, limit.value

    binding = min((limit for limit in limits if limit.name in _PRECEDENCE), key=rank)
    return tuple(Limit(limit.name, limit.value, limit.where, limit is binding) for limit in limits)


def compute_threads(num_cores: int, quota: float | None, hint: Hint | None) -> int:
    """Threads for work that keeps CPUs busy: rounded down, since a team waits for its slowest member; at least 1."""
    bounds = [num_cores, *_bounds(hint), *([] if quota is None else [math.floor(quota)])]
    return max(1, min(bounds))


def io_threads(num_cpus: int, quota: float | None, hint: Hint | None) -> int:
    """Threads for work that blocks: hardware threads count, and a quota is rounded up; at least 1."""
    bounds = [num_cpus, *_bounds(hint), *([] if quota is None else [math.ceil(quota)])]
    return max(1, min(bounds))


def _bounds(hint: Hint | None) -> Iterable[int]:
    return () if hint is None else (hint.cpus,)
