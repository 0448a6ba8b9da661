"""The system calls: short reads go on, a file that ends is an error, and strided copies are numpy's strided copies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.checkpoint import vectored
from loadmaster.checkpoint.placement import Run
from loadmaster.checkpoint.vectored import MAX_VECTORS, FileTruncatedError, StridedCopier, read_into

DATA_BYTES = 3 << 20


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def data() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, DATA_BYTES, np.uint8)


@pytest.fixture(scope="module")
def path(data: np.ndarray[Any, np.dtype[np.uint8]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vectored") / "data.safetensors"
    made.write_bytes(data.tobytes())
    return made


# Contiguous reads.


def short_reads(takes: Sequence[int]) -> Callable[[int, Sequence[memoryview], int], int]:
    """A ``preadv`` that gives, in turn, at most so many bytes, as the real one may do."""
    left = list(takes)

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = left.pop(0) if left else 1 << 30
        taken = []
        for buffer in buffers:
            if not limit:
                break
            taken.append(buffer[:limit])
            limit -= len(taken[-1])
        return os.preadv(descriptor, taken, offset)

    return preadv


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    offset=st.integers(0, 500),
    takes=st.lists(st.integers(1, 70), max_size=30),
)
def test_short_reads_go_on_where_they_stopped(
    path: Path, data: np.ndarray[Any, Any], sizes: list[int], offset: int, takes: list[int]
) -> None:
    if not sum(sizes):
        return
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with opened(path) as descriptor:
        assert read_into(descriptor, buffers, offset, short_reads(takes)) == sum(sizes)
    assert b"".join(buffers) == data[offset : offset + sum(sizes)].tobytes()


def test_more_neighbours_than_one_call_takes(path: Path, data: np.ndarray[Any, Any]) -> None:
    count = 2 * MAX_VECTORS + 7
    buffers = [memoryview(bytearray(3)) for _ in range(count)]
    calls = []

    def preadv(descriptor: int, given: Sequence[memoryview], offset: int) -> int:
        calls.append(len(given))
        return os.preadv(descriptor, given, offset)

    with opened(path) as descriptor:
        assert read_into(descriptor, buffers, 5, preadv) == 3 * count
    assert b"".join(buffers) == data[5 : 5 + 3 * count].tobytes()
    assert calls == [MAX_VECTORS, MAX_VECTORS, 7]


def test_nothing_to_read_is_nothing(path: Path) -> None:
    with opened(path) as descriptor:
        assert read_into(descriptor, [], 0) == 0


def test_end_of_file_says_where(path: Path) -> None:
    with opened(path) as descriptor:
        with pytest.raises(FileTruncatedError) as caught:
            read_into(descriptor, [memoryview(bytearray(64)), memoryview(bytearray(64))], DATA_BYTES - 70)
        assert caught.value.offset == DATA_BYTES
        with pytest.raises(FileTruncatedError) as caught:
            read_into(descriptor, [memoryview(bytearray(64))], DATA_BYTES + 9)
        assert caught.value.offset == DATA_BYTES + 9


def test_failed_read_keeps_its_error(path: Path) -> None:
    writing = os.open(path.parent / "write-only", os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            read_into(writing, [memoryview(bytearray(4))], 0)
    finally:
        os.close(writing)


# Strided copies.


@contextmanager
def copying(how: str) -> Iterator[StridedCopier]:
    """A copier that copies from a map, or one on a platform that has no such call."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "through the scratch":
            patch.setattr(vectored, "_process_vm_writev", lambda: None)
        else:
            patch.setattr(vectored, "NARROW_RUN_BYTES", 0, raising=False)
        yield StridedCopier()


HOWS = ("from a map", "through the scratch")


@pytest.mark.parametrize("how", HOWS)
@given(
    run=st.integers(1, 700),
    gap=st.one_of(st.integers(0, 900), st.sampled_from([4096, 5000])),
    count=st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 2049])),
    source=st.integers(0, 9000),
    into=st.integers(0, 30),
    target_gap=st.one_of(st.just(0), st.integers(1, 50)),
)
@settings(max_examples=120)
def test_strided_copy_is_that_of_numpy(
    path: Path, data: np.ndarray[Any, Any], how: str, run: int, gap: int, count: int, source: int, into: int,
    target_gap: int,
) -> None:  # fmt: skip
    stride, target_stride = run + gap, run + target_gap
    count = min(count, (DATA_BYTES - source - run) // stride + 1)
    memory = np.full(into + count * target_stride + 64, 7, np.uint8)
    wanted = memory.copy()
    rows = np.lib.stride_tricks.as_strided(wanted[into:], (count, run), (target_stride, 1))
    rows[:] = np.lib.stride_tricks.as_strided(data[source:], (count, run), (stride, 1))
    with copying(how) as copier, opened(path) as descriptor:
        read = copier.copy(descriptor, source, stride, memoryview(memory.data)[into:], target_stride, run, count)
    np.testing.assert_array_equal(memory, wanted)
    assert run * count <= read <= (count - 1) * stride + run


@pytest.mark.parametrize("how", HOWS)
def test_rows_longer_than_the_scratch(path: Path, data: np.ndarray[Any, Any], how: str) -> None:
    stride = DATA_BYTES // 2 - 100
    memory = bytearray(2 * 600)
    with copying(how) as copier, opened(path) as descriptor:
        copier.copy(descriptor, 11, stride, memoryview(memory), 600, 600, 2)
        copier.copy(descriptor, 11, stride, memoryview(memory), 600, 600, 2)
    assert bytes(memory) == data[11:611].tobytes() + data[11 + stride : 611 + stride].tobytes()


def test_copy_from_a_map_reads_the_kept_bytes_alone(path: Path) -> None:
    with copying("from a map") as copier, opened(path) as descriptor:
        assert copier.copy(descriptor, 0, 4096, memoryview(bytearray(64_000)), 640, 640, 100) == 64_000


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES])
def test_forbidden_call_is_replaced_by_the_scratch_for_good(
    path: Path, data: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A sandbox that forbids the call: the kernel says so at the first use, not before."""
    calls = []

    def forbidden(*_: object) -> int:
        import ctypes

        calls.append(1)
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(vectored, "_process_vm_writev", lambda: forbidden)
    copier = StridedCopier()
    for _ in range(2):
        memory = bytearray(3 * 600)
        with opened(path) as descriptor:
            copier.copy(descriptor, 1, 1000, memoryview(memory), 600, 600, 3)
        assert bytes(memory) == b"".join(data[1 + row * 1000 : 601 + row * 1000].tobytes() for row in range(3))
    assert len(calls) == 1


def test_file_system_without_maps_is_read_through_the_scratch() -> None:
    """The kernel's own files cannot be mapped (ENODEV); they are regular files that ``preadv`` reads."""
    with Path("/proc/self/maps").open("rb") as file:
        head = os.pread(file.fileno(), 60, 0)
        memory = bytearray(2 * 10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectored, "NARROW_RUN_BYTES", 0, raising=False)
            patch.setattr(os, "fstat", lambda _: os.stat_result((0o100444, 1, 1, 1, 0, 0, 1 << 20, 0, 0, 0)))
            StridedCopier().copy(file.fileno(), 0, 20, memoryview(memory), 10, 10, 2)
    assert bytes(memory) == head[:10] + head[20:30]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kept", [0, 1, 4096, 30_000, 99_599])
def test_file_that_is_shorter_than_the_copy_needs(tmp_path: Path, how: str, kept: int) -> None:
    """Truncated before: the offset lies behind what is left and within what was asked."""
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(kept))
    with copying(how) as copier, opened(path) as descriptor, pytest.raises(FileTruncatedError) as caught:
        copier.copy(descriptor, 0, 1000, memoryview(bytearray(60_000)), 600, 600, 100)
    assert kept <= caught.value.offset < 99_600


@pytest.mark.parametrize("kept", [0, 4096, 1 << 20, (1 << 20) + 5000])
def test_file_truncated_under_the_map_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Another process truncates after the file was mapped; a plain access to the map would be a SIGBUS."""
    path = tmp_path / "mapped.safetensors"
    path.write_bytes(bytes(4 << 20))
    real = vectored._process_vm_writev()
    assert real is not None

    def truncating(*arguments: Any) -> Any:
        child = os.fork()
        if not child:
            os.truncate(path, kept)
            os._exit(0)
        os.waitpid(child, 0)
        return real(*arguments)

    monkeypatch.setattr(vectored, "_process_vm_writev", lambda: truncating)
    memory = bytearray(4096 * 600)
    with opened(path) as descriptor, pytest.raises(FileTruncatedError) as caught:
        StridedCopier().copy(descriptor, 0, 1024, memoryview(memory), 600, 600, 4096)
    assert kept <= caught.value.offset < 4 << 20


def test_unreadable_page_of_a_whole_file_is_an_input_output_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails: the kernel gives EFAULT though the file is as long as it was."""
    import ctypes

    def failing(*_: object) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    monkeypatch.setattr(vectored, "_process_vm_writev", lambda: failing)
    with opened(path) as descriptor, pytest.raises(OSError, match="Input/output error") as caught:
        StridedCopier().copy(descriptor, 0, 1024, memoryview(bytearray(60_000)), 600, 600, 100)
    assert caught.value.errno == errno.EIO


def test_map_is_closed_after_success_and_failure(tmp_path: Path) -> None:
    """A map keeps a descriptor of its own, and a thousand row-parallel tensors would keep a thousand."""
    path = tmp_path / "closed.safetensors"
    path.write_bytes(bytes(1 << 20))
    with opened(path) as descriptor:
        StridedCopier().copy(descriptor, 0, 1024, memoryview(bytearray(60_000)), 600, 600, 100)
        assert path.name not in Path("/proc/self/maps").read_text()


# Rows that are dealt in turns.


@given(
    count=st.integers(1, 60),
    size=st.one_of(st.integers(1, 300), st.just(5000)),
    turns=st.integers(1, 4),
    gap=st.integers(0, 40),
    source=st.integers(0, 9000),
    begin=st.integers(0, 30),
)
def test_dealing_is_that_of_numpy(
    path: Path, data: np.ndarray[Any, Any], count: int, size: int, turns: int, gap: int, source: int, begin: int
) -> None:
    """Every other byte of memory stays as it was, and each byte of the file is read once."""
    stride = size + gap
    memory = np.full(begin + turns * count * stride + 10, 7, np.uint8)
    wanted = memory.copy()
    targets = [begin + turn * count * stride for turn in range(turns)]
    rows = data[source : source + count * turns * size].reshape(count, turns, size)
    for turn, target in enumerate(targets):
        for row in range(count):
            wanted[target + row * stride : target + row * stride + size] = rows[row, turn]
    read: list[int] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        read.append(os.preadv(descriptor, buffers, offset))
        return read[-1]

    run = Run(source, turns * size, targets[0], stride, size, count)
    with opened(path) as descriptor:
        assert StridedCopier(preadv).deal(descriptor, run, memoryview(memory.data), targets) == rows.size
    assert sum(read) == rows.size
    np.testing.assert_array_equal(memory, wanted)


def test_dealing_from_a_file_that_ends(path: Path) -> None:
    memory = memoryview(bytearray(1000))
    with opened(path) as descriptor, pytest.raises(FileTruncatedError) as caught:
        StridedCopier().deal(descriptor, Run(DATA_BYTES - 30, 20, 0, 10, 10, 10), memory, [0, 100])
    assert caught.value.offset == DATA_BYTES


def test_a_scratch_is_kept_between_deals_of_any_size(path: Path, data: np.ndarray[Any, Any]) -> None:
    copier = StridedCopier()
    with opened(path) as descriptor:
        for count in (3, 500, 7):
            memory = bytearray(16 * count)
            copier.deal(descriptor, Run(5, 16, 0, 8, 8, count), memoryview(memory), [0, 8 * count])
            rows = data[5 : 5 + 16 * count].reshape(count, 2, 8)
            assert bytes(memory) == rows[:, 0].tobytes() + rows[:, 1].tobytes()


def test_a_copier_with_a_read_of_its_own_maps_nothing(path: Path, data: np.ndarray[Any, Any]) -> None:
    """Columns of a file that is read past the page cache, or dropped from it, must not be mapped."""
    calls: list[int] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        return os.preadv(descriptor, buffers, offset)

    memory = bytearray(3 * 4096)
    with opened(path) as descriptor:
        read = StridedCopier(preadv).copy(descriptor, 10, 9000, memoryview(memory), 4096, 4096, 3)
    assert read == 2 * 9000 + 4096
    assert calls == [10]
    assert bytes(memory) == b"".join(data[10 + 9000 * row : 10 + 9000 * row + 4096].tobytes() for row in range(3))
