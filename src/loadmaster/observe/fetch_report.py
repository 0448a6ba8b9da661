"""What a fetch did, as data: bytes, seconds of each fetcher, threads and reasons, and how evenly it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["FetchReport", "FetcherReport"]


@dataclass(kw_only=True)
class FetcherReport:
    """What one fetcher did for one version.

    ``seconds`` are those spent ``waiting`` for work, ``opening`` the source, ``reading`` from it and ``assembling``
    what was read in shared memory; ``threads`` it had for the reason ``why``; ``stolen`` are bundles of others. A
    tensor that several have read counts for the one that read its first row.
    """

    fetcher: int
    pid: int
    bundles: int = 0
    stolen: int = 0
    tensors: int = 0
    num_bytes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("waiting", "opening", "reading", "assembling"), 0.0)
    )
    threads: int = 1
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class FetchReport:
    """What all fetchers did for one version; ``seconds`` from the call to the last byte.

    ``plan_seconds`` of these went by until names and shapes were known and dealt.
    """

    version: int | None
    tensors: int
    num_bytes: int
    seconds: float
    fetchers: Sequence[FetcherReport]
    plan_seconds: float = 0.0
    failures: Sequence[str] = ()

    @property
    def gib_per_second(self) -> float:
        """Bytes of the version by the seconds of the fetch."""
        return self.num_bytes / (1 << 30) / self.seconds if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Busy seconds of the busiest fetcher over those of an average one: 1 is even."""
        busy = [sum(row.seconds.values()) - row.seconds["waiting"] for row in self.fetchers]
        mean = sum(busy) / len(busy) if busy else 0.0
        return max(busy) / mean if mean else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""
        return {
            "ok": True,
            "version": self.version,
            "tensors": self.tensors,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "plan_seconds": self.plan_seconds,
            "gib_per_second": self.gib_per_second,
            "spread": self.spread,
            "failures": list(self.failures),
            "fetchers": [asdict(row) for row in self.fetchers],
        }
