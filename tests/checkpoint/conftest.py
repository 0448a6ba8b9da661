"""After every test of this room: no thread of ours and no open file of a checkpoint is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def left_behind(patience: float = 1.0) -> list[str]:
    """Our threads that still live and the checkpoint files that are still open, when ``patience`` seconds are over.

    A thread that has been joined is gone; one that ends by itself may be given a moment.
    """
    deadline = time.monotonic() + patience
    while (left := _alive()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _alive() -> list[str]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("loadmaster")]
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if ".safetensors" in target:
            files.append(target)
    return threads + files


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread or an open file, after success and after failure alike."""
    yield
    assert left_behind() == []
