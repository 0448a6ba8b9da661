"""``loadmaster leases``: which processes of this host load now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from loadmaster.cli.options import JsonOption, print_json
from loadmaster.cli.tables import print_table, report_console

if TYPE_CHECKING:
    from rich.console import Console

    from loadmaster.share.lease import LiveLease

__all__ = ["lease_documents", "leases", "print_leases"]

_MAX_COMMAND = 30


def leases(as_json: JsonOption = False) -> None:
    """Show which processes of this host load now, and how many threads each has."""
    from loadmaster.share.lease import live_leases

    found = live_leases()
    if as_json:
        print_json({"leases": lease_documents(found)})
    else:
        print_leases(report_console(), found)


def lease_documents(found: Sequence[LiveLease]) -> list[dict[str, Any]]:
    """The JSON form, which programs rely on."""
    return [asdict(lease) for lease in found]


def print_leases(console: Console, found: Sequence[LiveLease]) -> None:
    """Print a row for each process that loads, or a word that there is none."""
    from loadmaster.host import format_cpulist

    if not found:
        console.print("no process loads now")
        return
    rows = [
        (
            lease.command if len(lease.command) <= _MAX_COMMAND else lease.command[: _MAX_COMMAND - 3] + "...",
            str(lease.pid),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.since)),
            str(lease.threads),
            format_cpulist(lease.cpus),
        )
        for lease in found
    ]
    print_table(console, ("process that loads", "pid", "since", "threads", "CPUs"), rows)
