"""What the control groups of this process allow: quotas of every level, the cpuset, and weights to show.

A quota of any ancestor binds as well as the process's own, so all levels are read, from the leaf up to the root of the
mount. That root is a level too: in a container it is the container's own group.

Sources: the kernel's ``Documentation/admin-guide/cgroup-v2.rst``, ``.../cgroup-v1/cpusets.rst`` and
``man 7 cgroup_namespaces``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from loadmaster.host.cpulist import parse_cpulist
from loadmaster.host.files import HostFiles
from loadmaster.host.mounts import GroupMount, parse_mountinfo, parse_mounts, parse_self_cgroup
from loadmaster.host.quota import Quota, parse_cfs_quota, parse_cpu_max

__all__ = ["Found", "Groups", "levels", "read_groups"]

# The set in force comes first: what was asked for (cpus) may hold CPUs that an ancestor does not have. The names
# without "cpuset." are those of the old cpuset file system, and of a mount with the option noprefix.
_CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "effective_cpus", "cpuset.cpus", "cpus")
_WEIGHT_FILES = ("cpu.weight", "cpu.shares")


class Found(NamedTuple):
    """A number, or a set of CPUs, and the file that holds it (a path of that host)."""

    value: float
    where: str
    cpus: frozenset[int] = frozenset()


class Groups(NamedTuple):
    """All that the control groups say; ``problems`` are sentences on what could not be read as it should."""

    quotas: tuple[Found, ...]
    cpuset: Found | None
    weights: tuple[Found, ...]
    problems: tuple[str, ...]


def read_groups(files: HostFiles) -> Groups:
    """Read the control groups of this process below a root; nothing found is no limit."""
    mounts = _read_mounts(files)
    groups = parse_self_cgroup(files.read("/proc/self/cgroup") or "")
    cpuset_group = (files.read("/proc/self/cpuset") or "/").rstrip("\n\0")  # for kernels without the former
    problems: list[str] = []
    cpu_levels = _levels_per_mount("cpu", mounts, groups, "/", problems)
    cpuset_levels = _levels_per_mount("cpuset", mounts, groups, cpuset_group, problems)
    folders = dict.fromkeys(folder for found in cpu_levels for folder in found)
    return Groups(
        quotas=tuple(found for folder in folders for found in _read_quotas(files, folder, problems)),
        cpuset=_read_cpuset(files, cpuset_levels, problems),
        weights=tuple(_read_weights(files, folders)),
        problems=tuple(dict.fromkeys(problems)),
    )


def levels(mount: GroupMount, group: str) -> tuple[str, ...] | None:
    """Return the folders of a group and its ancestors, the leaf first, the root of the mount last.

    Where a mount shows another part of the hierarchy than the group's (seen from a container whose ``/proc`` and
    mounts disagree, or from inside a control group namespace over an outer mount), only its root is returned: the
    levels between have no known names. None where the group is known to lie outside the mount.
    """
    root = [part for part in mount.root.split("/") if part]
    path = [part for part in group.split("/") if part]
    below = path[len(root) :] if path[: len(root)] == root else []
    if ".." in below:
        return None
    top = mount.folder.rstrip("/")
    return tuple("/".join([top, *below[:depth]]) for depth in range(len(below), -1, -1))


def _read_mounts(files: HostFiles) -> tuple[GroupMount, ...]:
    mountinfo = files.read("/proc/self/mountinfo")
    if mountinfo is not None:
        return parse_mountinfo(mountinfo)
    return parse_mounts(files.read("/proc/self/mounts") or files.read("/proc/mounts") or "")


def _levels_per_mount(
    controller: str, mounts: Iterable[GroupMount], groups: dict[str, str], otherwise: str, problems: list[str]
) -> list[tuple[str, ...]]:
    """Folders of all levels, for every mount that has the controller or may have it."""
    per_mount = []
    for mount in mounts:
        if mount.version == 2 or controller in mount.controllers:
            group = groups.get("" if mount.version == 2 else controller, otherwise)
            found = levels(mount, group)
            if found is None:
                problems.append(
                    f"this process is in the group {group}, outside of what {mount.folder} shows: its quota is unknown"
                )
            per_mount.append(found or ())
    return per_mount


def _read_quotas(files: HostFiles, folder: str, problems: list[str]) -> Iterable[Found]:
    for name, quota in (("cpu.max", _read_cpu_max(files, folder)), ("cpu.cfs_quota_us", _read_cfs(files, folder))):
        if quota is not None and quota.problem:
            treated = "no limit is taken from it" if quota.cpus is None else "100 ms is assumed"
            problems.append(f"{folder}/{name} {quota.problem}, which the kernel does not write: {treated}")
        if quota is not None and quota.cpus is not None:
            yield Found(quota.cpus, f"{folder}/{name}")


def _read_cpu_max(files: HostFiles, folder: str) -> Quota | None:
    text = files.read(f"{folder}/cpu.max")
    return None if text is None else parse_cpu_max(text)


def _read_cfs(files: HostFiles, folder: str) -> Quota | None:
    text = files.read(f"{folder}/cpu.cfs_quota_us")
    return None if text is None else parse_cfs_quota(text, files.read(f"{folder}/cpu.cfs_period_us"))


def _read_cpuset(files: HostFiles, per_mount: Iterable[tuple[str, ...]], problems: list[str]) -> Found | None:
    """The CPUs that the cpuset leaves; of several mounts, the one that shows a group closer to this process."""
    found = [cpuset for folders in per_mount if (cpuset := _nearest_cpuset(files, folders, problems))]
    return min(found, key=lambda cpuset: len(cpuset.cpus), default=None)


def _nearest_cpuset(files: HostFiles, folders: Iterable[str], problems: list[str]) -> Found | None:
    """The nearest level that names CPUs. Not all levels: a partition's CPUs are taken away from its ancestors' sets."""
    for folder in folders:
        for name in _CPUSET_FILES:
            try:
                cpus = parse_cpulist(files.read(f"{folder}/{name}") or "")
            except ValueError as error:
                problems.append(f"{folder}/{name} cannot be read as a CPU list: {error}")
                continue
            if cpus:
                return Found(len(cpus), f"{folder}/{name}", cpus)
    return None


def _read_weights(files: HostFiles, folders: Iterable[str]) -> Iterable[Found]:
    """Weights of the nearest level that has any: a weight shares out what is contended and limits nothing."""
    for folder in folders:
        texts = {name: (files.read(f"{folder}/{name}") or "").strip(" \n\0") for name in _WEIGHT_FILES}
        found = [
            Found(int(text), f"{folder}/{name}") for name, text in texts.items() if re.fullmatch("[0-9]{1,9}", text)
        ]
        if found:
            return found
    return ()
