"""Warnings that are logged once, however often the host is read."""

from __future__ import annotations

import logging

__all__ = ["warn_once"]

_MAX_REMEMBERED = 1000
_seen: set[str] = set()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning unless this process has logged the same words already."""
    if message not in _seen and len(_seen) < _MAX_REMEMBERED:
        _seen.add(message)
        logger.warning("%s", message)
