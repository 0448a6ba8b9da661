"""The arena: private huge-page-advised memory, zero where nothing is read, alive as long as a tensor of it."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from loadmaster.checkpoint.memory import ALIGNMENT, HUGE_PAGE_BYTES, Arena
from loadmaster.errors import LoadmasterError


def mapping_of(address: int) -> tuple[str, str]:
    """The first line and the flags of this process's mapping that holds ``address``, as the kernel tells them."""
    head = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            head = line if int(match[1], 16) <= address < int(match[2], 16) else ""
        elif head and line.startswith("VmFlags:"):
            return head, line
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.parametrize("num_bytes", [64, 1 << 20, HUGE_PAGE_BYTES, 5 << 20])
def test_memory_is_private_anonymous_and_huge_page_advised(num_bytes: int) -> None:
    tensor = Arena(num_bytes).tensor(0, "U8", (num_bytes,))
    head, flags = mapping_of(tensor.data_ptr())
    address, rights, offset, device, inode, *path = head.split()
    assert rights == "rw-p"
    assert (offset, device, inode, path) == ("00000000", "00:00", "0", [])
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert " hg" in flags
    end = int(address.partition("-")[2], 16)
    assert tensor.data_ptr() + num_bytes <= end


def test_large_memory_begins_at_a_huge_page() -> None:
    for num_bytes in (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 7 << 20):
        assert Arena(num_bytes).tensor(0, "U8", (num_bytes,)).data_ptr() % HUGE_PAGE_BYTES == 0


def test_memory_is_zero_and_exactly_as_large_as_asked() -> None:
    arena = Arena((3 << 20) + 5)
    assert len(arena.buffer) == (3 << 20) + 5
    assert not arena.tensor(0, "U8", (3 << 20,)).any()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("BF16", (3, 5)),
        ("F32", ()),
        ("F64", (7,)),
        ("F8_E4M3", (2, 2, 2)),
        ("F4", (2, 3)),
        ("BOOL", (1, 1)),
        ("I64", (4,)),
    ],
)
def test_tensor_lies_at_its_offset(dtype: str, shape: tuple[int, ...]) -> None:
    arena = Arena(4096)
    first = arena.tensor(0, "U8", (1,))
    tensor = arena.tensor(5 * ALIGNMENT, dtype, shape)
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    assert tensor.data_ptr() - first.data_ptr() == 5 * ALIGNMENT
    arena.buffer[5 * ALIGNMENT : 5 * ALIGNMENT + tensor.nbytes] = bytes(range(1, 1 + tensor.nbytes))
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == bytes(range(1, 1 + tensor.nbytes))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_empty_tensor_needs_no_memory(shape: tuple[int, ...]) -> None:
    tensor = Arena(0).tensor(0, "BF16", shape)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch.bfloat16


def test_tensor_keeps_the_memory_alive() -> None:
    arena = Arena(1 << 20)
    arena.buffer[:4] = b"\x01\x02\x03\x04"
    tensor = arena.tensor(0, "U8", (4,))
    address = tensor.data_ptr()
    del arena
    gc.collect()
    assert tensor.tolist() == [1, 2, 3, 4]
    mapping_of(address)


def test_memory_goes_back_with_the_last_tensor() -> None:
    arena = Arena(64 << 20)
    tensors = [arena.tensor(offset << 20, "U8", (1 << 20,)) for offset in (0, 1)]
    address = tensors[0].data_ptr() + (32 << 20)
    del arena, tensors[0]
    gc.collect()
    mapping_of(address)
    tensors.clear()
    gc.collect()
    with pytest.raises(AssertionError, match="no mapping"):
        mapping_of(address)


def test_tensors_change_apart_from_each_other() -> None:
    """To autograd each is a tensor of its own: a change of one in place is none of the other."""
    arena = Arena(4096)
    weight, counter = arena.tensor(0, "F32", (2,)), arena.tensor(64, "F32", (2,))
    weight.fill_(3).requires_grad_()
    loss = (weight * weight).sum()
    counter.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6]
    assert weight._base is None


def test_saving_one_tensor_saves_its_bytes_alone(tmp_path: Path) -> None:
    arena = Arena(4 << 20)
    torch.save(arena.tensor(1 << 20, "F32", (4,)), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 8192


def test_memory_that_is_not_to_be_had_says_how_much() -> None:
    for num_bytes in (1 << 60, 1 << 70):
        with pytest.raises(LoadmasterError, match=f"{num_bytes} bytes of memory for the tensors are not to be had"):
            Arena(num_bytes)
