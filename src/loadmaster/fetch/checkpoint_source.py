"""Safetensors checkpoints as a source of fetchers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.load import tensor_at
from loadmaster.checkpoint.pieces import Read, Reads, plan_runs
from loadmaster.checkpoint.safetensors import FileIdentity
from loadmaster.errors import CheckpointError, InputError
from loadmaster.fetch.parts_source import PartsSource
from loadmaster.fetch.source import (
    Part,
    SourceEntry,
    check_part,
    read_until_stopped,
    with_version,
)

if TYPE_CHECKING:
    pass

__all__ = ["CheckpointSource"]


class Located(NamedTuple):
    """Parts of a safetensors checkpoint: its files with what they were when their headers were read, and for each part
    its name, the number of its file, the offset there, the number of bytes, and where they go."""

    files: list[tuple[str, tuple[int, ...]]]
    rows: list[tuple[str, int, int, int, int]]


class CheckpointSource(PartsSource):
    """A safetensors checkpoint as a source: a file, a folder or an indexed folder.

    Parameters
    ----------
    path : path
        With ``{version}`` in it, such as ``ckpt/step-{version}`` or ``step-{version:06d}``, every version is a
        checkpoint of its own. Without, every version is this same path, opened again each time: a trainer may have
        overwritten it.
    threads : int
        How many threads read in each process; there are several fetchers, so one is enough.

    Raises
    ------
    CheckpointError
        By each call: something is missing, truncated, changed or unreadable; names file, tensor and offset.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1) -> None:
        self.path = os.fspath(path)
        self.threads = threads
        self._checkpoint: Checkpoint | None = None

    def __repr__(self) -> str:
        return f"CheckpointSource({self.path!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _checkpoint_source, (self.path, self.threads)

    def names(self, version: int | None) -> list[str]:
        """Open the checkpoint of ``version``: only the headers of its files are read."""
        self._checkpoint = open_checkpoint(with_version(self.path, version))
        return list(self._checkpoint)

    def entry(self, name: str) -> SourceEntry:
        """Shape in storage units and dtype, from the header."""
        checkpoint = self._opened()
        if name not in checkpoint:
            raise CheckpointError(f"{checkpoint.path} has no tensor {name!r}")
        found = checkpoint[name]
        return SourceEntry(found.storage_shape, found.dtype)

    def entries(self) -> dict[str, SourceEntry]:
        """All entries of this version at once: a model has few kinds of them."""
        kinds: dict[tuple[str, tuple[int, ...]], SourceEntry] = {}
        entries = {}
        for name, found in self._opened().items():
            kind = kinds.get(found[1:3])
            if kind is None:
                kind = kinds[found[1:3]] = SourceEntry(found.storage_shape, found.dtype)
            entries[name] = kind
        return entries

    def locate(self, parts: Sequence[Part]) -> Located:
        """Where the bytes of ``parts`` lie in which files; a fetcher that knows need not read any header."""
        checkpoint = self._opened()
        numbers: dict[str, int] = {}
        rows = []
        for part, (file, offset, num_bytes, _, target) in self._reads(checkpoint, parts):
            rows.append((part.name, numbers.setdefault(file, len(numbers)), offset, num_bytes, target))
        return Located([(file, tuple(checkpoint.files[file])) for file in numbers], rows)

    def read_located(self, located: Located, buffer: memoryview, stopped: Callable[[], bool]) -> None:
        """Read what `locate` has found, also in a process that has not begun the version."""
        names = [file for file, _ in located.files]
        with paused_garbage_collection():
            pieces = plan_runs(
                Reads.of((names[row[1]], row[2], row[3], 0, row[4]) for row in located.rows), [], [buffer]
            )

        def name_at(file: str, offset: int) -> str:
            found = (row for row in located.rows if names[row[1]] == file and row[2] <= offset < row[2] + row[3])
            return next((row[0] for row in found), "")

        identities = {file: FileIdentity(*identity) for file, identity in located.files}
        read_until_stopped(pieces, identities, self.threads, stopped, name_at)

    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> None:
        """Read many parts straight into ``buffer``, neighbours of a file in one go; see `SourceReader.read_parts`."""
        checkpoint = self._opened()
        with paused_garbage_collection():
            pieces = plan_runs(Reads.of(read for _, read in self._reads(checkpoint, parts)), [], [buffer])
        read_until_stopped(
            pieces,
            checkpoint.files,
            self.threads,
            stopped,
            lambda file, offset: tensor_at(checkpoint, file, offset),
        )

    def close(self) -> None:
        """Forget the checkpoint; no file is open between calls."""
        self._checkpoint = None

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise InputError(f"{self!r}: names(version) comes before all other calls")
        return self._checkpoint

    def _reads(self, checkpoint: Checkpoint, parts: Sequence[Part]) -> list[tuple[Part, Read]]:
        """Where the bytes of each part lie; a whole one, the usual case, needs no arithmetic."""
        reads = []
        for part in parts:
            name, start, _, target, num_bytes, whole = part
            try:
                _, _, _, file, offset, entry_bytes = checkpoint[name]
            except KeyError:
                raise CheckpointError(f"{checkpoint.path} has no tensor {name!r}") from None
            if not whole or num_bytes != entry_bytes:
                entry = self.entry(name)
                check_part(part, entry)
                offset += start * entry.row_bytes
            if num_bytes:
                reads.append((part, (file, offset, num_bytes, 0, target)))
        return reads


def _checkpoint_source(path: str, threads: int) -> CheckpointSource:
    return CheckpointSource(path, threads=threads)
