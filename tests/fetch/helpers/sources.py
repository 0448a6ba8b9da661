"""Sources of every kind that a user may write, plain and async, and what they were asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from loadmaster.checkpoint.dtypes import torch_dtype
from loadmaster.fetch.source import Part, SourceEntry, SourceReader


class Described:
    """A source that lists tensors and gives none; ``asked`` holds its calls."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.asked: list[tuple[object, ...]] = []

    def names(self, version: int | None) -> Iterable[str]:
        self.asked.append(("names", version))
        return iter(self.tensors)

    def entry(self, name: str) -> object:
        self.asked.append(("entry", name))
        return self.tensors[name]


class Getting(Described):
    """Gives tensors of its own."""

    def get(self, name: str) -> torch.Tensor:
        self.asked.append(("get", name))
        return self.tensors[name]


class Filling(Described):
    """Fills whole tensors."""

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        self.asked.append(("read_into", name))
        assert destination.is_contiguous()
        destination.copy_(self.tensors[name])


class ByRows(Filling):
    """Fills rows as well."""

    def read_rows(self, name: str, start: int, stop: int, destination: torch.Tensor) -> None:
        self.asked.append(("read_rows", name, start, stop))
        destination.copy_(self.tensors[name][start:stop])


class InParts(Described):
    """Writes the bytes of many parts at once."""

    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> float:
        self.asked.append(("read_parts", len(parts)))
        for part in parts:
            flat = self.tensors[part.name].reshape(-1).view(torch.uint8)
            first = part.start * (len(flat) // max(1, (self.tensors[part.name].shape or (1,))[0]))
            got = flat[first : first + part.num_bytes].numpy().tobytes()
            buffer[part.offset : part.offset + part.num_bytes] = got
        return 0.25


class AsyncGetting(Described):
    """Every call is async; the loop of each is kept."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.closed = 0

    async def _wait(self) -> None:
        await asyncio.sleep(0)
        self.loops.append(asyncio.get_running_loop())

    async def names(self, version: int | None) -> list[str]:  # type: ignore[override]
        await self._wait()
        return list(self.tensors)

    async def entry(self, name: str) -> torch.Tensor:  # type: ignore[override]
        await self._wait()
        return self.tensors[name]

    async def get(self, name: str) -> torch.Tensor:
        await self._wait()
        return self.tensors[name]

    async def close(self) -> None:
        await self._wait()
        self.closed += 1


class AsyncFilling(AsyncGetting):
    """Fills whole tensors and rows."""

    async def read_into(self, name: str, destination: torch.Tensor) -> None:
        await self._wait()
        destination.copy_(self.tensors[name])

    async def read_rows(self, name: str, start: int, stop: int, destination: torch.Tensor) -> None:
        await self._wait()
        destination.copy_(self.tensors[name][start:stop])


class AsyncInParts(InParts):
    """The same, waiting."""

    async def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().read_parts(parts, buffer, stopped)


def fetch_all(reader: SourceReader, version: int | None = None, cut: int = 0) -> dict[str, torch.Tensor]:
    """Bring every tensor into one buffer, those of two rows and more in two parts if ``cut``, and take them out."""
    names = reader.names(version)
    entries = {name: reader.entry(name) for name in names}
    parts: list[Part] = []
    places: dict[str, int] = {}
    at = 64
    for name, entry in entries.items():
        places[name] = at
        cuts = [0, entry.rows // 2, entry.rows] if cut and entry.rows > 1 else [0, entry.rows]
        for start, stop in itertools.pairwise(cuts):
            num_bytes = (stop - start) * entry.row_bytes
            parts.append(Part(name, start, stop, at + start * entry.row_bytes, num_bytes, len(cuts) == 2))
        at += -(-entry.num_bytes // 64) * 64
    buffer = bytearray(b"\xa5" * (at + 64))
    reader.read_parts(parts, memoryview(buffer), lambda: False)
    used = bytearray(len(buffer))
    for name, entry in entries.items():
        used[places[name] : places[name] + entry.num_bytes] = b"\1" * entry.num_bytes
    assert all(mark or byte == 0xA5 for mark, byte in zip(used, buffer, strict=True)), "bytes between were written"
    return {name: _taken(buffer, places[name], entry) for name, entry in entries.items()}


def _taken(buffer: bytearray, at: int, entry: SourceEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(buffer[at : at + entry.num_bytes]), dtype=torch.uint8)
    return raw.view(dtype).reshape(entry.shape)
