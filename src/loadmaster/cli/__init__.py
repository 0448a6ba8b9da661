"""The ``loadmaster`` command: one file per sub-command, which parses and prints and decides nothing."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code: 0 done, 1 the work failed, 2 wrong usage or bad input."""
    from loadmaster.cli.app import run

    return run()
