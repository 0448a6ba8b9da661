"""Executes placements: k threads read pieces of the files straight into final memory.

    placements --plan_pieces--> pieces in file order --+--> thread 1: preadv, strided copy, convert --+--> memory
                                                       +--> thread k                                  |
                                      errors, progress <----------------------------------------------+

Parallel across pieces and never inside them: no thread team, no barrier. Pieces are bounded in bytes and every thread
takes the next ones when it is free, so the bytes balance by themselves while the files are read in order. Small pieces
are taken by the batch: what the threads share is locked once for all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from loadmaster.checkpoint.direct import DirectReader, drop_from_cache, open_direct
from loadmaster.checkpoint.dtypes import import_torch, item_bytes, torch_dtype
from loadmaster.checkpoint.pieces import Piece
from loadmaster.checkpoint.placement import Run
from loadmaster.checkpoint.safetensors import FileIdentity
from loadmaster.checkpoint.vectored import (
    SCRATCH_BYTES,
    FileTruncatedError,
    StridedCopier,
    read_into,
)
from loadmaster.errors import CheckpointError
from loadmaster.threads.openmp import use_one_thread_here

if TYPE_CHECKING:
    import torch

__all__ = ["KEEP_CACHE", "CacheUse", "ReadResult", "read_pieces"]

_PROGRESS_SECONDS = 0.1

BATCH_BYTES = 1 << 20
"""A thread takes small pieces until they span this much of a file: a millisecond of work."""

BATCH_PIECES = 64


class CacheUse(NamedTuple):
    """What a load does with the page cache: ``cold`` reads past it, ``drop`` gives back what was read, as it goes."""

    cold: bool = False
    drop: bool = False


KEEP_CACHE = CacheUse()


@dataclass
class ReadResult:
    """What reading did: bytes that came out of the files, and the seconds that the threads spent in each phase."""

    bytes_read: int = 0
    read_seconds: float = 0.0
    convert_seconds: float = 0.0

    def add(self, other: ReadResult) -> None:
        """Add what another thread did."""
        self.bytes_read += other.bytes_read
        self.read_seconds += other.read_seconds
        self.convert_seconds += other.convert_seconds


def read_pieces(
    pieces: Sequence[Piece],
    files: Mapping[str, FileIdentity],
    threads: int | Callable[[], int],
    progress: Callable[[int], None] | None = None,
    tensor_at: Callable[[str, int], str] | None = None,
    on_piece: Callable[[Piece], None] | None = None,
    cache: CacheUse = KEEP_CACHE,
) -> ReadResult:
    """Read all ``pieces`` with ``threads`` threads; return when every byte is in its place.

    Parameters
    ----------
    threads : int or callable
        How many threads; a callable is asked at each piece, and threads come and go as it says. It must cost next to
        nothing.
    files : mapping of str to FileIdentity
        What each file was when its header was read; a file that has changed since is an error.
    progress : callable, optional
        Called in this thread about ten times a second with the bytes placed so far.
    tensor_at : callable, optional
        Names the tensor at an offset of a file, for the error that a failed read becomes.
    on_piece : callable, optional
        Called with each piece that is in its place, in the thread that read it; one call at a time. What it raises ends
        the reading.
    cache : CacheUse
        What happens to the page cache of the files.

    Raises
    ------
    CheckpointError
        A file is truncated, changed or unreadable; names file, tensor offset and cause. No thread is left running.
    """
    needed = {piece.file for piece in pieces}
    tensor_at = tensor_at or (lambda file, offset: "")
    with _OpenFiles({file: files[file] for file in sorted(needed)}, tensor_at, cache) as open_files:
        team = _Team(pieces, open_files, tensor_at, cache, on_piece)
        team.run(threads if callable(threads) else lambda: threads, progress)
        open_files.check_unchanged()
    return team.result


class _OpenFiles:
    """The descriptors of the files of one load, closed on every way out."""

    def __init__(
        self, files: Mapping[str, FileIdentity], tensor_at: Callable[[str, int], str], cache: CacheUse
    ) -> None:
        self._files = files
        self._tensor_at = tensor_at
        self._cache = cache
        self.descriptors: dict[str, int] = {}
        self.direct: dict[int, int] = {}

    def __enter__(self) -> _OpenFiles:
        try:
            for file in self._files:
                descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                self.descriptors[file] = descriptor
                direct = open_direct(file) if self._cache.cold else None
                if direct is not None:
                    self.direct[descriptor] = direct
            self.check_unchanged()
        except OSError as refused:
            self.__exit__()
            raise CheckpointError(f"{refused.filename} cannot be read: {refused.strerror}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._cache.drop:
            for descriptor in self.descriptors.values():
                drop_from_cache(descriptor, 0, 0)
        for descriptor in (*self.descriptors.values(), *self.direct.values()):
            os.close(descriptor)
        self.descriptors.clear()
        self.direct.clear()

    def check_unchanged(self) -> None:
        """Raise if a file is no longer what it was when its header was read: its bytes may be of two versions."""
        for file, descriptor in self.descriptors.items():
            now, then = FileIdentity.of(os.fstat(descriptor)), self._files[file]
            if now.num_bytes < then.num_bytes:
                raise _truncated(file, now.num_bytes, self._tensor_at)
            if now != then:
                raise CheckpointError(f"{file} was changed while it was being read; load it again when it is complete")


@dataclass
class _Team:
    """The reading threads of one load and what they share."""

    pieces: Sequence[Piece]
    files: _OpenFiles
    tensor_at: Callable[[str, int], str]
    cache: CacheUse = KEEP_CACHE
    on_piece: Callable[[Piece], None] | None = None
    result: ReadResult = field(default_factory=ReadResult)
    failure: BaseException | None = None
    _workers: list[_Worker] = field(default_factory=list)
    _members: list[threading.Thread] = field(default_factory=list)
    _lengths: Sequence[int] = ()
    _next: int = 0
    _running: int = 0
    _stopped: bool = False
    _threads: Callable[[], int] = lambda: 1
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _finished: threading.Event = field(default_factory=threading.Event)

    def run(self, threads: Callable[[], int], progress: Callable[[int], None] | None) -> None:
        self._threads = threads
        self._lengths = [piece.length for piece in self.pieces]
        try:
            with self._lock:
                self._grow(max(1, threads()))
                if not self._members:
                    self._finished.set()  # there is nothing to read
            while not self._finished.wait(_PROGRESS_SECONDS if progress else None):
                if progress:
                    progress(self._placed_bytes())
        except BaseException:
            self._stop()
            raise
        finally:
            for member in self._members:  # it may still grow: a list is walked to its end at that moment
                if member.ident is not None:
                    member.join()
        if self.failure is not None:
            raise self.failure
        if progress:
            progress(self._placed_bytes())

    def _placed_bytes(self) -> int:
        return sum(worker.placed_bytes for worker in self._workers)

    def _grow(self, wanted: int) -> None:
        """Start threads until ``wanted`` run, as far as there is work for them; the lock is held."""
        while self._running < min(wanted, self._running + len(self.pieces) - self._next):
            worker = _Worker(self.files, self.cache)
            name = f"loadmaster-read-{len(self._members)}"
            member = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            self._workers.append(worker)
            self._members.append(member)
            self._running += 1
            try:
                member.start()
            except RuntimeError:  # no more threads are to be had: those that run do the work
                self._running -= 1
                if not self._running:
                    raise
                return

    def _work(self, worker: _Worker) -> None:
        piece = None
        try:
            while batch := self._take(worker):
                for piece in batch:
                    if self._stopped:
                        return
                    worker.execute(piece)
                if self.on_piece is not None:
                    with self._lock:
                        for piece in batch:
                            self.on_piece(piece)
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or self._explained(error, piece)
            self._stop()
        finally:
            with self._lock:
                self.result.add(worker.result)
                if not worker.retired:
                    self._running -= 1
                if not self._running:
                    self._finished.set()

    def _take(self, worker: _Worker) -> Sequence[Piece]:
        """The next pieces, or none when all are taken, or when this thread is one too many."""
        wanted = max(1, self._threads())
        with self._lock:
            if self._running > wanted:
                self._running -= 1
                worker.retired = True
                return ()
            first, num_bytes = self._next, 0
            # The last pieces are taken one by one, so that no thread is left with a batch of them.
            most = min(BATCH_PIECES, max(1, (len(self.pieces) - first) // (4 * wanted)))
            while self._next < min(first + most, len(self.pieces)) and num_bytes < BATCH_BYTES:
                num_bytes += self._lengths[self._next]
                self._next += 1
            last = self._next
            if self._running < wanted:
                self._grow(wanted)
        return [self.pieces[index] for index in range(first, last)]

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._next = len(self.pieces)

    def _explained(self, error: BaseException, piece: Piece | None) -> BaseException:
        if piece is None or not isinstance(error, (FileTruncatedError, OSError)):
            return error
        if isinstance(error, FileTruncatedError):
            return _truncated(piece.file, error.offset, self.tensor_at)
        place = _place(piece.offset, self.tensor_at(piece.file, piece.offset))
        return CheckpointError(f"{piece.file} cannot be read {place}: {error.strerror or error}")


def _truncated(file: str, offset: int, tensor_at: Callable[[str, int], str]) -> CheckpointError:
    place = _place(offset, tensor_at(file, offset))
    return CheckpointError(f"{file} was truncated while it was being read: it ends {place}")


def _place(offset: int, tensor: str) -> str:
    return f"at offset {offset}" + (f", in tensor {tensor!r}" if tensor else "")


class _Worker:
    """One thread's hands: its scratch, its copier and its account of seconds."""

    def __init__(self, files: _OpenFiles, cache: CacheUse) -> None:
        self._descriptors = files.descriptors
        self._drops = cache.drop
        names = {descriptor: file for file, descriptor in files.descriptors.items()}
        self._preadv = DirectReader(files.direct, names).preadv if cache.cold else os.preadv
        self._copier = StridedCopier(self._preadv if cache.cold or cache.drop else None)
        self._scratch: memoryview | None = None
        self.placed_bytes = 0
        self.retired = False
        self.result = ReadResult()

    def execute(self, piece: Piece) -> None:
        """Read one piece into its place."""
        started = time.perf_counter()
        descriptor = self._descriptors[piece.file]
        if piece.vectors is not None:
            self.result.bytes_read += read_into(descriptor, piece.vectors.views(), piece.offset, self._preadv)
            self.result.read_seconds += time.perf_counter() - started
        else:
            self._execute_run(piece, descriptor)
        if self._drops:
            drop_from_cache(descriptor, piece.offset, piece.length)
        self.placed_bytes += piece.num_bytes

    def _execute_run(self, piece: Piece, descriptor: int) -> None:
        assert piece.run is not None
        assert piece.buffer is not None
        started = time.perf_counter()
        if piece.also:
            targets = (piece.run.target, *piece.also)
            self.result.bytes_read += self._copier.deal(descriptor, piece.run, piece.buffer, targets)
            self.result.read_seconds += time.perf_counter() - started
        elif piece.dtypes is None:
            target = piece.buffer[piece.run.target :]
            self.result.bytes_read += self._copy(piece.run, descriptor, target, piece.run.target_stride)
            self.result.read_seconds += time.perf_counter() - started
        else:
            self._convert(piece.run, descriptor, piece.buffer, piece.dtypes)

    def _copy(self, run: Run, descriptor: int, target: memoryview, stride: int) -> int:
        if run.num_runs == 1:
            return read_into(descriptor, [target[: run.num_bytes]], run.source, self._preadv)
        return self._copier.copy(descriptor, run.source, run.source_stride, target, stride, run.num_bytes, run.num_runs)

    def _convert(self, run: Run, descriptor: int, buffer: memoryview, dtypes: tuple[str, str]) -> None:
        """Read ``run`` into the scratch and convert it into its place; in this thread, torch has one thread."""
        torch = import_torch()
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
            use_one_thread_here()
        started = time.perf_counter()
        self.result.bytes_read += self._copy(run, descriptor, self._scratch, run.num_bytes)
        read = time.perf_counter()
        columns = run.num_bytes // item_bytes(dtypes[0])
        source = torch.frombuffer(self._scratch, dtype=torch_dtype(dtypes[0]), count=columns * run.num_runs)
        target = _strided_tensor(buffer, run, columns, dtypes[1])
        target.copy_(source.view(run.num_runs, columns))
        self.result.read_seconds += read - started
        self.result.convert_seconds += time.perf_counter() - read


def _strided_tensor(buffer: memoryview, run: Run, columns: int, dtype: str) -> torch.Tensor:
    torch = import_torch()
    stride = run.target_stride // item_bytes(dtype) if run.num_runs > 1 else columns
    length = (run.num_runs - 1) * stride + columns
    flat = torch.frombuffer(buffer, dtype=torch_dtype(dtype), count=length, offset=run.target)
    return flat.as_strided((run.num_runs, columns), (stride, 1))  # type: ignore[no-any-return]
