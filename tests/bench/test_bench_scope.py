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
from loadmaster.bench.scope import COUNTS, ScopeJob, collapse_arms, copy_in_rank, deinterleave_in_rank
from loadmaster.cli.bench_scope import _numbers
from loadmaster.errors import InputError


class Alone:
    """The line of a rank that has no others to wait for."""

    def __init__(self) -> None:
        self.waited = 0

    def barrier(self) -> None:
        self.waited += 1


def run_bench(*options: str) -> Any:
    words = [os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster")), "bench", "scope", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.processes
def test_the_record_has_every_arm_with_all_its_repetitions() -> None:
    done = run_bench("--ranks", "2", "--seconds", "0.02", "--repeat", "2", "--json")
    record = json.loads(done.stdout)
    assert record["bench"] == "scope"
    assert record["settings"] == {"ranks": [2], "copy_bytes": 400_000, "seconds": 0.02, "repeat": 2}
    names = [arm["name"] for arm in record["arms"]]
    raised = ["1 rank at OMP_NUM_THREADS=1", "1 rank, scope"] if record["machine"]["compute_cpus"] > 1 else []
    assert names == [*(f"2 ranks, {name}" for name in collapse_arms()), *raised, "enter and leave", "paced"]
    assert all(len(arm["seconds"]) == 2 for arm in record["arms"])
    assert all(second > 0 for arm in record["arms"][:-1] for second in arm["seconds"])
    assert done.stderr == ""


@pytest.mark.processes
def test_the_table_says_how_the_scope_compares() -> None:
    done = run_bench("--ranks", "1", "--seconds", "0.02", "--repeat", "1")
    assert "1 rank: the scope is " in done.stdout
    assert "of the time of the best fixed count" in done.stdout
    assert done.stderr.splitlines()[0] == "measuring copies of 1 rank"


def test_each_arm_copies_with_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(copy: Any, seconds: float) -> float:
        copy()
        seen.append(torch.get_num_threads())
        return seconds

    monkeypatch.setattr(bench, "_seconds_of_a_call", look)
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    context, before = Alone(), torch.get_num_threads()
    found = copy_in_rank(ScopeJob(repeat=2, seconds=0.5, copy_bytes=1000), context)  # type: ignore[arg-type]
    assert seen == [before, *COUNTS, 1] * 2
    assert found == {name: [0.5, 0.5] for name in collapse_arms()}
    assert context.waited == 2 * len(seen), "all ranks begin and end an arm together"
    assert torch.get_num_threads() == before


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
    found = deinterleave_in_rank(ScopeJob(repeat=2), Alone())  # type: ignore[arg-type]
    assert seen == [before, 1] * 3
    assert {name: len(times) for name, times in found.items()} == {"as it is": 2, "scope": 2}


@pytest.mark.parametrize("text", ["", "0", "two", "2,,4", "2,-1"])
def test_numbers_of_ranks_that_are_none_are_an_error_that_names_them(text: str) -> None:
    with pytest.raises(InputError, match=f"--ranks must be whole numbers of at least 1.* not '{text}'"):
        _numbers(text)
