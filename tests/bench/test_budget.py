"""A budget says what still fits, and how long one arm may take while others wait for their turn."""

from __future__ import annotations

import time

import pytest

from loadmaster.bench.budget import Budget
from loadmaster.errors import InputError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the monotonic clock shows, to be moved by the test."""
    now = [500.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_part_of_the_time_is_kept_for_the_end_and_never_much(clock: list[float]) -> None:
    assert Budget(10).left == pytest.approx(8.5)
    assert Budget(1000).left == pytest.approx(995)


def test_what_is_left_goes_down_to_nothing(clock: list[float]) -> None:
    budget = Budget(10)
    clock[0] += 5
    assert budget.left == pytest.approx(3.5)
    assert budget.fits(3.4)
    assert not budget.fits(3.6)
    clock[0] += 50
    assert budget.left == 0


def test_an_arm_may_take_half_of_what_is_left_and_the_last_one_all(clock: list[float]) -> None:
    budget = Budget(10)
    assert budget.part(3) == pytest.approx(8.5 / 2)
    assert budget.part(0) == pytest.approx(8.5)


def test_sections_get_as_much_of_what_is_left(clock: list[float]) -> None:
    budget = Budget(10)
    section = budget.portion(4)
    assert section.left == pytest.approx(8.5 / 4)
    clock[0] += 1
    assert budget.portion(3).left == pytest.approx(7.5 / 3), "what one does not use is for the others"


@pytest.mark.parametrize("seconds", [0, 0.5, -3, float("nan")])
def test_less_than_a_second_is_no_time(seconds: float) -> None:
    with pytest.raises(InputError, match="--seconds must be at least 1"):
        Budget(seconds)
