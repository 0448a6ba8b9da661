"""The tensors of one file as a table: columns of names, kinds and places instead of an object for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadmaster.checkpoint.dtypes import DTYPES, SUB_BYTE_DTYPES
from loadmaster.checkpoint.texts import Texts
from loadmaster.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Entry", "Kind", "TensorTable"]


class Entry(NamedTuple):
    """One tensor in a checkpoint.

    ``shape`` counts elements as the header gives them; ``offset`` is the position of the first byte in ``file``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape in units that memory can address: two F4 elements share a byte, so the last dimension halves."""
        if self.dtype not in SUB_BYTE_DTYPES or not self.shape:
            return self.shape
        units, rest = divmod(self.shape[-1] * DTYPES[self.dtype].bits, 8)
        if rest:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} of dtype {self.dtype} and shape {list(self.shape)} has rows "
                "that do not fill whole bytes; it cannot be read"
            )
        return (*self.shape[:-1], units)


class Kind(NamedTuple):
    """What many tensors of a model have in common."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorTable:
    """The tensors of ``file``, in the order of their bytes.

    Attributes
    ----------
    names : Texts
        Their names.
    kinds : list of Kind
        The kinds that there are.
    kind : int64 array
        The number of each tensor's kind.
    offset : int64 array
        The position in the file of the first byte of each.
    """

    def __init__(
        self, file: str, names: Texts, kinds: Sequence[Kind], kind: NDArray[np.int64], offset: NDArray[np.int64]
    ) -> None:
        self.file = file
        self.names = names
        self.kinds = list(kinds)
        self.kind = kind
        self.offset = offset

    @classmethod
    def of(cls, file: str, entries: Sequence[Entry]) -> TensorTable:
        """Make a table of entries that are in the order of their bytes."""
        kinds: dict[Kind, int] = {}
        kind = [kinds.setdefault(Kind(row[1], row[2], row[5]), len(kinds)) for row in entries]
        names = Texts.of(entry.name for entry in entries)
        offset = [entry.offset for entry in entries]
        return cls(file, names, list(kinds), np.array(kind, np.int64), np.array(offset, np.int64))

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def num_bytes(self) -> NDArray[np.int64]:
        """Bytes of each tensor."""
        return np.array([kind.num_bytes for kind in self.kinds], np.int64)[self.kind]

    def take(self, rows: Any) -> TensorTable:
        """The tensors at ``rows``, numbers or a mask."""
        return TensorTable(self.file, self.names.take(rows), self.kinds, self.kind[rows], self.offset[rows])

    def entry(self, row: int) -> Entry:
        """The tensor at ``row``."""
        dtype, shape, num_bytes = self.kinds[self.kind[row]]
        return Entry(self.names[row], dtype, shape, self.file, int(self.offset[row]), num_bytes)

    def entries(self) -> list[Entry]:
        """All tensors."""
        new, file, kinds = tuple.__new__, self.file, self.kinds  # half the time of Entry(...)
        columns = zip(self.names, self.kind.tolist(), self.offset.tolist(), strict=True)
        return [
            new(Entry, (name, kinds[kind][0], kinds[kind][1], file, offset, kinds[kind][2]))
            for name, kind, offset in columns
        ]


class TensorColumns:
    """The tensors of several tables as one, row after row.

    Attributes
    ----------
    files : list of str
        The files of the tables.
    file, kind, offset : int64 array
        As in `TensorTable`, and the number of each tensor's file.
    """

    def __init__(self, tables: Sequence[TensorTable]) -> None:
        self._tables = tables
        self._begins = np.cumsum([0, *map(len, tables)])
        numbers: dict[Kind, int] = {}
        kinds = [
            np.array([numbers.setdefault(kind, len(numbers)) for kind in table.kinds], np.int64) for table in tables
        ]
        self.files = [table.file for table in tables]
        self.file = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self.kind = np.concatenate(
            [np.array(of, np.int64)[table.kind] for of, table in zip(kinds, tables, strict=True)]
        )
        self.offset = np.concatenate([table.offset for table in tables])

    def begin(self, table: int) -> int:
        """The row of the first tensor of a table."""
        return int(self._begins[table])

    def entry(self, row: int) -> Entry:
        """The tensor at ``row``."""
        table = int(self.file[row])
        return self._tables[table].entry(int(row - self._begins[table]))
