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

__all__ = ["ArmResult", "BenchRecord"]

_PACKAGES = ("loadmaster", "torch", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm of a bench: the seconds of each repetition, in the order they ran."""

    name: str
    what: str
    seconds: Sequence[float]
    num_bytes: int
    tensors: int

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

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
            "median_seconds": self.median,
            "spread": (max(self.seconds) - min(self.seconds)) / self.median,
            "bytes": self.num_bytes,
            "tensors": self.tensors,
            "gib_per_second": self.gib_per_second,
            "microseconds_per_tensor": 1e6 * self.median / self.tensors if self.tensors else None,
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
