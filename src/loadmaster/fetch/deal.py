"""Deals the tensors of a version to fetchers by their bytes, largest first, and says where each one goes.

    tensors, in the order of the source
      small neighbours  --> one bundle        read with few calls, as neighbours of a file
      larger ones       --> a bundle each
      > 1/procs of all  --> several bundles   rows of one tensor, side by side in one arena
    bundles, the largest first, each to the fetcher with the fewest bytes so far

What a fetcher is dealt is its queue; one that is done takes over the last bundle of the longest queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from loadmaster.fetch.shared_memory import ALIGNMENT
from loadmaster.fetch.source import Part, SourceEntry

__all__ = ["Bundle", "Deal", "Place", "deal"]

LARGEST_BUNDLE = 32 << 20
"""The most that is done in one go: what a fetcher that dies loses, and what the last one may be late by."""

SMALLEST_SPLIT = 64 << 10
"""Tensors up to here stay whole."""

BUNDLES_EACH = 8
"""Small tensors are bundled so that each fetcher gets about this many bundles."""


class Place(NamedTuple):
    """Where a tensor is: the number of its arena, the first byte in it, its safetensors dtype and its shape."""

    arena: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Bundle(NamedTuple):
    """Parts that one fetcher reads in one go, all into arena ``arena``, bytes ``start`` to ``stop`` of it."""

    arena: int
    start: int
    stop: int
    num_bytes: int
    parts: list[Part]


class Deal(NamedTuple):
    """Every tensor's place, each fetcher's queue of bundles, and the bytes of each fetcher's arena."""

    places: dict[str, Place]
    queues: list[list[Bundle]]
    arena_bytes: list[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bundle.num_bytes for queue in self.queues for bundle in queue)


class _Group(NamedTuple):
    """Tensors that stay together: their names and entries, and the rows where the one tensor is cut."""

    num_bytes: int
    names: list[str]
    entries: list[SourceEntry]
    cuts: list[int]


def deal(tensors: Sequence[tuple[str, SourceEntry]], fetchers: int, can_split: bool = True) -> Deal:
    """Deal ``tensors`` to ``fetchers``; where the source ``can_split``, the rows of large ones to several."""
    sizes = _Sizes()
    total = sum(sizes[entry] for _, entry in tensors)
    groups = _group(tensors, sizes, fetchers, total, can_split)
    loads = [(0, fetcher) for fetcher in range(fetchers)]
    arena_bytes = [0] * fetchers
    places: dict[str, Place] = {}
    queues: list[list[Bundle]] = [[] for _ in range(fetchers)]
    for group in sorted(groups, key=lambda group: -group.num_bytes):
        arena = loads[0][1]
        bundles, arena_bytes[arena] = _lay_out(group, arena, arena_bytes[arena], sizes, places)
        for bundle in bundles:
            load, fetcher = loads[0]
            queues[fetcher].append(bundle)
            heapq.heapreplace(loads, (load + bundle.num_bytes, fetcher))
    return Deal({name: places[name] for name, _ in tensors}, queues, arena_bytes)


class _Sizes(dict[SourceEntry, int]):
    """Bytes of a tensor by its entry: the hundred thousand tensors of a model are of few kinds."""

    def __missing__(self, entry: SourceEntry) -> int:
        self[entry] = num_bytes = entry.num_bytes
        return num_bytes


def _group(
    tensors: Sequence[tuple[str, SourceEntry]], sizes: _Sizes, fetchers: int, total: int, can_split: bool
) -> list[_Group]:
    most = max(SMALLEST_SPLIT, min(LARGEST_BUNDLE, -(-total // fetchers)))
    small = min(most, max(SMALLEST_SPLIT, total // (fetchers * BUNDLES_EACH)))
    groups: list[_Group] = []
    names: list[str] = []
    entries: list[SourceEntry] = []
    held = 0
    for name, entry in tensors:
        num_bytes = sizes[entry]
        if num_bytes >= small:
            groups.append(_Group(num_bytes, [name], [entry], _cuts(entry, most) if can_split else []))
            continue
        if held + num_bytes > small:
            groups.append(_Group(held, names, entries, []))
            names, entries, held = [], [], 0
        names.append(name)
        entries.append(entry)
        held += num_bytes
    if names:
        groups.append(_Group(held, names, entries, []))
    return groups


def _cuts(entry: SourceEntry, most: int) -> list[int]:
    """The rows at which a tensor of more than ``most`` bytes is cut into parts of about equal size."""
    count = min(entry.rows, -(-entry.num_bytes // most))
    return [number * entry.rows // count for number in range(1, count)]


def _lay_out(group: _Group, arena: int, at: int, sizes: _Sizes, places: dict[str, Place]) -> tuple[list[Bundle], int]:
    """Give each tensor of a group its place from byte ``at`` of an arena on; the bundles, and the end."""
    start, parts = at, []
    for name, entry in zip(group.names, group.entries, strict=True):
        num_bytes = sizes[entry]
        places[name] = Place(arena, at, entry.dtype, entry.shape)
        if num_bytes:
            parts.append(Part(name, 0, entry.rows, at, num_bytes, True))
            at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if not group.cuts:
        return ([Bundle(arena, start, at, group.num_bytes, parts)] if parts else []), at
    (name,), (entry,) = group.names, group.entries
    bundles = []
    for first, last in zip([0, *group.cuts], [*group.cuts, entry.rows], strict=True):
        offset, num_bytes = start + first * entry.row_bytes, (last - first) * entry.row_bytes
        part = Part(name, first, last, offset, num_bytes, False)
        bundles.append(Bundle(arena, offset, offset + num_bytes, num_bytes, [part]))
    return bundles, at
