"""The tables that people read, on the narrow terminal that most of them have."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest

from loadmaster.bench.collapse import READER, SIZES, size_arm
from loadmaster.bench.copies import AS_SHIPPED, SCOPE, threads_words
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.cli.bench_collapse import _print_record as print_collapse
from loadmaster.cli.bench_load import print_record
from loadmaster.cli.bench_sweep import _print_record as print_sweep
from loadmaster.cli.load import _print_report
from loadmaster.observe.report import RankReport, Report, Verified

COLUMNS = 80


class Terminal(io.StringIO):
    """Standard output of a terminal."""

    def isatty(self) -> bool:
        return True


def print_report() -> list[str]:
    """Print a load of two ranks; return what a reader looks for."""
    seconds = {"start": 2.345, "open": 0.012, "plan": 0.034, "read": 12.345, "convert": 1.234, "verify": 23.456}
    ranks = [
        RankReport(
            rank=rank,
            tensors=12345,
            bytes_read=145 << 30,
            bytes_placed=123 << 30,
            seconds=seconds,
            threads=16,
            why="64 cores / 2 ranks, at most 16 per process",
            peak_rss=125 << 30,
        )
        for rank in range(2)
    ]
    _print_report(
        Report(checkpoint="x", ranks=ranks, load_seconds=13.6, wall_seconds=40, verified=Verified(24690, 246 << 30))
    )
    return ["12345", "145.0 GiB", "123.0 GiB", "125.0 GiB", "16", *(f"{second:.3f}" for second in seconds.values())]


def print_loads() -> list[str]:
    """Print a bench of three arms, of which one was stopped; return what a reader looks for."""
    arms = [
        ArmResult(name=name, what=name, seconds=seconds, num_bytes=3 << 30, tensors=1000)
        for name, seconds in (("limit", [1.25, 1.5, 1.375]), ("loadmaster-untouched", [2.75, 2.625, 3.125]))
    ]
    arms.append(ArmResult(name="torch-default", what="", seconds=[], num_bytes=1, tensors=1, stopped_after=1131.85))
    print_record(BenchRecord(bench="load", settings={"verified": True}, arms=arms))
    figures = ["1.375", "1.250", "1.500", "2.18", "0.50", "2750.0", "1.09", "2.0", ">1131.8", "stopped"]
    return ["loadmaster-untouched", *figures]


def print_writes() -> list[str]:
    """Print a collapse; return what a reader looks for."""
    record = collapse_record({AS_SHIPPED: (11_500.0, 11_700.0), SCOPE: (20.0, 120.0)})
    print_collapse(record)
    return ["OMP_WAIT_POLICY=PASSIVE", "131.850", "263700.0", "11500.0", "11700.0", "no copy"]


def collapse_record(costs: dict[str, tuple[float, float]]) -> BenchRecord:
    """A collapse of four ranks; ``costs`` are microseconds of 40 KB and of 400 KB, and 4 KB and 4 MB were not run."""
    names = [AS_SHIPPED, "OMP_WAIT_POLICY=PASSIVE", SCOPE, READER]
    arms = [
        ArmResult(name=name, what="", seconds=[seconds], num_bytes=4 << 30, tensors=500)
        for name, seconds in zip(names, (131.85, 4.0, 2.0, 1.0), strict=True)
    ]
    for size in SIZES:
        for name, of_sizes in costs.items():
            cost = dict(zip((40_000, 400_000), of_sizes, strict=True)).get(size)
            seconds = [] if cost is None else [cost / 1e6]
            arms.append(
                ArmResult(
                    name=size_arm(size, name), what="", seconds=seconds, num_bytes=size, tensors=1, stopped_after=0
                )
            )
    done = {name: 43 if name == AS_SHIPPED else 500 for name in names}
    settings = {"ranks": 4, "copies": 500, "copy_bytes": 400_000, "threads_per_rank": None, "copies_done": done}
    return BenchRecord(bench="collapse", settings=settings, arms=arms)


def print_counts() -> list[str]:
    """Print a sweep; return what a reader looks for."""
    print_sweep(sweep_record(share=3))
    return ["3 threads (share)", "131850.0", "1.50", "1 thread "]


def sweep_record(share: int) -> BenchRecord:
    """A sweep in which two threads are the best."""
    seconds = {1: 0.004, 2: 0.002, 3: 0.003, 12: 0.13185}
    arms = [
        ArmResult(name=threads_words(count), what="", seconds=[second], num_bytes=800_000, tensors=1)
        for count, second in seconds.items()
    ]
    settings = {"counts": list(seconds), "best": 2, "share": share, "share_why": "6 cores / 2 ranks"}
    return BenchRecord(bench="sweep", settings=settings, arms=arms)


@pytest.mark.parametrize("show", [print_report, print_loads, print_writes, print_counts])
def test_a_table_fits_a_terminal_of_80_columns_and_cuts_no_number(
    show: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"COLUMNS": str(COLUMNS), "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    wanted = show()
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "…" not in text
    assert [word for word in wanted if word not in text] == []
    table = [line for line in text.splitlines() if "─" in line or "limit" in line or "12345" in line or line[:1] == " "]
    assert table
    assert max(len(line.rstrip()) for line in table) <= COLUMNS


def test_the_limit_is_none_of_the_loads_that_ours_is_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    """In a noisy minute the two C threads of the limit can be the slowest; nothing is faster than them for that."""
    arms = [
        ArmResult(name=name, what=name, seconds=[seconds], num_bytes=1 << 30, tensors=10)
        for name, seconds in (("limit", 9.0), ("loadmaster", 1.0), ("torch-default", 4.0))
    ]
    print_record(BenchRecord(bench="load", settings={"verified": False}, arms=arms))
    assert "loadmaster is 4.0 times as fast as torch-default: 1.000 s instead of 4.000 s" in capsys.readouterr().out
    print_record(BenchRecord(bench="load", settings={"verified": False}, arms=arms[:2]))
    assert "times as fast" not in capsys.readouterr().out


def test_the_sentence_about_copies_stands_only_where_the_figures_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "a cost that does not depend on the size is no copy"
    print_collapse(collapse_record({AS_SHIPPED: (11_500.0, 11_700.0), SCOPE: (20.0, 120.0)}))
    printed = capsys.readouterr().out
    assert f"as shipped, 40 KB cost 11500 us and 400 KB cost 11700 us: {sentence}" in printed
    assert "reckoned from fewer writes, where these took too long: as shipped 43" in printed
    print_collapse(collapse_record({AS_SHIPPED: (20.0, 120.0), SCOPE: (20.0, 120.0)}))
    assert sentence not in capsys.readouterr().out


def test_a_sweep_names_the_best_count_and_what_the_share_would_cost(capsys: pytest.CaptureFixture[str]) -> None:
    print_sweep(sweep_record(share=3))
    words = "the best count is 2 threads; lm.share() chooses 3 threads (6 cores / 2 ranks)"
    assert f"{words}, which takes 1.50 of its time\n" in capsys.readouterr().out
    print_sweep(sweep_record(share=2))
    assert "lm.share() chooses 2 threads (6 cores / 2 ranks)\n" in capsys.readouterr().out
