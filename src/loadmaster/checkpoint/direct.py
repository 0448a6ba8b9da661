"""Reading past the page cache, and giving it back: for checkpoints that are read once and do not fit beside the model.

`DirectReader` has the form of ``os.preadv``: it reads aligned chunks with ``O_DIRECT`` into a buffer of its own and
copies from there, since neither tensors nor their memory are aligned as direct reads need it (open(2), O_DIRECT).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Mapping, Sequence

from loadmaster.host.notices import warn_once

__all__ = ["CHUNK_BYTES", "DirectReader", "drop_from_cache", "open_direct"]

CHUNK_BYTES = 4 << 20
"""What one thread has in flight at the most."""

_ALIGNMENT = 4096
"""Logical blocks of storage are 512 or 4096 bytes; the larger suits both."""


def open_direct(file: str) -> int | None:
    """Open ``file`` for direct reads; None, with one warning, where the file system refuses them."""
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except AttributeError:  # no such flag on this platform
        _say_refused(file, "the platform")
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        _say_refused(file, "its file system")
    return None


def _say_refused(file: str, who: str) -> None:
    folder = os.path.dirname(file)  # noqa: PTH120  a name, which need not be there any more
    warn_once(__name__, f"{folder}: {who} refuses direct reads (O_DIRECT); the page cache is used")


class DirectReader:
    """Reads with the direct descriptors of the files, and with the ordinary ones where there is none. For one thread.

    Parameters
    ----------
    direct : mapping of int to int
        Ordinary descriptor -> direct descriptor of the same file.
    names : mapping of int to str
        Ordinary descriptor -> name of the file, for the warning that it is read through the page cache after all.
    """

    def __init__(self, direct: Mapping[int, int], names: Mapping[int, str]) -> None:
        self._direct = dict(direct)
        self._names = names
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # a mapping is aligned to a page

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers`` from ``offset`` on, as far as one chunk goes; returns the bytes read, as ``os.preadv``."""
        direct = self._direct.get(descriptor)
        if direct is None:
            return os.preadv(descriptor, buffers, offset)
        skipped = offset % _ALIGNMENT
        wanted = skipped + sum(len(buffer) for buffer in buffers)
        length = min(CHUNK_BYTES, -(-wanted // _ALIGNMENT) * _ALIGNMENT)
        try:
            got = os.preadv(direct, [self._buffer[:length]], offset - skipped)
        except OSError as refused:
            if refused.errno != errno.EINVAL:
                raise
            del self._direct[descriptor]  # stricter than we know
            _say_refused(self._names[descriptor], "its file system")
            return os.preadv(descriptor, buffers, offset)
        at, end = skipped, min(got, wanted)
        for buffer in buffers:
            size = min(len(buffer), end - at)
            if size <= 0:
                break
            buffer[:size] = self._buffer[at : at + size]
            at += size
        return at - skipped


def drop_from_cache(descriptor: int, offset: int, length: int) -> None:
    """Give the page cache of a range back (length 0: to the end of the file). Best effort."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
