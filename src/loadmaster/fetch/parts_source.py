"""What sources of ours have in common that read many parts of tensors in one go: a tensor and its rows are parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loadmaster.fetch.source import Part, SourceEntry, bytes_of, never_stopped, part_of

if TYPE_CHECKING:
    import torch

__all__ = ["PartsSource"]


class PartsSource(ABC):
    """Reads tensors and rows of them with `read_parts`."""

    @abstractmethod
    def entry(self, name: str) -> SourceEntry:
        """Shape in storage units and dtype of one tensor."""

    @abstractmethod
    def read_parts(self, parts: Sequence[Part], buffer: memoryview, stopped: Callable[[], bool]) -> Any:
        """Read many parts into ``buffer``; see `SourceReader.read_parts`."""

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Read one tensor."""
        entry = self.entry(name)
        self.read_parts([part_of(name, entry)], bytes_of(destination, name, entry.shape, entry.dtype), never_stopped)

    def read_rows(self, name: str, start: int, stop: int, destination: torch.Tensor) -> None:
        """Read rows ``start`` to ``stop`` of one tensor, and nothing of the others."""
        entry = self.entry(name)
        part = part_of(name, entry, start, stop)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        self.read_parts([part], bytes_of(destination, name, shape, entry.dtype), never_stopped)
