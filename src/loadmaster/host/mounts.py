"""Parsers of the files that say where control groups are mounted and which of them a process is in.

Sources: the kernel's ``Documentation/filesystems/proc.rst`` (section 3.5, mountinfo), ``man 5 proc_pid_mountinfo``,
``man 7 cgroups`` and ``man 7 cgroup_namespaces``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["GroupMount", "parse_mountinfo", "parse_mounts", "parse_self_cgroup", "unescape"]

_TYPES = {"cgroup": 1, "cgroup2": 2, "cpuset": 1}
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")


class GroupMount(NamedTuple):
    """One mount of a control group hierarchy.

    Attributes
    ----------
    version
        1 or 2.
    controllers
        The controllers of a version 1 hierarchy; empty for version 2, where files tell.
    root
        The group that the mount shows as its top folder, as a path in the hierarchy. Not ``/`` for a bind mount.
    folder
        Where it is mounted.
    """

    version: int
    controllers: frozenset[str]
    root: str
    folder: str


def parse_mountinfo(text: str) -> tuple[GroupMount, ...]:
    """Return the control group mounts of ``/proc/self/mountinfo``; lines in another form are passed over."""
    return _visible(_mountinfo_lines(text))


def parse_mounts(text: str) -> tuple[GroupMount, ...]:
    """Return the control group mounts of ``/proc/mounts``, which does not tell the root: ``/`` is assumed."""
    return _visible(_mounts_lines(text))


def parse_self_cgroup(text: str) -> dict[str, str]:
    """Return controller -> group path from ``/proc/self/cgroup``; the controller of version 2 is the empty string.

    A path is not escaped there, and may hold colons.
    """
    groups: dict[str, str] = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and number.isdigit() and path.startswith("/"):
            groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def unescape(text: str) -> str:
    r"""Undo the octal escapes that the kernel writes for space, tab, newline, ``#`` and backslash: ``\040``."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _mountinfo_lines(text: str) -> Iterator[GroupMount]:
    for line in text.split("\n"):
        # A variable number of optional fields ends with a lone dash.
        left, _, right = line.partition(" - ")
        tail = right.split(" ")
        if tail[0] in _TYPES and len(tail) >= 3:  # few lines of the many that a container's host may have
            fields = left.split(" ")
            if len(fields) >= 6:
                yield _mount(tail[0], unescape(fields[3]), unescape(fields[4]), tail[2])


def _mounts_lines(text: str) -> Iterator[GroupMount]:
    for line in text.split("\n"):
        fields = line.split(" ")
        if len(fields) >= 4 and fields[2] in _TYPES:
            yield _mount(fields[2], "/", unescape(fields[1]), fields[3])


def _mount(kind: str, root: str, folder: str, options: str) -> GroupMount:
    controllers = {"cpuset"} if kind == "cpuset" else set(options.split(",")) if kind == "cgroup" else set()
    return GroupMount(_TYPES[kind], frozenset(controllers), root, folder)


def _visible(mounts: Iterator[GroupMount]) -> tuple[GroupMount, ...]:
    # A later mount on the same folder hides the earlier one.
    return tuple({mount.folder: mount for mount in mounts}.values())
