"""Warnings that are logged once, however often the host is read."""

from __future__ import annotations

__all__ = ["warn_once"]

_MAX_REMEMBERED = 1000
_logged: set[str] = set()


def warn_once(logger_name: str, message: str) -> None:
    """Log a warning unless this process has logged the same words already."""
    if message in _logged or len(_logged) >= _MAX_REMEMBERED:
        return
    import logging  # here, since most hosts give no cause for it, and importing it takes longer than reading the host

    _logged.add(message)
    logging.getLogger(logger_name).warning("%s", message)
