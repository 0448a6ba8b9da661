"""Numbers as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadmaster.observe.words import format_bytes, format_seconds

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (900, "900 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (12 << 20, "12.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (9.99 * (1 << 30), "9.99 GiB"),
        (10 << 30, "10.0 GiB"),
        (2 << 40, "2.00 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (1536.5, "1.50 KiB"),
    ],
)
def test_bytes_have_the_unit_that_suits_them(count: float, words: str) -> None:
    assert format_bytes(count) == words


@given(st.integers(0, 1 << 60))
@example((1 << 20) - 1)
def test_bytes_say_the_number_to_half_a_percent(count: int) -> None:
    number, unit = format_bytes(count).split()
    assert float(number) * UNITS[unit] == pytest.approx(count, rel=0.006)
    assert unit == "bytes" or float(number) >= 1
    assert unit == "TiB" or float(number) <= 1024


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.000 s"),
        (0.1316, "0.132 s"),
        (9.5, "9.500 s"),
        (12.44, "12.4 s"),
        (60, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (7200, "120 min 0 s"),
    ],
)
def test_seconds_are_said_as_exactly_as_they_matter(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


@given(st.floats(0, 1e6))
@example(59.97)
@example(119.7)
def test_seconds_say_the_number_to_a_percent(seconds: float) -> None:
    words = format_seconds(seconds)
    match = re.fullmatch(r"(?:(\d+) min )?([\d.]+) s", words)
    assert match is not None
    said = 60 * int(match[1] or 0) + float(match[2])
    assert said == pytest.approx(seconds, rel=0.01, abs=0.001)
    assert match[1] is None or float(match[2]) < 60
