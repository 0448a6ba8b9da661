"""What a fetch gives: a mapping of name to tensor in shared memory, which is given back when it is closed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from loadmaster.errors import FetchError
from loadmaster.fetch.deal import Place
from loadmaster.fetch.shared_memory import Handle, SharedArena

if TYPE_CHECKING:
    import torch

    from loadmaster.observe.fetch_report import FetchReport

__all__ = ["Weights"]

_log = logging.getLogger(__name__)


class Weights(Mapping[str, "torch.Tensor"]):
    """The tensors of one version by name, in shared memory and without a copy, in the order of the source.

    A tensor is made when it is asked for. `close` gives the memory back, as does the end of a ``with``; what is never
    closed is closed when it is collected, with a ``ResourceWarning``.

    Attributes
    ----------
    version : int or None
        What was fetched.
    report : FetchReport
        What the fetchers did.
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        arenas: Sequence[SharedArena],
        report: FetchReport,
        give_back: Callable[[], bool],
    ) -> None:
        self.version = report.version
        self.report = report
        self._places = places
        self._arenas = arenas
        self._give_back = give_back
        self._tensors: dict[str, torch.Tensor] = {}
        self._closed = False

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check_open()
        tensor = self._tensors.get(name)
        if tensor is None:
            arena, offset, dtype, shape = self._places[name]
            tensor = self._tensors[name] = self._arenas[arena].tensor(offset, dtype, shape)
        return tensor

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Weights version {self.version}: {len(self)} tensors, {self.report.num_bytes} bytes{state}>"

    def handle(self, name: str) -> Handle:
        """Return a small, picklable handle to one tensor, for other processes of this user; see `open_handle`."""
        self._check_open()
        arena, offset, dtype, shape = self._places[name]
        return Handle(self._arenas[arena].handle(), offset, dtype, shape)

    def handles(self) -> dict[str, Handle]:
        """Return a handle to each tensor. They open while this process keeps these weights open."""
        self._check_open()
        arenas = [arena.handle() for arena in self._arenas]
        return {name: Handle(arenas[place[0]], *place[1:]) for name, place in self._places.items()}

    def close(self) -> None:
        """Give the memory back. Tensors that are still in use elsewhere keep theirs until the last one is gone."""
        if self._closed:
            return
        self._close(warns=True)

    def _close(self, warns: bool) -> None:
        self._closed = True
        self._tensors.clear()
        self._arenas = ()
        give_back, self._give_back = self._give_back, lambda: True  # which holds the arenas as well
        if not give_back() and warns:
            _log.warning(
                "weights of version %s were closed while tensors of them are in use: their memory goes back with these",
                self.version,
            )

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._close(warns=error is None)  # the traceback of an error keeps tensors alive

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            try:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            finally:
                self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise FetchError(f"the weights of version {self.version} are closed")
