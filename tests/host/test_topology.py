from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.cpulist import format_cpulist
from loadmaster.host.files import HostFiles
from loadmaster.host.topology import Topology, group_cores, read_topology

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def topology_of(root: Path, files: dict[str, str]) -> Topology:
    write(root, files)
    return read_topology(HostFiles(root))


def as_mask(cpus: frozenset[int] | tuple[int, ...]) -> str:
    bits = sum(1 << cpu for cpu in cpus)
    return f"{bits >> 32:08x},{bits & 0xFFFFFFFF:08x}\n"


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("core_cpus_list", "0,2\n", "1,3\n"),
        ("thread_siblings_list", "0,2\n\0", "1,3\n\0"),
        ("core_cpus", "5\n", "a\n"),
        ("thread_siblings", "00000000,00000005\n\0", "00000000,0000000a\n\0"),
    ],
)
def test_any_one_sibling_file_is_enough(tmp_path: Path, name: str, first: str, second: str) -> None:
    texts = [first, second, first, second]
    files = {f"{CPU}/cpu{cpu}/topology/{name}": text for cpu, text in enumerate(texts)}
    topology = topology_of(tmp_path, files | {f"{CPU}/online": "0-3\n"})
    assert topology.cores == ((0, 2), (1, 3))
    assert topology.cores_from.endswith(name)


def test_ids_are_not_looked_at(tmp_path: Path) -> None:
    ids = {f"{CPU}/cpu{cpu}/topology/{name}": "0\n" for cpu in (0, 1) for name in ("core_id", "physical_package_id")}
    masks = {f"{CPU}/cpu{cpu}/topology/thread_siblings": f"{1 << cpu:x}\n" for cpu in (0, 1)}
    assert topology_of(tmp_path, ids | masks).cores == ((0,), (1,))


def test_an_unreadable_list_gives_way_to_the_mask(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/core_cpus_list": "(null)\n" for cpu in (0, 1)}
    files |= {f"{CPU}/cpu{cpu}/topology/thread_siblings": "3\n" for cpu in (0, 1)}
    assert topology_of(tmp_path, files).cores == ((0, 1),)


def test_each_cpu_may_have_another_file(tmp_path: Path) -> None:
    files = {
        f"{CPU}/cpu0/topology/thread_siblings": "3\n",
        f"{CPU}/cpu1/topology/core_cpus_list": "0-1\n",
        f"{CPU}/cpu2/topology/thread_siblings_list": "2\n",
    }
    assert topology_of(tmp_path, files).cores == ((0, 1), (2,))


@pytest.mark.parametrize("damaged", range(4))
def test_one_damaged_mask_merges_no_cores(tmp_path: Path, damaged: int) -> None:
    masks = {0: "1", 1: "2", 2: "4", 3: "8"} | {damaged: "f"}
    files = {f"{CPU}/cpu{cpu}/topology/thread_siblings": f"{mask}\n" for cpu, mask in masks.items()}
    assert topology_of(tmp_path, files).cores == ((0,), (1,), (2,), (3,))


def test_a_mask_without_its_own_cpu_is_no_answer(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/thread_siblings": "0\n" for cpu in (0, 1)}
    topology = topology_of(tmp_path, files)
    assert topology.cores == ((0,), (1,))
    assert topology.cores_from == ""


def test_no_topology_folder_makes_each_cpu_a_core(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/uevent": "" for cpu in (0, 1, 5)}
    assert topology_of(tmp_path, files).cores == ((0,), (1,), (5,))


def test_offline_siblings_are_not_counted(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/core_cpus_list": "0-3\n" for cpu in (0, 2)}
    files |= {f"{CPU}/cpu{cpu}/online": "0\n" for cpu in (1, 3)} | {f"{CPU}/online": "0,2\n"}
    topology = topology_of(tmp_path, files)
    assert topology.online == (0, 2)
    assert topology.cores == ((0, 2),)


@pytest.mark.parametrize(
    ("states", "online"),
    [
        ({0: None, 1: "0\n", 2: "1\n"}, (0, 2)),
        ({0: None, 1: "0\n\0", 2: "1\n\0"}, (0, 2)),
        ({0: None, 1: None, 2: None}, (0, 1, 2)),
        ({0: "", 1: "", 2: ""}, (0, 1, 2)),
        ({3: "1\n", 64: "1\n", 200: "0\n"}, (3, 64)),
    ],
)
def test_without_a_list_each_cpus_own_file_tells(
    tmp_path: Path, states: dict[int, str | None], online: tuple[int, ...]
) -> None:
    files = {f"{CPU}/cpu{cpu}/uevent": "" for cpu in states}
    files |= {f"{CPU}/cpu{cpu}/online": state for cpu, state in states.items() if state is not None}
    assert topology_of(tmp_path, files | {f"{CPU}/cpufreq/x": "", f"{CPU}/cpuidle/x": ""}).online == online


def test_where_a_cpu_is_silent_its_topology_folder_tells(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/thread_siblings": f"{1 << cpu:x}\n" for cpu in (0, 1)}
    assert topology_of(tmp_path, files | {f"{CPU}/cpu2/online": "\n", f"{CPU}/cpu3/uevent": ""}).online == (0, 1)


def test_the_list_of_online_cpus_is_right_against_all_others(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/uevent": "" for cpu in range(4)}
    files |= {f"{CPU}/possible": "0-63\n", f"{CPU}/present": "0-3\n", f"{CPU}/online": "1-2\n"}
    files |= {"proc/stat": "cpu  1\ncpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\n", "proc/cpuinfo": "processor : 0\n"}
    assert topology_of(tmp_path, files).online == (1, 2)


def test_a_listed_cpu_without_a_folder_does_not_exist(tmp_path: Path) -> None:
    folders = {f"{CPU}/cpu{cpu}/uevent": "" for cpu in (0, 1)}
    assert topology_of(tmp_path, folders | {f"{CPU}/online": "0-9\n"}).online == (0, 1)


def test_without_sysfs_the_lines_of_stat_tell(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, {"proc/stat": "cpu  4 0\ncpu0 1 0\ncpu2 1 0\nintr 5\nctxt 1\n"})
    assert topology.online == (0, 2)
    assert topology.online_from == "/proc/stat"


def test_nothing_at_all_is_no_cpu(tmp_path: Path) -> None:
    assert topology_of(tmp_path, {}).online == ()


def test_nodes_keep_only_online_cpus_and_drop_those_without(tmp_path: Path) -> None:
    files = {
        f"{CPU}/online": "0-3\n",
        f"{NODE}/node0/cpulist": "0-1,8-90\n",
        f"{NODE}/node33/cpumap": "0000000c\n",
        f"{NODE}/node2/cpulist": "\n",
        f"{NODE}/node3/cpulist": "8-90\n",
        f"{NODE}/possible": "0-255\n",
        f"{NODE}/nodes/cpulist": "0-3\n",
    }
    assert topology_of(tmp_path, files).nodes == {0: (0, 1), 33: (2, 3)}


def test_no_node_folder_is_no_node(tmp_path: Path) -> None:
    assert topology_of(tmp_path, {f"{CPU}/online": "0-3\n"}).nodes == {}


@st.composite
def sibling_sets(draw: st.DrawFn) -> dict[int, frozenset[int]]:
    """CPU -> the CPUs of its core, for CPUs and cores of any numbers."""
    cpus = draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=40))
    cores = {cpu: draw(st.integers(0, 9)) for cpu in cpus}
    return {cpu: frozenset(other for other in cpus if cores[other] == cores[cpu]) for cpu in cpus}


@given(sibling_sets(), st.sampled_from(["core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings"]))
def test_any_topology_is_read_back(siblings: dict[int, frozenset[int]], name: str) -> None:
    def text(cpus: frozenset[int]) -> str:
        return format_cpulist(cpus) if name.endswith("list") else as_mask(cpus)

    with tempfile.TemporaryDirectory() as root:
        files = {f"{CPU}/cpu{cpu}/topology/{name}": text(cpus) for cpu, cpus in siblings.items()}
        topology = topology_of(Path(root), files)
    assert set(topology.cores) == {tuple(sorted(cpus)) for cpus in siblings.values()}
    assert topology.online == tuple(sorted(siblings))


@given(st.dictionaries(st.integers(0, 12), st.frozensets(st.integers(0, 12))), st.frozensets(st.integers(0, 12)))
def test_cores_are_a_partition_whatever_the_files_say(
    siblings: dict[int, frozenset[int]], cpus: frozenset[int]
) -> None:
    cores = group_cores(cpus, siblings)
    assert sorted(cpu for core in cores for cpu in core) == sorted(cpus)
    assert list(cores) == sorted(cores)
