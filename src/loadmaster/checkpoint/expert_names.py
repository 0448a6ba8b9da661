"""Finds the tensors of experts by their names: layer, bank, part and expert of each, as a layout says.

Names that differ in nothing but the number of the expert go to the same part, so the pattern of a built-in layout is
asked once for all of them:

    model.layers.3.mlp.experts. 17 .up_proj.weight_scale
    ------- head -------------- ^^ ------ tail ---------      one question for each head and tail, not for each name

Patterns of others may make anything of a number; with them every name is a question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadmaster.checkpoint.bank_layout import EXPERTS, LAYOUTS, BankLayout, layout_of
from loadmaster.checkpoint.folder import Checkpoint
from loadmaster.checkpoint.table import Entry, TensorColumns
from loadmaster.checkpoint.texts import Texts, decimals, groups, word
from loadmaster.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["Given", "GivenLayer", "collect_experts", "layout_that_fits"]

_DOT = ord(".")


class Given(NamedTuple):
    """The tensors of one part of a bank, in the order of their experts.

    ``rows`` are those of the checkpoint; ``experts`` is None where its single tensor holds all of them.
    """

    rows: Integers
    experts: Integers | None


GivenLayer = Mapping[str, list[Given]]
"""Bank -> its parts."""


def layout_that_fits(checkpoint: Checkpoint) -> BankLayout:
    """Return the built-in layout for the experts of a checkpoint; see `layout_of`."""
    return _layout_of(checkpoint, _alike_in(checkpoint))


def collect_experts(
    checkpoint: Checkpoint, columns: TensorColumns, layout: BankLayout | None
) -> tuple[BankLayout, dict[int, GivenLayer]]:
    """Sort the expert tensors by layer, bank, part and expert; an expert that is given twice is an error.

    Without a layout the built-in one that fits is taken; returns the layout as well.

    Raises
    ------
    CheckpointError
        A tensor of the experts has no place, or another one's; there is none. Names the first.
    """
    tables = _alike_in(checkpoint)
    layout = layout or _layout_of(checkpoint, tables)
    collector = _Collector(layout, columns)
    for number, (table, alike) in enumerate(zip(checkpoint.tables, tables, strict=True)):
        collector.add(table.names, alike, columns.begin(number))
    if not collector.slots:
        raise CheckpointError(f"{checkpoint.path} has no tensor that the experts layout {layout.name!r} knows")
    return layout, collector.layers()


class _Alike(NamedTuple):
    """The tensors of experts in one table: those alike but for the number of the expert, and the others.

    ``group[i]`` numbers what ``row[i]`` has before and behind the number ``expert[i]``; ``first`` is a place of each.
    """

    row: Integers
    expert: Integers
    group: Integers
    first: Integers
    others: Integers

    def telling(self) -> list[int]:
        """Rows enough to know every kind of name."""
        return sorted([*self.others.tolist(), *self.row[self.first].tolist()])


def _alike_in(checkpoint: Checkpoint) -> list[_Alike]:
    return [_find_alike(table.names) for table in checkpoint.tables]


def _layout_of(checkpoint: Checkpoint, tables: list[_Alike]) -> BankLayout:
    pairs = zip(checkpoint.tables, tables, strict=True)
    return layout_of([table.names[row] for table, alike in pairs for row in alike.telling()], checkpoint.path)


class _Collector:
    """Collects (slot, expert, row) of each tensor; a slot is one part of one layer's bank."""

    def __init__(self, layout: BankLayout, columns: TensorColumns) -> None:
        self._layout = layout
        self._columns = columns
        self._match, self._ignored = re.compile(layout.pattern).fullmatch, re.compile(layout.ignore).fullmatch
        self._asks_once = LAYOUTS.get(layout.name) == layout
        self.slots: dict[tuple[int, str, int], int] = {}
        self._found: list[tuple[Integers, Integers, Integers]] = []

    def add(self, names: Texts, alike: _Alike, begin: int) -> None:
        """Add the tensors of a table, whose first row is ``begin``."""
        rows = alike.telling() if self._asks_once else sorted([*alike.others.tolist(), *alike.row.tolist()])
        answers = {row: self._ask(names[row], begin + row) for row in rows}
        if self._asks_once:
            slots = [answers.pop(row)[0] for row in alike.row[alike.first].tolist()]
            self._keep(np.array(slots, np.int64)[alike.group], alike.expert, begin + alike.row)
        slot, expert = np.array([*answers.values()], np.int64).reshape(-1, 2).T
        self._keep(slot, expert, begin + np.array([*answers], np.int64))

    def _keep(self, slot: Integers, expert: Integers, row: Integers) -> None:
        known = slot >= 0
        self._found.append((slot[known], expert[known], row[known]))

    def _ask(self, name: str, row: int) -> tuple[int, int]:
        """The slot and the expert of a name; slot -1 where it is ignored, expert -1 where the name has none."""
        layout = self._layout
        matched = self._match(name)
        if matched is None:
            if self._ignored(name):
                return -1, -1
            raise CheckpointError(
                f"{self._file(row)}: the experts layout {layout.name!r} has no place for tensor {name!r}"
            )
        words = matched.groupdict()
        place = layout.place_of(words["projection"], words.get("kind"))
        if place is None:
            raise CheckpointError(f"{self._file(row)}: tensor {name!r} has an unknown projection or kind")
        expert = words.get("expert")
        try:
            layer, number = int(words["layer"]), -1 if expert is None else int(expert)
        except (TypeError, ValueError):
            raise CheckpointError(
                f"{self._file(row)}: tensor {name!r}: layer {words['layer']!r} or expert {expert!r} is no number"
            ) from None
        if number >= _MOST_EXPERTS or (number < 0 and expert is not None):
            raise CheckpointError(f"{self._file(row)}: tensor {name!r}: there is no expert {number}")
        return self.slots.setdefault((layer, *place), len(self.slots)), number

    def _file(self, row: int) -> str:
        return self._columns.entry(row).file

    def layers(self) -> dict[int, GivenLayer]:
        """What was found, sorted."""
        slot, expert, row = (np.concatenate(column) for column in zip(*self._found, strict=True))
        order = np.lexsort((row, expert, slot))
        slot, expert, row = slot[order], expert[order], row[order]
        again = np.flatnonzero((slot[1:] == slot[:-1]) & (expert[1:] == expert[:-1])) + 1
        if len(again):
            second = again[np.argmin(row[again])]
            raise self._twice(self._columns.entry(row[second]), self._columns.entry(row[second - 1]))
        result: dict[int, GivenLayer] = {}
        none = np.empty(0, np.int64)
        for layer in sorted({layer for layer, _, _ in self.slots}):
            result[layer] = {name: [Given(none, none) for _ in bank.parts] for name, bank in self._layout.banks.items()}
        borders = np.searchsorted(slot, np.arange(len(self.slots) + 1)).tolist()
        for (layer, bank, part), number in self.slots.items():
            begin, end = borders[number], borders[number + 1]
            result[layer][bank][part] = self._given(expert[begin:end], row[begin:end])
        return result

    def _given(self, experts: Integers, rows: Integers) -> Given:
        if experts[0] >= 0:
            return Given(rows, experts)
        if len(rows) > 1:
            other, whole = self._columns.entry(rows[1]), self._columns.entry(rows[0])
            raise CheckpointError(f"{other.file}: tensor {other.name!r} repeats a part of {whole.name!r}")
        return Given(rows, None)

    @staticmethod
    def _twice(entry: Entry, first: Entry) -> CheckpointError:
        return CheckpointError(f"{entry.file}: tensor {entry.name!r} takes the place that {first.name!r} has already")


_MOST_EXPERTS = 1 << 32


def _find_alike(names: Texts) -> _Alike:
    """Look for ``EXPERTS`` in each name, once, and a plain number and a dot behind it."""
    mark = EXPERTS.encode()
    text = np.frombuffer(names.buffer, np.uint8)
    dots = np.flatnonzero(text == _DOT)
    dots = dots[dots + len(mark) <= len(text)]
    marks = dots[(names.words[dots] == word(mark[:8])) & (text[dots + 8] == _DOT)]
    marks = np.append(marks, [len(text), len(text)])
    first = np.searchsorted(marks[:-2], names.starts)
    row = np.flatnonzero(marks[first] + len(mark) <= names.stops)
    names = names.take(row)
    place, again = marks[first[row]], marks[first[row] + 1]
    expert, behind = decimals(names.words, place + len(mark))
    plain = (again + len(mark) > names.stops) & (behind < names.stops) & (expert >= 0) & (expert < _MOST_EXPERTS)
    plain &= names.words[behind] & np.uint64(0xFF) == _DOT
    head, tail = names.between(names.starts, place).take(plain), names.between(behind, names.stops).take(plain)
    group, firsts = groups(head, tail)
    return _Alike(row[plain], expert[plain], group, firsts, row[~plain])
