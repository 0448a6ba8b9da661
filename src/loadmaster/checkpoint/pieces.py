"""Cuts placements into pieces: bounded parts of one file, in file order, each read by one thread in one go.

whole tensors, blocks of rows   neighbours of a file joined, also over small     plain      vectors
                                gaps, long ones cut
columns                         as many rows as span a piece                     strided    run, buffer
interleaved rows                what fits the scratch, read once for all         dealt      run, buffer, also
another dtype                   what fits the scratch                            converted  run, buffer, dtypes

Plain reads, of which a load has up to 100,000, are a table (`Reads`) and are joined and cut all at once; the memory of
a piece is looked up when a thread reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadmaster.checkpoint.dtypes import item_bytes
from loadmaster.checkpoint.placement import Placement, Run, runs_of
from loadmaster.checkpoint.vectored import MAX_VECTORS, SCRATCH_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["Destinations", "Piece", "PlacedRun", "Read", "Reads", "Vectors", "plan_dealt", "plan_pieces", "plan_runs"]

PIECE_BYTES = 8 << 20
"""The most that one piece reads: large enough that a system call costs nothing, small enough to balance and to stop."""

DIRECT_RUN_BYTES = 512 << 10
"""Runs at least this long are read one by one: nothing is left for a map to save."""


class Destinations(NamedTuple):
    """Where the tensors of a load begin: tensor ``i`` at byte ``offsets[i]`` of ``buffers[i]``."""

    buffers: Sequence[memoryview]
    offsets: Sequence[int]


Read = tuple[str, int, int, int, int]
"""Bytes of a file that go to one place: file, offset, number of bytes, number of the buffer and byte in it."""


class Reads(NamedTuple):
    """Bytes of files that each go to one place, as columns (int64 arrays).

    Read ``i`` takes ``num_bytes[i]`` from ``offset[i]`` of ``files[file[i]]`` to byte ``target[i]`` of the buffer
    ``buffer[i]``.
    """

    files: Sequence[str]
    file: Integers
    offset: Integers
    num_bytes: Integers
    buffer: Integers
    target: Integers

    @classmethod
    def of(cls, reads: Iterable[Read]) -> Reads:
        """Make columns of rows."""
        files: dict[str, int] = {}
        rows = [(files.setdefault(file, len(files)), *numbers) for file, *numbers in reads]
        return cls(list(files), *np.array(rows, np.int64).reshape(-1, 5).T)

    def take(self, rows: Integers | NDArray[np.bool_]) -> Reads:
        """Those of ``rows``, numbers or a mask."""
        return Reads(self.files, *(column[rows] for column in self[1:]))


class Vectors(NamedTuple):
    """The memory that a plain piece fills, one stretch behind the other: columns, and the buffers that they number."""

    buffers: Sequence[memoryview]
    buffer: Integers
    start: Integers
    stop: Integers

    def views(self) -> list[memoryview]:
        """The stretches themselves."""
        buffers = self.buffers
        columns = zip(self.buffer.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return [buffers[number][start:stop] for number, start, stop in columns]


class Piece(NamedTuple):
    """A bounded part of one file that one thread reads in one go.

    ``length`` are the bytes of the file from the first to the last; ``num_bytes`` are those placed. ``run.target`` is
    absolute in the buffers here. A plain read of neighbours has ``vectors``; a strided or converted one has its ``run``
    and ``buffer``. A dealt one is whole in the file: its rows go in turns to ``run.target`` and to the targets in
    ``also``, and ``run`` describes those of the first.
    """

    file: str
    offset: int
    length: int
    num_bytes: int
    vectors: Vectors | None = None
    run: Run | None = None
    buffer: memoryview | None = None
    dtypes: tuple[str, str] | None = None
    also: tuple[int, ...] = ()


def plan_pieces(
    placements: Sequence[Placement], destinations: Destinations, piece_bytes: int = PIECE_BYTES
) -> list[Piece]:
    """Cut the work into pieces in file order, small neighbours of a file joined into one vectored read."""
    reads: list[Read] = []
    strided: list[PlacedRun] = []
    pieces: list[Piece] = []
    for number, (placement, begin) in enumerate(zip(placements, destinations.offsets, strict=True)):
        file = placement.entry.file
        if placement.dtype != placement.entry.dtype:
            pieces += _converting_pieces(placement, destinations.buffers[number], begin)
            continue
        for run in runs_of(placement):
            if run.num_runs == 1:
                reads.append((file, run.source, run.num_bytes, number, begin + run.target))
            else:
                strided.append((file, run, number, begin))
    return plan_runs(Reads.of(reads), strided, destinations.buffers, piece_bytes, pieces)


PlacedRun = tuple[str, Run, int, int]
"""A file, a run in it, and the number of the buffer and the byte in it at which the run's tensor begins."""


def plan_runs(
    reads: Reads,
    strided: Iterable[PlacedRun],
    buffers: Sequence[memoryview],
    piece_bytes: int = PIECE_BYTES,
    others: Sequence[Piece] = (),
) -> list[Piece]:
    """Cut reads and strided runs into pieces in file order, with ``others`` among them; see `plan_pieces`."""
    pieces = list(others)
    single: list[Read] = []
    for file, run, number, begin in strided:
        if run.num_bytes >= DIRECT_RUN_BYTES:
            single += _single_runs(file, run, number, begin)
        else:
            pieces += _strided_pieces(file, run, buffers[number], begin, piece_bytes)
    for table in (reads, Reads.of(single)):
        pieces += _plain_pieces(table, buffers, piece_bytes)
    pieces.sort(key=lambda piece: piece[:2])
    return pieces


def _single_runs(file: str, run: Run, number: int, begin: int) -> Iterable[Read]:
    for index in range(run.num_runs):
        source = run.source + index * run.source_stride
        yield file, source, run.num_bytes, number, begin + run.target + index * run.target_stride


GAP_BYTES = 512
"""Gaps up to here are read along: a call of its own takes longer. Scales of 4 bytes that nobody wants lie between the
experts of a checkpoint."""

GAP = memoryview(bytearray(GAP_BYTES))
"""Where the bytes of gaps go, those of all threads; nobody looks at them."""


def _plain_pieces(reads: Reads, buffers: Sequence[memoryview], piece_bytes: int) -> Iterator[Piece]:
    """Join reads that follow each other in a file, up to ``piece_bytes``; cut those that are longer."""
    reads = reads.take(reads.num_bytes > 0)
    if not len(reads.file):
        return
    rank = np.argsort(np.argsort(np.array(reads.files)))
    reads, piece = _deal(reads.take(np.lexsort((reads.target, reads.offset, rank[reads.file]))), piece_bytes)
    firsts = np.flatnonzero(np.append(True, piece[1:] != piece[:-1]))
    lasts = np.append(firsts[1:], len(piece)) - 1
    offset = reads.offset[firsts]
    length = (reads.offset + reads.num_bytes)[lasts] - offset
    placed = np.add.reduceat(reads.num_bytes, firsts)
    piece, *vectors = _with_gaps(reads, piece)
    borders = np.searchsorted(piece, np.arange(len(firsts) + 1))
    with_gap = (*buffers, GAP)  # number -1
    columns = (reads.file[firsts], offset, length, placed, borders[:-1], borders[1:])
    for file, at, span, num_bytes, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        stretches = Vectors(with_gap, *(column[begin:end] for column in vectors))
        yield Piece(reads.files[file], at, span, num_bytes, stretches)


def _deal(reads: Reads, piece_bytes: int) -> tuple[Reads, Integers]:
    """Number the piece of each read, the reads being in the order of the file; those that a piece cannot hold are cut.

    A piece ends where the next read is not close behind, at multiples of ``piece_bytes`` from the beginning of such a
    stretch, and at as many vectors as a call takes.
    """
    gap = reads.offset[1:] - (reads.offset + reads.num_bytes)[:-1]
    apart = (reads.file[1:] != reads.file[:-1]) | (gap < 0) | (gap > GAP_BYTES)
    stretch = np.cumsum(np.append(False, apart))
    first = np.flatnonzero(np.append(True, apart))[stretch]
    vector = np.arange(len(stretch)) + np.cumsum(np.append(False, (gap > 0) & ~apart))
    crowd = (vector - vector[first]) // MAX_VECTORS
    row, block, reads = _cut(reads, reads.offset - reads.offset[first], piece_bytes)
    key = np.stack([stretch[row], crowd[row], block])
    return reads, np.cumsum(np.append(False, (key[:, 1:] != key[:, :-1]).any(axis=0)))


def _cut(reads: Reads, position: Integers, piece_bytes: int) -> tuple[Integers, Integers, Reads]:
    """Cut reads, each at ``position`` of its stretch, at the multiples of ``piece_bytes`` there.

    Returns the parts, with the number of the read and of the multiple that each comes from.
    """
    block = position // piece_bytes
    parts = (position + reads.num_bytes - 1) // piece_bytes - block + 1
    row = np.repeat(np.arange(len(parts)), parts)
    block = block[row] + np.arange(len(row)) - (np.cumsum(parts) - parts)[row]
    begin = np.maximum(position[row], block * piece_bytes)
    end = np.minimum((position + reads.num_bytes)[row], (block + 1) * piece_bytes)
    moved = begin - position[row]
    cut = reads.take(row)
    return row, block, cut._replace(offset=cut.offset + moved, num_bytes=end - begin, target=cut.target + moved)


def _with_gaps(reads: Reads, piece: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """The columns piece, buffer, start and stop of all vectors, with one more for each gap within a piece."""
    gap = reads.offset[1:] - (reads.offset + reads.num_bytes)[:-1]
    at = np.flatnonzero((gap > 0) & (piece[1:] == piece[:-1])) + 1
    return (
        np.insert(piece, at, piece[at]),
        np.insert(reads.buffer, at, -1),
        np.insert(reads.target, at, 0),
        np.insert(reads.target + reads.num_bytes, at, gap[at - 1]),
    )


def _strided_pieces(file: str, run: Run, buffer: memoryview, begin: int, piece_bytes: int) -> Iterable[Piece]:
    """Cut a strided run so that each piece spans about ``piece_bytes`` of the file."""
    rows = max(1, piece_bytes // run.source_stride)
    for first in range(0, run.num_runs, rows):
        part = _part_of(run, first, min(rows, run.num_runs - first), begin)
        yield Piece(file, part.source, _length(part), part.num_bytes * part.num_runs, None, part, buffer)


def _length(run: Run) -> int:
    return (run.num_runs - 1) * run.source_stride + run.num_bytes


def plan_dealt(file: str, run: Run, also: Sequence[int], buffer: memoryview) -> Iterable[Piece]:
    """Pieces that deal rows of a file in turns, each row to the next target, one behind the other there.

    ``run`` are the rows of the first target, absolute in ``buffer``; those of the others lie between them in the file.
    """
    turns = 1 + len(also)
    rows = max(1, SCRATCH_BYTES // (run.num_bytes * turns))
    for first in range(0, run.num_runs, rows):
        part = _part_of(run, first, min(rows, run.num_runs - first), 0)
        moved = tuple(target + first * run.target_stride for target in also)
        num_bytes = part.num_bytes * part.num_runs * turns
        yield Piece(file, part.source, num_bytes, num_bytes, None, part, buffer, None, moved)


def _part_of(run: Run, first: int, count: int, begin: int) -> Run:
    source, source_stride, target, target_stride, num_bytes, _ = run
    return Run(
        source + first * source_stride,
        source_stride,
        begin + target + first * target_stride,
        target_stride,
        num_bytes,
        count,
    )


def _converting_pieces(placement: Placement, buffer: memoryview, begin: int) -> Iterable[Piece]:
    """Pieces whose source fits the scratch; targets are scaled to the size of the target's elements."""
    dtypes = (placement.entry.dtype, placement.dtype)
    item, target_item = (item_bytes(dtype) for dtype in dtypes)
    for run in runs_of(placement):
        for part in _scratch_sized(run, SCRATCH_BYTES - SCRATCH_BYTES % item):
            scaled = part._replace(
                target=begin + part.target // item * target_item, target_stride=part.target_stride // item * target_item
            )
            num_bytes = part.num_bytes * part.num_runs
            yield Piece(placement.entry.file, part.source, _length(part), num_bytes, None, scaled, buffer, dtypes)


def _scratch_sized(run: Run, scratch_bytes: int) -> Iterable[Run]:
    if run.num_bytes <= scratch_bytes:
        rows = max(1, scratch_bytes // run.num_bytes)
        for first in range(0, run.num_runs, rows):
            yield _part_of(run, first, min(rows, run.num_runs - first), 0)
        return
    for index in range(run.num_runs):
        row = _part_of(run, index, 1, 0)
        for start in range(0, run.num_bytes, scratch_bytes):
            size = min(scratch_bytes, run.num_bytes - start)
            yield row._replace(source=row.source + start, target=row.target + start, num_bytes=size)
