"""Copies of many ranks at once: each arm with its own team, complete repetitions only, and nothing beyond the time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from loadmaster.bench import copies as bench
from loadmaster.bench.budget import Budget
from loadmaster.bench.copies import AS_SHIPPED, SCOPE, CopyArm, CopyJob, copy_in_rank, fixed_counts, measure_copies
from loadmaster.errors import InputError
from loadmaster.launch.spawn import RanksStoppedError

ALWAYS = float("inf")


class Alone:
    """The line of a rank that has no others to wait for."""

    def __init__(self) -> None:
        self.waited = 0
        self.told: list[Any] = []

    def barrier(self) -> None:
        self.waited += 1

    def progress(self, value: Any) -> None:
        if value != "begin":
            self.told.append(value)


def arm(name: str, **settings: Any) -> CopyArm:
    return CopyArm(name=name, **{"copy_bytes": 1000, "seconds": 0.5, **settings})


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures mean nothing here."""
    monkeypatch.setattr(bench, "BUFFER_BYTES", 10_000)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1, 2, 4, 8)), (6, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16)), (48, (1, 2, 4, 8, 16, 32))]
)
def test_fixed_counts_are_powers_of_two_up_to_the_cores(cores: int, counts: tuple[int, ...]) -> None:
    assert fixed_counts(cores) == counts


def test_each_arm_copies_with_its_own_team(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float, int | None]] = []

    def look(copy: Callable[[], None], seconds: float, calls: int | None) -> Any:
        copy()
        seen.append((torch.get_num_threads(), seconds, calls))
        return bench._Timed(seconds, 7)

    monkeypatch.setattr(bench, "_time_calls", look)
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    line, before = Alone(), torch.get_num_threads()
    arms = [arm(AS_SHIPPED), arm("3 threads", threads=3, copies=5), arm(SCOPE, scope=True, seconds=0.25)]
    copy_in_rank(CopyJob(arms=arms, repeat=2, deadline=ALWAYS), line)  # type: ignore[arg-type]
    assert seen == [(before, 0.5, None), (3, 0.5, 5), (1, 0.25, None)] * 2
    assert line.told == [
        (name, number, seconds, 7)
        for number in (0, 1)
        for name, seconds in ((AS_SHIPPED, 0.5), ("3 threads", 0.5), (SCOPE, 0.25))
    ]
    assert line.waited == 2 * (1 + 2 * 3), "all ranks begin a repetition, and begin and end an arm, together"
    assert torch.get_num_threads() == before


def test_every_byte_is_copied_walking_through_the_whole_buffer() -> None:
    sources = torch.arange(10, dtype=torch.uint8).repeat_interleave(1000)
    targets = torch.zeros(10_000, dtype=torch.uint8)
    timed = bench._copy(arm("all", copies=9, seconds=60), sources, targets, Alone())  # type: ignore[arg-type]
    assert timed.copies == 9
    assert torch.equal(sources, targets), "one before the clock starts and nine after it"


def test_the_collector_does_not_run_while_copies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go over the thousands of small tensors that the bench itself has made."""
    enabled: list[bool] = []

    def look(copy: Callable[[], None], seconds: float, calls: int | None) -> Any:
        enabled.append(gc.isenabled())
        return bench._Timed(seconds, 1)

    monkeypatch.setattr(bench, "_time_calls", look)
    buffer = torch.zeros(10_000, dtype=torch.uint8)
    bench._copy(arm("one"), buffer, buffer, Alone())  # type: ignore[arg-type]
    assert enabled == [False]
    assert gc.isenabled()


def test_a_rank_stops_copying_when_its_time_is_over() -> None:
    timed = bench._time_calls(lambda: time.sleep(0.02), 0.05, 1000)
    assert 1 <= timed.copies <= 3
    assert timed.seconds >= 0.05


def test_a_rank_begins_no_repetition_after_the_deadline() -> None:
    line = Alone()
    copy_in_rank(CopyJob(arms=[arm("one", copies=1)], repeat=5, deadline=0.0), line)  # type: ignore[arg-type]
    assert [number for _, number, *_ in line.told] == [0]


Told = Sequence[tuple[int, Any]]


class Ranks:
    """In place of `run_ranks`: what each run of ranks tells, and how it ends."""

    def __init__(self, *runs: Told, stopped: bool = False) -> None:
        self.runs = iter(runs)
        self.stopped = stopped
        self.environments: list[Mapping[str, str]] = []
        self.names: list[list[str]] = []

    def __call__(self, function: str, jobs: Sequence[CopyJob], **settings: Any) -> None:
        self.names.append([one.name for one in jobs[0].arms])
        self.environments.append(settings["environments"][0])
        for rank, value in next(self.runs):
            settings["on_progress"](rank, value)
        if self.stopped:
            raise RanksStoppedError("stopped")


def test_seconds_of_a_copy_are_those_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, ("a", 0, 1.0, 10)), (1, ("a", 0, 2.0, 5)), (1, ("a", 1, 3.0, 10)), (0, ("a", 1, 1.0, 10))]
    monkeypatch.setattr(bench, "run_ranks", Ranks(told))
    found = measure_copies(2, [arm("a")], repeat=2, budget=Budget(60))["a"]
    assert found.mean == pytest.approx([0.25, 0.2])
    assert found.slowest == pytest.approx([0.4, 0.3])
    assert found.copies == 5
    assert found.stopped_after is None


def test_a_repetition_that_not_all_ranks_did_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, ("a", 0, 1.0, 10)), (1, ("a", 0, 1.0, 10)), (0, ("a", 1, 9.0, 10))]
    monkeypatch.setattr(bench, "run_ranks", Ranks(told))
    assert measure_copies(2, [arm("a")], repeat=2, budget=Budget(60))["a"].mean == [0.1]


def test_the_arm_that_was_stopped_is_told_from_those_that_were_never_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_ranks", Ranks([(0, ("a", 0, 1.0, 10))], stopped=True))
    found = measure_copies(1, [arm("a"), arm("b"), arm("c")], repeat=1, budget=Budget(60))
    assert (found["a"].mean, found["a"].stopped_after) == ([0.1], None)
    assert found["b"].mean == []
    assert found["b"].stopped_after is not None
    assert found["b"].stopped_after > 0
    assert found["c"].stopped_after == 0


def test_ranks_that_were_stopped_while_they_started_ran_no_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_ranks", Ranks([], stopped=True))
    assert measure_copies(1, [arm("a")], repeat=1, budget=Budget(60))["a"].stopped_after == 0
    monkeypatch.setattr(bench, "run_ranks", Ranks([(0, "begin")], stopped=True))
    assert (measure_copies(1, [arm("a")], repeat=1, budget=Budget(60))["a"].stopped_after or 0) > 0


def test_each_wait_policy_has_processes_of_its_own_in_every_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    told = [[(0, ("a", 0, 1.0, 10)), (0, ("c", 0, 1.0, 10))], [(0, ("b", 0, 1.0, 10))]]
    ranks = Ranks(*told, *told)
    monkeypatch.setattr(bench, "run_ranks", ranks)
    steps: list[str] = []
    arms = [arm("a"), arm("b", wait_policy="PASSIVE"), arm("c")]
    found = measure_copies(1, arms, repeat=2, budget=Budget(60), on_step=steps.append)
    assert ranks.names == [["a", "c"], ["b"]] * 2
    assert [environment.get("OMP_WAIT_POLICY") for environment in ranks.environments] == [None, "PASSIVE"] * 2
    assert all("OMP_NUM_THREADS" not in environment for environment in ranks.environments)
    assert {name: len(times.of_ranks) for name, times in found.items()} == {"a": 2, "b": 2, "c": 2}
    assert steps == [
        f"1 rank{policy}, {number} of 2" for number in (1, 2) for policy in ("", ", OMP_WAIT_POLICY=PASSIVE")
    ]


def test_no_pass_is_begun_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ranks = Ranks(*[[]] * 4)

    def run(*arguments: Any, **settings: Any) -> None:
        now[0] += 10
        ranks(*arguments, **settings)

    monkeypatch.setattr(bench, "run_ranks", run)
    measure_copies(1, [arm("a"), arm("b", wait_policy="ACTIVE")], repeat=9, budget=Budget(60))
    assert len(ranks.names) == 4, "two passes of twenty seconds, and the third would not fit into sixty"


@pytest.mark.parametrize(("ranks", "repeat", "size"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_measure_is_an_error(ranks: int, repeat: int, size: int) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        measure_copies(ranks, [arm("a", copy_bytes=size)], repeat=repeat, budget=Budget(60))
