"""`loadmaster bench lease`: what leases cost, and what following a changed share is worth.

cost      joining and leaving among 8 and 512 leases; a look with nothing changed
uneven    2 ranks, one with three times the bytes of the other: 1 thread each for good, or as their shares follow
strangers 4 commands that know nothing of each other, against one with 4 ranks
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.bench.budget import Budget
from loadmaster.bench.load import start_together
from loadmaster.bench.plot import Panel
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.bench.turns import warm_page_cache
from loadmaster.checkpoint.dtypes import import_torch
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.load import load_rank
from loadmaster.checkpoint.placement import Placement, place_whole
from loadmaster.errors import LoadmasterError
from loadmaster.host import host
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.share.lease import lease
from loadmaster.threads.importing import require_torch

__all__ = ["bench_lease", "panels", "uneven_parts"]

SECONDS = 240.0
"""The time that the bench may take where nobody says."""

NEIGHBOURS = (8, 512)
JOINS, LOOKS = 100, 100_000
STRANGERS = 4


@dataclass(frozen=True, kw_only=True)
class UnevenJob:
    """One of two ranks that load parts of different sizes."""

    path: str
    rank: int
    threads: int | None


def bench_lease(
    path: str | os.PathLike[str],
    *,
    repeat: int = 5,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Measure, and return the record: seconds of one call for the costs, of one load for the rest.

    The leases of the bench are in a folder of its own, so that it neither disturbs nor sees a load of somebody else.
    """
    require_torch()
    say = on_step or (lambda step: None)
    checkpoint = open_checkpoint(path)
    budget = Budget(seconds)
    with tempfile.TemporaryDirectory(prefix="loadmaster-bench-", dir=_memory_folder()) as folder:
        environ = {**os.environ, "LOADMASTER_DIR": str(Path(folder, "leases"))}
        for name in ("LOADMASTER_LEASES", "LOADMASTER_THREADS", "OMP_NUM_THREADS"):
            environ.pop(name, None)
        say("joining, looking and leaving")
        arms = _costs(environ, repeat)
        arms += _interleaved(_uneven_arms(checkpoint, environ), checkpoint, repeat, budget.portion(2), say)
        arms += _interleaved(_stranger_arms(checkpoint, environ), checkpoint, repeat, budget, say)
    return BenchRecord(
        bench="lease",
        settings={"checkpoint": os.fspath(path), "repeat": repeat, "seconds": seconds, "strangers": STRANGERS},
        arms=arms,
    )


def panels(record: BenchRecord) -> list[Panel]:
    """What leases cost, and the loads that they are for."""
    costs, loads = record.arms[:-4], record.arms[-4:]
    return [
        Panel(title="what a lease costs", arms=[(arm.name, arm) for arm in costs], unit="microseconds", factor=1e6),
        Panel(title="loads of the checkpoint", arms=[(arm.name, arm) for arm in loads], unit="seconds"),
    ]


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _costs(environ: Mapping[str, str], repeat: int) -> list[ArmResult]:
    here = host()
    found: dict[str, list[float]] = {}
    for number in NEIGHBOURS:
        with _neighbours(number, environ):
            name = f"join + leave, {number} leases"
            found[name] = [_seconds_of_joining(here, environ) for _ in range(repeat)]
    with lease(host=here, environ=environ) as held:
        found["look, nothing changed"] = [_seconds_of_looks(held.look) for _ in range(repeat)]
    return [
        ArmResult(name=name, what="seconds of one call", seconds=seconds, num_bytes=0, tensors=1)
        for name, seconds in found.items()
    ]


def _seconds_of_joining(here: Any, environ: Mapping[str, str]) -> float:
    times = []
    for _ in range(JOINS):
        held = lease(host=here, environ=environ)
        begin = time.perf_counter()
        held.join()
        held.leave()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _seconds_of_looks(look: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for _ in range(LOOKS):
        look()
    return (time.perf_counter() - begin) / LOOKS


_HOLDER = """
import os, signal, sys, time
from loadmaster.share.lease import lease
number, parent = int(sys.argv[1]), os.getpid()
ready, tell = os.pipe()
children = []
for _ in range(number):
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with lease():
            os.write(tell, b".")
            while os.getppid() == parent:
                time.sleep(1)
        os._exit(0)
    children.append(pid)
seen = 0
while seen < number:
    seen += len(os.read(ready, number))
print("ready", flush=True)
sys.stdin.read()
for pid in children:
    os.kill(pid, signal.SIGTERM)
for pid in children:
    os.waitpid(pid, 0)
"""


@contextlib.contextmanager
def _neighbours(number: int, environ: Mapping[str, str]) -> Iterator[None]:
    """Processes that hold a lease each: forks of one small process, which ends them when we end."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(number)],
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise LoadmasterError(f"{number} processes with a lease each could not be started")
        yield
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.wait()


def _interleaved(
    arms: Mapping[str, Callable[[float], float]],
    checkpoint: Checkpoint,
    repeat: int,
    budget: Budget,
    say: Callable[[str], None],
) -> list[ArmResult]:
    """Run the arms in turns as long as another round fits; one that overruns is stopped and not tried again."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    stopped: dict[str, float] = {}
    round_seconds = 0.0
    for number in range(repeat):
        if stopped or not budget.fits(round_seconds):
            break
        begin = time.monotonic()
        for index, (name, run) in enumerate(arms.items()):
            say(f"{name}, {number + 1} of {repeat}")
            warm_page_cache(list(checkpoint.files))
            allowed = budget.part(len(arms) - 1 - index)
            try:
                seconds[name].append(run(allowed))
            except (RanksStoppedError, subprocess.TimeoutExpired):
                stopped[name] = allowed
        round_seconds = time.monotonic() - begin
    return [
        ArmResult(
            name=name,
            what="seconds of the whole",
            seconds=times,
            num_bytes=checkpoint.num_bytes,
            tensors=1,
            stopped_after=None if times else stopped.get(name, 0.0),
        )
        for name, times in seconds.items()
    ]


def _uneven_arms(checkpoint: Checkpoint, environ: Mapping[str, str]) -> dict[str, Callable[[float], float]]:
    def run(threads: int | None, allowed: float) -> float:
        times: list[float] = run_ranks(
            "loadmaster.bench.lease:uneven_in_rank",
            [UnevenJob(path=checkpoint.path, rank=rank, threads=threads) for rank in range(2)],
            environments=[environ] * 2,
            timeout_seconds=allowed,
        )
        return max(times)

    return {
        "uneven, 1 thread each": functools.partial(run, 1),
        "uneven, following": functools.partial(run, None),
    }


def uneven_parts(placements: Sequence[Placement]) -> tuple[list[Placement], list[Placement]]:
    """Deal placements to two ranks so that the first has three times the bytes of the second."""
    parts: tuple[list[Placement], list[Placement]] = ([], [])
    sizes = [0, 0]
    for placement in placements:
        rank = 0 if sizes[0] <= 3 * sizes[1] else 1
        parts[rank].append(placement)
        sizes[rank] += placement.num_bytes
    return parts


def uneven_in_rank(job: UnevenJob, context: RankContext) -> float:
    """Load the large part or the small one; seconds from the moment when both begin."""
    import_torch()
    checkpoint = open_checkpoint(job.path)
    mine = uneven_parts(place_whole(checkpoint.values()))[job.rank]
    tensors: dict[str, Any] = {}
    with lease(threads=job.threads) as held:
        start_together(context, sum(placement.num_bytes for placement in mine))
        begin = time.perf_counter()
        load_rank(tensors, checkpoint, mine, dtype=None, held=held, progress=None)
    elapsed = time.perf_counter() - begin
    context.barrier()  # a rank that has loaded stays, as ranks do: its end would take a core from the other one
    return elapsed


def _stranger_arms(checkpoint: Checkpoint, environ: Mapping[str, str]) -> dict[str, Callable[[float], float]]:
    words = [sys.executable, "-m", "loadmaster", "load", checkpoint.path, "--shard", "none", "--quiet"]
    one = [[*words, "--ranks", str(STRANGERS)]]
    many = [words] * STRANGERS
    return {
        f"1 command, {STRANGERS} ranks": functools.partial(_run_commands, one, environ),
        f"{STRANGERS} commands, 1 rank each": functools.partial(_run_commands, many, environ),
    }


def _run_commands(commands: Sequence[Sequence[str]], environ: Mapping[str, str], allowed: float) -> float:
    """Run all at once; seconds until the last has ended. Those that take longer than allowed are killed."""
    begin = time.perf_counter()
    running = [
        subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=max(0.0, allowed - time.perf_counter() + begin))[1] for process in running]
    except BaseException:
        for process in running:
            process.kill()  # its ranks see the end of their connection and go with it
            process.communicate()
        raise
    seconds = time.perf_counter() - begin
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise LoadmasterError(f"a load ended with exit code {process.returncode}: {text.strip()}")
    return seconds
