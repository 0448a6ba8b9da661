"""Reads the kernel's files below a root folder, so that a folder of files is enough to test or to plan for a host.

A symbolic link that is absolute, or that climbs with ``..``, stays below the root, as it would in a ``chroot``.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["HostFiles"]

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_MAX_LINKS = 40  # as the kernel: MAXSYMLINKS


class HostFiles:
    """The files of one host.

    Parameters
    ----------
    root
        The folder that plays ``/``. Paths given to the methods are absolute paths of that host.

    Attributes
    ----------
    live
        Whether these are the files of the system that this process runs on.
    """

    __slots__ = ("_followed", "live", "root")

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        absolute = Path(root).absolute()
        self.live = absolute == Path("/").absolute()
        self.root = "" if self.live else os.fspath(absolute)
        # Folders with their links followed. An instance serves one reading of the host, so nothing grows stale.
        self._followed: dict[str, str] = {"": ""}

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None where it is missing or cannot be read."""
        try:
            data = _read_bytes(self._open(path))
        except (OSError, ValueError):
            return None
        return data.decode("utf-8", "surrogateescape")

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, unordered; empty where it is missing or cannot be read."""
        try:
            with os.scandir(self._path(path)) as entries:
                return [entry.name for entry in entries]
        except (OSError, ValueError):
            return []

    def _open(self, path: str) -> int:
        if self.live:
            return os.open(path, _FLAGS)
        folder, _, name = path.rpartition("/")
        try:
            return os.open(f"{self.root}{self._follow(folder)}/{name}", _FLAGS | _NO_FOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        return os.open(self._path(path), _FLAGS | _NO_FOLLOW)

    def _path(self, path: str) -> str:
        return path if self.live else self.root + self._follow(path)

    def _follow(self, path: str) -> str:
        known = self._followed.get(path)
        if known is None:
            parent, _, name = path.rpartition("/")
            known = self._followed[path] = self._step(self._follow(parent), name, [_MAX_LINKS])
        return known

    def _step(self, folder: str, name: str, links_left: list[int]) -> str:
        """Go from a folder whose links are followed to ``name`` in it, following that too."""
        if name in ("", "."):
            return folder
        if name == "..":
            return folder.rpartition("/")[0]
        try:
            target = os.readlink(f"{self.root}{folder}/{name}")  # noqa: PTH115 (a Path costs more than the call)
        except OSError:
            return f"{folder}/{name}"
        links_left[0] -= 1
        if links_left[0] < 0:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), f"{folder}/{name}")
        place = "" if target.startswith("/") else folder
        for part in target.split("/"):
            place = self._step(place, part, links_left)
        return place


def _read_bytes(descriptor: int) -> bytes:
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)
