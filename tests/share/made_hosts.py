"""Hosts made up for tests: cores of any size, on nodes and of kinds, with the limits a test needs."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.host import Host, Limit
from loadmaster.host.limits import compute_threads, io_threads, mark_binding


def make_host(
    cores: Sequence[Sequence[int]],
    *,
    nodes: dict[int, tuple[int, ...]] | None = None,
    kinds: dict[str, tuple[int, ...]] | None = None,
    quota: float | None = None,
    online: Sequence[int] = (),
) -> Host:
    """A host whose usable CPUs are these cores; ``online`` where it has more CPUs than the affinity leaves."""
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    limits = [Limit("online", len(online or cpus), "a test"), Limit("affinity", len(cpus), "a test")]
    limits.append(Limit("cores", len(cores), "a test"))
    limits += [] if quota is None else [Limit("quota", quota, "a test")]
    return Host(
        cpus=cpus,
        cores=tuple(tuple(core) for core in cores),
        nodes=nodes or {},
        kinds=kinds,
        quota=quota,
        compute_cpus=compute_threads(len(cores), quota, None),
        io_threads=io_threads(len(cpus), quota, None),
        limits=mark_binding(limits),
        online=tuple(online or cpus),
    )


def smt_host(num_cores: int, *, quota: float | None = None, of_cores: int = 0) -> Host:
    """Cores with two hardware threads each: CPU i and i + the number of cores of the host."""
    whole = of_cores or num_cores
    cores = [(core, core + whole) for core in range(num_cores)]
    return make_host(cores, quota=quota, online=range(2 * whole))
