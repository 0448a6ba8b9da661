"""The limit beside every figure: how fast this host's threads read the same bytes when they do nothing else."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from loadmaster.checkpoint.memory import Arena
from loadmaster.checkpoint.vectored import read_into
from loadmaster.errors import LoadmasterError

__all__ = ["LimitStoppedError", "limit_kind", "limit_seconds"]

_PIECE_BYTES = 8 << 20
_STOPPED = "the limit was not measured in its time and was stopped"


class LimitStoppedError(LoadmasterError):
    """The limit was not measured in the time that it was given."""


def limit_seconds(
    files: Sequence[str], num_bytes: int, threads: int, timeout: float | None = None, *, shared: bool = False
) -> float:
    """Return the seconds that ``threads`` threads take to ``pread`` ``num_bytes`` into fresh huge-page-advised memory.

    With ``shared``, into shared memory that was touched before: what a fetch into memory that is kept could reach.
    In C where the host has a compiler; otherwise the same in Python, which reaches 0.97 of it.

    Raises
    ------
    LimitStoppedError
        It took longer than ``timeout`` seconds.
    """
    program = _program()
    if program is None:
        return _limit_in_python(files, num_bytes, threads, timeout, shared)
    options = ["--shared"] if shared else []
    command = [f"/proc/self/fd/{program}", *options, str(threads), str(num_bytes), *files]
    try:
        done = subprocess.run(command, pass_fds=[program], capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise LimitStoppedError(_STOPPED) from None
    except PermissionError:  # programs in memory may be forbidden (vm.memfd_noexec)
        return _limit_in_python(files, num_bytes, threads, timeout, shared)
    if done.returncode:
        raise LoadmasterError(f"the limit could not be measured: {done.stderr.strip()}")
    return float(done.stdout)


def limit_kind() -> str:
    """``C`` or ``Python``: what `limit_seconds` measures with on this host."""
    return "Python" if _program() is None else "C"


@functools.cache
def _program() -> int | None:
    """Build limit.c once per process; a descriptor of the program in memory, None where it cannot be built."""
    compiler = shutil.which("cc")
    if compiler is None or not hasattr(os, "memfd_create"):
        return None
    with tempfile.TemporaryDirectory(prefix="loadmaster-limit-") as folder:
        built = Path(folder, "limit")
        source = Path(__file__).with_name("limit.c")
        command = [compiler, "-O2", "-pthread", "-o", os.fspath(built), os.fspath(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        image = built.read_bytes()
    writable = os.memfd_create("loadmaster-limit")
    try:
        os.write(writable, image)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY)  # a program open for writing cannot be run
    finally:
        os.close(writable)


def _limit_in_python(
    files: Sequence[str], num_bytes: int, threads: int, timeout: float | None = None, shared: bool = False
) -> float:
    descriptors: list[int] = []
    try:
        for file in files:
            descriptors.append(os.open(file, os.O_RDONLY))
        pieces = iter(list(_pieces(descriptors, num_bytes)))
        lock = threading.Lock()
        touched = _touched_shared(num_bytes) if shared else None
        begin = time.perf_counter()
        buffer = Arena(num_bytes).buffer if touched is None else touched

        def read() -> None:
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                if timeout is not None and time.perf_counter() - begin > timeout:
                    raise LimitStoppedError(_STOPPED)
                descriptor, offset, target, size = piece
                read_into(descriptor, [buffer[target : target + size]], offset)

        with ThreadPoolExecutor(threads) as team:
            for member in [team.submit(read) for _ in range(threads)]:
                member.result()
        return time.perf_counter() - begin
    except OSError as refused:
        name = f"{refused.filename}: " if refused.filename else ""
        raise LoadmasterError(f"the limit could not be measured: {name}{refused.strerror}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _touched_shared(num_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel built without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[::4096] = 1
    return memoryview(memory)


def _pieces(descriptors: Sequence[int], num_bytes: int) -> Iterable[tuple[int, int, int, int]]:
    planned, before = 0, -1
    while planned < num_bytes and planned != before:
        before = planned
        for descriptor in descriptors:
            for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
                size = min(_PIECE_BYTES, os.fstat(descriptor).st_size - offset, num_bytes - planned)
                if size:
                    yield descriptor, offset, planned, size
                planned += size
