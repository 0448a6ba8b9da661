"""``loadmaster load``: a checkpoint into N ranks of this host."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.options import (
    ExpertsKind,
    JsonOption,
    PathArgument,
    QuietOption,
    RanksOption,
    ShardKind,
    ShardOption,
    ThreadsOption,
    print_json,
)

if TYPE_CHECKING:
    from loadmaster.observe.report import Report

__all__ = ["load"]


def load(
    path: PathArgument,
    ranks: RanksOption = 1,
    shard: ShardOption = ShardKind.tp,
    threads: ThreadsOption = None,
    tp_plan: Annotated[
        Path | None,
        typer.Option(
            "--tp-plan", metavar="FILE.json", help="Name patterns and styles that win over the built-in ones."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert plain floating-point tensors: float32, float16, bfloat16.")
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts", help="Load the experts of a mixture of experts into banks.")
    ] = False,
    experts_layout: Annotated[
        Path | None,
        typer.Option("--experts-layout", metavar="FILE.json", help="Where other experts go; see docs/experts.md."),
    ] = None,
    experts_by: Annotated[
        ExpertsKind | None,
        typer.Option("--experts-by", help="tp: every rank its part of each; blocks, strided: every rank whole ones."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Read past the page cache (O_DIRECT).")] = False,
    drop_cache: Annotated[
        bool, typer.Option("--drop-cache", help="Give the page cache of the files back as they are read.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every placed byte with the safetensors library.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint into N ranks of this host, each with its share of the CPUs."""
    from loadmaster.checkpoint.bank_layout import read_layout
    from loadmaster.checkpoint.reader import CacheUse
    from loadmaster.checkpoint.tensor_parallel import read_tp_plan
    from loadmaster.errors import InputError, LoadmasterError
    from loadmaster.host import host
    from loadmaster.launch.load import LoadSettings, load_ranks
    from loadmaster.observe.progress import progress_display
    from loadmaster.observe.report import failed_report
    from loadmaster.share import plan_shares

    started = time.monotonic()
    if experts_by is not None and not experts and experts_layout is None:
        raise InputError("--experts-by deals experts to ranks, and needs --experts")
    try:
        settings = LoadSettings(
            ranks=ranks,
            sharded=shard is ShardKind.tp,
            tp_plan=read_tp_plan(tp_plan).overrides if tp_plan is not None else None,
            dtype=dtype,
            verify=verify,
            threads=threads,
            experts=experts or experts_layout is not None,
            layout=read_layout(experts_layout) if experts_layout is not None else None,
            experts_by=(experts_by or ExpertsKind.tp).value,
            cache=CacheUse(cold, drop_cache),
        )
        shares = plan_shares(host(), ranks, threads=threads)
        with progress_display(ranks, quiet=quiet or as_json) as display:
            report = load_ranks(
                path,
                settings,
                shares,
                on_progress=lambda rank, state: display.update(rank, *state),
                on_output=_print_output,
            )
    except LoadmasterError:
        if as_json:
            print_json(failed_report(str(path), time.monotonic() - started))
        raise
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)


def _print_output(rank: int, text: str) -> None:
    """Pass on what a rank has written, each line with its rank."""
    for line in text.splitlines():
        print(f"rank {rank}: {line}", file=sys.stderr)


def _print_report(report: Report) -> None:
    from loadmaster.cli.tables import print_table, report_console
    from loadmaster.observe.report import PHASES
    from loadmaster.observe.words import format_bytes, format_seconds

    console = report_console()
    sizes = [
        [
            str(rank.rank),
            str(rank.tensors),
            format_bytes(rank.bytes_read),
            format_bytes(rank.bytes_placed),
            str(rank.threads),
            format_bytes(rank.peak_rss),
        ]
        for rank in report.ranks
    ]
    print_table(console, ("rank", "tensors", "read", "placed", "threads", "peak memory"), sizes)
    seconds = [(str(rank.rank), *(f"{rank.seconds[phase]:.3f}" for phase in PHASES)) for rank in report.ranks]
    print_table(console, ("rank", *(f"{phase} s" for phase in PHASES)), seconds)
    console.print(f"threads: {report.ranks[0].why}")
    if (verified := report.verified) is not None:
        counts = f"{verified.tensors} tensors, {verified.bytes} bytes"
        console.print(f"verified: {counts}, all as the safetensors library gives them")
    ranks = f"{len(report.ranks)} rank{'s' if len(report.ranks) > 1 else ''}"
    console.print(
        f"loaded {format_bytes(report.bytes_placed)} into {ranks} in "
        f"{format_seconds(report.load_seconds)}: {report.gib_per_second:.2f} GiB/s "
        f"(with start{' and verify' if report.verified else ''} {format_seconds(report.wall_seconds)})"
    )
