"""Control groups: each folder in fixtures/ is one case, and its name says which."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host import Host, format_cpulist, read_host

FIXTURES = Path(__file__).parent / "fixtures"


class Expected(NamedTuple):
    """What a case with 8 CPUs comes to; ``binding`` is where the limit that binds was read, if a group's file did."""

    quota: float | None = None
    compute_cpus: int = 8
    cpus: str = "0-7"
    binding: str = ""
    warning: str = ""


NOT_WRITTEN = "which the kernel does not write"

V1 = "/sys/fs/cgroup/cpu,cpuacct"
V2 = "/sys/fs/cgroup"

CASES = {
    "v2-quota-and-period": Expected(2.0, 2, binding=f"{V2}/app/cpu.max"),
    "v2-max-is-no-quota": Expected(),
    "v2-odd-period": Expected(3.0, 3, binding=f"{V2}/app/cpu.max"),
    "v2-fraction-above-seven": Expected(7.65, 7, binding=f"{V2}/app/cpu.max"),
    "v2-one-and-a-half-cpus": Expected(1.5, 1, binding=f"{V2}/app/cpu.max"),
    "v2-half-a-cpu": Expected(0.5, 1, binding=f"{V2}/app/cpu.max"),
    "v2-quota-above-the-cores": Expected(16.0, 8),
    "v2-ancestor-has-the-smallest-quota": Expected(1.5, 1, binding=f"{V2}/a/b/cpu.max"),
    "v2-leaf-has-the-smallest-quota": Expected(2.0, 2, binding=f"{V2}/a/b/c/cpu.max"),
    "v2-controller-off-in-the-leaf": Expected(3.0, 3, binding=f"{V2}/a/cpu.max"),
    "v2-controller-off-everywhere": Expected(),
    "v2-quota-without-period": Expected(2.0, 2, binding=f"{V2}/app/cpu.max", warning="100 ms is assumed"),
    "v2-max-without-period": Expected(warning=NOT_WRITTEN),
    "v2-zero-period": Expected(warning=NOT_WRITTEN),
    "v2-negative-period": Expected(warning=NOT_WRITTEN),
    "v2-zero-quota": Expected(warning=NOT_WRITTEN),
    "v2-negative-quota": Expected(warning=NOT_WRITTEN),
    "v2-garbage": Expected(warning=NOT_WRITTEN),
    "v2-fractional-microseconds": Expected(warning=NOT_WRITTEN),
    "v2-three-words": Expected(warning=NOT_WRITTEN),
    "v2-empty-file": Expected(warning=NOT_WRITTEN),
    "v2-garbage-beside-a-good-ancestor": Expected(3.0, 3, binding=f"{V2}/a/cpu.max", warning=NOT_WRITTEN),
    "v2-burst-is-not-capacity": Expected(2.0, 2, binding=f"{V2}/app/cpu.max"),
    "v2-weight-lowers-nothing": Expected(),
    "v2-namespace-root-has-a-quota": Expected(2.5, 2, binding=f"{V2}/cpu.max"),
    "v2-namespace-left-by-the-process": Expected(warning="outside of what /sys/fs/cgroup shows"),
    "v2-namespace-over-an-outer-mount": Expected(3.5, 3, binding=f"{V2}/cpu.max"),
    "v2-bind-mounted-group": Expected(3.0, 3, binding=f"{V2}/cpu.max"),
    "v2-bind-mounted-group-with-a-similar-name": Expected(3.0, 3, binding=f"{V2}/cpu.max"),
    "v2-no-optional-fields-in-mountinfo": Expected(2.0, 2, binding=f"{V2}/app/cpu.max"),
    "v2-many-optional-fields-in-mountinfo": Expected(2.0, 2, binding=f"{V2}/app/cpu.max"),
    "v2-colon-in-the-group-name": Expected(2.0, 2, binding=f"{V2}/a:b/cpu.max"),
    "v2-effective-cpuset": Expected(None, 4, "2-5", f"{V2}/app/cpuset.cpus.effective"),
    "v2-cpuset-of-the-nearest-ancestor": Expected(None, 4, "4-7", f"{V2}/a/cpuset.cpus.effective"),
    "v2-cpuset-partition": Expected(None, 4, "4-7", f"{V2}/part/cpuset.cpus.effective"),
    "v2-cpuset-and-quota": Expected(2.5, 2, "0-3", f"{V2}/app/cpu.max"),
    "v2-cpuset-garbage": Expected(None, 6, "0-5", f"{V2}/cpuset.cpus.effective", "cannot be read as a CPU list"),
    "v2-cpuset-names-no-online-cpu": Expected(warning="none of which is usable"),
    "v2-cpuset-names-offline-cpus-too": Expected(None, 4, "4-7", f"{V2}/app/cpuset.cpus.effective"),
    "v2-mounted-twice": Expected(2.0, 2, binding="/host/cgroup/pod/cpu.max"),
    "v2-hidden-by-a-later-mount": Expected(3.0, 3, binding=f"{V2}/cpu.max"),
    "v2-escapes-in-the-mount-point": Expected(2.0, 2, binding="/sys/fs/control groups/app/cpu.max"),
    "v2-escapes-in-the-mount-root": Expected(2.0, 2, binding=f"{V2}/leaf/cpu.max"),
    "v2-from-proc-mounts": Expected(2.0, 2, binding=f"{V2}/app/cpu.max"),
    "v2-no-self-cgroup": Expected(2.0, 2, binding=f"{V2}/cpu.max"),
    "v1-quota-and-period": Expected(2.0, 2, binding=f"{V1}/app/cpu.cfs_quota_us"),
    "v1-minus-one-is-no-quota": Expected(),
    "v1-other-negative-quota": Expected(warning=NOT_WRITTEN),
    "v1-quota-without-period": Expected(
        2.0, 2, binding=f"{V1}/app/cpu.cfs_quota_us", warning="no period beside it, which the kernel does not write"
    ),
    "v1-minus-one-without-period": Expected(),
    "v1-period-without-quota": Expected(),
    "v1-zero-period": Expected(warning=NOT_WRITTEN),
    "v1-zero-quota": Expected(warning=NOT_WRITTEN),
    "v1-max-belongs-to-v2": Expected(warning=NOT_WRITTEN),
    "v1-garbage": Expected(warning=NOT_WRITTEN),
    "v1-empty-file": Expected(warning=NOT_WRITTEN),
    "v1-no-files": Expected(),
    "v1-ancestor-has-the-smallest-quota": Expected(3.0, 3, binding=f"{V1}/a/cpu.cfs_quota_us"),
    "v1-docker-bind-mount": Expected(2.5, 2, binding=f"{V1}/cpu.cfs_quota_us"),
    "v1-docker-bind-mount-with-a-child": Expected(2.5, 2, binding=f"{V1}/cpu.cfs_quota_us"),
    "v1-namespace-and-bind-mount-disagree": Expected(2.5, 2, binding=f"{V1}/cpu.cfs_quota_us"),
    "v1-shares-lower-nothing": Expected(),
    "v1-burst-is-not-capacity": Expected(2.0, 2, binding=f"{V1}/app/cpu.cfs_quota_us"),
    "v1-cpu-alone": Expected(2.0, 2, binding="/sys/fs/cgroup/cpu/app/cpu.cfs_quota_us"),
    "v1-controller-not-mounted": Expected(),
    "v1-controller-not-in-self-cgroup": Expected(3.0, 3, binding=f"{V1}/cpu.cfs_quota_us"),
    "v1-effective-cpuset": Expected(None, 4, "0-3", "/sys/fs/cgroup/cpuset/app/cpuset.effective_cpus"),
    "v1-cpuset-without-effective-file": Expected(None, 3, "1,3,5", "/sys/fs/cgroup/cpuset/app/cpuset.cpus"),
    "v1-cpuset-noprefix": Expected(None, 2, "2-3", "/dev/cpuset/job/cpus"),
    "v1-cpuset-empty-in-the-leaf": Expected(None, 4, "4-7", "/sys/fs/cgroup/cpuset/app/cpuset.cpus"),
    "cpuset-file-system": Expected(None, 4, "1-4", "/dev/cpuset/job/cpus"),
    "cpuset-file-system-without-sysfs": Expected(None, 4, "1-4", "/dev/cpuset/job/cpus"),
    "hybrid-quota-in-v1": Expected(2.0, 2, binding=f"{V1}/app/cpu.cfs_quota_us"),
    "hybrid-quota-in-v2": Expected(2.0, 2, binding="/sys/fs/cgroup/unified/app/cpu.max"),
    "hybrid-cpuset-in-v1-quota-in-v2": Expected(2.0, 2, "0-5", "/sys/fs/cgroup/unified/app/cpu.max"),
    "no-control-groups": Expected(),
    "no-proc": Expected(),
}


def limits_named(host: Host, name: str) -> list[tuple[float, str]]:
    return [(limit.value, limit.where) for limit in host.limits if limit.name == name]


@pytest.mark.parametrize("case", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_case(case: str) -> None:
    expected = CASES[case]
    host = read_host(FIXTURES / case, environ={})
    assert host.quota == expected.quota
    assert host.compute_cpus == expected.compute_cpus
    assert format_cpulist(host.cpus) == expected.cpus
    where = host.binding.where if host.binding.name in ("quota", "cpuset") else ""
    assert where == expected.binding
    assert len(host.warnings) == (1 if expected.warning else 0)
    assert all(expected.warning in warning for warning in host.warnings)


def test_every_level_with_a_quota_is_listed() -> None:
    host = read_host(FIXTURES / "v2-leaf-has-the-smallest-quota", environ={})
    assert limits_named(host, "quota") == [
        (2.0, f"{V2}/a/b/c/cpu.max"),
        (4.0, f"{V2}/a/b/cpu.max"),
        (6.0, f"{V2}/a/cpu.max"),
    ]


@pytest.mark.parametrize(
    ("case", "weight", "where"),
    [
        ("v2-weight-lowers-nothing", 1, f"{V2}/app/cpu.weight"),
        ("v1-shares-lower-nothing", 2, f"{V1}/app/cpu.shares"),
        ("v1-docker-bind-mount", 512, f"{V1}/cpu.shares"),
    ],
)
def test_weights_are_shown_and_never_bind(case: str, weight: int, where: str) -> None:
    host = read_host(FIXTURES / case, environ={})
    assert limits_named(host, "weight") == [(weight, where)]
    assert host.binding.name != "weight"


@pytest.mark.parametrize(("case", "io_threads"), [("v2-half-a-cpu", 1), ("v2-one-and-a-half-cpus", 2), ("no-proc", 8)])
def test_threads_that_block_round_up(case: str, io_threads: int) -> None:
    assert read_host(FIXTURES / case, environ={}).io_threads == io_threads


file_texts = st.text(alphabet="0123456789-,. max\n\0/:\\", max_size=25)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "proc/self/cgroup",
                "proc/self/cpuset",
                "sys/fs/cgroup/cpu.max",
                "sys/fs/cgroup/cpu.cfs_quota_us",
                "sys/fs/cgroup/cpu.cfs_period_us",
                "sys/fs/cgroup/cpu.weight",
                "sys/fs/cgroup/cpuset.cpus.effective",
                "sys/devices/system/cpu/cpu0/topology/core_cpus_list",
                "sys/devices/system/cpu/cpu0/topology/thread_siblings",
                "sys/devices/system/cpu/cpu0/cpu_capacity",
                "sys/devices/system/node/node0/cpulist",
            ]
        ),
        file_texts,
    ),
    st.sampled_from(["cgroup2 c rw", "cgroup c rw,cpu,cpuset"]),
)
def test_no_content_of_any_file_is_fatal(files: dict[str, str], mount: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files |= {
            "proc/self/mountinfo": f"30 23 0:26 / /sys/fs/cgroup rw - {mount}\n",
            "sys/devices/system/cpu/online": "0-3\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        host = read_host(root, environ={})
    assert 1 <= host.compute_cpus <= 4
    assert set(host.cpus) <= {0, 1, 2, 3}
    assert sorted(cpu for core in host.cores for cpu in core) == list(host.cpus)
    assert [limit.binding for limit in host.limits].count(True) == 1
