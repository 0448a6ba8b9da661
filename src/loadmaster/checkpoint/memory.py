"""The destination memory of a load: one private anonymous mapping, advised to use huge pages.

Private, since shared anonymous memory costs twice as much to touch; huge pages, since clearing and mapping 4 KiB pages
one by one costs 40 % of the rate of reading into them. The mapping is zero where nothing is read, and it lives as long
as a tensor made from it.
"""

from __future__ import annotations

import functools
import math
import mmap
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.dtypes import import_torch, item_bytes, torch_dtype
from loadmaster.errors import LoadmasterError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 64
"""Bytes to which tensors are aligned: torch's own allocator aligns to 64 (``c10::gAlignment``)."""

HUGE_PAGE_BYTES = 2 << 20

SMALL_BYTES = 1 << 20
SHARED_STORAGE_BYTES = 8 << 20
"""Tensors of up to 1 MiB that lie in one block of 8 MiB share a storage."""


class Arena:
    """``num_bytes`` of fresh memory, aligned to a huge page where they fill one.

    Raises
    ------
    LoadmasterError
        The memory is not to be had; says how much was asked.
    """

    def __init__(self, num_bytes: int) -> None:
        slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
        try:
            self._mapping = _map_private(max(1, num_bytes) + slack)
        except (OSError, ValueError, OverflowError) as refused:
            raise LoadmasterError(f"{num_bytes} bytes of memory for the tensors are not to be had: {refused}") from None
        self.buffer = memoryview(self._mapping)
        self.start = -_address(self.buffer) % HUGE_PAGE_BYTES if slack else 0
        self.num_bytes = num_bytes
        self._torch = import_torch()
        self._blocks: dict[tuple[int, str], torch.Tensor] = {}

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of ``shape`` and safetensors ``dtype`` at ``offset`` bytes; it keeps the memory alive.

        A tensor is a storage of its own, so that saving or sharing it does not drag the whole arena along; only small
        neighbours share one, of at most 8 MiB, since a storage costs more than twice the time of a view.
        """
        count, strides, num_bytes, item = _layout(dtype, shape)
        place = offset % SHARED_STORAGE_BYTES
        if 0 < num_bytes <= SMALL_BYTES and place + num_bytes <= SHARED_STORAGE_BYTES:
            return self._block(offset - place, dtype).as_strided(shape, strides, place // item)
        if count == 0:
            return self._torch.empty(shape, dtype=torch_dtype(dtype))  # type: ignore[no-any-return]
        return self._flat(offset, dtype, count).view(shape)

    def _block(self, offset: int, dtype: str) -> torch.Tensor:
        block = self._blocks.get((offset, dtype))
        if block is None:
            count = min(SHARED_STORAGE_BYTES, self.num_bytes - offset) // item_bytes(dtype)
            block = self._blocks[offset, dtype] = self._flat(offset, dtype, count)
        return block

    def _flat(self, offset: int, dtype: str, count: int) -> torch.Tensor:
        place = self.start + offset
        return self._torch.frombuffer(self._mapping, dtype=torch_dtype(dtype), count=count, offset=place)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _layout(dtype: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int, int]:
    """Elements, strides in elements, bytes, and bytes of an element of a contiguous tensor."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return math.prod(shape), strides, math.prod(shape) * item_bytes(dtype), item_bytes(dtype)


def _map_private(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows: anonymous memory is private there
        return mmap.mmap(-1, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            mapping.madvise(advice)
        except OSError:  # a kernel built without transparent huge pages
            return mapping
    return mapping


def _address(buffer: Any) -> int:
    import numpy as np

    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
