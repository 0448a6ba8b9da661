"""Which slice of which entry goes where, as data: a `Placement` per tensor, made of `Move`s along one dimension.

    entry [8192, 4096] --Move(dim=0, start=2048, stop=4096, at=0)--> tensor [2048, 4096]     colwise, rank 1 of 4

A tensor-parallel slice, a fused projection's parts, padded vocabulary rows and a replicated group of KV heads are all
lists of moves. `runs` lowers them to what a reader can do: equal runs of bytes at a fixed stride in the file, going to
a fixed stride in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from loadmaster.checkpoint.dtypes import DTYPES, item_bytes
from loadmaster.checkpoint.table import Entry
from loadmaster.errors import PlacementError

__all__ = [
    "Move",
    "Placement",
    "Run",
    "check_dtype",
    "check_placements",
    "converted_dtype",
    "covered_bytes",
    "place_whole",
    "runs_of",
]


class Move(NamedTuple):
    """Rows ``start`` to ``stop`` of dimension ``dim`` of the entry become rows ``at`` and following of the target."""

    dim: int
    start: int
    stop: int
    at: int


class Placement(NamedTuple):
    """How one tensor is filled from one entry.

    ``shape`` is that of the target in storage units (two F4 elements count as one); ``dtype`` is the target's
    safetensors dtype name; no ``moves`` means the whole entry as it is. What no move covers is zero.
    """

    entry: Entry
    name: str
    dtype: str
    shape: tuple[int, ...]
    moves: tuple[Move, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the target tensor."""
        if not self.moves and self.dtype == self.entry.dtype:
            return self.entry.num_bytes
        return math.prod(self.shape) * item_bytes(self.dtype)


class Run(NamedTuple):
    """Equal runs of ``num_bytes``: from ``source`` every ``source_stride`` to ``target`` every ``target_stride``.

    ``source`` counts from the start of the file and ``target`` from the start of the tensor, in bytes of the entry's
    dtype (a conversion scales the target side).
    """

    source: int
    source_stride: int
    target: int
    target_stride: int
    num_bytes: int
    num_runs: int


def place_whole(entries: Iterable[Entry], dtype: str | None = None) -> list[Placement]:
    """Place every entry whole; ``dtype`` converts those of a plain floating-point dtype."""
    return [
        Placement(
            entry, entry.name, entry.dtype if dtype is None else converted_dtype(entry, dtype), entry.storage_shape
        )
        for entry in entries
    ]


def converted_dtype(entry: Entry, dtype: str | None) -> str:
    """The dtype that ``entry`` gets when a load asks for ``dtype``: scaled and integer types stay as they are."""
    return dtype if dtype is not None and DTYPES[entry.dtype].floating else entry.dtype


def runs_of(placement: Placement) -> list[Run]:
    """Lower a placement to runs of bytes; empty ones are left out."""
    entry = placement.entry
    if not placement.moves:
        size = entry.num_bytes
        return [Run(entry.offset, size, 0, size, size, 1)] if size else []
    begin = entry.offset
    relative = _runs_of_moves(
        tuple(placement.moves), tuple(entry.storage_shape), tuple(placement.shape), item_bytes(entry.dtype)
    )
    return [Run(begin + run[0], *run[1:]) for run in relative]


@functools.lru_cache(maxsize=1024)
def _runs_of_moves(
    moves: tuple[Move, ...], source: tuple[int, ...], target: tuple[int, ...], item: int
) -> tuple[Run, ...]:
    """The runs of an entry that begins at offset 0: the layers and experts of a model have few different ones."""
    runs = (_run_of(move, source, target, item) for move in moves)
    return tuple(run for run in runs if run.num_bytes and run.num_runs)


def _run_of(move: Move, source: tuple[int, ...], target: tuple[int, ...], item: int) -> Run:
    inner = math.prod(source[move.dim + 1 :]) * item
    run = Run(
        source=move.start * inner,
        source_stride=source[move.dim] * inner,
        target=move.at * inner,
        target_stride=target[move.dim] * inner,
        num_bytes=(move.stop - move.start) * inner,
        num_runs=math.prod(source[: move.dim]),
    )
    if run.num_bytes == run.source_stride == run.target_stride:
        whole = run.num_bytes * run.num_runs
        return run._replace(num_bytes=whole, source_stride=whole, target_stride=whole, num_runs=1)
    return run


def check_placements(placements: Iterable[Placement]) -> None:
    """Refuse moves that leave their entry or their target, and names placed twice."""
    seen: set[str] = set()
    for placement in placements:
        if placement.name in seen:
            raise PlacementError(f"tensor {placement.name!r} is placed twice")
        seen.add(placement.name)
        check_dtype(placement)
        if not placement.moves and tuple(placement.shape) != placement.entry.storage_shape:
            raise PlacementError(
                f"tensor {placement.name!r} has no moves and the shape {list(placement.shape)}, and its entry has "
                f"{list(placement.entry.storage_shape)}"
            )
        for move in placement.moves:
            _check_move(placement, move)


def check_dtype(placement: Placement) -> None:
    """Refuse a conversion that would change the meaning of a tensor: scaled types need their scales."""
    source, target = placement.entry.dtype, placement.dtype
    if source != target and not (DTYPES[source].floating and DTYPES[target].floating):
        raise PlacementError(
            f"tensor {placement.name!r} is {source} in the checkpoint and {target} in the target, "
            "and only plain floating-point dtypes are converted"
        )


def _check_move(placement: Placement, move: Move) -> None:
    source, target = placement.entry.storage_shape, placement.shape
    if len(source) != len(target) or not 0 <= move.dim < len(source):
        raise PlacementError(
            f"tensor {placement.name!r}: {move} does not fit an entry of shape {list(source)} "
            f"and a target of shape {list(target)}"
        )
    inside = 0 <= move.start <= move.stop <= source[move.dim] and 0 <= move.at <= move.at + move.stop - move.start
    same = all(a == b for dim, (a, b) in enumerate(zip(source, target, strict=True)) if dim != move.dim)
    if not inside or move.at + move.stop - move.start > target[move.dim] or not same:
        raise PlacementError(
            f"tensor {placement.name!r}: {move} leaves the entry of shape {list(source)} "
            f"or the target of shape {list(target)}"
        )


def covered_bytes(placement: Placement) -> int:
    """Bytes of the target that moves fill; the rest is padding."""
    if not placement.moves:
        return placement.num_bytes
    item = item_bytes(placement.dtype)
    covered = 0
    for move in placement.moves:
        others = math.prod(size for dim, size in enumerate(placement.shape) if dim != move.dim)
        covered += (move.stop - move.start) * others * item
    return covered
