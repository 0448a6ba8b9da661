"""Ranks that copy at once, as placement writes do: the one implementation behind `bench scope`, `collapse` and `sweep`.

    parent                                   every rank
    ------                                   ----------
    arms, grouped by wait policy  -- job ->  for each repetition, for each arm: meet, copy, meet
    {arm: seconds of a copy}      <--------  seconds and number of copies, as soon as the arm is done

Arms of one group run in the same processes and alternate, so that a noisy moment meets all of them. The run time reads
its wait policy when it starts, so that each policy needs processes of its own: then every repetition starts all groups.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadmaster.bench.budget import Budget
from loadmaster.bench.load import BEGIN, start_together
from loadmaster.checkpoint.folder import paused_garbage_collection
from loadmaster.checkpoint.load import load_rank
from loadmaster.errors import InputError
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.share.lease import lease
from loadmaster.share.settings import USER_OMP_VARIABLE
from loadmaster.threads.environment import rank_environment
from loadmaster.threads.importing import import_torch
from loadmaster.threads.scope import load_threads

__all__ = [
    "AS_SHIPPED",
    "SCOPE",
    "CopyArm",
    "CopyTimes",
    "copy_in_rank",
    "fixed_counts",
    "measure_copies",
    "threads_words",
    "untouched",
]

AS_SHIPPED = "as shipped"
SCOPE = "scope"

BUFFER_BYTES = 64 << 20
"""Copies walk through so much memory on each side, as those of a load do: no cache holds it."""

LEAST_COUNTS = 8
"""Fixed counts go up to so many threads even where there are fewer cores."""


@dataclass(frozen=True, kw_only=True)
class CopyArm:
    """One way to copy, or to read the same bytes instead.

    Attributes
    ----------
    copy_bytes
        Size of each copy.
    seconds
        The longest that a rank copies in one repetition.
    copies
        The number after which a rank is done sooner; None for as many as the time allows.
    threads
        The team of torch; None leaves it as torch starts.
    scope
        Whether the copies run in `load_threads`.
    wait_policy
        ``OMP_WAIT_POLICY`` of the processes; None leaves it alone.
    checkpoint
        What our reader reads instead of any copying; ``copies`` tensors.
    """

    name: str
    copy_bytes: int
    seconds: float
    copies: int | None = None
    threads: int | None = None
    scope: bool = False
    wait_policy: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class CopyJob:
    """What one rank measures; ``deadline`` of the monotonic clock, which all processes share, begins nothing new."""

    arms: Sequence[CopyArm]
    repeat: int
    deadline: float


class _Timed(NamedTuple):
    """What one rank did in one repetition of one arm."""

    seconds: float
    copies: int


@dataclass
class CopyTimes:
    """What all ranks did in one arm: for each complete repetition the seconds of a copy, of each rank."""

    of_ranks: list[list[float]] = field(default_factory=list)
    copies: int | None = None
    """The least number of copies that a rank did in a repetition."""
    stopped_after: float | None = None

    @property
    def mean(self) -> list[float]:
        """Seconds of a copy in each repetition, mean of the ranks."""
        return [statistics.fmean(row) for row in self.of_ranks]

    @property
    def slowest(self) -> list[float]:
        """Seconds of a copy in each repetition, of the slowest rank."""
        return [max(row) for row in self.of_ranks]


def fixed_counts(cores: int) -> tuple[int, ...]:
    """Return the powers of two up to ``cores`` and to 8 at least."""
    most = max(LEAST_COUNTS, cores)
    return tuple(1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most)


def threads_words(count: int) -> str:
    """Return ``1 thread`` or ``8 threads``."""
    return f"{count} thread{'s' * (count > 1)}"


def measure_copies(
    ranks: int,
    arms: Sequence[CopyArm],
    *,
    repeat: int,
    budget: Budget,
    on_step: Callable[[str], None] | None = None,
) -> dict[str, CopyTimes]:
    """Let ``ranks`` ranks run the arms at once, ``repeat`` times or as often as the time allows.

    Raises
    ------
    InputError
        ``ranks``, ``repeat`` or a size is less than 1.
    """
    if ranks < 1 or repeat < 1 or any(arm.copy_bytes < 1 for arm in arms):
        raise InputError("the number of ranks, of repetitions and of bytes in a copy must be at least 1")
    say = on_step or (lambda step: None)
    groups = {arm.wait_policy: [other for other in arms if other.wait_policy == arm.wait_policy] for arm in arms}
    passes, inside = (1, repeat) if len(groups) == 1 else (repeat, 1)
    found = {arm.name: CopyTimes() for arm in arms}
    took = 0.0
    for number in range(passes):
        if number and not budget.fits(took):
            break
        begin = time.monotonic()
        for index, (policy, group) in enumerate(groups.items()):
            words = f"{ranks} rank{'s' * (ranks > 1)}" + (f", OMP_WAIT_POLICY={policy}" if policy else "")
            say(words + (f", {number + 1} of {passes}" if passes > 1 else ""))
            others = 0 if number else len(groups) - index - 1
            _run_group(ranks, policy, group, found, inside, budget.part(others))
        took = time.monotonic() - begin
    return found


def _run_group(
    ranks: int,
    policy: str | None,
    arms: Sequence[CopyArm],
    found: Mapping[str, CopyTimes],
    repeat: int,
    seconds: float,
) -> None:
    """Run the arms of one wait policy in new processes, and add what they did to ``found``."""
    begin = last = time.monotonic()
    started = False
    jobs = [CopyJob(arms=arms, repeat=repeat, deadline=begin + seconds)] * ranks
    told: dict[tuple[str, int], list[_Timed]] = {}

    def take(_: int, value: tuple[str, int, float, int] | str) -> None:
        nonlocal last, started
        last, started = time.monotonic(), True
        if not isinstance(value, str):
            name, number, elapsed, copies = value
            told.setdefault((name, number), []).append(_Timed(elapsed, copies))

    environments = [{**untouched(rank, ranks), **_policy(policy)} for rank in range(ranks)]
    stopped = False
    try:
        run_ranks(
            "loadmaster.bench.copies:copy_in_rank",
            jobs,
            environments=environments,
            on_progress=take,
            timeout_seconds=seconds,
        )
    except RanksStoppedError:
        stopped = True
    for (name, _), timed in told.items():
        if len(timed) == ranks:
            _add(found[name], timed)
    began = stopped and started
    missing = [
        arm.name for arm in arms if not any(len(row) == ranks for key, row in told.items() if key[0] == arm.name)
    ]
    for name in missing:
        if not found[name].of_ranks:
            found[name].stopped_after = time.monotonic() - last if began and name == missing[0] else 0.0


def _add(times: CopyTimes, timed: Sequence[_Timed]) -> None:
    times.of_ranks.append([one.seconds / one.copies for one in timed])
    least = min(one.copies for one in timed)
    times.copies = least if times.copies is None else min(times.copies, least)


def _policy(policy: str | None) -> dict[str, str]:
    return {} if policy is None else {"OMP_WAIT_POLICY": policy}


def untouched(rank: int, ranks: int) -> dict[str, str]:
    """The environment of a rank whose launcher tells its place and sets no number of threads."""
    environment = rank_environment(1, rank, ranks)
    for name in ("OMP_NUM_THREADS", USER_OMP_VARIABLE, "LOADMASTER_THREADS"):
        environment.pop(name, None)
    return environment


def copy_in_rank(job: CopyJob, context: RankContext) -> None:
    """Copy at the same time as the other ranks, arm after arm, and tell the parent after each.

    All ranks leave a barrier at the same time, so that they agree on the time that is left but for moments; where they
    do not, the parent drops the repetition that some of them did alone.
    """
    torch = import_torch()
    largest = max([BUFFER_BYTES, *(arm.copy_bytes for arm in job.arms)])
    sources = torch.ones(largest, dtype=torch.uint8)
    targets = torch.zeros(largest, dtype=torch.uint8)
    took = 0.0
    for number in range(job.repeat):
        context.barrier()
        context.progress(BEGIN)  # so that the time to start counts for no arm
        begin = time.monotonic()
        if number and begin + took > job.deadline:
            return
        for arm in job.arms:
            timed = _read(arm, context) if arm.checkpoint else _copy(arm, sources, targets, context)
            context.progress((arm.name, number, timed.seconds, timed.copies))
        took = time.monotonic() - begin


def _copy(arm: CopyArm, sources: Any, targets: Any, context: RankContext) -> _Timed:
    slots = len(sources) // arm.copy_bytes
    used = slots * arm.copy_bytes
    rows = [side[:used].view(slots, arm.copy_bytes).unbind() for side in (sources, targets)]
    pairs = itertools.cycle(zip(*rows, strict=True))

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    # A pass of the collector over the thousands of small tensors here takes a tenth of a second.
    with paused_garbage_collection(), _team(arm):
        copy()  # the team starts before the clock does
        context.barrier()
        timed = _time_calls(copy, arm.seconds, arm.copies)
        context.barrier()
    return timed


@contextlib.contextmanager
def _team(arm: CopyArm) -> Iterator[None]:
    torch = import_torch()
    if arm.scope:
        with load_threads():
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(arm.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_calls(call: Callable[[], Any], seconds: float, calls: int | None) -> _Timed:
    clock = time.perf_counter
    begin = now = clock()
    done = 0
    while now - begin < seconds and done != calls:
        call()
        done += 1
        now = clock()
    return _Timed(now - begin, done)


def _read(arm: CopyArm, context: RankContext) -> _Timed:
    assert arm.checkpoint is not None
    assert arm.copies is not None
    tensors: dict[str, Any] = {}
    start_together(context, arm.copies * arm.copy_bytes)
    begin = time.perf_counter()
    with lease() as held:
        load_rank(tensors, arm.checkpoint, None, dtype=None, held=held, progress=None)
    elapsed = time.perf_counter() - begin
    context.barrier()
    return _Timed(elapsed, arm.copies)
