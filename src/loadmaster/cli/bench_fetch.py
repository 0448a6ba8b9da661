"""``loadmaster bench fetch``: how fast fetchers bring a checkpoint into shared memory, against the published way."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from loadmaster.cli.fetch import ProcsOption
from loadmaster.cli.options import JsonOption, PathArgument, QuietOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = ["bench_fetch"]


def bench_fetch(
    path: PathArgument,
    procs: ProcsOption = 8,
    arms: ArmsOption = None,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 300,
    verify: VerifyOption = False,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the arms that fetch CKPT into shared memory, interleaved, each in fresh processes, beside the limit."""
    from loadmaster.bench.fetch import bench_fetch as measure
    from loadmaster.bench.fetch import panels

    check_plot(plot)
    record = measure(
        path,
        procs,
        arms=names_of(arms),
        repeat=repeat,
        seconds=seconds,
        verify=verify,
        on_step=steps(quiet or as_json),
    )
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=_print_record)


def _print_record(record: BenchRecord) -> None:
    from loadmaster.cli.tables import report_console

    print_record(record)
    console = report_console()
    for sentence in _sentences(record):
        console.print(sentence, soft_wrap=True)


def _sentences(record: BenchRecord) -> Iterator[str]:
    """What the table does not say."""
    from loadmaster.bench.fetch import OURS, PUBLISHED, fixed_arms

    arms = {arm.name: arm for arm in record.arms[1:] if arm.finished}  # the limit comes first
    ours, published = arms.get(OURS), arms.get(PUBLISHED)
    if ours is not None:
        slowest = max(arms.values(), key=lambda arm: arm.median)
        if published is not None and slowest is not published:  # else it was said already
            yield (
                f"{OURS} is {published.median / ours.median:.1f} times as fast as {PUBLISHED}: "
                f"{ours.median:.3f} s instead of {published.median:.3f} s"
            )
        yield from _beside_the_best(ours, fixed_arms(record.arms, OURS))
        yield from _beside_the_best(ours, fixed_arms(record.arms, PUBLISHED))
    for name in (OURS, PUBLISHED):
        if name in record.settings["descriptors"]:
            number = record.settings["descriptors"][name]
            tensors = f"{record.arms[0].tensors} tensors"
            yield (
                f"{name}: the consumer has {number['after'] - number['before']} more open files for {tensors}, "
                f"{number['before']} before and {number['after']} with them"
            )
    reasons: dict[str, list[str]] = {}
    for name, reason in record.settings["cannot_run"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"{', '.join(names)} cannot run here: {reason}"


def _beside_the_best(ours: ArmResult, fixed: list[ArmResult]) -> Iterator[str]:
    finished = [arm for arm in fixed if arm.finished]
    if finished:
        best = min(finished, key=lambda arm: arm.median)
        yield f"{ours.name} takes {ours.median / best.median:.2f} of the time of the best fixed count, {best.name}"
