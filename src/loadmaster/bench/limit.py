"""The limit beside every figure: how fast this host's threads read the same bytes when they do nothing else."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from loadmaster.checkpoint.memory import Arena
from loadmaster.checkpoint.vectored import read_into
from loadmaster.errors import LoadmasterError

__all__ = ["limit_kind", "limit_seconds"]

_PIECE_BYTES = 8 << 20


def limit_seconds(files: Sequence[str], num_bytes: int, threads: int) -> float:
    """Return the seconds that ``threads`` threads take to ``pread`` ``num_bytes`` into fresh huge-page-advised memory.

    In C where the host has a compiler; otherwise the same in Python, which reaches 0.97 of it.
    """
    program = _program()
    if program is None:
        return _limit_in_python(files, num_bytes, threads)
    command = [program, str(threads), str(num_bytes), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadmasterError(f"the limit could not be measured: {done.stderr.strip()}")
    return float(done.stdout)


def limit_kind() -> str:
    """``C`` or ``Python``: what `limit_seconds` measures with on this host."""
    return "Python" if _program() is None else "C"


@functools.cache
def _program() -> str | None:
    """Build limit.c once per process; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder = _temporary_folder()
    program = f"{folder.name}/limit"
    source = Path(__file__).with_name("limit.c")
    built = subprocess.run(
        [compiler, "-O2", "-pthread", "-o", program, os.fspath(source)], capture_output=True, check=False
    )
    return program if built.returncode == 0 else None


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="loadmaster-limit-")


def _limit_in_python(files: Sequence[str], num_bytes: int, threads: int) -> float:
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    try:
        pieces = iter(list(_pieces(descriptors, num_bytes)))
        lock = threading.Lock()
        begin = time.perf_counter()
        arena = Arena(num_bytes)

        def read() -> None:
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                descriptor, offset, target, size = piece
                read_into(descriptor, [arena.buffer[target : target + size]], offset)

        team = [threading.Thread(target=read) for _ in range(threads)]
        for member in team:
            member.start()
        for member in team:
            member.join()
        return time.perf_counter() - begin
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _pieces(descriptors: Sequence[int], num_bytes: int) -> Iterable[tuple[int, int, int, int]]:
    planned = 0
    while planned < num_bytes:
        for descriptor in descriptors:
            for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
                size = min(_PIECE_BYTES, os.fstat(descriptor).st_size - offset, num_bytes - planned)
                if size:
                    yield descriptor, offset, planned, size
                planned += size
