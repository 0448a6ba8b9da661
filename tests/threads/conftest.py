"""Every test of this room starts with torch at 2 threads everywhere, and leaves torch as it found it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from loadmaster.host import notices
from loadmaster.threads.openmp import run_times

T = TypeVar("T")

USABLE_CPUS = len(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(USABLE_CPUS < 2, reason="a share is at most the usable CPUs, and here is one")

PRELUDE = """
import json, logging, os, sys, threading
facts, said = {}, []

class Kept(logging.Handler):
    def emit(self, record):
        said.append([record.levelname, record.getMessage()])

logging.getLogger("loadmaster").addHandler(Kept())
logging.getLogger("loadmaster").setLevel(logging.INFO)

def in_fresh_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

def counts():
    import torch
    return [torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)]

import loadmaster as lm
"""
"""What the code of a fresh process begins with; it fills ``facts``, and ``said`` holds what was logged."""


def run_python(code: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """Run `PRELUDE` and ``code`` in a fresh process and return its ``facts``.

    Its environment is the least that Python needs: this process may have been changed.
    """
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    text = f"{PRELUDE}\n{code}\nprint()\nprint(json.dumps({{**facts, 'said': said}}))"
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env=environment | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def in_fresh_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread that has never run torch."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def counts() -> tuple[int, int]:
    """The intra-op threads of torch in this thread, and in a thread that starts now."""
    return torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)


def mkl_threads() -> int | None:
    """What MKL uses in this thread, None for a torch without it."""
    found = re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    return int(found[1]) if found else None


def os_threads() -> set[str]:
    """The threads of this process as the kernel numbers them, members of teams included, and ones that are ending."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def wait_until(true: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Whether something becomes true; returns as soon as it does.

    Counts looks and not the clock: a virtual machine that stood still gave what is waited for no time either.
    """
    for _ in range(round(1000 * seconds)):
        if true():
            return True
        time.sleep(0.001)
    return bool(true())


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Set torch to 2 threads and back; the test itself puts back what it changes, or leaves its own mark."""
    before, mask = torch.get_num_threads(), os.sched_getaffinity(0)
    pools = [(row, row.num_threads) for row in run_times().blas if row.internal_api == "openblas"]
    torch.set_num_threads(2)
    assert counts() == (2, 2)
    yield
    torch.set_num_threads(before)
    for pool, threads in pools:
        pool.set_num_threads(threads)
    assert os.sched_getaffinity(0) == mask


@pytest.fixture
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let warnings that this process has logged before be logged again."""
    monkeypatch.setattr(notices, "_logged", set())
