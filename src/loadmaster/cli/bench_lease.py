"""``loadmaster bench lease``: what leases cost here, and what it is worth that shares follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadmaster.cli.bench_options import PlotOption, RepeatOption, SecondsOption, check_plot, figures, show, steps
from loadmaster.cli.options import JsonOption, PathArgument, QuietOption

if TYPE_CHECKING:
    from loadmaster.bench.record import BenchRecord

__all__ = ["bench_lease"]


def bench_lease(
    path: PathArgument,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 240,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure joining, looking and leaving, and loads of CKPT by uneven ranks and by commands that are strangers."""
    from loadmaster.bench.lease import bench_lease as measure
    from loadmaster.bench.lease import panels

    check_plot(plot)
    record = measure(path, repeat=repeat, seconds=seconds, on_step=steps(quiet or as_json))
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=_print_record)


def _print_record(record: BenchRecord) -> None:
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    print_table(console, ("arm", "median ms", "min", "max"), [[arm.name, *figures(arm, 1e3, 4)] for arm in record.arms])
    fixed, following, one, many = record.arms[-4:]
    if fixed.finished and following.finished:
        console.print(
            f"following a changed share: {fixed.median / following.median:.2f} times as fast as 1 thread each"
        )
    if one.finished and many.finished:
        console.print(f"{many.name}: {many.median / one.median:.2f} of the time of {one.name}")
