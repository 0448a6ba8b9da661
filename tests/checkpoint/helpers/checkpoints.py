"""Checkpoints of a few matrices, and placements of their columns."""

from __future__ import annotations

from pathlib import Path

from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.placement import Move, Placement

from .files import random_tensor, write_shards


def checkpoint_of(*shapes: tuple[int, ...], folder: Path, files: int = 1) -> Checkpoint:
    """BF16 tensors ``t00000`` and following of these shapes, dealt to the files in turn."""
    tensors = {f"t{number:05}": random_tensor(shape, seed=number) for number, shape in enumerate(shapes)}
    parts = [dict(list(tensors.items())[number::files]) for number in range(files)]
    return open_checkpoint(
        write_shards(folder, {f"part{number}.safetensors": part for number, part in enumerate(parts)}, index=False)
    )


def columns(checkpoint: Checkpoint, name: str, start: int, stop: int, dtype: str | None = None) -> Placement:
    """Columns ``start`` to ``stop`` of a matrix, as a row-parallel rank keeps them."""
    entry = checkpoint[name]
    shape = (entry.shape[0], stop - start)
    return Placement(entry, name, dtype or entry.dtype, shape, (Move(1, start, stop, 0),))
