"""Brings the sources together: which CPUs are usable, and one row for each thing that limits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from loadmaster.host.affinity import Affinity, read_num_cores
from loadmaster.host.cgroup import Groups
from loadmaster.host.cpulist import format_cpulist
from loadmaster.host.limits import Hint, Limit
from loadmaster.host.topology import Topology

__all__ = ["Sources", "keep_usable", "list_limits", "usable_cores", "usable_cpus"]

_Key = TypeVar("_Key", int, str)


class Sources(NamedTuple):
    """What was read; the affinity is None for the files of another host."""

    topology: Topology
    groups: Groups
    affinity: Affinity | None


def usable_cpus(sources: Sources) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the CPUs on which all sources agree, and sentences on those that had to be passed over.

    A source that rules out every CPU that another allows is mistaken. The affinity comes first, as the kernel's own
    word on this process: a container's view of sysfs may be anything.
    """
    topology, groups, affinity = sources
    problems = list(groups.problems)
    cpus = frozenset(topology.online)
    if affinity is not None and (affinity.known or not cpus):
        cpus = _narrow(affinity.cpus, cpus, topology.online_from, problems)
    if groups.cpuset is not None:
        cpus = _narrow(cpus or groups.cpuset.cpus, groups.cpuset.cpus, groups.cpuset.where, problems)
    return cpus, tuple(problems)


def usable_cores(sources: Sources, cpus: frozenset[int]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the usable CPUs grouped by core, and who told."""
    topology, _, affinity = sources
    if not topology.online and affinity is not None and not affinity.known:
        return _consecutive_cores(sorted(cpus)), "psutil.cpu_count"
    cores = [tuple(cpu for cpu in core if cpu in cpus) for core in topology.cores]
    unknown = [(cpu,) for cpu in cpus.difference(topology.online)]
    where = topology.cores_from or "no topology in sysfs: each CPU counts as a core"
    return tuple(sorted(core for core in [*cores, *unknown] if core)), where


def keep_usable(groups: Mapping[_Key, tuple[int, ...]], cpus: frozenset[int]) -> dict[_Key, tuple[int, ...]]:
    """Return each group with its usable CPUs, without groups that have none."""
    kept = {key: tuple(cpu for cpu in group if cpu in cpus) for key, group in groups.items()}
    return {key: group for key, group in kept.items() if group}


def list_limits(sources: Sources, cpus: frozenset[int], cores: Limit, hint: Hint | None) -> list[Limit]:
    """Return a row for each source that was counted, and for the weights, which are only shown."""
    topology, groups, affinity = sources
    online = frozenset(topology.online)
    sets = [("online", online, topology.online_from)]
    if affinity is not None:
        sets.append(("affinity", affinity.cpus, affinity.where))
    if groups.cpuset is not None:
        sets.append(("cpuset", groups.cpuset.cpus, groups.cpuset.where))
    # A set without a usable CPU was passed over, and limits nothing.
    limits = [Limit(name, len(named & online or named), where) for name, named, where in sets if named & cpus]
    limits.append(cores)
    limits += [Limit("quota", quota.value, quota.where) for quota in groups.quotas]
    limits += [Limit("weight", weight.value, weight.where) for weight in groups.weights]
    return limits if hint is None else [*limits, Limit("hint", hint.cpus, hint.where)]


def _narrow(cpus: frozenset[int], to: frozenset[int], where: str, problems: list[str]) -> frozenset[int]:
    if to and not cpus & to:
        said, usable = format_cpulist(to), format_cpulist(cpus)
        problems.append(f"{where} says CPUs {said}, none of which is usable ({usable} are): it is not counted")
    return cpus & to or cpus


def _consecutive_cores(cpus: list[int]) -> tuple[tuple[int, ...], ...]:
    """Cores of equal size: Windows and macOS number the hardware threads of a core one after the other."""
    num_cores = read_num_cores() or len(cpus)
    size = len(cpus) // num_cores if len(cpus) % num_cores == 0 else 1
    return tuple(tuple(cpus[start : start + size]) for start in range(0, len(cpus), size))
