"""Quotas on the real kernel: version 1 groups made for the test, with a child process in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.host.files import HostFiles
from loadmaster.host.mounts import parse_mountinfo

pytestmark = [pytest.mark.root, pytest.mark.processes]

REPORT = """
import json, sys, time
from loadmaster.host import read_host
sys.stdin.readline()
host = read_host(environ={})
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    pass
binding = host.binding
print(json.dumps([host.quota, host.compute_cpus, host.io_threads, binding.name, binding.value, binding.where]))
"""


def find_controller() -> Path | None:
    """Where the version 1 controller ``cpu`` is mounted with the root of its hierarchy."""
    mounts = parse_mountinfo(HostFiles().read("/proc/self/mountinfo") or "")
    return next((Path(m.folder) for m in mounts if m.version == 1 and "cpu" in m.controllers and m.root == "/"), None)


@pytest.fixture
def group() -> Iterator[Path]:
    """A new group in the controller ``cpu``, with a group in it."""
    controller = find_controller()
    if controller is None:
        pytest.skip("the version 1 controller cpu is not mounted here")
    outer = controller / f"loadmaster-test-{os.getpid()}"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {controller}: {error.strerror}")
    inner = outer / "inner"
    try:
        inner.mkdir()
        yield inner
    finally:
        inner.rmdir()
        outer.rmdir()


def limit(group: Path, quota: int, *, period: int = 100_000) -> None:
    """Set quota and period, in microseconds."""
    (group / "cpu.cfs_period_us").write_text(str(period))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def report_from(group: Path, busy_seconds: float = 0.0) -> list[object]:
    """What a process in the group reads, which then keeps one CPU busy."""
    command = [sys.executable, "-c", REPORT, str(busy_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        (group / "cgroup.procs").write_text(str(child.pid))
        output, _ = child.communicate("\n", timeout=60)
    assert child.returncode == 0
    report: list[object] = json.loads(output)
    return report


def throttled(group: Path) -> int:
    """Periods in which the group used up its quota."""
    lines = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(lines["nr_throttled"])


def test_the_quota_of_the_group(group: Path) -> None:
    limit(group, 150_000)
    where = str(group / "cpu.cfs_quota_us")
    num_cpus = len(os.sched_getaffinity(0))
    quota, compute_cpus, io_threads, *binding = report_from(group)
    assert (quota, compute_cpus, io_threads) == (1.5, 1, min(2, num_cpus))
    if num_cpus > 1:
        assert binding == ["quota", 1.5, where]


def test_the_quota_of_the_outer_group_binds(group: Path) -> None:
    limit(group.parent, 25_000, period=50_000)
    assert report_from(group) == [0.5, 1, 1, "quota", 0.5, str(group.parent / "cpu.cfs_quota_us")]


def test_the_smaller_quota_of_the_inner_group_binds(group: Path) -> None:
    limit(group.parent, 80_000)
    limit(group, 30_000)
    assert report_from(group) == [0.3, 1, 1, "quota", 0.3, str(group / "cpu.cfs_quota_us")]


def test_without_a_quota_there_is_none(group: Path) -> None:
    assert report_from(group)[0] is None


def test_more_than_the_quota_is_throttled_and_less_is_not(group: Path) -> None:
    limit(group, 20_000)
    report_from(group, busy_seconds=0.5)
    assert throttled(group) > 0
    limit(group, 400_000)
    before = throttled(group)
    report_from(group, busy_seconds=0.3)
    assert throttled(group) == before
