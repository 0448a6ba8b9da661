"""``bench sweep``: every count up to twice the cores, the best of them by name, and the share among them."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from loadmaster.bench import sweep as bench
from loadmaster.bench.copies import CopyArm, CopyTimes
from loadmaster.bench.sweep import bench_sweep, panels, sweep_counts
from loadmaster.errors import InputError


@pytest.mark.parametrize(
    ("cores", "also", "counts"),
    [
        (1, [], [1, 2]),
        (2, [1], [1, 2, 3, 4]),
        (6, [3], [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]),
        (32, [11], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 20, 26, 32, 33, 42, 54, 64]),
        (1, [4], [1, 2, 4]),
    ],
)
def test_counts_go_from_one_to_twice_the_cores(cores: int, also: list[int], counts: list[int]) -> None:
    assert sweep_counts(cores, also) == counts


@pytest.mark.processes
def test_a_sweep_names_the_best_and_the_share() -> None:
    command = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))
    words = [command, "bench", "sweep", "--ranks", "1", "--repeat", "1", "--copy-bytes", "1000"]
    environment = {**os.environ, "LOADMASTER_CPUS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "measuring 1 rank\n"
    assert "1 thread (share)" in done.stdout
    assert "the best count is " in done.stdout
    assert "lm.share() chooses 1 thread (" in done.stdout


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a copy by name of the arm, to be filled; arms that are not in it were stopped."""
    seconds: dict[str, float] = {}

    def measure(ranks: int, arms: list[CopyArm], **_: Any) -> dict[str, CopyTimes]:
        return {
            arm.name: CopyTimes(of_ranks=[[seconds[arm.name]] * ranks]) if arm.name in seconds else CopyTimes()
            for arm in arms
        }

    monkeypatch.setattr(bench, "measure_copies", measure)
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    return seconds


def test_the_best_is_the_fastest_that_was_finished(measured: dict[str, float]) -> None:
    measured |= {"1 thread": 3.0, "2 threads": 2.0}
    record = bench_sweep(2)
    assert record.settings["best"] == 2
    assert record.settings["share"] == 1
    assert record.settings["counts"][0] == 1
    json.dumps(record.as_dict())
    (panel,) = panels(record)
    assert panel.marked == {"share: 1 thread": 1}
    assert [place for place, _ in panel.curves["slowest rank"]] == record.settings["counts"]


def test_nothing_finished_has_no_best(measured: dict[str, float]) -> None:
    assert bench_sweep(2).settings["best"] is None


def test_no_ranks_are_an_error() -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        bench_sweep(0)
