"""`loadmaster bench sweep`: ranks that copy at once, with every number of threads from 1 to twice the cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadmaster.bench.budget import Budget
from loadmaster.bench.copies import CopyArm, measure_copies, threads_words
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError
from loadmaster.host import host
from loadmaster.share import plan_shares
from loadmaster.threads.importing import require_torch

__all__ = ["bench_sweep", "panels", "sweep_counts"]

SECONDS = 120.0
"""The time that the bench may take where nobody says."""

COPY_SECONDS = 0.5
"""How long each count copies in each repetition."""

DENSE, STEP = 8, 1.3
"""Every count up to `DENSE`; from there each is `STEP` times the one before."""


def sweep_counts(cores: int, also: Sequence[int] = ()) -> list[int]:
    """Return the counts from 1 to twice the cores, closest where they are small; ``also`` are never left out."""
    most = 2 * cores
    counts = {1, most, cores, *also}
    number = 1
    while number < most:
        counts.add(number)
        number = number + 1 if number < DENSE else int(number * STEP)
    return sorted(counts)


def bench_sweep(
    ranks: int = 2,
    *,
    copy_bytes: int = 400_000,
    repeat: int = 5,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Measure, and return the record: the seconds of an arm are those of one copy, of the slowest rank.

    ``settings`` of the record say the best count and the share of each rank, which is always one of the counts.
    """
    require_torch()
    if ranks < 1:
        raise InputError("the number of ranks must be at least 1")
    budget = Budget(seconds)
    here = host()
    share = plan_shares(here, ranks)[0]
    counts = sweep_counts(len(here.cores), [share.threads])
    arms = [
        CopyArm(name=threads_words(count), copy_bytes=copy_bytes, seconds=COPY_SECONDS, threads=count)
        for count in counts
    ]
    found = measure_copies(ranks, arms, repeat=repeat, budget=budget, on_step=on_step)
    results = [
        ArmResult(
            name=name,
            what=f"seconds of one copy of {copy_bytes} bytes in the slowest rank, bytes of all ranks",
            seconds=times.slowest,
            num_bytes=ranks * copy_bytes,
            tensors=1,
            stopped_after=times.stopped_after,
        )
        for name, times in found.items()
    ]
    finished = [(arm.median, count) for count, arm in zip(counts, results, strict=True) if arm.finished]
    settings = {
        "ranks": ranks,
        "copy_bytes": copy_bytes,
        "counts": counts,
        "best": min(finished)[1] if finished else None,
        "share": share.threads,
        "share_why": share.why,
        "repeat": repeat,
        "seconds": seconds,
    }
    return BenchRecord(bench="sweep", settings=settings, arms=results)


def panels(record: BenchRecord) -> list[Panel]:
    """One curve over the counts, with the share marked."""
    settings = record.settings
    ranks = settings["ranks"]
    curve = list(zip(settings["counts"], record.arms, strict=True))
    return [
        Panel(
            title=f"one copy of {settings['copy_bytes']} bytes, {ranks} rank{'s' * (ranks > 1)} at once",
            curves={"slowest rank": curve},
            along="threads in each rank",
            unit="microseconds",
            factor=1e6,
            marked={f"share: {threads_words(settings['share'])}": settings["share"]},
            ticks={count: str(count) for count in settings["counts"]},
        )
    ]
