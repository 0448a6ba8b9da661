from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.files import HostFiles
from loadmaster.host.kinds import classes_of, parse_midr, read_kinds

CPU = "sys/devices/system/cpu"


Kinds = list[tuple[int, ...]]


def kinds_of(root: Path, files: dict[str, list[str]], devices: dict[str, str] | None = None) -> Kinds | None:
    """Kinds, slowest first, of CPUs whose file of each name holds these texts."""
    for name, texts in files.items():
        for cpu, text in enumerate(texts):
            path = root / f"{CPU}/cpu{cpu}/{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for device, cpus in (devices or {}).items():
        (root / "sys/devices" / device).mkdir(parents=True)
        (root / "sys/devices" / device / "cpus").write_text(cpus)
    num_cpus = max((len(texts) for texts in files.values()), default=6)
    kinds = read_kinds(HostFiles(root), range(num_cpus))
    return None if kinds is None else list(kinds.values())


CAPACITY, HIGHEST, BASE = "cpu_capacity", "cpufreq/cpuinfo_max_freq", "cpufreq/base_frequency"
MIDR = "regs/identification/midr_el1"
A55, A76 = "0x00000000412fd050\n", "0x00000000414fd0b0\n"


@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        pytest.param({CAPACITY: ["485\n", "485\n", "1024\n", "1024\n"]}, [(0, 1), (2, 3)], id="big-little"),
        pytest.param({CAPACITY: ["160", "160", "498", "498", "1024"]}, [(0, 1), (2, 3), (4,)], id="three-kinds"),
        pytest.param({CAPACITY: ["1024", "300\0"]}, [(1,), (0,)], id="the-slowest-comes-first"),
        pytest.param({CAPACITY: ["718", "997", "731", "1024"]}, [(0, 2), (1, 3)], id="close-capacities-are-one-kind"),
        pytest.param({CAPACITY: ["1024", "1024"]}, None, id="all-alike"),
        pytest.param({HIGHEST: ["3800000", "5200000", "5100000"]}, [(0,), (1, 2)], id="favoured-cores-are-one-kind"),
        pytest.param({HIGHEST: ["5400000", "5600000", "5760000"]}, None, id="favoured-cores-alone"),
        pytest.param(
            {HIGHEST: ["2800000", "3000000"], BASE: ["1400000", "2000000"]}, [(0,), (1,)], id="base-frequency"
        ),
        pytest.param({MIDR: [A55, A55, A76]}, [(0, 1), (2,)], id="main-id-register"),
        pytest.param({MIDR: ["0x00000000410fd0b0", "0x00000000414fd0b3"]}, None, id="revisions-are-one-kind"),
        pytest.param({CAPACITY: ["400", "1024", ""]}, None, id="unknown-for-one-cpu"),
        pytest.param({HIGHEST: ["3000000"], "uevent": ["", ""]}, None, id="cpufreq-for-the-first-cpu-only"),
        pytest.param({CAPACITY: ["fast", "slow"]}, None, id="garbage"),
        pytest.param({"uevent": ["", ""]}, None, id="nothing-tells"),
    ],
)
def test_kinds_from_the_files_of_each_cpu(tmp_path: Path, files: dict[str, list[str]], kinds: Kinds | None) -> None:
    assert kinds_of(tmp_path, files) == kinds


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ({"cpu_core": "0-3\n", "cpu_atom": "4-5\n"}, [(4, 5), (0, 1, 2, 3)]),
        ({"cpu_core": "0-1\n", "cpu_atom": "2-5\n", "cpu_lowpower": "5\n"}, [(5,), (2, 3, 4), (0, 1)]),
        ({"cpu_core": "0-5\n"}, None),
        ({"cpu_core": "0-3\n"}, None),
        ({"cpu": "0-5\n"}, None),
    ],
)
def test_kinds_from_intels_devices(tmp_path: Path, devices: dict[str, str], kinds: Kinds | None) -> None:
    assert kinds_of(tmp_path, {}, devices) == kinds


def test_frequencies_split_what_a_device_puts_together(tmp_path: Path) -> None:
    highest = ["5000000", "5000000", "3800000", "3800000", "2500000"]
    kinds = kinds_of(tmp_path, {HIGHEST: highest}, {"cpu_core": "0-1", "cpu_atom": "2-4"})
    assert kinds == [(4,), (2, 3), (0, 1)]


def test_names_tell_the_kinds_apart(tmp_path: Path) -> None:
    for cpu, frequency in enumerate(["5000000", "3800000", "2500000"]):
        path = tmp_path / f"{CPU}/cpu{cpu}/{HIGHEST}"
        path.parent.mkdir(parents=True)
        path.write_text(frequency)
    assert list(read_kinds(HostFiles(tmp_path), range(3)) or ()) == ["2.5 GHz", "3.8 GHz", "5 GHz"]


def test_midr_is_implementer_and_part() -> None:
    assert parse_midr("0x00000000410fd871\n\0") == 0x4100D870
    with pytest.raises(ValueError, match="invalid literal"):
        parse_midr("none")


@given(st.frozensets(st.integers(1, 10_000), min_size=1))
def test_classes_cover_all_values_and_lie_apart(values: frozenset[int]) -> None:
    classes = classes_of(values)
    assert all(sum(low <= value <= high for low, high in classes) == 1 for value in values)
    assert all(after[0] > before[1] * 1.1 for before, after in pairwise(classes))
