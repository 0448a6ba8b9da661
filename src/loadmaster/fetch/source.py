"""Where fetchers get tensors from: the protocol of a source, and what asks one.

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
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loadmaster.checkpoint.dtypes import DTYPES, import_torch, item_bytes, name_of_torch_dtype, torch_dtype
from loadmaster.checkpoint.pieces import Piece
from loadmaster.checkpoint.reader import read_pieces
from loadmaster.checkpoint.safetensors import FileIdentity
from loadmaster.errors import CheckpointError, InputError, LoadmasterError

if TYPE_CHECKING:
    import torch

__all__ = [
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
