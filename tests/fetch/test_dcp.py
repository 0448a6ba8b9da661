"""Folders of torch.distributed.checkpoint: what four ranks wrote in any sharding comes back as whole tensors."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from checkpoint.helpers.files import assert_same, bits_of, random_tensor
from loadmaster.checkpoint.dtypes import torch_dtype
from loadmaster.checkpoint.placement import Run
from loadmaster.errors import CheckpointError, InputError, LoadmasterError
from loadmaster.fetch import dcp
from loadmaster.fetch.dcp import DcpSource
from loadmaster.fetch.source import Part, SourceEntry, SourceReader, can_split

from .helpers.dcp_folders import doctor, truth, write_alone, write_with_ranks
from .helpers.sources import fetch_all

TRUTH = truth()


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    write_with_ranks(folder / "checkpoint", folder / "rendezvous")
    return folder / "checkpoint"


@pytest.fixture
def no_torch_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a chunk is not read straight to its place."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a chunk went through torch.load")

    monkeypatch.setattr(torch, "load", refuse)


# Four ranks


@pytest.mark.processes
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cut", [0, 1])
def test_every_tensor_comes_whole_in_whatever_sharding_it_was_written(
    ranks_folder: Path, no_torch_load: None, cut: int, threads: int
) -> None:
    with SourceReader(DcpSource(ranks_folder, threads=threads)) as reader:
        got = fetch_all(reader, cut=cut)
    assert got.keys() == TRUTH.keys()
    for name, tensor in TRUTH.items():
        assert_same(got[name], tensor, name)


@pytest.mark.processes
def test_any_rows_are_read_from_the_chunks_that_hold_them(ranks_folder: Path, no_torch_load: None) -> None:
    source = DcpSource(ranks_folder)
    chance = random.Random(7)
    for name in source.names(None):
        tensor = TRUTH[name]
        for _ in range(6 if tensor.dim() else 0):
            start = chance.randint(0, len(tensor))
            stop = chance.randint(start, len(tensor))
            destination = torch.zeros_like(tensor[start:stop])
            source.read_rows(name, start, stop, destination)
            assert_same(destination, tensor[start:stop], f"{name} {start}:{stop}")


@pytest.mark.processes
def test_rows_do_not_read_the_files_of_other_ranks(ranks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(Path(path).name), open_file(path, *rest))[1])
    source = DcpSource(ranks_folder)
    source.names(None)
    source.read_rows("rows", 4, 8, torch.zeros(4, 6))
    assert [name for name in opened if name.endswith(".distcp")] == ["__1_0.distcp"] * 2


@pytest.mark.processes
def test_a_tensor_without_dimensions_has_one_row(ranks_folder: Path) -> None:
    source = DcpSource(ranks_folder)
    source.names(None)
    for name in ("scalar", "plain scalar"):
        destination = torch.zeros_like(TRUTH[name])
        source.read_rows(name, 0, 1, destination)
        assert_same(destination, TRUTH[name], name)


@pytest.mark.processes
def test_a_prefix_selects_tensors_and_is_left_out_of_their_names(ranks_folder: Path) -> None:
    with SourceReader(pickle.loads(pickle.dumps(DcpSource(ranks_folder, prefix="model.")))) as reader:
        got = fetch_all(reader)
    assert {f"model.{name}" for name in got} == {name for name in TRUTH if name.startswith("model.")}
    for name, tensor in got.items():
        assert_same(tensor, TRUTH[f"model.{name}"], name)


# One process


STATE = {
    "first": random_tensor((40, 30), torch.float32, 1),
    "second": random_tensor((8, 6), torch.bfloat16, 2),
    "nested": {"deep": [random_tensor((5,), torch.int32, 3)]},
    "steps": 12,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What one process wrote."""
    return write_alone(tmp_path / "checkpoint", STATE)


def read(folder: Path, name: str, like: torch.Tensor) -> torch.Tensor:
    source = DcpSource(folder)
    source.names(None)
    destination = torch.zeros_like(like, memory_format=torch.contiguous_format)
    source.read_into(name, destination)
    return destination


def test_names_are_those_of_the_flattened_state_dict_without_what_is_no_tensor(folder: Path) -> None:
    source = DcpSource(folder)
    assert source.names(None) == ["first", "second", "nested.deep.0"]
    assert source.entry("nested.deep.0") == SourceEntry((5,), "I32")
    assert can_split(source)
    with pytest.raises(CheckpointError, match=r"checkpoint has no tensor 'steps'"):
        source.entry("steps")


def test_each_version_is_a_folder_of_its_own(tmp_path: Path) -> None:
    for version in (1, 2):
        write_alone(tmp_path / f"step-{version:03d}", {"w": torch.full((4,), float(version))})
    with SourceReader(DcpSource(tmp_path / "step-{version:03d}")) as reader:
        assert [fetch_all(reader, version)["w"].tolist() for version in (1, 2)] == [[1.0] * 4, [2.0] * 4]
        with pytest.raises(InputError, match="needs a version"):
            reader.names(None)


def test_a_folder_that_was_written_anew_is_read_anew(folder: Path) -> None:
    with SourceReader(DcpSource(folder)) as reader:
        assert_same(fetch_all(reader)["second"], STATE["second"])
        write_alone(folder, {"second": torch.ones(3, 3)})
        assert_same(fetch_all(reader)["second"], torch.ones(3, 3))


STRANGE = {
    "transposed": random_tensor((30, 40), torch.float32, 5).t(),
    "channels last": random_tensor((2, 3, 4, 5), torch.float32, 6).to(memory_format=torch.channels_last),
    "negative view": torch._neg_view(random_tensor((3, 4), torch.float32, 7)),
    "one row": random_tensor((6,), torch.float32, 8).as_strided((1, 6), (99, 1)),
}


def test_chunks_with_strides_of_their_own_go_through_torch_load(tmp_path: Path) -> None:
    folder = write_alone(tmp_path / "checkpoint", STRANGE)
    source = DcpSource(folder)
    with SourceReader(source) as reader:
        for cut in (0, 1):
            got = fetch_all(reader, cut=cut)
            for name, tensor in STRANGE.items():
                assert_same(got[name], tensor, name)
        ways = {name: [source._located[chunk] for chunk in source._find(name).chunks] for name in STRANGE}
    assert {name: way != [None] for name, way in ways.items()} == {
        "transposed": False,
        "channels last": False,
        "negative view": False,
        "one row": True,
    }


class Flipped(_extension.StreamTransformExtension):
    """Stores every byte with all its bits flipped."""

    @staticmethod
    def registry_name() -> str:
        return "test.flipped"

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        return Flipped()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(byte ^ 255 for byte in memoryview(data).cast("B")))
                return len(memoryview(data).cast("B"))

        return Writer()  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read(-1)))


def test_transformed_chunks_are_read_as_torch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_alone(tmp_path / "checkpoint", STATE, _extensions=[Flipped()])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'second' cannot be read at offset \d+: .*flipped"):
        read(folder, "second", STATE["second"])
    monkeypatch.setattr(
        _extension.ExtensionRegistry, "from_descriptor_list", lambda self, descriptors: [Flipped() for _ in descriptors]
    )
    assert_same(read(folder, "second", STATE["second"]), STATE["second"])


def test_an_older_form_of_torch_save_is_read_as_torch_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, file: save(value, file, _use_new_zipfile_serialization=False))
    folder = write_alone(tmp_path / "checkpoint", STATE)
    assert_same(read(folder, "second", STATE["second"]), STATE["second"])


def test_a_chunk_may_lie_anywhere_in_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_torch_load: None
) -> None:
    save = torch.save

    def save_a_view(value: torch.Tensor, file: Any) -> None:
        larger = torch.cat([torch.zeros(5, dtype=value.dtype), value.flatten(), torch.zeros(3, dtype=value.dtype)])
        save(larger[5:-3].view(value.shape), file)

    monkeypatch.setattr(torch, "save", save_a_view)
    folder = write_alone(tmp_path / "checkpoint", {"second": STATE["second"]})
    assert_same(read(folder, "second", STATE["second"]), STATE["second"])


def test_a_chunk_that_would_lie_beyond_its_archive_is_left_to_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = dcp._describe
    monkeypatch.setattr(dcp, "_describe", lambda text: describe(text)._replace(first=1000))
    assert_same(read(folder, "second", STATE["second"]), STATE["second"])


def test_columns_are_one_run_of_strides() -> None:
    columns = dcp._box_runs((5, 4, 3), (5, 16, 3), (0, 8, 0), 2, 1000, 64)
    assert list(columns) == [Run(1000, 24, 64 + 48, 96, 24, 5)]
    assert len(list(dcp._box_runs((5, 4, 3), (5, 16, 6), (0, 8, 3), 2, 1000, 64))) == 5 * 4


def test_bytes_of_another_order_are_left_to_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp.sys, "byteorder", "big")
    loads = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **named: (loads.append(1), load(*args, **named))[1])
    read(folder, "second", STATE["second"])
    assert loads == [1]


def test_the_pickle_of_a_chunk_runs_nothing(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(pickle.UnpicklingError, match="mkdir is not part of a plain tensor"):
        dcp._describe(pickle.dumps(Bad()))
    assert not (tmp_path / "ran").exists()


def test_reading_ends_between_pieces_when_it_is_stopped(tmp_path: Path) -> None:
    size = 4 << 20
    tensors = {f"t{number}": torch.ones(size, dtype=torch.uint8) for number in range(12)}
    tensors["turned"] = torch.ones((2048, 2048), dtype=torch.uint8).t()
    source = DcpSource(write_alone(tmp_path / "checkpoint", {**tensors, "turned": torch.ones(64, 32).t()}))
    source.names(None)
    parts = [Part(f"t{number}", 0, size, number * size, size, True) for number in range(12)]
    parts.append(Part("turned", 0, 32, 12 * size, 64 * 32 * 4, True))
    buffer = bytearray(12 * size + 64 * 32 * 4)
    asked: list[bool] = []

    def after_the_second_piece() -> bool:
        asked.append(True)
        return len(asked) > 2

    source.read_parts(parts, memoryview(buffer), after_the_second_piece)
    assert 0 < sum(buffer) < 12 * size
    assert not any(buffer[12 * size :])
    source.read_parts(parts, memoryview(buffer), never)
    assert sum(buffer[: 12 * size]) == 12 * size
    assert bytes(buffer[12 * size :]) == bits_of(torch.ones(32, 64))


def test_a_part_that_does_not_fit_the_tensor_is_refused(folder: Path) -> None:
    source = DcpSource(folder)
    source.names(None)
    with pytest.raises(LoadmasterError, match=r"tensor 'second' is BF16 of shape \[8, 6\] here, and rows 0 to 9"):
        source.read_parts([Part("second", 0, 9, 0, 108, True)], memoryview(bytearray(200)), never)


def test_calls_before_names_are_refused(folder: Path) -> None:
    source = DcpSource(folder)
    for begin in (lambda: None, lambda: (source.names(None), source.close())):
        begin()
        with pytest.raises(InputError, match=r"names\(version\) comes before all other calls"):
            source.entry("first")


# Folders that are not what they should be


def test_a_folder_without_metadata_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist: it is no complete folder of torch.distributed"):
        DcpSource(tmp_path / "nowhere").names(None)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint has no .metadata, which is written last: it is no complete"):
        DcpSource(folder).names(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"\.metadata is broken: EOFError"),
        (b"not a pickle", r"\.metadata is broken: UnpicklingError"),
        (pickle.dumps({"tensors": []}), r"\.metadata is broken: "),
    ],
    ids=["empty", "no pickle", "other pickle"],
)
def test_broken_metadata_are_refused(folder: Path, text: bytes, message: str) -> None:
    (folder / ".metadata").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        DcpSource(folder).names(None)


def _change(name: str, **fields: Any) -> Callable[[Any], None]:
    """Give the one chunk of a tensor another place, and its file the same."""

    def change(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata[name].chunks[0]
        info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
        for field, value in fields.items():
            setattr(chunk, field, torch.Size(value))
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = info

    return change


def _twice(metadata: Any) -> None:
    stored = metadata.state_dict_metadata["second"]
    stored.chunks.append(ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([4, 6])))
    metadata.storage_data[MetadataIndex("second", [4, 0])] = metadata.storage_data[MetadataIndex("second", [0, 0])]


def _dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["second"].properties.dtype = torch.float16


def _unknown_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["second"].properties.dtype = torch.complex128


def _taller(metadata: Any) -> None:
    metadata.state_dict_metadata["second"].size = torch.Size([10, 6])


def _of_another_shape(metadata: Any) -> None:
    metadata.state_dict_metadata["second"].size = torch.Size([6, 8])
    metadata.state_dict_metadata["second"].chunks[0].sizes = torch.Size([6, 8])


def _in_no_file(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex("second", [0, 0])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _taller,
            r"\.metadata: tensor 'second' of shape \[10, 6\] has holes: its chunks hold 48 elements and it has 60$",
        ),
        (_twice, r"\.metadata: tensor 'second' of shape \[8, 6\] has chunks that overlap: its chunks hold 72 elements"),
        (_change("second", offsets=[1, 0]), r"has a chunk of shape \[8, 6\] at \[1, 0\], which leaves it"),
        (_change("second", offsets=[0, -1]), r"has a chunk of shape \[8, 6\] at \[0, -1\], which leaves it"),
        (_change("second", sizes=[8]), r"has a chunk of shape \[8\] at \[0, 0\], which leaves it"),
        (_in_no_file, r"tensor 'second' has a chunk at \[0, 0\] that is in no file"),
        (
            _dtype,
            r"0.distcp: tensor 'second' has at offset \d+ a chunk of dtype BF16 and shape \[8, 6\], and .metadata ",
        ),
        (_of_another_shape, r"a chunk of dtype BF16 and shape \[8, 6\], and .metadata says BF16 and \[6, 8\]"),
        (_unknown_dtype, r"checkpoint: tensor 'second': torch dtype complex128 has no counterpart"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_with_the_tensor(
    folder: Path, change: Callable[[Any], None], message: str
) -> None:
    doctor(folder, change)
    source = DcpSource(folder)
    source.names(None)

    def use() -> None:
        entry = source.entry("second")
        source.read_into("second", torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype)))

    with pytest.raises(CheckpointError, match=message):
        use()


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float64, (40, 30)), (torch.float32, (30, 40))], ids=["dtype", "shape"]
)
def test_a_chunk_that_torch_loads_and_is_of_another_kind_is_refused(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    def change(metadata: Any) -> None:
        stored = metadata.state_dict_metadata["transposed"]
        stored.properties.dtype, stored.size = dtype, torch.Size(shape)
        stored.chunks[0].sizes = torch.Size(shape)

    folder = write_alone(tmp_path / "checkpoint", {"transposed": STRANGE["transposed"]})
    doctor(folder, change)
    with pytest.raises(CheckpointError, match=r"tensor 'transposed' has at offset 0 a chunk of dtype .*float32 and"):
        read(folder, "transposed", torch.zeros(shape, dtype=dtype))


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata names the file __0_0.distcp, which cannot be read: No such"):
        DcpSource(folder).names(None)


@pytest.mark.parametrize("kind", [torch.Tensor.contiguous, torch.Tensor.t], ids=["direct", "loaded"])
def test_a_file_that_was_cut_is_named_with_the_tensor(tmp_path: Path, kind: Callable[[torch.Tensor], Any]) -> None:
    value = kind(torch.randn(300, 400))
    folder = write_alone(tmp_path / "checkpoint", {"w": value})
    os.truncate(folder / "__0_0.distcp", 200_000)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'w' cannot be read at offset 0: RuntimeError"):
        read(folder, "w", value)


def test_a_file_that_changes_meanwhile_is_named_also_where_torch_loads_it(tmp_path: Path) -> None:
    source = DcpSource(write_alone(tmp_path / "checkpoint", {"transposed": STRANGE["transposed"]}))
    source.names(None)
    with (tmp_path / "checkpoint" / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp was changed while it was being read"):
        source.read_into("transposed", torch.zeros(40, 30))


@pytest.mark.parametrize("when", ["before", "after the look"])
def test_a_file_that_changes_meanwhile_is_named(folder: Path, when: str) -> None:
    source = DcpSource(folder)
    source.names(None)
    if when == "after the look":
        source.read_into("second", torch.zeros(8, 6, dtype=torch.bfloat16))
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp was changed while it was being read"):
        source.read_into("second", torch.zeros(8, 6, dtype=torch.bfloat16))


def test_a_file_that_ends_too_early_after_the_look_is_named_with_the_tensor(folder: Path) -> None:
    source = DcpSource(folder)
    source.names(None)
    parts = {"first": (40, 4800), "second": (8, 96)}
    for name, (rows, num_bytes) in parts.items():
        source.read_parts([Part(name, 0, rows, 0, num_bytes, True)], memoryview(bytearray(num_bytes)), never)
    os.truncate(folder / "__0_0.distcp", source._located[source._find("second").chunks[0]] + 10)
    with pytest.raises(CheckpointError, match=re.compile(r"__0_0.distcp was truncated .* in tensor 'second'")):
        source.read_parts([Part("second", 0, 8, 0, 96, True)], memoryview(bytearray(96)), never)
