"""Plans: every byte of the placements once and in file order, in pieces that are neither too long nor too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.checkpoint import pieces, vectored
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.pieces import Piece, Reads, plan_dealt, plan_pieces, plan_runs
from loadmaster.checkpoint.placement import Placement, Run, place_whole
from loadmaster.checkpoint.reader import read_pieces
from loadmaster.checkpoint.target import new_memory

from .helpers.checkpoints import checkpoint_of, columns
from .helpers.files import assert_same, described, library_tensors, write_file, write_raw
from .helpers.headers import Pairs, dump


def stretches(piece: Piece) -> list[tuple[memoryview, int, int]]:
    """The memory that a plain piece fills."""
    assert piece.vectors is not None
    buffers, *columns = piece.vectors
    return [(buffers[number], int(start), int(stop)) for number, start, stop in zip(*columns, strict=True)]


def spans(piece: Piece) -> Iterator[tuple[int, int, int, int]]:
    """What a piece moves: (offset in the file, buffer, offset in the buffer, bytes) of each stretch."""
    if piece.run is None:
        position = piece.offset
        for buffer, start, stop in stretches(piece):
            if buffer is not pieces.GAP:
                yield position, id(buffer), start, stop - start
            position += stop - start
        return
    for number in range(piece.run.num_runs):
        source = piece.run.source + number * piece.run.source_stride
        target = piece.run.target + number * piece.run.target_stride
        yield source, id(piece.buffer), target, piece.run.num_bytes


@given(data=st.data())
@settings(max_examples=60)
def test_pieces_move_every_byte_once_in_file_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
    files = data.draw(st.integers(1, min(3, len(shapes))))
    checkpoint = checkpoint_of(*shapes, folder=tmp_path_factory.mktemp("plan"), files=files)
    placements = []
    for entry in checkpoint.values():
        rows, width = entry.shape
        start = data.draw(st.integers(0, width - 1))
        stop = data.draw(st.integers(start + 1, width))
        keep = data.draw(st.booleans())
        placements.append(columns(checkpoint, entry.name, start, stop) if keep else place_whole([entry])[0])
        assert rows
    placements = data.draw(st.permutations(placements))
    piece_bytes = data.draw(st.integers(1, 200))
    _, destinations = new_memory(placements)
    planned = plan_pieces(placements, destinations, piece_bytes)

    assert [(piece.file, piece.offset) for piece in planned] == sorted((piece.file, piece.offset) for piece in planned)
    moved: Counter[tuple[str, int, int]] = Counter()
    for piece in planned:
        assert sum(size for *_, size in spans(piece)) == piece.num_bytes
        assert piece.num_bytes <= piece_bytes or piece.run is not None
        assert piece.vectors is None or len(piece.vectors.start) <= vectored.MAX_VECTORS
        assert piece.length == max(source + size for source, *_, size in spans(piece)) - piece.offset
        for source, buffer, target, size in spans(piece):
            assert buffer == id(destinations.buffers[0])
            moved.update((piece.file, source + number, target + number) for number in range(size))
    wanted: Counter[tuple[str, int, int]] = Counter()
    for placement, begin in zip(placements, destinations.offsets, strict=True):
        rows, width = placement.entry.shape
        start, stop = (placement.moves[0].start, placement.moves[0].stop) if placement.moves else (0, width)
        for row in range(rows):
            for byte in range(2 * (stop - start)):
                source = placement.entry.offset + 2 * (row * width + start) + byte
                wanted[placement.entry.file, source, begin + 2 * row * (stop - start) + byte] += 1
    assert moved == wanted


@pytest.mark.parametrize("turn", [list, lambda placements: placements[::-1]], ids=["file order", "reversed"])
def test_small_neighbours_share_a_call_and_long_ones_are_cut(
    tmp_path: Path, turn: Callable[[list[Placement]], list[Placement]]
) -> None:
    checkpoint = checkpoint_of(*[(4, 8)] * 3000, (1024, 5000), folder=tmp_path)
    placements = turn(place_whole(checkpoint.values()))
    tensors, destinations = new_memory(placements)
    planned = plan_pieces(placements, destinations, 1 << 20)
    assert len(planned) < 3 + 2 + 10
    assert max(len(stretches(piece)) for piece in planned) <= vectored.MAX_VECTORS
    assert max(piece.num_bytes for piece in planned) <= 1 << 20
    read_pieces(planned, checkpoint.files, 2)
    for name, wanted in library_tensors(*map(Path, checkpoint.files)).items():
        assert_same(tensors[name], wanted, name)


def test_empty_tensors_need_no_piece(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.empty(2, 0), "c": torch.ones(())}
    checkpoint = open_checkpoint(write_file(tmp_path / "empty.safetensors", tensors))
    placements = place_whole(checkpoint.values())
    _, destinations = new_memory(placements)
    assert [piece.num_bytes for piece in plan_pieces(placements, destinations)] == [4]
    assert plan_pieces(placements[:2], new_memory(placements[:2])[1]) == []


def test_files_are_told_apart_where_one_ends_at_the_offset_at_which_the_next_begins(tmp_path: Path) -> None:
    one = dump(Pairs([("a", described("U8", [40], 0, 40))]))
    two = dump(Pairs([("b", described("U8", [40], 0, 40))])).ljust(len(one) + 40)
    write_raw(tmp_path / "1.safetensors", one, bytes(range(40)))
    write_raw(tmp_path / "2.safetensors", two, bytes(range(100, 140)))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint["b"].offset == checkpoint["a"].offset + 40
    placements = place_whole(checkpoint.values())
    tensors, destinations = new_memory(placements)
    read_pieces(plan_pieces(placements, destinations), checkpoint.files, 1)
    assert tensors["a"].tolist() == [*range(40)]
    assert tensors["b"].tolist() == [*range(100, 140)]


# Rows that are dealt in turns.


@given(
    count=st.integers(1, 40),
    num_bytes=st.integers(1, 50),
    turns=st.integers(1, 4),
    gap=st.integers(0, 20),
    source=st.integers(0, 100),
    scratch=st.integers(1, 700),
)
def test_dealt_pieces_read_each_byte_once_and_fit_the_scratch(
    count: int, num_bytes: int, turns: int, gap: int, source: int, scratch: int
) -> None:
    stride = num_bytes + gap
    memory = memoryview(bytearray(1))
    also = [7 + turn * 10_000 for turn in range(1, turns)]
    run = Run(source, turns * num_bytes, 7, stride, num_bytes, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SCRATCH_BYTES", scratch)
        planned = list(plan_dealt("file", run, also, memory))
    position, moved = source, []
    for piece in planned:
        assert piece.run is not None
        assert (piece.file, piece.offset, piece.vectors, piece.dtypes) == ("file", position, None, None)
        assert piece.buffer is memory
        assert piece.num_bytes <= max(scratch, turns * num_bytes)
        assert piece.num_bytes == piece.run.num_runs * turns * num_bytes
        assert (piece.run.source, piece.run.num_bytes, piece.run.target_stride) == (position, num_bytes, stride)
        position += piece.num_bytes
        targets = (piece.run.target, *piece.also)
        moved += [[target + row * stride for target in targets] for row in range(piece.run.num_runs)]
    assert position == source + turns * num_bytes * count
    assert moved == [[target + row * stride for target in (7, *also)] for row in range(count)]
    assert len(planned) == -(-count // max(1, scratch // (turns * num_bytes)))


def test_runs_and_other_pieces_come_in_file_order() -> None:
    memory = memoryview(bytearray(1000))
    dealt = [*plan_dealt("b", Run(0, 8, 40, 4, 4, 1), [44], memory)]
    dealt += plan_dealt("a", Run(40, 8, 0, 4, 4, 5), [20], memory)
    reads = [("b", 8, 6, 0, 400), ("a", 80, 3, 0, 200), ("b", 14, 4, 0, 406)]
    planned = plan_runs(Reads.of(reads), [("a", Run(0, 10, 0, 5, 5, 4), 0, 500)], [memory], others=dealt)
    assert [(piece.file, piece.offset, piece.num_bytes) for piece in planned] == [
        ("a", 0, 20),
        ("a", 40, 40),
        ("a", 80, 3),
        ("b", 0, 8),
        ("b", 8, 10),
    ]
    assert stretches(planned[-1]) == [(memory, 400, 406), (memory, 406, 410)]


def test_small_gaps_are_read_along_and_not_counted() -> None:
    memory, other = memoryview(bytearray(1000)), memoryview(bytearray(1000))
    wide = pieces.GAP_BYTES
    reads = [("a", 0, 8, 0, 0), ("a", 12, 4, 1, 0), ("a", 16 + wide, 4, 0, 8), ("a", 21 + 2 * wide, 4, 0, 12)]
    first, second = plan_runs(Reads.of([*reads, ("b", 25 + 2 * wide, 4, 0, 16)]), [], [memory, other])[:2]
    assert stretches(first) == [
        (memory, 0, 8),
        (pieces.GAP, 0, 4),
        (other, 0, 4),
        (pieces.GAP, 0, wide),
        (memory, 8, 12),
    ]
    assert (first.num_bytes, stretches(second), second.num_bytes) == (16, [(memory, 12, 16)], 4)


@given(
    reads=st.lists(
        st.tuples(
            st.sampled_from("ba"), st.integers(0, 2000), st.integers(0, 60), st.integers(0, 1), st.integers(0, 9)
        ),
        max_size=12,
    ),
    piece_bytes=st.integers(1, 200),
)
def test_reads_that_overlap_or_lie_apart_move_every_byte_once(
    reads: list[tuple[str, int, int, int, int]], piece_bytes: int
) -> None:
    buffers = [memoryview(bytearray(1)), memoryview(bytearray(2))]
    reads = [(*read[:4], 1000 * number + read[4]) for number, read in enumerate(reads)]  # each to a place of its own
    wanted = Counter(
        (file, offset + byte, id(buffers[number]), target + byte)
        for file, offset, size, number, target in reads
        for byte in range(size)
    )
    moved: Counter[tuple[str, int, int, int]] = Counter()
    for piece in plan_runs(Reads.of(reads), [], buffers, piece_bytes):
        assert 0 < piece.num_bytes <= piece.length <= max(piece_bytes, piece.num_bytes)
        for source, buffer, target, size in spans(piece):
            moved.update((piece.file, source + byte, buffer, target + byte) for byte in range(size))
    assert moved == wanted


@pytest.mark.parametrize("piece_bytes", [8, 11, 12, 13])
def test_no_piece_ends_with_a_gap(piece_bytes: int) -> None:
    memory = memoryview(bytearray(100))
    planned = plan_runs(Reads.of([("a", 0, 8, 0, 0), ("a", 12, 4, 0, 8)]), [], [memory], piece_bytes)
    assert [stretches(piece)[-1][0] is pieces.GAP for piece in planned] == [False] * len(planned)
    assert sum(piece.num_bytes for piece in planned) == 12
