"""The destination memory of a load: one private anonymous mapping, advised to use huge pages.

Private, since shared anonymous memory costs twice as much to touch; huge pages, since clearing and mapping 4 KiB pages
one by one costs 40 % of the rate of reading into them. The mapping is zero where nothing is read, and it lives as long
as a tensor made from it.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.dtypes import import_torch, torch_dtype
from loadmaster.errors import LoadmasterError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 64
"""Bytes to which tensors are aligned: torch's own allocator aligns to 64 (``c10::gAlignment``)."""

HUGE_PAGE_BYTES = 2 << 20


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
        whole = memoryview(self._mapping)
        self._start = -_address(whole) % HUGE_PAGE_BYTES if slack else 0
        self.buffer = whole[self._start : self._start + num_bytes]
        self._torch = import_torch()

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of ``shape`` and safetensors ``dtype`` at ``offset`` bytes; it keeps the memory alive.

        Each tensor is a storage of its own and no view, so that saving or sharing one does not drag the arena along.
        ``resize_`` to the same number of elements only gives the shape, at half the memory of a view.
        """
        count = math.prod(shape)
        if count == 0:
            return self._torch.empty(shape, dtype=torch_dtype(dtype))  # type: ignore[no-any-return]
        place = self._start + offset
        flat = self._torch.frombuffer(self._mapping, dtype=torch_dtype(dtype), count=count, offset=place)
        return flat.resize_(shape)  # type: ignore[no-any-return]


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
