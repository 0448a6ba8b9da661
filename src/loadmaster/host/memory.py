"""How much memory this process may still take: the host's, and that of every control group that it is in.

Sources: proc(5), ``MemAvailable``; the kernel's ``Documentation/admin-guide/cgroup-v2.rst`` (``memory.max``) and
``.../cgroup-v1/memory.rst`` (``memory.limit_in_bytes``). What the page cache holds is given back when it is needed, so
a group's file pages count as available.
"""

from __future__ import annotations

import re

from loadmaster.host.cgroup import levels
from loadmaster.host.files import HostFiles
from loadmaster.host.mounts import GroupMount, parse_mountinfo, parse_mounts, parse_self_cgroup

__all__ = ["available_memory"]

_UNKNOWN = 1 << 62
"""Where nothing tells of a bound there is none."""


def available_memory(files: HostFiles | None = None) -> int:
    """Return the bytes that this process may still take before something else has to go.

    Parameters
    ----------
    files
        Where the host is read; by default this one.
    """
    files = HostFiles() if files is None else files
    found = re.search(r"^MemAvailable:\s+(\d+) kB", files.read("/proc/meminfo") or "", re.MULTILINE)
    least = int(found[1]) * 1024 if found else _UNKNOWN
    groups = parse_self_cgroup(files.read("/proc/self/cgroup") or "")
    for mount in _mounts(files):
        if mount.version == 2 or "memory" in mount.controllers:
            group = groups.get("" if mount.version == 2 else "memory", "/")
            for folder in levels(mount, group) or ():
                least = min(least, _left_in(files, folder))
    return least


def _mounts(files: HostFiles) -> tuple[GroupMount, ...]:
    mountinfo = files.read("/proc/self/mountinfo")
    return parse_mountinfo(mountinfo) if mountinfo is not None else parse_mounts(files.read("/proc/mounts") or "")


def _left_in(files: HostFiles, folder: str) -> int:
    """What the limit of one group leaves, its page cache counted as free."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = (_number(files.read(f"{folder}/{name}")) for name in (limit_name, used_name))
        if limit is not None and used is not None:
            stat = files.read(f"{folder}/memory.stat") or ""
            # The first version has the numbers of the group alone too, above those of its subtree.
            cached = dict(re.findall(r"^(?:total_)?((?:in)?active_file) (\d+)$", stat, re.MULTILINE))
            return max(0, limit - max(0, used - sum(int(number) for number in cached.values())))
    return _UNKNOWN


def _number(text: str | None) -> int | None:
    word = (text or "").strip(" \n\0")
    return int(word) if re.fullmatch("[0-9]{1,19}", word) else None
