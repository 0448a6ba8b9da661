"""``loadmaster bench experts``: how fast the banks of a mixture of experts are filled here, and by what."""

from __future__ import annotations

from typing import Annotated

import typer

from loadmaster.cli.bench_load import VerifyOption, print_record
from loadmaster.cli.bench_options import (
    ArmsOption,
    PlotOption,
    RepeatOption,
    SecondsOption,
    check_plot,
    names_of,
    show,
    steps,
)
from loadmaster.cli.options import ExpertsKind, JsonOption, PathArgument, QuietOption, RanksOption

__all__ = ["bench_experts"]


def bench_experts(
    path: PathArgument,
    ranks: RanksOption = 1,
    experts_by: Annotated[
        ExpertsKind,
        typer.Option("--experts-by", help="tp: every rank its part of each; blocks, strided: every rank whole ones."),
    ] = ExpertsKind.tp,
    arms: ArmsOption = None,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 300,
    verify: VerifyOption = False,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the arms that fill the banks of CKPT, interleaved, each in fresh processes, beside the limit."""
    from loadmaster.bench.experts import bench_experts as measure
    from loadmaster.bench.load import panels
    from loadmaster.launch.load import LoadSettings

    check_plot(plot)
    record = measure(
        path,
        LoadSettings(ranks=ranks, experts=True, experts_by=experts_by.value, verify=verify),
        arms=names_of(arms),
        repeat=repeat,
        seconds=seconds,
        on_step=steps(quiet or as_json),
    )
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=print_record)
