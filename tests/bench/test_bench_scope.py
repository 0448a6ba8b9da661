"""``bench scope`` measures what it says: every arm in every rank, the scope with the share of the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster.bench import scope as bench
from loadmaster.bench.copies import AS_SHIPPED, SCOPE, fixed_counts, threads_words
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.bench.scope import ScopeJob, deinterleave_in_rank, enter_in_rank, panels
from loadmaster.cli.bench_scope import _numbers
from loadmaster.errors import InputError

ALWAYS = float("inf")


class Alone:
    """The line of a rank whose parent only listens."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def progress(self, value: Any) -> None:
        self.told.append(value)


def run_bench(*options: str) -> Any:
    words = [os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster")), "bench", "scope", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.processes
def test_the_record_has_every_arm_with_all_its_repetitions() -> None:
    done = run_bench("--ranks", "2", "--copy-seconds", "0.02", "--repeat", "2", "--json")
    record = json.loads(done.stdout)
    assert record["bench"] == "scope"
    assert record["settings"] == {
        "ranks": [2],
        "copy_bytes": 400_000,
        "copy_seconds": 0.02,
        "repeat": 2,
        "seconds": 240,
    }
    names = [arm["name"] for arm in record["arms"]]
    raised = ["1 rank at OMP_NUM_THREADS=1", "1 rank, scope"] if record["machine"]["compute_cpus"] > 1 else []
    counts = [threads_words(count) for count in fixed_counts(record["machine"]["cores"])]
    copies = [f"2 ranks, {name}" for name in (AS_SHIPPED, *counts, SCOPE)]
    assert names == [*copies, *raised, "enter and leave", "paced"]
    assert all(len(arm["seconds"]) == 2 for arm in record["arms"])
    assert all(second > 0 for arm in record["arms"][:-1] for second in arm["seconds"])
    assert done.stderr == ""


@pytest.mark.processes
def test_the_table_says_how_the_scope_compares() -> None:
    done = run_bench("--ranks", "1", "--copy-seconds", "0.02", "--repeat", "1")
    assert "1 rank: the scope is " in done.stdout
    assert "of the time of the best fixed count" in done.stdout
    assert done.stderr.splitlines()[0] == "measuring copies of 1 rank"


def test_the_pass_of_the_scope_runs_with_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch.cat

    def look(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "cat", look)
    monkeypatch.setattr(bench, "EXPERTS", 1)
    monkeypatch.setattr(bench, "INTERMEDIATE", 8)
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    before = torch.get_num_threads()
    line = Alone()
    deinterleave_in_rank(ScopeJob(repeat=2, deadline=ALWAYS), line)  # type: ignore[arg-type]
    assert seen == [before, 1] * 3
    assert [name for name, _ in line.told] == ["as it is", "scope"] * 2


def test_nothing_but_the_first_repetition_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "EXPERTS", 1)
    monkeypatch.setattr(bench, "INTERMEDIATE", 8)
    monkeypatch.setattr(bench, "ENTRIES", 2)
    monkeypatch.setattr(bench, "ITEMS", 2)
    for measure, names in (
        (deinterleave_in_rank, ["as it is", "scope"]),
        (enter_in_rank, ["enter and leave", "paced"]),
    ):
        line = Alone()
        measure(ScopeJob(repeat=5, deadline=0.0), line)  # type: ignore[arg-type]
        assert [name for name, _ in line.told] == names


def test_each_number_of_ranks_is_a_panel_and_no_arm_is_left_out() -> None:
    names = ["1 ranks, as shipped", "1 ranks, scope", "2 ranks, as shipped", "2 ranks, scope"]
    names += ["1 rank at OMP_NUM_THREADS=1", "1 rank, scope", "enter and leave", "paced"]
    arms = [ArmResult(name=name, what="", seconds=[1.0], num_bytes=1, tensors=1) for name in names]
    record = BenchRecord(bench="scope", settings={"ranks": [1, 2], "copy_bytes": 9}, arms=arms)
    assert [[arm.name for _, arm in panel.arms] for panel in panels(record)] == [
        names[0:2],
        names[2:4],
        names[4:6],
        names[6:8],
    ]


@pytest.mark.parametrize("text", ["", "0", "two", "2,,4", "2,-1"])
def test_numbers_of_ranks_that_are_none_are_an_error_that_names_them(text: str) -> None:
    with pytest.raises(InputError, match=f"--ranks must be whole numbers of at least 1.* not '{text}'"):
        _numbers(text)
