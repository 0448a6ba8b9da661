"""``loadmaster bench experts``: how fast the banks of a mixture of experts are filled here, and by what."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loadmaster.cli.bench_load import print_record
from loadmaster.cli.options import ExpertsKind, JsonOption, PathArgument, QuietOption, RanksOption, print_json

__all__ = ["bench_experts"]


def bench_experts(
    path: PathArgument,
    ranks: RanksOption = 1,
    experts_by: Annotated[
        ExpertsKind,
        typer.Option("--experts-by", help="tp: every rank its part of each; blocks, strided: every rank whole ones."),
    ] = ExpertsKind.tp,
    arms: Annotated[str | None, typer.Option("--arms", help="Names of arms, separated by commas; default all.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions of each arm, interleaved.")] = 5,
    verify: Annotated[bool, typer.Option("--verify", help="Check the bytes of every arm.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the arms that fill the banks of CKPT, interleaved, each in fresh processes, beside the limit."""
    from loadmaster.bench.experts import bench_experts as measure
    from loadmaster.launch.load import LoadSettings

    record = measure(
        path,
        LoadSettings(ranks=ranks, experts=True, experts_by=experts_by.value, verify=verify),
        arms=[name.strip() for name in arms.split(",")] if arms is not None else None,
        repeat=repeat,
        on_step=None if quiet or as_json else lambda step: print(f"measuring {step}", file=sys.stderr),
    )
    if as_json:
        print_json(record.as_dict())
    else:
        print_record(record)
