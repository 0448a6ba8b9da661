"""A weights iterator runs its loop in the scope, follows the share, and hands every item on as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.threads import pace
from threads.conftest import counts, needs_two_cpus
from threads.test_contract import OtherThread


@pytest.fixture
def looked_at_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the share be looked at after every item instead of every tenth of a second."""
    monkeypatch.setattr(pace, "LOOK_SECONDS", 0.0)


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about a changed share, in the form ``1 -> 2``."""
    lines = [row.getMessage() for row in caplog.records if row.levelno >= logging.INFO]
    return [line[len("torch intra-op threads: ") :].partition(" (")[0] for line in lines if "restored" not in line]


def test_every_item_comes_in_its_order_and_is_the_very_same() -> None:
    weights = [(f"layer.{i}", torch.zeros(4)) for i in range(20)]
    found = list(lm.paced(iter(weights), 1))
    assert len(found) == len(weights)
    assert all(one is other for one, other in zip(found, weights, strict=True))
    assert list(lm.paced([], 1)) == []


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_the_body_of_the_loop_and_the_source_run_in_the_scope(before: int, threads: int) -> None:
    torch.set_num_threads(before)

    def source() -> Iterator[int]:
        for _ in range(3):
            yield torch.get_num_threads()

    weights = lm.paced(source(), threads)
    assert counts() == (before, before)
    for number in weights:
        assert number == threads
        assert counts() == (threads, 1)
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.usefixtures("looked_at_each_item")
def test_the_count_follows_the_share_once_per_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    wanted = [1, 1, 2, 2, 2, 1, 1]
    seen = []
    with caplog.at_level(logging.INFO, "loadmaster"):
        for threads in lm.paced(wanted):
            seen.append(counts())
            monkeypatch.setenv("LOADMASTER_THREADS", str(threads))
    # What was set after an item holds from the next one on.
    assert seen == [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2), (2, 2), (1, 1)]
    assert changes(caplog) == ["1 -> 2", "2 -> 1"]
    assert counts() == (2, 2)


@needs_two_cpus
@pytest.mark.usefixtures("looked_at_each_item")
def test_a_share_that_grows_never_raises_new_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    seen = []
    for _ in lm.paced(range(3)):
        seen.append(counts())
        monkeypatch.setenv("LOADMASTER_THREADS", "2")
    assert seen == [(1, 1), (2, 1), (2, 1)]
    assert counts() == (1, 1)


@needs_two_cpus
@pytest.mark.usefixtures("looked_at_each_item")
def test_an_explicit_number_never_follows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    with caplog.at_level(logging.INFO, "loadmaster"):
        for threads in lm.paced([2, 1, 2], 1):
            monkeypatch.setenv("LOADMASTER_THREADS", str(threads))
            seen.append(counts())
    assert seen == [(1, 1)] * 3
    assert changes(caplog) == []


@needs_two_cpus
@pytest.mark.usefixtures("looked_at_each_item")
def test_a_scope_in_the_body_keeps_its_own_count_when_the_share_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "2")
    weights = lm.paced(range(3))
    next(weights)
    with lm.load_threads(1):
        monkeypatch.setenv("LOADMASTER_THREADS", "1")
        next(weights)
        monkeypatch.setenv("LOADMASTER_THREADS", "2")
        next(weights)
        assert counts() == (1, 1)
    assert counts() == (2, 2)
    assert list(weights) == []
    assert counts() == (2, 2)


@needs_two_cpus
@pytest.mark.usefixtures("looked_at_each_item")
def test_an_iterator_that_another_thread_goes_on_with_moves_the_count_of_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    weights = lm.paced(range(3))
    next(weights)
    with OtherThread() as other:
        began = other.do(torch.get_num_threads)
        monkeypatch.setenv("LOADMASTER_THREADS", "2")
        other.do(lambda: next(weights))
        assert other.do(torch.get_num_threads) == began
        assert torch.get_num_threads() == 1
    assert list(weights) == [2]
    assert counts() == (2, 2)


def test_the_share_is_not_looked_at_for_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(pace.LoadThreads, "follow", lambda scope: looks.append(scope))
    now = iter(range(10_000))
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(now) * pace.LOOK_SECONDS / 10)
    assert list(lm.paced(range(100))) == list(range(100))
    assert 5 <= len(looks) <= 10


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_source_passes_and_everything_is_put_back(kind: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise kind("of the source")

    found = []
    with pytest.raises(kind, match="of the source"):
        found.extend(lm.paced(source(), 1))
    assert counts() == (2, 2)


def test_an_iterator_that_is_closed_or_dropped_puts_everything_back() -> None:
    weights: Any = lm.paced(range(3), 1)
    next(weights)
    assert counts() == (1, 1)
    weights.close()
    assert counts() == (2, 2)
    assert list(weights) == []
    for number in lm.paced(range(3), 1):
        assert counts() == (1, 1)
        if number == 1:
            break
    assert counts() == (2, 2)


def test_a_source_that_nobody_else_holds_ends_with_its_iterator() -> None:
    ended = []

    def source() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            ended.append(torch.get_num_threads())

    weights: Any = lm.paced(source(), 1)
    next(weights)
    weights.close()
    assert len(ended) == 1


@pytest.mark.parametrize("threads", [0, "two", 1.5], ids=repr)
def test_a_number_that_is_none_is_an_error_at_once(threads: Any) -> None:
    """And not when the first item is asked for."""
    with pytest.raises(InputError, match="threads must be a positive integer or 'auto'"):
        lm.paced([], threads)
