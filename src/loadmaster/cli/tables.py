"""Tables of numbers that fit a terminal of 80 columns and cut none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_table", "report_console"]

WIDTH_ELSEWHERE = 120
"""Columns of standard output that is no terminal, such as a log."""


def report_console() -> Console:
    """The console that results are printed on."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_ELSEWHERE, highlight=False)


def print_table(console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows``: the first column as words, the others as numbers; headings may have several lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    console.print(table)
