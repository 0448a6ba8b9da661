"""``loadmaster fetch``: one fetch of a checkpoint into shared memory, and what each fetcher did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli.options import JsonOption, QuietOption, print_json

if TYPE_CHECKING:
    from loadmaster.observe.fetch_report import FetchReport
    from loadmaster.observe.report import Verified

__all__ = ["ProcsOption", "fetch"]

ProcsOption = Annotated[int, typer.Option("--procs", min=1, help="Number of fetchers, one process each.")]


def fetch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A safetensors checkpoint, or a folder of torch.distributed.checkpoint; may hold {version}.",
        ),
    ],
    procs: ProcsOption = 8,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="What stands for {version} in SOURCE.")
    ] = None,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Keep the memory for a next version, as Fetchers(keep_memory=True).")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with what the library of the format reads.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch SOURCE into shared memory with N processes, each with its share of the CPUs, and say what they did."""
    from loadmaster.errors import LoadmasterError
    from loadmaster.fetch.checkpoint_source import CheckpointSource
    from loadmaster.fetch.dcp import DcpSource, is_dcp
    from loadmaster.fetch.fetchers import Fetchers
    from loadmaster.fetch.source import with_version
    from loadmaster.fetch.verify import verify_weights
    from loadmaster.observe.progress import progress_display
    from loadmaster.threads.importing import require_torch

    verified = None
    try:
        require_torch()
        path = with_version(str(source), version)
        make = DcpSource if is_dcp(path) else CheckpointSource
        make(str(source)).names(version)  # a wrong path is told at once, not when all have started
        with progress_display(1, quiet=quiet or as_json, label="fetchers") as display:
            fetchers = Fetchers(
                make(str(source)),
                procs,
                keep_memory=keep_memory,
                progress=lambda done, total: display.update(0, done, total),
            )
            with fetchers:
                fetchers.start(wait=True)  # so that the seconds of the report are those of the fetch
                weights = fetchers.fetch(version)
        with weights:
            if verify:
                verified = verify_weights(weights, path)
            report = weights.report
    except LoadmasterError:
        if as_json:
            print_json(_failed_report(str(source), version))
        raise
    if as_json:
        counts = {"tensors": verified.tensors, "bytes": verified.bytes} if verified else None
        print_json({**report.as_dict(), "source": str(source), "verified": counts})
    else:
        _print_report(report, procs)
        _print_verified(verified, "torch.distributed.checkpoint" if is_dcp(path) else "the safetensors library")


def _failed_report(source: str, version: int | None) -> dict[str, Any]:
    """The JSON of a fetch that failed: the keys of a report, ``ok`` false, and nothing that could pass for a result."""
    return {
        "ok": False,
        "version": version,
        "tensors": None,
        "bytes": None,
        "seconds": None,
        "plan_seconds": None,
        "gib_per_second": None,
        "spread": None,
        "failures": [],
        "fetchers": [],
        "source": source,
        "verified": None,
    }


def _print_report(report: FetchReport, procs: int) -> None:
    from loadmaster.cli.tables import print_table, report_console
    from loadmaster.observe.words import format_bytes, format_seconds

    console = report_console()
    counts = ("fetcher", "bundles", "stolen", "tensors", "bytes", "threads")
    phases = ("waiting", "opening", "reading", "assembling")
    print_table(
        console,
        counts,
        [
            [
                *map(str, (row.fetcher, row.bundles, row.stolen, row.tensors)),
                format_bytes(row.num_bytes),
                str(row.threads),
            ]
            for row in report.fetchers
        ],
    )
    seconds = [[str(row.fetcher), *(f"{row.seconds[phase]:.3f}" for phase in phases)] for row in report.fetchers]
    print_table(console, ("fetcher", *(f"{phase} s" for phase in phases)), seconds)
    if report.fetchers:
        console.print(f"threads: {report.fetchers[0].why}", soft_wrap=True)
    for failure in report.failures:
        console.print(f"failure on the way: {failure}", soft_wrap=True, markup=False)
    which = "" if report.version is None else f" of version {report.version}"
    console.print(
        f"fetched {format_bytes(report.num_bytes)}{which} with {procs} fetcher{'s' * (procs > 1)} in "
        f"{format_seconds(report.seconds)}: {report.gib_per_second:.2f} GiB/s; "
        f"spread {report.spread:.2f} (busiest fetcher / mean)",
        soft_wrap=True,
    )


def _print_verified(verified: Verified | None, reference: str) -> None:
    from loadmaster.cli.tables import report_console

    if verified is not None:
        counts = f"{verified.tensors} tensors, {verified.bytes} bytes"
        report_console().print(f"verified: {counts}, all as {reference} gives them")
