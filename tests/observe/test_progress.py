"""Progress: a line now and then in a log, a row per rank on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from types import SimpleNamespace

import pytest

from loadmaster.observe import progress as progress_module
from loadmaster.observe.progress import LineProgress, NoProgress, TerminalProgress, progress_display
from observe.helpers.terminal import run_on_terminal

GIB = 1 << 30


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_a_line_tells_amounts_rate_time_left_and_the_part_of_each_rank(clock: Clock) -> None:
    stream = io.StringIO()
    with LineProgress(2, stream, seconds=0) as display:
        display.update(0, 0, GIB)
        display.update(1, 0, 3 * GIB)
        stream.truncate(stream.seek(0))
        clock.now += 2
        display.update(1, GIB, 3 * GIB)
        clock.now += 2
        display.update(0, GIB, GIB)
    assert stream.getvalue().splitlines() == [
        "loading: 1.00 GiB of 4.00 GiB, 512.0 MiB/s, 6.000 s left (rank 0 0 %, rank 1 33 %)",
        "loading: 2.00 GiB of 4.00 GiB, 512.0 MiB/s, 4.000 s left (rank 0 100 %, rank 1 33 %)",
    ]


def test_lines_come_no_more_often_than_asked_for(clock: Clock) -> None:
    stream = io.StringIO()
    display = LineProgress(1, stream, seconds=3)
    counts = []
    for step in range(10):
        display.update(0, step, 10)
        counts.append(stream.getvalue().count("\n"))
        clock.now += 1
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_a_load_that_takes_less_than_the_interval_prints_no_line(clock: Clock) -> None:
    stream = io.StringIO()
    with progress_display(1, quiet=False, stream=stream) as display:
        display.update(0, 0, GIB)
        clock.now += 2.9
        display.update(0, GIB, GIB)
    assert stream.getvalue() == ""


def test_the_rate_does_not_count_the_time_before_the_first_rank_reads(clock: Clock) -> None:
    """Before it the ranks start, each importing torch."""
    stream = io.StringIO()
    display = LineProgress(1, stream, seconds=3)
    clock.now += 10
    display.update(0, 0, 4 * GIB)
    clock.now += 4
    display.update(0, GIB, 4 * GIB)
    assert stream.getvalue().splitlines()[-1] == (
        "loading: 1.00 GiB of 4.00 GiB, 256.0 MiB/s, 12.0 s left (rank 0 25 %)"
    )


def test_a_rank_that_has_nothing_to_load_divides_by_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    LineProgress(1, stream, seconds=0).update(0, 0, 0)
    assert stream.getvalue() == "loading: 0 bytes of 0 bytes, 0 bytes/s, ? left (rank 0 0 %)\n"


def test_a_line_is_flushed(clock: Clock) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    LineProgress(1, stream, seconds=0).update(0, 1, 1)
    assert raw.getvalue().startswith(b"loading: ")
    stream.close()


def test_the_display_suits_the_stream() -> None:
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal:
            assert type(progress_display(1, quiet=False, stream=terminal)) is TerminalProgress
            assert type(progress_display(1, quiet=True, stream=terminal)) is NoProgress
        assert type(progress_display(1, quiet=False, stream=io.StringIO())) is LineProgress
        assert type(progress_display(1, quiet=True, stream=io.StringIO())) is NoProgress
    finally:
        os.close(ours)


def test_no_progress_takes_note_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with NoProgress() as display:
        display.update(0, 1, 2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.processes
def test_a_terminal_shows_a_row_for_every_rank_and_is_clean_afterwards() -> None:
    code = (
        "from loadmaster.observe.progress import progress_display\n"
        "with progress_display(3, quiet=False) as display:\n"
        "    display.update(0, 1 << 30, 4 << 30)\n"
        "    display.update(2, 3 << 20, 3 << 20)\n"
    )
    exit_code, stdout, shown = run_on_terminal([sys.executable, "-c", code])
    assert (exit_code, stdout) == (0, "")
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    rows = {line.split()[1]: line for line in re.split(r"[\r\n]+", plain) if line.startswith("rank ")}
    assert sorted(rows) == ["0", "1", "2"]
    assert "1.0/4.0 GiB" in rows["0"]
    assert "3.0/3.0 MiB" in rows["2"]
    assert shown[shown.rindex("rank 2") :].count("\x1b[2K") >= 3  # the rows are erased
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # and the cursor is back
