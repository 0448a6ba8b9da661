"""How many threads may this process really use, on which CPUs, and why: every limit counted, each with its source.

    sysfs -> topology, kinds     \\
    control groups -> quota, set  } -> usable CPUs -> limits -> the one that binds -> compute_cpus
    affinity, hint               /
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loadmaster.errors import InputError
from loadmaster.host.affinity import Affinity, read_affinity
from loadmaster.host.cgroup import read_groups
from loadmaster.host.files import HostFiles
from loadmaster.host.kinds import read_kinds
from loadmaster.host.limits import Limit, compute_threads, io_threads, mark_binding, read_hint
from loadmaster.host.notices import warn_once
from loadmaster.host.topology import CPU_FOLDER, read_topology
from loadmaster.host.usable import Sources, keep_usable, list_limits, usable_cores, usable_cpus

__all__ = ["Host", "host", "read_host", "recent_host"]


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
    online_cores
        The same grouped by physical core.
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
    online_cores: tuple[tuple[int, ...], ...] = ()
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


def recent_host() -> Host:
    """Return the host as it was at most a second ago: for callers that come often, such as every scope."""
    global _recent
    key = (os.getpid(), os.environ.get("LOADMASTER_CPUS"), read_affinity())
    now = time.monotonic()
    if _recent is None or _recent[0] != key or now - _recent[1] > RECENT_SECONDS:
        _recent = (key, now, read_host())
    return _recent[2]


RECENT_SECONDS = 1.0
"""How old `recent_host` may be: reading takes 0.5 to 1 ms, and quotas are changed by people and orchestrators."""

_recent: tuple[Any, float, Host] | None = None


def _read(request: _Request) -> Host:
    hint = read_hint(request.cpus, os.environ if request.environ is None else request.environ)
    if not Path(request.root).is_dir():
        raise InputError(f"{request.root} is no folder, so it cannot play the root of a host")
    files = HostFiles(request.root)
    sources = Sources(read_topology(files), read_groups(files), request.affinity() if files.live else None)
    cpus, problems = usable_cpus(sources)
    if not cpus:
        raise InputError(f"no CPUs are found below {request.root}: it has neither {CPU_FOLDER} nor a cpuset")
    for problem in problems:
        warn_once(__name__, problem)
    cores, cores_from = usable_cores(sources, cpus)
    kinds = keep_usable(read_kinds(files, sources.topology.online) or {}, cpus)
    quota = min((found.value for found in sources.groups.quotas), default=None)
    return Host(
        cpus=tuple(sorted(cpus)),
        cores=cores,
        nodes=keep_usable(sources.topology.nodes, cpus),
        kinds=kinds if len(kinds) > 1 else None,
        quota=quota,
        compute_cpus=compute_threads(len(cores), quota, hint),
        io_threads=io_threads(len(cpus), quota, hint),
        limits=mark_binding(list_limits(sources, cpus, Limit("cores", len(cores), cores_from), hint)),
        online=sources.topology.online or tuple(sorted(cpus)),
        online_cores=sources.topology.cores,
        warnings=problems,
        _request=request,
    )
