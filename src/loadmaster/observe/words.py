"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_seconds"]


def format_bytes(count: float) -> str:
    """``1.50 GiB``, ``12.0 MiB``, ``900 bytes``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """``0.132 s``, ``12.4 s``, ``3 min 20 s``."""
    if seconds < 60:
        return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
