"""The form of every result: machine, versions, command and date are mandatory, and each arm has its spread."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.host import host

__all__ = ["ArmResult", "BenchRecord", "noise"]

_PACKAGES = ("loadmaster", "torch", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm of a bench: the seconds of each repetition that was done, in the order they ran.

    ``stopped_after`` are the seconds after which a repetition was stopped since the time of the bench was over; 0 where
    there was none left to begin it.
    """

    name: str
    what: str
    seconds: Sequence[float]
    num_bytes: int
    tensors: int
    stopped_after: float | None = None

    @property
    def finished(self) -> bool:
        """Whether there is a figure at all: at least one repetition was done."""
        return bool(self.seconds)

    @property
    def median(self) -> float:
        """Median seconds of a finished arm."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Largest less least of the seconds, in parts of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median if self.median else 0.0

    @property
    def gib_per_second(self) -> float:
        """GiB placed a second, of the median."""
        return self.num_bytes / (1 << 30) / self.median

    def as_dict(self) -> dict[str, Any]:
        """The arm as JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "seconds": list(self.seconds),
            "median_seconds": self.median if self.finished else None,
            "spread": self.spread if self.finished else None,
            "bytes": self.num_bytes,
            "tensors": self.tensors,
            "gib_per_second": self.gib_per_second if self.finished and self.median else None,
            "microseconds_per_tensor": 1e6 * self.median / self.tensors if self.finished and self.tensors else None,
            "stopped_after_seconds": self.stopped_after,
        }


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """The result of one bench, complete enough to be repeated and compared."""

    bench: str
    settings: dict[str, Any]
    arms: Sequence[ArmResult]

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "bench": self.bench,
            "machine": _machine(),
            "versions": _versions(),
            "command": shlex.join(["loadmaster", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "settings": self.settings,
            "arms": [arm.as_dict() for arm in self.arms],
        }


def noise(arms: Sequence[ArmResult]) -> str:
    """Say how far the repetitions of the noisiest arm are apart."""
    repeated = [arm for arm in arms if len(arm.seconds) > 1]
    if not repeated:
        return "no arm ran more than once, so that nothing tells how noisy this was"
    noisiest = max(repeated, key=lambda arm: arm.spread)
    return (
        f"noise: the largest spread, (max - min) / median, is {noisiest.spread:.2f}, that of {noisiest.name!r} in "
        f"{len(noisiest.seconds)} repetitions"
    )


def _machine() -> dict[str, Any]:
    here = host()
    return {
        "cpu": _cpu_model(),
        "cpus": len(here.cpus),
        "cores": len(here.cores),
        "compute_cpus": here.compute_cpus,
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    """The model name for people to read; nothing is decided by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
