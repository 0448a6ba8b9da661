"""Key-value stores of tensors: one that answers as torchstore does, a plain one, and one behind a socket.

Run as a script, it is a process that fetches: it takes a pickled source and versions, and says what it got.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch


class PlainStore:
    """A dictionary with the functions of a store; ``get`` has a default, which is no place to put a tensor."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.asked: list[tuple[str, Any]] = []

    def keys(self, prefix: str) -> list[str]:
        self.asked.append(("keys", prefix))
        return [key for key in self.values if key.startswith(prefix)]

    def get(self, key: str, default: object = None) -> Any:
        self.asked.append(("get", key))
        return self.values.get(key, default)


class DottedStore:
    """Answers as torchstore's client does: ``keys`` matches whole words between dots, all is async."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.asked: list[tuple[str, Any]] = []
        self.loops: set[int] = set()
        self.closed = 0

    async def keys(self, prefix: str | None = None) -> list[str]:
        await self._wait("keys", prefix)
        words = prefix.split(".") if prefix is not None else []
        return [key for key in self.values if key.split(".")[: len(words)] == words]

    async def get(self, key: str, inplace_tensor: torch.Tensor | None = None, tensor_slice_spec: Any = None) -> Any:
        await self._wait("get" if inplace_tensor is None else "get in place", key)
        if inplace_tensor is None:
            return self.values[key]
        return inplace_tensor.copy_(self.values[key])

    async def close(self) -> None:
        self.closed += 1

    async def _wait(self, what: str, key: str | None) -> None:
        await asyncio.sleep(0)
        self.asked.append((what, key))
        self.loops.add(id(asyncio.get_running_loop()))

    def calls(self, *kinds: str) -> list[Any]:
        """The keys that were asked for in these ways."""
        return [key for what, key in self.asked if what in kinds]


class DescribingStore(DottedStore):
    """Says shape and dtype without the data."""

    async def meta(self, key: str) -> torch.Tensor:
        await self._wait("meta", key)
        return self.values[key].to("meta")


class SocketStore:
    """A client of a `StoreServer`: one connection, made in the loop that first asks, and never pickled."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SocketStore, (self.port,)

    async def keys(self, prefix: str | None = None) -> Any:
        return await self._ask("keys", prefix)

    async def get(self, key: str) -> Any:
        return await self._ask("get", key)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            await self._connection[1].wait_closed()
            self._connection = None

    async def _ask(self, what: str, key: str | None) -> Any:
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._connection
        await _send(writer, (what, key))
        return await _receive(reader)


class SocketConnect:
    """Makes the client where it is needed."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __call__(self) -> SocketStore:
        return SocketStore(self.port)


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    text = pickle.dumps(value)
    writer.write(len(text).to_bytes(8, "little") + text)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(8), "little")
    return pickle.loads(await reader.readexactly(size))


class StoreServer:
    """Serves a `DottedStore` on a port of this host, from a thread; a ``with`` block ends it."""

    def __init__(self, store: DottedStore) -> None:
        self.store = store
        self.port = 0
        self.connections = 0
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="store")

    def __enter__(self) -> StoreServer:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._end.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                what, key = await _receive(reader)
                await _send(writer, await getattr(self.store, what)(key))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


MODULE_VALUES: dict[str, Any] = {"policy_ver_0000000001.w": torch.arange(5)}


async def keys(prefix: str | None = None) -> list[str]:
    """This module is a store as well, as the module ``torchstore`` is one."""
    return await DottedStore(MODULE_VALUES).keys(prefix)


async def get(key: str) -> Any:
    return MODULE_VALUES[key]


def connect_plain() -> PlainStore:
    return PlainStore(MODULE_VALUES)


CONNECTED: list[DottedStore] = []


async def connect_waiting() -> DottedStore:
    CONNECTED.append(DottedStore(MODULE_VALUES))
    return CONNECTED[-1]


def connect_nothing() -> object:
    return object()


def main() -> None:
    from loadmaster.fetch.source import SourceReader

    from .sources import fetch_all

    source, versions = pickle.load(sys.stdin.buffer)
    with SourceReader(source) as reader:
        got = [fetch_all(reader, version) for version in versions]
    sys.stdout.buffer.write(pickle.dumps(got))


if __name__ == "__main__":
    main()
