"""Loads the experts of a mixture-of-experts checkpoint straight into their banks: a tensor per kind, with all experts.

    ...experts.0.gate_proj.weight [I, H/2] --\\
    ...experts.0.up_proj.weight   [I, H/2] ---+--> gate_up_packed [E, 2I, H/2]    row 0: gate, up; row 1: ...
    ...experts.1.gate_proj.weight [I, H/2] --/

No tensor exists in between: each byte is read from the file to its place in its bank. A layer is handed out when all
its bytes are there, while the reading of the next ones goes on.
"""

from __future__ import annotations

import bisect
import os
import queue
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loadmaster.checkpoint.bank_layout import EXPERTS, Bank, BankLayout, layout_of
from loadmaster.checkpoint.dtypes import DTYPES, item_bytes, torch_dtype
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.load import tensor_at
from loadmaster.checkpoint.memory import ALIGNMENT, Arena
from loadmaster.checkpoint.pieces import GAP, Piece, PlacedRun, Read, plan_dealt, plan_runs
from loadmaster.checkpoint.placement import Run
from loadmaster.checkpoint.reader import KEEP_CACHE, CacheUse, read_pieces
from loadmaster.checkpoint.safetensors import Entry
from loadmaster.errors import CheckpointError, InputError, PlacementError
from loadmaster.observe.memory import peak_rss
from loadmaster.observe.report import PhaseClock, RankReport, Report
from loadmaster.share.lease import Lease, lease

if TYPE_CHECKING:
    import torch

__all__ = ["ExpertShard", "load_experts", "load_experts_of_rank", "plan_banks"]

OnLayer = Callable[[int, Mapping[str, "torch.Tensor"]], None]
"""Called with the number of a layer and its complete banks."""

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


def load_experts(
    banks: MutableMapping[int, Mapping[str, torch.Tensor]],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    layout: BankLayout | None = None,
    shard: ExpertShard | None = None,
    on_layer: OnLayer | None = None,
    threads: int | None = None,
    cold: bool = False,
    drop_cache: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Load the experts of the checkpoint at ``path`` into banks, and return when every byte is in its place.

    Parameters
    ----------
    banks : mutable mapping of int to mapping of str to torch.Tensor
        Receives, for each layer, its banks by name: new tensors in one huge-page-advised mapping of memory.
    path : path or Checkpoint
        As for `open_checkpoint`.
    layout : BankLayout, optional
        Where the tensors go; default the built-in layout that fits the checkpoint's names.
    shard : ExpertShard, optional
        The part to keep; default all of it.
    on_layer : callable, optional
        Called in this thread once for each layer, in the order in which they are complete, while the next are read.
    threads : int, optional
        Reading threads; default this process's share of the host.
    cold, drop_cache : bool
        As for `load`.
    progress : callable, optional
        Called with (bytes placed, bytes in all) while reading.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be opened or read; an expert is missing, given twice or of another shape than the others.
    PlacementError
        A dimension does not divide among the ranks.
    """
    with lease(threads=threads) as held:
        return load_experts_of_rank(
            banks,
            path,
            layout=layout,
            shard=shard,
            on_layer=on_layer,
            held=held,
            progress=progress,
            cache=CacheUse(cold, drop_cache),
        )


def load_experts_of_rank(
    banks: MutableMapping[int, Mapping[str, torch.Tensor]],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    layout: BankLayout | None,
    shard: ExpertShard | None,
    on_layer: OnLayer | None,
    held: Lease,
    progress: Callable[[int, int], None] | None,
    cache: CacheUse = KEEP_CACHE,
) -> Report:
    """Load under a lease that is held; otherwise as `load_experts`."""
    started = time.perf_counter()
    part = held.look()
    clock = PhaseClock()
    with clock.phase("open"):
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    with clock.phase("plan"), paused_garbage_collection():
        plan = plan_banks(checkpoint, layout or layout_of(checkpoint, checkpoint.path), shard or ExpertShard())
        filling = _Filling(plan)
    with clock.phase("read"):
        bytes_read = filling.run(checkpoint, lambda: held.look().threads, on_layer, progress, cache)
    banks.update(filling.banks)
    wall = time.perf_counter() - started
    clock.seconds["convert"] += wall - sum(clock.seconds.values())
    rank = RankReport(
        rank=shard.tp_rank if shard and shard.tp_ranks > 1 else shard.ep_rank if shard else 0,
        tensors=plan.num_entries,
        bytes_read=bytes_read,
        bytes_placed=plan.num_bytes,
        seconds=clock.seconds,
        threads=part.threads,
        why=part.why,
        peak_rss=peak_rss(),
    )
    return Report(checkpoint=checkpoint.path, ranks=(rank,), load_seconds=wall, wall_seconds=wall)


class _Given(NamedTuple):
    """The tensors of one layer: bank -> part -> expert (None: all of them in one) -> entry."""

    parts: dict[str, list[dict[int | None, Entry]]]


class PlannedBank(NamedTuple):
    """One bank of one layer: where its bytes are in the memory of the load."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Scalars(NamedTuple):
    """Scalars [parts, experts] in float32 at ``offset``, to be spread over the rows of a bank."""

    bank: PlannedBank
    offset: int
    parts: int
    reciprocal: bool


class Work(NamedTuple):
    """What there is to read: bytes that stay together, columns, and interleaved rows. All into buffer 0."""

    reads: list[Read]
    strided: list[PlacedRun]
    dealt: list[PlacedRun]


class PlannedLayer(NamedTuple):
    """The banks of one layer, its scalars, and the end of its bytes."""

    number: int
    banks: tuple[PlannedBank, ...]
    scalars: tuple[_Scalars, ...]
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
    return int(np.prod(bank.shape, dtype=np.int64)) * item_bytes(bank.dtype)


def plan_banks(checkpoint: Checkpoint, layout: BankLayout, shard: ExpertShard) -> BanksPlan:
    """Check that every expert is there once and of one shape, and lay the banks out layer by layer.

    Raises
    ------
    CheckpointError, PlacementError
        As `load_experts`.
    """
    given = _collect(checkpoint, layout)
    work = Work([], [], [])
    layers = []
    at = 0
    number = _number_of_experts(checkpoint)
    for layer in sorted(given):
        planner = _LayerPlanner(layout, layer, given[layer], number, shard, at)
        layers.append(planner.plan(work))
        at = layers[-1].end
    return BanksPlan(layers=layers, work=work, num_entries=sum(layer.num_entries for layer in layers))


def _number_of_experts(checkpoint: Checkpoint) -> int | None:
    text = checkpoint.config.get("text_config")
    model = text if isinstance(text, dict) else checkpoint.config
    return next((model[key] for key in _NUMBERS_OF_EXPERTS if type(model.get(key)) is int and model[key] > 0), None)


def _collect(checkpoint: Checkpoint, layout: BankLayout) -> dict[int, _Given]:
    """Sort the expert tensors by layer, bank, part and expert."""
    match, ignored = re.compile(layout.pattern).fullmatch, re.compile(layout.ignore).fullmatch
    groups = re.compile(layout.pattern).groupindex
    per_expert = "expert" in groups
    wanted = [name for name in ("layer", "projection", "kind", "expert") if name in groups]
    found: dict[int, _Given] = {}
    slots: dict[tuple[str, ...], dict[int | None, Entry]] = {}
    for name, entry in checkpoint.items():
        if EXPERTS not in name:
            continue
        matched = match(name)
        if matched is None:
            if ignored(name):
                continue
            raise CheckpointError(f"{entry.file}: the experts layout {layout.name!r} has no place for tensor {name!r}")
        words = matched.group(*wanted)
        part, expert = (words[:-1], words[-1]) if per_expert else (words, None)
        try:
            slot = slots.get(part)
            if slot is None:
                slot = slots[part] = _slot_of(part, layout, found, entry)
            key = None if expert is None else int(expert)
        except (TypeError, ValueError):
            raise CheckpointError(
                f"{entry.file}: tensor {name!r}: layer {part[0]!r} or expert {expert!r} is no number"
            ) from None
        if key in slot:
            raise CheckpointError(f"{entry.file}: tensor {name!r} takes the place that {slot[key].name!r} has already")
        slot[key] = entry
    if not found:
        raise CheckpointError(f"{checkpoint.path} has no tensor that the experts layout {layout.name!r} knows")
    return found


def _slot_of(
    part: tuple[str, ...], layout: BankLayout, found: dict[int, _Given], entry: Entry
) -> dict[int | None, Entry]:
    """Where the entries of a part are kept; ValueError or TypeError where the layer is no number."""
    place = layout.place_of(part[1], part[2] if len(part) > 2 else None)
    if place is None:
        raise CheckpointError(f"{entry.file}: tensor {entry.name!r} has an unknown projection or kind")
    layer = int(part[0])
    if layer not in found:
        found[layer] = _Given({bank: [{} for _ in row.parts] for bank, row in layout.banks.items()})
    return found[layer].parts[place[0]][place[1]]


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
        self, layout: BankLayout, layer: int, given: _Given, number: int | None, shard: ExpertShard, at: int
    ) -> None:
        self.layout = layout
        self.layer = layer
        self.given = given
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
        slots = [slot for parts in self.given.parts.values() for slot in parts]
        fused = [slot[None].shape[0] for slot in slots if None in slot and slot[None].shape]
        seen = max([*fused, *(key + 1 for slot in slots for key in slot if key is not None)], default=0)
        if not seen:
            entry = next(entry for slot in slots for entry in slot.values())
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} holds no experts")
        if number is not None and seen > number:
            raise CheckpointError(f"layer {self.layer} has an expert {seen - 1}, and config.json says {number} experts")
        return seen if number is None else number

    def _entries(self, name: str, index: int) -> list[tuple[Entry, int]]:
        """Each kept expert's entry of a part, with the expert's number within the entry."""
        slot = self.given.parts[name][index]
        part = self.layout.banks[name].parts[index]
        if None in slot:
            if len(slot) > 1:
                other = next(entry for key, entry in slot.items() if key is not None)
                raise CheckpointError(f"{other.file}: tensor {other.name!r} repeats a part of {slot[None].name!r}")
            if not slot[None].shape or slot[None].shape[0] != self.number:
                raise CheckpointError(
                    f"{slot[None].file}: tensor {slot[None].name!r} of shape {list(slot[None].shape)} does not hold "
                    f"{self.number} experts"
                )
            self.num_entries += 1
            return [(slot[None], expert) for expert in self.experts]
        if len(slot) != self.number:
            missing = next(expert for expert in range(self.number) if expert not in slot)
            raise CheckpointError(f"layer {self.layer}: {part!r} of expert {missing} is missing (bank {name})")
        self.num_entries += len(self.experts)
        return [(slot[expert], 0) for expert in self.experts]

    def _fill(self, name: str, bank: Bank, work: Work) -> PlannedBank:
        parts = [self._entries(name, index) for index in range(len(bank.parts))]
        cuts = [self._cut(name, bank, entries[0][0]) for entries in parts]
        first = cuts[0]
        self._entries_seen[name] = parts[0][0][0]
        for cut, entries in zip(cuts, parts, strict=True):
            if cut.shape != first.shape or cut.dtype != first.dtype:
                raise self._unlike(entries[0][0], parts[0][0][0])
        if not DTYPES[first.dtype].torch_name:
            entry = parts[0][0][0]
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which torch does not have")
        rows = self.rows[name] = sum(cut.rows for cut in cuts)
        line = int(np.prod(first.tail, dtype=np.int64)) * item_bytes(first.dtype)
        planned = self._place(name, first.dtype, (len(self.experts), rows, *first.tail))
        offset = planned.offset
        for cut, entries in zip(cuts, parts, strict=True):
            self._move(cut, entries, offset, rows * line, bank.interleaved, work)
            offset += cut.rows * line
        return planned

    def _move(
        self, cut: _Cut, entries: list[tuple[Entry, int]], target: int, step: int, interleaved: bool, work: Work
    ) -> None:
        """List what brings the cut of each entry to ``target``, the next one ``step`` bytes further: up to 100,000."""
        num_bytes = int(np.prod(cut.shape, dtype=np.int64)) * item_bytes(cut.dtype)
        runs = cut.runs if num_bytes else ()
        whole = [(run.source, run.num_bytes, run.target) for run in runs if run.num_runs == 1 and not interleaved]
        others = [run for run in runs if run.num_runs > 1 or interleaved]
        reads, rows = work.reads, work.dealt if interleaved else work.strided
        wanted = entries[0][0].shape
        for entry, inside in entries:
            _, dtype, shape, file, offset, _ = entry
            if shape != wanted or dtype != cut.dtype:
                raise self._unlike(entry, entries[0][0])
            source = offset + inside * num_bytes
            for start, size, at in whole:
                reads.append((file, source + start, size, 0, target + at))
            for run in others:
                rows.append((file, run._replace(source=source + run.source), 0, target))
            target += step

    def _cut(self, name: str, bank: Bank, entry: Entry) -> _Cut:
        """What this rank keeps of one expert's part."""
        fused = None in self.given.parts[name][0]
        shape = entry.storage_shape[1:] if fused else entry.storage_shape
        if not shape:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} of shape {list(entry.shape)} is no part of a bank"
            )
        halves = 2 if bank.halves or bank.interleaved else 1
        if shape[0] % halves:
            raise PlacementError(f"tensor {entry.name!r}: {shape[0]} rows do not hold gate and up of one size")
        rows, tail = shape[0] // halves, shape[1:]
        line = int(np.prod(tail, dtype=np.int64)) * item_bytes(entry.dtype)
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

    def _spread(self, name: str, bank: Bank, work: Work) -> tuple[PlannedBank, _Scalars]:
        parts = len(bank.parts)
        if self.rows[bank.spread] % parts:
            raise PlacementError(
                f"layer {self.layer}: {parts} scalars (bank {name}) cannot be spread over the {self.rows[bank.spread]} "
                f"rows of bank {bank.spread}"
            )
        planned = self._place(name, "F16", (len(self.experts), self.rows[bank.spread]))
        offset, self.at = self.at, self.at + _aligned(4 * parts * len(self.experts))
        for index in range(parts):
            for row, (entry, inside) in enumerate(self._entries(name, index)):
                if entry.dtype != "F32" or entry.num_bytes != 4:
                    raise CheckpointError(
                        f"{entry.file}: tensor {entry.name!r} of dtype {entry.dtype} and shape {list(entry.shape)} is "
                        "no single float32 scale"
                    )
                target = offset + 4 * (index * len(self.experts) + row)
                work.reads.append((entry.file, entry.offset + 4 * inside, 4, 0, target))
        return planned, _Scalars(planned, offset, parts, bank.reciprocal)

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


class _Filling:
    """The memory of the banks while it is filled: counts what each layer still waits for."""

    def __init__(self, plan: BanksPlan) -> None:
        self._plan = plan
        for layer in plan.layers:
            for bank in layer.banks:
                torch_dtype(bank.dtype)
        self._arena = Arena(plan.layers[-1].end)
        self.banks: dict[int, dict[str, torch.Tensor]] = {
            layer.number: {bank.name: self._arena.tensor(bank.offset, bank.dtype, bank.shape) for bank in layer.banks}
            for layer in plan.layers
        }
        buffer = self._arena.buffer
        dealt: list[Piece] = []
        for file, run, _, target in plan.work.dealt:
            first = run._replace(target=target + run.target)
            dealt += plan_dealt(file, first, [first.target + run.num_runs * run.target_stride], buffer)
        self.pieces = plan_runs(plan.work.reads, plan.work.strided, [buffer], others=dealt)
        self._ends = [layer.end for layer in plan.layers]
        self._fills = {id(piece): self._layers_of(piece) for piece in self.pieces}
        self._waiting = self._bytes_of_layers()
        self._complete: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for index, num_bytes in enumerate(self._waiting):
            if not num_bytes:
                self._complete.put(index)

    def _bytes_of_layers(self) -> list[int]:
        waiting = [0] * len(self._plan.layers)
        for fills in self._fills.values():
            for index, num_bytes in fills:
                waiting[index] += num_bytes
        return waiting

    def _layers_of(self, piece: Piece) -> list[tuple[int, int]]:
        """The layers that a piece fills a part of, with the number of bytes."""
        if piece.run is not None:
            return [(bisect.bisect_right(self._ends, piece.run.target), piece.num_bytes)]
        fills: dict[int, int] = {}
        for buffer, start, stop in piece.vectors:
            if buffer is GAP:
                continue
            index = bisect.bisect_right(self._ends, start)
            while stop > self._ends[index]:  # two layers that follow each other in the file as in memory
                if self._ends[index] > start:  # a layer without a byte has its end where it begins
                    fills[index] = fills.get(index, 0) + self._ends[index] - start
                    start = self._ends[index]
                index += 1
            fills[index] = fills.get(index, 0) + stop - start
        return list(fills.items())

    def run(
        self,
        checkpoint: Checkpoint,
        threads: Callable[[], int],
        on_layer: OnLayer | None,
        progress: Callable[[int, int], None] | None,
        cache: CacheUse,
    ) -> int:
        """Read everything, handing layers out meanwhile; returns the bytes that came out of the files."""
        total = sum(piece.num_bytes for piece in self.pieces)
        stop = False

        def note(piece: Piece) -> None:
            if stop:
                raise _StoppedError
            for index, num_bytes in self._fills[id(piece)]:
                self._waiting[index] -= num_bytes
                if not self._waiting[index]:
                    self._complete.put(index)

        def read() -> int:
            return read_pieces(
                self.pieces,
                checkpoint.files,
                threads,
                (lambda done: progress(done, total)) if progress else None,
                lambda file, offset: tensor_at(checkpoint, file, offset),
                note,
                cache,
            ).bytes_read

        with ThreadPoolExecutor(1, thread_name_prefix="loadmaster-banks") as reading:
            try:
                future = reading.submit(read)
                future.add_done_callback(lambda _: self._complete.put(None))
                self._hand_out(future, on_layer)
            except BaseException:  # also Ctrl-C while the thread is being started
                stop = True
                raise
        return future.result()

    def _hand_out(self, future: Future[int], on_layer: OnLayer | None) -> None:
        for _ in self._plan.layers:
            index = self._complete.get()
            if index is None:
                future.result()  # raises what ended the reading
                raise AssertionError("the reading ended before all layers were complete")
            layer = self._plan.layers[index]
            self._spread(layer)
            if on_layer is not None:
                on_layer(layer.number, self.banks[layer.number])

    def _spread(self, layer: PlannedLayer) -> None:
        """Spread scalars over their rows. With numpy: torch would start a team for it."""
        for scalars in layer.scalars:
            experts, rows = scalars.bank.shape
            values = np.frombuffer(self._arena.buffer, np.float32, scalars.parts * experts, scalars.offset)
            target = np.frombuffer(self._arena.buffer, np.float16, experts * rows, scalars.bank.offset)
            with np.errstate(over="ignore", divide="ignore"):
                factors = 1 / values if scalars.reciprocal else values
                halves = factors.reshape(scalars.parts, experts).T.astype(np.float16)
            target.reshape(experts, scalars.parts, -1)[:] = halves[:, :, None]


class _StoppedError(Exception):
    """A hook has failed, and the reading is not needed any more."""
