"""``loadmaster bench load``: how fast a checkpoint loads here, against the loop that users write and the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.bench_options import (
    ArmsOption,
    PlotOption,
    RepeatOption,
    SecondsOption,
    check_plot,
    figures,
    names_of,
    show,
    steps,
)
from loadmaster.cli.options import JsonOption, PathArgument, QuietOption, RanksOption, ShardKind, ShardOption

if TYPE_CHECKING:
    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = ["VerifyOption", "bench_load", "print_record"]

VerifyOption = Annotated[bool, typer.Option("--verify", help="Check the bytes of every arm.")]


def bench_load(
    path: PathArgument,
    ranks: RanksOption = 1,
    shard: ShardOption = ShardKind.tp,
    arms: ArmsOption = None,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 300,
    verify: VerifyOption = False,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the arms that load CKPT, interleaved, each in fresh processes, beside the limit of this host."""
    from loadmaster.bench.load import bench_load as measure
    from loadmaster.bench.load import panels
    from loadmaster.launch.load import LoadSettings

    check_plot(plot)
    record = measure(
        path,
        LoadSettings(ranks=ranks, sharded=shard is ShardKind.tp, verify=verify),
        arms=names_of(arms),
        repeat=repeat,
        seconds=seconds,
        on_step=steps(quiet or as_json),
    )
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=print_record)


def print_record(record: BenchRecord) -> None:
    """Print arms beside the limit, which comes first."""
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    limit = record.arms[0]
    finished = [arm for arm in record.arms[1:] if arm.finished]
    slowest = max(finished, key=lambda arm: arm.median, default=None)
    headings = ("arm", "median s", "min", "max", "GiB/s", "of the\nlimit", "us a\ntensor", "x the\nslowest")
    print_table(console, headings, [[arm.name, *figures(arm), *_rates(arm, limit, slowest)] for arm in record.arms])
    for arm in record.arms:
        console.print(f"{arm.name}: {arm.what}", soft_wrap=True)
    if record.settings["verified"]:
        console.print("every byte of every arm was compared with the safetensors library")
    ours = next((arm for arm in finished if arm.name == "loadmaster"), None)
    if ours is not None and slowest is not None and slowest is not ours:
        console.print(
            f"loadmaster is {slowest.median / ours.median:.1f} times as fast as {slowest.name}: "
            f"{ours.median:.3f} s instead of {slowest.median:.3f} s"
        )


def _rates(arm: ArmResult, limit: ArmResult, slowest: ArmResult | None) -> list[str]:
    if not arm.finished:
        return [""] * 4
    return [
        f"{arm.gib_per_second:.2f}",
        f"{limit.median / arm.median:.2f}" if limit.finished else "",
        f"{1e6 * arm.median / arm.tensors:.1f}" if arm.tensors else "",
        f"{slowest.median / arm.median:.1f}" if slowest is not None else "",
    ]
