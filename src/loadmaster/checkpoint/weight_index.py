"""The index of a checkpoint of several files: which tensor is in which of them.

    {"metadata": {...}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", ...}}

As with headers, there is a quick way for the map as all writers write it, and a thorough one for anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadmaster.checkpoint.table import TensorTable
from loadmaster.checkpoint.texts import Texts, groups
from loadmaster.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WeightMap", "check_index", "parse_index"]

_BLANKS = b" \t\r\n"


class WeightMap(NamedTuple):
    """Names of tensors, the files that there are, and the number of each tensor's file."""

    names: Texts
    files: list[str]
    file: NDArray[np.int64]


def parse_index(index: Path, text: bytes) -> WeightMap:
    """Turn the text of the file ``index`` into its map, each file checked to stay inside the folder.

    Raises
    ------
    CheckpointError
        It is no index; names what.
    """
    found = _parse_plain(text)
    if found is None or any(map(_leads_outside, found.files)):
        found = _parse_any(index, text)
    return found


def _parse_any(index: Path, text: bytes) -> WeightMap:
    try:
        document = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as broken:
        raise CheckpointError(f"{index} is not valid JSON: {broken}") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{index}: tensor {name!r} has {file!r} where a file name is needed")
        if _leads_outside(file):
            raise CheckpointError(f"{index}: tensor {name!r} points outside the folder, to {file!r}")
    numbers: dict[str, int] = {}
    file_numbers = [numbers.setdefault(file, len(numbers)) for file in weight_map.values()]
    try:
        names = Texts.of(weight_map)
    except UnicodeEncodeError:
        raise CheckpointError(f"{index}: a name holds half of a surrogate pair and is not valid text") from None
    return WeightMap(names, list(numbers), np.array(file_numbers, np.int64))


def _leads_outside(file: str) -> bool:
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file


def _parse_plain(text: bytes) -> WeightMap | None:
    """Four quotes a tensor, with the same blanks, colon and comma between them each time; None for anything else."""
    start = text.find(b'"weight_map"')
    start, stop = text.find(b"{", start) + 1, text.find(b"}", start)
    if text.count(b'"weight_map"') != 1 or not 0 < start < stop or b"\\" in text or not text.isascii():
        return None
    places = np.flatnonzero(np.frombuffer(text, np.uint8)[start:stop] == ord('"')) + start
    if not len(places) or len(places) % 4:
        return None
    places = places.reshape(-1, 4).T
    names = Texts(text, places[0] + 1, places[1])
    colons = names.between(places[1] + 1, places[2])
    commas = names.between(places[3][:-1] + 1, places[0][1:])
    outside = text[start : places[0][0]] + text[places[3][-1] + 1 : stop]
    same = [_all_the_same(colons, ":"), len(commas) == 0 or _all_the_same(commas, ","), not outside.strip(_BLANKS)]
    if not all(same) or not names.is_distinct() or not _is_rest_plain(text, start, stop):
        return None
    paths = names.between(places[2] + 1, places[3])
    file, firsts = groups(paths)
    files = [paths[int(first)] for first in firsts]
    controls = np.count_nonzero(np.frombuffer(text, np.uint8)[start:stop] < 0x20)
    between = sum(len(texts) * _controls(texts[0]) for texts in (colons, commas) if len(texts))
    plain = all(files) and controls == between + _controls(outside.decode())
    return WeightMap(names, files, file) if plain else None


def _controls(text: str) -> int:
    return sum(character < " " for character in text)


def _all_the_same(texts: Texts, wanted: str) -> bool:
    """Whether all are the same text, ``wanted`` and blanks."""
    return texts[0].strip(_BLANKS.decode()) == wanted and texts.are_the_same()


def _is_rest_plain(text: bytes, start: int, stop: int) -> bool:
    """Whether what is around the entries of the map is a document whose map is empty."""
    try:
        document: Any = json.loads(text[:start] + text[stop:])
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("weight_map") == {}


def check_index(weight_map: WeightMap, tables: Mapping[str, TensorTable], index: Path) -> None:
    """Refuse an index that names a tensor in a file that does not hold it. Files may hold more than the index names.

    Parameters
    ----------
    tables
        The tensors of each file, by its path.
    """
    of_files = [tables[os.fspath(index.parent / file)] for file in weight_map.files]
    hashes = weight_map.names.hashes
    same = (
        np.array_equal(np.sort(hashes[weight_map.file == number]), np.sort(table.names.hashes))
        for number, table in enumerate(of_files)
    )
    if all(same):
        return
    files = {name: table.file for table in tables.values() for name in table.names}
    for name, number in zip(weight_map.names, weight_map.file.tolist(), strict=True):
        file = weight_map.files[number]
        if name not in files:
            raise CheckpointError(f"{index} names the tensor {name!r} in {file}, which does not hold it")
        if files[name] != of_files[number].file:
            raise CheckpointError(f"{index} names the tensor {name!r} in {file}, and it is in {files[name]}")
