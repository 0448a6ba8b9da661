"""Writes a seeded checkpoint of a family: real names and shapes, the same bytes each time, faster than 1 GiB/s.

    request --fit--> model --> plan (documents, shards) --> NAME.loadmaster-partial, ... --all written--> NAME, ...

Nothing is held in memory but one block of random values per kind of tensor. Every tensor starts at its own place in the
block and goes round it, so that a tensor costs a few slices and one vectored write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from loadmaster.bench.families import DTYPE_BYTES, Model, TensorSpec, family_named, fit
from loadmaster.errors import InputError, LoadmasterError

__all__ = ["MadeCheckpoint", "make_checkpoint", "parse_size"]

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PARTIAL = ".loadmaster-partial"
FORMAT_VERSION = 1  # a change of the bytes that the same arguments give needs another number
SMALL_TENSOR_BYTES, SMALL_TENSOR_ROWS = 4096, 32
LARGEST_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
SEGMENTS_PER_WRITE = 64  # at most 512 MiB: Ctrl-C waits for the end of a write

# A block has a prime number of values. Rows and tensors of any width then start at other places of it each time, and no
# two of a tensor's first two million rows are the same.
BLOCK_VALUES = 2_097_143
VALUES_BETWEEN_TENSORS = 1_296_105  # 0.618 of a block: neighbours start far from each other


class Pattern(NamedTuple):
    """Which bits of a value are random (``keep``) and which are always set, in its unsigned integer type."""

    integer: str
    keep: int
    always: int = 0


PATTERNS = {
    "u8": Pattern("<u1", 0xFF),
    "e8m0": Pattern("<u1", 0x0F, 0x70),  # 2**-15 to 1; 0xFF would be NaN
    "fp8": Pattern("<u1", 0xBF),  # e4m3, below 2; 0x7F and 0xFF would be NaN
    "fp8_scale": Pattern("<u1", 0x1F, 0x20),  # e4m3, positive, 1/8 to 2
    "bf16": Pattern("<u2", 0x81FF, 0x3C00),  # 1/128 to 1/8 and both signs, as trained weights are
    "f32": Pattern("<u4", 0x01FFFFFF, 0x3C000000),  # positive, 1/128 to 1/8: also finite as a half
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCheckpoint:
    """What was made: ``num_bytes`` of tensors in ``files``, in ``seconds`` (of which ``reused`` ones took none)."""

    folder: Path
    family: str
    seed: int
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    seconds: float
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that the bytes of a checkpoint depend on; written into its ``config.json``, to know the checkpoint again."""

    family: str
    size_bytes: int
    shard_bytes: int
    seed: int
    tensors: int | None
    layers: int | None
    version: int = FORMAT_VERSION

    def model(self) -> Model:
        """Return the model that was asked for, or raise an ``InputError`` that says why there is none."""
        counts = [self.size_bytes, self.shard_bytes, self.tensors, self.layers]
        if min(count for count in counts if count is not None) < 1 or self.seed < 0:
            raise InputError(
                "size, shard size, number of tensors and of layers must be at least 1, and the seed at least 0"
            )
        if self.tensors is None:
            return fit(self.family, self.size_bytes, self.layers)
        if self.layers is not None:
            raise InputError("give a number of tensors or of layers, not both")
        if "tensor_columns" not in family_named(self.family).widths:
            raise InputError(f"a number of tensors can be chosen for small-tensors only, not for {self.family}")
        row_bytes = SMALL_TENSOR_ROWS * DTYPE_BYTES["BF16"]
        columns = self.size_bytes // self.tensors // row_bytes
        if columns < 1:
            raise InputError(f"{self.tensors} tensors need at least {self.tensors * row_bytes} bytes")
        return fit(self.family, self.tensors * columns * row_bytes, tensor_columns=columns)


class Shard(NamedTuple):
    """One file: its header, and its tensors in the order of the file, each with its number in the model."""

    name: str
    header: bytes
    tensors: list[tuple[int, TensorSpec]]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(spec.num_bytes for _, spec in self.tensors)


class Plan(NamedTuple):
    """The whole content of the folder: small documents by name, and shards."""

    documents: dict[str, bytes]
    shards: list[Shard]

    @property
    def names(self) -> list[str]:
        """All file names; the index comes before the shards, so that it is there to miss them."""
        return [*self.documents, *(shard.name for shard in self.shards)]


def make_checkpoint(
    folder: Path | str,
    family: str,
    size_bytes: int | None = None,
    *,
    shard_bytes: int = 512 << 20,
    seed: int = 0,
    tensors: int | None = None,
    layers: int | None = None,
) -> MadeCheckpoint:
    """Write a checkpoint of ``family`` with about ``size_bytes`` of tensors, or find it there already.

    A run that is killed leaves only ``*.loadmaster-partial`` files, which the next run replaces. (Nothing is flushed to
    the disk: the files are wanted in the page cache, and a power cut is no concern of a benchmark.)

    Parameters
    ----------
    folder
        Is made if it is missing; must be empty, or hold the very checkpoint asked for.
    size_bytes
        2 GiB by default, or 4 KiB for each of ``tensors``. It is met within 5 %, mostly 1 %.
    shard_bytes
        Largest data of one file; a larger tensor gets a file by itself.
    tensors
        For the family ``small-tensors``: the exact number of tensors, which share ``size_bytes``.
    layers
        The exact number of layers; default deep before wide, as few models are shallow.

    Raises
    ------
    InputError
        An unknown family, a size that it cannot have, a folder that cannot be used, or a lack of disk space.
    LoadmasterError
        Writing failed.
    """
    start = time.perf_counter()
    if size_bytes is None:
        size_bytes = 2 << 30 if tensors is None else tensors * SMALL_TENSOR_BYTES
    request = Request(
        family=family, size_bytes=size_bytes, shard_bytes=shard_bytes, seed=seed, tensors=tensors, layers=layers
    )
    model, folder = request.model(), Path(folder)
    _require_disk(folder, model.num_bytes())
    plan = _plan(model, request)
    with _claimed(folder):
        reused = _holds(folder, plan)
        if not reused:
            _make_room(folder, plan)
            _write(folder, plan, seed)
    specs = [spec for shard in plan.shards for _, spec in shard.tensors]
    return MadeCheckpoint(
        folder=folder,
        family=family,
        seed=seed,
        num_tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        files=tuple(shard.name for shard in plan.shards),
        seconds=time.perf_counter() - start,
        reused=reused,
    )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``2GiB``, ``500MB``, ``1.5G`` (powers of 1024, as GiB) or ``4096``."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([KMGT])(I?B)?|B)?", text.strip().upper(), re.ASCII)
    if not match:
        raise InputError(f"{text!r} is no size; write bytes or a number with KB, MB, GB, KiB, MiB or GiB")
    number, unit, suffix = match.groups()
    size = int(float(number) * (1000 if suffix == "B" else 1024) ** ("KMGT".index(unit) + 1 if unit else 0))
    if size < 1:
        raise InputError(f"the size {text!r} is not above 0")
    return size


def _plan(model: Model, request: Request) -> Plan:
    groups = list(_grouped(model.tensors(), request.shard_bytes))
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["model.safetensors"]
    shards = [Shard(name, _header(name, group), group) for name, group in zip(names, groups, strict=True)]
    documents = {CONFIG: _document({**model.config(), "loadmaster": asdict(request)})}
    if len(shards) > 1:
        weight_map = sorted((spec.name, shard.name) for shard in shards for _, spec in shard.tensors)
        total = sum(spec.num_bytes for shard in shards for _, spec in shard.tensors)
        documents[INDEX] = _document({"metadata": {"total_size": total}, "weight_map": dict(weight_map)})
    return Plan(documents, shards)


def _grouped(specs: Iterable[TensorSpec], shard_bytes: int) -> Iterator[list[tuple[int, TensorSpec]]]:
    """Yield the numbered tensors of each shard: filled in the order of the model, then in the order of the file.

    The library writes wide types first, so that all are aligned, and then by name; so do real checkpoints.
    """
    group: list[tuple[int, TensorSpec]] = []
    room = shard_bytes
    for number, spec in enumerate(specs):
        if group and spec.num_bytes > room:
            yield sorted(group, key=_file_order)
            group, room = [], shard_bytes
        group.append((number, spec))
        room -= spec.num_bytes
    yield sorted(group, key=_file_order)


def _file_order(numbered: tuple[int, TensorSpec]) -> tuple[int, str]:
    return list(DTYPE_BYTES).index(numbered[1].dtype), numbered[1].name


def _header(name: str, tensors: list[tuple[int, TensorSpec]]) -> bytes:
    """Return the head of a safetensors file: 8 bytes of length, then JSON padded to a multiple of 8 with spaces."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for _, spec in tensors:
        begin, end = end, end + spec.num_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER_BYTES:
        raise InputError(f"{name} would have a header of {len(text)} bytes, above 100 MB; ask for smaller shards")
    return len(text).to_bytes(8, "little") + text


def _document(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Make the folder and hold it against another run; take it away again if it is ours and stayed empty."""
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"cannot make a checkpoint in {folder}: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):  # not empty: the checkpoint is in it
                folder.rmdir()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another process is making a checkpoint in {folder}; wait or choose another") from error
    except OSError:  # a file system without locks: one run at a time is then up to the user
        pass


def _holds(folder: Path, plan: Plan) -> bool:
    """Return whether the folder holds exactly ``plan``; raise if it holds anything else but remains of a killed run."""
    found = sorted(path.name for path in folder.iterdir() if not path.name.endswith(PARTIAL))
    if not found:
        return False
    documents = all(_starts_with(folder / name, text, len(text)) for name, text in plan.documents.items())
    shards = all(_starts_with(folder / shard.name, shard.header, shard.num_bytes) for shard in plan.shards)
    files = {name for name in found if name.endswith((".safetensors", ".index.json"))}
    if documents and shards and files == set(plan.names) - {CONFIG}:
        return True
    raise InputError(f"{folder} holds something else already ({found[0]}); empty it or choose another folder")


def _starts_with(path: Path, head: bytes, size_bytes: int) -> bool:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == size_bytes and file.read(len(head)) == head
    except OSError:
        return False


def _make_room(folder: Path, plan: Plan) -> None:
    """Take away what a killed run left; raise unless the folder can be written and has room for ``plan``."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot make a checkpoint in {folder}: no permission to write there")
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink()
    needed = sum(map(len, plan.documents.values())) + sum(shard.num_bytes for shard in plan.shards)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(f"the checkpoint needs {needed / 2**30:.2f} GiB, {folder} has {free / 2**30:.2f} GiB free")


def _require_disk(folder: Path, needed: int) -> None:
    """Raise if the whole disk is too small: planning such a checkpoint, tensor by tensor, could take for ever.

    What is free is no question yet, since the checkpoint may be there already.
    """
    try:
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise InputError(f"cannot make a checkpoint in {folder}: {error.strerror}") from error
    total = shutil.disk_usage(place).total
    if needed > total:
        raise InputError(f"the checkpoint needs {needed / 2**30:.2f} GiB, the disk of {folder} has {total / 2**30:.2f}")


def _write(folder: Path, plan: Plan, seed: int) -> None:
    """Write all files under temporary names, then rename them; on any failure take all of them away."""
    blocks = _blocks({spec.pattern for shard in plan.shards for _, spec in shard.tensors}, seed)
    try:
        for name, document in plan.documents.items():
            (folder / (name + PARTIAL)).write_bytes(document)
        for shard in plan.shards:
            with (folder / (shard.name + PARTIAL)).open("wb", buffering=0) as file:
                _write_segments(file.fileno(), _segments(shard, blocks))
        for name in plan.names:
            (folder / (name + PARTIAL)).rename(folder / name)
    except BaseException as error:
        for name in plan.names:
            (folder / name).unlink(missing_ok=True)
            (folder / (name + PARTIAL)).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise LoadmasterError(f"cannot write the checkpoint to {folder}: {error.strerror}") from error
        raise


def _blocks(patterns: set[str], seed: int) -> dict[str, memoryview]:
    """Return a block of random values for each pattern, as bytes; the same for the same seed with any numpy."""
    import numpy as np

    blocks = {}
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        if name in patterns:
            integer = np.dtype(pattern.integer)
            # The raw words of a bit generator are what numpy promises never to change; its distributions are not.
            words = np.random.PCG64([seed, number]).random_raw(BLOCK_VALUES * integer.itemsize // 8 + 1)
            values = words.astype("<u8", copy=False).view(integer)[:BLOCK_VALUES]
            blocks[name] = memoryview(values & integer.type(pattern.keep) | integer.type(pattern.always)).cast("B")
    return blocks


def _segments(shard: Shard, blocks: dict[str, memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of a shard as slices of the blocks."""
    yield memoryview(shard.header)
    for number, spec in shard.tensors:
        block, left = blocks[spec.pattern], spec.num_bytes
        begin = number * VALUES_BETWEEN_TENSORS % BLOCK_VALUES * DTYPE_BYTES[spec.dtype]
        while left:
            piece = block[begin : begin + left]
            yield piece
            left, begin = left - len(piece), 0


def _write_segments(descriptor: int, segments: Iterator[memoryview]) -> None:
    """Write all segments, many with one call."""
    while waiting := list(islice(segments, SEGMENTS_PER_WRITE)):
        while waiting:
            written = os.writev(descriptor, waiting)
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if waiting:  # a short write: on from the middle of a segment
                waiting[0] = waiting[0][written:]
