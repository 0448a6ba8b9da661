"""Shows how far each rank is: a live row per rank on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from loadmaster.observe.words import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["LineProgress", "NoProgress", "TerminalProgress", "progress_display"]

LINE_SECONDS = 3.0
"""How often a plain line is printed: often enough to see life in a log, seldom enough not to fill it."""


class NoProgress:
    """Says nothing."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, rank: int, done: int, total: int) -> None:
        """Take note that ``rank`` has placed ``done`` of ``total`` bytes."""


class LineProgress(NoProgress):
    """Prints one line for all ranks every few seconds, for logs and pipes."""

    def __init__(self, ranks: int, stream: TextIO, seconds: float = LINE_SECONDS, label: str = "rank {}") -> None:
        self._ranks = ranks
        self._label = label
        self._stream = stream
        self._seconds = seconds
        self._started = self._printed = 0.0
        self._state: dict[int, tuple[int, int]] = {}

    def update(self, rank: int, done: int, total: int) -> None:
        """Take note, and print when the last line is old enough."""
        now = time.monotonic()
        if not self._state:  # the ranks have started, and the first one reads
            self._started = self._printed = now
        self._state[rank] = (done, total)
        if now - self._printed < self._seconds:
            return
        self._printed = now
        placed = sum(done for done, _ in self._state.values())
        whole = sum(total for _, total in self._state.values())
        rate = placed / max(1e-9, now - self._started)
        left = format_seconds((whole - placed) / rate) if rate else "?"
        per_rank = ", ".join(
            f"{self._label.format(rank)} {100 * done // max(1, total)} %"
            for rank, (done, total) in sorted(self._state.items())
        )
        amounts = f"{format_bytes(placed)} of {format_bytes(whole)}, {format_bytes(rate)}/s"
        print(
            f"loading: {amounts}, {left} left ({per_rank})",
            file=self._stream,
            flush=True,
        )


class TerminalProgress(NoProgress):
    """A live row per rank: bytes, rate, time left."""

    def __init__(self, ranks: int, label: str = "rank {}") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._display: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._rows: list[TaskID] = [self._display.add_task(label.format(rank), total=None) for rank in range(ranks)]

    def __enter__(self) -> TerminalProgress:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()

    def update(self, rank: int, done: int, total: int) -> None:
        """Move the row of ``rank``."""
        self._display.update(self._rows[rank], completed=done, total=total)


def progress_display(ranks: int, *, quiet: bool, stream: TextIO | None = None, label: str = "rank {}") -> NoProgress:
    """Return the display that suits standard error: rows on a terminal, lines elsewhere, nothing when quiet.

    ``label`` names a row, with ``{}`` for its number.
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        return NoProgress()
    return TerminalProgress(ranks, label) if stream.isatty() else LineProgress(ranks, stream, label=label)
