"""After every test of this room: no thread of ours and no open file of a checkpoint is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def left_behind() -> list[str]:
    """Our threads that still live and the checkpoint files that are still open."""
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
