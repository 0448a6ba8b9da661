"""`loadmaster bench scope`: what thread teams do to each other, what the scope does about it, and what it costs.

    collapse    N ranks copy at once: torch as shipped, every count of a sweep, the scope
    raise       one rank that was started with one thread de-interleaves expert weights: as it is, in the scope
    entry       entering and leaving; `paced`, for each tensor

The arms of one number of ranks run in the same processes and alternate, so that a noisy moment meets all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError
from loadmaster.host import host
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import run_ranks
from loadmaster.threads.environment import rank_environment
from loadmaster.threads.importing import import_torch, require_torch
from loadmaster.threads.pace import paced
from loadmaster.threads.scope import load_threads

__all__ = ["AS_SHIPPED", "SCOPE", "bench_scope", "collapse_arms"]

AS_SHIPPED = "as shipped"
SCOPE = "scope"
COUNTS = (1, 2, 4, 8)
BUFFER_BYTES = 64 << 20
"""Copies walk through so much memory on each side, as those of a load do: no cache holds it."""

EXPERTS, INTERMEDIATE, HIDDEN = 16, 1024, 2048
"""A bank of 16 experts, 64 MiB in each of its halves."""


@dataclass(frozen=True, kw_only=True)
class ScopeJob:
    """What one rank measures."""

    repeat: int
    seconds: float = 0.0
    copy_bytes: int = 0


def collapse_arms() -> dict[str, int | None]:
    """Return the arms of the collapse: name -> fixed number of threads, None where nobody sets one."""
    fixed = {f"{count} thread{'s' * (count > 1)}": count for count in COUNTS}
    return {AS_SHIPPED: None, **fixed, SCOPE: None}


def bench_scope(
    ranks: Sequence[int] = (2, 4, 8),
    *,
    copy_bytes: int = 400_000,
    seconds: float = 0.5,
    repeat: int = 5,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Measure, and return the record: the seconds of an arm are those of one copy, one pass, one entry or one tensor.

    Parameters
    ----------
    ranks : sequence of int
        Numbers of ranks that copy at once.
    copy_bytes : int
        Size of each copy.
    seconds : float
        How long each arm copies in each repetition.
    """
    require_torch()
    if any(number < 1 for number in ranks):
        raise InputError("the number of ranks must be at least 1")
    say = on_step or (lambda step: None)
    arms: list[ArmResult] = []
    for number in ranks:
        say(f"copies of {number} rank{'s' * (number > 1)}")
        arms += _collapse(number, ScopeJob(repeat=repeat, seconds=seconds, copy_bytes=copy_bytes))
    if host().compute_cpus > 1:
        say("a rank that was started with one thread")
        arms += _raise(ScopeJob(repeat=repeat))
    say("entering and leaving")
    arms += _entry(ScopeJob(repeat=repeat))
    settings = {"ranks": list(ranks), "copy_bytes": copy_bytes, "seconds": seconds, "repeat": repeat}
    return BenchRecord(bench="scope", settings=settings, arms=arms)


def _collapse(ranks: int, job: ScopeJob) -> list[ArmResult]:
    environments = [_untouched(rank, ranks) for rank in range(ranks)]
    found: list[dict[str, list[float]]] = run_ranks(
        "loadmaster.bench.scope:copy_in_rank", [job] * ranks, environments=environments
    )
    return [
        ArmResult(
            name=f"{ranks} ranks, {name}",
            what=f"seconds of one copy of {job.copy_bytes} bytes, mean of all ranks",
            seconds=[statistics.fmean(row) for row in zip(*(rank[name] for rank in found), strict=True)],
            num_bytes=job.copy_bytes,
            tensors=1,
        )
        for name in collapse_arms()
    ]


def _untouched(rank: int, ranks: int) -> dict[str, str]:
    """The environment of a rank whose launcher tells its place and sets no number of threads."""
    environment = rank_environment(1, rank, ranks)
    for name in ("OMP_NUM_THREADS", "LOADMASTER_THREADS"):
        environment.pop(name, None)
    return environment


def copy_in_rank(job: ScopeJob, context: RankContext) -> dict[str, list[float]]:
    """Copy at the same time as the other ranks, arm after arm; seconds of one copy, for each repetition."""
    torch = import_torch()
    slots = max(1, BUFFER_BYTES // job.copy_bytes)
    sources = torch.ones(slots, job.copy_bytes, dtype=torch.uint8).unbind()
    targets = torch.zeros(slots, job.copy_bytes, dtype=torch.uint8).unbind()
    pairs = itertools.cycle(zip(sources, targets, strict=True))

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    shipped = torch.get_num_threads()
    found: dict[str, list[float]] = {name: [] for name in collapse_arms()}
    for _ in range(job.repeat):
        for name, count in collapse_arms().items():
            with _arm(name, count or shipped):
                copy()  # the team starts before the clock does
                context.barrier()
                found[name].append(_seconds_of_a_call(copy, job.seconds))
                context.barrier()
    return found


@contextlib.contextmanager
def _arm(name: str, count: int) -> Iterator[None]:
    torch = import_torch()
    if name == SCOPE:
        with load_threads():
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds_of_a_call(call: Callable[[], Any], seconds: float) -> float:
    clock = time.perf_counter
    begin = now = clock()
    calls = 0
    while now - begin < seconds:
        call()
        calls += 1
        now = clock()
    return (now - begin) / calls


def _raise(job: ScopeJob) -> list[ArmResult]:
    """torchrun starts each rank with OMP_NUM_THREADS=1; one that is alone on its host may use all of it."""
    environment = {**_untouched(0, 1), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "bench"}
    (found,) = run_ranks("loadmaster.bench.scope:deinterleave_in_rank", [job], environments=[environment])
    what = f"seconds to de-interleave and cat {EXPERTS} experts of {2 * INTERMEDIATE} x {HIDDEN}"
    num_bytes = EXPERTS * 2 * INTERMEDIATE * HIDDEN * 2
    return [
        ArmResult(name=name, what=what, seconds=found[key], num_bytes=num_bytes, tensors=1)
        for name, key in (("1 rank at OMP_NUM_THREADS=1", "as it is"), ("1 rank, scope", SCOPE))
    ]


def deinterleave_in_rank(job: ScopeJob, context: RankContext) -> dict[str, list[float]]:
    """Bring interleaved gate and up rows into halves on the loading thread, with and without the scope."""
    torch = import_torch()
    bank = torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
    target = torch.empty_like(bank)

    def work() -> None:
        torch.cat([bank[:, ::2], bank[:, 1::2]], dim=1, out=target)

    found: dict[str, list[float]] = {"as it is": [], SCOPE: []}
    for number in range(job.repeat + 1):
        for name, times in found.items():
            with load_threads() if name == SCOPE else contextlib.nullcontext():
                begin = time.perf_counter()
                work()
                elapsed = time.perf_counter() - begin
            if number:  # the first pass touches the memory
                times.append(elapsed)
    return found


def _entry(job: ScopeJob) -> list[ArmResult]:
    (found,) = run_ranks("loadmaster.bench.scope:enter_in_rank", [job], environments=[_untouched(0, 1)])
    return [
        ArmResult(name="enter and leave", what="seconds of one scope", seconds=found[0], num_bytes=0, tensors=1),
        ArmResult(name="paced", what="seconds added to one tensor", seconds=found[1], num_bytes=0, tensors=1),
    ]


ENTRIES, ITEMS = 500, 200_000


def enter_in_rank(job: ScopeJob, context: RankContext) -> tuple[list[float], list[float]]:
    """Median seconds of a scope with nothing in it, and what `paced` adds to an item; for each repetition."""
    with load_threads():
        pass
    weights = [("weight", None)] * ITEMS
    entries, items = [], []
    for _ in range(job.repeat):
        entries.append(statistics.median(_seconds_of(_enter) for _ in range(ENTRIES)))
        plain = _seconds_of(lambda: _drain(iter(weights)))
        items.append(max(0.0, _seconds_of(lambda: _drain(paced(weights))) - plain) / ITEMS)
    return entries, items


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
