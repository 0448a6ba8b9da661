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

__all__ = ["bench_load", "print_record"]


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
        print_record(record)


def print_record(record: BenchRecord) -> None:
    """Print arms beside the limit, which comes first."""
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    limit = record.arms[0]
    slowest = max(record.arms[1:], key=lambda arm: arm.median)
    headings = ("arm", "median s", "min", "max", "GiB/s", "of the\nlimit", "us a\ntensor", "x the\nslowest")
    rows = [
        [
            arm.name,
            f"{arm.median:.3f}",
            f"{min(arm.seconds):.3f}",
            f"{max(arm.seconds):.3f}",
            f"{arm.gib_per_second:.2f}",
            f"{limit.median / arm.median:.2f}",
            f"{1e6 * arm.median / arm.tensors:.1f}",
            f"{slowest.median / arm.median:.1f}",
        ]
        for arm in record.arms
    ]
    print_table(console, headings, rows)
    for arm in record.arms:
        console.print(f"{arm.name}: {arm.what}")
    if record.settings["verified"]:
        console.print("every byte of every arm was compared with the safetensors library")
    ours = next((arm for arm in record.arms if arm.name == "loadmaster"), None)
    if ours is not None and slowest is not ours:
        console.print(
            f"loadmaster is {slowest.median / ours.median:.1f} times as fast as {slowest.name}: "
            f"{ours.median:.3f} s instead of {slowest.median:.3f} s"
        )
