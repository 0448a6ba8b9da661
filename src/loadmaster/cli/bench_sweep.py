"""``loadmaster bench sweep``: the best number of threads for ranks that copy at once, and the share beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.bench_collapse import CopyBytesOption
from loadmaster.cli.bench_options import PlotOption, RepeatOption, SecondsOption, check_plot, figures, show, steps
from loadmaster.cli.options import JsonOption, QuietOption

if TYPE_CHECKING:
    from loadmaster.bench.record import BenchRecord

__all__ = ["bench_sweep"]


def bench_sweep(
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks that copy at once.")] = 2,
    copy_bytes: CopyBytesOption = 400_000,
    repeat: RepeatOption = 5,
    seconds: SecondsOption = 120,
    plot: PlotOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure copies of several ranks with each number of threads, from 1 to twice the cores."""
    from loadmaster.bench.sweep import bench_sweep as measure
    from loadmaster.bench.sweep import panels

    check_plot(plot)
    record = measure(ranks, copy_bytes=copy_bytes, repeat=repeat, seconds=seconds, on_step=steps(quiet or as_json))
    show(record, as_json=as_json, plot=plot, panels=panels, print_record=_print_record)


def _print_record(record: BenchRecord) -> None:
    from loadmaster.bench.copies import threads_words
    from loadmaster.cli.tables import print_table, report_console

    console, settings = report_console(), record.settings
    by_count = dict(zip(settings["counts"], record.arms, strict=True))
    best, share = settings["best"], settings["share"]
    rows = [
        [
            f"{arm.name}{' (share)' * (count == share)}",
            *figures(arm, 1e6, 1),
            f"{arm.gib_per_second:.2f}" if arm.finished else "",
            f"{arm.median / by_count[best].median:.2f}" if arm.finished else "",
        ]
        for count, arm in by_count.items()
    ]
    print_table(console, ("each rank", "us a copy", "min", "max", "GiB/s", "x the\nbest"), rows)
    if best is None:
        return
    ours = by_count[share]
    words = (
        f"the best count is {threads_words(best)}; lm.share() chooses {threads_words(share)} ({settings['share_why']})"
    )
    if ours.finished and share != best:
        words += f", which takes {ours.median / by_count[best].median:.2f} of its time"
    console.print(words, soft_wrap=True)
