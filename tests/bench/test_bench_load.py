"""``loadmaster bench load``: every arm loads the right bytes, and the record says all that a figure needs."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loadmaster.bench import load as bench
from loadmaster.bench import turns
from loadmaster.bench.libraries import LIBRARIES
from loadmaster.bench.limit import LimitStoppedError
from loadmaster.bench.load import Arm, ArmJob, ArmRank, arms_for, bench_load
from loadmaster.bench.record import ArmResult
from loadmaster.errors import CheckpointError, InputError, LoadmasterError, PlacementError
from loadmaster.launch.load import LoadSettings
from loadmaster.launch.spawn import RanksStoppedError
from loadmaster.share import Share

COMMAND = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))
CPUS = 2
NUM_TENSORS = 6
INSTALLED = [name for name, library in LIBRARIES.items() if library.is_there()]
WHOLE_BYTES = 2 * (65 * 8 + 3 * 64 * 64 + 64 + 3)
RANK_BYTES = 2 * (64 * 8 + 3 * 32 * 64 + 64 + 3)
"""Of two: vocabulary rows are padded to 128 and divided, the projections are divided, the norms are whole."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files with a tensor of every kind of cut: padded rows, rows, fused rows, columns, and none."""
    folder = tmp_path_factory.mktemp("bench")
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    first = {"model.embed_tokens.weight": random(65, 8), "model.layers.0.mlp.up_proj.weight": random(64, 64)}
    second = {"model.layers.0.mlp.down_proj.weight": random(64, 64), "a.weight": random(64), "b.weight": random(3)}
    second |= {"model.layers.1.mlp.gate_up_proj.weight": random(64, 64)}
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    return folder


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOADMASTER_CPUS": str(CPUS)}
    words = [COMMAND, *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_every_arm_loads_the_same_bytes_and_the_record_is_complete(checkpoint: Path) -> None:
    words = ["bench", "load", str(checkpoint), "--repeat", "1", "--verify", "--json"]
    begin = datetime.now(timezone.utc)
    done = run_command(*words)
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    assert list(record) == ["bench", "machine", "versions", "command", "date", "settings", "arms"]
    assert record["bench"] == "load"
    assert shlex.split(record["command"]) == ["loadmaster", *words]
    assert begin - timedelta(seconds=1) <= datetime.fromisoformat(record["date"]) <= datetime.now(timezone.utc)
    _check_machine(record["machine"])
    assert record["versions"] == {
        "python": sys.version.split()[0],
        **{name: version(name) for name in ("loadmaster", "torch", "safetensors", "numpy")},
    }
    assert record["settings"] == {
        "checkpoint": str(checkpoint),
        "ranks": 1,
        "sharded": True,
        "verified": True,
        "repeat": 1,
        "seconds": 300,
    }
    arms = {arm["name"]: arm for arm in record["arms"]}
    threads = sorted({1, record["machine"]["compute_cpus"]})
    assert list(arms) == [
        "limit",
        "loadmaster",
        "loadmaster-untouched",
        "torch-default",
        *(f"torch-{count}" for count in threads),
        *INSTALLED,
    ]
    for arm in arms.values():
        _check_arm(arm)


def _check_machine(machine: Mapping[str, Any]) -> None:
    assert list(machine) == ["cpu", "cpus", "cores", "compute_cpus", "kernel"]
    assert machine["cpus"] == len(os.sched_getaffinity(0))
    assert 1 <= machine["compute_cpus"] <= CPUS
    assert machine["kernel"] == os.uname().release
    assert machine["cpu"]


def _check_arm(arm: Mapping[str, Any]) -> None:
    assert list(arm) == [
        "name",
        "what",
        "seconds",
        "median_seconds",
        "spread",
        "bytes",
        "tensors",
        "gib_per_second",
        "microseconds_per_tensor",
        "stopped_after_seconds",
    ]
    (seconds,) = arm["seconds"]
    assert 0 < seconds < 60
    assert (arm["median_seconds"], arm["spread"]) == (seconds, 0)
    assert (arm["bytes"], arm["tensors"]) == (WHOLE_BYTES, NUM_TENSORS)
    assert arm["gib_per_second"] == pytest.approx(WHOLE_BYTES / (1 << 30) / seconds)
    assert arm["microseconds_per_tensor"] == pytest.approx(1e6 * seconds / NUM_TENSORS)
    assert arm["what"]
    assert arm["stopped_after_seconds"] is None


class Alone:
    """What a rank sees of the others when there are none."""

    def __init__(self) -> None:
        self.barriers = 0
        self.told: list[str] = []

    def progress(self, value: str) -> None:
        self.told.append(value)

    def barrier(self) -> None:
        self.barriers += 1


@pytest.mark.parametrize("arm", arms_for(1).values(), ids=arms_for(1))
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_arm_loads_its_rank_and_finds_that_every_byte_is_right(
    arm: Arm, sharded: bool, rank: int, checkpoint: Path
) -> None:
    """The bytes are compared with the safetensors library, padding included."""
    num_bytes = RANK_BYTES if sharded else WHOLE_BYTES
    settings = LoadSettings(ranks=2, sharded=sharded, verify=True)
    part = Share(threads=1, cpus=(0,), workers=2, why="2 cores / 2 ranks")
    job = ArmJob(path=str(checkpoint), rank=rank, settings=settings, share=part, num_bytes=num_bytes, arm=arm.name)
    module, _, name = arm.function.partition(":")
    context = Alone()
    done = getattr(importlib.import_module(module), name)(job, context)
    assert (done.num_bytes, done.tensors) == (num_bytes, NUM_TENSORS)
    assert 0 < done.seconds < 30
    assert context.barriers == 3  # memory is touched; it is free again; all have ended
    assert context.told == ["begin", "end"]


@pytest.mark.parametrize("arm", arms_for(1).values(), ids=arms_for(1))
def test_an_arm_that_loads_other_bytes_is_found_out(
    arm: Arm, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are spoiled after the arm has loaded them and before they are compared."""
    compare = bench.verify_placements

    def spoil(tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
        tensors["model.layers.0.mlp.down_proj.weight"][-1, -1] += 1
        return compare(tensors, *rest)

    monkeypatch.setattr(bench, "verify_placements", spoil)
    part = Share(threads=1, cpus=(0,), workers=2, why="2 cores / 2 ranks")
    settings = LoadSettings(ranks=2, verify=True)
    job = ArmJob(path=str(checkpoint), rank=1, settings=settings, share=part, num_bytes=RANK_BYTES, arm=arm.name)
    with pytest.raises(LoadmasterError, match=r"down_proj.weight' of .* differs from the reference"):
        getattr(bench, arm.function.partition(":")[2])(job, Alone())


@pytest.mark.processes
def test_one_arm_is_shown_beside_the_limit_with_the_steps_that_were_taken(checkpoint: Path) -> None:
    done = run_command("bench", "load", checkpoint, "--shard", "none", "--arms", "loadmaster", "--repeat", 1)
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["measuring limit, 1 of 1", "measuring loadmaster, 1 of 1"]
    rows = [line.split() for line in done.stdout.splitlines()]
    (limit,) = [row for row in rows if row[:1] == ["limit"]]
    (ours,) = [row for row in rows if row[:1] == ["loadmaster"]]
    assert limit[5] == "1.00"
    for row in (limit, ours):
        median, least, most = map(float, row[1:4])
        assert least == median == most
    assert "loadmaster: our reader" in done.stdout
    assert "every byte" not in done.stdout


def test_the_repetitions_of_the_arms_alternate(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the time is replaced by a clock that ticks."""
    ticks = iter(range(1, 10))
    monkeypatch.setattr(bench, "limit_seconds", lambda *_: float(next(ticks)))
    monkeypatch.setattr(
        bench, "run_ranks", lambda *_, **__: [ArmRank(seconds=float(next(ticks)), num_bytes=1, tensors=1)]
    )
    steps: list[str] = []
    record = bench_load(checkpoint, LoadSettings(), arms=["torch-1", "loadmaster"], repeat=3, on_step=steps.append)
    assert steps == [f"{name}, {number} of 3" for number in (1, 2, 3) for name in ("limit", "torch-1", "loadmaster")]
    assert {arm.name: list(arm.seconds) for arm in record.arms} == {
        "limit": [1, 4, 7],
        "torch-1": [2, 5, 8],
        "loadmaster": [3, 6, 9],
    }


@pytest.mark.parametrize("arms", [["torch-3"], ["loadmaster", ""], ["limit"]], ids=str)
def test_an_arm_that_is_none_is_an_error_before_anything_is_measured(checkpoint: Path, arms: list[str]) -> None:
    steps: list[str] = []
    with pytest.raises(InputError, match=f"there is no arm '{arms[-1]}'; known are loadmaster, "):
        bench_load(checkpoint, LoadSettings(ranks=2), arms=arms, on_step=steps.append)
    assert steps == []


@pytest.mark.processes
def test_an_arm_that_is_none_ends_the_command_with_exit_code_2(checkpoint: Path) -> None:
    done = run_command("bench", "load", checkpoint, "--arms", "loadmaster, torch-none")
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("loadmaster: there is no arm 'torch-none'; known are ")


def test_bad_input_is_found_before_anything_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(CheckpointError, match="is empty"):
        bench_load(tmp_path, LoadSettings(), on_step=steps.append)
    with pytest.raises(PlacementError, match="do not divide among 128 ranks"):
        bench_load(checkpoint, LoadSettings(ranks=128), on_step=steps.append)
    assert steps == []


@pytest.mark.parametrize(("compute_cpus", "counts"), [(1, [1]), (2, [1, 2]), (48, [1, 48])])
def test_the_loop_of_users_runs_with_one_thread_and_with_all(compute_cpus: int, counts: list[int]) -> None:
    arms = arms_for(compute_cpus)
    own = ["loadmaster", "loadmaster-untouched", "torch-default", *(f"torch-{n}" for n in counts)]
    assert list(arms) == [*own, *INSTALLED]
    assert all(name == arm.name for name, arm in arms.items())


@pytest.mark.parametrize(
    ("arm", "threads"),
    [("loadmaster", "3"), ("loadmaster-untouched", None), ("torch-default", None), ("torch-1", "1"), ("torch-6", "6")],
)
def test_an_arm_sets_the_threads_of_its_ranks_or_nothing_at_all(
    arm: str, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    part = Share(threads=3, cpus=(0,), workers=2, why="6 cores / 2 ranks")
    environment = bench._environment(arms_for(6)[arm], part, 1, 2)
    assert environment.get("OMP_NUM_THREADS") == threads
    assert environment["LOADMASTER_LOCAL_RANK"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "9"


def test_an_arm_gives_its_median_and_its_spread() -> None:
    seconds = [0.5, 0.2, 0.4]
    arm = ArmResult(name="loadmaster", what="our reader", seconds=seconds, num_bytes=1 << 30, tensors=4)
    assert arm.as_dict() == {
        "name": "loadmaster",
        "what": "our reader",
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "spread": pytest.approx(0.75),
        "bytes": 1 << 30,
        "tensors": 4,
        "gib_per_second": 2.5,
        "microseconds_per_tensor": pytest.approx(1e5),
        "stopped_after_seconds": None,
    }


def test_an_arm_that_was_stopped_has_no_figures_but_says_when() -> None:
    arm = ArmResult(name="torch-default", what="", seconds=[], num_bytes=1 << 30, tensors=4, stopped_after=12.5)
    found = arm.as_dict()
    assert not arm.finished
    assert (found["seconds"], found["stopped_after_seconds"]) == ([], 12.5)
    for name in ("median_seconds", "spread", "gib_per_second", "microseconds_per_tensor"):
        assert found[name] is None


def test_an_arm_without_tensors_has_no_time_per_tensor() -> None:
    arm = ArmResult(name="limit", what="", seconds=[1.0], num_bytes=0, tensors=0)
    assert arm.as_dict()["microseconds_per_tensor"] is None


class Clock:
    """A monotonic clock that only moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def run_with_a_clock(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, takes: dict[str, float], seconds: float, repeat: int
) -> dict[str, ArmResult]:
    """Run arms that take as long as ``takes`` says, and are stopped when they have no more time."""
    clock = Clock(monkeypatch)

    def run(needed: float, timeout: float, stopped: type[Exception]) -> float:
        clock.now += min(needed, timeout)
        if needed > timeout:
            raise stopped("stopped")
        return needed

    def run_ranks(function: str, jobs: list[ArmJob], **settings: Any) -> list[ArmRank]:
        settings["on_progress"](0, "begin")
        seconds = run(takes[jobs[0].arm], settings["timeout_seconds"], RanksStoppedError)
        return [ArmRank(seconds=seconds, num_bytes=1, tensors=1)]

    def limit_seconds(files: Any, num_bytes: int, threads: int, timeout: float) -> float:
        return run(takes["limit"], timeout, LimitStoppedError)

    monkeypatch.setattr(bench, "run_ranks", run_ranks)
    monkeypatch.setattr(bench, "limit_seconds", limit_seconds)
    arms = [name for name in takes if name != "limit"]
    record = bench_load(checkpoint, LoadSettings(), arms=arms, repeat=repeat, seconds=seconds)
    assert clock.now - 1000 <= seconds
    return {arm.name: arm for arm in record.arms}


def test_no_repetition_is_begun_that_would_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {"limit": 1.0, "loadmaster": 2.0, "torch-1": 7.0}
    found = run_with_a_clock(checkpoint, monkeypatch, takes=takes, seconds=40, repeat=9)
    assert {name: len(arm.seconds) for name, arm in found.items()} == {"limit": 3, "loadmaster": 3, "torch-1": 3}
    assert all(arm.stopped_after is None for arm in found.values())


def test_an_arm_that_overruns_is_stopped_and_the_others_still_have_their_turn(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = {"limit": 1.0, "torch-default": 1000.0, "loadmaster": 2.0}
    found = run_with_a_clock(checkpoint, monkeypatch, takes=takes, seconds=30, repeat=1)
    assert found["torch-default"].seconds == []
    assert found["torch-default"].stopped_after == pytest.approx((25.5 - 1) / 2)
    assert list(found["loadmaster"].seconds) == [2.0]


def test_an_arm_that_was_stopped_is_not_tried_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {"limit": 1.0, "torch-default": 21.0, "loadmaster": 2.0}
    found = run_with_a_clock(checkpoint, monkeypatch, takes=takes, seconds=40, repeat=2)
    assert found["torch-default"].seconds == []
    assert len(found["loadmaster"].seconds) == 1, "the pass that met the stop is the measure of the next"


def test_an_arm_for_which_no_time_is_left_was_not_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "warm_page_cache", lambda files, deadline: False)
    found = run_with_a_clock(checkpoint, monkeypatch, takes={"limit": 1.0, "loadmaster": 1.0}, seconds=30, repeat=2)
    assert {name: (list(arm.seconds), arm.stopped_after) for name, arm in found.items()} == {
        "limit": ([], 0.0),
        "loadmaster": ([], 0.0),
    }


@pytest.mark.parametrize(
    ("begins", "ends", "seconds"),
    [
        ([], [], 0),
        ([990.0], [], 0),
        ([990.0, 991.0], [], 9),
        ([990.0, 991.0], [995.0], 9),
        ([990.0, 991.0], [995.0, 993.0], 4),
    ],
    ids=["not started", "one started", "loading", "one has loaded", "verifying"],
)
def test_only_the_loading_of_stopped_ranks_counts(
    begins: list[float], ends: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    assert bench._seconds_of_stages({"begin": begins, "end": ends}, 2) == seconds


def test_warming_ends_when_the_time_is_over(checkpoint: Path) -> None:
    files = [str(path) for path in checkpoint.iterdir()]
    assert turns.warm_page_cache(files)
    assert not turns.warm_page_cache(files, time.monotonic() - 1)


@pytest.mark.processes
def test_a_load_that_takes_too_long_is_a_row_of_the_table(checkpoint: Path) -> None:
    """Two seconds are not enough to start ranks and import torch in them, and half of them still less."""
    begin = time.monotonic()
    done = run_command("bench", "load", checkpoint, "--arms", "loadmaster,torch-1", "--seconds", 1)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 20
    (row,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["loadmaster"]]
    assert row == ["loadmaster", "not", "run"]
    assert "no arm ran more than once" in done.stdout
