"""Reading past the page cache and giving it back: the same bytes, also where a file system refuses, and a cache that is
as empty as it was.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadmaster import ExpertShard, Shard, load, load_experts
from loadmaster.checkpoint import direct, reader
from loadmaster.checkpoint.direct import DirectReader, drop_from_cache, open_direct
from loadmaster.checkpoint.vectored import FileTruncatedError, read_into
from loadmaster.errors import CheckpointError
from loadmaster.host import notices

from .helpers.experts import FAMILIES, SIZES, Banks, Sizes, assert_banks, moe_tensors, wanted_banks, write_moe
from .helpers.files import assert_all_same, random_tensor, write_file

DATA_BYTES = 9 * 4096 + 1234
PAGE = mmap.PAGESIZE


def on_storage(path: Path) -> Path:
    """Let the bytes of a file come to storage: only clean pages can leave the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def resident_bytes(path: Path) -> int:
    """The bytes of a file that the page cache holds (mincore)."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = (ctypes.c_ubyte * -(-size // PAGE))()
        call = ctypes.CDLL(None, use_errno=True).mincore
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert call(view.ctypes.data, size, pages) == 0, os.strerror(ctypes.get_errno())
        del view
        return PAGE * sum(page & 1 for page in pages)


def dropped(path: Path) -> Path:
    """A file that the page cache does not hold; skips where that cannot be had."""
    on_storage(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        drop_from_cache(descriptor, 0, 0)
    finally:
        os.close(descriptor)
    if resident_bytes(path):
        pytest.skip("this file system does not give its page cache back")
    return path


@pytest.fixture(scope="module")
def data() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, DATA_BYTES, np.uint8)


@pytest.fixture(scope="module")
def path(data: np.ndarray[Any, np.dtype[np.uint8]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose last block is not full."""
    made = tmp_path_factory.mktemp("direct") / "data.safetensors"
    made.write_bytes(data.tobytes())
    return on_storage(made)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, DirectReader]]:
    """A file's ordinary descriptor and a direct reader of it; skips where the file system has no direct reads."""
    ordinary = os.open(path, os.O_RDONLY)
    try:
        unbuffered = open_direct(str(path))
        if unbuffered is None:
            pytest.skip(f"the file system of {path} refuses direct reads")
        try:
            yield ordinary, DirectReader({ordinary: unbuffered}, {ordinary: str(path)})
        finally:
            os.close(unbuffered)
    finally:
        os.close(ordinary)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test hears each warning anew."""
    monkeypatch.setattr(notices, "_logged", set())


# The reader by itself.


@given(
    sizes=st.lists(st.one_of(st.integers(1, 300), st.integers(4000, 9000)), min_size=1, max_size=6),
    offset=st.one_of(st.integers(0, DATA_BYTES - 1), st.sampled_from([0, 512, 4095, 4096, 8192, DATA_BYTES - 1])),
    chunk=st.sampled_from([4096, 8192, 4 << 20]),
)
def test_any_bytes_at_any_offset(
    path: Path, data: np.ndarray[Any, Any], sizes: list[int], offset: int, chunk: int
) -> None:
    """Neither offsets nor lengths are aligned; chunks end in the middle of a buffer; the last block is not full."""
    end = min(DATA_BYTES, offset + sum(sizes))
    buffers, at = [], offset
    for size in sizes:
        if at < end:
            buffers.append(memoryview(bytearray(min(size, end - at))))
            at += len(buffers[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "CHUNK_BYTES", chunk)
        with opened(path) as (descriptor, unbuffered):
            assert read_into(descriptor, buffers, offset, unbuffered.preadv) == end - offset
    assert b"".join(buffers) == data[offset:end].tobytes()


def test_one_call_reads_one_chunk_at_the_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "CHUNK_BYTES", 8192)
    with opened(path) as (descriptor, unbuffered):
        assert unbuffered.preadv(descriptor, [memoryview(bytearray(20_000))], 100) == 8092
        assert unbuffered.preadv(descriptor, [memoryview(bytearray(20_000))], 8192) == 8192
        assert unbuffered.preadv(descriptor, [memoryview(bytearray(5)), memoryview(bytearray(9000))], 8190) == 4098


def test_short_direct_reads_go_on(path: Path, data: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may give less than was asked, at a block or not."""
    real = os.preadv

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return min(5120, real(descriptor, buffers, offset))

    with opened(path) as (descriptor, unbuffered):
        monkeypatch.setattr(os, "preadv", short)
        buffer = memoryview(bytearray(DATA_BYTES - 7))
        read_into(descriptor, [buffer], 7, unbuffered.preadv)
    assert bytes(buffer) == data[7:].tobytes()


@pytest.mark.parametrize("beyond", [0, 1, 4096, 10_000])
def test_end_of_file_says_where(path: Path, beyond: int) -> None:
    with opened(path) as (descriptor, unbuffered):
        with pytest.raises(FileTruncatedError) as caught:
            read_into(descriptor, [memoryview(bytearray(5000))], DATA_BYTES - 4000 + beyond, unbuffered.preadv)
        assert caught.value.offset == max(DATA_BYTES, DATA_BYTES - 4000 + beyond)


def test_file_without_a_direct_descriptor_is_read_as_ever(path: Path, data: np.ndarray[Any, Any]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        buffer = memoryview(bytearray(99))
        assert DirectReader({}, {}).preadv(descriptor, [buffer], 4000) == 99
    finally:
        os.close(descriptor)
    assert bytes(buffer) == data[4000:4099].tobytes()


def test_a_read_that_fails_keeps_its_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(path) as (descriptor, unbuffered):
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(OSError, match="Input/output error"):
            unbuffered.preadv(descriptor, [memoryview(bytearray(9))], 0)


def test_descriptors_are_not_inherited(path: Path) -> None:
    descriptor = open_direct(str(path))
    if descriptor is None:
        pytest.skip(f"the file system of {path} refuses direct reads")
    try:
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


# Whole loads.

USES: dict[str, dict[str, bool]] = {
    "cold": {"cold": True},
    "drop": {"drop_cache": True},
    "both": {"cold": True, "drop_cache": True},
}


@pytest.fixture(params=[8192, 4 << 20], ids=["small chunks", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that end within every tensor, and those that are used."""
    monkeypatch.setattr(direct, "CHUNK_BYTES", request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrow and wide rows, vectors, a scalar and an empty tensor, at odd offsets."""
    tensors = {
        "model.layers.0.mlp.down_proj.weight": random_tensor((700, 96), seed=1),
        "model.layers.0.mlp.up_proj.weight": random_tensor((96, 500), seed=2),
        "model.layers.1.mlp.down_proj.weight": random_tensor((60, 4096), torch.float32, seed=3),
        "model.layers.1.mlp.up_proj.weight": random_tensor((4, 8), torch.uint8, seed=4),
        "norm.weight": random_tensor((777,), torch.float64, seed=5),
        "scalar": random_tensor((), torch.uint8, seed=6),
        "empty": torch.empty(0, 3),
    }
    return on_storage(write_file(tmp_path_factory.mktemp("cold") / "model.safetensors", tensors))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["whole", "rank 1 of 2", "converted"])
def test_tensors_are_those_of_an_ordinary_load(model: Path, where: str, use: str) -> None:
    more: dict[str, Any] = {
        "whole": {},
        "rank 1 of 2": {"shard": Shard(rank=1, ranks=2)},
        "converted": {"dtype": torch.float32},
    }[where]
    ordinary: dict[str, torch.Tensor] = {}
    load(ordinary, model, **more)
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, model, **more, **USES[use])
    assert_all_same(tensors, ordinary)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("family", FAMILIES)
def test_banks_are_those_of_plain_operations(tmp_path: Path, family: str, use: str) -> None:
    tensors = moe_tensors(family, SIZES[family], (0, 1))
    path = write_moe(tmp_path, tensors, lambda name: sum(map(ord, name)) % 2)
    for rank in range(2):
        banks: Banks = {}
        load_experts(banks, path, shard=ExpertShard(tp_rank=rank, tp_ranks=2), **USES[use])
        for layer in (0, 1):
            assert_banks(banks[layer], wanted_banks(family, tensors, layer, [0, 1, 2, 3], rank, 2))


@pytest.mark.parametrize("use", ["cold", "both"])
def test_a_file_that_is_truncated_meanwhile_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    path = write_file(tmp_path / "model.safetensors", {"a": random_tensor((64, 64)), "b": random_tensor((64, 64))})
    real = reader._Worker.execute

    def execute(worker: Any, piece: Any) -> None:
        os.truncate(path, 12_345)
        real(worker, piece)

    monkeypatch.setattr(reader._Worker, "execute", execute)
    tensors: dict[str, torch.Tensor] = {}
    with pytest.raises(CheckpointError, match=r"model\.safetensors was truncated .* at offset 12345, in tensor 'b'"):
        load(tensors, path, **USES[use])
    assert tensors == {}


# Where it is refused.


def refusing_open(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.open

    def refusing(file: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), str(file))
        return real(file, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


def refusing_read(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file system that opens for direct reads and takes none of ours."""
    real = os.preadv

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)


def without_the_flag(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.delattr(os, "O_DIRECT")


@pytest.mark.parametrize(
    ("refuse", "who"),
    [(refusing_open, "its file system"), (refusing_read, "its file system"), (without_the_flag, "the platform")],
)
def test_a_refusal_is_one_warning_and_the_same_bytes(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch, int], None],
    who: str,
) -> None:
    ordinary: dict[str, torch.Tensor] = {}
    load(ordinary, model)
    several = tmp_path / "several"
    for number in range(3):
        write_file(several / f"part{number}.safetensors", {f"t{number}": random_tensor((999,), seed=number)})
    if refuse is refusing_read and open_is_refused(model):
        pytest.skip("this file system refuses direct reads when the file is opened")
    refuse(monkeypatch, errno.EINVAL)
    tensors: dict[str, torch.Tensor] = {}
    with caplog.at_level(logging.WARNING):
        load(tensors, model, cold=True)
        load({}, model, cold=True)
    said = f"{model.parent}: {who} refuses direct reads (O_DIRECT); the page cache is used"
    assert [(record.name, record.message) for record in caplog.records] == [("loadmaster.checkpoint.direct", said)]
    assert_all_same(tensors, ordinary)
    caplog.clear()
    load({}, several, cold=True, threads=1)
    assert [record.message for record in caplog.records] == [said.replace(str(model.parent), str(several))]


def open_is_refused(path: Path) -> bool:
    descriptor = open_direct(str(path))
    notices._logged.clear()
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


@pytest.mark.parametrize("refuse", [refusing_open, refusing_read])
def test_any_other_refusal_is_an_error_that_names_the_file(
    model: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch, int], None]
) -> None:
    if open_is_refused(model):
        pytest.skip("this file system refuses direct reads")
    refuse(monkeypatch, errno.EIO)
    tensors: dict[str, torch.Tensor] = {}
    with pytest.raises(CheckpointError, match=f"{model} cannot be read.*: Input/output error"):
        load(tensors, model, cold=True)
    assert tensors == {}


def test_a_checkpoint_of_kernel_memory_is_loaded_all_the_same(tmp_path: Path) -> None:
    """A file system in memory, some of which refuse."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    folder = memory / f"loadmaster-{os.getpid()}-{tmp_path.name}"
    try:
        path = write_file(folder / "model.safetensors", {"a": random_tensor((1000, 7))})
        ordinary: dict[str, torch.Tensor] = {}
        load(ordinary, path)
        tensors: dict[str, torch.Tensor] = {}
        load(tensors, path, cold=True, drop_cache=True)
        assert_all_same(tensors, ordinary)
    finally:
        for file in folder.glob("*"):
            file.unlink()
        folder.rmdir()


# The page cache.


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """16 MiB in one file: as many bytes in columns as in whole tensors and in interleaved rows."""
    tensors = moe_tensors("mxfp4-gpt-oss", Sizes(2, 1024, 2048), (0, 1))
    return on_storage(write_moe(tmp_path, tensors) / "part-0.safetensors")


def test_cold_leaves_the_cache_as_it_was(large: Path) -> None:
    if open_is_refused(large):
        pytest.skip("this file system refuses direct reads")
    dropped(large)
    load_experts({}, large, cold=True)
    assert resident_bytes(large) < 1 << 20  # the header, and what the kernel read ahead with it


@pytest.mark.parametrize("use", ["drop", "both"])
def test_drop_gives_the_cache_back(large: Path, use: str) -> None:
    dropped(large)
    large.read_bytes()
    assert resident_bytes(large) > 12 << 20
    load_experts({}, large, **USES[use])
    assert resident_bytes(large) == 0


def test_drop_gives_the_cache_back_after_a_failure(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped(large)
    large.read_bytes()

    def fail(layer: int, banks: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load_experts({}, large, on_layer=fail, drop_cache=True)
    assert resident_bytes(large) == 0


@pytest.mark.parametrize("shard", [None, Shard(rank=0, ranks=2)], ids=["whole", "columns"])
def test_drop_gives_the_cache_back_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Shard | None
) -> None:
    """What lies behind has left the cache when the last piece was read, but for pages at the borders of pieces."""
    tensor = random_tensor((16 << 20,), torch.uint8).reshape(2048, 8192)
    path = dropped(write_file(tmp_path / "model.safetensors", {"model.layers.0.mlp.down_proj.weight": tensor}))
    path.read_bytes()
    assert resident_bytes(path) >= 16 << 20
    held = []
    real = reader._Worker.execute

    def execute(worker: Any, piece: Any) -> None:
        real(worker, piece)
        held.append(resident_bytes(path))

    monkeypatch.setattr(reader._Worker, "execute", execute)
    load({}, path, shard=shard, drop_cache=True, threads=1)
    assert len(held) > 1
    assert held == sorted(held, reverse=True)
    assert held[-1] < 4 << 20
    assert resident_bytes(path) == 0


def test_a_cache_that_cannot_be_given_back_is_no_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    monkeypatch.setattr(os, "posix_fadvise", refusing)
    load({}, model, drop_cache=True)
    monkeypatch.delattr(os, "posix_fadvise")
    load({}, model, drop_cache=True)
