"""Placements: what their runs of bytes move is what torch's narrow and copy move; wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.checkpoint.placement import (
    Move,
    Placement,
    check_placements,
    covered_bytes,
    place_whole,
    runs_of,
)
from loadmaster.checkpoint.table import Entry
from loadmaster.errors import PlacementError

from .helpers.files import random_bytes

DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def entry_of(shape: tuple[int, ...], dtype: str = "U8", offset: int = 0, name: str = "w") -> Entry:
    count = torch.Size(shape).numel()
    return Entry(name, dtype, shape, "model.safetensors", offset, count * DTYPES[dtype].itemsize)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A target along one dimension of an entry, with up to three moves that do not overlap there, and gaps."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    dtype = draw(st.sampled_from(list(DTYPES)))
    moves, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, shape[dim]))
        stop = draw(st.integers(start, shape[dim]))
        at += draw(st.integers(0, 2))
        moves.append(Move(dim, start, stop, at))
        at += stop - start
    size = at + draw(st.integers(0, 2))
    entry = entry_of(tuple(shape), dtype, draw(st.sampled_from([0, 8, 72])))
    return Placement(entry, "w", dtype, (*shape[:dim], size, *shape[dim + 1 :]), tuple(moves))


def executed(placement: Placement, file: torch.Tensor) -> torch.Tensor:
    """Do what the runs say, byte for byte, as a reader would."""
    target = torch.zeros(torch.Size(placement.shape).numel() * DTYPES[placement.dtype].itemsize, dtype=torch.uint8)
    for run in runs_of(placement):
        assert run.num_bytes > 0
        assert run.num_runs > 0
        for number in range(run.num_runs):
            source, into = run.source + number * run.source_stride, run.target + number * run.target_stride
            target[into : into + run.num_bytes] = file[source : source + run.num_bytes]
    return target


@given(placement=placements())
def test_runs_move_what_torch_moves(placement: Placement) -> None:
    entry = placement.entry
    file = random_bytes(entry.offset + entry.num_bytes + 16, seed=entry.num_bytes)
    whole = file[entry.offset : entry.offset + entry.num_bytes].clone().view(DTYPES[entry.dtype]).reshape(entry.shape)
    wanted = torch.zeros(placement.shape, dtype=whole.dtype)
    for dim, start, stop, at in placement.moves:
        wanted.narrow(dim, at, stop - start).copy_(whole.narrow(dim, start, stop - start))
    assert torch.equal(executed(placement, file), wanted.reshape(-1).view(torch.uint8))
    assert placement.num_bytes == wanted.nbytes
    moved = sum(whole.narrow(dim, start, stop - start).nbytes for dim, start, stop, _ in placement.moves)
    assert covered_bytes(placement) == moved
    check_placements([placement])


def test_whole_entry_is_one_run() -> None:
    placement = Placement(entry_of((3, 4), "BF16", 100), "w", "BF16", (3, 4))
    assert runs_of(placement) == [(100, 24, 0, 24, 24, 1)]
    assert covered_bytes(placement) == placement.num_bytes == 24


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_empty_entry_has_no_run(shape: tuple[int, ...]) -> None:
    assert runs_of(Placement(entry_of(shape), "w", "U8", shape)) == []
    assert runs_of(Placement(entry_of(shape), "w", "U8", shape, (Move(0, 0, shape[0], 0),))) == []


def test_rows_are_one_run_and_columns_are_a_run_each() -> None:
    entry = entry_of((8, 4), "F32")
    assert len(runs_of(Placement(entry, "w", "F32", (2, 4), (Move(0, 4, 6, 0),)))) == 1
    rows = runs_of(Placement(entry, "w", "F32", (2, 4), (Move(0, 4, 6, 0),)))[0]
    assert (rows.source, rows.num_bytes, rows.num_runs) == (64, 32, 1)
    columns = runs_of(Placement(entry, "w", "F32", (8, 1), (Move(1, 2, 3, 0),)))[0]
    assert (columns.source, columns.source_stride, columns.target_stride) == (8, 16, 4)
    assert (columns.num_bytes, columns.num_runs) == (4, 8)


def test_moves_that_keep_everything_are_joined_to_one_run() -> None:
    (run,) = runs_of(Placement(entry_of((6, 5, 2)), "w", "U8", (6, 5, 2), (Move(1, 0, 5, 0),)))
    assert (run.num_bytes, run.num_runs) == (60, 1)


def test_place_whole_converts_plain_floats_only() -> None:
    entries = [entry_of((2,), "BF16", name="a"), entry_of((2,), "U8", name="b"), entry_of((2,), "F64", name="c")]
    scaled = Entry("d", "F8_E4M3", (2,), "f", 0, 2)
    packed = Entry("e", "F4", (2, 4), "f", 0, 4)
    kept = place_whole([*entries, scaled, packed])
    assert [placement.dtype for placement in kept] == ["BF16", "U8", "F64", "F8_E4M3", "F4"]
    converted = place_whole([*entries, scaled, packed], "F32")
    assert [placement.dtype for placement in converted] == ["F32", "U8", "F32", "F8_E4M3", "F4"]
    assert [placement.num_bytes for placement in converted] == [8, 2, 8, 2, 4]
    assert converted[-1].shape == (2, 2)


@pytest.mark.parametrize(
    ("shape", "move"),
    [
        ((2, 4), Move(0, 7, 9, 0)),
        ((2, 4), Move(0, -1, 1, 0)),
        ((2, 4), Move(0, 3, 1, 0)),
        ((2, 4), Move(0, 0, 3, 0)),
        ((2, 4), Move(0, 0, 2, 1)),
        ((2, 4), Move(0, 0, 2, -1)),
        ((2, 4), Move(2, 0, 2, 0)),
        ((8, 4), Move(-1, 0, 4, 0)),
        ((2, 3), Move(0, 0, 2, 0)),
        ((8, 3), Move(0, 0, 2, 0)),
        ((2, 4, 1), Move(0, 0, 2, 0)),
        ((8,), Move(0, 0, 2, 0)),
    ],
)
def test_move_that_leaves_its_entry_or_its_target_is_refused(shape: tuple[int, ...], move: Move) -> None:
    placement = Placement(entry_of((8, 4), name="entry"), "layer.weight", "U8", shape, (move,))
    with pytest.raises(PlacementError, match=r"tensor 'layer\.weight'") as caught:
        check_placements([placement])
    assert "[8, 4]" in str(caught.value)


def test_name_placed_twice_is_refused() -> None:
    placement: Any = Placement(entry_of((2,)), "same", "U8", (2,))
    with pytest.raises(PlacementError, match="'same' is placed twice"):
        check_placements([placement, placement])
    check_placements([placement, placement._replace(name="other")])


def test_whole_placement_must_have_the_shape_of_its_entry() -> None:
    """Without moves the entry is taken as it is: another shape would read past the tensor, or fill a part of it."""
    for shape in [(3,), (2, 2), (1,), ()]:
        with pytest.raises(PlacementError, match="'w'"):
            check_placements([Placement(entry_of((2,), "F32"), "w", "F32", shape)])


def test_dtype_that_cannot_be_converted_is_refused() -> None:
    for source, target in [("U8", "F32"), ("F32", "U8"), ("U8", "I8")]:
        entry = Entry("w", source, (2,), "f", 0, 2)
        with pytest.raises(PlacementError, match="'w'"):
            check_placements([Placement(entry, "w", target, (2,))])
