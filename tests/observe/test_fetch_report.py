"""What the report of a fetch adds up to."""

from __future__ import annotations

import json

import pytest

from loadmaster.observe.fetch_report import FetcherReport, FetchReport


def fetcher(number: int, **seconds: float) -> FetcherReport:
    row = FetcherReport(fetcher=number, pid=100 + number, bundles=2, tensors=3, num_bytes=1 << 20)
    row.seconds.update(seconds)
    return row


def report(*rows: FetcherReport, seconds: float = 2.0, num_bytes: int = 1 << 30) -> FetchReport:
    return FetchReport(version=7, tensors=5, num_bytes=num_bytes, seconds=seconds, fetchers=rows)


def test_a_fetcher_that_has_done_nothing_has_spent_nothing() -> None:
    assert FetcherReport(fetcher=0, pid=1).seconds == {"waiting": 0, "opening": 0, "reading": 0, "assembling": 0}


def test_fetchers_do_not_share_their_seconds() -> None:
    first, second = FetcherReport(fetcher=0, pid=1), FetcherReport(fetcher=1, pid=2)
    first.seconds["reading"] += 1
    assert second.seconds["reading"] == 0


def test_the_rate_is_that_of_the_whole_version() -> None:
    assert report().gib_per_second == 0.5


def test_no_time_is_no_rate() -> None:
    assert report(seconds=0.0).gib_per_second == 0.0


def test_waiting_is_not_busy() -> None:
    even = report(fetcher(0, reading=1.0, opening=1.0, waiting=9.0), fetcher(1, reading=1.5, assembling=0.5))
    assert even.spread == 1.0


def test_the_spread_is_the_busiest_over_the_mean() -> None:
    assert report(fetcher(0, reading=3.0), fetcher(1, reading=1.0)).spread == 1.5


@pytest.mark.parametrize("rows", [(), (fetcher(0),), (fetcher(0, waiting=4.0), fetcher(1))])
def test_nothing_done_is_even(rows: tuple[FetcherReport, ...]) -> None:
    assert report(*rows).spread == 1.0


def test_the_report_is_json_with_every_number() -> None:
    found = json.loads(json.dumps(report(fetcher(0, reading=1.0), fetcher(1, reading=1.0)).as_dict()))
    assert found.pop("fetchers") == [
        {
            "fetcher": number,
            "pid": 100 + number,
            "bundles": 2,
            "stolen": 0,
            "tensors": 3,
            "num_bytes": 1 << 20,
            "seconds": {"waiting": 0.0, "opening": 0.0, "reading": 1.0, "assembling": 0.0},
            "threads": 1,
            "why": "",
        }
        for number in range(2)
    ]
    assert found == {
        "ok": True,
        "version": 7,
        "tensors": 5,
        "bytes": 1 << 30,
        "seconds": 2.0,
        "plan_seconds": 0.0,
        "gib_per_second": 0.5,
        "spread": 1.0,
        "failures": [],
    }


def test_failures_are_told() -> None:
    told = FetchReport(version=None, tensors=0, num_bytes=0, seconds=1.0, fetchers=(), failures=("fetcher 1 hung",))
    assert told.as_dict()["failures"] == ["fetcher 1 hung"]
    assert told.as_dict()["version"] is None
