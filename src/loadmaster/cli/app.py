"""Puts the sub-commands together, and turns an expected failure into one sentence and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import typer

from loadmaster.cli import (
    bench_collapse,
    bench_experts,
    bench_fetch,
    bench_lease,
    bench_load,
    bench_make_checkpoint,
    bench_scope,
    bench_sweep,
    fetch,
    leases,
    load,
    plan,
)
from loadmaster.errors import LoadmasterError

__all__ = ["app", "run"]

app = typer.Typer(
    name="loadmaster",
    help="Load model weights into the processes of one host, each with its fair share of the CPUs.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    name="bench",
    help="Measure, on this machine, what the README quotes.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.command("plan")(plan.plan)
app.command("load")(load.load)
app.command("fetch")(fetch.fetch)
app.command("leases")(leases.leases)
app.add_typer(bench)
bench.command("load")(bench_load.bench_load)
bench.command("experts")(bench_experts.bench_experts)
bench.command("fetch")(bench_fetch.bench_fetch)
bench.command("collapse")(bench_collapse.bench_collapse)
bench.command("sweep")(bench_sweep.bench_sweep)
bench.command("lease")(bench_lease.bench_lease)
bench.command("scope")(bench_scope.bench_scope)
bench.command("make-checkpoint")(bench_make_checkpoint.make_checkpoint)

# typer carries its own copy of click since 0.2x and used the package before: this is the base of both.
_USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt in a sub-command."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: the process's own) and return its exit code."""
    logging.basicConfig(level=logging.WARNING, format="loadmaster: %(message)s")
    try:
        result = app(
            args=list(arguments) if arguments is not None else None, prog_name="loadmaster", standalone_mode=False
        )
    except _USAGE_ERROR as wrong_usage:
        return _explain_usage(wrong_usage)
    except LoadmasterError as failure:
        return _fail(str(failure), failure.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    if result == _INTERRUPTED:
        return _fail("interrupted; nothing is left running", 1)
    return result if isinstance(result, int) else 0


def _explain_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    return _fail(error.format_message(), 2)


def _fail(sentences: str, code: int) -> int:
    for sentence in sentences.splitlines():
        print(f"loadmaster: {sentence}", file=sys.stderr)
    return code
