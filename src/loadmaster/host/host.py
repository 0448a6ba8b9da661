"""How many threads may this process really use, on which CPUs, and why: every limit counted, each with its source.

    sysfs -> topology, kinds     \\
    control groups -> quota, set  } -> usable CPUs -> limits -> the one that binds -> compute_cpus
    affinity, hint               /
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from loadmaster.errors import InputError
from loadmaster.host.affinity import Affinity, read_affinity, read_num_cores
from loadmaster.host.cgroup import Groups, read_groups
from loadmaster.host.cpulist import format_cpulist
from loadmaster.host.files import HostFiles
from loadmaster.host.kinds import read_kinds
from loadmaster.host.limits import Hint, Limit, compute_threads, io_threads, mark_binding, read_hint
from loadmaster.host.notices import warn_once
from loadmaster.host.topology import CPU_FOLDER, Topology, read_topology

__all__ = ["Host", "host", "read_host"]

_Key = TypeVar("_Key", int, str)


class _Request(NamedTuple):
    """How a host was asked for, so that it can be read again."""

    root: str
    cpus: int | None
    environ: Mapping[str, str] | None
    affinity: Callable[[], Affinity]


@dataclass(frozen=True, slots=True)
class Host:
    """What this process may use, read at one moment.

    Attributes
    ----------
    cpus
        Usable CPUs: online, in the affinity mask and in the cpuset; ascending.
    cores
        The usable CPUs grouped by physical core.
    nodes
        NUMA node -> its usable CPUs, without nodes that have none; empty where the host tells of no nodes.
    kinds
        Kind of core -> its usable CPUs, slowest first, on hybrid hosts; None where all usable cores are alike.
    quota
        CPU time per time in CPUs, such as 2.5: the smallest of all control group levels. None without a quota.
    compute_cpus
        Threads for work that keeps CPUs busy: physical cores, quota rounded down, at least 1.
    io_threads
        Threads for work that blocks: usable CPUs, quota rounded up, at least 1.
    limits
        Every source that was counted; exactly one is binding.
    online
        CPUs that are online, usable or not.
    warnings
        Sentences on what could not be read as it should; they were logged when they first occurred.
    """

    cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    nodes: dict[int, tuple[int, ...]]
    kinds: dict[str, tuple[int, ...]] | None
    quota: float | None
    compute_cpus: int
    io_threads: int
    limits: tuple[Limit, ...]
    online: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    _request: _Request | None = field(default=None, repr=False, compare=False)

    @property
    def binding(self) -> Limit:
        """The limit that decides ``compute_cpus``."""
        return next(limit for limit in self.limits if limit.binding)

    def refresh(self) -> Host:
        """Read the host again, as it was asked for: quotas, affinity and hints change while a process runs."""
        if self._request is None:
            raise InputError("this host was not read from a system, so it cannot be read again")
        return _read(self._request)


def read_host(
    root: str | os.PathLike[str] = "/",
    cpus: int | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    affinity: Callable[[], Affinity] = read_affinity,
) -> Host:
    """Read what this process may use.

    Parameters
    ----------
    root
        The folder that plays ``/``. For another host's files the affinity is all online CPUs, less what a cpuset there
        forbids.
    cpus
        An upper bound for ``compute_cpus`` and ``io_threads``; comes before the variable ``LOADMASTER_CPUS``.
    environ
        The environment; by default that of this process.
    affinity
        Says on which CPUs this process may run; asked for the root ``/`` only.

    Raises
    ------
    InputError
        If ``cpus`` or ``LOADMASTER_CPUS`` is no number of at least 1, or if there are no CPUs below ``root``.
    """
    return _read(_Request(os.fspath(root), cpus, environ, affinity))


def host() -> Host:
    """Read what this process may use, at this moment."""
    return read_host()


def _read(request: _Request) -> Host:
    hint = read_hint(request.cpus, os.environ if request.environ is None else request.environ)
    files = HostFiles(request.root)
    if not Path(request.root).is_dir():
        raise InputError(f"{request.root} is no folder, so it cannot play the root of a host")
    topology, groups = read_topology(files), read_groups(files)
    affinity = request.affinity() if files.live else None
    problems = list(groups.problems)
    cpus = _usable_cpus(topology, groups, affinity, problems)
    if not cpus:
        raise InputError(f"no CPUs are found below {request.root}: it has neither {CPU_FOLDER} nor a cpuset")
    for problem in problems:
        warn_once(__name__, problem)
    cores, cores_from = _usable_cores(topology, affinity, cpus)
    quota = min((found.value for found in groups.quotas), default=None)
    return Host(
        cpus=tuple(sorted(cpus)),
        cores=cores,
        nodes=_keep(topology.nodes, cpus),
        kinds=_usable_kinds(read_kinds(files, topology.online), cpus),
        quota=quota,
        compute_cpus=compute_threads(len(cores), quota, hint),
        io_threads=io_threads(len(cpus), quota, hint),
        limits=mark_binding(
            _list_limits(topology, groups, affinity, cpus, Limit("cores", len(cores), cores_from), hint)
        ),
        online=topology.online or tuple(sorted(cpus)),
        warnings=tuple(problems),
        _request=request,
    )


def _usable_cpus(topology: Topology, groups: Groups, affinity: Affinity | None, problems: list[str]) -> frozenset[int]:
    """The CPUs on which all sources agree. A source that rules out every CPU is mistaken and is passed over."""
    cpus = frozenset(topology.online)
    if affinity is not None and (affinity.known or not cpus):
        # The kernel's own word on this process comes first; a container's view of sysfs may be anything.
        cpus = _narrow(affinity.cpus, cpus, topology.online_from, problems)
    if groups.cpuset is None:
        return cpus
    return _narrow(cpus, groups.cpuset.cpus, groups.cpuset.where, problems) if cpus else groups.cpuset.cpus


def _narrow(cpus: frozenset[int], to: frozenset[int], where: str, problems: list[str]) -> frozenset[int]:
    if to and not cpus & to:
        said, usable = format_cpulist(to), format_cpulist(cpus)
        problems.append(f"{where} says CPUs {said}, none of which is usable ({usable} are): it is not counted")
    return cpus & to or cpus


def _usable_cores(
    topology: Topology, affinity: Affinity | None, cpus: frozenset[int]
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The usable CPUs grouped by core, and who told."""
    if not topology.online and affinity is not None and not affinity.known:
        num_cores = read_num_cores() or len(cpus)
        size = len(cpus) // num_cores if len(cpus) % num_cores == 0 else 1
        ordered = sorted(cpus)
        # Windows and macOS number the hardware threads of a core one after the other.
        return tuple(tuple(ordered[i : i + size]) for i in range(0, len(ordered), size)), "psutil.cpu_count"
    cores = [tuple(cpu for cpu in core if cpu in cpus) for core in topology.cores]
    unknown = [(cpu,) for cpu in cpus.difference(topology.online)]
    where = topology.cores_from or "no topology in sysfs: each CPU counts as a core"
    return tuple(sorted(core for core in [*cores, *unknown] if core)), where


def _keep(groups: Mapping[_Key, tuple[int, ...]], cpus: frozenset[int]) -> dict[_Key, tuple[int, ...]]:
    """Each group with its usable CPUs, without groups that have none."""
    kept = {key: tuple(cpu for cpu in group if cpu in cpus) for key, group in groups.items()}
    return {key: group for key, group in kept.items() if group}


def _usable_kinds(kinds: dict[str, tuple[int, ...]] | None, cpus: frozenset[int]) -> dict[str, tuple[int, ...]] | None:
    kept = _keep(kinds or {}, cpus)
    return kept if len(kept) > 1 else None


def _list_limits(
    topology: Topology, groups: Groups, affinity: Affinity | None, cpus: frozenset[int], cores: Limit, hint: Hint | None
) -> list[Limit]:
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
