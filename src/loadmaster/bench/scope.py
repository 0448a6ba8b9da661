"""`loadmaster bench scope`: what thread teams do to each other, what the scope does about it, and what it costs.

    collapse    N ranks copy at once: torch as shipped, every count of a sweep, the scope
    raise       one rank that was started with one thread de-interleaves expert weights: as it is, in the scope
    entry       entering and leaving; `paced`, for each tensor

The arms of one number of ranks run in the same processes and alternate, so that a noisy moment meets all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadmaster.bench.budget import Budget
from loadmaster.bench.copies import (
    AS_SHIPPED,
    SCOPE,
    CopyArm,
    fixed_counts,
    measure_copies,
    threads_words,
    untouched,
)
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError
from loadmaster.host import host
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.threads.importing import import_torch, require_torch
from loadmaster.threads.pace import paced
from loadmaster.threads.scope import load_threads

__all__ = ["bench_scope", "panels"]

SECONDS = 240.0
"""The time that the bench may take where nobody says."""

AS_IT_IS, ENTER, PACED = "as it is", "enter and leave", "paced"

EXPERTS, INTERMEDIATE, HIDDEN = 16, 1024, 2048
"""A bank of 16 experts, 64 MiB in each of its halves."""


@dataclass(frozen=True, kw_only=True)
class ScopeJob:
    """What one rank measures; ``deadline`` of the monotonic clock begins no repetition but the first."""

    repeat: int
    deadline: float


def bench_scope(
    ranks: Sequence[int] = (2, 4, 8),
    *,
    copy_bytes: int = 400_000,
    copy_seconds: float = 0.5,
    repeat: int = 5,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Measure, and return the record: the seconds of an arm are those of one copy, one pass, one entry or one tensor.

    Parameters
    ----------
    ranks : sequence of int
        Numbers of ranks that copy at once.
    copy_bytes : int
        Size of each copy.
    copy_seconds : float
        How long each arm copies in each repetition.
    seconds : float
        The time that all may take.
    """
    require_torch()
    if any(number < 1 for number in ranks):
        raise InputError("the number of ranks must be at least 1")
    say = on_step or (lambda step: None)
    budget = Budget(seconds)
    arms: list[ArmResult] = []
    for index, number in enumerate(ranks):
        say(f"copies of {number} rank{'s' * (number > 1)}")
        arms += _collapse(number, copy_bytes, copy_seconds, repeat, budget.portion(len(ranks) - index + 2))
    if host().compute_cpus > 1:
        say("a rank that was started with one thread")
        arms += _raise(repeat, budget.portion(2))
    say("entering and leaving")
    arms += _entry(repeat, budget)
    settings = {
        "ranks": list(ranks),
        "copy_bytes": copy_bytes,
        "copy_seconds": copy_seconds,
        "repeat": repeat,
        "seconds": seconds,
    }
    return BenchRecord(bench="scope", settings=settings, arms=arms)


def panels(record: BenchRecord) -> list[Panel]:
    """One panel for each number of ranks, one for the raise and one for the cost of the scope."""
    found = []
    for ranks in record.settings["ranks"]:
        prefix = f"{ranks} ranks, "
        arms = [(arm.name.removeprefix(prefix), arm) for arm in record.arms if arm.name.startswith(prefix)]
        words = f"{ranks} rank{'s' * (ranks > 1)}: one copy of {record.settings['copy_bytes']} bytes"
        found.append(Panel(title=words, arms=arms, unit="microseconds", factor=1e6))
    raised = [
        (arm.name, arm) for arm in record.arms if arm.name.startswith("1 rank at ") or arm.name == "1 rank, scope"
    ]
    if raised:
        found.append(
            Panel(title="de-interleave and cat of expert weights", arms=raised, unit="milliseconds", factor=1e3)
        )
    costs = [(arm.name, arm) for arm in record.arms if arm.name in (ENTER, PACED)]
    return [*found, Panel(title="what the scope costs", arms=costs, unit="microseconds", factor=1e6)]


def _collapse(ranks: int, copy_bytes: int, copy_seconds: float, repeat: int, budget: Budget) -> list[ArmResult]:
    fixed = {threads_words(count): count for count in fixed_counts(len(host().cores))}
    arms = [
        CopyArm(name=name, copy_bytes=copy_bytes, seconds=copy_seconds, threads=threads, scope=name == SCOPE)
        for name, threads in {AS_SHIPPED: None, **fixed, SCOPE: None}.items()
    ]
    found = measure_copies(ranks, arms, repeat=repeat, budget=budget)
    return [
        ArmResult(
            name=f"{ranks} ranks, {name}",
            what=f"seconds of one copy of {copy_bytes} bytes, mean of all ranks",
            seconds=times.mean,
            num_bytes=copy_bytes,
            tensors=1,
            stopped_after=times.stopped_after,
        )
        for name, times in found.items()
    ]


def _run_alone(
    function: str, names: Sequence[str], environment: dict[str, str], repeat: int, budget: Budget
) -> tuple[dict[str, list[float]], float | None]:
    """Run ``function`` in one rank: the seconds that it told for each name, and when it was stopped."""
    begin = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        run_ranks(
            f"loadmaster.bench.scope:{function}",
            [ScopeJob(repeat=repeat, deadline=budget.deadline)],
            environments=[environment],
            on_progress=lambda _, told: found[told[0]].append(told[1]),
            timeout_seconds=budget.left,
        )
    except RanksStoppedError:
        return found, time.monotonic() - begin
    return found, None


def _raise(repeat: int, budget: Budget) -> list[ArmResult]:
    """torchrun starts each rank with OMP_NUM_THREADS=1; one that is alone on its host may use all of it."""
    environment = {**untouched(0, 1), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "bench"}
    found, stopped = _run_alone("deinterleave_in_rank", (AS_IT_IS, SCOPE), environment, repeat, budget)
    what = f"seconds to de-interleave and cat {EXPERTS} experts of {2 * INTERMEDIATE} x {HIDDEN}"
    num_bytes = EXPERTS * 2 * INTERMEDIATE * HIDDEN * 2
    return [
        ArmResult(
            name=name,
            what=what,
            seconds=found[key],
            num_bytes=num_bytes,
            tensors=1,
            stopped_after=None if found[key] else stopped,
        )
        for name, key in (("1 rank at OMP_NUM_THREADS=1", AS_IT_IS), ("1 rank, scope", SCOPE))
    ]


def deinterleave_in_rank(job: ScopeJob, context: RankContext) -> None:
    """Bring interleaved gate and up rows into halves on the loading thread, with and without the scope."""
    torch = import_torch()
    bank = torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
    target = torch.empty_like(bank)

    def work() -> None:
        torch.cat([bank[:, ::2], bank[:, 1::2]], dim=1, out=target)

    for number in range(job.repeat + 1):
        if number > 1 and time.monotonic() > job.deadline:
            return
        for name in (AS_IT_IS, SCOPE):
            with load_threads() if name == SCOPE else contextlib.nullcontext():
                begin = time.perf_counter()
                work()
                elapsed = time.perf_counter() - begin
            if number:  # the first pass touches the memory
                context.progress((name, elapsed))


def _entry(repeat: int, budget: Budget) -> list[ArmResult]:
    whats = {ENTER: "seconds of one scope", PACED: "seconds added to one tensor"}
    found, stopped = _run_alone("enter_in_rank", tuple(whats), untouched(0, 1), repeat, budget)
    return [
        ArmResult(
            name=name,
            what=what,
            seconds=found[name],
            num_bytes=0,
            tensors=1,
            stopped_after=None if found[name] else stopped,
        )
        for name, what in whats.items()
    ]


ENTRIES, ITEMS = 500, 200_000


def enter_in_rank(job: ScopeJob, context: RankContext) -> None:
    """Median seconds of a scope with nothing in it, and what `paced` adds to an item; for each repetition."""
    with load_threads():
        pass
    weights = [("weight", None)] * ITEMS
    for number in range(job.repeat):
        if number and time.monotonic() > job.deadline:
            return
        context.progress((ENTER, statistics.median(_seconds_of(_enter) for _ in range(ENTRIES))))
        plain = _seconds_of(lambda: _drain(iter(weights)))
        context.progress((PACED, max(0.0, _seconds_of(lambda: _drain(paced(weights))) - plain) / ITEMS))


def _enter() -> None:
    with load_threads():
        pass


def _drain(weights: Iterator[Any]) -> None:
    for _ in weights:
        pass


def _seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
