"""Opens a checkpoint: one `.safetensors` file, a folder with an index, or a folder of `.safetensors` files."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loadmaster.checkpoint.safetensors import FileHeader, read_header
from loadmaster.checkpoint.table import Entry, TensorTable
from loadmaster.checkpoint.weight_index import WeightMap, check_index, parse_index
from loadmaster.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX_NAME", "Checkpoint", "open_checkpoint", "paused_garbage_collection"]

INDEX_NAME = "model.safetensors.index.json"
_NUMBERED_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")


class Checkpoint(Mapping[str, Entry]):
    """The tensors of a checkpoint by name, in the order of their files and offsets; nothing but headers was read.

    Attributes
    ----------
    path : str
        What was opened.
    files : dict of str to FileIdentity
        Its files, in order, each with what it was when its header was read.
    config : dict
        The ``config.json`` beside them, empty where there is none.
    tables : tuple of TensorTable
        The tensors of each file, for plans that take all of them at once.
    """

    def __init__(self, path: str, headers: Mapping[str, FileHeader], config: dict[str, Any]) -> None:
        self.path = path
        self.files = {file: header.identity for file, header in headers.items()}
        self.config = config
        self.tables = tuple(header.tensors for header in headers.values())
        _check_distinct(path, self.tables)

    @functools.cached_property
    def _entries(self) -> dict[str, Entry]:
        """An object for each tensor, made when they are first asked for: plans go by the tables."""
        with paused_garbage_collection():
            return {entry.name: entry for table in self.tables for entry in table.entries()}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(table.names for table in self.tables)

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def items(self) -> ItemsView[str, Entry]:
        """Names and entries; the base class looks each one up, which costs more than what is done with it."""
        return self._entries.items()

    def values(self) -> ValuesView[Entry]:
        """The entries."""
        return self._entries.values()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self)} tensors, {self.num_bytes} bytes, {len(self.files)} files>"

    def subset(self, keep: Callable[[str], bool]) -> Checkpoint:
        """Return the same checkpoint with those tensors alone whose names ``keep`` wants."""
        part = copy.copy(self)
        part.__dict__.pop("_entries", None)
        part.tables = tuple(table.take(np.array([keep(name) for name in table.names], bool)) for table in self.tables)
        return part

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(int(table.num_bytes.sum()) for table in self.tables)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into new memory."""
        return self.read_slice(name, ())

    def read_slice(self, name: str, slices: Sequence[slice | int]) -> torch.Tensor:
        """Read a part of one tensor into new memory, as ``tensor[slices]`` would be.

        Parameters
        ----------
        name : str
            A tensor of this checkpoint.
        slices : sequence of slice or int
            One for each leading dimension, steps of 1; only the bytes along the first narrowed dimension are read.
        """
        from loadmaster.checkpoint.load import read_slice

        if name not in self:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return read_slice(self, self[name], slices)


def _check_distinct(path: str, tables: Sequence[TensorTable]) -> None:
    """Refuse a name that is in two files; within a file names are distinct."""
    hashes = np.sort(np.concatenate([table.names.hashes for table in tables]))
    if np.all(hashes[1:] != hashes[:-1]):
        return
    seen: dict[str, str] = {}
    for table in tables:
        names = table.names.tolist()
        for name in sorted(seen.keys() & set(names)):
            raise CheckpointError(f"{path}: tensor {name!r} is in two files, {seen[name]} and {table.file}")
        seen.update(dict.fromkeys(names, table.file))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at ``path`` and check the headers of all its files.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file, a folder with ``model.safetensors.index.json`` or a folder of ``.safetensors`` files.
        A model hub's cache, whose snapshot folder links into ``blobs/``, opens as it is.

    Raises
    ------
    CheckpointError
        Something is missing, truncated, given twice or not safetensors; the message names it.
    """
    place = Path(path)
    mode = _mode(place)
    if not mode:
        dangling = "is a link to a file that is missing" if place.is_symlink() else "does not exist"
        raise CheckpointError(f"{place} {dangling}")
    with paused_garbage_collection():
        if not stat.S_ISDIR(mode):
            return _open_file(place)
        index = place / INDEX_NAME
        weight_map = parse_index(index, _read_regular(index)) if _is_listed(index) else None
        files = _files_of_index(index, weight_map) if weight_map is not None else _files_of_folder(place)
        headers = {os.fspath(file): read_header(file) for file in files}
        checkpoint = Checkpoint(os.fspath(place), headers, _read_config(place))
        if weight_map is not None:
            check_index(weight_map, {table.file: table for table in checkpoint.tables}, index)
        return checkpoint


def _mode(path: Path) -> int:
    """The kind and permissions of a file, links followed; 0 where there is none."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL byte in the name
        return 0
    except OSError as refused:
        raise CheckpointError(f"{path} cannot be read: {refused.strerror or refused}") from None


def _is_listed(path: Path) -> bool:
    """Whether the folder has such a name, be it a link to nothing: half a download must not pass for none."""
    return bool(_mode(path)) or path.is_symlink()


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the cyclic collector still while many small objects are made: its passes double the time of 100,000."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open_file(file: Path) -> Checkpoint:
    if file.suffix in _OTHER_FORMATS:
        raise CheckpointError(
            f"{file} is a {file.suffix} checkpoint, which only its own library can read; save it as safetensors first"
        )
    if file.name.endswith(".safetensors.index.json"):
        raise CheckpointError(f"{file} is the index of a checkpoint; give the folder {file.parent}")
    return Checkpoint(os.fspath(file), {os.fspath(file): read_header(file)}, _read_config(file.parent))


def _read_regular(path: Path) -> bytes:
    mode = _mode(path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {'not a regular file' if mode else 'a link to a file that is missing'}")
    try:
        return path.read_bytes()
    except OSError as refused:
        raise CheckpointError(f"{path} cannot be read: {refused.strerror or refused}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not _is_listed(path):
        return {}
    try:
        config = json.loads(_read_regular(path).decode("utf-8"))
    except (ValueError, RecursionError) as broken:
        raise CheckpointError(f"{path} is not valid JSON: {broken}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config


def _files_of_index(index: Path, weight_map: WeightMap) -> list[Path]:
    files = [index.parent / file for file in sorted(weight_map.files)]
    for file in files:
        if not _mode(file):
            raise CheckpointError(f"{index} names the file {file.name}, which is missing")
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as refused:
        raise CheckpointError(f"{folder} cannot be read: {refused.strerror or refused}") from None
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(_why_no_files(folder, names))
    _check_numbering(folder, {file.name for file in files})
    return files


def _why_no_files(folder: Path, names: list[str]) -> str:
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if others:
        return f"{folder} holds no .safetensors file but {others[0]}; save the checkpoint as safetensors first"
    return f"{folder} holds no .safetensors file" if names else f"{folder} is empty"


def _check_numbering(folder: Path, names: set[str]) -> None:
    """Files named ``x-00001-of-00004`` must be there in full: without an index nothing else tells of a missing one."""
    for name in sorted(names):
        match = _NUMBERED_SHARD.fullmatch(name)
        if match is None:
            continue
        for number in range(1, int(match["count"]) + 1):
            wanted = f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
            if wanted not in names:
                raise CheckpointError(f"{folder} holds {name}, and {wanted} is missing")
