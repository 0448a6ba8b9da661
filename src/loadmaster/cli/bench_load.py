"""``loadmaster bench load``: how fast a checkpoint loads here, against the loop that users write and the limit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.options import (
    JsonOption,
    PathArgument,
    QuietOption,
    RanksOption,
    ShardKind,
    ShardOption,
    print_json,
)

if TYPE_CHECKING:
    from loadmaster.bench.record import BenchRecord

__all__ = ["bench_load"]


def bench_load(
    path: PathArgument,
    ranks: RanksOption = 1,
    shard: ShardOption = ShardKind.tp,
    arms: Annotated[str | None, typer.Option("--arms", help="Names of arms, separated by commas; default all.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions of each arm, interleaved.")] = 5,
    verify: Annotated[bool, typer.Option("--verify", help="Check the bytes of every arm.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the arms that load CKPT, interleaved, each in fresh processes, beside the limit of this host."""
    from loadmaster.bench.load import bench_load as measure
    from loadmaster.launch.load import LoadSettings

    record = measure(
        path,
        LoadSettings(ranks=ranks, sharded=shard is ShardKind.tp, verify=verify),
        arms=[name.strip() for name in arms.split(",")] if arms is not None else None,
        repeat=repeat,
        on_step=None if quiet or as_json else lambda step: print(f"measuring {step}", file=sys.stderr),
    )
    if as_json:
        print_json(record.as_dict())
    else:
        _print_record(record)


def _print_record(record: BenchRecord) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    limit = record.arms[0]
    slowest = max(record.arms, key=lambda arm: arm.median)
    table = Table(box=SIMPLE_HEAD)
    for heading in (
        "arm",
        "median s",
        "min",
        "max",
        "GiB/s",
        "of the limit",
        "us a tensor",
        "times as fast as the slowest",
    ):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=heading == "arm")
    for arm in record.arms:
        table.add_row(
            arm.name,
            f"{arm.median:.3f}",
            f"{min(arm.seconds):.3f}",
            f"{max(arm.seconds):.3f}",
            f"{arm.gib_per_second:.2f}",
            f"{limit.median / arm.median:.2f}",
            f"{1e6 * arm.median / arm.tensors:.1f}",
            f"{slowest.median / arm.median:.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    for arm in record.arms:
        console.print(f"{arm.name}: {arm.what}")
    if record.settings["verified"]:
        console.print("every byte of every arm was compared with the safetensors library")
