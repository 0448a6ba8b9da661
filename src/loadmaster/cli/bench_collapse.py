"""``loadmaster bench collapse``: the writes of a load, made by several ranks at once, and what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.bench_options import (
    PlotOption,
    RepeatOption,
    SecondsOption,
    check_plot,
    figures,
    show,
    steps,
)
from loadmaster.cli.options import JsonOption, QuietOption

if TYPE_CHECKING:
    from rich.console import Console

    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = ["CopyBytesOption", "bench_collapse"]

CopyBytesOption = Annotated[int, typer.Option("--copy-bytes", min=1, help="Size of each copy.")]


def bench_collapse(
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks that write at once.")] = 4,
    copy_bytes: CopyBytesOption = 400_000,
    threads_per_rank: Annotated[
        int | None,
        typer.Option("--threads-per-rank", min=1, help="The team of 'as shipped', to show a host with as many CPUs."),
    ] = None,
    repeat: RepeatOption = 3,
    seconds: SecondsOption = 180,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure ranks that write with torch's copy_ at once: as shipped, other teams, the scope, and our reader."""
    from loadmaster.bench.collapse import bench_collapse as measure
    from loadmaster.bench.collapse import panels

    check_plot(plot)
    record = measure(
        ranks,
        copy_bytes=copy_bytes,
        threads_per_rank=threads_per_rank,
        repeat=repeat,
        seconds=seconds,
        on_step=steps(quiet or as_json),
    )
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=_print_record)


def _print_record(record: BenchRecord) -> None:
    from loadmaster.bench.collapse import SIZES, size_arm
    from loadmaster.bench.copies import AS_SHIPPED, SCOPE
    from loadmaster.cli.tables import print_table, report_console

    console, settings = report_console(), record.settings
    by_name = {arm.name: arm for arm in record.arms}
    of_sizes = {size_arm(size, name) for size in SIZES for name in (AS_SHIPPED, SCOPE)}
    shipped = by_name[AS_SHIPPED]
    rows = [[arm.name, *figures(arm), *_rates(arm, shipped)] for arm in record.arms if arm.name not in of_sizes]
    print_table(console, ("arm", "rank\nwall s", "min", "max", "GiB/s", "us a\ncall", "x as\nshipped"), rows)
    _explain(console, record)
    costs = [
        [words, *(figures(by_name[size_arm(size, name)], 1e6, 1)[0] for name in (AS_SHIPPED, SCOPE))]
        for size, words in SIZES.items()
    ]
    print_table(console, ("one copy, us", AS_SHIPPED, SCOPE), costs)
    _tell(console, record)
    if settings["threads_per_rank"] is not None:
        _tell_of_the_team(console, settings["threads_per_rank"])


def _rates(arm: ArmResult, shipped: ArmResult) -> list[str]:
    if not arm.finished:
        return [""] * 3
    ratio = f"{shipped.median / arm.median:.1f}" if shipped.finished else ""
    return [f"{arm.gib_per_second:.2f}", f"{1e6 * arm.median / arm.tensors:.1f}", ratio]


def _explain(console: Console, record: BenchRecord) -> None:
    settings = record.settings
    ranks, copies, size = settings["ranks"], settings["copies"], settings["copy_bytes"]
    slowest, each = (f"the slowest of {ranks} ranks", "each rank") if ranks > 1 else ("the rank", "the rank")
    console.print(
        f"rank wall: {copies} writes of {size} bytes in {slowest}; GiB/s: all ranks together; loadmaster: "
        f"{each} reads the same bytes from a file into new memory",
        soft_wrap=True,
    )
    cut = [f"{name} {done}" for name, done in settings["copies_done"].items() if done is not None and done < copies]
    if cut:
        console.print(f"reckoned from fewer writes, where these took too long: {', '.join(cut)}", soft_wrap=True)


def _tell(console: Console, record: BenchRecord) -> None:
    from loadmaster.bench.collapse import SIZES, cost_without_copying, size_arm
    from loadmaster.bench.copies import AS_SHIPPED

    sizes = cost_without_copying(record)
    if sizes is None:
        return
    medians = {arm.name: arm.median for arm in record.arms if arm.finished}
    costs = [f"{SIZES[size]} cost {1e6 * medians[size_arm(size, AS_SHIPPED)]:.0f} us" for size in sizes]
    console.print(
        f"as shipped, {' and '.join(costs)}: a cost that does not depend on the size is no copy, it is threads that "
        "wait for each other",
        soft_wrap=True,
    )


def _tell_of_the_team(console: Console, threads: int) -> None:
    from loadmaster.host import host

    cpus = len(host().cpus)
    if threads > cpus:
        console.print(
            f"a team of {threads} has more threads than the {cpus} CPUs here, where libgomp spins less: a host with "
            f"{threads} CPUs can be worse than this",
            soft_wrap=True,
        )
