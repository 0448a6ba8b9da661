"""``loadmaster bench make-checkpoint``: write a checkpoint to load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loadmaster.bench.families import FAMILIES

__all__ = ["make_checkpoint"]


def make_checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder, or one with this checkpoint.")],
    family: Annotated[str, typer.Option(help=f"One of {', '.join(FAMILIES)}.")] = "llama",
    size: Annotated[str | None, typer.Option(help="Size of all tensors: 2GiB, 500MB, bytes. [default: 2GiB]")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest data of one file.")] = "512MiB",
    seed: Annotated[int, typer.Option(help="Another seed gives other bytes.")] = 0,
    tensors: Annotated[int | None, typer.Option(help="Number of tensors, for small-tensors (4 KiB each).")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers: few wide ones, or many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a seeded safetensors checkpoint: real names and shapes of a family, the same bytes each time."""
    from loadmaster.bench.make_checkpoint import make_checkpoint as make
    from loadmaster.bench.make_checkpoint import parse_size

    size_bytes = parse_size(size) if size is not None else None
    shard_bytes = parse_size(shard_size)
    made = make(folder, family, size_bytes, shard_bytes=shard_bytes, seed=seed, tensors=tensors, layers=layers)
    if as_json:
        print(json.dumps({"ok": True, **asdict(made), "folder": str(made.folder)}))
        return
    rate = "found there already" if made.reused else f"{made.num_bytes / 2**30 / made.seconds:.2f} GiB/s"
    size_and_count = f"{made.num_bytes / 2**30:.2f} GiB, {made.num_tensors} tensors, {len(made.files)} files"
    print(f"{made.family} checkpoint in {made.folder}: {size_and_count}, {rate}")
    print(f"load it with: loadmaster load {made.folder} --ranks 2")
