"""``bench collapse``: every arm on the same bytes, the tell of a cost without copying, and no file left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from loadmaster.bench.collapse import (
    READER,
    SIZES,
    bench_collapse,
    cost_without_copying,
    panels,
    size_arm,
    temporary_checkpoint,
)
from loadmaster.bench.copies import AS_SHIPPED, SCOPE, fixed_counts, threads_words
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError, LoadmasterError

COMMAND = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))


def run_bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": os.fspath(folder)}
    words = [COMMAND, "bench", "collapse", "--ranks", "1", "--copy-bytes", "2000", "--repeat", "1", *options]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_the_record_has_every_arm_and_nothing_is_left(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--threads-per-rank", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    assert list(record) == ["bench", "machine", "versions", "command", "date", "settings", "arms"]
    fixed = [threads_words(count) for count in fixed_counts(record["machine"]["cores"])]
    names = [AS_SHIPPED, "OMP_WAIT_POLICY=ACTIVE", "OMP_WAIT_POLICY=PASSIVE", *fixed, SCOPE, READER]
    sizes = [size_arm(size, name) for size in SIZES for name in (AS_SHIPPED, SCOPE)]
    assert [arm["name"] for arm in record["arms"]] == [*names, *sizes]
    for arm in record["arms"][: len(names)]:
        assert (arm["bytes"], arm["tensors"]) == (500 * 2000, 500)
    assert all(arm["median_seconds"] > 0 for arm in record["arms"])
    assert "3 threads" in record["arms"][0]["what"]
    assert record["settings"]["copies_done"] == dict.fromkeys(names, 500)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_to_read_are_those_that_are_written() -> None:
    with temporary_checkpoint(3, 9_000_001) as path, safe_open(path, "np") as opened:
        tensors = [opened.get_tensor(name) for name in sorted(opened.keys())]
        assert [tensor.shape for tensor in tensors] == [(9_000_001,)] * 3
        assert all(tensor.any() for tensor in tensors)
    assert not Path(path).parent.exists()


def test_the_file_is_removed_when_the_block_fails() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), temporary_checkpoint(1, 10) as path:
        raise KeyboardInterrupt
    assert not Path(path).parent.exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_file_is_removed_when_the_process_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "from loadmaster.bench.collapse import temporary_checkpoint\n"
        "with temporary_checkpoint(1, 10):\n"
        f"    os.kill(os.getpid(), {int(number)}); time.sleep(30)"
    )
    environment = {**os.environ, "TMPDIR": os.fspath(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "nowhere"))
    with pytest.raises(LoadmasterError, match=r"set TMPDIR to another folder$"), temporary_checkpoint(2, 10):
        pass


def record_of(shipped: dict[int, float], scope: dict[int, float]) -> BenchRecord:
    """A record of nothing but the microseconds of one copy, by size."""
    arms = [
        ArmResult(name=size_arm(size, name), what="", seconds=[cost / 1e6], num_bytes=size, tensors=1)
        for name, costs in ((AS_SHIPPED, shipped), (SCOPE, scope))
        for size, cost in costs.items()
    ]
    return BenchRecord(bench="collapse", settings={}, arms=arms)


SCOPE_COSTS = {4_000: 2.0, 40_000: 10.0, 400_000: 100.0, 4_000_000: 1000.0}
COSTS: dict[str, tuple[dict[int, float], tuple[int, int] | None]] = {
    "collapsed": ({4_000: 2.0, 40_000: 11_000.0, 400_000: 11_500.0, 4_000_000: 24_000.0}, (40_000, 400_000)),
    "at all sizes": ({4_000: 9000.0, 40_000: 9100.0, 400_000: 9200.0, 4_000_000: 9300.0}, (4_000, 4_000_000)),
    "healthy": (SCOPE_COSTS, None),
    "half as slow": ({4_000: 2.0, 40_000: 20.0, 400_000: 200.0, 4_000_000: 2000.0}, None),
    "what every call costs": ({4_000: 5.0, 40_000: 9.0, 400_000: 90.0, 4_000_000: 900.0}, None),
    "stopped": ({4_000: 2.0, 40_000: 11_000.0}, None),
}


@pytest.mark.parametrize(("shipped", "sizes"), COSTS.values(), ids=COSTS)
def test_a_cost_that_does_not_depend_on_the_size_is_found(
    shipped: dict[int, float], sizes: tuple[int, int] | None
) -> None:
    assert cost_without_copying(record_of(shipped, SCOPE_COSTS)) == sizes


def test_the_picture_has_the_writes_as_bars_and_the_sizes_as_curves() -> None:
    record = record_of(SCOPE_COSTS, SCOPE_COSTS)
    writes = [
        ArmResult(name=name, what="", seconds=[1.0], num_bytes=1, tensors=1) for name in (AS_SHIPPED, SCOPE, READER)
    ]
    settings = {"ranks": 4, "copies": 500, "copy_bytes": 400_000}
    bars, curves = panels(BenchRecord(bench="collapse", settings=settings, arms=[*writes, *record.arms]))
    assert [name for name, _ in bars.arms] == [AS_SHIPPED, SCOPE, READER]
    assert {name: [place for place, _ in curve] for name, curve in curves.curves.items()} == {
        AS_SHIPPED: list(SIZES),
        SCOPE: list(SIZES),
    }


@pytest.mark.parametrize("settings", [{"ranks": 0}, {"copy_bytes": 0}, {"threads_per_rank": 0}], ids=str)
def test_settings_that_cannot_be_are_an_error_before_anything_is_written(
    settings: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="must be at least 1"):
        bench_collapse(**settings)
