"""What a load did, as data: bytes, seconds of each phase, threads and reasons, per rank and as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

__all__ = ["PHASES", "PhaseClock", "RankReport", "Report", "Verified", "failed_report"]

PHASES = ("start", "open", "plan", "read", "convert", "verify")
"""The phases of a rank, in order. Their seconds add up to the wall time of that rank."""

GIB = 1 << 30


@dataclass(frozen=True)
class Verified:
    """How much was compared with the reference: every placed byte."""

    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did.

    ``bytes_read`` came out of the files and ``bytes_placed`` are those of its tensors; ``seconds`` has one number per
    phase; ``threads`` read, for the reason ``why``; ``peak_rss`` is the most memory in bytes that the process held.
    """

    rank: int
    tensors: int
    bytes_read: int
    bytes_placed: int
    seconds: dict[str, float]
    threads: int
    why: str
    peak_rss: int

    @property
    def load_seconds(self) -> float:
        """Seconds of loading proper, without start and verify."""
        return sum(self.seconds[phase] for phase in PHASES if phase not in ("start", "verify"))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a load did.

    ``load_seconds`` runs from all ranks ready to the slowest one done, without start and verify; ``wall_seconds`` is
    all of it.
    """

    checkpoint: str
    ranks: Sequence[RankReport]
    load_seconds: float
    wall_seconds: float
    verified: Verified | None = None
    ok: bool = True

    @property
    def bytes_placed(self) -> int:
        """Bytes of all tensors of all ranks."""
        return sum(rank.bytes_placed for rank in self.ranks)

    @property
    def gib_per_second(self) -> float:
        """GiB placed a second over ``load_seconds``, all ranks together."""
        return self.bytes_placed / GIB / self.load_seconds if self.load_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as the JSON of ``loadmaster load --json``; a test freezes its keys."""
        return {
            "ok": self.ok,
            "checkpoint": self.checkpoint,
            "ranks": [asdict(rank) for rank in self.ranks],
            "load_seconds": self.load_seconds,
            "wall_seconds": self.wall_seconds,
            "gib_per_second": self.gib_per_second,
            "verified": asdict(self.verified) if self.verified else None,
        }


def failed_report(checkpoint: str, wall_seconds: float) -> dict[str, Any]:
    """The JSON of a load that failed: the keys of a report, ``ok`` false, and nothing that could pass for a result."""
    return {
        "ok": False,
        "checkpoint": checkpoint,
        "ranks": [],
        "load_seconds": None,
        "wall_seconds": wall_seconds,
        "gib_per_second": None,
        "verified": None,
    }


@dataclass
class PhaseClock:
    """Adds up the seconds of each phase; a phase may be entered again."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of this block as phase ``name``."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - begin

    def split(self, phase: str, other: str, share: float) -> None:
        """Move the fraction ``share`` of ``phase`` to ``other``: threads did both at the same time."""
        moved = self.seconds[phase] * share
        self.seconds[phase] -= moved
        self.seconds[other] += moved
