"""``loadmaster bench lease``: what leases cost here, and what it is worth that shares follow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.options import JsonOption, PathArgument, QuietOption, print_json

if TYPE_CHECKING:
    from loadmaster.bench.record import BenchRecord

__all__ = ["bench_lease"]


def bench_lease(
    path: PathArgument,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions of each arm, interleaved.")] = 5,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure joining, looking and leaving, and loads of CKPT by uneven ranks and by commands that are strangers."""
    from loadmaster.bench.lease import bench_lease as measure

    record = measure(
        path,
        repeat=repeat,
        on_step=None if quiet or as_json else lambda step: print(f"measuring {step}", file=sys.stderr),
    )
    if as_json:
        print_json(record.as_dict())
    else:
        _print_record(record)


def _print_record(record: BenchRecord) -> None:
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    rows = [
        [arm.name, *(f"{1e3 * seconds:.4f}" for seconds in (arm.median, min(arm.seconds), max(arm.seconds)))]
        for arm in record.arms
    ]
    print_table(console, ("arm", "median ms", "min", "max"), rows)
    fixed, following, one, many = record.arms[-4:]
    console.print(f"following a changed share: {fixed.median / following.median:.2f} times as fast as 1 thread each")
    console.print(f"{many.name}: {many.median / one.median:.2f} of the time of {one.name}")
