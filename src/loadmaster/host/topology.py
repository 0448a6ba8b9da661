"""CPUs, physical cores and NUMA nodes of a host, from sysfs.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-system-cpu``, ``.../sysfs-devices-node`` and
``Documentation/admin-guide/cputopology.rst``.

Only sibling lists tell which CPUs share a core. ``core_id`` is unique within a package at best, and not even there on
Itanium, s390 or Magny-Cours; ``/proc/cpuinfo`` differs by architecture. Neither is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from loadmaster.host.cpulist import parse_cpulist, parse_cpumask
from loadmaster.host.files import HostFiles

__all__ = ["CPU_FOLDER", "Topology", "group_cores", "read_cpus", "read_topology"]

CPU_FOLDER = "/sys/devices/system/cpu"
NODE_FOLDER = "/sys/devices/system/node"

# core_cpus is the newer name (Linux 5.3) of thread_siblings. A mask says the same as its list, but is slower to parse.
_SIBLING_FILES: tuple[tuple[str, Callable[[str], frozenset[int]]], ...] = (
    ("core_cpus_list", parse_cpulist),
    ("thread_siblings_list", parse_cpulist),
    ("core_cpus", parse_cpumask),
    ("thread_siblings", parse_cpumask),
)
_NODE_FILES: tuple[tuple[str, Callable[[str], frozenset[int]]], ...] = (
    ("cpulist", parse_cpulist),
    ("cpumap", parse_cpumask),
)


class Topology(NamedTuple):
    """What sysfs says about a host, whatever of it a process may use.

    Attributes
    ----------
    online
        CPUs that are online; empty where sysfs lists none.
    cores
        The online CPUs grouped by physical core, each group and the groups in ascending order.
    nodes
        NUMA node -> its online CPUs, without nodes that have none (memory only).
    online_from, cores_from
        Which file said so, as a path of that host.
    """

    online: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    nodes: dict[int, tuple[int, ...]]
    online_from: str
    cores_from: str


def read_topology(files: HostFiles) -> Topology:
    """Read CPUs, cores and nodes from the sysfs below a root."""
    online, online_from = _read_online(files)
    siblings, cores_from = _read_siblings(files, sorted(online))
    return Topology(
        online=tuple(sorted(online)),
        cores=group_cores(online, siblings),
        nodes=_read_nodes(files, online),
        online_from=online_from,
        cores_from=cores_from,
    )


def group_cores(cpus: Iterable[int], siblings: Mapping[int, Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Group CPUs into physical cores.

    Two CPUs share a core when each names the other; where one has no sibling file, the other's word is enough. So one
    damaged list cannot merge cores that the other lists keep apart. A CPU without siblings is a core.
    """
    groups: list[list[int]] = []
    grouped: set[int] = set()
    wanted = sorted(set(cpus))
    usable = set(wanted)
    for first in wanted:
        if first in grouped:
            continue
        grouped.add(first)
        group = [first]
        for cpu in group:  # grows while it is walked: everything that siblings of siblings name
            for other in sorted(siblings.get(cpu, ())):
                if other in usable and other not in grouped and cpu in siblings.get(other, (cpu,)):
                    grouped.add(other)
                    group.append(other)
        groups.append(sorted(group))
    return tuple(tuple(group) for group in groups)


def read_cpus(
    files: HostFiles, folder: str, names: Iterable[tuple[str, Callable[[str], frozenset[int]]]]
) -> tuple[frozenset[int], str] | None:
    """Return the CPUs that the first usable file of a folder names, and that file's name; None if no file does."""
    for name, parse in names:
        text = files.read(f"{folder}/{name}")
        if text is not None:
            try:
                return parse(text), name
            except ValueError:
                continue
    return None


def _read_online(files: HostFiles) -> tuple[set[int], str]:
    """CPUs that are online, and where that is said.

    Every CPU that the kernel knows has a folder; ``online`` lists those in use. Very old kernels have no such list, and
    where sysfs is not there at all ``/proc/stat`` still has a line for each CPU in use.
    """
    folders = _numbered(files.names(CPU_FOLDER), "cpu")
    listed = read_cpus(files, CPU_FOLDER, [("online", parse_cpulist)])
    if listed and listed[0]:
        return set(listed[0].intersection(folders) or listed[0]), f"{CPU_FOLDER}/online"
    if folders:
        return _online_by_folder(files, folders), f"{CPU_FOLDER}/cpu*/online"
    lines = (files.read("/proc/stat") or "").split("\n")
    return set(_numbered((line.split(" ")[0] for line in lines), "cpu")), "/proc/stat"


def _online_by_folder(files: HostFiles, folders: Iterable[int]) -> set[int]:
    """CPUs whose own files do not say that they are offline.

    A CPU that cannot be taken offline has no file ``online``. Where it is silent, another sign is left: the kernel adds
    the topology folder when a CPU comes online and removes it when it goes.
    """
    states = {cpu: (files.read(f"{CPU_FOLDER}/cpu{cpu}/online") or "").strip(" \n\0") for cpu in folders}
    described = {cpu for cpu in folders if files.names(f"{CPU_FOLDER}/cpu{cpu}/topology")} or set(folders)
    return {cpu for cpu, state in states.items() if state == "1" or (state != "0" and cpu in described)}


def _read_siblings(files: HostFiles, cpus: Iterable[int]) -> tuple[dict[int, frozenset[int]], str]:
    siblings: dict[int, frozenset[int]] = {}
    names = list(_SIBLING_FILES)
    where = ""
    for cpu in cpus:
        found = read_cpus(files, f"{CPU_FOLDER}/cpu{cpu}/topology", names)
        if found and cpu in found[0]:
            siblings[cpu], name = found
            where = f"{CPU_FOLDER}/cpu*/topology/{name}"
            names.sort(key=lambda file: file[0] != name)  # the next CPU most likely has the same file
    return siblings, where


def _read_nodes(files: HostFiles, online: Collection[int]) -> dict[int, tuple[int, ...]]:
    nodes: dict[int, tuple[int, ...]] = {}
    for node in _numbered(files.names(NODE_FOLDER), "node"):
        found = read_cpus(files, f"{NODE_FOLDER}/node{node}", _NODE_FILES)
        # The list may name CPUs that are offline, and in a container's view even CPUs that do not exist.
        cpus = found[0].intersection(online) if found else ()
        if cpus:
            nodes[node] = tuple(sorted(cpus))
    return nodes


def _numbered(names: Iterable[str], prefix: str) -> list[int]:
    """Numbers N of the names ``prefixN``, ascending."""
    matches = (re.fullmatch(f"{prefix}([0-9]{{1,6}})", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)
