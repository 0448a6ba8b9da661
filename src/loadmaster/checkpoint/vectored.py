"""The two system calls that move bytes from the page cache to their place, and what to do when they are not there.

`read_into`      contiguous bytes of a file into one or more buffers: ``preadv``.
`StridedCopier`  equal runs at a stride (the columns of a row-parallel shard) into one buffer, touching only these runs:

    file mapped read-only   |....AAAA....|....BBBB....|....CCCC....|
                                 \\____________  |  ____________/
    final memory                              AAAABBBBCCCC

The copy from the map is done by the kernel (``process_vm_writev`` on this very process, up to 1024 runs a call) and not
by ``memcpy``, for one reason: when the file was truncated meanwhile, a plain access to the map kills the process with
SIGBUS, while the kernel gives EFAULT and an error can be raised. Measured on whole row-parallel loads with 2 cores: 4.0
to 5.0 GiB/s of kept bytes where reading whole rows and keeping a part gives 1.6 to 2.3 (4 ranks) and one asynchronous
read per run 1.7 to 3.0. Where runs are very short, and where the call is missing or forbidden, whole rows are read into
a scratch and copied from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadmaster.checkpoint.placement import Run

__all__ = ["FileTruncatedError", "StridedCopier", "read_into"]

MAX_VECTORS = 1024
"""Buffers that one call takes (``IOV_MAX`` of Linux, ``UIO_MAXIOV``)."""

_READ_LIMIT = 0x7FFF_F000
"""Bytes that one read gives at the most (read(2), NOTES)."""


class FileTruncatedError(Exception):
    """The file ended before ``offset``, though its size said otherwise when it was opened."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the file ended before offset {offset}")
        self.offset = offset


def read_into(
    descriptor: int,
    buffers: Sequence[memoryview],
    offset: int,
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv,
) -> int:
    """Fill ``buffers`` from ``offset`` on; short reads are continued. Returns the number of bytes read.

    ``os.preadv`` releases the interpreter's lock and repeats a call that a signal interrupted (PEP 475).

    Raises
    ------
    FileTruncatedError
        The file ended first.
    OSError
        As ``preadv``.
    """
    wanted = sum(map(len, buffers))
    total = 0
    pending = list(buffers)
    while total < wanted:
        got = preadv(descriptor, pending[:MAX_VECTORS], offset)
        if got <= 0:
            raise FileTruncatedError(offset)
        total += got
        offset += got
        if total == wanted:
            break
        while pending and got >= len(pending[0]):
            got -= len(pending.pop(0))
        if got:
            pending[0] = pending[0][got:]
    return total


class StridedCopier:
    """Copies equal runs of one file that lie a stride apart into contiguous or strided memory.

    One copier serves one thread; it keeps its scratch between calls. With a ``preadv`` of its own it reads whole rows
    with that, and maps nothing.
    """

    def __init__(self, preadv: Callable[[int, Sequence[memoryview], int], int] | None = None) -> None:
        self._preadv = preadv or os.preadv
        self._vectors = np.empty((MAX_VECTORS, 2), np.uint64)
        self._scratch = np.empty(0, np.uint8)
        self._kernel_copies = preadv is None and _process_vm_writev() is not None

    def copy(
        self, descriptor: int, source: int, stride: int, target: memoryview, target_stride: int, run: int, count: int
    ) -> int:
        """Copy ``count`` runs of ``run`` bytes, ``stride`` apart in the file and ``target_stride`` apart in ``target``.

        Returns the number of bytes that were read from the file: ``run * count``, or whole rows where the fall-back
        reads them.

        Raises
        ------
        FileTruncatedError
            The file ended first.
        OSError
            As ``preadv``.
        """
        if self._kernel_copies and run >= NARROW_RUN_BYTES:
            try:
                self._copy_from_map(descriptor, source, stride, target, target_stride, run, count)
            except _NotAllowedError:
                self._kernel_copies = False
            else:
                return run * count
        return self._copy_through_scratch(descriptor, source, stride, target, target_stride, run, count)

    def _copy_from_map(
        self, descriptor: int, source: int, stride: int, target: memoryview, target_stride: int, run: int, count: int
    ) -> None:
        first = source - source % mmap.ALLOCATIONGRANULARITY
        length = source - first + (count - 1) * stride + run
        _read_ahead(descriptor, first, length)
        try:
            mapping = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first)
        except (OSError, ValueError) as refused:  # ENODEV: a file system without maps; ValueError: beyond the end
            if os.fstat(descriptor).st_size < first + length:
                raise FileTruncatedError(os.fstat(descriptor).st_size) from None
            raise _NotAllowedError from refused
        view = np.frombuffer(mapping, np.uint8)
        into = np.frombuffer(target, np.uint8)
        try:
            self._copy_vectors(
                view.ctypes.data + source - first, stride, into.ctypes.data, target_stride, run, count, source
            )
        except _UnreadableError as unreadable:
            if os.fstat(descriptor).st_size < first + length:
                raise FileTruncatedError(unreadable.offset) from None
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
        finally:
            del view
            mapping.close()

    def _copy_vectors(
        self, source: int, stride: int, target: int, target_stride: int, run: int, count: int, offset: int
    ) -> None:
        call = _process_vm_writev()
        assert call is not None
        vectors = self._vectors
        vectors[:, 1] = run
        joined = target_stride == run
        remote = np.empty((1 if joined else MAX_VECTORS, 2), np.uint64)
        steps = np.arange(MAX_VECTORS, dtype=np.uint64)
        for done in range(0, count, MAX_VECTORS):
            number = min(MAX_VECTORS, count - done)
            vectors[:number, 0] = source + done * stride + steps[:number] * stride
            if joined:
                remote[0] = (target + done * run, number * run)
            else:
                remote[:number, 0] = target + done * target_stride + steps[:number] * target_stride
                remote[:number, 1] = run
            got = call(os.getpid(), vectors.ctypes.data, number, remote.ctypes.data, 1 if joined else number, 0)
            if got != number * run:
                code = ctypes.get_errno()
                if got < 0 and code in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                    raise _NotAllowedError
                raise _UnreadableError(offset + done * stride + max(0, got) // run * stride)

    def deal(self, descriptor: int, rows: Run, buffer: memoryview, targets: Sequence[int]) -> int:
        """Read rows that follow each other once, and deal them in turns to the ``targets`` in ``buffer``.

        ``rows.num_runs`` of ``rows.num_bytes`` go to each target, ``rows.target_stride`` apart. Returns the bytes read;
        raises as `copy`.
        """
        size, count, turns = rows.num_bytes, rows.num_runs, len(targets)
        length = size * count * turns
        if self._scratch.size < length:
            self._scratch = np.empty(length, np.uint8)
        got = read_into(descriptor, [memoryview(self._scratch.data)[:length]], rows.source, self._preadv)
        for turn, target in enumerate(targets):
            dealt = _rows(self._scratch, turn * size, size, turns * size, count)
            _rows(buffer, target, size, rows.target_stride, count)[:] = dealt
        return got

    def _copy_through_scratch(
        self, descriptor: int, source: int, stride: int, target: memoryview, target_stride: int, run: int, count: int
    ) -> int:
        rows = max(1, min(count, SCRATCH_BYTES // stride))
        if self._scratch.size < rows * stride:
            self._scratch = np.empty(rows * stride, np.uint8)
        into = _rows(target, 0, run, target_stride, count)
        total = 0
        for done in range(0, count, rows):
            number = min(rows, count - done)
            length = (number - 1) * stride + run
            buffer = memoryview(self._scratch.data)[:length]
            total += read_into(descriptor, [buffer], source + done * stride, self._preadv)
            into[done : done + number] = _rows(self._scratch, 0, run, stride, number)
        return total


def _rows(buffer: Any, offset: int, num_bytes: int, stride: int, count: int) -> Any:
    """View ``count`` rows of ``num_bytes`` as one element each: numpy copies 1536 of 16 bytes in 3 us that way, and in
    23 us as rows of single bytes."""
    return np.ndarray((count,), np.dtype((np.void, num_bytes)), buffer, offset, (stride,))


NARROW_RUN_BYTES = 512
"""Shorter runs are cut out of whole rows in the scratch: each run from a map waits for memory by itself, while whole
rows stream. Measured with one thread, GiB/s kept of rows cut in 4: 352 bytes 1.02 from the map and 1.16 through the
scratch, 704 bytes 1.45 and 1.22, 1024 bytes 1.87 and 1.23, 7168 bytes 2.70 and 1.29."""

SCRATCH_BYTES = 1 << 20
"""A scratch that stays in a core's second-level cache (2 MiB on current servers) together with what it is copied to."""


def _read_ahead(descriptor: int, offset: int, length: int) -> None:
    """Start reading a range that is not in the page cache: page faults alone would fetch it in small steps.

    Measured from a disk 1.1 against 0.45 GiB/s of file; a range that is there costs 35 us for 8 MiB.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


class _UnreadableError(Exception):
    """The kernel could not read a page of the map: the file was truncated, or its storage failed."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class _NotAllowedError(Exception):
    """The kernel or a sandbox does not let this process copy from a map; another way is taken."""


@functools.cache
def _process_vm_writev() -> Callable[..., Any] | None:
    """The C function, or None where the platform has none. It releases the interpreter's lock while it copies."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    size, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    function.restype = ctypes.c_ssize_t
    return function
