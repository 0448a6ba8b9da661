from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from loadmaster.errors import InputError
from loadmaster.host import Host, read_host
from loadmaster.host.affinity import Affinity, read_affinity
from loadmaster.host.files import HostFiles

CPU = "sys/devices/system/cpu"
FIXTURES = Path(__file__).parent / "fixtures"


def smt_host(root: Path, num_cores: int = 4, quota: str = "max 100000\n") -> Path:
    """A host of ``num_cores`` cores with two hardware threads each, CPU i and i + num_cores, and a quota."""
    files = {f"{CPU}/online": f"0-{2 * num_cores - 1}\n", "sys/fs/cgroup/cpu.max": quota, "proc/self/cgroup": "0::/\n"}
    for cpu in range(2 * num_cores):
        core = cpu % num_cores
        files[f"{CPU}/cpu{cpu}/topology/core_cpus_list"] = f"{core},{core + num_cores}\n"
    files["proc/self/mountinfo"] = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limit_values(host: Host) -> dict[str, float]:
    return {limit.name: limit.value for limit in host.limits}


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    host = read_host(smt_host(tmp_path), environ={})
    assert host.cpus == tuple(range(8))
    assert host.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert host.compute_cpus == 4
    assert host.io_threads == 8
    assert host.binding.name == "cores"


@pytest.mark.parametrize(
    ("quota", "compute_cpus", "io_threads", "binding"),
    [
        ("765000 100000", 4, 8, "cores"),
        ("399999 100000", 3, 4, "quota"),
        ("400000 100000", 4, 4, "cores"),
        ("150000 100000", 1, 2, "quota"),
        ("50000 100000", 1, 1, "quota"),
    ],
)
def test_teams_round_a_quota_down_and_blocking_threads_up(
    tmp_path: Path, quota: str, compute_cpus: int, io_threads: int, binding: str
) -> None:
    host = read_host(smt_host(tmp_path, quota=quota), environ={})
    assert (host.compute_cpus, host.io_threads, host.binding.name) == (compute_cpus, io_threads, binding)


@pytest.mark.parametrize(
    ("cpus", "environ", "compute_cpus", "where"),
    [
        (2, {}, 2, "--cpus"),
        (None, {"LOADMASTER_CPUS": "2"}, 2, "LOADMASTER_CPUS"),
        (3, {"LOADMASTER_CPUS": "2"}, 3, "--cpus"),
        (None, {"LOADMASTER_CPUS": " 1\n"}, 1, "LOADMASTER_CPUS"),
        (100, {}, 4, "core_cpus_list"),
    ],
)
def test_a_hint_is_an_upper_bound(
    tmp_path: Path, cpus: int | None, environ: dict[str, str], compute_cpus: int, where: str
) -> None:
    host = read_host(smt_host(tmp_path), cpus, environ)
    assert host.compute_cpus == compute_cpus
    assert host.io_threads == min(8, cpus or int(environ["LOADMASTER_CPUS"]))
    assert host.binding.where.endswith(where)
    assert len(host.cpus) == 8


@pytest.mark.parametrize("value", ["0", "-1", "", "two", "1.5", "1e3", "9" * 5000, "2 3"])
def test_an_unusable_hint_is_named(value: str) -> None:
    with pytest.raises(InputError, match="LOADMASTER_CPUS must be a whole number of at least 1, not '"):
        read_host(FIXTURES / "no-proc", environ={"LOADMASTER_CPUS": value})


def test_an_unusable_argument_is_named() -> None:
    with pytest.raises(InputError, match="--cpus must be a whole number of at least 1, not '0'"):
        read_host(FIXTURES / "no-proc", 0, {})


def test_a_root_without_cpus_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no CPUs are found below"):
        read_host(tmp_path, environ={})


def test_a_missing_root_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        read_host(tmp_path / "missing", environ={})


def test_refresh_sees_a_resized_group(tmp_path: Path) -> None:
    host = read_host(smt_host(tmp_path, quota="200000 100000"), environ={})
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("300000 100000\n")
    assert host.compute_cpus == 2
    assert host.refresh().compute_cpus == 3
    assert host.refresh().refresh() == host.refresh()


def test_refresh_sees_a_changed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADMASTER_CPUS", raising=False)
    host = read_host(smt_host(tmp_path))
    monkeypatch.setenv("LOADMASTER_CPUS", "1")
    assert (host.compute_cpus, host.refresh().compute_cpus) == (4, 1)


def test_refresh_keeps_the_hint(tmp_path: Path) -> None:
    assert read_host(smt_host(tmp_path), 2, {}).refresh().compute_cpus == 2


def test_a_host_that_was_not_read_cannot_be_read_again(tmp_path: Path) -> None:
    host = read_host(smt_host(tmp_path), environ={})
    copy = Host(
        *(
            getattr(host, name)
            for name in ("cpus", "cores", "nodes", "kinds", "quota", "compute_cpus", "io_threads", "limits")
        )
    )
    with pytest.raises(InputError, match="cannot be read again"):
        copy.refresh()


def test_a_host_travels_to_other_processes(tmp_path: Path) -> None:
    host = read_host(smt_host(tmp_path), environ={})
    copy = pickle.loads(pickle.dumps(host))
    assert copy == host
    assert copy.refresh() == host


def test_a_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        read_host(FIXTURES / "v2-garbage", environ={})
    (record,) = caplog.records
    assert record.name.startswith("loadmaster.")
    assert record.levelno == logging.WARNING
    assert "/sys/fs/cgroup/app/cpu.max" in record.getMessage()


def test_kinds_and_nodes_keep_usable_cpus_only(tmp_path: Path) -> None:
    root = smt_host(tmp_path)
    for cpu in range(8):
        (root / f"{CPU}/cpu{cpu}/cpu_capacity").write_text("1024" if cpu % 4 else "500")
    for node in (0, 1):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (root / f"sys/devices/system/node/node{node}/cpulist").write_text("0-1,4-5" if node == 0 else "2-3,6-7")
    host = read_host(root, environ={})
    assert list((host.kinds or {}).values()) == [(0, 4), (1, 2, 3, 5, 6, 7)]
    (root / "sys/fs/cgroup/cpuset.cpus.effective").write_text("2-3\n")
    narrowed = host.refresh()
    assert narrowed.cores == ((2,), (3,))
    assert narrowed.nodes == {1: (2, 3)}
    assert narrowed.kinds is None
    assert narrowed.online == host.online


# This system, and systems without an affinity


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the platform tells no affinity")
def test_this_system_follows_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(read_host(environ={}).cpus) == allowed
    one = min(allowed)
    host = read_host(environ={}, affinity=lambda: Affinity(frozenset({one}), "a test", known=True))
    assert host.cpus == (one,)
    assert limit_values(host)["affinity"] == 1
    assert host.compute_cpus == 1


def test_an_affinity_that_sysfs_contradicts_wins() -> None:
    host = read_host(environ={}, affinity=lambda: Affinity(frozenset({60000, 60001}), "a test", known=True))
    assert host.cpus == (60000, 60001)
    assert host.binding.value == host.compute_cpus
    assert any("60000-60001" in warning for warning in host.warnings)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the platform tells no affinity")
def test_this_system_is_read_in_time() -> None:
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        read_host(environ={})
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005


def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows: no sysfs and no procfs."""
    monkeypatch.setattr(HostFiles, "read", lambda files, path: None)
    monkeypatch.setattr(HostFiles, "names", lambda files, path: [])


@pytest.mark.parametrize(
    ("system", "count", "where"),
    [
        (SimpleNamespace(process_cpu_count=lambda: 6, cpu_count=lambda: 8), 6, "process_cpu_count"),
        (SimpleNamespace(cpu_count=lambda: 8), 8, "cpu_count"),
        (SimpleNamespace(cpu_count=lambda: None), 1, "cpu_count"),
    ],
)
def test_a_platform_without_affinity_says_so(system: SimpleNamespace, count: int, where: str) -> None:
    affinity = read_affinity(system)
    assert affinity.cpus == set(range(count))
    assert not affinity.known
    assert affinity.where == f"os.{where}: the affinity is unknown here"


def test_a_forbidden_affinity_is_unknown() -> None:
    def forbid(pid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    assert not read_affinity(SimpleNamespace(sched_getaffinity=forbid, cpu_count=lambda: 2)).known


@pytest.mark.parametrize(
    ("num_cores", "cores"),
    [
        (4, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (8, tuple((cpu,) for cpu in range(8))),
        (3, tuple((cpu,) for cpu in range(8))),
        (None, tuple((cpu,) for cpu in range(8))),
    ],
)
def test_a_host_without_sysfs_and_affinity(
    monkeypatch: pytest.MonkeyPatch, num_cores: int | None, cores: tuple[tuple[int, ...], ...]
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: num_cores)
    no_files(monkeypatch)
    host = read_host(environ={}, affinity=lambda: read_affinity(SimpleNamespace(cpu_count=lambda: 8)))
    assert host.cores == cores
    assert host.compute_cpus == len(cores)
    assert host.nodes == {}
    assert host.kinds is None
    (affinity,) = [limit for limit in host.limits if limit.name == "affinity"]
    assert "unknown" in affinity.where


@pytest.mark.processes
def test_importing_needs_neither_torch_nor_slow_modules() -> None:
    code = (
        "import sys, loadmaster.host, loadmaster.share; from loadmaster.share import share; share();"
        "print([name for name in ('torch', 'numpy', 'psutil', 'rich', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
