"""The arenas of a pool: two versions at most, and memory that is used again only where nobody uses it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.helpers.waiting import in_time
from loadmaster.errors import FetchError, SharedMemoryError
from loadmaster.fetch import arenas
from loadmaster.fetch.arenas import ArenaKeeper, KeyedArena
from loadmaster.fetch.shared_memory import SharedArena

SIZES = [4096, 8192]


def used() -> tuple[int, int]:
    """Open descriptors and mappings of arenas."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("loadmaster-weights" in line for line in maps)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = used()
    yield
    gc.collect()
    assert used() == before


@pytest.fixture
def plain() -> Iterator[ArenaKeeper]:
    keeper = ArenaKeeper(False)
    yield keeper
    keeper.close()


@pytest.fixture
def keeping() -> Iterator[ArenaKeeper]:
    keeper = ArenaKeeper(True)
    yield keeper
    keeper.close()


def keys(taken: list[KeyedArena]) -> list[int]:
    return [one.key for one in taken]


def test_one_arena_for_each_size_and_numbers_never_repeat(plain: ArenaKeeper) -> None:
    seen: list[int] = []
    for version in range(5):
        taken = plain.take(version, SIZES)
        assert [one.arena.num_bytes for one in taken] == SIZES
        seen += keys(taken)
        assert plain.give_back(taken)
    assert seen == sorted(set(seen))
    assert plain.stale() == seen
    assert plain.stale() == []


def test_a_third_version_is_refused(plain: ArenaKeeper) -> None:
    first, second = plain.take(5, SIZES), plain.take(None, SIZES)
    sentence = "versions 5 and None are still in memory; close one of them before version 7 is fetched"
    with pytest.raises(FetchError) as caught:
        plain.take(7, SIZES)
    assert str(caught.value) == sentence
    plain.give_back(first)
    third = plain.take(7, SIZES)
    plain.give_back(second)
    plain.give_back(third)


def test_the_same_version_counts_twice(plain: ArenaKeeper) -> None:
    """Arenas are told apart by what they are, and not by their version or sizes."""
    first, second = plain.take(1, SIZES), plain.take(1, SIZES)
    plain.give_back(second)
    assert first[0].arena.handle().inode
    plain.give_back(first)


def test_more_than_there_is_is_refused_and_nothing_is_taken(
    plain: ArenaKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int, what: str) -> None:
        raise SharedMemoryError(f"{what}: {num_bytes}")

    monkeypatch.setattr(arenas, "check_available", refuse)
    for _ in range(3):
        with pytest.raises(SharedMemoryError, match="the weights of version 1: 12288"):
            plain.take(1, SIZES)
    monkeypatch.undo()
    plain.give_back(plain.take(1, SIZES))


def test_an_arena_that_cannot_be_made_puts_the_others_away(plain: ArenaKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    create, left = SharedArena.create, [1]

    def refuse_the_second(num_bytes: int, name: str = "weights") -> SharedArena:
        if not left:
            raise SharedMemoryError("no more")
        left.pop()
        return create(num_bytes, name)

    monkeypatch.setattr(SharedArena, "create", refuse_the_second)
    before = used()
    with pytest.raises(SharedMemoryError, match="no more"):
        plain.take(1, SIZES)
    assert used() == before
    monkeypatch.undo()
    taken = plain.take(1, SIZES)
    assert 0 not in keys(taken)
    plain.give_back(taken)


@pytest.mark.parametrize(("sizes", "again"), [(SIZES, True), ([1, 8192], True), ([4097, 8192], False), ([9], False)])
def test_kept_memory_is_used_where_it_fits(sizes: list[int], again: bool, keeping: ArenaKeeper) -> None:
    first = keeping.take(1, SIZES)
    first_keys = keys(first)
    assert keeping.give_back(first)
    assert keeping.stale() == []
    second = keeping.take(2, sizes)
    assert (keys(second) == first_keys) is again
    assert keeping.stale() == ([] if again else first_keys)
    keeping.give_back(second)


def test_only_one_version_is_kept(keeping: ArenaKeeper) -> None:
    first, second = keeping.take(1, SIZES), keeping.take(2, SIZES)
    keeping.give_back(first)
    keeping.give_back(second)
    assert keeping.stale() == keys(second)


def test_memory_in_use_is_not_kept(keeping: ArenaKeeper) -> None:
    taken = keeping.take(1, SIZES)
    tensor = taken[1].arena.tensor(0, "U8", (4,)).fill_(7)
    assert not keeping.give_back(taken)
    assert keeping.stale() == keys(taken)
    other = keeping.take(2, SIZES)
    assert set(keys(other)).isdisjoint(keys(taken))
    other[1].arena.tensor(0, "U8", (4,)).fill_(1)
    assert tensor.tolist() == [7] * 4
    keeping.give_back(other)


def test_memory_of_a_version_that_was_given_up_is_not_kept(keeping: ArenaKeeper) -> None:
    taken = keeping.take(1, SIZES)
    keeping.give_back(taken, complete=False)
    assert keeping.stale() == keys(taken)


def test_closing_lets_go_of_what_is_kept_and_of_what_comes_back_later(keeping: ArenaKeeper) -> None:
    first, second = keeping.take(1, SIZES), keeping.take(2, SIZES)
    keeping.give_back(first)
    keeping.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first[0].arena.descriptor)
    assert second[0].arena.tensor(0, "U8", (1,)).item() == 0
    keeping.give_back(second)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(second[0].arena.descriptor)


def test_nothing_to_take(plain: ArenaKeeper) -> None:
    assert plain.take(1, []) == []
    taken = plain.take(2, [0, 0])
    assert [one.arena.num_bytes for one in taken] == [0, 0]
    plain.give_back(taken)


class Forgotten:
    """Weights that nobody closed, in a cycle, so that they are collected at any moment and in any thread."""

    def __init__(self, keeper: ArenaKeeper, taken: list[KeyedArena]) -> None:
        self.keeper, self.taken, self.cycle = keeper, taken, self

    def __del__(self) -> None:
        self.keeper.give_back(self.taken)


def test_weights_that_are_collected_while_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs wherever memory is asked for, also inside of the keeper."""
    keeper = ArenaKeeper(False)
    monkeypatch.setattr(arenas, "check_available", lambda *_: gc.collect())
    Forgotten(keeper, keeper.take(1, SIZES))
    taken = in_time(lambda: keeper.take(2, SIZES), lambda: None)
    keeper.give_back(taken)
    taken, other = keeper.take(3, SIZES), keeper.take(4, SIZES)  # the first one counts no more
    keeper.give_back(taken)
    keeper.give_back(other)
