"""Cuts placements into pieces: bounded parts of one file, in file order, each read by one thread in one go.

whole tensors, blocks of rows   neighbours of a file joined, also over small     plain      vectors
                                gaps, long ones cut
columns                         as many rows as span a piece                     strided    run, buffer
interleaved rows                what fits the scratch, read once for all         dealt      run, buffer, also
another dtype                   what fits the scratch                            converted  run, buffer, dtypes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loadmaster.checkpoint.dtypes import item_bytes
from loadmaster.checkpoint.placement import Placement, Run, runs_of
from loadmaster.checkpoint.vectored import MAX_VECTORS, SCRATCH_BYTES

__all__ = ["Destinations", "Piece", "PlacedRun", "plan_dealt", "plan_pieces", "plan_runs"]

PIECE_BYTES = 8 << 20
"""The most that one piece reads: large enough that a system call costs nothing, small enough to balance and to stop."""

DIRECT_RUN_BYTES = 512 << 10
"""Runs at least this long are read one by one: nothing is left for a map to save."""


class Destinations(NamedTuple):
    """Where the tensors of a load begin: tensor ``i`` at byte ``offsets[i]`` of ``buffers[i]``."""

    buffers: Sequence[memoryview]
    offsets: Sequence[int]


class Piece(NamedTuple):
    """A bounded part of one file that one thread reads in one go.

    ``num_bytes`` are those placed. ``run.target`` is absolute in the buffers here. A plain read of neighbours has
    ``vectors``; a strided or converted one has its ``run`` and ``buffer``. A dealt one is whole in the file: its rows
    go in turns to ``run.target`` and to the targets in ``also``, and ``run`` describes those of the first.
    """

    file: str
    offset: int
    num_bytes: int
    vectors: list[tuple[memoryview, int, int]]
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
    return plan_runs(reads, strided, destinations.buffers, piece_bytes, pieces)


Read = tuple[str, int, int, int, int]
"""Bytes of a file that go to one place: file, offset, number of bytes, number of the buffer and byte in it."""

PlacedRun = tuple[str, Run, int, int]
"""A file, a run in it, and the number of the buffer and the byte in it at which the run's tensor begins."""


def plan_runs(
    reads: Iterable[Read],
    strided: Iterable[PlacedRun],
    buffers: Sequence[memoryview],
    piece_bytes: int = PIECE_BYTES,
    others: Sequence[Piece] = (),
) -> list[Piece]:
    """Cut reads and strided runs into pieces in file order, with ``others`` among them; see `plan_pieces`."""
    reads = list(reads)
    pieces = list(others)
    for file, run, number, begin in strided:
        if run.num_bytes >= DIRECT_RUN_BYTES:
            reads += _single_runs(file, run, number, begin)
        else:
            pieces += _strided_pieces(file, run, buffers[number], begin, piece_bytes)
    reads.sort()
    pieces += _join_neighbours(reads, buffers, piece_bytes)
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


def _join_neighbours(reads: list[Read], buffers: Sequence[memoryview], piece_bytes: int) -> list[Piece]:
    """Join reads that follow each other in a file, up to ``piece_bytes``; cut those that are longer."""
    pieces: list[Piece] = []
    vectors: list[tuple[memoryview, int, int]] = []
    file, start, position = "", 0, -1
    for read_file, offset, size, number, target in reads:
        buffer = buffers[number]
        gap, room = offset - position, piece_bytes - (position - start)
        if read_file != file or not 0 <= gap <= GAP_BYTES or len(vectors) >= MAX_VECTORS - 1 or (gap and gap >= room):
            _close_piece(pieces, file, start, position, vectors)
            file, start, position, vectors = read_file, offset, offset, []
        elif gap:
            vectors.append((GAP, 0, gap))
            position = offset
        if size <= piece_bytes - (position - start) and not (vectors and vectors[-1][2] == target):  # nearly always
            vectors.append((buffer, target, target + size))
            position += size
            continue
        while size:
            room = piece_bytes - (position - start)
            if room <= 0:
                _close_piece(pieces, file, start, position, vectors)
                start, vectors, room = position, [], piece_bytes
            taken = min(size, room)
            if vectors and vectors[-1][0] is buffer and vectors[-1][2] == target:
                vectors[-1] = (buffer, vectors[-1][1], target + taken)
            else:
                vectors.append((buffer, target, target + taken))
            position += taken
            target += taken
            size -= taken
    _close_piece(pieces, file, start, position, vectors)
    return pieces


def _close_piece(
    pieces: list[Piece], file: str, start: int, end: int, vectors: list[tuple[memoryview, int, int]]
) -> None:
    if vectors:
        gaps = sum(stop for buffer, _, stop in vectors if buffer is GAP)
        pieces.append(Piece(file, start, end - start - gaps, vectors))


def _strided_pieces(file: str, run: Run, buffer: memoryview, begin: int, piece_bytes: int) -> Iterable[Piece]:
    """Cut a strided run so that each piece spans about ``piece_bytes`` of the file."""
    rows = max(1, piece_bytes // run.source_stride)
    for first in range(0, run.num_runs, rows):
        part = _part_of(run, first, min(rows, run.num_runs - first), begin)
        yield Piece(file, part.source, part.num_bytes * part.num_runs, [], part, buffer)


def plan_dealt(file: str, run: Run, also: Sequence[int], buffer: memoryview) -> Iterable[Piece]:
    """Pieces that deal rows of a file in turns, each row to the next target, one behind the other there.

    ``run`` are the rows of the first target, absolute in ``buffer``; those of the others lie between them in the file.
    """
    turns = 1 + len(also)
    rows = max(1, SCRATCH_BYTES // (run.num_bytes * turns))
    for first in range(0, run.num_runs, rows):
        part = _part_of(run, first, min(rows, run.num_runs - first), 0)
        moved = tuple(target + first * run.target_stride for target in also)
        yield Piece(file, part.source, part.num_bytes * part.num_runs * turns, [], part, buffer, None, moved)


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
            yield Piece(placement.entry.file, part.source, part.num_bytes * part.num_runs, [], scaled, buffer, dtypes)


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
