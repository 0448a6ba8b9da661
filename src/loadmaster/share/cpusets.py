"""Deals the cores of a host to ranks: disjoint sets that cover all, whole cores, near memory, a fair mix of kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from loadmaster.host import Host

__all__ = ["deal_cores", "node_of"]


class _Core(NamedTuple):
    cpus: tuple[int, ...]
    node: int | None
    kind: str | None


def deal_cores(host: Host, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each rank.

    The sets are disjoint and cover all usable CPUs, no core is split, and the numbers of cores, in all and of each
    kind, differ by at most one. Where it is possible along with that, each set lies within one NUMA node. With more
    ranks than cores every rank gets all CPUs: the scheduler balances better than any fixed set would.
    """
    if ranks > len(host.cores):
        return (host.cpus,) * ranks
    cores = _describe(host)
    dealt = _deal_by_node(cores, ranks)
    if dealt is None or not _is_fair(dealt):
        dealt = _deal(cores, ranks)
    return tuple(tuple(sorted(cpu for core in own for cpu in core.cpus)) for own in dealt)


def node_of(host: Host, cpus: Sequence[int]) -> int | None:
    """Return the NUMA node that holds all of the CPUs, or None."""
    return next((node for node, members in host.nodes.items() if set(cpus) <= set(members)), None)


def _describe(host: Host) -> list[_Core]:
    """The cores with node and kind, node by node."""
    nodes: dict[int, int] = {}
    for node, cpus in host.nodes.items():
        for cpu in cpus:
            nodes.setdefault(cpu, node)  # nodes do not overlap on real hosts; the lowest number is as good as any
    kinds = {cpu: kind for kind, cpus in (host.kinds or {}).items() for cpu in cpus}
    cores = [_Core(core, nodes.get(core[0]), kinds.get(core[0])) for core in host.cores]
    return sorted(cores, key=lambda core: (-1 if core.node is None else core.node, core.cpus))


def _deal_by_node(cores: Sequence[_Core], ranks: int) -> list[list[_Core]] | None:
    """Give each node's cores to ranks of its own, or None where no such deal has equal shares."""
    nodes = _split(cores, "node")
    counts = _ranks_per_node([len(node) for node in nodes], ranks)
    if counts is None:
        return None
    return [own for node, count in zip(nodes, counts, strict=True) for own in _deal(node, count)]


def _ranks_per_node(sizes: Sequence[int], ranks: int) -> list[int] | None:
    """How many ranks each node holds, so that all ranks get the same number of cores, or one more."""
    least, rest = divmod(sum(sizes), ranks)
    most = least + (rest > 0)
    counts = [-(-size // most) for size in sizes]  # as few ranks as can use the whole node
    spare = [size // least - count for size, count in zip(sizes, counts, strict=True)]
    missing = ranks - sum(counts)
    if missing < 0 or any(room < 0 for room in spare) or missing > sum(spare):
        return None
    for i, room in enumerate(spare):
        more = min(room, missing)
        counts[i] += more
        missing -= more
    return counts


def _deal(cores: Sequence[_Core], ranks: int) -> list[list[_Core]]:
    """Give each rank its part of each kind, in order, so that neighbours stay together."""
    dealt: list[list[_Core]] = [[] for _ in range(ranks)]
    extra = 0  # who gets one core more goes round, so that the totals differ by at most one as well
    for kind in _split(cores, "kind"):
        least, rest = divmod(len(kind), ranks)
        lucky = {(extra + i) % ranks for i in range(rest)}
        ends = list(accumulate(least + (rank in lucky) for rank in range(ranks)))
        for rank, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            dealt[rank] += kind[start:end]
        extra += rest
    return dealt


def _is_fair(dealt: Sequence[Sequence[_Core]]) -> bool:
    kinds = {core.kind for own in dealt for core in own}
    counts = [[sum(core.kind == kind for core in own) for own in dealt] for kind in kinds]
    return all(max(count) - min(count) <= 1 for count in counts)


def _split(cores: Sequence[_Core], attribute: str) -> list[list[_Core]]:
    groups: dict[object, list[_Core]] = {}
    for core in cores:
        groups.setdefault(getattr(core, attribute), []).append(core)
    return list(groups.values())
