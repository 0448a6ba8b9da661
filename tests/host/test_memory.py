"""How much memory may still be taken, on made hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.files import HostFiles
from loadmaster.host.memory import available_memory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNKNOWN = 1 << 62

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 23 0:29 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
V1_CPU_MOUNT = "34 23 0:30 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu\n"

Made = Callable[[dict[str, str]], int]


@pytest.fixture
def available(tmp_path: Path) -> Made:
    """Write the files of a host and ask how much memory there is."""

    def ask(files: dict[str, str]) -> int:
        for name, text in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_memory(HostFiles(tmp_path))

    return ask


def meminfo(kib: int) -> dict[str, str]:
    lines = f"MemTotal:       99999999 kB\nMemFree:          100000 kB\nMemAvailable:   {kib} kB\nSwapFree: 7 kB\n"
    return {"/proc/meminfo": lines}


def v2(group: str = "/app") -> dict[str, str]:
    return {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": f"0::{group}\n"}


def v1(group: str = "/app") -> dict[str, str]:
    return {"/proc/self/mountinfo": V1_CPU_MOUNT + V1_MOUNT, "/proc/self/cgroup": f"5:cpu:/else\n4:memory:{group}\n"}


def limit_v2(group: str, limit: object, used: object, stat: str = "") -> dict[str, str]:
    folder = f"/sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def limit_v1(group: str, limit: object, used: object, stat: str = "") -> dict[str, str]:
    folder = f"/sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def test_what_the_host_has_where_nothing_limits(available: Made) -> None:
    assert available(meminfo(4096)) == 4 * MIB


def test_where_nothing_tells_there_is_no_bound(available: Made) -> None:
    assert available({}) == UNKNOWN


def test_version_2_limit_less_what_is_used(available: Made) -> None:
    assert available({**meminfo(8 << 20), **v2(), **limit_v2("/app", 3 * GIB, GIB)}) == 2 * GIB


def test_version_1_limit_less_what_is_used(available: Made) -> None:
    assert available({**meminfo(8 << 20), **v1(), **limit_v1("/app", 3 * GIB, GIB)}) == 2 * GIB


def test_a_limit_above_what_the_host_has_changes_nothing(available: Made) -> None:
    assert available({**meminfo(1024), **v2(), **limit_v2("/app", 3 * GIB, GIB)}) == MIB


def test_files_in_the_page_cache_are_free(available: Made) -> None:
    stat = f"anon {GIB}\nfile {GIB}\nshmem 4096\ninactive_file {256 * MIB}\nactive_file {128 * MIB}\n"
    found = available({**meminfo(8 << 20), **v2(), **limit_v2("/app", 2 * GIB, 2 * GIB, stat)})
    assert found == 384 * MIB


def test_version_1_counts_the_page_cache_of_the_whole_group_once(available: Made) -> None:
    stat = (
        f"inactive_file {4 * MIB}\nactive_file {2 * MIB}\nhierarchical_memory_limit {GIB}\n"
        f"total_inactive_file {64 * MIB}\ntotal_active_file {32 * MIB}\n"
    )
    assert available({**meminfo(8 << 20), **v1(), **limit_v1("/app", GIB, GIB, stat)}) == 96 * MIB


@pytest.mark.parametrize("made", ["v1", "v2"])
@pytest.mark.parametrize("tightest", ["", "/outer", "/outer/inner"])
def test_every_level_up_to_the_root_counts(made: str, tightest: str, available: Made) -> None:
    base, limit = (v1, limit_v1) if made == "v1" else (v2, limit_v2)
    files = {**meminfo(80 << 20), **base("/outer/inner")}
    for group in ("", "/outer", "/outer/inner"):
        files |= limit(group, GIB if group == tightest else 9 * GIB, 256 * MIB)
    assert available(files) == 768 * MIB


def test_a_group_that_is_not_ours_does_not_count(available: Made) -> None:
    files = {**meminfo(8 << 20), **v2("/app"), **limit_v2("/other", MIB, MIB), **limit_v2("/app/below", MIB, MIB)}
    assert available(files) == 8 * GIB


def test_max_is_no_limit(available: Made) -> None:
    assert available({**meminfo(1024), **v2(), **limit_v2("/app", "max", GIB)}) == MIB


def test_the_largest_number_of_version_1_is_no_limit(available: Made) -> None:
    assert available({**meminfo(1024), **v1(), **limit_v1("/app", 9223372036854771712, GIB)}) == MIB


def test_more_used_than_allowed_leaves_nothing(available: Made) -> None:
    assert available({**meminfo(1024), **v2(), **limit_v2("/app", GIB, 2 * GIB)}) == 0


def test_a_limit_of_zero_leaves_nothing(available: Made) -> None:
    assert available({**meminfo(1024), **v2(), **limit_v2("/app", 0, 0)}) == 0


def test_more_cache_than_use_does_not_raise_the_limit(available: Made) -> None:
    stat = f"inactive_file {9 * GIB}\nactive_file 0\n"
    assert available({**meminfo(80 << 20), **v2(), **limit_v2("/app", GIB, MIB, stat)}) == GIB


GARBAGE = ["", "-1", "1e9", "0x10", "many", "9" * 40, "1 2", "١", "\x00\x00"]


@pytest.mark.parametrize("text", GARBAGE)
@pytest.mark.parametrize("file", ["memory.max", "memory.current"])
def test_garbage_is_no_limit(text: str, file: str, available: Made) -> None:
    files = {**meminfo(1024), **v2(), **limit_v2("/app", 4096, 0)}
    files[f"/sys/fs/cgroup/app/{file}"] = text
    assert available(files) == MIB


@pytest.mark.parametrize("text", ["", "MemAvailable: lots kB\n", "MemFree: 12 kB\n", "MemAvailable:\n"])
def test_garbage_in_meminfo_leaves_the_limits(text: str, available: Made) -> None:
    assert available({"/proc/meminfo": text, **v2(), **limit_v2("/app", GIB, 0)}) == GIB


@pytest.mark.parametrize("text", ["", "garbage\n", "0:\n", "::\n", "4:memory\n"])
def test_garbage_in_the_groups_is_no_crash(text: str, available: Made) -> None:
    assert available({**meminfo(1024), **v2(), "/proc/self/cgroup": text}) == MIB


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_no_text_is_a_crash(tmp_path_factory: pytest.TempPathFactory, first: str, second: str, third: str) -> None:
    root = tmp_path_factory.mktemp("host")
    files = {**v2(), **limit_v2("/app", first, second, third), "/proc/meminfo": third}
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="replace"))
    assert 0 <= available_memory(HostFiles(root)) <= UNKNOWN


def test_a_trailing_zero_byte_is_no_garbage(available: Made) -> None:
    assert available({**meminfo(1024), **v2(), **limit_v2("/app", "2048\n\0", "1024")}) == KIB


def test_both_versions_at_once(available: Made) -> None:
    files = {
        **meminfo(8 << 20),
        **limit_v1("/one", 2 * GIB, 0),
        "/proc/self/mountinfo": V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "/proc/self/cgroup": "4:memory:/one\n0::/two\n",
        "/sys/fs/cgroup/unified/two/memory.max": f"{GIB}\n",
        "/sys/fs/cgroup/unified/two/memory.current": "0\n",
    }
    assert available(files) == GIB


def test_without_mountinfo_the_mounts_tell(available: Made) -> None:
    files = {**meminfo(8 << 20), **limit_v2("/app", GIB, 0), "/proc/self/cgroup": "0::/app\n"}
    files["/proc/mounts"] = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
    assert available(files) == GIB


def test_the_real_host_has_some() -> None:
    assert 0 < available_memory() < UNKNOWN
