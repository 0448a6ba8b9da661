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
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from loadmaster.checkpoint.bank_layout import BankLayout
from loadmaster.checkpoint.dtypes import torch_dtype
from loadmaster.checkpoint.expert_plan import BanksPlan, ExpertShard, PlannedLayer, plan_banks
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.load import tensor_at
from loadmaster.checkpoint.memory import Arena
from loadmaster.checkpoint.pieces import Piece, Vectors, plan_dealt, plan_runs
from loadmaster.checkpoint.reader import KEEP_CACHE, CacheUse, read_pieces
from loadmaster.observe.memory import peak_rss
from loadmaster.observe.report import PhaseClock, RankReport, Report
from loadmaster.share.lease import Lease, lease

if TYPE_CHECKING:
    import torch

__all__ = ["load_experts", "load_experts_of_rank"]

OnLayer = Callable[[int, Mapping[str, "torch.Tensor"]], None]
"""Called with the number of a layer and its complete banks."""


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
        plan = plan_banks(checkpoint, layout, shard or ExpertShard())
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
        self.pieces = plan_runs(plan.work.reads(), plan.work.strided, [buffer], others=dealt)
        self._ends = [layer.end for layer in plan.layers]
        self._fills = self._layers_of_pieces()
        self._waiting = [0] * len(plan.layers)
        for fills in self._fills.values():
            for index, num_bytes in fills:
                self._waiting[index] += num_bytes
        self._complete: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for index, num_bytes in enumerate(self._waiting):
            if not num_bytes:
                self._complete.put(index)

    def _layers_of_pieces(self) -> dict[int, list[tuple[int, int]]]:
        """The layers that each piece, by its id, fills a part of, with the number of bytes."""
        fills: dict[int, list[tuple[int, int]]] = {}
        plain: list[tuple[int, Vectors]] = []
        for piece in self.pieces:
            if piece.vectors is not None:
                plain.append((id(piece), piece.vectors))
                fills[id(piece)] = []
            elif piece.run is not None:
                fills[id(piece)] = [(bisect.bisect_right(self._ends, piece.run.target), piece.num_bytes)]
        if not plain:
            return fills
        buffer, start, stop = (
            np.concatenate(column) for column in list(zip(*(row[1] for row in plain), strict=True))[1:]
        )
        number = np.repeat(np.arange(len(plain)), [len(vectors.start) for _, vectors in plain])[buffer >= 0]
        layer = np.searchsorted(self._ends, start[buffer >= 0], side="right")  # gaps have the number -1
        num_layers = len(self._ends)
        num_bytes = np.bincount(number * num_layers + layer, (stop - start)[buffer >= 0])
        for key in np.flatnonzero(num_bytes).tolist():
            fills[plain[key // num_layers][0]].append((key % num_layers, int(num_bytes[key])))
        return fills

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
