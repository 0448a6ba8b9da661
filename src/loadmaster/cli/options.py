"""Options that several sub-commands share, written once."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "ExpertsKind",
    "JsonOption",
    "PathArgument",
    "QuietOption",
    "RanksOption",
    "ShardKind",
    "ShardOption",
    "ThreadsOption",
    "print_json",
]


class ShardKind(str, Enum):
    """What each rank loads."""

    tp = "tp"
    none = "none"


class ExpertsKind(str, Enum):
    """How experts are dealt to ranks."""

    tp = "tp"
    blocks = "blocks"
    strided = "strided"


PathArgument = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A .safetensors file, or a folder with an index or such files.")
]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks, one process each.")]
ShardOption = Annotated[
    ShardKind, typer.Option("--shard", help="tp: every rank its tensor-parallel part; none: every rank the whole.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of each rank; default its share of the host.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print nothing but the result and errors.")]


def print_json(document: dict[str, Any]) -> None:
    """Print a result on standard output for programs."""
    typer.echo(json.dumps(document, indent=2))
