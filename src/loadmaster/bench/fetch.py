"""`loadmaster bench fetch`: our fetchers against the published way to bring weights into shared memory.

    loadmaster      consumer --fetch--> fetchers, warmed by three fetches
                             <--------- weights, each tensor looked up once
    as-published    consumer --keys---> ranks: get_tensor, copy_ into a segment of its own, for each tensor
                             <--names-- the consumer maps each segment

The consumer is a fresh process for each repetition of each arm, and repetitions are interleaved, so that a noisy moment
of the machine meets all arms. What it starts ends with it, however it ends; segments that have a name are removed by
the rank that made them, by the resource tracker of that rank where it is killed, and by the bench once more.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadmaster.bench.budget import Budget
from loadmaster.bench.limit import limit_kind, limit_seconds
from loadmaster.bench.load import BEGIN, END, SECONDS, Arm, choose_arms, start_together
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.bench.turns import CannotError, StoppedError, Turn, take_turns
from loadmaster.checkpoint.dtypes import import_torch
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.load import place
from loadmaster.checkpoint.memory import Arena
from loadmaster.checkpoint.verify import verify_placements
from loadmaster.errors import InputError, RankError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.fetchers import DEFAULT_PROCS, Fetchers
from loadmaster.fetch.weights import Weights
from loadmaster.host import host
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.observe.words import format_bytes
from loadmaster.threads.importing import require_torch

__all__ = ["KEPT", "OURS", "PUBLISHED", "FetchArmJob", "FetchDone", "bench_fetch", "fetch_arms", "fixed_arms", "panels"]

WARMING = 3
"""Fetches before the one that is measured: with memory that is kept, each fetcher comes to know more of it."""

OURS, KEPT, PUBLISHED = "loadmaster", "loadmaster-kept", "as-published"

EVERY_COUNT_UP_TO = 8
"""Of more threads than this, only powers of two, the cores and twice the cores are tried."""

TEAM_ELEMENTS = 1 << 20
"""A copy of so many elements starts torch's team."""

SEGMENTS = Path("/dev/shm")
"""Where segments with a name lie (shm_overview(7))."""

DESCRIPTORS_EACH = 2
"""What a mapped `SharedMemory` holds open: its descriptor, and the copy of it that ``mmap`` makes."""

OTHER_DESCRIPTORS, OTHER_MAPPINGS = 128, 4096
"""What a consumer with torch and its ranks' lines needs beside the segments."""

NO_MORE = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM}
"""How the system says that it has no more descriptors, no more room in `SEGMENTS`, no more memory or mappings."""


@dataclass(frozen=True, kw_only=True)
class FetchArmJob:
    """What one consumer is to do; names of segments begin with ``prefix``."""

    path: str
    procs: int
    arm: Arm
    verify: bool
    num_bytes: int
    prefix: str


@dataclass(frozen=True, kw_only=True)
class FetchDone:
    """What one consumer did.

    ``seconds`` are those until it has mapped the last tensor, ``descriptors`` how many it had open before and after,
    ``threads`` the most that a fetcher had. ``cannot`` says why there is nothing of this.
    """

    seconds: float = 0.0
    descriptors: tuple[int, int] = (0, 0)
    threads: int | None = None
    cannot: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishJob:
    """What one rank of the published way is to do with its tensors ``names``."""

    path: str
    names: Sequence[str]
    num_bytes: int
    prefix: str


class Segment(NamedTuple):
    """A tensor as a rank publishes it: its name, that of its segment, and what it is."""

    name: str
    segment: str
    dtype: Any
    shape: tuple[int, ...]


def fetch_arms(compute_cpus: int, cpus: int) -> dict[str, Arm]:
    """Return the arms of a host, by name.

    Our fetchers take no more threads than there are ``cpus``, whatever is asked for; the published way does.
    """
    ours, published = "loadmaster.bench.fetch:fetch_in_consumer", "loadmaster.bench.fetch:publish_to_consumer"
    loop = "get_tensor + copy_ into a shared segment for each tensor"
    arms = [
        Arm(name=OURS, what="our fetchers, fresh memory", function=ours, threads=None),
        Arm(name=KEPT, what="our fetchers, memory that was kept", function=ours, threads=None),
        Arm(
            name=PUBLISHED,
            what=f"{loop}, torch's default team, OMP_WAIT_POLICY=ACTIVE",
            function=published,
            threads=None,
        ),
    ]
    for count in _counts(compute_cpus):
        words = f"{count} thread{'s' * (count > 1)}"
        if count <= cpus:
            arms.append(Arm(name=f"{OURS}-{count}", what=f"our fetchers, {words} each", function=ours, threads=count))
        arms.append(Arm(name=f"{PUBLISHED}-{count}", what=f"{loop}, {words}", function=published, threads=count))
    return {arm.name: arm for arm in arms}


def _counts(cores: int) -> list[int]:
    """The fixed thread counts of a host: 1 to twice its cores."""
    few = range(1, min(2 * cores, EVERY_COUNT_UP_TO) + 1)
    powers = (1 << exponent for exponent in range((2 * cores).bit_length()))
    return sorted({*few, *powers, cores, 2 * cores})


def fixed_arms(arms: Sequence[ArmResult], family: str) -> list[ArmResult]:
    """The arms of a family, `OURS` or `PUBLISHED`, that have a fixed number of threads."""
    return [arm for arm in arms if arm.name.rpartition("-")[0] == family and arm.name.rpartition("-")[2].isdigit()]


def bench_fetch(
    path: str | os.PathLike[str],
    procs: int = DEFAULT_PROCS,
    *,
    arms: Sequence[str] | None = None,
    repeat: int = 5,
    seconds: float = SECONDS,
    verify: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Run the arms ``repeat`` times, or as often as ``seconds`` allow, interleaved; the limit comes first.

    The settings of the record also say what belongs to no arm: how many descriptors the consumer had open before and
    with the weights, the threads of our fetchers, and why arms cannot run here.

    Raises
    ------
    InputError
        An arm that does not exist.
    RankError
        An arm failed.
    """
    require_torch()
    if procs < 1:
        raise InputError(f"--procs must be at least 1, not {procs}")
    budget = Budget(seconds)
    checkpoint = open_checkpoint(path)
    here = host()
    chosen = choose_arms(fetch_arms(here.compute_cpus, len(here.cpus)), arms)
    bench = _Bench(checkpoint, procs, verify)
    turns = [
        Turn(
            "limit",
            f"{here.compute_cpus} {limit_kind()} threads, pread of as many bytes into touched shared memory",
            lambda timeout: limit_seconds(
                list(checkpoint.files), bench.num_bytes, here.compute_cpus, timeout, shared=True
            ),
        )
    ]
    why_not = why_not_published(checkpoint, procs)
    for arm in chosen:
        turns.append(Turn(arm.name, arm.what, bench.measurer(arm), why_not if arm.name.startswith(PUBLISHED) else ""))
    take_turns(turns, list(checkpoint.files), repeat, budget, on_step)
    settings = {
        "checkpoint": os.fspath(path),
        "procs": procs,
        "verified": verify,
        "repeat": repeat,
        "seconds": seconds,
        "descriptors": bench.descriptors,
        "threads": bench.threads,
        "cannot_run": {turn.name: turn.cannot for turn in turns if turn.cannot},
    }
    results = [turn.result(bench.num_bytes, len(checkpoint)) for turn in turns]
    return BenchRecord(bench="fetch", settings=settings, arms=results)


def panels(record: BenchRecord) -> list[Panel]:
    """One bar for each arm: a panel of the ways to fetch, and one of what a fixed number of threads makes of them."""
    fixed = [*fixed_arms(record.arms, OURS), *fixed_arms(record.arms, PUBLISHED)]
    ways = [(arm.name, arm) for arm in record.arms if arm not in fixed]
    amount = format_bytes(record.arms[0].num_bytes)
    procs = record.settings["procs"]
    words = f"{amount} into shared memory with {procs} process{'es' * (procs > 1)}, until the last tensor is mapped"
    found = [Panel(title=words, arms=ways, unit="seconds")]
    if fixed:
        arms = [(arm.name, arm) for arm in fixed]
        found.append(Panel(title="the same with a fixed number of threads in each", arms=arms, unit="seconds"))
    return found


class _Bench:
    """Runs consumers, and notes what they tell beside their seconds."""

    def __init__(self, checkpoint: Checkpoint, procs: int, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._procs = procs
        self._verify = verify
        self.num_bytes = sum(entry.num_bytes for entry in checkpoint.values())
        self.descriptors: dict[str, dict[str, int]] = {}
        self.threads: dict[str, int] = {}

    def measurer(self, arm: Arm) -> Callable[[float], float]:
        """What measures ``arm`` once, in so many seconds at the most."""
        return lambda timeout: self._measure(arm, timeout)

    def _measure(self, arm: Arm, timeout: float) -> float:
        job = FetchArmJob(
            path=os.fspath(self._checkpoint.path),
            procs=self._procs,
            arm=arm,
            verify=self._verify,
            num_bytes=self.num_bytes,
            prefix=f"loadmaster-bench-{os.getpid()}-{time.time_ns()}",
        )
        told: dict[str, float] = {}
        try:
            (done,) = run_ranks(
                arm.function,
                [job],
                environments=[_environment(arm)],
                on_progress=lambda _, stage: told.update({stage: time.monotonic()}),
                timeout_seconds=timeout,
            )
        except RanksStoppedError:
            ended = told.get(END, time.monotonic())
            raise StoppedError(ended - told[BEGIN] if BEGIN in told else 0.0) from None
        except RankError as failed:
            raise RankError(f"{arm.name}: {str(failed).replace('rank 0', 'the consumer', 1)}") from None
        finally:
            _remove_segments(job.prefix)
        if done.cannot:
            raise CannotError(done.cannot)
        self.descriptors[arm.name] = dict(zip(("before", "after"), done.descriptors, strict=True))
        if done.threads is not None:
            self.threads[arm.name] = done.threads
        return float(done.seconds)


def why_not_published(checkpoint: Checkpoint, procs: int) -> str:
    """Say in one sentence why a segment for each tensor cannot be had here; nothing where it can."""
    number = len(checkpoint)
    pages = sum(-(-max(1, entry.num_bytes) // mmap.PAGESIZE) for entry in checkpoint.values())
    if not SEGMENTS.is_dir():
        return f"segments with a name need {SEGMENTS}, which is not there"
    room = os.statvfs(SEGMENTS)
    if pages * mmap.PAGESIZE > room.f_bavail * room.f_frsize:
        size, free = format_bytes(pages * mmap.PAGESIZE), format_bytes(room.f_bavail * room.f_frsize)
        return f"{number} segments need {size} in {SEGMENTS}, and {free} are free there"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_EACH * number
    if files != resource.RLIM_INFINITY and needed + 4 * procs + OTHER_DESCRIPTORS > files:
        return f"{number} segments need {needed} open files in the consumer, which may have {files} (ulimit -n)"
    mappings = _max_map_count()
    if mappings is not None and number + OTHER_MAPPINGS > mappings:
        return f"{number} segments need as many mappings in the consumer, which may have {mappings} (vm.max_map_count)"
    return ""


def _max_map_count() -> int | None:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None


def _remove_segments(prefix: str) -> None:
    """Remove what a rank that was killed has left, whether or not its resource tracker has been here already."""
    for path in SEGMENTS.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def _environment(arm: Arm) -> Mapping[str, str]:
    """The environment of a consumer; what it starts gets its own, made from this one."""
    if arm.function.endswith(":fetch_in_consumer"):
        return {**os.environ, **({"LOADMASTER_THREADS": str(arm.threads)} if arm.threads else {})}
    apart = ("OMP_", "GOMP_", "KMP_", "MKL_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
    return plain | ({"OMP_NUM_THREADS": str(arm.threads)} if arm.threads else {"OMP_WAIT_POLICY": "ACTIVE"})


# The consumers.


def fetch_in_consumer(job: FetchArmJob, context: RankContext) -> FetchDone:
    """The arms of our fetchers."""
    import_torch()
    _end_in_order()
    keeps = job.arm.name == KEPT
    with Fetchers(CheckpointSource(job.path), job.procs, keep_memory=keeps) as fetchers:
        for _ in range(WARMING):
            with fetchers.fetch() as warm:
                _look_up(warm)
        if not keeps:
            _touch_and_free(job.num_bytes)
        before = _num_descriptors()
        context.progress(BEGIN)
        begin = time.perf_counter()
        with fetchers.fetch() as weights:
            _look_up(weights)
            seconds = time.perf_counter() - begin
            context.progress(END)
            descriptors = before, _num_descriptors()
            if job.verify:
                _verify(job.path, weights)
            threads = max((row.threads for row in weights.report.fetchers), default=0)
    return FetchDone(seconds=seconds, descriptors=descriptors, threads=threads)


def publish_to_consumer(job: FetchArmJob, context: RankContext) -> FetchDone:
    """The arms of the published way: the consumer starts its ranks, and maps what they publish."""
    torch = import_torch()
    _end_in_order()
    resource_tracker.ensure_running()
    checkpoint = open_checkpoint(job.path)
    dealt = [list(checkpoint)[rank :: job.procs] for rank in range(job.procs)]
    jobs = [
        PublishJob(
            path=job.path,
            names=names,
            num_bytes=sum(checkpoint[name].num_bytes for name in names),
            prefix=f"{job.prefix}-{rank}",
        )
        for rank, names in enumerate(dealt)
    ]
    mapped = _Mapped(torch, job.procs, context)
    try:
        results = run_ranks(
            "loadmaster.bench.fetch:publish_in_rank",
            jobs,
            environments=[dict(os.environ)] * job.procs,
            on_progress=lambda _, told: mapped.take(told),
        )
        cannot = next(filter(None, results), "")
        if not cannot and job.verify:
            _verify(job.path, mapped.tensors)
    except OSError as refused:
        cannot = _no_more(refused)
    finally:
        mapped.close()
        _remove_segments(job.prefix)
    if cannot:
        return FetchDone(cannot=cannot)
    return FetchDone(seconds=mapped.ended - min(mapped.begun), descriptors=(mapped.before, mapped.after))


class _Mapped:
    """The tensors that a consumer has mapped, and when."""

    def __init__(self, torch: Any, ranks: int, context: RankContext) -> None:
        self._torch = torch
        self._ranks = ranks
        self._context = context
        self._ready = 0
        self._segments: list[SharedMemory] = []
        self.tensors: dict[str, Any] = {}
        self.begun: list[float] = []
        self.ended = 0.0
        self.before = self.after = 0

    def take(self, told: Any) -> None:
        """Take what a rank tells: that it has begun; or when it did, and the segments that it has filled."""
        if told == BEGIN:
            if not self._ready:  # the lines to all ranks are open, and nothing is mapped yet
                self.before = _num_descriptors()
            self._ready += 1
            if self._ready == self._ranks:
                self._context.progress(BEGIN)
            return
        begin, segments = told
        for row in segments:
            segment = SharedMemory(row.segment)
            self._segments.append(segment)
            self.tensors[row.name] = _tensor_in(self._torch, segment, row.dtype, row.shape)
        self.begun.append(begin)
        if len(self.begun) == self._ranks:
            self.ended = time.monotonic()
            self.after = _num_descriptors()
            self._context.progress(END)

    def close(self) -> None:
        """Unmap all."""
        self.tensors.clear()
        for segment in self._segments:
            segment.close()


def publish_in_rank(job: PublishJob, context: RankContext) -> str:
    """One rank of the published way; returns why it could not do its part, or nothing."""
    torch = import_torch()
    checkpoint = open_checkpoint(job.path)
    resource_tracker.ensure_running()
    context.barrier()  # a team that spins already would keep the others from starting
    torch.empty(TEAM_ELEMENTS).copy_(torch.ones(TEAM_ELEMENTS))
    start_together(context, job.num_bytes)
    begin = time.monotonic()
    made: list[SharedMemory] = []
    try:
        context.progress((begin, _publish(torch, checkpoint, job, made)))
        context.barrier()  # the others have told as well, and the consumer has taken all of it
    except OSError as refused:
        return _no_more(refused)
    finally:
        for segment in made:
            segment.unlink()
            segment.close()
    return ""


def _publish(torch: Any, checkpoint: Checkpoint, job: PublishJob, made: list[SharedMemory]) -> list[Segment]:
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    rows = []
    for number, name in enumerate(job.names):
        file = checkpoint[name].file
        if file not in opened:
            opened[file] = safe_open(file, "pt")
        tensor = opened[file].get_tensor(name)
        segment = SharedMemory(f"{job.prefix}-{number}", create=True, size=max(1, tensor.nbytes))
        made.append(segment)
        shape = tuple(tensor.shape)
        _tensor_in(torch, segment, tensor.dtype, shape).copy_(tensor)
        rows.append(Segment(name, segment.name, tensor.dtype, shape))
    return rows


def _tensor_in(torch: Any, segment: SharedMemory, dtype: Any, shape: tuple[int, ...]) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(segment.buf, dtype=dtype, count=count).view(shape)


def _no_more(refused: OSError) -> str:
    """The sentence for what the system refuses to give; any other error goes on."""
    if refused.errno not in NO_MORE:
        raise refused
    return f"the system gives no more segments: {refused.strerror}"


def _look_up(weights: Weights) -> None:
    for name in weights:
        weights[name]


def _verify(path: str, tensors: Mapping[str, Any]) -> None:
    checkpoint = open_checkpoint(path)
    verify_placements(tensors, checkpoint, place(checkpoint, None, None))


def _touch_and_free(num_bytes: int) -> None:
    """See `start_together`: free pages that the host of a virtual machine has taken back are no cost of an arm."""
    arena = Arena(num_bytes)
    np.frombuffer(arena.buffer, np.uint8)[::4096] = 1


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  counts


def _end_in_order() -> None:
    """Let the end that the bench tells this process come as an exception, so that what it has started ends before."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
