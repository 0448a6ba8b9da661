"""A weights iterator runs its loop in the scope, follows the share, and hands every item on as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.share import Share, lease
from threads.conftest import counts, needs_two_cpus
from threads.test_contract import OtherThread


@pytest.fixture
def set_share(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let a test say what this process's share is, as neighbours that come and go would."""
    real = lease.Lease.look
    wanted: list[int] = []
    known: dict[int, Share] = {}

    def look(held: lease.Lease) -> Share:
        found = real(held)
        if not wanted or held._settings.explicit is not None:
            return found
        part = replace(found, threads=wanted[0], why=f"a share of {wanted[0]}")
        return known.setdefault(wanted[0], part)

    monkeypatch.setattr(lease.Lease, "look", look)

    def set_to(threads: int) -> None:
        wanted[:] = [threads]

    return set_to


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
def test_the_count_follows_the_share_once_per_change(
    set_share: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_share(1)
    wanted = [1, 1, 2, 2, 2, 1, 1]
    seen = []
    with caplog.at_level(logging.INFO, "loadmaster"):
        for threads in lm.paced(wanted):
            seen.append(counts())
            set_share(threads)
    # What was set after an item holds from the next one on.
    assert seen == [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2), (2, 2), (1, 1)]
    assert changes(caplog) == ["1 -> 2", "2 -> 1"]
    assert counts() == (2, 2)


@needs_two_cpus
def test_a_share_that_grows_never_raises_new_threads(set_share: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    set_share(1)
    seen = []
    for _ in lm.paced(range(3)):
        seen.append(counts())
        set_share(2)
    assert seen == [(1, 1), (2, 1), (2, 1)]
    assert counts() == (1, 1)


@needs_two_cpus
def test_an_explicit_number_never_follows(set_share: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    with caplog.at_level(logging.INFO, "loadmaster"):
        for threads in lm.paced([2, 1, 2], 1):
            set_share(threads)
            seen.append(counts())
    assert seen == [(1, 1)] * 3
    assert changes(caplog) == []


@needs_two_cpus
def test_a_scope_in_the_body_keeps_its_own_count_when_the_share_changes(set_share: Callable[[int], None]) -> None:
    set_share(2)
    weights = lm.paced(range(3))
    next(weights)
    with lm.load_threads(1):
        set_share(1)
        next(weights)
        set_share(2)
        next(weights)
        assert counts() == (1, 1)
    assert counts() == (2, 2)
    assert list(weights) == []
    assert counts() == (2, 2)


@needs_two_cpus
def test_an_iterator_that_another_thread_goes_on_with_moves_the_count_of_neither(
    set_share: Callable[[int], None],
) -> None:
    set_share(1)
    weights = lm.paced(range(3))
    next(weights)
    with OtherThread() as other:
        began = other.do(torch.get_num_threads)
        set_share(2)
        other.do(lambda: next(weights))
        assert other.do(torch.get_num_threads) == began
        assert torch.get_num_threads() == 1
    assert list(weights) == [2]
    assert counts() == (2, 2)


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
