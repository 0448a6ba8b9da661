"""Shared memory for weights: one arena per fetcher, sealed in size, with small handles to the tensors in it.

An arena is a file without a name (``memfd_create``): no limit of a container's /dev/shm applies, nothing is left when
the processes that hold it are gone, whichever way they went, and a hundred thousand tensors take one descriptor. Its
memory is reserved before it is written (`SharedArena.reserve`), so that a host without memory is an error here and not
a SIGBUS in whoever touches it first. Where there is no memfd, a file in /dev/shm takes its place, which is unlinked as
soon as it is open.

A handle names the process that holds the arena and the place in it. Any process of the same user opens it through
``/proc/PID/fd``; the process's start time and the file's inode tell whether it is still the one that was meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import math
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadmaster.checkpoint.dtypes import import_torch, item_bytes, torch_dtype
from loadmaster.errors import SharedMemoryError
from loadmaster.host.memory import available_memory
from loadmaster.observe.words import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "ArenaHandle", "Handle", "SharedArena", "check_available", "open_handle"]

ALIGNMENT = 64
"""Bytes to which tensors are aligned, as those of a load."""

_MADV_POPULATE_WRITE = 23
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class ArenaHandle(NamedTuple):
    """Names an arena: the process that holds it, since when it runs, its descriptor there, and the file's identity."""

    pid: int
    started: int
    descriptor: int
    inode: int
    num_bytes: int

    def open(self) -> SharedArena:
        """Open the arena in this process.

        Raises
        ------
        SharedMemoryError
            Its owner is gone, has closed it, or belongs to another user.
        """
        return SharedArena(_open_descriptor(self), self.num_bytes)


class Handle(NamedTuple):
    """Names one tensor in shared memory: the arena, the byte where it begins, its safetensors dtype and its shape."""

    arena: ArenaHandle
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def open(self) -> torch.Tensor:
        """Return the tensor, without a copy; see `open_handle`."""
        return open_handle(self)


class SharedArena:
    """``num_bytes`` of shared memory, sealed in size: it can neither grow nor shrink under those who have mapped it.

    `create` makes one; `from_descriptor` takes one over that another process has sent. ``buffer`` maps it, and
    ``tensor`` keeps that mapping alive.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        try:
            self._mapping = _map(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._reserved: set[tuple[int, int]] = set()
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int, name: str = "weights") -> SharedArena:
        """Make an arena of ``num_bytes``; its memory is taken when it is reserved or written.

        Raises
        ------
        SharedMemoryError
            The system has no descriptor or no address space left.
        """
        try:
            descriptor = _new_file(name, max(1, num_bytes))
        except OSError as refused:
            raise SharedMemoryError(f"{format_bytes(num_bytes)} of shared memory cannot be had: {refused}") from None
        return cls.from_descriptor(descriptor, num_bytes)

    @classmethod
    def from_descriptor(cls, descriptor: int, num_bytes: int) -> SharedArena:
        """Take over a descriptor of an arena, and close it with this object.

        Raises
        ------
        SharedMemoryError
            It cannot be mapped.
        """
        try:
            return cls(descriptor, num_bytes)
        except (OSError, ValueError) as refused:
            raise SharedMemoryError(f"{format_bytes(num_bytes)} of shared memory cannot be mapped: {refused}") from None

    @property
    def buffer(self) -> memoryview:
        """The bytes, which are those of all processes that have the arena open."""
        return memoryview(self._mapping)[: self.num_bytes]

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Have the kernel give the memory of a range now; once for each range, since it stays.

        Raises
        ------
        SharedMemoryError
            There is none; says how much was asked and how much there is.
        """
        if num_bytes <= 0 or (offset, num_bytes) in self._reserved:
            return
        first = offset - offset % mmap.PAGESIZE
        length = offset + num_bytes - first
        try:
            if not _populate(_address(self._mapping) + first, length):
                os.posix_fallocate(self.descriptor, first, length)
        except OSError as refused:
            if refused.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
                raise
            there = format_bytes(available_memory())
            raise SharedMemoryError(
                f"{format_bytes(self.num_bytes)} of shared memory were asked for, and the memory of the host is "
                f"exhausted: {there} are left"
            ) from None
        self._reserved.add((offset, num_bytes))

    def handle(self) -> ArenaHandle:
        """Return a handle to this arena that other processes can open while this one holds it."""
        status = os.fstat(self.descriptor)
        return ArenaHandle(os.getpid(), _started(os.getpid()), self.descriptor, status.st_ino, self.num_bytes)

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of ``shape`` and safetensors ``dtype`` at ``offset``; it keeps the memory alive.

        Raises
        ------
        SharedMemoryError
            It would not be inside the arena.
        """
        return _tensor_in(self._mapping, self.num_bytes, offset, dtype, shape)

    def remap(self) -> bool:
        """Map the arena anew, so that it can be filled again; not where tensors of it are still in use."""
        try:
            self._mapping.close()
        except BufferError:
            return False
        self._mapping = _map(self.descriptor, self.num_bytes)
        self._reserved.clear()
        return True

    def close(self) -> bool:
        """Unmap and close; whether the memory is free of this process now: not where tensors of it are still in use.

        What they use is unmapped with the last one.
        """
        self._finalizer()
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True


def check_available(num_bytes: int, what: str) -> None:
    """Refuse to take more memory than this process may have at this moment, before any of it is touched.

    Raises
    ------
    SharedMemoryError
        Says how much was asked and how much there is.
    """
    there = available_memory()
    if num_bytes > there:
        raise SharedMemoryError(
            f"{what} need {format_bytes(num_bytes)} of shared memory, and only {format_bytes(there)} are available here"
        )


def open_handle(handle: Handle) -> torch.Tensor:
    """Return the tensor that ``handle`` names, without a copy. Handles of one arena share one mapping.

    Raises
    ------
    SharedMemoryError
        The process that holds the arena is gone, has closed it, or belongs to another user.
    """
    arena, offset, dtype, shape = handle
    with _opening:
        mapping = _open_mappings.get(arena)
        if mapping is None:
            descriptor = _open_descriptor(arena)
            try:
                mapping = _open_mappings[arena] = _map(descriptor, arena.num_bytes)
            finally:
                os.close(descriptor)
    return _tensor_in(mapping, arena.num_bytes, offset, dtype, shape)


_open_mappings: weakref.WeakValueDictionary[ArenaHandle, mmap.mmap] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _tensor_in(mapping: mmap.mmap, num_bytes: int, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    torch = import_torch()
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=torch_dtype(dtype))  # type: ignore[no-any-return]
    if offset < 0 or offset + count * item_bytes(dtype) > num_bytes:
        raise SharedMemoryError(
            f"a tensor of shape {list(shape)} at byte {offset} is not inside its arena of {num_bytes} bytes"
        )
    # The tensor keeps the view, and as long as there is a view the mapping refuses to be closed.
    flat = torch.frombuffer(memoryview(mapping), dtype=torch_dtype(dtype), count=count, offset=offset)
    return flat.view(shape)  # type: ignore[no-any-return]


def _open_descriptor(handle: ArenaHandle) -> int:
    if _started(handle.pid) != handle.started:
        raise SharedMemoryError(
            f"process {handle.pid}, which held these weights, is gone, and they are gone with it; fetch them again"
        )
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    try:
        # Looked at before it is opened: under this number there may be anything by now, a terminal or a device.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if _is_arena(Path(path).stat(), handle) else -1
    except PermissionError as refused:
        raise SharedMemoryError(
            f"the weights of process {handle.pid} cannot be opened: {refused.strerror or refused}; "
            "only processes of the same user can"
        ) from None
    except OSError:
        descriptor = -1
    if descriptor >= 0:
        if _is_arena(os.fstat(descriptor), handle):
            return descriptor
        os.close(descriptor)
    raise SharedMemoryError(f"process {handle.pid} has closed these weights; fetch them again")


def _is_arena(status: os.stat_result, handle: ArenaHandle) -> bool:
    return status.st_ino == handle.inode and status.st_size >= handle.num_bytes


def _started(pid: int) -> int:
    """When a process began, which with its number names it for good; -1 where there is none.

    In clock ticks since the host started: field 22 of /proc/PID/stat (proc(5)).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text[text.rindex(")") + 2 :].split(" ")[19])


def _new_file(name: str, num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        return _unlinked_file(num_bytes)
    try:
        descriptor = os.memfd_create(f"loadmaster-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as refused:
        if refused.errno != errno.ENOSYS:
            raise
        return _unlinked_file(num_bytes)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, seal) for seal in _SEALS))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlinked_file(num_bytes: int) -> int:
    """A file of /dev/shm that no name leads to any more: its memory goes with its last user."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    descriptor, path = tempfile.mkstemp(prefix="loadmaster-", dir=folder)
    try:
        os.unlink(path)  # noqa: PTH108
        os.posix_fallocate(descriptor, 0, num_bytes)  # /dev/shm has a limit of its own, which shows here
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED)
    with contextlib.suppress(OSError, AttributeError):  # a kernel built without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


@functools.cache
def _madvise() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def _populate(address: int, length: int) -> bool:
    """Fault a range in for writing at once (Linux 5.14); whether the kernel knows how. Its refusal is an OSError."""
    function = _madvise()
    if function is None:
        return False
    if function(address, length, _MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, os.strerror(code))
