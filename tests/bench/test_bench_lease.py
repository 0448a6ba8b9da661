"""``bench lease`` measures leases in a folder of its own, and loads by uneven ranks and by strangers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadmaster.bench import lease as bench
from loadmaster.bench.lease import bench_lease, uneven_parts
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.placement import Placement, place_whole
from loadmaster.checkpoint.table import Entry
from loadmaster.errors import LoadmasterError
from loadmaster.share.lease import live_leases


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.full((1 << 14,), number, dtype=torch.int32) for number in range(16)}, path)
    return path


@pytest.mark.processes
def test_every_arm_is_measured_and_nothing_is_left(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEIGHBOURS", (3,))
    monkeypatch.setattr(bench, "JOINS", 3)
    monkeypatch.setattr(bench, "LOOKS", 100)
    monkeypatch.setattr(bench, "STRANGERS", 2)
    folders: list[str] = []
    neighbours: list[int] = []
    real = bench._seconds_of_joining

    def joining(here: object, environ: dict[str, str]) -> float:
        folders.append(environ["LOADMASTER_DIR"])
        neighbours.append(len(live_leases(environ)))
        return real(here, environ)

    monkeypatch.setattr(bench, "_seconds_of_joining", joining)
    record = bench_lease(checkpoint, repeat=1)
    assert [arm.name for arm in record.arms] == [
        "join + leave, 3 leases",
        "look, nothing changed",
        "uneven, 1 thread each",
        "uneven, following",
        "1 command, 2 ranks",
        "2 commands, 1 rank each",
    ]
    assert all(len(arm.seconds) == 1 and arm.seconds[0] > 0 for arm in record.arms)
    assert neighbours == [3]
    assert folders[0] != os.environ["LOADMASTER_DIR"]
    assert not Path(folders[0]).exists()


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=60))
def test_the_first_rank_has_three_times_the_bytes_of_the_second(sizes: list[int]) -> None:
    entries = [Entry(f"t{number}", "U8", (size,), "x", 0, size) for number, size in enumerate(sizes)]
    placements: list[Placement] = place_whole(entries)
    large, small = (sum(placement.num_bytes for placement in part) for part in uneven_parts(placements))
    assert large + small == sum(sizes)
    assert abs(large - 3 * small) <= 4 * max(sizes)


@pytest.mark.processes
def test_a_command_that_fails_ends_the_bench_with_its_sentence(tmp_path: Path) -> None:
    words = ["python", "-c", "import sys; sys.exit('no such thing')"]
    with pytest.raises(LoadmasterError, match="exit code 1: no such thing"):
        bench._run_commands([words, words], dict(os.environ), 60)


@pytest.mark.processes
def test_commands_that_take_too_long_are_killed() -> None:
    words = ["python", "-c", "import time; print('here', flush=True); time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        bench._run_commands([words, words], dict(os.environ), 0.2)


def test_an_arm_that_overruns_is_stopped_and_no_round_is_begun_that_does_not_fit(checkpoint: Path) -> None:
    ran: list[str] = []

    def slow(allowed: float) -> float:
        ran.append("slow")
        raise subprocess.TimeoutExpired("load", allowed)

    def quick(allowed: float) -> float:
        ran.append("quick")
        return 1.0

    budget = bench.Budget(100)
    first, second = bench._interleaved(
        {"a": slow, "b": quick}, open_checkpoint(checkpoint), 5, budget, lambda step: None
    )
    assert ran == ["slow", "quick"]
    assert (first.finished, list(second.seconds)) == (False, [1.0])
    assert first.stopped_after is not None
    assert 40 < first.stopped_after < 50
