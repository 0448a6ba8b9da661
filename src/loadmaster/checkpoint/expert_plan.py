"""Lays out the banks of experts: checks that each expert is there once, and lists the reads that fill the banks.

    names --collect_experts--> rows by layer, bank and part --plan_banks--> banks in one memory, reads that fill them

One part of one bank of one layer is planned at a time, for all of its experts at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loadmaster.checkpoint.bank_layout import Bank, BankLayout
from loadmaster.checkpoint.dtypes import DTYPES, item_bytes
from loadmaster.checkpoint.expert_names import GivenLayer, collect_experts
from loadmaster.checkpoint.folder import Checkpoint
from loadmaster.checkpoint.memory import ALIGNMENT
from loadmaster.checkpoint.pieces import PlacedRun, Reads
from loadmaster.checkpoint.placement import Run
from loadmaster.checkpoint.table import Entry, TensorColumns
from loadmaster.errors import CheckpointError, InputError, PlacementError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["BanksPlan", "ExpertShard", "PlannedBank", "PlannedLayer", "plan_banks"]

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """The part of the experts that one rank keeps.

    Parameters
    ----------
    tp_rank, tp_ranks : int
        Tensor parallelism over the intermediate dimension: this rank, from 0, and how many there are.
    ep_rank, ep_ranks : int
        Expert parallelism: this rank, from 0, and how many there are.
    ep : "blocks" or "strided"
        Whether a rank keeps neighbouring experts, or every ``ep_ranks``-th one from ``ep_rank`` on.
    """

    tp_rank: int = 0
    tp_ranks: int = 1
    ep_rank: int = 0
    ep_ranks: int = 1
    ep: Literal["blocks", "strided"] = "blocks"

    def __post_init__(self) -> None:
        for kind, rank, ranks in (("tensor", self.tp_rank, self.tp_ranks), ("expert", self.ep_rank, self.ep_ranks)):
            if ranks < 1 or not 0 <= rank < ranks:
                raise InputError(f"{kind}-parallel rank {rank} of {ranks} ranks does not exist")
        if self.ep not in ("blocks", "strided"):
            raise InputError(f"experts are dealt in 'blocks' or 'strided', not {self.ep!r}")

    def experts(self, number: int, layer: int) -> range:
        """The experts that this rank keeps of ``number``."""
        if number % self.ep_ranks:
            raise PlacementError(f"layer {layer}: {number} experts do not divide among {self.ep_ranks} ranks")
        if self.ep == "strided":
            return range(self.ep_rank, number, self.ep_ranks)
        each = number // self.ep_ranks
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


class PlannedBank(NamedTuple):
    """One bank of one layer: where its bytes are in the memory of the load."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Scalars(NamedTuple):
    """Scalars [parts, experts] in float32 at ``offset``, to be spread over the rows of a bank."""

    bank: PlannedBank
    offset: int
    parts: int
    reciprocal: bool


@dataclass
class Work:
    """What there is to read: bytes that stay together, columns, and interleaved rows. All into buffer 0.

    ``plain`` holds the columns file, offset, number of bytes and target of many reads each.
    """

    files: Sequence[str]
    plain: list[tuple[Integers, Integers, Integers, Integers]] = field(default_factory=list)
    strided: list[PlacedRun] = field(default_factory=list)
    dealt: list[PlacedRun] = field(default_factory=list)

    def reads(self) -> Reads:
        """All of ``plain`` as one table."""
        if not self.plain:
            return Reads.of([])
        file, offset, num_bytes, target = (np.concatenate(parts) for parts in zip(*self.plain, strict=True))
        return Reads(self.files, file, offset, num_bytes, np.zeros_like(file), target)


class PlannedLayer(NamedTuple):
    """The banks of one layer, its scalars, and the end of its bytes."""

    number: int
    banks: tuple[PlannedBank, ...]
    scalars: tuple[Scalars, ...]
    num_entries: int
    end: int


@dataclass(frozen=True, kw_only=True)
class BanksPlan:
    """Where everything goes: layers in order, reads and runs from the files to offsets of one memory.

    The rows of a run in ``dealt`` go in turns to its target and to the rows right behind those of that target.
    """

    layers: Sequence[PlannedLayer]
    work: Work
    num_entries: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all banks."""
        return sum(_bytes_of(bank) for layer in self.layers for bank in layer.banks)


def _bytes_of(bank: PlannedBank) -> int:
    return math.prod(bank.shape) * item_bytes(bank.dtype)


def plan_banks(checkpoint: Checkpoint, layout: BankLayout | None, shard: ExpertShard) -> BanksPlan:
    """Check that every expert is there once and of one shape, and lay the banks out layer by layer.

    Without a layout the built-in one that fits is taken.

    Raises
    ------
    CheckpointError, PlacementError
        As `load_experts`.
    """
    columns = TensorColumns(checkpoint.tables)
    layout, given = collect_experts(checkpoint, columns, layout)
    work = Work(columns.files)
    layers = []
    at = 0
    number = _number_of_experts(checkpoint)
    for layer in sorted(given):
        planner = _LayerPlanner(layout, layer, given[layer], columns, number, shard, at)
        layers.append(planner.plan(work))
        at = layers[-1].end
    return BanksPlan(layers=layers, work=work, num_entries=sum(layer.num_entries for layer in layers))


def _number_of_experts(checkpoint: Checkpoint) -> int | None:
    text = checkpoint.config.get("text_config")
    model = text if isinstance(text, dict) else checkpoint.config
    return next((model[key] for key in _NUMBERS_OF_EXPERTS if type(model.get(key)) is int and model[key] > 0), None)


class _Cut(NamedTuple):
    """One part of a bank for one expert, relative to the expert's first byte and to the expert's row of the bank.

    ``shape`` is that of the part in the file; ``rows`` and ``tail`` that of what is kept.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: int
    tail: tuple[int, ...]
    runs: tuple[Run, ...]


class _LayerPlanner:
    """Lays out the banks of one layer from byte ``at`` on, and lists the runs that fill them."""

    def __init__(
        self,
        layout: BankLayout,
        layer: int,
        given: GivenLayer,
        columns: TensorColumns,
        number: int | None,
        shard: ExpertShard,
        at: int,
    ) -> None:
        self.layout = layout
        self.layer = layer
        self.given = given
        self.columns = columns
        self.shard = shard
        self.at = at
        self.num_entries = 0
        self.number = self._number(number)
        self.experts = shard.experts(self.number, layer)
        self.rows: dict[str, int] = {}
        self._entries_seen: dict[str, Entry] = {}

    def plan(self, work: Work) -> PlannedLayer:
        """Append the work of this layer and return its banks."""
        # Weights come first: what scales them, and is spread over their rows, follows their shapes.
        banks = self.layout.banks
        names = sorted(banks, key=lambda name: (bool(banks[name].spread), bool(banks[name].scales)))
        planned: dict[str, PlannedBank] = {}
        scalars = []
        for name in names:
            bank = self.layout.banks[name]
            if bank.spread:
                planned[name], row = self._spread(name, bank, work)
                scalars.append(row)
            else:
                planned[name] = self._fill(name, bank, work)
        return PlannedLayer(
            self.layer, tuple(planned[name] for name in self.layout.banks), tuple(scalars), self.num_entries, self.at
        )

    def _number(self, number: int | None) -> int:
        """The number of experts: what config.json says, or what the tensors show."""
        parts = [part for parts in self.given.values() for part in parts if len(part.rows)]
        fused = [self.columns.entry(part.rows[0]).shape[:1] for part in parts if part.experts is None]
        seen = max(
            [*(int(part.experts[-1]) + 1 for part in parts if part.experts is not None), *itertools.chain(*fused)],
            default=0,
        )
        if not seen:
            entry = self.columns.entry(parts[0].rows[0])
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} holds no experts")
        if number is not None and seen > number:
            raise CheckpointError(f"layer {self.layer} has an expert {seen - 1}, and config.json says {number} experts")
        return seen if number is None else number

    def _entries(self, name: str, index: int) -> tuple[Integers, Integers]:
        """The row of each kept expert's tensor of a part, and the expert's number within the tensor."""
        rows, experts = self.given[name][index]
        if experts is None:
            entry = self.columns.entry(rows[0])
            if not entry.shape or entry.shape[0] != self.number:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} does not hold "
                    f"{self.number} experts"
                )
            self.num_entries += 1
            kept = self._kept()
            return np.full(len(kept), rows[0]), kept
        if len(rows) != self.number:
            missing = int(np.argmin(np.append(experts, -1) == np.arange(len(experts) + 1)))
            part = self.layout.banks[name].parts[index]
            raise CheckpointError(f"layer {self.layer}: {part!r} of expert {missing} is missing (bank {name})")
        kept = self._kept()
        self.num_entries += len(kept)
        return rows[kept], np.zeros_like(kept)

    def _kept(self) -> Integers:
        """The kept experts; only when it is known that there are so many, since a file may name any number."""
        return np.arange(self.experts.start, self.experts.stop, self.experts.step)

    def _fill(self, name: str, bank: Bank, work: Work) -> PlannedBank:
        parts = [self._entries(name, index) for index in range(len(bank.parts))]
        entries = [self.columns.entry(rows[0]) for rows, _ in parts]
        cuts = [self._cut(name, bank, entry) for entry in entries]
        first = cuts[0]
        self._entries_seen[name] = entries[0]
        for cut, entry in zip(cuts, entries, strict=True):
            if cut.shape != first.shape or cut.dtype != first.dtype:
                raise self._unlike(entry, entries[0])
        if not DTYPES[first.dtype].torch_name:
            entry = entries[0]
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which torch does not have")
        rows = self.rows[name] = sum(cut.rows for cut in cuts)
        line = math.prod(first.tail) * item_bytes(first.dtype)
        planned = self._place(name, first.dtype, (len(self.experts), rows, *first.tail))
        offset = planned.offset
        for cut, part in zip(cuts, parts, strict=True):
            self._move(cut, part, offset, rows * line, bank.interleaved, work)
            offset += cut.rows * line
        return planned

    def _move(
        self, cut: _Cut, part: tuple[Integers, Integers], target: int, step: int, interleaved: bool, work: Work
    ) -> None:
        """List what brings the cut of each tensor of a part to ``target``, the next one ``step`` bytes further."""
        rows, inside = part
        unlike = np.flatnonzero(self.columns.kind[rows] != self.columns.kind[rows[0]])
        if len(unlike):
            raise self._unlike(self.columns.entry(rows[unlike[0]]), self.columns.entry(rows[0]))
        num_bytes = math.prod(cut.shape) * item_bytes(cut.dtype)
        file = self.columns.file[rows]
        sources = self.columns.offset[rows] + inside * num_bytes
        targets = target + step * np.arange(len(rows))
        for run in cut.runs if num_bytes else ():
            if run.num_runs == 1 and not interleaved:
                work.plain.append((file, sources + run.source, np.full(len(rows), run.num_bytes), targets + run.target))
                continue
            of_rows = work.dealt if interleaved else work.strided
            for number, source, at in zip(file.tolist(), sources.tolist(), targets.tolist(), strict=True):
                of_rows.append((work.files[number], run._replace(source=source + run.source), 0, at))

    def _cut(self, name: str, bank: Bank, entry: Entry) -> _Cut:
        """What this rank keeps of one expert's part."""
        fused = self.given[name][0].experts is None
        shape = entry.storage_shape[1:] if fused else entry.storage_shape
        if not shape:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} is no part of a bank"
            )
        halves = 2 if bank.halves or bank.interleaved else 1
        if shape[0] % halves:
            raise PlacementError(f"tensor {entry.name!r}: {shape[0]} rows do not hold gate and up of one size")
        rows, tail = shape[0] // halves, shape[1:]
        line = math.prod(tail) * item_bytes(entry.dtype)
        if bank.intermediate == 1:
            start, stop = self._block(entry, bank, tail[0] if tail else 1)
            column = line // max(1, tail[0] if tail else 1)
            kept = (stop - start, *tail[1:])
            runs = [Run(start * column, line, 0, (stop - start) * column, (stop - start) * column, rows)]
            if stop - start == (tail[0] if tail else 1):
                runs = [Run(0, line * rows, 0, line * rows, line * rows, 1)]
            return _Cut(shape, entry.dtype, rows, kept if tail else (), tuple(runs))
        start, stop = (0, rows) if bank.intermediate is None else self._block(entry, bank, rows)
        kept_bytes = (stop - start) * line
        if bank.interleaved:
            runs = [Run(2 * start * line, 2 * line, 0, line, line, stop - start)]
        else:
            runs = [
                Run((half * rows + start) * line, kept_bytes, half * kept_bytes, kept_bytes, kept_bytes, 1)
                for half in range(halves)
            ]
        if not bank.interleaved and stop - start == rows:
            whole = line * rows * halves
            runs = [Run(0, whole, 0, whole, whole, 1)]
        return _Cut(shape, entry.dtype, halves * (stop - start), tail, tuple(runs))

    def _block(self, entry: Entry, bank: Bank, size: int) -> tuple[int, int]:
        """This rank's equal block of the intermediate dimension."""
        ranks = self.shard.tp_ranks
        if size % ranks:
            raise PlacementError(
                f"tensor {entry.name!r} of shape {list(entry.shape)}: {size} along the intermediate dimension do not "
                f"divide among {ranks} ranks" + (f" (each stands for {bank.block})" if bank.block > 1 else "")
            )
        each = size // ranks
        if bank.scales and ranks > 1:
            self._check_borders(entry, bank, size)
        return self.shard.tp_rank * each, (self.shard.tp_rank + 1) * each

    def _check_borders(self, entry: Entry, bank: Bank, size: int) -> None:
        """A rank's part of the weight has to end where a block of its scale ends."""
        weight = self._entries_seen[bank.scales]
        along = weight.storage_shape[(bank.intermediate or 0) - 2]
        if along % self.shard.tp_ranks or along // self.shard.tp_ranks % bank.block or size * bank.block != along:
            raise PlacementError(
                f"tensor {entry.name!r}: {along} along the intermediate dimension of {weight.name!r} do not divide "
                f"among {self.shard.tp_ranks} ranks in blocks of {bank.block}"
            )

    def _spread(self, name: str, bank: Bank, work: Work) -> tuple[PlannedBank, Scalars]:
        parts = len(bank.parts)
        if self.rows[bank.spread] % parts:
            raise PlacementError(
                f"layer {self.layer}: {parts} scalars (bank {name}) cannot be spread over the {self.rows[bank.spread]} "
                f"rows of bank {bank.spread}"
            )
        planned = self._place(name, "F16", (len(self.experts), self.rows[bank.spread]))
        offset, self.at = self.at, self.at + _aligned(4 * parts * len(self.experts))
        for index in range(parts):
            rows, inside = self._entries(name, index)
            for kind in sorted(set(self.columns.kind[rows].tolist())):  # np.unique imports numpy.ma: 0.1 s
                entry = self.columns.entry(rows[np.argmax(self.columns.kind[rows] == kind)])
                if entry.dtype != "F32" or entry.num_bytes != 4:
                    raise CheckpointError(
                        f"{entry.file}: tensor {entry.name!r} of dtype {entry.dtype} and shape {list(entry.shape)} is "
                        "no single float32 scale"
                    )
            targets = offset + 4 * (index * len(self.experts) + np.arange(len(rows)))
            sources = self.columns.offset[rows] + 4 * inside
            work.plain.append((self.columns.file[rows], sources, np.full(len(rows), 4), targets))
        return planned, Scalars(planned, offset, parts, bank.reciprocal)

    def _place(self, name: str, dtype: str, shape: tuple[int, ...]) -> PlannedBank:
        planned = PlannedBank(name, dtype, shape, self.at)
        self.at += _aligned(_bytes_of(planned))
        return planned

    def _unlike(self, entry: Entry, first: Entry) -> CheckpointError:
        return CheckpointError(
            f"{entry.file}: tensor {entry.name!r} of dtype {entry.dtype} and shape {list(entry.shape)} does not fit a "
            f"bank with {first.name!r} of dtype {first.dtype} and shape {list(first.shape)}"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
