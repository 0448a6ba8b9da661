"""``loadmaster bench fetch``: every arm brings the right bytes, and nothing is left of it, however it ends."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launch.helpers.leftovers import alive_at_the_end
from loadmaster.bench import fetch as bench
from loadmaster.bench import limit
from loadmaster.bench.fetch import FetchArmJob, FetchDone, bench_fetch, fetch_arms, panels, why_not_published
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.cli.bench_fetch import _sentences
from loadmaster.errors import InputError, LoadmasterError, RankError
from loadmaster.launch.spawn import RanksStoppedError

COMMAND = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))
PAGE = mmap.PAGESIZE
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((65, 8), torch.float32),
    "layer.weight": ((64, 64), torch.bfloat16),
    "layer.bias": ((64,), torch.float16),
    "scale": ((), torch.float32),
    "empty": ((0, 4), torch.int64),
    "codes": ((1000,), torch.uint8),
    "norm.weight": ((64,), torch.bfloat16),
}
NUM_TENSORS = len(SHAPES)
NUM_BYTES = 4 * 65 * 8 + 2 * 64 * 64 + 2 * 64 + 4 + 0 + 1000 + 2 * 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files with tensors of many dtypes, one of them empty and one without dimensions; not to be changed."""
    folder = tmp_path_factory.mktemp("bench")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randint(1, 100, shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:4]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[4:]}, folder / "b.safetensors")
    return folder


HOOK = """
import os, signal, sys, time
from multiprocessing import shared_memory
from pathlib import Path

_real = shared_memory.SharedMemory
_made = 0


class Hooked(_real):
    def __init__(self, name=None, create=False, size=0):
        global _made
        super().__init__(name, create, size)
        _made += create
        if create and _made == 2 and sys.orig_argv[-1] == "rank=1":
            path = Path(os.environ["HOOK_FOLDER"], "rank1")
            path.with_suffix(".partial").write_text(f"{os.getpid()} {os.getppid()}")
            path.with_suffix(".partial").rename(path)
            if os.environ["HOOK_ACTION"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ["HOOK_ACTION"] == "wait":
                time.sleep(100)
            if os.environ["HOOK_ACTION"] == "refuse":
                raise OSError(24, "Too many open files")
        if not create and os.environ["HOOK_ACTION"] == "corrupt":
            self.buf[0] ^= 1


if "loadmaster.launch.rank" in sys.orig_argv:
    shared_memory.SharedMemory = Hooked
"""
"""Makes something happen when rank 1, which only the published way has, makes its second segment."""


def hooked(folder: Path, action: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(HOOK)
    paths = [os.fspath(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HOOK_FOLDER": os.fspath(folder), "HOOK_ACTION": action}


def command(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "bench", "fetch", *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def no_segment_left() -> Iterator[None]:
    """Fails if a segment is there after the test that was not there before."""
    before = set(bench.SEGMENTS.glob("loadmaster-bench-*"))
    yield
    deadline = time.monotonic() + 5
    while (left := set(bench.SEGMENTS.glob("loadmaster-bench-*")) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


@pytest.mark.processes
def test_our_fetchers_fetch_every_byte_and_the_consumer_keeps_few_descriptors(checkpoint: Path) -> None:
    most = min(2, len(os.sched_getaffinity(0)))
    words = ["--arms", f"loadmaster-{most}", "--repeat", 1, "--verify", "--json"]
    done = command(checkpoint, "--procs", 2, *words, environment={"LOADMASTER_CPUS": "2"})
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert record["bench"] == "fetch"
    settings = record["settings"]
    assert list(settings) == [
        *("checkpoint", "procs", "verified", "repeat", "seconds", "descriptors", "threads", "cannot_run"),
    ]
    assert (settings["checkpoint"], settings["procs"], settings["verified"]) == (str(checkpoint), 2, True)
    assert settings["threads"] == {f"loadmaster-{most}": most}
    for counts in settings["descriptors"].values():
        assert counts["after"] - counts["before"] <= 2 * 2  # an arena of each fetcher, whatever the tensors
    check_arms(record["arms"], ["limit", f"loadmaster-{most}"])


@pytest.mark.processes
def test_the_published_way_fetches_every_byte_and_takes_descriptors_for_each_tensor(
    checkpoint: Path, no_segment_left: None
) -> None:
    done = command(checkpoint, "--procs", 2, "--arms", "as-published-1", "--repeat", 1, "--verify", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    counts = record["settings"]["descriptors"]["as-published-1"]
    assert counts["after"] - counts["before"] == bench.DESCRIPTORS_EACH * NUM_TENSORS
    assert record["settings"]["threads"] == {}
    check_arms(record["arms"], ["limit", "as-published-1"])


def check_arms(arms: list[dict[str, Any]], names: list[str]) -> None:
    assert [arm["name"] for arm in arms] == names
    for arm in arms:
        (seconds,) = arm["seconds"]
        assert 0 < seconds < 60
        assert (arm["bytes"], arm["tensors"]) == (NUM_BYTES, NUM_TENSORS)


@pytest.mark.processes
def test_the_table_shows_the_published_way_beside_the_limit(
    checkpoint: Path, tmp_path: Path, no_segment_left: None
) -> None:
    picture = tmp_path / "fetch.svg"
    words = ["--procs", 2, "--arms", "as-published", "--repeat", 1, "--plot", picture]
    done = command(checkpoint, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"measuring {name}, 1 of 1" for name in ("limit", "as-published")]
    rows = [line.split() for line in done.stdout.splitlines()]
    for name in ("limit", "as-published"):
        (row,) = [row for row in rows if row[:1] == [name]]
        median, least, most = map(float, row[1:4])
        assert least == median == most
    assert "OMP_WAIT_POLICY=ACTIVE" in done.stdout
    more = bench.DESCRIPTORS_EACH * NUM_TENSORS
    assert f"as-published: the consumer has {more} more open files for {NUM_TENSORS} tensors" in done.stdout
    assert "into shared memory with 2 processes" in picture.read_text()


@pytest.mark.processes
def test_a_rank_that_is_killed_ends_the_bench_and_leaves_no_segment(
    checkpoint: Path, tmp_path: Path, no_segment_left: None
) -> None:
    arms = ["--arms", "as-published-1", "--repeat", 1, "--json"]
    done = command(checkpoint, "--procs", 2, *arms, environment=hooked(tmp_path, "kill"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(  # what the resource tracker writes comes in time or not
        r"loadmaster: as-published-1: the consumer: rank 1 was killed by SIGKILL, possibly out of memory; "
        r"(its output is in \S+; )?the other rank was stopped\n",
        done.stderr,
    )
    assert alive_at_the_end(map(int, (tmp_path / "rank1").read_text().split()), seconds=0) == []


@pytest.mark.processes
def test_a_system_that_gives_no_more_segments_is_a_finding(
    checkpoint: Path, tmp_path: Path, no_segment_left: None
) -> None:
    words = ["--arms", "as-published-1", "--repeat", 2, "--quiet"]
    done = command(checkpoint, "--procs", 2, *words, environment=hooked(tmp_path, "refuse"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "as-published-1 cannot run here: the system gives no more segments: Too many open files" in done.stdout
    assert re.search(r"as-published-1 +not run", done.stdout)


@pytest.mark.processes
def test_other_bytes_in_a_segment_are_found_out(checkpoint: Path, tmp_path: Path, no_segment_left: None) -> None:
    words = ["--arms", "as-published-1", "--repeat", 1, "--verify", "--quiet"]
    done = command(checkpoint, "--procs", 1, *words, environment=hooked(tmp_path, "corrupt"))
    assert (done.returncode, done.stdout) == (1, "")
    (sentence,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"loadmaster: as-published-1: the consumer: tensor '.*' of .* differs from the reference at byte 0 .*", sentence
    )


@pytest.mark.processes
def test_an_arm_that_overruns_the_time_is_stopped_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, no_segment_left: None
) -> None:
    begin = time.monotonic()
    words = ["--arms", "as-published-1", "--seconds", 12, "--json"]
    done = command(checkpoint, "--procs", 2, *words, environment=hooked(tmp_path, "wait"))
    assert time.monotonic() - begin < 12 + 3  # the command itself has to start
    assert (done.returncode, done.stderr) == (0, "")
    _, arm = json.loads(done.stdout)["arms"]
    assert arm["seconds"] == []
    assert arm["stopped_after_seconds"] is not None
    if (tmp_path / "rank1").exists():  # on a busy host the time may be over before
        assert arm["stopped_after_seconds"] > 0
        assert alive_at_the_end(map(int, (tmp_path / "rank1").read_text().split()), seconds=2) == []


@pytest.mark.processes
def test_an_interrupt_ends_the_consumer_and_its_ranks_and_leaves_no_segment(
    checkpoint: Path, tmp_path: Path, no_segment_left: None
) -> None:
    process = subprocess.Popen(
        [COMMAND, "bench", "fetch", checkpoint, "--procs", "2", "--arms", "as-published-1", "--quiet"],
        env={**os.environ, **hooked(tmp_path, "wait")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        while not (tmp_path / "rank1").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stdout) == (1, "")
    assert stderr == "loadmaster: interrupted; nothing is left running\n"
    assert alive_at_the_end(map(int, (tmp_path / "rank1").read_text().split()), seconds=0) == []


class Alone:
    """The line of a consumer whose bench only listens."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def progress(self, value: Any) -> None:
        self.told.append(value)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["loadmaster", "loadmaster-kept"])
def test_memory_is_touched_before_unless_it_is_kept_and_other_bytes_are_found_out(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is spoiled after it was fetched and before it is compared."""
    compare = bench.verify_placements

    def spoil(tensors: Any, *rest: Any) -> Any:
        tensors["codes"][-1] += 1
        return compare(tensors, *rest)

    monkeypatch.setattr(bench, "verify_placements", spoil)
    monkeypatch.setattr(bench, "_end_in_order", lambda: None)
    touched: list[int] = []
    monkeypatch.setattr(bench, "_touch_and_free", touched.append)
    arm = fetch_arms(1, 1)[name]
    job = FetchArmJob(path=str(checkpoint), procs=1, arm=arm, verify=True, num_bytes=NUM_BYTES, prefix="none")
    line = Alone()
    with pytest.raises(LoadmasterError, match=r"tensor 'codes' of .* differs from the reference at byte 999"):
        bench.fetch_in_consumer(job, line)  # type: ignore[arg-type]
    assert line.told == ["begin", "end"]
    assert touched == ([NUM_BYTES] if name == "loadmaster" else [])


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, [1, 2]), (2, [1, 2, 3, 4]), (6, [*range(1, 9), 12]), (48, [*range(1, 9), 16, 32, 48, 64, 96])],
)
def test_fixed_counts_go_from_one_to_twice_the_cores(cores: int, counts: list[int]) -> None:
    arms = fetch_arms(cores, 2 * cores)
    assert list(arms)[:3] == ["loadmaster", "loadmaster-kept", "as-published"]
    for family in ("loadmaster", "as-published"):
        fixed = {name: arm.threads for name, arm in arms.items() if re.fullmatch(rf"{family}-\d+", name)}
        assert fixed == {f"{family}-{count}": count for count in counts}
    fewer = [name for name in fetch_arms(cores, cores) if name not in arms or name.startswith("loadmaster-")]
    assert fewer == ["loadmaster-kept", *(f"loadmaster-{count}" for count in counts if count <= cores)]


def test_the_published_way_spins_unless_its_threads_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    monkeypatch.setenv("LOADMASTER_THREADS", "5")
    arms = fetch_arms(2, 4)

    def of(name: str) -> dict[str, str]:
        apart = ("OMP_", "GOMP_", "LOADMASTER_THREADS")
        return {key: value for key, value in bench._environment(arms[name]).items() if key.startswith(apart)}

    assert of("as-published") == {"OMP_WAIT_POLICY": "ACTIVE", "LOADMASTER_THREADS": "5"}
    assert of("as-published-3") == {"OMP_NUM_THREADS": "3", "LOADMASTER_THREADS": "5"}
    assert of("loadmaster-3") == {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "5", "LOADMASTER_THREADS": "3"}
    assert of("loadmaster") == {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "5", "LOADMASTER_THREADS": "5"}


def test_the_repetitions_of_the_arms_alternate(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the time is replaced by a clock that ticks."""
    ticks = iter(range(1, 10))
    monkeypatch.setattr(bench, "limit_seconds", lambda *_, **__: float(next(ticks)))
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [FetchDone(seconds=float(next(ticks)))])
    steps: list[str] = []
    record = bench_fetch(checkpoint, 2, arms=["as-published-1", "loadmaster"], repeat=3, on_step=steps.append)
    assert steps == [
        f"{name}, {number} of 3" for number in (1, 2, 3) for name in ("limit", "as-published-1", "loadmaster")
    ]
    assert {arm.name: list(arm.seconds) for arm in record.arms} == {
        "limit": [1, 4, 7],
        "as-published-1": [2, 5, 8],
        "loadmaster": [3, 6, 9],
    }


def test_an_arm_that_was_stopped_is_left_out_from_then_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run_ranks(_: str, jobs: list[FetchArmJob], *, on_progress: Any, **__: Any) -> list[FetchDone]:
        runs.append(jobs[0].arm.name)
        if jobs[0].arm.name == "as-published":
            on_progress(0, "begin")
            raise RanksStoppedError("the time is over")
        return [FetchDone(seconds=1.0)]

    monkeypatch.setattr(bench, "run_ranks", run_ranks)
    monkeypatch.setattr(bench, "limit_seconds", lambda *_, **__: 1.0)
    record = bench_fetch(checkpoint, 2, arms=["as-published", "loadmaster"], repeat=2)
    assert runs == ["as-published", "loadmaster", "loadmaster"]
    published = record.arms[1]
    assert (published.finished, published.stopped_after is not None) == (False, True)


def test_an_arm_that_fails_ends_the_bench_and_says_which(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(*_: Any, **__: Any) -> list[FetchDone]:
        raise RankError("rank 0 was killed by SIGSEGV, a crash in native code")

    monkeypatch.setattr(bench, "run_ranks", run_ranks)
    with pytest.raises(RankError, match=r"^loadmaster: the consumer was killed by SIGSEGV, a crash in native code$"):
        bench_fetch(checkpoint, 2, arms=["loadmaster"])


@pytest.mark.parametrize("arms", [["as-published-1000"], ["loadmaster", ""], ["limit"]], ids=str)
def test_an_arm_that_is_none_is_an_error_before_anything_is_measured(checkpoint: Path, arms: list[str]) -> None:
    steps: list[str] = []
    with pytest.raises(InputError, match=f"there is no arm '{arms[-1]}'; known are loadmaster, loadmaster-kept, "):
        bench_fetch(checkpoint, 2, arms=arms, on_step=steps.append)
    assert steps == []


# What the published way cannot have


def test_a_small_checkpoint_can_be_published_here(checkpoint: Path) -> None:
    assert why_not_published(open_checkpoint(checkpoint), 8) == ""


def test_a_host_that_lacks_what_segments_need_is_told_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(checkpoint)
    pages = sum(-(-max(1, entry.num_bytes) // PAGE) for entry in opened.values())
    room = SimpleNamespace(f_bavail=pages, f_frsize=PAGE)
    monkeypatch.setattr(bench.os, "statvfs", lambda _: room)
    assert why_not_published(opened, 2) == ""
    room.f_bavail = pages - 1
    assert re.fullmatch(f"{NUM_TENSORS} segments need .* KiB in /dev/shm, and .* are free there", refusal(opened))
    room.f_bavail = pages
    monkeypatch.setattr(bench, "_max_map_count", lambda: bench.OTHER_MAPPINGS + NUM_TENSORS - 1)
    assert "mappings in the consumer, which may have 4102 (vm.max_map_count)" in refusal(opened)
    monkeypatch.setattr(bench, "_max_map_count", lambda: None)
    enough = 2 * NUM_TENSORS + 4 * 2 + bench.OTHER_DESCRIPTORS
    for limited, said in (
        (enough, ""),
        (enough - 1, f"need 14 open files in the consumer, which may have {enough - 1}"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limited=limited: (limited, limited))
        assert (refusal(opened) == "") == (said == "")
        assert said in refusal(opened)
    monkeypatch.setattr(bench, "SEGMENTS", tmp_path / "nowhere")
    assert refusal(opened).endswith("nowhere, which is not there")


def refusal(opened: Any) -> str:
    return why_not_published(opened, 2)


def test_arms_that_cannot_run_are_not_begun(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SEGMENTS", Path("/nowhere"))
    monkeypatch.setattr(bench, "limit_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [FetchDone(seconds=2.0)])
    steps: list[str] = []
    arms = ["as-published", "loadmaster", "as-published-2"]
    record = bench_fetch(checkpoint, 2, arms=arms, repeat=1, on_step=steps.append)
    assert steps == ["limit, 1 of 1", "loadmaster, 1 of 1"]
    why = "segments with a name need /nowhere, which is not there"
    assert record.settings["cannot_run"] == {"as-published": why, "as-published-2": why}
    assert list(_sentences(record))[-1] == f"as-published, as-published-2 cannot run here: {why}"


# What is said and drawn


def made_record(**seconds: float) -> BenchRecord:
    arms = [
        ArmResult(name=name.replace("_", "-"), what="", seconds=[value], num_bytes=1 << 20, tensors=9)
        for name, value in seconds.items()
    ]
    settings = {"procs": 2, "descriptors": {"loadmaster": {"before": 10, "after": 12}}, "cannot_run": {}}
    return BenchRecord(bench="fetch", settings=settings, arms=arms)


def test_the_sentences_compare_with_the_published_way_and_with_the_best_fixed_counts() -> None:
    record = made_record(
        limit=0.5, loadmaster=1.0, loadmaster_1=2.0, loadmaster_2=0.8, as_published=4.0, as_published_1=2.0,
        as_published_2=5.0,
    )  # fmt: skip
    assert list(_sentences(record)) == [
        "loadmaster is 4.0 times as fast as as-published: 1.000 s instead of 4.000 s",
        "loadmaster takes 1.25 of the time of the best fixed count, loadmaster-2",
        "loadmaster takes 0.50 of the time of the best fixed count, as-published-1",
        "loadmaster: the consumer has 2 more open files for 9 tensors, 10 before and 12 with them",
    ]


def test_each_way_and_each_count_is_a_bar_and_no_arm_is_left_out() -> None:
    record = made_record(limit=1, loadmaster=1, loadmaster_kept=1, as_published=1, loadmaster_1=1, as_published_16=1)
    assert [[name for name, _ in panel.arms] for panel in panels(record)] == [
        ["limit", "loadmaster", "loadmaster-kept", "as-published"],
        ["loadmaster-1", "as-published-16"],
    ]
    assert len(panels(made_record(limit=1, loadmaster_kept=1))) == 1


# The limit


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_the_limit_into_shared_memory_reads_as_many_bytes(tmp_path: Path) -> None:
    """The kernel counts what a process reads, and tells as long as nobody has waited for the process."""
    file = tmp_path / "file"
    file.write_bytes(bytes(9 << 20))
    program = limit._program()
    words = [f"/proc/self/fd/{program}", "--shared", "2", str(20 << 20), str(file)]
    with subprocess.Popen(words, pass_fds=[int(program or 0)], stdout=subprocess.PIPE, text=True) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        account = Path(f"/proc/{process.pid}/io").read_text()
        assert process.stdout is not None
        assert float(process.stdout.read()) > 0
    assert process.returncode == 0
    assert 20 << 20 <= int(account.split()[1]) < (20 << 20) + 16384
    assert limit.limit_seconds([str(file)], 1 << 20, 2, shared=True) > 0


@pytest.mark.parametrize("shared", [True, False])
def test_only_shared_memory_was_touched_before_python_reads_into_it(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit._program.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * PAGE))
    seen: list[int] = []
    read_into = limit.read_into

    def look(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.extend(buffers[0][::PAGE])
        return read_into(descriptor, buffers, offset)

    monkeypatch.setattr(limit, "read_into", look)
    assert limit.limit_seconds([str(file)], 3 * PAGE, 1, shared=shared) > 0
    limit._program.cache_clear()
    assert seen == [int(shared)] * 3
