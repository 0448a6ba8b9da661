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
from loadmaster.checkpoint.plain_header import plain_numbers
from loadmaster.checkpoint.table import Entry, TensorColumns
from loadmaster.checkpoint.texts import Texts, word
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


def collect_experts(checkpoint: Checkpoint, columns: TensorColumns, layout: BankLayout) -> dict[int, GivenLayer]:
    """Sort the expert tensors by layer, bank, part and expert; an expert that is given twice is an error.

    Raises
    ------
    CheckpointError
        A tensor of the experts has no place, or another one's; there is none. Names the first.
    """
    collector = _Collector(layout, columns)
    for number, table in enumerate(checkpoint.tables):
        collector.add(table.names, columns.begin(number))
    if not collector.slots:
        raise CheckpointError(f"{checkpoint.path} has no tensor that the experts layout {layout.name!r} knows")
    return collector.layers()


def layout_that_fits(checkpoint: Checkpoint) -> BankLayout:
    """Return the built-in layout for the names of a checkpoint, as `layout_of` does, without a string for each."""
    layer = ""
    names: list[str] = []
    for table in checkpoint.tables:
        marks, _, _ = _split(table.names)
        rows = np.flatnonzero(marks >= 0)
        if not layer and len(rows):
            layer = table.names[rows[0]].partition(EXPERTS)[0] + EXPERTS
        alike = (marks - table.names.starts)[rows] + len(EXPERTS) == len(layer.encode())
        names += [name for name in table.names.take(rows[alike]) if name.startswith(layer)]
    return layout_of(names, checkpoint.path)


class _Collector:
    """Collects (slot, expert, row) of each tensor; a slot is one part of one layer's bank."""

    def __init__(self, layout: BankLayout, columns: TensorColumns) -> None:
        self._layout = layout
        self._columns = columns
        self._match, self._ignored = re.compile(layout.pattern).fullmatch, re.compile(layout.ignore).fullmatch
        self._asks_once = LAYOUTS.get(layout.name) == layout
        self.slots: dict[tuple[int, str, int], int] = {}
        self._found: list[tuple[Integers, Integers, Integers]] = []

    def add(self, names: Texts, begin: int) -> None:
        """Add the tensors of a table, whose first row is ``begin``."""
        marks, experts, stops = _split(names)
        alike = np.flatnonzero(experts >= 0) if self._asks_once else np.empty(0, np.int64)
        questions = np.flatnonzero(marks >= 0 if not self._asks_once else (marks >= 0) & (experts < 0))
        groups, firsts = _groups(names.take(alike), marks[alike], stops[alike])
        answers = {}
        for row in sorted([*questions.tolist(), *alike[firsts].tolist()]):
            answers[row] = self._ask(names[row], begin + row)
        slot = np.array([answers[row][0] for row in alike[firsts].tolist()], np.int64)[groups]
        self._keep(slot, experts[alike], begin + alike)
        asked = np.array([answers[row] for row in questions.tolist()], np.int64).reshape(-1, 2).T
        self._keep(asked[0], asked[1], begin + questions)

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
        if number >= _MOST_EXPERTS:
            raise CheckpointError(f"{self._file(row)}: tensor {name!r}: there are no {number} experts")
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


def _split(names: Texts) -> tuple[Integers, Integers, Integers]:
    """Where each name holds ``EXPERTS``, the number of the expert behind it, and where that ends.

    -1 for a name that is not of experts; the number -1 where there is none, or no plain one, or ``EXPERTS`` again.
    """
    mark = EXPERTS.encode()
    text = np.frombuffer(names.buffer, np.uint8)
    dots = np.flatnonzero(text == _DOT)
    dots = dots[dots + len(mark) <= len(text)]
    marks = dots[(names.words[dots] == word(mark[:8])) & (text[dots + 8] == _DOT)]
    marks = np.append(marks, [len(text), len(text)])
    first = np.searchsorted(marks[:-2], names.starts)
    place, again = marks[first], marks[first + 1]
    of_experts = place + len(mark) <= names.stops
    number, stop = plain_numbers(text, place + len(mark))
    plain = (again + len(mark) > names.stops) & (stop < names.stops) & (text[stop] == _DOT) & (number < _MOST_EXPERTS)
    return np.where(of_experts, place, -1), np.where(of_experts & plain, number, -1), stop


def _groups(names: Texts, marks: Integers, stops: Integers) -> tuple[Integers, Integers]:
    """Number what names have before and behind their expert's number; see `Texts.groups`."""
    head, _ = names.between(names.starts, marks).groups()
    tail, firsts = names.between(stops, names.stops).groups()
    _, first, numbers = np.unique(head * len(firsts) + tail, return_index=True, return_inverse=True)
    return numbers, first
