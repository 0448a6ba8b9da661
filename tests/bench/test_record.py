"""How noisy a bench was is one sentence, about the arm whose repetitions are furthest apart."""

from __future__ import annotations

from loadmaster.bench.record import ArmResult, noise


def arm(name: str, *seconds: float) -> ArmResult:
    return ArmResult(name=name, what="", seconds=seconds, num_bytes=1, tensors=1)


def test_the_largest_spread_is_named_with_its_arm() -> None:
    assert noise([arm("a", 1.0, 1.1, 1.2), arm("b", 0.1, 0.2, 0.4, 0.2), arm("c", 3.0)]) == (
        "noise: the largest spread, (max - min) / median, is 1.50, that of 'b' in 4 repetitions"
    )


def test_one_repetition_tells_nothing_of_the_noise() -> None:
    assert noise([arm("a", 1.0), arm("b")]) == "no arm ran more than once, so that nothing tells how noisy this was"


def test_an_arm_that_takes_no_time_has_no_spread() -> None:
    assert noise([arm("a", 0.0, 0.0)]).endswith("is 0.00, that of 'a' in 2 repetitions")
