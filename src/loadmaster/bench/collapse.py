"""`loadmaster bench collapse`: the writes of a load, made by ranks with torch's `copy_` at once, and what they cost.

    as shipped            the team that torch starts with, in every rank
    active, passive       the same, with OMP_WAIT_POLICY set before the processes start
    1 thread, 2, 4, ...   fixed counts
    scope                 `load_threads`
    loadmaster            our reader, which copies nothing: the same bytes, from a file

A copy of 4 MB has a thousand times the bytes of one of 4 KB. Where both cost the same, the time is no copying.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from loadmaster.bench.budget import Budget
from loadmaster.bench.copies import (
    AS_SHIPPED,
    SCOPE,
    CopyArm,
    CopyTimes,
    fixed_counts,
    measure_copies,
    threads_words,
)
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError, LoadmasterError
from loadmaster.host import host
from loadmaster.threads.importing import require_torch

__all__ = ["READER", "SIZES", "bench_collapse", "cost_without_copying", "panels", "size_arm", "temporary_checkpoint"]

READER = "loadmaster"
SECONDS = 180.0
"""The time that the bench may take where nobody says."""

SIZES = {4_000: "4 KB", 40_000: "40 KB", 400_000: "400 KB", 4_000_000: "4 MB"}
"""Sizes of copies whose cost is compared."""

MOST_COPIES = 500
MOST_BYTES = 1 << 30
"""A rank writes `MOST_COPIES` tensors in each arm, fewer where they would be more bytes."""

ARM_SECONDS, SIZE_SECONDS = 2.0, 0.2
"""A rank that copies for longer stops; the time of all its writes is then reckoned from those that it did."""


def bench_collapse(
    ranks: int = 4,
    *,
    copy_bytes: int = 400_000,
    threads_per_rank: int | None = None,
    repeat: int = 3,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Measure, and return the record: the seconds of an arm are those of all writes of the slowest rank.

    The arms of `SIZES` come last; their seconds are those of one copy, mean of all ranks.

    Parameters
    ----------
    ranks : int
        Ranks that write at once.
    copy_bytes : int
        Size of each write.
    threads_per_rank : int, optional
        The team that torch "ships" with; default what it does on this host.
    seconds : float
        The time that all may take.
    """
    require_torch()
    if ranks < 1 or copy_bytes < 1 or (threads_per_rank is not None and threads_per_rank < 1):
        raise InputError("the number of ranks, of threads and of bytes in a copy must be at least 1")
    budget = Budget(seconds)
    copies = max(1, min(MOST_COPIES, MOST_BYTES // copy_bytes))
    with temporary_checkpoint(copies, copy_bytes) as checkpoint:
        arms = _arms(copies, copy_bytes, threads_per_rank, checkpoint)
        found = measure_copies(
            ranks, [*arms, *_size_arms(threads_per_rank)], repeat=repeat, budget=budget, on_step=on_step
        )
    results = [_writes(arm, found[arm.name], ranks, copies) for arm in arms]
    results += [_one_copy(arm, found[arm.name]) for arm in _size_arms(threads_per_rank)]
    settings = {
        "ranks": ranks,
        "copy_bytes": copy_bytes,
        "copies": copies,
        "threads_per_rank": threads_per_rank,
        "repeat": repeat,
        "seconds": seconds,
        "copies_done": {arm.name: found[arm.name].copies for arm in arms},
    }
    return BenchRecord(bench="collapse", settings=settings, arms=results)


def size_arm(size: int, name: str) -> str:
    """Name the arm ``name`` of a size of `SIZES`."""
    return f"{SIZES[size]} a copy, {name}"


def _arms(copies: int, copy_bytes: int, shipped: int | None, checkpoint: str) -> list[CopyArm]:
    fixed = {threads_words(count): count for count in fixed_counts(len(host().cores))}
    common: dict[str, Any] = {"copy_bytes": copy_bytes, "seconds": ARM_SECONDS, "copies": copies}
    return [
        CopyArm(name=AS_SHIPPED, threads=shipped, **common),
        CopyArm(name="OMP_WAIT_POLICY=ACTIVE", threads=shipped, wait_policy="ACTIVE", **common),
        CopyArm(name="OMP_WAIT_POLICY=PASSIVE", threads=shipped, wait_policy="PASSIVE", **common),
        *(CopyArm(name=name, threads=count, **common) for name, count in fixed.items()),
        CopyArm(name=SCOPE, scope=True, **common),
        CopyArm(name=READER, checkpoint=checkpoint, **common),
    ]


def _size_arms(shipped: int | None) -> list[CopyArm]:
    return [
        CopyArm(
            name=size_arm(size, name),
            copy_bytes=size,
            seconds=SIZE_SECONDS,
            threads=None if name == SCOPE else shipped,
            scope=name == SCOPE,
        )
        for size in SIZES
        for name in (AS_SHIPPED, SCOPE)
    ]


def _writes(arm: CopyArm, times: CopyTimes, ranks: int, copies: int) -> ArmResult:
    how = "our reader: reads them from a file" if arm.checkpoint else f"copy_, {_team_words(arm)}"
    return ArmResult(
        name=arm.name,
        what=f"seconds of {copies} writes of {arm.copy_bytes} bytes in the slowest rank, bytes of all ranks: {how}",
        seconds=[copies * second for second in times.slowest],
        num_bytes=ranks * copies * arm.copy_bytes,
        tensors=copies,
        stopped_after=times.stopped_after,
    )


def _team_words(arm: CopyArm) -> str:
    return "the scope" if arm.scope else "torch's default team" if arm.threads is None else threads_words(arm.threads)


def _one_copy(arm: CopyArm, times: CopyTimes) -> ArmResult:
    return ArmResult(
        name=arm.name,
        what=f"seconds of one copy of {arm.copy_bytes} bytes, mean of all ranks",
        seconds=times.mean,
        num_bytes=arm.copy_bytes,
        tensors=1,
        stopped_after=times.stopped_after,
    )


def cost_without_copying(record: BenchRecord) -> tuple[int, int] | None:
    """Return two sizes, at least ten times apart, whose copies cost as good as the same as shipped; None without.

    As good as the same is less than twice. What the scope takes for the smaller size must be less than a third of it:
    what every call costs is none of this.
    """
    known = {arm.name: arm.median for arm in record.arms if arm.finished}
    pairs = [(small, large) for small in SIZES for large in SIZES if large >= 10 * small]
    for small, large in sorted(pairs, key=lambda pair: pair[0] / pair[1]):
        names = size_arm(small, AS_SHIPPED), size_arm(large, AS_SHIPPED), size_arm(small, SCOPE)
        if all(name in known for name in names):
            less, more, scope = (known[name] for name in names)
            if more < 2 * less and less > 3 * scope:
                return small, large
    return None


def panels(record: BenchRecord) -> list[Panel]:
    """The writes as bars, and what a copy costs over its size as two curves."""
    settings, by_name = record.settings, {arm.name: arm for arm in record.arms}
    of_sizes = {size_arm(size, name) for size in SIZES for name in (AS_SHIPPED, SCOPE)}
    bars = [(arm.name, arm) for arm in record.arms if arm.name not in of_sizes]
    words = f"{settings['ranks']} ranks, each {settings['copies']} writes of {settings['copy_bytes']} bytes"
    curves = {name: [(size, by_name[size_arm(size, name)]) for size in SIZES] for name in (AS_SHIPPED, SCOPE)}
    return [
        Panel(title=words, arms=bars, unit="seconds"),
        Panel(title="one copy", curves=curves, along="bytes in a copy", unit="microseconds", factor=1e6, ticks=SIZES),
    ]


@contextlib.contextmanager
def temporary_checkpoint(tensors: int, tensor_bytes: int) -> Iterator[str]:
    """A file of ``tensors`` tensors in a temporary folder, which is removed however the block ends.

    A signal that asks this process to end becomes an exit in the block, so that the folder is removed then, too.
    """
    with _signals_as_exits(), contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="loadmaster-bench-"))
            path = Path(folder, "writes.safetensors")
            _write(path, tensors, tensor_bytes)
        except OSError as refused:
            words = f"{tensors * tensor_bytes} bytes to read cannot be written in {tempfile.gettempdir()}"
            raise LoadmasterError(f"{words}: {refused.strerror}; set TMPDIR to another folder") from None
        yield os.fspath(path)


def _write(path: Path, tensors: int, tensor_bytes: int) -> None:
    entries = {
        f"writes.{number}": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [number * tensor_bytes, (number + 1) * tensor_bytes],
        }
        for number in range(tensors)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    block = np.random.default_rng(0).bytes(min(8 << 20, tensors * tensor_bytes))
    left = tensors * tensor_bytes
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        while left:
            left -= stream.write(block[: min(left, len(block))])


@contextlib.contextmanager
def _signals_as_exits(signals: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in signals if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
