from __future__ import annotations

import pytest
from host_dumps import WHY_SKIPPED, Dumps, load_truths
from hypothesis import given
from hypothesis import strategies as st
from made_hosts import make_host

from loadmaster.host import Host, read_host
from loadmaster.share.cpusets import deal_cores, node_of


def check(host: Host, ranks: int) -> tuple[tuple[int, ...], ...]:
    """What holds for every host and every number of ranks."""
    dealt = deal_cores(host, ranks)
    assert len(dealt) == ranks
    if ranks > len(host.cores):
        assert set(dealt) == {host.cpus}
        return dealt
    owner = {cpu: rank for rank, cpus in enumerate(dealt) for cpu in cpus}
    assert sum(map(len, dealt)) == len(owner), "the sets are disjoint"
    assert sorted(owner) == list(host.cpus), "the sets cover all CPUs"
    assert all(len({owner[cpu] for cpu in core}) == 1 for core in host.cores), "no core is split"
    for kind in [host.cpus, *(host.kinds or {}).values()]:
        counts = [0] * ranks
        for core in host.cores:
            counts[owner[core[0]]] += core[0] in kind
        assert max(counts) - min(counts) <= 1, "the numbers of cores differ by at most one"
    return dealt


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """Cores of one to four threads with any CPU numbers, on nodes of any sizes, of any kinds, or without either."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=24))
    numbers = draw(st.permutations(range(sum(sizes))))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    cores = sorted(tuple(sorted(numbers[end - size : end])) for size, end in zip(sizes, ends, strict=True))

    def grouped(num_groups: int) -> dict[int, tuple[int, ...]]:
        groups: dict[int, list[int]] = {}
        for core in cores:
            groups.setdefault(draw(st.integers(0, num_groups - 1)), []).extend(core)
        return {group: tuple(sorted(cpus)) for group, cpus in sorted(groups.items())}

    nodes = grouped(draw(st.integers(1, 5))) if draw(st.booleans()) else None
    kinds = {str(kind): cpus for kind, cpus in grouped(3).items()} if draw(st.booleans()) else None
    return make_host(cores, nodes=nodes, kinds=kinds)


@given(hosts(), st.integers(1, 30))
def test_rules_on_any_host(host: Host, ranks: int) -> None:
    check(host, ranks)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_each_rank_lies_in_one_node_where_the_ranks_divide_so(
    num_nodes: int, ranks_per_node: int, cores_per_rank: int, threads: int
) -> None:
    cores_per_node = ranks_per_node * cores_per_rank
    num_cores = num_nodes * cores_per_node
    cores = [tuple(core + i * num_cores for i in range(threads)) for core in range(num_cores)]
    # Cores are dealt to the nodes in turn, as many machines number them.
    nodes = {7 * n: tuple(sorted(c for core in cores[n::num_nodes] for c in core)) for n in range(num_nodes)}
    host = make_host(cores, nodes=nodes)
    for cpus in check(host, num_nodes * ranks_per_node):
        assert node_of(host, cpus) is not None


@pytest.mark.parametrize(
    ("sizes", "ranks", "homes"),
    [
        ((8, 8), 2, [0, 1]),
        ((8, 8), 4, [0, 0, 1, 1]),
        ((8, 4), 3, [0, 0, 1]),
        ((7, 7), 4, [0, 0, 1, 1]),
        ((8, 8), 1, [None]),
        ((8, 8), 3, [0, None, 1]),
        ((10, 8), 2, [0, None]),
        ((4, 4, 4, 4), 2, [None, None]),
    ],
)
def test_homes_of_ranks(sizes: tuple[int, ...], ranks: int, homes: list[int | None]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = {i: tuple(range(start, start + size)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))}
    host = make_host([(cpu,) for cpu in range(sum(sizes))], nodes=nodes)
    assert [node_of(host, cpus) for cpus in check(host, ranks)] == homes


def test_half_of_four_nodes_is_two_whole_nodes() -> None:
    nodes = {node: tuple(range(4 * node, 4 * node + 4)) for node in range(4)}
    host = make_host([(cpu,) for cpu in range(16)], nodes=nodes)
    assert check(host, 2) == (tuple(range(8)), tuple(range(8, 16)))


def test_every_rank_gets_performance_and_efficiency_cores() -> None:
    cores = [(0, 1), (2, 3), (4, 5), (6, 7), *[(cpu,) for cpu in range(8, 16)]]
    host = make_host(cores, kinds={"slow": tuple(range(8, 16)), "fast": tuple(range(8))}, nodes={0: tuple(range(16))})
    for cpus in check(host, 4):
        assert sum(cpu < 8 for cpu in cpus) == 2
        assert sum(cpu >= 8 for cpu in cpus) == 2


def test_a_fair_mix_comes_before_nodes() -> None:
    kinds = {"slow": (0, 1, 2, 3), "fast": (4, 5, 6, 7)}
    host = make_host([(cpu,) for cpu in range(8)], kinds=kinds, nodes={0: kinds["slow"], 1: kinds["fast"]})
    assert check(host, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_more_ranks_than_cores_share_all_cpus() -> None:
    host = make_host([(0, 2), (1, 3)])
    assert check(host, 3) == ((0, 1, 2, 3),) * 3


def test_no_node_holds_cpus_that_no_node_names() -> None:
    assert node_of(make_host([(0,)]), (0,)) is None


@pytest.mark.skipif(not load_truths(), reason=WHY_SKIPPED)
@pytest.mark.parametrize("name", [truth["root"] for truth in load_truths()])
def test_rules_on_real_hosts(name: str, dumps: Dumps) -> None:
    host = read_host(dumps.root(name), environ={})
    for ranks in sorted({1, 2, 3, 4, 5, 7, 8, len(host.nodes) or 1, len(host.cores), len(host.cores) + 1}):
        dealt = check(host, ranks)
        sizes = {len(cpus) for cpus in host.nodes.values()}
        if host.kinds is None and len(sizes) == 1 and ranks % len(host.nodes) == 0 and ranks <= len(host.cores):
            assert all(node_of(host, cpus) is not None for cpus in dealt)
