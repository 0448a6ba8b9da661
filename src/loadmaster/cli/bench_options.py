"""What the benches share: options, the cells of an arm, the steps on standard error, and how a result is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.options import print_json

if TYPE_CHECKING:
    from loadmaster.bench.plot import Panel
    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = [
    "ArmsOption",
    "PlotOption",
    "RepeatOption",
    "SecondsOption",
    "check_plot",
    "figures",
    "names_of",
    "show",
    "steps",
]

ArmsOption = Annotated[str | None, typer.Option("--arms", help="Names of arms, separated by commas; default all.")]
RepeatOption = Annotated[int, typer.Option("--repeat", min=1, help="Repetitions of each arm, interleaved.")]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=1, help="Be done in so many: fewer repetitions, and what overruns is stopped.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result: a .png or .svg file.")
]


def names_of(arms: str | None) -> list[str] | None:
    """The names in ``--arms``."""
    return None if arms is None else [name.strip() for name in arms.split(",")]


def steps(silent: bool) -> Callable[[str], None] | None:
    """What tells of every step on standard error."""
    return None if silent else lambda step: print(f"measuring {step}", file=sys.stderr)


def check_plot(path: Path | None) -> None:
    """Find out whether the picture can be made, before anything is measured."""
    if path is not None:
        from loadmaster.bench.plot import check_plot as check

        check(path)


def show(
    record: BenchRecord,
    *,
    as_json: bool,
    plot: Path | None,
    panels: Callable[[BenchRecord], Sequence[Panel]],
    print_record: Callable[[BenchRecord], None],
) -> None:
    """Print the result and how noisy it was, or its JSON; draw it where a file was given."""
    if plot is not None:
        from loadmaster.bench.plot import draw

        draw(record, panels(record), plot)
    if as_json:
        print_json(record.as_dict())
        return
    from loadmaster.bench.record import noise
    from loadmaster.cli.tables import report_console

    print_record(record)
    report_console().print(noise(record.arms), soft_wrap=True)


def figures(arm: ArmResult, factor: float = 1.0, digits: int = 3) -> list[str]:
    """Median, least and most of an arm, or that it was stopped."""
    if arm.finished:
        return [f"{factor * value:.{digits}f}" for value in (arm.median, min(arm.seconds), max(arm.seconds))]
    if not arm.stopped_after:
        return ["not run", "", ""]
    return [f">{factor * arm.stopped_after:.{min(digits, 1)}f}", "", "stopped"]
