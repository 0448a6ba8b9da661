"""Reads the header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes.

We parse it ourselves because reading straight into final memory needs the offset of every tensor in its file. The
reference is the `safetensors` library (0.8): what it accepts is accepted, what it rejects is rejected, with these
deliberate differences, all of them headers that no writer produces:

- a tensor name given twice is an error here (the library silently keeps the last one);
- the library also takes a tensor's fields as a bare list, a dtype as a one-key object, and a name repeated inside
  ``__metadata__``; here a tensor is an object, a dtype a string, and no object has a key twice;
- U4 and I4 are known here, so that a file holding them opens, and is refused only when those tensors are read.
"""

from __future__ import annotations

import json
import math
import operator
import os
import stat
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from loadmaster.checkpoint.dtypes import DTYPES
from loadmaster.checkpoint.plain_header import parse_plain
from loadmaster.checkpoint.table import Entry, TensorTable
from loadmaster.errors import CheckpointError

__all__ = ["MAX_HEADER_BYTES", "FileHeader", "FileIdentity", "parse_header", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit for the length of the JSON header (safetensors, ``MAX_HEADER_SIZE``)."""

MAX_DEPTH = 127

_U64 = 1 << 64


class FileHeader(NamedTuple):
    """What the header of one file says: its tensors in the order of their bytes, and the free-form metadata."""

    tensors: TensorTable
    metadata: dict[str, str]
    identity: FileIdentity


class FileIdentity(NamedTuple):
    """Tells whether a file is still the one whose header was read: size in bytes, time of its last change, inode."""

    num_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Take the identity out of what ``fstat`` says."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def read_header(path: str | os.PathLike[str]) -> FileHeader:
    """Read and check the header of the safetensors file ``path``.

    Raises
    ------
    CheckpointError
        The file cannot be opened, is truncated, or its header breaks the format; the message names file, tensor and
        offset.
    """
    file = os.fspath(path)
    try:
        # Without O_NONBLOCK the opening of a pipe waits for its writer.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file} is not a regular file")
            length = _header_length(file, os.read(descriptor, 8), status.st_size)
            text = _read_exactly(file, descriptor, length)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as refused:
        raise CheckpointError(f"{file} cannot be read: {getattr(refused, 'strerror', None) or refused}") from None
    tensors, metadata = parse_header(file, text, status.st_size)
    return FileHeader(tensors, metadata, FileIdentity.of(status))


def _header_length(file: str, first: bytes, file_bytes: int) -> int:
    if len(first) < 8:
        raise CheckpointError(
            f"{file} is no safetensors file: it ends after {len(first)} bytes, within the header length"
        )
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is no safetensors file: its first 8 bytes give a header of {length} bytes, "
            f"more than the format's limit of {MAX_HEADER_BYTES}"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(f"{file} is truncated: the header needs {8 + length} bytes and the file has {file_bytes}")
    return int(length)


def _read_exactly(file: str, descriptor: int, length: int) -> bytes:
    blocks = []
    missing = length
    while missing:
        block = os.read(descriptor, missing)
        if not block:
            raise CheckpointError(f"{file} was truncated while its header was being read")
        blocks.append(block)
        missing -= len(block)
    return b"".join(blocks)


def parse_header(file: str, text: bytes, file_bytes: int) -> tuple[TensorTable, dict[str, str]]:
    """Turn the JSON ``text`` of a header into tensors and metadata, checked against a file of ``file_bytes`` bytes."""
    start = 8 + len(text)
    plain = parse_plain(file, text)
    if plain is not None and _is_filled(plain[0], start, file_bytes):
        return plain
    entries, metadata = _parse_any(file, text)
    position = start
    for entry in entries:
        if entry.offset != position:
            _gap(file, entry.name, entry.offset - start, position - start)
        position += entry.num_bytes
    _check_end(file, position, file_bytes, entries)
    return TensorTable.of(file, entries), metadata


def _is_filled(tensors: TensorTable, start: int, end: int) -> bool:
    """Whether tensors in the order of their bytes lie side by side from ``start`` to ``end``."""
    ends = tensors.offset + tensors.num_bytes
    return bool(tensors.offset[0] == start and ends[-1] == end and np.array_equal(tensors.offset[1:], ends[:-1]))


def _parse_any(file: str, text: bytes) -> tuple[list[Entry], dict[str, str]]:
    document = _parse_json(file, text)
    if b"-0" in text or any(type(info) is dict and len(info) > 3 for info in document.values()):
        document = _parse_strictly(file, text)
    metadata = _check_metadata(file, document.pop("__metadata__", None))
    _check_utf8(file, [*document, *metadata, *metadata.values()])
    start = 8 + len(text)
    entries = []
    kinds: _Kinds = {}
    while document:  # emptied as it is read: a header of 100,000 tensors holds 50 MiB of objects
        name, info = document.popitem()
        entries.append(_entry_of(file, name, info, start, kinds))
    entries.reverse()  # empty ones share an offset: they stay in the order of the header
    entries.sort(key=_OFFSET_AND_SIZE)
    return entries, metadata


_OFFSET_AND_SIZE = operator.attrgetter("offset", "num_bytes")


def _parse_json(file: str, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_object_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as broken:
        raise CheckpointError(f"{file}: the header is not valid JSON: {broken}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: the header is a JSON {type(document).__name__}, not an object of tensors")
    return document


def _parse_strictly(file: str, text: bytes) -> dict[str, Any]:
    """Parse as the reference's JSON does where Python's takes more, in fields that nobody reads as well.

    Called for the rare header that holds a foreign field or what may be a minus zero: it costs twice the parsing.
    """
    try:
        document: dict[str, Any] = json.loads(text, parse_int=_strict_integer, parse_float=_strict_float)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
        _check_depth(document)
    except (ValueError, RecursionError) as broken:
        raise CheckpointError(f"{file}: the header is not valid JSON: {broken}") from None
    return document


def _strict_integer(word: str) -> int | float:
    """A minus zero is a float there, and so no size."""
    return _strict_float(word) if word == "-0" or math.isinf(float(word)) else int(word)


def _strict_float(word: str) -> float:
    if math.isinf(float(word)):
        raise ValueError(f"{word[:20]} is out of range")
    return float(word)


def _check_depth(document: Any) -> None:
    """At most 127 objects and lists within each other (``serde_json`` without ``disable_recursion_limit``)."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("objects and lists are nested too deep")
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in values if isinstance(inner, (dict, list))]


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} is given twice")
            seen.add(key)
    return result


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _check_metadata(file: str, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map names to strings")
    return metadata


def _check_utf8(file: str, texts: Iterable[str]) -> None:
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{file}: a name holds half of a surrogate pair and is not valid text") from None


_Kinds = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]]
"""The dtypes and shapes met in a file, of which a model has few, each with its bytes: checked once and kept once."""


def _entry_of(file: str, name: str, info: Any, start: int, kinds: _Kinds) -> Entry:
    """Check the fields of one tensor by themselves; a checkpoint has up to 100,000, so the usual case goes first."""
    try:
        begin, end = info["data_offsets"]
        shape = tuple(info["shape"])
        dtype, shape, num_bytes = kinds[info["dtype"], shape]
        integers = set(map(type, (begin, end, *info["shape"]))) == _INTEGERS
        if integers and end - begin == num_bytes and 0 <= begin < _U64 and type(info["shape"]) is list:
            return Entry(name, dtype, shape, file, start + begin, num_bytes)
    except (TypeError, KeyError, ValueError):
        pass  # a kind that is new or something that is wrong
    dtype, shape, begin, end = _check_info(file, name, info)
    _check_size(file, name, dtype, shape, begin, end)
    kinds[dtype, shape] = (dtype, shape, end - begin)
    return Entry(name, dtype, shape, file, start + begin, end - begin)


_INTEGERS = {int}


def _check_info(file: str, name: str, info: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Check the types of one tensor's fields; return its dtype, shape, and begin and end within the data."""
    if type(info) is not dict:
        raise CheckpointError(f"{file}: tensor {name!r} is not described by an object")
    try:
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    except KeyError as missing:
        raise CheckpointError(f"{file}: tensor {name!r} has no {missing.args[0]}") from None
    if type(dtype) is not str or dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has the unknown dtype {dtype!r}")
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise CheckpointError(f"{file}: tensor {name!r} needs a list as shape and two data_offsets")
    for number in (*shape, *offsets):
        if type(number) is not int or not 0 <= number < _U64:
            raise CheckpointError(f"{file}: tensor {name!r} has {number!r} where a 64-bit size is needed")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _gap(file: str, name: str, begin: int, position: int) -> NoReturn:
    kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
    raise CheckpointError(
        f"{file}: tensor {name!r} {kind}: it begins at data offset {begin} and {position} was expected"
    )


def _check_size(file: str, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
    bits = math.prod(shape) * DTYPES[dtype].bits
    if end - begin == bits >> 3 and not bits & 7 and (bits or _product_fits(shape)):
        return
    if end < begin:
        raise CheckpointError(f"{file}: tensor {name!r} ends at data offset {end}, before its begin at {begin}")
    if not _product_fits(shape) or bits >= _U64:
        raise CheckpointError(f"{file}: tensor {name!r} of shape {list(shape)} is too large for 64-bit sizes")
    if bits & 7:
        raise CheckpointError(
            f"{file}: tensor {name!r} of dtype {dtype} and shape {list(shape)} does not fill whole bytes"
        )
    raise CheckpointError(
        f"{file}: tensor {name!r} of dtype {dtype} and shape {list(shape)} needs {bits >> 3} bytes, "
        f"and its data offsets {begin} to {end} hold {end - begin}"
    )


def _product_fits(shape: tuple[int, ...]) -> bool:
    """Whether the product, taken from the left as the reference does, stays a 64-bit number (also before a zero)."""
    product = 1
    for size in shape:
        product *= size
        if product >= _U64:
            return False
    return True


def _check_end(file: str, end: int, file_bytes: int, entries: list[Entry]) -> None:
    if file_bytes == end:
        return
    if file_bytes > end:
        raise CheckpointError(f"{file}: {file_bytes - end} bytes after offset {end} belong to no tensor")
    last = next(entry for entry in entries if entry.offset + entry.num_bytes > file_bytes)
    raise CheckpointError(
        f"{file} is truncated: tensor {last.name!r} needs bytes {last.offset} to {last.offset + last.num_bytes} "
        f"and the file has {file_bytes}"
    )
