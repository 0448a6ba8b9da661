"""CPU lists (``0-3,8``) and CPU masks (``ff,00000001``): the two forms in which the kernel prints a set of CPUs.

Sources: the kernel's ``Documentation/admin-guide/cputopology.rst`` and ``Documentation/core-api/printk-formats.rst``
(``%*pbl`` and ``%*pb``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["MAX_CPUS", "format_cpulist", "parse_cpulist", "parse_cpumask"]

MAX_CPUS = 1 << 16
"""No kernel numbers CPUs up to here (``NR_CPUS`` is at most 8192 today). A bound, so that garbage costs no memory."""

_MASK = re.compile("[0-9a-fA-F]+(,[0-9a-fA-F]{8})*")


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list as sysfs and cpusets print it.

    Parameters
    ----------
    text
        Such as ``0-3,8,10-11``. White space and NUL bytes around it are dropped: some kernels end the file with both.

    Returns
    -------
    frozenset of int
        Empty for an empty text, which is how the kernel prints no CPU.

    Raises
    ------
    ValueError
        For anything that the kernel does not print.
    """
    text = text.strip(" \t\n\0")
    cpus: set[int] = set()
    for item in text.split(",") if text else ():
        first, dash, last = item.partition("-")
        start = _cpu_number(first, text)
        stop = _cpu_number(last, text) if dash else start
        if stop < start:
            raise ValueError(f"CPU list {_shorten(text)!r} has the backward range {item!r}")
        cpus.update(range(start, stop + 1))
    return frozenset(cpus)


def parse_cpumask(text: str) -> frozenset[int]:
    """Parse a CPU mask: hexadecimal words of 32 bits, the highest first, separated by commas.

    The first word may be shorter than eight digits, when the number of CPUs is no multiple of 32.

    Raises
    ------
    ValueError
        For anything that the kernel does not print.
    """
    text = text.strip(" \t\n\0")
    if not _MASK.fullmatch(text):
        raise ValueError(f"CPU mask {_shorten(text)!r} is not made of hexadecimal words of 32 bits")
    digits = text.replace(",", "")
    if len(digits) * 4 > MAX_CPUS:
        raise ValueError(f"CPU mask {_shorten(text)!r} is wider than {MAX_CPUS} CPUs")
    bits = int(digits, 16)
    cpus = []
    while bits:
        lowest = bits & -bits
        cpus.append(lowest.bit_length() - 1)
        bits ^= lowest
    return frozenset(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """Print a set of CPUs as the kernel would: ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _cpu_number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"CPU list {_shorten(whole)!r} holds {_shorten(text)!r} where a CPU number is expected")
    if len(text) > 9 or int(text) >= MAX_CPUS:
        raise ValueError(f"CPU list {_shorten(whole)!r} names CPU {_shorten(text)}, beyond {MAX_CPUS - 1}")
    return int(text)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
