"""Scopes, pools, iterators and the reader share the host with processes that know nothing of them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadmaster as lm
from loadmaster.checkpoint import reader
from loadmaster.share import lease
from loadmaster.share.lease import live_leases
from loadmaster.threads import scope
from threads.conftest import counts, needs_two_cpus

pytestmark = [pytest.mark.processes, needs_two_cpus]

SHARE = lm.share().threads
"""Of a process that is alone here."""

NEIGHBOUR = """
import sys
import loadmaster as lm
lm.host()
print("ready", flush=True)
sys.stdin.readline()
with lm.lease() as lease:
    print(lease.look().threads, flush=True)
    sys.stdin.readline()
"""


class Neighbour:
    """Another process that loads: it knows nothing of this one."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "ready\n"
        self.threads = 0

    def join(self) -> None:
        """Let it begin to load."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        self.threads = int(self._child.stdout.readline())

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def neighbour() -> Iterator[Callable[..., Neighbour]]:
    """Starts neighbours; none is left."""
    made: list[Neighbour] = []

    def start(joins: bool = True) -> Neighbour:
        made.append(Neighbour())
        if joins:
            made[-1].join()
        return made[-1]

    yield start
    for one in made:
        one.kill()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Look again and again, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_scope_counts_a_neighbour_and_is_seen_by_the_next(neighbour: Callable[..., Neighbour]) -> None:
    first = neighbour()
    assert first.threads == SHARE
    with lm.load_threads() as share:
        assert share.threads == SHARE // 2
        assert "2 processes that load" in share.why
        assert counts() == (SHARE // 2, SHARE // 2)
        assert len(live_leases()) == 2
    first.kill()
    with lm.load_threads() as share:
        assert share.threads == SHARE
    assert live_leases() == []
    assert counts() == (2, 2)


def test_the_first_scope_of_a_process_waits_for_one_that_begins_a_moment_later(
    neighbour: Callable[..., Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader may never look again. Later scopes do not wait, and neither does one with a number of its own."""
    monkeypatch.setattr(scope, "_settled", set())
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 10.0)  # it ends when the other one is seen
    other = neighbour(joins=False)
    later = threading.Timer(0.02, other.join)
    later.start()
    with lm.load_threads() as share:
        assert (share.threads, share.workers) == (SHARE // 2, 2)
    later.join()
    other.kill()
    settled: list[float] = []
    monkeypatch.setattr(lease.Lease, "settle", lambda held: settled.append(0.0))
    for threads in ("auto", 1):
        with lm.load_threads(threads):  # type: ignore[arg-type]
            pass
    assert settled == []


def test_a_first_scope_that_stays_alone_waits_a_twentieth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "_settled", set())
    begin = time.monotonic()
    with lm.load_threads() as share:
        assert share.threads == SHARE
    assert time.monotonic() - begin > 0.045
    monkeypatch.setenv("LOADMASTER_LEASES", "off")
    monkeypatch.setattr(scope, "_settled", set())
    slept: list[float] = []
    monkeypatch.setattr(lease, "sleep", slept.append)
    with lm.load_threads() as share:
        assert share.threads == SHARE
    assert slept == []


def test_paced_follows_a_neighbour_that_comes_and_one_that_is_killed(neighbour: Callable[..., Neighbour]) -> None:
    weights = lm.paced(iter(int, 1))  # without an end
    next(weights)
    assert counts() == (SHARE, SHARE)
    other = neighbour()
    next(weights)
    assert counts() == (SHARE // 2, SHARE // 2)
    other.kill()

    def again() -> bool:
        next(weights)
        return torch.get_num_threads() == SHARE

    # A look asks for the locks of its neighbours when a tenth of a second has passed; a busy machine may take longer.
    assert wait_for(again, 2)
    weights.close()  # type: ignore[attr-defined]
    assert live_leases() == []


def test_an_explicit_number_is_left_alone_by_neighbours(neighbour: Callable[..., Neighbour]) -> None:
    neighbour()
    with lm.load_threads(SHARE) as share:
        assert share.threads == SHARE
        assert counts()[0] == SHARE


def test_a_pool_lets_fewer_tasks_run_while_a_neighbour_loads(
    neighbour: Callable[..., Neighbour], caplog: pytest.LogCaptureFixture
) -> None:
    inside: set[int] = set()
    seen: list[int] = []
    lock = threading.Lock()

    def task() -> None:
        with lock:
            inside.add(threading.get_ident())
            seen.append(len(inside))
        time.sleep(0.001)
        with lock:
            inside.discard(threading.get_ident())

    def most(tasks: int = 30) -> int:
        seen.clear()
        for future in [pool.submit(task) for _ in range(tasks)]:
            future.result()
        return max(seen)

    with caplog.at_level(logging.INFO, "loadmaster.threads.pool"), lm.load_pool() as pool:
        assert wait_for(lambda: most() == SHARE, 5)
        other = neighbour()
        most()  # those that were let in before it came
        assert most() == SHARE // 2
        other.kill()
        assert wait_for(lambda: most() == SHARE, 5)
    said = [line.partition(" (")[0] for line in caplog.messages if line.startswith("load pool: ")]
    forms = [f"load pool: {workers} workers with 1 threads each" for workers in (SHARE, SHARE // 2, SHARE)]
    assert said == forms, "each form of it is said once"
    assert live_leases() == []


def test_the_reader_gives_way_to_a_neighbour_and_takes_its_part_when_it_is_gone(
    neighbour: Callable[..., Neighbour], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.full((1 << 20,), number, dtype=torch.int32) for number in range(32)}, path)
    monkeypatch.setattr("loadmaster.checkpoint.pieces.plan_pieces.__defaults__", (1 << 16,))
    real = reader._Worker.execute
    pieces: list[int] = []
    others: list[Neighbour] = []
    lock = threading.Lock()

    def execute(worker: Any, piece: Any) -> None:
        real(worker, piece)
        with lock:  # the others wait for what happens here
            number = len(pieces)
            pieces.append(sum(member.name.startswith("loadmaster-read") for member in threading.enumerate()))
            if number == 100:
                others.append(neighbour())
            if number == 500:
                others[0].kill()
                time.sleep(0.15)  # the tenth of a second after which a look asks again

    monkeypatch.setattr(reader._Worker, "execute", execute)
    tensors: dict[str, torch.Tensor] = {}
    lm.load(tensors, path)
    assert len(pieces) == 2048
    assert max(pieces[:100]) == SHARE
    assert min(pieces[200:500]) == SHARE // 2
    assert max(pieces[600:]) == SHARE
    assert all(int(tensors[f"t{number}"][-1]) == number for number in range(32))
    assert live_leases() == []
