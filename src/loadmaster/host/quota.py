"""Parsers of the CPU bandwidth files of a control group: text in, CPUs out, and a word on what no kernel writes.

Sources: the kernel's ``Documentation/admin-guide/cgroup-v2.rst`` (cpu.max) and
``Documentation/scheduler/sched-bwc.rst`` (cpu.cfs_quota_us, cpu.cfs_period_us).
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Quota", "parse_cfs_quota", "parse_cpu_max"]

DEFAULT_PERIOD = 100_000  # microseconds, both versions


class Quota(NamedTuple):
    """CPU time per time that one group may use.

    Attributes
    ----------
    cpus
        In CPUs, such as 2.5; None for no limit.
    problem
        What is wrong with the text, or an empty string. A problem never makes a limit by itself.
    """

    cpus: float | None
    problem: str = ""


def parse_cpu_max(text: str) -> Quota:
    """Parse version 2's ``cpu.max``: quota or ``max``, then the period, in microseconds."""
    fields = text.strip(" \n\0").split()
    if len(fields) == 1:
        alone = _divide(fields[0], None, unlimited="max")
        return Quota(alone.cpus, alone.problem or "has no period")
    if len(fields) != 2:
        return Quota(None, f"has {len(fields)} words instead of two")
    return _divide(fields[0], fields[1], unlimited="max")


def parse_cfs_quota(quota: str, period: str | None) -> Quota:
    """Parse version 1's ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` (None where that file is missing)."""
    found = _divide(quota.strip(" \n\0"), None if period is None else period.strip(" \n\0"), unlimited="-1")
    if period is None and found.cpus is not None:
        return Quota(found.cpus, "has no period beside it")
    return found


def _divide(quota: str, period: str | None, unlimited: str) -> Quota:
    microseconds = DEFAULT_PERIOD if period is None else _whole_number(period)
    if microseconds is None or microseconds <= 0:
        return Quota(None, f"has the period {_shorten(period or '')!r}")
    if quota == unlimited:
        return Quota(None)
    allowed = _whole_number(quota)
    if allowed is None or allowed <= 0:
        return Quota(None, f"has the quota {_shorten(quota)!r}")
    return Quota(allowed / microseconds)


def _whole_number(text: str) -> int | None:
    # At most 19 digits: the kernel's numbers have 64 bits, and so no text makes a number that floats cannot hold.
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
