"""``loadmaster bench scope``: thread teams of several ranks against each other, and what the scope does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.bench_collapse import CopyBytesOption
from loadmaster.cli.bench_options import PlotOption, RepeatOption, SecondsOption, check_plot, figures, show, steps
from loadmaster.cli.options import JsonOption, QuietOption
from loadmaster.errors import InputError

if TYPE_CHECKING:
    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = ["bench_scope"]


def bench_scope(
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks, separated by commas.")] = "2,4,8",
    copy_bytes: CopyBytesOption = 400_000,
    copy_seconds: Annotated[
        float, typer.Option("--copy-seconds", min=0.01, help="Copying of each arm, each time.")
    ] = 0.5,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 240,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure copies of many ranks at once, a raise of one rank, and the cost of the scope itself."""
    from loadmaster.bench.scope import bench_scope as measure
    from loadmaster.bench.scope import panels

    numbers = _numbers(ranks)
    check_plot(plot)
    record = measure(
        numbers,
        copy_bytes=copy_bytes,
        copy_seconds=copy_seconds,
        repeat=repeat,
        seconds=seconds,
        on_step=steps(quiet or as_json),
    )
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=_print_record)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(number < 1 for number in numbers):
        raise InputError(f"--ranks must be whole numbers of at least 1, separated by commas, not {text!r}")
    return numbers


def _print_record(record: BenchRecord) -> None:
    from loadmaster.bench.copies import AS_SHIPPED, SCOPE
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    by_name = {arm.name: arm for arm in record.arms}
    rows = [[arm.name, *figures(arm, 1e6, 1), _times_as_fast(arm, by_name)] for arm in record.arms]
    print_table(console, ("arm", "median us", "min", "max", "x as\nshipped"), rows)
    for ranks in record.settings["ranks"]:
        arms = {name.partition(", ")[2]: arm for name, arm in by_name.items() if name.startswith(f"{ranks} ranks, ")}
        if not all(arm.finished for arm in arms.values()):
            continue
        shipped, scope = arms.pop(AS_SHIPPED), arms.pop(SCOPE)
        name, best = min(arms.items(), key=lambda row: row[1].median)
        console.print(
            f"{ranks} rank{'s' * (ranks > 1)}: the scope is {shipped.median / scope.median:.1f} times as fast as torch "
            f"as shipped, and takes {scope.median / best.median:.2f} of the time of the best fixed count, {name}",
            soft_wrap=True,
        )


def _times_as_fast(arm: ArmResult, by_name: dict[str, ArmResult]) -> str:
    from loadmaster.bench.copies import AS_SHIPPED

    group = arm.name.partition(", ")[0]
    base = by_name.get(f"{group}, {AS_SHIPPED}") or by_name.get(f"{group} at OMP_NUM_THREADS=1")
    known = base is not None and base.finished and arm.finished
    return "" if base is None or not known else f"{base.median / arm.median:.1f}"
