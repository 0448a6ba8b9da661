"""Every test of this room starts with torch at 2 threads everywhere, and leaves torch as it found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


def in_fresh_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread that has never run torch."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def counts() -> tuple[int, int]:
    """The intra-op threads of torch in this thread, and in a thread that starts now."""
    return torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Set torch to 2 threads and back."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert counts() == (2, 2)
    yield
    torch.set_num_threads(before)
