"""How tensors are dealt: every byte once, each in its place, and evenly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.checkpoint.dtypes import DTYPES
from loadmaster.fetch.deal import LARGEST_BUNDLE, SMALLEST_SPLIT, Deal, deal
from loadmaster.fetch.shared_memory import ALIGNMENT
from loadmaster.fetch.source import SourceEntry

Tensors = Sequence[tuple[str, SourceEntry]]

sizes = st.sampled_from([0, 1, 2, 3, 7, 64, 100, 1000, 4096, 70_000])
shapes = st.one_of(
    st.just(()),
    st.tuples(sizes),
    st.tuples(sizes, st.sampled_from([0, 1, 5, 64, 1000])),
    st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 500)),
)
entries = st.builds(SourceEntry, shapes, st.sampled_from(sorted(name for name in DTYPES if DTYPES[name].bits >= 8)))
many = st.lists(entries, max_size=40).map(lambda found: [(f"t{number}", entry) for number, entry in enumerate(found)])
fetchers = st.integers(1, 9)


def spans_of(dealt: Deal, entries: dict[str, SourceEntry]) -> dict[str, list[tuple[int, int]]]:
    """The rows of each tensor that are read, in order; checks that each part is where the place says."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in entries}
    for bundle in (bundle for queue in dealt.queues for bundle in queue):
        assert bundle.num_bytes == sum(part.num_bytes for part in bundle.parts) > 0
        for part in bundle.parts:
            entry, place = entries[part.name], dealt.places[part.name]
            assert place.arena == bundle.arena
            assert part.offset == place.offset + part.start * entry.row_bytes
            assert part.num_bytes == (part.stop - part.start) * entry.row_bytes
            assert part.whole == ((part.start, part.stop) == (0, entry.rows))
            assert bundle.start <= part.offset
            assert part.offset + part.num_bytes <= bundle.stop
            spans[part.name].append((part.start, part.stop))
    return {name: sorted(rows) for name, rows in spans.items()}


def check(tensors: Tensors, procs: int, dealt: Deal) -> None:
    entries = dict(tensors)
    assert set(dealt.places) == set(entries)
    assert len(dealt.queues) == len(dealt.arena_bytes) == procs
    assert dealt.num_bytes == sum(entry.num_bytes for entry in entries.values())
    for name, rows in spans_of(dealt, entries).items():
        entry = entries[name]
        edges = [0, *(stop for _, stop in rows)]
        assert rows == list(itertools.pairwise(edges)), "rows are missing or read twice"
        assert edges[-1] == (entry.rows if entry.num_bytes else 0)
    taken: dict[int, list[tuple[int, int]]] = {}
    for name, place in dealt.places.items():
        assert (place.dtype, place.shape) == (entries[name].dtype, entries[name].shape)
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.arena < procs
        assert place.offset + entries[name].num_bytes <= dealt.arena_bytes[place.arena]
        if entries[name].num_bytes:
            taken.setdefault(place.arena, []).append((place.offset, place.offset + entries[name].num_bytes))
    for held in taken.values():
        held.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(held)), "places overlap"
    bundles: dict[int, list[tuple[int, int]]] = {}
    for bundle in (bundle for queue in dealt.queues for bundle in queue):
        assert 0 <= bundle.start < bundle.stop <= dealt.arena_bytes[bundle.arena]
        bundles.setdefault(bundle.arena, []).append((bundle.start, bundle.stop))
    for held in bundles.values():
        held.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(held)), "bundles overlap"


@given(many, fetchers, st.booleans())
def test_every_byte_is_dealt_once_and_has_a_place_of_its_own(tensors: Tensors, procs: int, can_split: bool) -> None:
    check(tensors, procs, deal(tensors, procs, can_split))


@given(many, fetchers)
def test_whole_tensors_stay_whole(tensors: Tensors, procs: int) -> None:
    dealt = deal(tensors, procs, can_split=False)
    parts = [part for queue in dealt.queues for bundle in queue for part in bundle.parts]
    assert all(part.whole for part in parts)
    assert sorted(part.name for part in parts) == sorted(name for name, entry in tensors if entry.num_bytes)


@given(many, fetchers, st.booleans())
def test_the_fullest_queue_is_above_the_mean_by_one_bundle_at_most(
    tensors: Tensors, procs: int, can_split: bool
) -> None:
    dealt = deal(tensors, procs, can_split)
    loads = [sum(bundle.num_bytes for bundle in queue) for queue in dealt.queues]
    largest = max((bundle.num_bytes for queue in dealt.queues for bundle in queue), default=0)
    assert max(loads) <= sum(loads) / procs + largest


@given(st.integers(2, 9), st.integers(2, 5000), st.integers(1, 300))
def test_a_tensor_above_one_share_of_all_is_split(procs: int, rows: int, columns: int) -> None:
    entry = SourceEntry((rows, columns), "F32")
    dealt = deal([("big", entry), ("small", SourceEntry((10,), "U8"))], procs)
    parts = [part for queue in dealt.queues for bundle in queue for part in bundle.parts if part.name == "big"]
    most = max(SMALLEST_SPLIT, -(-(entry.num_bytes + 10) // procs))
    assert (len(parts) > 1) == (entry.num_bytes > most)
    assert max(part.num_bytes for part in parts) <= most + entry.row_bytes


@given(many, fetchers, st.booleans())
def test_a_deal_is_the_same_each_time(tensors: Tensors, procs: int, can_split: bool) -> None:
    assert deal(tensors, procs, can_split) == deal(list(tensors), procs, can_split)


@pytest.mark.parametrize("procs", [1, 2, 8])
def test_half_of_all_bytes_in_one_tensor_is_dealt_evenly(procs: int) -> None:
    half = SourceEntry((64_000, 1024), "BF16")
    others = [(f"t{number}", SourceEntry((64, 1024), "BF16")) for number in range(1000)]
    for tensors in ([("half", half), *others], [*others, ("half", half)]):
        loads = [sum(bundle.num_bytes for bundle in queue) for queue in deal(tensors, procs).queues]
        assert max(loads) <= 1.04 * sum(loads) / procs


def test_no_bundle_of_a_large_version_is_too_large() -> None:
    dealt = deal([(f"t{number}", SourceEntry((1 << 16, 1 << 14), "BF16")) for number in range(3)], 4)
    rows = 1 << 15
    assert max(bundle.num_bytes for queue in dealt.queues for bundle in queue) <= LARGEST_BUNDLE + rows


def test_a_tensor_of_one_row_cannot_be_split() -> None:
    dealt = deal([("flat", SourceEntry((1, 1 << 20), "F32")), ("scalar", SourceEntry((), "F64"))], 4)
    parts = sorted(part.name for queue in dealt.queues for bundle in queue for part in bundle.parts)
    assert parts == ["flat", "scalar"]


@pytest.mark.parametrize("procs", [1, 3])
def test_without_tensors_there_is_nothing_to_do(procs: int) -> None:
    assert deal([], procs) == Deal({}, [[]] * procs, [0] * procs)


def test_tensors_without_elements_have_a_place_and_no_work() -> None:
    tensors = [("a", SourceEntry((0,), "BF16")), ("b", SourceEntry((3, 0, 2), "F32")), ("c", SourceEntry((0, 9), "U8"))]
    dealt = deal(tensors, 2)
    check(tensors, 2, dealt)
    assert dealt.queues == [[], []]
    assert dealt.arena_bytes == [0, 0]


def test_places_are_in_the_order_of_the_source() -> None:
    rows = [5, 90_000, 0, 3, 400_000, 70_000, 1]
    tensors = [(f"t{number}", SourceEntry((size,), "F32")) for number, size in enumerate(rows)]
    assert list(deal(tensors, 3).places) == [name for name, _ in tensors]


def test_small_neighbours_go_together() -> None:
    tensors = [(f"t{number}", SourceEntry((16,), "F32")) for number in range(10_000)]
    dealt = deal(tensors, 4)
    check(tensors, 4, dealt)
    assert sum(len(queue) for queue in dealt.queues) <= 4 * 16
    for queue in dealt.queues:
        for bundle in queue:
            numbers = [int(part.name[1:]) for part in bundle.parts]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
