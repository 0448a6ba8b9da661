"""A source that does what a test tells it, well or badly, and the means to tell it and to wait for it.

The orders lie in a file that the source reads when a version begins, so that tests can share one pool of fetchers. They
are obeyed in fetchers only, never in the process that made the source, except those of ``parent``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from loadmaster.fetch.source import SourceEntry

SECONDS = 10.0
"""No wait may be longer than this."""

ROWS, COLUMNS = 256, 512
TENSORS = {f"t{number:02}": (ROWS, COLUMNS) for number in range(12)}
"""128 KiB each, a bundle each, dealt to the fetchers in turn."""


def truth(name: str, version: int | None, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of a tensor; no two names or versions have the same."""
    count = 1
    for size in shape:
        count *= size
    seed = zlib.crc32(name.encode()) + 13 * (version or 0)
    return ((torch.arange(count) * 7 + seed) % 251).to(torch.uint8).view(shape)


def until(condition: Callable[[], Any], seconds: float = SECONDS, what: str = "it does not come true") -> Any:
    """Ask again and again until it holds, and return what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.005)
    return found


class Ordered:
    """Tensors of `truth`; ``folder`` holds the orders, the log of all reads, and the signs that are waited for."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = str(folder)
        self.parent = os.getpid()
        self.version: int | None = None
        self.orders: dict[str, Any] = {}

    def names(self, version: int | None) -> list[str]:
        self.version = version
        try:
            self.orders = json.loads((Path(self.folder) / "orders.json").read_text())
        except FileNotFoundError:
            self.orders = {}
        self._obey("names")
        return list(self._shapes())

    def entry(self, name: str) -> SourceEntry:
        self._obey("entry")
        if name == "threads":
            return SourceEntry((4,), "I64")
        return SourceEntry(tuple(self._shapes()[name]), "U8")

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        self.read_rows(name, 0, destination.shape[0] if destination.dim() else 1, destination)

    def read_rows(self, name: str, start: int, stop: int, destination: torch.Tensor) -> None:
        self._obey(name)
        self._obey("*")
        if name == "threads":
            found = [torch.get_num_threads(), torch.get_num_interop_threads(), os.getpid(), os.getppid()]
            destination.copy_(torch.tensor(found))
            return
        whole = truth(name, self.version, tuple(self._shapes()[name]))
        destination.copy_(whole[start:stop] if whole.dim() else whole)
        self._log(f"{self.version} {name} {start} {stop} {_number()}")

    def _shapes(self) -> dict[str, Any]:
        found: dict[str, Any] = self.orders.get("tensors", TENSORS)
        return found

    def _log(self, line: str) -> None:
        with (Path(self.folder) / "log").open("a") as log:
            log.write(line + "\n")

    def _obey(self, where: str) -> None:
        for order in self.orders.get("orders", ()):
            if order["where"] != where or order.get("version", self.version) != self.version:
                continue
            if order.get("parent", False) != (os.getpid() == self.parent):
                continue
            if order.get("fetcher", _number()) != _number():
                continue
            if "once" in order and not _first(Path(self.folder) / order["once"]):
                continue
            _DEEDS[order["what"]](self, order.get("argument"))


def _number() -> int:
    return int(os.environ.get("LOADMASTER_LOCAL_RANK", "-1"))


def _first(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wait(source: Ordered, sign: str) -> None:
    """Say that this fetcher is here, and wait for the sign."""
    (Path(source.folder) / f"{sign}.at.{_number()}").touch()
    while not (Path(source.folder) / sign).exists():
        time.sleep(0.005)


def _meet(source: Ordered, fetchers: int) -> None:
    """Wait until so many fetchers are at this version."""
    sign = f"met.{source.version}"
    (Path(source.folder) / f"{sign}.{_number()}").touch()
    until(lambda: len(list(Path(source.folder).glob(f"{sign}.*"))) >= fetchers, 60)


def _fail(source: Ordered, sentence: str) -> None:
    raise RuntimeError(f"{sentence} in fetcher {_number()}")


def _crash(source: Ordered, _: object) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _signal(source: Ordered, number: int) -> None:
    os.kill(os.getpid(), number)
    until(lambda: False, 120)


def _sleep(source: Ordered, seconds: float) -> None:
    time.sleep(seconds)


_DEEDS: dict[str, Callable[[Ordered, Any], Any]] = {
    "wait": _wait,
    "meet": _meet,
    "fail": _fail,
    "crash": _crash,
    "signal": _signal,
    "sleep": _sleep,
    "exit": lambda source, code: os._exit(code),
    "leave": lambda source, code: sys.exit(code),
    "interrupt": lambda source, _: signal.raise_signal(signal.SIGTERM),
}


class Orders:
    """The other end: a test gives orders, waits for fetchers and lets them go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = Ordered(folder)

    def give(self, *orders: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Replace the orders, and forget all signs and the log."""
        for path in self.folder.iterdir():
            path.unlink()
        written: dict[str, Any] = {"orders": orders}
        if tensors is not None:
            written["tensors"] = tensors
        (self.folder / "orders.json").write_text(json.dumps(written))

    def sign(self, name: str) -> None:
        """Let those go on who wait for it."""
        (self.folder / name).touch()

    def waiting(self, name: str) -> list[int]:
        """The numbers of the fetchers that wait, or have waited, for a sign."""
        return sorted(int(path.name.rpartition(".")[2]) for path in self.folder.glob(f"{name}.at.*"))

    def log(self) -> list[str]:
        """The reads so far, a line each: version, name, first row, end, fetcher."""
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


def order(where: str, what: str, argument: Any = None, **more: Any) -> dict[str, Any]:
    """Make an order: ``what`` is done when ``where`` is read, by one ``fetcher``, ``once``, for one ``version``."""
    return {"where": where, "what": what, "argument": argument, **more}


def check_weights(weights: Mapping[str, torch.Tensor], version: int | None) -> None:
    """All tensors are there, and every byte is right."""
    for name, tensor in weights.items():
        assert torch.equal(tensor, truth(name, version, tuple(tensor.shape))), f"{name} of version {version} is wrong"


def arenas_of(process: int) -> set[int]:
    """The arenas that a process has mapped, by their inodes."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {int(line.split()[4]) for line in lines if "memfd:loadmaster-weights" in line}


def alive(processes: Iterable[int]) -> list[int]:
    """Those that still run."""
    found = []
    for process in processes:
        try:
            if psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found
