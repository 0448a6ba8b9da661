"""Where fetchers get tensors from: the protocol of a source, and safetensors checkpoints as one.

A source lives in every fetcher and in the process that asked for the weights, so it is pickled once, and opens what it
reads only when it is first used. The calls of one version come in this order, in each of these processes::

    names(version)                      begin this version; all later calls are about it
    entry(name)                         shape and dtype of one tensor
    read_into(name, destination)        or get(name): the tensor itself

and a source may have these as well, where it can do them better than one whole tensor at a time::

    read_rows(name, start, stop, destination)   rows of the first dimension; without it a large tensor is not split
    read_parts(parts, buffer, stopped)          many parts at once, straight into the bytes of shared memory; may
                                                return the seconds that it spent on copies
    entries()                                   all entries of the version at once
    locate(parts), read_located(located, buffer, stopped)
                                                what a fetcher needs to know to read these parts, so that it need not
                                                begin the version itself; it is pickled
    close()                                     after the last call

Each of them may be an ``async`` function. `SourceReader` is what asks a source: it waits for those, checks what comes
back, and takes the best of the ways above that the source has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loadmaster.checkpoint.dtypes import DTYPES, import_torch, item_bytes, name_of_torch_dtype, torch_dtype
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.load import tensor_at
from loadmaster.checkpoint.pieces import Piece, Read, plan_runs
from loadmaster.checkpoint.reader import read_pieces
from loadmaster.checkpoint.safetensors import FileIdentity
from loadmaster.errors import CheckpointError, InputError, LoadmasterError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointSource",
    "Part",
    "Source",
    "SourceEntry",
    "SourceReader",
    "Waiter",
    "bytes_of",
    "can_split",
    "check_part",
    "check_source",
    "check_tensor",
    "never_stopped",
    "part_of",
    "read_parts",
    "read_until_stopped",
    "source_entry",
    "tensor_in",
    "with_version",
]


class SourceEntry(NamedTuple):
    """What a source knows of a tensor: its shape and its dtype, by its safetensors name (``BF16``).

    The shape is in storage units: two F4 elements that share a byte count as one, as in torch.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def rows(self) -> int:
        """The size of the first dimension; a tensor without dimensions has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * item_bytes(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype)


class Part(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor, and where their ``num_bytes`` go: at ``offset`` of the shared memory.

    A tensor without dimensions has one row. ``whole`` says that these are all of its rows.
    """

    name: str
    start: int
    stop: int
    offset: int
    num_bytes: int
    whole: bool


class Source(Protocol):
    """What fetchers need of a source; see the module. ``destination`` is a contiguous CPU tensor in shared memory."""

    def names(self, version: int | None) -> Iterable[str]:
        """Begin ``version`` and return the names of its tensors."""
        ...

    def entry(self, name: str) -> SourceEntry:
        """Return shape and dtype; anything with these two attributes will do, the dtype also as a ``torch.dtype``."""
        ...

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Fill ``destination``, which has the shape and dtype of the entry."""
        ...


def source_entry(entry: Any, name: str = "") -> SourceEntry:
    """Turn what a source says of a tensor into a `SourceEntry`.

    Parameters
    ----------
    entry : object
        Anything with ``.shape`` and ``.dtype``, also a tensor; the dtype is torch's or a safetensors name (``BF16``).
    name : str
        The tensor, for the errors.

    Raises
    ------
    InputError
        It is something else, or the dtype is none that safetensors knows.
    """
    about = f"entry of tensor {name!r}" if name else "entry"
    try:
        shape, dtype = tuple(entry.shape), entry.dtype
    except (AttributeError, TypeError):
        raise InputError(
            f"a source gave {type(entry).__name__} as the {about}, and something with .shape and .dtype is needed"
        ) from None
    if not all(hasattr(size, "__index__") and size >= 0 for size in shape):
        raise InputError(f"a source gave the {about} the shape {shape!r}, and it needs sizes of 0 or more")
    if not isinstance(dtype, str):
        with contextlib.suppress(CheckpointError):  # the sentence below fits that case as well
            dtype = name_of_torch_dtype(dtype)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(
            f"a source gave the {about} the dtype {dtype!r}, and a torch dtype that safetensors has or its name there, "
            "such as 'BF16', is needed"
        )
    return SourceEntry(tuple(size.__index__() for size in shape), dtype)


def check_source(source: object) -> None:
    """Raise an `InputError` that says what ``source`` lacks to be a source."""
    missing = [name for name in ("names", "entry") if not _has(source, name)]
    if not any(_has(source, name) for name in ("read_into", "get", "read_parts")):
        missing.append("one of read_into, get and read_parts")
    if missing:
        raise InputError(f"{type(source).__name__} is no source of tensors: it lacks {' and '.join(missing)}")


def can_split(source: object) -> bool:
    """Whether ``source`` reads rows of a tensor, so that several fetchers can share a large one."""
    source = source.source if isinstance(source, SourceReader) else source
    return _has(source, "read_rows") or _has(source, "read_parts")


def _has(source: object, name: str) -> bool:
    return callable(getattr(source, name, None))


class Waiter:
    """Waits for what an ``async`` function returns; any other value is passed through.

    The event loop is made at first need and kept, since clients of a store belong to the loop that they began in. One
    thread at a time may use it. It is not pickled: each process has its own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Waiter, ()

    def result(self, value: Any) -> Any:
        """Return ``value``, or what it gives when it is awaited.

        Raises
        ------
        InputError
            An event loop runs in this thread already, so that nothing else can be awaited here.
        """
        if not inspect.isawaitable(value):
            return value
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            if inspect.iscoroutine(value):
                value.close()
            raise InputError(
                "an async source cannot be asked in a thread that runs an event loop; call this in another thread, "
                "for instance with asyncio.to_thread"
            )
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))

    def close(self) -> None:
        """End what still runs in the loop, and the loop."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _awaited(value: Any) -> Any:
    return await value


class SourceReader:
    """Asks one source in one process: waits for async functions, checks what comes back, chooses how to read.

    It can stand wherever a source can. Pickled, it is a new one for the same source. One thread at a time may use it.

    Raises
    ------
    InputError
        The source lacks something; see `check_source`.
    """

    def __init__(self, source: Any) -> None:
        check_source(source)
        self.source = source
        self._waiter = Waiter()
        self._entries: dict[str, SourceEntry] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceReader, (self.source,)

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def threads(self) -> int:
        """How many threads the source reads with, where it has such a setting."""
        return self.source.threads  # type: ignore[no-any-return]

    @threads.setter
    def threads(self, number: int) -> None:
        self.source.threads = number

    def names(self, version: int | None) -> list[str]:
        """Begin ``version`` and return the names of its tensors, each once.

        Raises
        ------
        InputError
            A name is no string, or is given twice.
        """
        self._entries = {}
        names = list(self._waiter.result(self.source.names(version)))
        seen: set[str] = set()
        for name in names:
            if not isinstance(name, str):
                raise InputError(f"a source gave {name!r} as the name of a tensor, and a string is needed")
            if name in seen:
                raise InputError(f"a source gave the name {name!r} twice")
            seen.add(name)
        return names

    def tensors(self, version: int | None) -> list[tuple[str, SourceEntry]]:
        """Begin ``version`` and return name and entry of each tensor, in the order of the source."""
        names = self.names(version)
        if _has(self.source, "entries"):
            self._entries = dict(self._waiter.result(self.source.entries()))
        return [(name, self.entry(name)) for name in names]

    def locate(self, parts: Sequence[Part]) -> Any:
        """What a fetcher needs to read ``parts`` without beginning the version itself; None where there is no way."""
        return self._waiter.result(self.source.locate(parts)) if _has(self.source, "locate") else None

    def read_located(self, located: Any, buffer: memoryview, stopped: Callable[[], bool]) -> float:
        """Read what `locate` told, in another process than that; returns as `read_parts`."""
        seconds = self._waiter.result(self.source.read_located(located, buffer, stopped))
        return float(seconds) if isinstance(seconds, (int, float)) else 0.0

    def entry(self, name: str) -> SourceEntry:
        """Shape and dtype of a tensor of this version; asked once."""
        known = self._entries.get(name)
        if known is None:
            known = self._entries[name] = source_entry(self._waiter.result(self.source.entry(name)), name)
        return known

    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> float:
        """Bring ``parts`` to their places in ``buffer``, in the best way that the source has.

        Returns the seconds that went into putting together what had been read, such as copies; early when ``stopped()``
        is true, which is asked between parts.

        Raises
        ------
        InputError
            A part is not whole, and the source can give whole tensors only.
        LoadmasterError
            A tensor is not what its entry or its part says.
        """
        if _has(self.source, "read_parts"):
            seconds = self._waiter.result(self.source.read_parts(parts, buffer, stopped))
            return float(seconds) if isinstance(seconds, (int, float)) else 0.0
        assembling = 0.0
        for part in parts:
            if stopped():
                break
            if part.num_bytes:
                assembling += self._read_part(part, buffer)
        return assembling

    def _read_part(self, part: Part, buffer: memoryview) -> float:
        entry = self.entry(part.name)
        check_part(part, entry)
        destination = tensor_in(buffer, part, entry)
        if not part.whole and _has(self.source, "read_rows"):
            self._waiter.result(self.source.read_rows(part.name, part.start, part.stop, destination))
        elif part.whole and _has(self.source, "read_into"):
            self._waiter.result(self.source.read_into(part.name, destination))
        elif _has(self.source, "get"):
            value = self._waiter.result(self.source.get(part.name))
            check_tensor(part.name, value, entry)
            started = time.perf_counter()
            destination.copy_(value.detach() if part.whole else value.detach()[part.start : part.stop])
            return time.perf_counter() - started
        else:
            raise InputError(
                f"{type(self.source).__name__} has no read_rows, so tensor {part.name!r} cannot be read in parts"
            )
        return 0.0

    def close(self) -> None:
        """Close the source, where it has something to close, and the event loop."""
        try:
            if _has(self.source, "close"):
                self._waiter.result(self.source.close())
        finally:
            self._waiter.close()


def read_parts(source: Any, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> float:
    """Bring ``parts`` to their places in ``buffer``; see `SourceReader.read_parts`, also for what it returns.

    A source with async functions is better given as its `SourceReader`, which keeps one event loop for all calls.
    """
    if isinstance(source, SourceReader):
        return source.read_parts(parts, buffer, stopped)
    reader = SourceReader(source)
    try:
        return reader.read_parts(parts, buffer, stopped)
    finally:
        reader._waiter.close()


def check_part(part: Part, entry: SourceEntry) -> None:
    """Raise if ``part`` is not rows of a tensor such as ``entry``: it has changed since the parts were dealt."""
    rows = part.stop - part.start
    if not 0 <= part.start <= part.stop <= entry.rows or part.num_bytes != rows * entry.row_bytes:
        raise LoadmasterError(
            f"tensor {part.name!r} is {entry.dtype} of shape {list(entry.shape)} here, and rows {part.start} to "
            f"{part.stop} of {part.num_bytes} bytes were wanted; the source changed meanwhile, fetch this version again"
        )


def check_tensor(name: str, value: Any, entry: SourceEntry) -> None:
    """Raise if ``value`` is not a tensor of the shape and dtype of ``entry``; names both."""
    torch = import_torch()
    if not isinstance(value, torch.Tensor):
        raise LoadmasterError(f"a source gave {type(value).__name__} for tensor {name!r}, and a tensor is needed")
    found, wanted = f"{value.dtype} of shape {list(value.shape)}", torch_dtype(entry.dtype)
    if tuple(value.shape) != entry.shape or value.dtype != wanted:
        raise LoadmasterError(
            f"tensor {name!r} came as {found}, and its entry is {wanted} of shape {list(entry.shape)}"
        )


def tensor_in(buffer: memoryview, part: Part, entry: SourceEntry) -> torch.Tensor:
    """Return the place of ``part`` in ``buffer`` as a tensor of its rows; it has at least one element."""
    torch = import_torch()
    shape = (part.stop - part.start, *entry.shape[1:]) if entry.shape else ()
    count = part.num_bytes // item_bytes(entry.dtype)
    flat = torch.frombuffer(buffer, dtype=torch_dtype(entry.dtype), count=count, offset=part.offset)
    return flat.view(shape)  # type: ignore[no-any-return]


def bytes_of(destination: torch.Tensor, name: str, shape: tuple[int, ...], dtype: str) -> memoryview:
    """Return the bytes of ``destination``, which must be a contiguous CPU tensor of ``shape`` and ``dtype``.

    The view does not keep the tensor alive.
    """
    wanted = torch_dtype(dtype)
    if tuple(destination.shape) != shape or destination.dtype != wanted:
        raise InputError(
            f"tensor {name!r} is read into {wanted} of shape {list(shape)}, and {destination.dtype} of shape "
            f"{list(destination.shape)} was given"
        )
    if destination.device.type != "cpu" or not destination.is_contiguous():
        raise InputError(f"tensor {name!r} is read into contiguous CPU memory, and other memory was given")
    num_bytes = destination.numel() * destination.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(destination.data_ptr())).cast("B")


def part_of(name: str, entry: SourceEntry, start: int = 0, stop: int | None = None) -> Part:
    """Return rows of a tensor as a part that goes to the start of a buffer.

    Raises
    ------
    InputError
        The tensor has no such rows.
    """
    stop = entry.rows if stop is None else stop
    if not 0 <= start <= stop <= entry.rows:
        raise InputError(f"tensor {name!r} has {entry.rows} rows, and rows {start} to {stop} were wanted")
    return Part(name, start, stop, 0, (stop - start) * entry.row_bytes, (start, stop) == (0, entry.rows))


def never_stopped() -> bool:
    """The ``stopped`` of a caller who does not stop."""
    return False


_VERSION = re.compile(r"\{version(?::[^{}]*)?\}")


def with_version(pattern: str, version: int | None) -> str:
    """Put ``version`` into a path or prefix where it says ``{version}`` or, formatted, ``{version:06d}``.

    Other braces are left alone.

    Raises
    ------
    InputError
        There is no version, or it cannot be formatted so.
    """
    if version is None and _VERSION.search(pattern):
        raise InputError(f"{pattern} needs a version, and none was given")
    try:
        return _VERSION.sub(lambda field: field[0].format(version=version), pattern)
    except ValueError as refused:
        raise InputError(f"version {version!r} cannot be put into {pattern}: {refused}") from None


class Located(NamedTuple):
    """Parts of a safetensors checkpoint: its files with what they were when their headers were read, and for each part
    its name, the number of its file, the offset there, the number of bytes, and where they go."""

    files: list[tuple[str, tuple[int, ...]]]
    rows: list[tuple[str, int, int, int, int]]


class CheckpointSource:
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
            pieces = plan_runs([(names[row[1]], row[2], row[3], 0, row[4]) for row in located.rows], [], [buffer])

        def name_at(file: str, offset: int) -> str:
            found = (row for row in located.rows if names[row[1]] == file and row[2] <= offset < row[2] + row[3])
            return next((row[0] for row in found), "")

        identities = {file: FileIdentity(*identity) for file, identity in located.files}
        read_until_stopped(pieces, identities, self.threads, stopped, name_at)

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Read one tensor."""
        entry = self.entry(name)
        self.read_parts([part_of(name, entry)], bytes_of(destination, name, entry.shape, entry.dtype), never_stopped)

    def read_rows(self, name: str, start: int, stop: int, destination: torch.Tensor) -> None:
        """Read rows ``start`` to ``stop`` of one tensor."""
        entry = self.entry(name)
        part = part_of(name, entry, start, stop)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        self.read_parts([part], bytes_of(destination, name, shape, entry.dtype), never_stopped)

    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> None:
        """Read many parts straight into ``buffer``, neighbours of a file in one go; see `SourceReader.read_parts`."""
        checkpoint = self._opened()
        with paused_garbage_collection():
            pieces = plan_runs([read for _, read in self._reads(checkpoint, parts)], [], [buffer])
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


class _StoppedError(Exception):
    """Ends the reading of pieces from within."""


def read_until_stopped(
    pieces: Sequence[Piece],
    files: Mapping[str, FileIdentity],
    threads: int,
    stopped: Callable[[], bool],
    tensor_at: Callable[[str, int], str],
) -> None:
    """Read ``pieces`` as `loadmaster.checkpoint.reader.read_pieces` does, until ``stopped()`` is true.

    It is asked before the first piece and after about every 1 to 8 MiB, in a thread that reads.
    """
    if not pieces or stopped():
        return

    def ask(piece: Piece) -> None:
        if stopped():
            raise _StoppedError

    try:
        read_pieces(pieces, files, threads, tensor_at=tensor_at, on_piece=ask)
    except _StoppedError:
        return
