"""Loads a checkpoint into a module, a mapping of tensors, or new memory: entries -> placements -> reader -> report."""

from __future__ import annotations

import bisect
import itertools
import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from loadmaster.checkpoint.dtypes import DTYPES, import_torch, name_of_torch_dtype
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.pieces import plan_pieces
from loadmaster.checkpoint.placement import Move, Placement, check_placements, place_whole
from loadmaster.checkpoint.reader import KEEP_CACHE, CacheUse, read_pieces
from loadmaster.checkpoint.sharding import Shard, place_shard
from loadmaster.checkpoint.table import Entry
from loadmaster.checkpoint.target import Target, new_memory, target_of
from loadmaster.errors import InputError, PlacementError
from loadmaster.observe.memory import peak_rss
from loadmaster.observe.report import PhaseClock, RankReport, Report
from loadmaster.share.lease import Lease, lease

if TYPE_CHECKING:
    import torch

__all__ = ["iter_tensors", "load", "load_rank", "place", "read_slice", "tensor_at"]

Progress = Callable[[int, int], None]
"""Called about ten times a second with the bytes placed and the bytes of the whole."""

Placements = Sequence[Placement] | Callable[[Checkpoint], Sequence[Placement]]

BATCH_BYTES = 128 << 20
"""Bytes that `iter_tensors` reads ahead while its caller uses the batch before."""


def load(
    target: torch.nn.Module | MutableMapping[str, torch.Tensor],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    shard: Shard | None = None,
    placement: Placements | None = None,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    cold: bool = False,
    drop_cache: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Load the checkpoint at ``path`` into ``target`` and return when every byte is in its place.

    Parameters
    ----------
    target : torch.nn.Module or mutable mapping of str to torch.Tensor
        A module: its parameters and buffers are filled in place, converted to their dtypes; on the meta device they
        are replaced by new tensors. A mapping that holds tensors: they are filled in place. An empty mapping: it
        receives new tensors, all in one huge-page-advised mapping of memory.
    path : path or Checkpoint
        As for `open_checkpoint`.
    shard : Shard, optional
        The tensor-parallel part to load; default the whole.
    placement : sequence of Placement, or callable from the Checkpoint to one, optional
        Explicit placements instead of ``shard``.
    dtype : torch.dtype, optional
        What plain floating-point tensors of new memory become; scaled 8-bit and integer types stay as they are.
    threads : int, optional
        Reading threads, at most the usable CPUs; default this process's share of the host.
    cold : bool
        Read past the page cache (O_DIRECT), where the file system lets that be done.
    drop_cache : bool
        Give the page cache of the files back as they are read.
    progress : callable, optional
        Called with (bytes placed, bytes in all) while reading.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be opened or read.
    PlacementError
        A tensor does not divide among the ranks, or does not fit the target; a name that only one side has.
    """
    cache = CacheUse(cold, drop_cache)
    with lease(threads=threads) as held:
        return load_rank(target, path, shard or placement, dtype=dtype, held=held, progress=progress, cache=cache)


def load_rank(
    target: torch.nn.Module | MutableMapping[str, torch.Tensor],
    path: str | os.PathLike[str] | Checkpoint,
    where: Shard | Placements | None,
    *,
    dtype: torch.dtype | None,
    held: Lease,
    progress: Progress | None,
    cache: CacheUse = KEEP_CACHE,
) -> Report:
    """Load one rank under a lease that is held; otherwise as `load`."""
    started = time.perf_counter()
    part = held.look()
    clock = PhaseClock()
    with clock.phase("open"):
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    with clock.phase("plan"), paused_garbage_collection():
        aim = target_of(target, place(checkpoint, where, dtype))
    bytes_read = _fill(aim, checkpoint, held, clock, progress, cache)
    aim.hand_out()
    wall = time.perf_counter() - started
    clock.seconds["convert"] += wall - sum(clock.seconds.values())
    rank = RankReport(
        rank=where.rank if isinstance(where, Shard) else 0,
        tensors=len(aim.placements),
        bytes_read=bytes_read,
        bytes_placed=aim.num_bytes,
        seconds=clock.seconds,
        threads=part.threads,
        why=part.why,
        peak_rss=peak_rss(),
    )
    return Report(checkpoint=checkpoint.path, ranks=(rank,), load_seconds=wall, wall_seconds=wall)


def place(checkpoint: Checkpoint, where: Shard | Placements | None, dtype: torch.dtype | None) -> Sequence[Placement]:
    """Return the placements of a load: a shard's, explicit ones, or every entry whole."""
    name = None if dtype is None else name_of_torch_dtype(dtype)
    if name is not None and not DTYPES[name].floating:
        raise InputError(f"dtype {dtype} is not a plain floating-point dtype that tensors can be converted to")
    if isinstance(where, Shard):
        return place_shard(checkpoint, where, name)
    if where is None:
        return place_whole(checkpoint.values(), name)
    placements = where(checkpoint) if callable(where) else where
    check_placements(placements)
    for placement in placements:
        if placement.entry.file not in checkpoint.files:
            raise PlacementError(
                f"tensor {placement.name!r} is placed from {placement.entry.file}, no file of {checkpoint.path}"
            )
    return placements


def _fill(
    aim: Target,
    checkpoint: Checkpoint,
    held: Lease,
    clock: PhaseClock,
    progress: Progress | None,
    cache: CacheUse,
) -> int:
    """Read everything to its place; returns the bytes that came out of the files."""
    with clock.phase("plan"), paused_garbage_collection():
        pieces = plan_pieces(aim.placements, aim.destinations)
        total = sum(piece.num_bytes for piece in pieces)
    with clock.phase("read"):
        result = read_pieces(
            pieces,
            checkpoint.files,
            lambda: held.look().threads,
            (lambda done: progress(done, total)) if progress else None,
            lambda file, offset: tensor_at(checkpoint, file, offset),
            cache=cache,
        )
    busy = result.read_seconds + result.convert_seconds
    clock.split("read", "convert", result.convert_seconds / busy if busy else 0.0)
    return result.bytes_read


def tensor_at(checkpoint: Checkpoint, file: str, offset: int) -> str:
    """Name the tensor that holds byte ``offset`` of ``file``: the last one that begins at or before it."""
    entries = [entry for entry in checkpoint.values() if entry.file == file]
    index = bisect.bisect_right([entry.offset for entry in entries], offset) - 1
    return entries[index].name if index >= 0 else ""


def iter_tensors(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    shard: Shard | None = None,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` in file order: a drop-in for the weights iterators that engines pass around.

    The next batch is read while the caller uses this one; a tensor stays valid as long as it is held, and closing the
    iterator stops the reading. Parameters and errors as for `load`.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    batches = _batches(place(checkpoint, shard, dtype))
    held = lease(threads=threads)

    def read(batch: list[Placement]) -> dict[str, torch.Tensor]:
        return _read_new(checkpoint, batch, lambda: held.look().threads)

    with held, ThreadPoolExecutor(1, thread_name_prefix="loadmaster-ahead") as ahead:
        reading = ahead.submit(read, next(batches, []))
        for batch in itertools.chain(batches, [None]):
            tensors = reading.result()
            if batch is not None:
                reading = ahead.submit(read, batch)
            yield from tensors.items()


def _batches(placements: Sequence[Placement]) -> Iterator[list[Placement]]:
    batch: list[Placement] = []
    size = 0
    for placement in placements:
        if batch and size + placement.num_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(placement)
        size += placement.num_bytes
    if batch:
        yield batch


def _read_new(
    checkpoint: Checkpoint, placements: Sequence[Placement], threads: int | Callable[[], int]
) -> dict[str, torch.Tensor]:
    tensors, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations)
    read_pieces(pieces, checkpoint.files, threads, None, lambda file, offset: tensor_at(checkpoint, file, offset))
    return tensors


def read_slice(checkpoint: Checkpoint, entry: Entry, slices: Sequence[slice | int]) -> torch.Tensor:
    """Read ``tensor[slices]`` of one entry into new memory; see `Checkpoint.read_slice`."""
    torch = import_torch()
    shape = entry.storage_shape
    if len(slices) > len(shape):
        raise InputError(f"tensor {entry.name!r} has {len(shape)} dimensions, and {len(slices)} slices were given")
    ranges = [_range(entry, index, size) for index, size in zip(slices, shape, strict=False)]
    narrowed = next((dim for dim, (begin, end) in enumerate(ranges) if end - begin < shape[dim]), None)
    moves: tuple[Move, ...] = ()
    rest: list[slice | int] = list(slices)
    if narrowed is not None:
        begin, end = ranges[narrowed]
        moves = (Move(narrowed, begin, end, 0),)
        shape = (*shape[:narrowed], end - begin, *shape[narrowed + 1 :])
        rest[narrowed] = 0 if not isinstance(slices[narrowed], slice) else slice(None)
    placement = Placement(entry, entry.name, entry.dtype, shape, moves)
    tensor = _read_new(checkpoint, [placement], 1)[entry.name]
    part = tensor[tuple(rest)]
    return part if part.numel() == tensor.numel() else part.clone(memory_format=torch.contiguous_format)


def _range(entry: Entry, index: slice | int, size: int) -> tuple[int, int]:
    if isinstance(index, slice):
        begin, end, step = index.indices(size)
        if step != 1:
            raise InputError(f"tensor {entry.name!r}: a slice with the step {step} is not supported, only 1")
        return begin, max(begin, end)
    if not -size <= index < size:
        raise InputError(f"tensor {entry.name!r}: index {index} is outside a dimension of {size}")
    return index % size, index % size + 1
