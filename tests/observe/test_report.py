"""Phases that add up, and a report whose JSON programs rely on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.observe import report as report_module
from loadmaster.observe.report import PHASES, PhaseClock, RankReport, Report, Verified, failed_report


def rank_report(rank: int = 0, **changes: Any) -> RankReport:
    seconds = {"start": 8.0, "open": 0.5, "plan": 0.25, "read": 1.0, "convert": 0.25, "verify": 4.0}
    fields: dict[str, Any] = {
        "tensors": 3,
        "bytes_read": 3 << 30,
        "bytes_placed": 2 << 30,
        "seconds": seconds,
        "threads": 4,
        "why": "8 cores / 2 ranks",
        "peak_rss": 5 << 30,
    }
    return RankReport(rank=rank, **(fields | changes))


def set_times(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Let the clock show these times, one after the other."""
    monkeypatch.setattr(report_module, "perf_counter", iter(times).__next__)


def test_the_phases_are_these_in_this_order() -> None:
    assert PHASES == ("start", "open", "plan", "read", "convert", "verify")
    assert list(PhaseClock().seconds.items()) == [(phase, 0.0) for phase in PHASES]


def test_a_phase_takes_the_time_of_its_block_and_may_be_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, 10.0, 10.5, 20.0, 22.0, 30.0, 30.25)
    clock = PhaseClock()
    with clock.phase("open"):
        pass
    with clock.phase("read"):
        pass
    with clock.phase("open"):
        pass
    assert clock.seconds == {**dict.fromkeys(PHASES, 0.0), "open": 0.75, "read": 2.0}


def test_a_phase_that_fails_has_taken_its_time_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, 1.0, 4.0)
    clock = PhaseClock()
    with pytest.raises(ZeroDivisionError), clock.phase("verify"):
        raise ZeroDivisionError
    assert clock.seconds["verify"] == 3.0


def test_two_clocks_do_not_share_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, 1.0, 2.0)
    first, second = PhaseClock(), PhaseClock()
    with first.phase("plan"):
        pass
    assert second.seconds["plan"] == 0.0


def test_a_phase_that_is_none_is_an_error() -> None:
    with pytest.raises(KeyError, match="pause"), PhaseClock().phase("pause"):
        pass


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_a_split_moves_a_part_and_keeps_the_sum(read: float, convert: float, part: float) -> None:
    clock = PhaseClock()
    clock.seconds |= {"read": read, "convert": convert}
    clock.split("read", "convert", part)
    assert math.isclose(clock.seconds["convert"], convert + read * part, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(sum(clock.seconds.values()), read + convert, rel_tol=1e-9, abs_tol=1e-9)
    assert clock.seconds["read"] >= 0


def test_the_load_seconds_of_a_rank_are_those_between_start_and_verify() -> None:
    assert rank_report().load_seconds == 2.0


def test_a_report_counts_the_bytes_of_all_ranks_over_the_load_seconds() -> None:
    report = Report(
        checkpoint="model",
        ranks=[rank_report(), rank_report(1, bytes_placed=1 << 30)],
        load_seconds=1.5,
        wall_seconds=9,
    )
    assert report.bytes_placed == 3 << 30
    assert report.gib_per_second == 2.0


def test_a_report_of_nothing_has_a_rate_of_zero() -> None:
    assert Report(checkpoint="model", ranks=[], load_seconds=0.0, wall_seconds=0.0).gib_per_second == 0.0


@pytest.mark.parametrize("verified", [None, Verified(6, 4 << 30)], ids=["not verified", "verified"])
def test_the_json_of_a_report_is_this(verified: Verified | None) -> None:
    report = Report(
        checkpoint="a/model",
        ranks=(rank_report(), rank_report(1)),
        load_seconds=2.0,
        wall_seconds=14.0,
        verified=verified,
    )
    seconds = {"start": 8.0, "open": 0.5, "plan": 0.25, "read": 1.0, "convert": 0.25, "verify": 4.0}
    rank = {
        "tensors": 3,
        "bytes_read": 3 << 30,
        "bytes_placed": 2 << 30,
        "seconds": seconds,
        "threads": 4,
        "why": "8 cores / 2 ranks",
        "peak_rss": 5 << 30,
    }
    wanted = {
        "ok": True,
        "checkpoint": "a/model",
        "ranks": [{"rank": 0, **rank}, {"rank": 1, **rank}],
        "load_seconds": 2.0,
        "wall_seconds": 14.0,
        "gib_per_second": 2.0,
        "verified": None if verified is None else {"tensors": 6, "bytes": 4 << 30},
    }
    assert json.dumps(report.as_dict()) == json.dumps(wanted)  # the order counts as well


def test_the_json_of_a_failed_load_has_the_keys_of_a_report_and_no_result() -> None:
    report = Report(checkpoint="model", ranks=[], load_seconds=0.0, wall_seconds=0.0)
    failed = failed_report("model", 3.5)
    assert list(failed) == list(report.as_dict())
    assert failed == {
        "ok": False,
        "checkpoint": "model",
        "ranks": [],
        "load_seconds": None,
        "wall_seconds": 3.5,
        "gib_per_second": None,
        "verified": None,
    }
