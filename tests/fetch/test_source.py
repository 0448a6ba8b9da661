"""Sources: what they must have, how they are asked, and safetensors checkpoints as one."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint.helpers.files import assert_all_same, assert_same, bits_of, random_tensor, write_file, write_shards
from loadmaster.checkpoint.dtypes import DTYPES, torch_dtype
from loadmaster.errors import CheckpointError, InputError, LoadmasterError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.source import (
    Part,
    SourceEntry,
    SourceReader,
    Waiter,
    can_split,
    check_source,
    read_parts,
    source_entry,
    with_version,
)

from .helpers.sources import (
    AsyncFilling,
    AsyncGetting,
    AsyncInParts,
    ByRows,
    Described,
    Filling,
    Getting,
    InParts,
    fetch_all,
)

TENSORS = {
    "matrix": random_tensor((5, 3), torch.float32, 1),
    "vector": random_tensor((7,), torch.bfloat16, 2),
    "scalar": random_tensor((), torch.int64, 3),
    "empty": torch.empty((0, 4), dtype=torch.float16),
    "one row": random_tensor((1, 2, 3), torch.bool, 4),
}


def part(name: str, start: int, stop: int, num_bytes: int, whole: bool = True, offset: int = 0) -> Part:
    return Part(name, start, stop, offset, num_bytes, whole)


def never() -> bool:
    return False


# What a source says of a tensor


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "row_bytes", "num_bytes"),
    [
        ((), "F64", 1, 8, 8),
        ((6,), "BF16", 6, 2, 12),
        ((4, 3, 2), "F32", 4, 24, 96),
        ((0, 3), "F32", 0, 12, 0),
        ((3, 0), "F32", 3, 0, 0),
        ((4, 8), "F4", 4, 8, 32),
    ],
)
def test_an_entry_counts_its_rows_and_bytes(
    shape: tuple[int, ...], dtype: str, rows: int, row_bytes: int, num_bytes: int
) -> None:
    entry = SourceEntry(shape, dtype)
    assert (entry.rows, entry.row_bytes, entry.num_bytes) == (rows, row_bytes, num_bytes)


@pytest.mark.parametrize(
    "given",
    [
        SourceEntry((2, 3), "BF16"),
        SimpleNamespace(shape=[2, 3], dtype="BF16"),
        SimpleNamespace(shape=torch.Size([2, 3]), dtype=torch.bfloat16),
        torch.empty((2, 3), dtype=torch.bfloat16, device="meta"),
    ],
    ids=["entry", "names", "torch", "tensor"],
)
def test_anything_with_a_shape_and_a_dtype_is_an_entry(given: Any) -> None:
    entry = source_entry(given)
    assert entry == SourceEntry((2, 3), "BF16")
    assert isinstance(entry, SourceEntry)
    assert [type(size) for size in entry.shape] == [int, int]


def test_every_dtype_that_torch_has_is_known_by_its_name() -> None:
    with_torch = [name for name, dtype in DTYPES.items() if hasattr(torch, dtype.torch_name or "-")]
    assert len(with_torch) > 15
    for name in with_torch:
        assert source_entry(SimpleNamespace(shape=(), dtype=torch_dtype(name))) == SourceEntry((), name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((2, 3), "F32"), r"gave tuple as the entry of tensor 'w', and something with .shape and .dtype is needed"),
        (None, r"gave NoneType as the entry of tensor 'w'"),
        (SimpleNamespace(shape=5, dtype="F32"), r"gave SimpleNamespace as the entry"),
        (SimpleNamespace(shape=(2, -1), dtype="F32"), r"the shape \(2, -1\)"),
        (SimpleNamespace(shape=(2, 1.5), dtype="F32"), r"the shape \(2, 1.5\)"),
        (SimpleNamespace(shape=(2,), dtype="bfloat16"), r"the dtype 'bfloat16', and a torch dtype .* such as 'BF16'"),
        (SimpleNamespace(shape=(2,), dtype=torch.complex128), r"the dtype torch.complex128, and a torch dtype"),
        (SimpleNamespace(shape=(2,), dtype=float), r"the dtype <class 'float'>, and a torch dtype"),
    ],
)
def test_anything_else_is_refused_with_the_tensor_it_was_about(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source_entry(given, "w")


# What a source must have


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (object(), "object is no source of tensors: it lacks names and entry and one of read_into, get and read_parts"),
        (Described({}), "Described is no source of tensors: it lacks one of read_into, get and read_parts"),
        (SimpleNamespace(entry=print, get=print), "SimpleNamespace is no source of tensors: it lacks names"),
        (SimpleNamespace(names=[], entry=print, get=print), "SimpleNamespace is no source of tensors: it lacks names"),
    ],
    ids=["object", "described", "no names", "names no function"],
)
def test_what_a_source_lacks_is_said(source: object, missing: str) -> None:
    with pytest.raises(InputError) as refused:
        check_source(source)
    assert str(refused.value) == missing
    with pytest.raises(InputError):
        SourceReader(source)


@pytest.mark.parametrize(
    ("kind", "splits"),
    [(Getting, False), (Filling, False), (ByRows, True), (InParts, True), (AsyncFilling, True), (AsyncGetting, False)],
)
def test_only_sources_that_read_rows_or_parts_can_split(kind: Callable[..., Any], splits: bool) -> None:
    check_source(kind({}))
    assert can_split(kind({})) is splits
    assert can_split(SourceReader(kind({}))) is splits


# How a source is asked


KINDS = [Getting, Filling, ByRows, InParts, AsyncGetting, AsyncFilling, AsyncInParts]
KINDS_AND_CUTS = [(kind, 0) for kind in KINDS] + [(kind, 1) for kind in KINDS if kind is not Filling]


@pytest.mark.parametrize(("kind", "cut"), KINDS_AND_CUTS)
def test_every_kind_of_source_gives_every_tensor(kind: Callable[..., Any], cut: int) -> None:
    with SourceReader(kind(TENSORS)) as reader:
        assert_all_same(fetch_all(reader, cut=cut), TENSORS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_does_the_same_for_a_source_without_its_reader(kind: Callable[..., Any]) -> None:
    buffer = bytearray(60)
    read_parts(kind(TENSORS), [part("matrix", 0, 5, 60)], memoryview(buffer), never)
    assert bytes(buffer) == bits_of(TENSORS["matrix"])


@pytest.mark.parametrize(
    ("kind", "whole", "rows"),
    [
        (Getting, ("get", "matrix"), ("get", "matrix")),
        (ByRows, ("read_into", "matrix"), ("read_rows", "matrix", 2, 4)),
        (InParts, ("read_parts", 1), ("read_parts", 1)),
    ],
)
def test_the_best_way_that_a_source_has_is_taken(kind: Callable[..., Any], whole: Any, rows: Any) -> None:
    source = kind(TENSORS)
    reader = SourceReader(source)
    reader.names(3)
    reader.read_parts([part("matrix", 0, 5, 60)], memoryview(bytearray(60)), never)
    reader.read_parts([part("matrix", 2, 4, 24, whole=False)], memoryview(bytearray(60)), never)
    assert [call for call in source.asked if call[0] != "entry"] == [("names", 3), whole, rows]
    assert source.asked.count(("entry", "matrix")) == (0 if kind is InParts else 1)


def test_an_entry_is_asked_again_for_each_version() -> None:
    source = Getting(TENSORS)
    reader = SourceReader(source)
    for version in (1, 2):
        reader.names(version)
        assert reader.entry("matrix") == reader.entry("matrix") == SourceEntry((5, 3), "F32")
    assert source.asked == [("names", 1), ("entry", "matrix"), ("names", 2), ("entry", "matrix")]


def test_the_seconds_of_putting_together_are_returned() -> None:
    buffer = memoryview(bytearray(60))
    assert SourceReader(InParts(TENSORS)).read_parts([part("matrix", 0, 5, 60)], buffer, never) == 0.25
    assert SourceReader(Filling(TENSORS)).read_parts([part("matrix", 0, 5, 60)], buffer, never) == 0.0
    assert 0.0 < SourceReader(Getting(TENSORS)).read_parts([part("matrix", 0, 5, 60)], buffer, never) < 1.0


def test_a_reader_that_is_stopped_asks_for_nothing_more() -> None:
    source = Getting(TENSORS)
    answers = iter([False, True])
    parts = [part("matrix", 0, 5, 60), part("vector", 0, 7, 14, offset=60)]
    SourceReader(source).read_parts(parts, memoryview(bytearray(80)), lambda: next(answers))
    assert [call for call in source.asked if call[0] == "get"] == [("get", "matrix")]


def test_rows_of_a_source_that_gives_whole_tensors_only_are_refused() -> None:
    with pytest.raises(InputError, match=r"Filling has no read_rows, so tensor 'matrix' cannot be read in parts"):
        SourceReader(Filling(TENSORS)).read_parts(
            [part("matrix", 0, 2, 24, whole=False)], memoryview(bytearray(60)), never
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(3, 5), r"tensor 'matrix' came as torch.float32 of shape \[3, 5\], and its entry is torch.float32"),
        (torch.zeros(5, 3, dtype=torch.float64), r"tensor 'matrix' came as torch.float64 of shape \[5, 3\]"),
        ([[1.0] * 3] * 5, r"a source gave list for tensor 'matrix', and a tensor is needed"),
    ],
    ids=["shape", "dtype", "type"],
)
def test_a_tensor_that_is_not_what_its_entry_says_is_refused(wrong: Any, message: str) -> None:
    source = Getting(TENSORS)
    reader = SourceReader(source)
    reader.names(None)
    reader.entry("matrix")
    source.tensors["matrix"] = wrong
    with pytest.raises(LoadmasterError, match=message):
        reader.read_parts([part("matrix", 0, 5, 60)], memoryview(bytearray(60)), never)


@pytest.mark.parametrize(
    "wanted",
    [part("matrix", 0, 5, 64), part("matrix", 0, 6, 72), part("matrix", 3, 2, -12), part("scalar", 0, 1, 4)],
)
def test_a_part_that_does_not_fit_its_entry_is_refused(wanted: Part) -> None:
    with pytest.raises(LoadmasterError, match=rf"tensor '{wanted.name}' is .* here, and rows .* were wanted"):
        SourceReader(Getting(TENSORS)).read_parts([wanted], memoryview(bytearray(80)), never)


def test_a_tensor_that_needs_a_gradient_or_has_strides_is_copied_as_it_is() -> None:
    tensors = {"w": torch.randn(4, 6).t().requires_grad_(), "v": torch.randn(8)[::2]}
    with SourceReader(Getting(tensors)) as reader:
        assert_all_same(fetch_all(reader, cut=1), tensors)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", 5], "gave 5 as the name of a tensor, and a string is needed"),
        (["a", "b", "a"], "the name 'a' twice"),
    ],
)
def test_names_are_strings_and_each_is_given_once(names: list[Any], message: str) -> None:
    source = SimpleNamespace(names=lambda version: names, entry=print, get=print)
    with pytest.raises(InputError, match=message):
        SourceReader(source).names(None)


def test_the_number_of_threads_goes_through_to_a_source_that_has_one() -> None:
    reader = SourceReader(CheckpointSource("nowhere"))
    assert reader.threads == 1
    reader.threads = 3
    assert reader.source.threads == reader.threads == 3
    assert not hasattr(SourceReader(Getting({})), "threads")


def test_a_reader_is_pickled_as_one_of_the_same_source() -> None:
    reader = SourceReader(Getting(TENSORS))
    reader.names(None)
    with pickle.loads(pickle.dumps(reader)) as copy:
        assert_all_same(fetch_all(copy), TENSORS)


# Async sources


def test_all_calls_of_an_async_source_run_in_one_loop_which_is_closed_at_the_end() -> None:
    source = AsyncFilling(TENSORS)
    with SourceReader(source) as reader:
        fetch_all(reader, 1, cut=1)
        fetch_all(reader, 2)
    assert source.closed == 1
    assert len(source.loops) > 20
    assert len(set(map(id, source.loops))) == 1
    assert source.loops[0].is_closed()


def test_an_async_source_is_refused_where_a_loop_runs_and_nothing_stays_unawaited() -> None:
    reader = SourceReader(AsyncGetting(TENSORS))

    async def inside() -> None:
        with pytest.raises(InputError, match=r"in a thread that runs an event loop; .* asyncio.to_thread"):
            reader.names(None)
        assert await asyncio.to_thread(reader.names, None) == list(TENSORS)

    asyncio.run(inside())
    reader.close()


def test_tasks_that_an_async_source_left_behind_are_ended_with_its_loop() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        return task

    waiter = Waiter()
    task = waiter.result(begin())
    assert not ended
    waiter.close()
    assert ended == [True]
    assert task.cancelled()
    waiter.close()


def test_an_error_of_an_async_source_comes_through() -> None:
    async def fail() -> None:
        raise KeyError("gone")

    waiter = Waiter()
    with pytest.raises(KeyError, match="gone"):
        waiter.result(fail())
    assert waiter.result(5) == 5
    waiter.close()


# Versions


@pytest.mark.parametrize(
    ("pattern", "version", "path"),
    [
        ("ckpt", None, "ckpt"),
        ("ckpt", 7, "ckpt"),
        ("ckpt/step-{version}", 7, "ckpt/step-7"),
        ("ckpt/{version:06d}/{version}", 12, "ckpt/000012/12"),
        ("{other}/{version}", 3, "{other}/3"),
        ("ckpt/{}", None, "ckpt/{}"),
    ],
)
def test_a_version_is_put_into_a_path(pattern: str, version: int | None, path: str) -> None:
    assert with_version(pattern, version) == path


@pytest.mark.parametrize(
    ("pattern", "version", "message"),
    [
        ("ckpt/{version}", None, "ckpt/{version} needs a version, and none was given"),
        ("{version:06q}", 3, "version 3 cannot be put into {version:06q}: "),
        ("{version:06d}", "last", "version 'last' cannot be put into {version:06d}: "),
    ],
)
def test_a_version_that_cannot_be_put_into_a_path_is_refused(pattern: str, version: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        with_version(pattern, version)
    assert str(refused.value).startswith(message)


# Safetensors checkpoints


DTYPE_TENSORS = {
    f"{name}.{number}": random_tensor(shape, torch_dtype(name), number)
    for number, shape in enumerate([(), (3,), (4, 6), (2, 3, 4)])
    for name, dtype in DTYPES.items()
    if hasattr(torch, dtype.torch_name or "-") and dtype.bits >= 8
} | {
    "F4.packed": random_tensor((4, 6), torch.uint8, 9).view(torch.float4_e2m1fn_x2),
    "empty": torch.empty((0, 5)),
    "empty rows": torch.empty((5, 0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and their index, with tensors of every dtype."""
    names = sorted(DTYPE_TENSORS)
    half = len(names) // 2
    shards = {
        f"model-{number}.safetensors": {name: DTYPE_TENSORS[name] for name in part}
        for number, part in enumerate([names[:half], names[half:]])
    }
    return write_shards(tmp_path_factory.mktemp("checkpoint"), shards)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_checkpoint_gives_every_tensor_of_every_dtype(folder: Path, cut: int, threads: int) -> None:
    with SourceReader(CheckpointSource(folder, threads=threads)) as reader:
        got = fetch_all(reader, cut=cut)
    assert got.keys() == DTYPE_TENSORS.keys()
    for name, tensor in DTYPE_TENSORS.items():
        assert_same(got[name], tensor, name)


def test_a_checkpoint_reads_into_tensors(folder: Path) -> None:
    source = CheckpointSource(folder)
    for name in source.names(None):
        entry = source.entry(name)
        destination = torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype)) if entry.dtype != "F4" else None
        if destination is None:
            destination = torch.zeros(entry.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        source.read_into(name, destination)
        assert_same(destination, DTYPE_TENSORS[name], name)


def test_a_checkpoint_reads_any_rows(folder: Path) -> None:
    source = CheckpointSource(folder)
    chance = random.Random(5)
    for name in source.names(None):
        entry, tensor = source.entry(name), DTYPE_TENSORS[name]
        if name.startswith("F4") or not entry.shape:
            continue
        start = chance.randint(0, entry.rows)
        stop = chance.randint(start, entry.rows)
        destination = torch.zeros((stop - start, *entry.shape[1:]), dtype=tensor.dtype)
        source.read_rows(name, start, stop, destination)
        assert_same(destination, tensor[start:stop], name)


def test_rows_of_a_tensor_without_dimensions_are_its_one_element(folder: Path) -> None:
    source = CheckpointSource(folder)
    source.names(None)
    destination = torch.zeros((), dtype=torch.float32)
    source.read_rows("F32.0", 0, 1, destination)
    assert_same(destination, DTYPE_TENSORS["F32.0"])


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (
            torch.zeros(4, 5),
            r"'F32.2' is read into torch.float32 of shape \[4, 6\], and torch.float32 of shape ",
        ),
        (torch.zeros(4, 6, dtype=torch.float16), r"and torch.float16 of shape \[4, 6\] was given"),
        (torch.zeros(6, 4).t(), r"tensor 'F32.2' is read into contiguous CPU memory, and other memory was given"),
        (torch.zeros(4, 6, device="meta"), r"tensor 'F32.2' is read into contiguous CPU memory"),
    ],
    ids=["shape", "dtype", "strides", "device"],
)
def test_a_destination_that_does_not_fit_is_refused(folder: Path, destination: torch.Tensor, message: str) -> None:
    source = CheckpointSource(folder)
    source.names(None)
    with pytest.raises(InputError, match=message):
        source.read_into("F32.2", destination)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_rows_that_a_tensor_does_not_have_are_refused(folder: Path, start: int, stop: int) -> None:
    source = CheckpointSource(folder)
    source.names(None)
    with pytest.raises(InputError, match=rf"tensor 'F32.2' has 4 rows, and rows {start} to {stop} were wanted"):
        source.read_rows("F32.2", start, stop, torch.zeros(4, 6))


def test_a_part_that_does_not_fit_the_checkpoint_is_refused(folder: Path) -> None:
    source = CheckpointSource(folder)
    source.names(None)
    for wrong in (part("F32.2", 0, 4, 92), part("F32.2", 2, 5, 72, whole=False), part("F32.2", 1, 2, 48, whole=False)):
        with pytest.raises(LoadmasterError, match=r"tensor 'F32.2' is F32 of shape \[4, 6\] here, and rows"):
            source.read_parts([wrong], memoryview(bytearray(128)), never)


def test_each_version_is_a_folder_of_its_own(tmp_path: Path) -> None:
    for version in (3, 40):
        write_file(tmp_path / f"step-{version:04d}" / "model.safetensors", {"w": torch.full((2,), float(version))})
    source = CheckpointSource(tmp_path / "step-{version:04d}")
    with SourceReader(source) as reader:
        assert fetch_all(reader, 3)["w"].tolist() == [3, 3]
        assert fetch_all(reader, 40)["w"].tolist() == [40, 40]
        with pytest.raises(CheckpointError, match="step-0005 does not exist"):
            reader.names(5)


def test_a_path_without_a_version_is_opened_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with SourceReader(CheckpointSource(path)) as reader:
        for version in (1, 2):
            tensors = {"w": torch.full((2,), float(version)), f"new {version}": torch.zeros(1)}
            write_file(path, tensors)
            assert_all_same({name: fetch_all(reader, version)[name] for name in tensors}, tensors)


@pytest.mark.parametrize("done", ["rewritten", "cut", "gone"])
def test_a_file_that_changes_meanwhile_is_an_error_that_names_it(tmp_path: Path, done: str) -> None:
    path = write_file(tmp_path / "model.safetensors", {"first": torch.zeros(1000), "second": torch.zeros(1000)})
    source = CheckpointSource(path)
    source.names(None)
    if done == "rewritten":
        write_file(tmp_path / "new.safetensors", {"first": torch.ones(1000), "second": torch.ones(1000)})
        (tmp_path / "new.safetensors").replace(path)
        message = "model.safetensors was changed while it was being read"
    elif done == "cut":
        os.truncate(path, path.stat().st_size - 2000)
        message = r"model.safetensors was truncated while it was being read: it ends at offset \d+, in tensor 'second'"
    else:
        path.unlink()
        message = "model.safetensors cannot be read: No such file"
    with pytest.raises(CheckpointError, match=message):
        source.read_into("second", torch.zeros(1000))


def test_a_tensor_that_is_not_there_and_calls_before_names_are_refused(folder: Path) -> None:
    source = CheckpointSource(folder)
    for call in (lambda: source.entry("F32.2"), lambda: source.read_parts([], memoryview(b""), never)):
        with pytest.raises(InputError, match=r"names\(version\) comes before all other calls"):
            call()
    source.names(None)
    for call in (
        lambda: source.entry("none"),
        lambda: source.read_parts([part("none", 0, 1, 4)], memoryview(bytearray(4)), never),
    ):
        with pytest.raises(CheckpointError, match=r"checkpoint0 has no tensor 'none'"):
            call()
    source.close()
    with pytest.raises(InputError, match="comes before all other calls"):
        source.entry("F32.2")


def test_a_checkpoint_source_is_pickled_without_what_it_opened(folder: Path) -> None:
    source = CheckpointSource(folder, threads=2)
    source.names(None)
    text = pickle.dumps(source)
    assert len(text) < 500
    copy = pickle.loads(text)
    assert (copy.path, copy.threads) == (source.path, 2)
    assert copy.names(None) == source.names(None)


def test_reading_a_checkpoint_ends_between_pieces_when_it_is_stopped(tmp_path: Path) -> None:
    size = 4 << 20
    tensors = {f"t{number}": torch.ones(size, dtype=torch.uint8) for number in range(16)}
    source = CheckpointSource(write_file(tmp_path / "model.safetensors", tensors))
    source.names(None)
    parts = [part(name, 0, size, size, offset=number * size) for number, name in enumerate(sorted(tensors))]
    buffer = bytearray(16 * size)
    asked = []

    def after_the_second_piece() -> bool:
        asked.append(True)
        return len(asked) > 2

    source.read_parts(parts, memoryview(buffer), after_the_second_piece)
    assert 0 < sum(buffer) < 16 * size
    before = bytes(buffer)
    source.read_parts(parts, memoryview(buffer), lambda: True)
    assert bytes(buffer) == before
    source.read_parts(parts, memoryview(buffer), never)
    assert sum(buffer) == 16 * size


def test_neighbours_in_a_file_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number:03}": random_tensor((64,), torch.float32, number) for number in range(500)}
    source = CheckpointSource(write_file(tmp_path / "model.safetensors", tensors))
    calls = []
    read = os.preadv
    monkeypatch.setattr("loadmaster.checkpoint.reader.os.preadv", lambda *args: (calls.append(1), read(*args))[1])
    with SourceReader(source) as reader:
        assert_all_same(dict(sorted(fetch_all(reader).items())), tensors)
    assert 1 <= len(calls) <= 2
