"""Folders of ``torch.distributed.checkpoint`` as a source: what many ranks wrote in pieces becomes whole tensors.

    .metadata         which chunks a tensor has, and where each lies    --+
    __0_0.distcp      |chunk|chunk|....|                                  +--> rows of whole tensors, in one process,
    __1_0.distcp      |chunk|....|                                      --+    without a process group

A chunk is what ``torch.save`` makes of one rank's part: a zip archive that holds the bytes as they are. Where they lie
is found out once for each chunk (0.1 ms), and then they are read straight to their place, like those of a safetensors
file: ``torch.load`` reads a whole chunk into memory of its own first, also for a few of its rows. Chunks that are
stored in another way (transposed, compressed, on another kind of machine) go through ``torch.load``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadmaster.checkpoint.dtypes import DTYPES, import_torch, item_bytes, name_of_torch_dtype, torch_dtype
from loadmaster.checkpoint.pieces import PlacedRun, Reads, plan_runs
from loadmaster.checkpoint.placement import Run
from loadmaster.checkpoint.safetensors import FileIdentity
from loadmaster.errors import CheckpointError, InputError
from loadmaster.fetch.parts_source import PartsSource
from loadmaster.fetch.source import (
    Part,
    SourceEntry,
    check_part,
    read_until_stopped,
    tensor_in,
    with_version,
)

if TYPE_CHECKING:
    import torch

__all__ = ["DcpSource", "is_dcp"]

METADATA_NAME = ".metadata"


def is_dcp(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder of torch.distributed.checkpoint."""
    return Path(path, METADATA_NAME).exists()


Sizes = tuple[int, ...]


class _Chunk(NamedTuple):
    """A box of a tensor, and the archive that holds it: ``archive_bytes`` at ``archive`` of ``file``.

    A tensor without dimensions counts as one row of one element.
    """

    offsets: Sizes
    sizes: Sizes
    file: str
    archive: int
    archive_bytes: int
    transforms: tuple[str, ...]


class _Stored(NamedTuple):
    """A tensor of the folder: what it is, and its chunks in the order of their rows."""

    entry: SourceEntry
    chunks: list[_Chunk]


class DcpSource(PartsSource):
    """A folder that ``torch.distributed.checkpoint`` wrote, in whatever sharding, as a source of whole tensors.

    Names are those of the flattened state dict, such as ``model.layers.0.weight``; what is no tensor is left out.

    ``.metadata`` is a pickle, and unpickling runs what is in it: it is trusted exactly as torch trusts it, so open only
    folders that you would load with torch. The tensors themselves are read without running anything from the files.

    Parameters
    ----------
    path : path
        With ``{version}`` in it, such as ``ckpt/step-{version}``, every version is a folder of its own; without, every
        version is this same folder, opened again each time.
    prefix : str
        Only tensors whose names begin so, without this beginning: ``prefix="model."`` leaves the optimizer out.
    threads : int
        How many threads read in each process.

    Raises
    ------
    CheckpointError
        By each call: ``.metadata`` is missing or broken, a file is missing, truncated or changed, a tensor has holes or
        chunks that are not what ``.metadata`` says; names file, tensor and offset.
    """

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = "", threads: int = 1) -> None:
        self.path = os.fspath(path)
        self.prefix = prefix
        self.threads = threads
        self._folder = ""
        self._metadata: Any = None
        self._stored: dict[str, _Stored] = {}
        self._located: dict[_Chunk, int | None] = {}
        self._files: dict[str, FileIdentity] = {}

    def __repr__(self) -> str:
        return f"DcpSource({self.path!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _dcp_source, (self.path, self.prefix, self.threads)

    def names(self, version: int | None) -> list[str]:
        """Read ``.metadata`` of ``version``, and see that the files it names are there."""
        import_torch()
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.close()
        folder = with_version(self.path, version)
        metadata = _read_metadata(folder)
        for file in sorted({info.relative_path for info in metadata.storage_data.values()}):
            self._files[f"{folder}/{file}"] = _identity(folder, file)
        self._folder, self._metadata = folder, metadata
        return [
            name.removeprefix(self.prefix)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and name.startswith(self.prefix)
        ]

    def entry(self, name: str) -> SourceEntry:
        """Shape and dtype, from the metadata."""
        return self._find(name).entry

    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> float:
        """Read many parts, each file opened once and read in its order; see `SourceReader.read_parts`.

        Returns the seconds that copies out of chunks took which could not be read straight to their place.
        """
        runs: list[PlacedRun] = []
        others: list[tuple[Part, _Chunk]] = []
        places: dict[str, list[tuple[int, str]]] = {}
        with _Archives(self._files) as archives:
            for part in parts:
                if not part.num_bytes:
                    continue
                stored = self._find(part.name)
                check_part(part, stored.entry)
                for chunk in _chunks_of(part, stored):
                    data = self._locate(part.name, stored.entry, chunk, archives)
                    if data is None:
                        others.append((part, chunk))
                        continue
                    places.setdefault(chunk.file, []).append((data, part.name))
                    runs += [(chunk.file, run, 0, 0) for run in _runs_of(part, stored.entry, chunk, data)]
        reads = [(file, run.source, run.num_bytes, 0, run.target) for file, run, _, _ in runs if run.num_runs == 1]
        strided = [run for run in runs if run[1].num_runs > 1]
        pieces = plan_runs(Reads.of(reads), strided, [buffer])
        read_until_stopped(pieces, self._files, self.threads, stopped, lambda file, at: _name_at(places[file], at))
        return self._copy_others(others, buffer, stopped)

    def close(self) -> None:
        """Forget the folder; no file is open between calls."""
        self._folder, self._metadata = "", None
        self._stored, self._located, self._files = {}, {}, {}

    def _find(self, name: str) -> _Stored:
        """The tensor ``name``, its chunks checked against each other when it is first asked for."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        known = self._stored.get(name)
        if known is not None:
            return known
        if self._metadata is None:
            raise InputError(f"{self!r}: names(version) comes before all other calls")
        found = self._metadata.state_dict_metadata.get(self.prefix + name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder} has no tensor {name!r}")
        try:
            dtype = name_of_torch_dtype(found.properties.dtype)
        except CheckpointError as unknown:
            raise CheckpointError(f"{self._folder}: tensor {name!r}: {unknown}") from None
        entry = SourceEntry(tuple(found.size), dtype)
        stored = self._stored[name] = _Stored(entry, self._chunks_in(name, entry, found))
        return stored

    def _chunks_in(self, name: str, entry: SourceEntry, found: Any) -> list[_Chunk]:
        """The chunks of one tensor that have elements; they lie inside it and fill it."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        shape = entry.shape or (1,)
        chunks: dict[Sizes, _Chunk] = {}
        for chunk in found.chunks:
            if not math.prod(chunk.sizes):
                continue
            info = self._metadata.storage_data.get(MetadataIndex(self.prefix + name, chunk.offsets))
            if info is None:
                raise CheckpointError(
                    f"{self._metadata_file}: tensor {name!r} has a chunk at {list(chunk.offsets)} that is in no file"
                )
            offsets, sizes = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
            if not len(offsets) == len(sizes) == len(shape) or min(offsets) < 0 or any(map(int.__gt__, ends, shape)):
                raise CheckpointError(
                    f"{self._metadata_file}: tensor {name!r} of shape {list(entry.shape)} has a chunk of shape "
                    f"{list(chunk.sizes)} at {list(chunk.offsets)}, which leaves it"
                )
            file = f"{self._folder}/{info.relative_path}"
            transforms = tuple(getattr(info, "transform_descriptors", None) or ())
            chunks[offsets] = _Chunk(offsets, sizes, file, info.offset, info.length, transforms)
        held, wanted = sum(math.prod(chunk.sizes) for chunk in chunks.values()), math.prod(shape)
        if held != wanted:
            what = "holes" if held < wanted else "chunks that overlap"
            raise CheckpointError(
                f"{self._metadata_file}: tensor {name!r} of shape {list(entry.shape)} has {what}: its chunks hold "
                f"{held} elements and it has {wanted}"
            )
        return [chunks[offsets] for offsets in sorted(chunks)]

    @property
    def _metadata_file(self) -> str:
        return f"{self._folder}/{METADATA_NAME}"

    def _locate(self, name: str, entry: SourceEntry, chunk: _Chunk, archives: _Archives) -> int | None:
        """Where in its file the bytes of ``chunk`` begin, in the order of its dimensions; None where they do not."""
        if chunk not in self._located:
            self._located[chunk] = _find_data(name, entry, chunk, archives)
        return self._located[chunk]

    def _copy_others(self, others: list[tuple[Part, _Chunk]], buffer: memoryview, stopped: Callable[[], bool]) -> float:
        """Bring those parts of chunks to their place that only ``torch.load`` can read."""
        assembling = 0.0
        with _Archives(self._files) as archives:
            for part, chunk in others:
                if stopped():
                    break
                entry = self._find(part.name).entry
                value = _load_chunk(part.name, entry, chunk, archives)
                started = time.perf_counter()
                _copy_rows(value, part, entry, chunk, buffer)
                assembling += time.perf_counter() - started
        return assembling


def _chunks_of(part: Part, stored: _Stored) -> Iterator[_Chunk]:
    """The chunks that hold some of the rows of ``part``."""
    for chunk in stored.chunks:
        if chunk.offsets[0] < part.stop and part.start < chunk.offsets[0] + chunk.sizes[0]:
            yield chunk


def _dcp_source(path: str, prefix: str, threads: int) -> DcpSource:
    return DcpSource(path, prefix=prefix, threads=threads)


def _read_metadata(folder: str) -> Any:
    """Read ``.metadata`` with torch's own reader."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    file = Path(folder) / METADATA_NAME
    if not file.is_file():
        what = "does not exist" if not Path(folder).exists() else "has no .metadata, which is written last"
        raise CheckpointError(f"{folder} {what}: it is no complete folder of torch.distributed.checkpoint")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except OSError as refused:
        raise CheckpointError(f"{file} cannot be read: {refused.strerror or refused}") from None
    except Exception as broken:  # a pickle that is broken may raise anything
        raise CheckpointError(f"{file} is broken: {type(broken).__name__}: {broken}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file} is broken: it does not say where the tensors are")
    return metadata


def _identity(folder: str, file: str) -> FileIdentity:
    try:
        return FileIdentity.of((Path(folder) / file).stat())
    except OSError as refused:
        raise CheckpointError(
            f"{folder}: {METADATA_NAME} names the file {file}, which cannot be read: {refused.strerror or refused}"
        ) from None


def _name_at(places: list[tuple[int, str]], offset: int) -> str:
    """The tensor that is read at ``offset``: the last one that begins at or before it."""
    return max((place for place in places if place[0] <= offset), default=(0, ""))[1]


class _Archives:
    """The files whose chunks are being looked at, each opened once; closed together."""

    def __init__(self, files: Mapping[str, FileIdentity]) -> None:
        self._files = files
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> _Archives:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def slice_of(self, chunk: _Chunk) -> _Slice:
        """The archive of one chunk, as a file of its own."""
        descriptor = self._descriptors.get(chunk.file)
        if descriptor is None:
            try:
                descriptor = os.open(chunk.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as refused:
                raise CheckpointError(f"{chunk.file} cannot be read: {refused.strerror or refused}") from None
            self._descriptors[chunk.file] = descriptor
            if FileIdentity.of(os.fstat(descriptor)) != self._files[chunk.file]:
                raise CheckpointError(f"{chunk.file} was changed while it was being read; load it again when complete")
        return _Slice(descriptor, chunk.archive, chunk.archive_bytes)


class _Slice(io.RawIOBase):
    """``num_bytes`` of an open file from ``start`` on, as a file."""

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._at)]
        got = os.preadv(self._descriptor, [into], self._start + self._at) if into else 0
        self._at += got
        return got


def _find_data(name: str, entry: SourceEntry, chunk: _Chunk, archives: _Archives) -> int | None:
    """Look into the archive of a chunk; None where its bytes do not lie there as they go to memory.

    Raises
    ------
    CheckpointError
        The chunk is of another shape or dtype than the metadata say.
    """
    if chunk.transforms:
        return None
    torch = import_torch()
    try:
        archive = torch._C.PyTorchFileReader(archives.slice_of(chunk))
        described = _describe(archive.get_record("data.pkl"))
        order = archive.get_record("byteorder").decode() if archive.has_record("byteorder") else sys.byteorder
        if described is None or order != sys.byteorder:
            return None
        begin = archive.get_record_offset(f"data/{described.key}")
    except (RuntimeError, OSError, AttributeError, ValueError, EOFError, pickle.UnpicklingError):
        return None  # `torch.load` reads it, or says what is wrong
    _check_chunk(name, entry, chunk, described.dtype, described.sizes)
    begin += described.first * item_bytes(entry.dtype)
    if begin + math.prod(chunk.sizes) * item_bytes(entry.dtype) > chunk.archive_bytes:
        return None
    return int(chunk.archive + begin)


class _Described(NamedTuple):
    """What the pickle in an archive says of its tensor: contiguous, ``first`` elements into the record ``key``."""

    dtype: str
    key: str
    first: int
    sizes: Sizes


_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
"""The storages of torch's older form; newer dtypes are given by their own names."""


class _TensorPickle(pickle.Unpickler):
    """Reads the pickle of one plain tensor and runs nothing: every global is a name, the two that build are tuples."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda *arguments: (name, *arguments)
        if module in ("torch", "torch.storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, storage: Any) -> Any:
        return storage


def _describe(text: bytes) -> _Described | None:
    """What ``text`` says, or None where it is anything but a plain contiguous tensor."""
    value = _TensorPickle(io.BytesIO(text)).load()
    if not isinstance(value, tuple) or value[0] not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return None
    (_, kind, key, _, _), first, sizes, strides = value[1:5]
    more = value[7:]
    if value[0] == "_rebuild_tensor_v3":
        names = {dtype.torch_name: name for name, dtype in DTYPES.items() if dtype.torch_name}
        dtype, more = names.get(more[0]), more[1:]
    else:
        dtype = _STORAGES.get(kind)
    if dtype is None or any(more) or not _is_contiguous(sizes, strides):
        return None
    return _Described(dtype, key, first, tuple(sizes))


def _is_contiguous(sizes: Sizes, strides: Sizes) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_chunk(name: str, entry: SourceEntry, chunk: _Chunk, dtype: str, sizes: Sizes) -> None:
    if dtype != entry.dtype or (sizes or (1,)) != chunk.sizes:
        raise CheckpointError(
            f"{chunk.file}: tensor {name!r} has at offset {chunk.archive} a chunk of dtype {dtype} and shape "
            f"{list(sizes)}, and {METADATA_NAME} says {entry.dtype} and {list(chunk.sizes)}"
        )


def _load_chunk(name: str, entry: SourceEntry, chunk: _Chunk, archives: _Archives) -> torch.Tensor:
    """Read a chunk as torch's own reader does."""
    torch = import_torch()
    try:
        stream: Any = archives.slice_of(chunk)
        if chunk.transforms:
            from torch.distributed.checkpoint.filesystem import FileSystemReader

            transforms = FileSystemReader(str(Path(chunk.file).parent)).transforms
            descriptors: Any = chunk.transforms
            whole: Any = None
            stream = io.BytesIO(transforms.transform_load_stream(whole, descriptors, stream).read(-1))
        value = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as broken:  # what is broken may raise anything
        raise CheckpointError(
            f"{chunk.file}: tensor {name!r} cannot be read at offset {chunk.archive}: {type(broken).__name__}: {broken}"
        ) from None
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{chunk.file}: tensor {name!r} has at offset {chunk.archive} a {type(value).__name__}, which is no tensor"
        )
    if value.dtype != torch_dtype(entry.dtype) or (tuple(value.shape) or (1,)) != chunk.sizes:
        _check_chunk(name, entry, chunk, str(value.dtype), tuple(value.shape))
    return value  # type: ignore[no-any-return]


def _copy_rows(value: torch.Tensor, part: Part, entry: SourceEntry, chunk: _Chunk, buffer: memoryview) -> None:
    """Copy those rows of a chunk that belong to ``part``."""
    first, last = _rows_in(part, chunk)
    place = tensor_in(buffer, part, entry).view((part.stop - part.start, *entry.shape[1:]))
    box = [slice(chunk.offsets[0] + first - part.start, chunk.offsets[0] + last - part.start)]
    box += [slice(offset, offset + size) for offset, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
    place[tuple(box)].copy_(value.detach().reshape(chunk.sizes)[first:last])


def _rows_in(part: Part, chunk: _Chunk) -> tuple[int, int]:
    """The rows of ``chunk``, counted in it, that belong to ``part``."""
    begin = chunk.offsets[0]
    return max(part.start - begin, 0), min(part.stop - begin, chunk.sizes[0])


def _runs_of(part: Part, entry: SourceEntry, chunk: _Chunk, data: int) -> Iterator[Run]:
    """Where the rows of ``part`` in ``chunk`` go: runs from the file, whose ``data`` are the chunk's, to the buffer."""
    first, last = _rows_in(part, chunk)
    item = item_bytes(entry.dtype)
    source = data + first * math.prod(chunk.sizes[1:]) * item
    target = part.offset + (chunk.offsets[0] + first - part.start) * entry.row_bytes
    sizes = (last - first, *chunk.sizes[1:])
    yield from _box_runs(sizes, (last - first, *entry.shape[1:]), (0, *chunk.offsets[1:]), item, source, target)


def _box_runs(sizes: Sizes, shape: Sizes, at: Sizes, item: int, source: int, target: int) -> Iterator[Run]:
    """Lay a contiguous box of ``sizes`` at ``at`` of a tensor of ``shape``, all in elements of ``item`` bytes.

    A box that is narrower in one dimension is one run of strides; with more of them, one for each index before.
    """
    narrow = [dim for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size != whole]
    if not narrow:
        num_bytes = math.prod(sizes) * item
        yield Run(source, num_bytes, target, num_bytes, num_bytes, 1)
        return
    dim = narrow[0]
    inner, wide = math.prod(sizes[dim + 1 :]) * item, math.prod(shape[dim + 1 :]) * item
    count = math.prod(sizes[:dim])
    if len(narrow) == 1:
        num_bytes = sizes[dim] * inner
        yield Run(source, num_bytes, target + at[dim] * inner, shape[dim] * inner, num_bytes, count)
        return
    for outer in range(count):
        for index in range(sizes[dim]):
            begin = source + (outer * sizes[dim] + index) * inner
            place = target + (outer * shape[dim] + at[dim] + index) * wide
            yield from _box_runs(sizes[dim + 1 :], shape[dim + 1 :], at[dim + 1 :], item, begin, place)
