"""Every dump of a real host, against what is true of that host."""

from __future__ import annotations

import time
from typing import Any

import pytest
from host_dumps import WHY_SKIPPED, Dumps, load_truths

from loadmaster.host import Host, read_host

TRUTHS = load_truths()

pytestmark = pytest.mark.skipif(not TRUTHS, reason=WHY_SKIPPED)


def accepted(truth: dict[str, Any], field: str) -> list[Any]:
    """The answers that count as right; empty where the dump cannot tell."""
    others = [other["value"] for other in truth["alternatives"].get(field, []) if other["acceptable"]]
    return others if truth[field] is None else [truth[field], *others]


def partition(kinds: Any) -> list[list[int]] | None:
    groups = kinds.values() if isinstance(kinds, dict) else kinds
    return None if groups is None else sorted(sorted(group) for group in groups)


def within(cpus: Any, usable: set[int]) -> list[int]:
    return [cpu for cpu in cpus if cpu in usable]


@pytest.fixture(params=[truth["name"] for truth in TRUTHS])
def truth(request: pytest.FixtureRequest) -> dict[str, Any]:
    return next(truth for truth in TRUTHS if truth["name"] == request.param)


@pytest.fixture
def host(truth: dict[str, Any], dumps: Dumps) -> Host:
    return read_host(dumps.root(truth["root"]), environ={})


def test_online_cpus(host: Host, truth: dict[str, Any]) -> None:
    if truth["online_cpus"] is not None:
        assert list(host.online) == truth["online_cpus"]
        assert len(host.online) == truth["logical_cpus"]


def test_usable_cpus(host: Host, truth: dict[str, Any]) -> None:
    unrestricted = [] if truth["allowed_cpus"] else [list(host.online)]
    assert list(host.cpus) in [*unrestricted, *accepted(truth, "allowed_cpus")]


def test_cores(host: Host, truth: dict[str, Any]) -> None:
    usable = set(host.cpus)
    answers = [[within(core, usable) for core in cores] for cores in accepted(truth, "core_siblings")]
    answers = [[core for core in cores if core] for cores in answers]
    assert not answers or [list(core) for core in host.cores] in answers
    if usable == set(host.online) and truth["physical_cores"] is not None:
        assert len(host.cores) in accepted(truth, "physical_cores")
        assert sorted({len(core) for core in host.cores}) in accepted(truth, "threads_per_core")
    if truth["allowed_physical_cores"] is not None:
        assert len(host.cores) == truth["allowed_physical_cores"]


def test_nodes(host: Host, truth: dict[str, Any]) -> None:
    usable = set(host.cpus)
    answers = [
        {int(node): within(cpus, usable) for node, cpus in nodes.items() if within(cpus, usable)}
        for nodes in accepted(truth, "numa_nodes")
    ]
    nodes = {node: list(cpus) for node, cpus in host.nodes.items()}
    assert nodes in answers or (truth["numa_nodes"] is None and nodes == {})


def test_kinds(host: Host, truth: dict[str, Any]) -> None:
    assert partition(host.kinds) in [partition(truth["core_kinds"]), *map(partition, accepted(truth, "core_kinds"))]


def test_compute_cpus_and_the_limit_that_binds(host: Host, truth: dict[str, Any]) -> None:
    assert host.compute_cpus == len(host.cores)
    assert [limit.binding for limit in host.limits].count(True) == 1
    assert host.binding.value == host.compute_cpus
    restricted = truth["allowed_cpus"] is not None
    assert (host.binding.name == "cpuset") == restricted
    assert host.warnings == ()


def test_the_largest_dump_is_read_in_time(dumps: Dumps) -> None:
    root = dumps.root("256ia64-64n2s2c")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        read_host(root, environ={})
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
