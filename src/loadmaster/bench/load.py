"""`loadmaster bench load`: our reader against the loop that users write, and both against the limit.

Every arm does the same work in fresh processes: its rank's slices of the checkpoint end in memory that the rank owns.
Repetitions of the arms are interleaved, so that a noisy moment of the machine meets all of them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.bench.budget import Budget
from loadmaster.bench.libraries import LIBRARIES, copy_slices, empty_tensor
from loadmaster.bench.limit import limit_kind, limit_seconds
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.bench.turns import StoppedError, Turn, take_turns
from loadmaster.checkpoint.dtypes import import_torch
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.load import load_rank, place
from loadmaster.checkpoint.memory import Arena
from loadmaster.checkpoint.verify import verify_placements
from loadmaster.errors import InputError
from loadmaster.host import host
from loadmaster.launch.load import LoadSettings
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.share import Share, plan_shares
from loadmaster.share.lease import lease
from loadmaster.threads.environment import rank_environment
from loadmaster.threads.importing import require_torch

__all__ = [
    "BEGIN",
    "END",
    "SECONDS",
    "Arm",
    "ArmJob",
    "ArmRank",
    "arms_for",
    "bench_load",
    "choose_arms",
    "measure_arms",
    "panels",
    "start_together",
]

BEGIN, END = "begin", "end"
"""What a rank tells: it begins to load, which the others do as well; it has loaded."""

SECONDS = 300.0
"""The time that a bench of loads may take where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to load: the function that a rank runs and the number of threads that its environment sets."""

    name: str
    what: str
    function: str
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class ArmJob:
    """What one rank of one arm is to load."""

    path: str
    rank: int
    settings: LoadSettings
    share: Share
    num_bytes: int
    arm: str = ""


@dataclass(frozen=True, kw_only=True)
class ArmRank:
    """What one rank did: seconds from the barrier to its last byte."""

    seconds: float
    num_bytes: int
    tensors: int


def arms_for(compute_cpus: int) -> dict[str, Arm]:
    """Return the arms of a host, by name."""
    reader, loop = "loadmaster.bench.load:read_in_rank", "loadmaster.bench.load:copy_in_rank"
    arms = [
        Arm(name="loadmaster", what="our reader", function=reader, threads=0),
        Arm(name="loadmaster-untouched", what="our reader, torch's default team", function=reader, threads=None),
        Arm(
            name="torch-default",
            what="safe_open + get_slice + copy_, torch's default team",
            function=loop,
            threads=None,
        ),
    ]
    for threads in sorted({1, compute_cpus}):
        what = f"safe_open + get_slice + copy_, {threads} thread{'s' if threads > 1 else ''}"
        arms.append(Arm(name=f"torch-{threads}", what=what, function=loop, threads=threads))
    for name, library in LIBRARIES.items():
        if library.is_there():
            function = "loadmaster.bench.load:library_in_rank"
            arms.append(Arm(name=name, what=f"{library.what}, torch's default team", function=function, threads=None))
    return {arm.name: arm for arm in arms}


def choose_arms(known: Mapping[str, Arm], names: Sequence[str] | None) -> list[Arm]:
    """Return the arms of these names, or all of them.

    Raises
    ------
    InputError
        An arm that does not exist.
    """
    for name in names or ():
        if name not in known:
            raise InputError(f"there is no arm {name!r}; known are {', '.join(known)}")
    return list(known.values()) if names is None else [known[name] for name in names]


def bench_load(
    path: str | os.PathLike[str],
    settings: LoadSettings,
    *,
    arms: Sequence[str] | None = None,
    repeat: int = 5,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Run the arms ``repeat`` times, or as often as ``seconds`` allow, interleaved; the limit comes first.

    Raises
    ------
    InputError
        An arm that does not exist.
    """
    require_torch()
    budget = Budget(seconds)
    checkpoint = open_checkpoint(path)
    chosen = choose_arms(arms_for(host().compute_cpus), arms)
    rank_bytes = [_placed_bytes(checkpoint, settings, rank) for rank in range(settings.ranks)]
    results = measure_arms(
        checkpoint,
        settings,
        chosen,
        rank_bytes=rank_bytes,
        tensors=len(checkpoint) * settings.ranks,
        repeat=repeat,
        budget=budget,
        on_step=on_step,
    )
    return BenchRecord(
        bench="load",
        settings={
            "checkpoint": os.fspath(path),
            "ranks": settings.ranks,
            "sharded": settings.sharded,
            "verified": settings.verify,
            "repeat": repeat,
            "seconds": seconds,
        },
        arms=results,
    )


def panels(record: BenchRecord) -> list[Panel]:
    """One bar for each arm."""
    ranks = record.settings["ranks"]
    placed = record.arms[0].num_bytes / (1 << 30)
    words = f"{placed:.2f} GiB into {ranks} rank{'s' * (ranks > 1)}, until the last byte is in its place"
    return [Panel(title=words, arms=[(arm.name, arm) for arm in record.arms], unit="seconds")]


def measure_arms(
    checkpoint: Checkpoint,
    settings: LoadSettings,
    arms: Sequence[Arm],
    *,
    rank_bytes: Sequence[int],
    tensors: int,
    repeat: int,
    budget: Budget,
    on_step: Callable[[str], None] | None,
) -> list[ArmResult]:
    """Run the limit and the arms ``repeat`` times, interleaved; ``rank_bytes`` is what each rank places.

    ``tensors`` is the number of tensors that all ranks place together; for the budget see `take_turns`.
    """
    here = host()
    placed = sum(rank_bytes)
    shares = plan_shares(here, settings.ranks)
    files = list(checkpoint.files)

    def measure_limit(timeout: float) -> float:
        return limit_seconds(files, placed, here.compute_cpus, timeout)

    def measure_arm(arm: Arm) -> Callable[[float], float]:
        return lambda timeout: _run_arm(arm, checkpoint.path, settings, shares, rank_bytes, timeout)

    turns = [Turn("limit", f"{here.compute_cpus} {limit_kind()} threads, pread of as many bytes", measure_limit)]
    turns += [Turn(arm.name, arm.what, measure_arm(arm)) for arm in arms]
    take_turns(turns, files, repeat, budget, on_step)
    return [turn.result(placed, tensors) for turn in turns]


def start_together(context: RankContext, num_bytes: int) -> None:
    """Meet the other ranks with as much memory touched as the arm is about to fill, free it, and meet them again.

    The host of a virtual machine takes free pages back (free page reporting, memory balloons), and the next touch of
    each then costs several times what the guest's kernel takes: a cost of the machine, not of the arm that meets it.
    """
    arena = Arena(num_bytes)
    np.frombuffer(arena.buffer, np.uint8)[::4096] = 1
    context.barrier()
    del arena
    context.barrier()
    context.progress(BEGIN)


def _placed_bytes(checkpoint: Checkpoint, settings: LoadSettings, rank: int) -> int:
    return sum(placement.num_bytes for placement in place(checkpoint, settings.shard(rank), None))


def _run_arm(
    arm: Arm,
    path: str | os.PathLike[str],
    settings: LoadSettings,
    shares: Sequence[Share],
    rank_bytes: Sequence[int],
    timeout: float,
) -> float:
    jobs = [
        ArmJob(
            path=os.fspath(path),
            rank=rank,
            settings=settings,
            share=share,
            num_bytes=rank_bytes[rank],
            arm=arm.name,
        )
        for rank, share in enumerate(shares)
    ]
    environments = [_environment(arm, share, rank, len(shares)) for rank, share in enumerate(shares)]
    told: dict[str, list[float]] = {BEGIN: [], END: []}
    try:
        ranks: list[ArmRank] = run_ranks(
            arm.function,
            jobs,
            environments=environments,
            on_progress=lambda _, stage: told[stage].append(time.monotonic()),
            timeout_seconds=timeout,
        )
    except RanksStoppedError:
        raise StoppedError(_seconds_of_stages(told, len(jobs))) from None
    return max(rank.seconds for rank in ranks)


def _seconds_of_stages(told: Mapping[str, Sequence[float]], ranks: int) -> float:
    """Seconds that stopped ranks had loaded for; 0 where not all of them had begun."""
    if len(told[BEGIN]) < ranks:
        return 0.0
    end = max(told[END]) if len(told[END]) == ranks else time.monotonic()
    return end - max(told[BEGIN])


def _environment(arm: Arm, share: Share, rank: int, ranks: int) -> Mapping[str, str]:
    environment = rank_environment(arm.threads or share.threads, rank, ranks)
    if arm.threads is None:
        del environment["OMP_NUM_THREADS"]
    return environment


def read_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """The arm of our reader."""
    import_torch()
    tensors: dict[str, Any] = {}
    start_together(context, job.num_bytes)
    begin = time.perf_counter()
    with lease() as held:
        load_rank(tensors, job.path, job.settings.shard(job.rank), dtype=None, held=held, progress=None)
    return _finish(job, context, tensors, time.perf_counter() - begin)


def copy_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """The arm of the loop that users write: the library's slices copied into tensors of their own."""
    import_torch()
    from safetensors import safe_open

    start_together(context, job.num_bytes)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(job.path)
    placements = place(checkpoint, job.settings.shard(job.rank), None)
    tensors: dict[str, Any] = {}
    file = ""
    opened: Any = None
    for placement in placements:
        name = placement.entry.name
        if placement.entry.file != file:
            file = placement.entry.file
            opened = safe_open(file, "pt")
        tensor = empty_tensor(placement)
        copy_slices(
            placement, functools.partial(opened.get_tensor, name), functools.partial(opened.get_slice, name), tensor
        )
        tensors[placement.name] = tensor
    return _finish(job, context, tensors, time.perf_counter() - begin)


def library_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """The arm of another library, which the name of the arm tells."""
    import_torch()
    library = LIBRARIES[job.arm]
    start_together(context, job.num_bytes)
    begin = time.perf_counter()
    placements = place(open_checkpoint(job.path), job.settings.shard(job.rank), None)
    tensors, kept = library.load(placements)
    done = _finish(job, context, tensors, time.perf_counter() - begin)
    del kept
    return done


def _finish(job: ArmJob, context: RankContext, tensors: Mapping[str, Any], seconds: float) -> ArmRank:
    context.progress(END)
    context.barrier()  # a rank that counts or verifies would take CPUs from one that still loads
    checkpoint = open_checkpoint(job.path)
    placements = place(checkpoint, job.settings.shard(job.rank), None)
    if job.settings.verify:
        verify_placements(tensors, checkpoint, placements)
    num_bytes = sum(placement.num_bytes for placement in placements)
    return ArmRank(seconds=seconds, num_bytes=num_bytes, tensors=len(placements))
