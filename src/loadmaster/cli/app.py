"""Puts the sub-commands together, and turns an expected failure into one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import typer

from loadmaster.cli import plan
from loadmaster.errors import LoadmasterError

app = typer.Typer(
    name="loadmaster",
    help="Load model weights into the processes of one host, each with its fair share of the CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("plan")(plan.plan)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: the process's own) and return its exit code."""
    try:
        code = app(
            args=list(arguments) if arguments is not None else None, prog_name="loadmaster", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as help_shown:
        print(help_shown.format_message())
        return 2
    except click.ClickException as wrong_usage:
        return _fail(wrong_usage.format_message(), 2)
    except LoadmasterError as failure:
        return _fail(str(failure), failure.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 1)
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int) -> int:
    print(f"loadmaster: {sentence}", file=sys.stderr)
    return code
