"""The tables that people read, on the narrow terminal that most of them have."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest

from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.cli.bench_load import print_record
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


def print_record() -> list[str]:
    """Print a bench of two arms; return what a reader looks for."""
    arms = [
        ArmResult(name=name, what=name, seconds=seconds, num_bytes=3 << 30, tensors=1000)
        for name, seconds in (("limit", [1.25, 1.5, 1.375]), ("loadmaster-untouched", [2.75, 2.625, 3.125]))
    ]
    print_record(BenchRecord(bench="load", settings={"verified": True}, arms=arms))
    return ["loadmaster-untouched", "1.375", "1.250", "1.500", "2.18", "0.50", "2750.0", "1.09", "2.0"]


@pytest.mark.parametrize("show", [print_report, print_record])
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
    table = [line for line in text.splitlines() if "─" in line or "limit" in line or "12345" in line]
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
