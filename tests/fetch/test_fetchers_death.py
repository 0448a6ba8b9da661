"""Fetchers, sources and consumers that fail: others do the work or an error says why, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint.helpers.waiting import in_time
from launch.helpers.leftovers import child_processes
from loadmaster.errors import FetchError, InputError
from loadmaster.fetch.fetchers import Fetchers
from loadmaster.fetch.source import SourceEntry
from loadmaster.fetch.weights import Weights
from loadmaster.share.lease import live_leases

from .fetch_sources import SECONDS, Orders, alive, check_weights, order, until

pytestmark = pytest.mark.processes

PROCS = 2
CHAOS = Path(__file__).with_name("fetch_chaos.py")


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def shared_pool(orders: Orders) -> Iterator[Fetchers]:
    before = child_processes()
    made = Fetchers(orders.source, PROCS)
    yield made
    made.close()
    assert child_processes() == before


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the output of fetchers that died is kept."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fetch(pool: Fetchers, version: int, seconds: float = 60.0) -> Weights:
    found: Weights = in_time(lambda: pool.fetch(version), pool.close, seconds)
    return found


@pytest.fixture
def pool(shared_pool: Fetchers, orders: Orders) -> Fetchers:
    """The pool with all its fetchers ready, whatever has become of them before."""
    orders.give(order("*", "meet", PROCS))
    with fetch(shared_pool, 1000) as weights:
        check_weights(weights, 1000)
        assert weights.report.failures == ()
        assert len(weights.report.fetchers) == PROCS
    assert len(shared_pool.pids()) == PROCS
    return shared_pool


def check_done(pool: Fetchers, version: int, failure: str, within: float = SECONDS) -> Weights:
    """Fetch, although something happens; the weights are right and the report says what it was."""
    begin = time.monotonic()
    with fetch(pool, version) as weights:
        check_weights(weights, version)
        assert time.monotonic() - begin < within
        assert any(failure in told for told in weights.report.failures), weights.report.failures
    return weights


def error_of(pool: Fetchers, version: int, kind: type[Exception] = FetchError) -> str:
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        fetch(pool, version)
    assert time.monotonic() - begin < SECONDS
    until(lambda: live_leases() == [])
    return str(caught.value)


# One fetcher fails.

ONCE = {
    "killed": (order("t04", "signal", signal.SIGKILL, once="one"), "was killed by SIGKILL, possibly out of memory"),
    "exits": (order("t04", "exit", 0, once="one"), "ended with exit code 0 before it was done"),
    "crashes": (order("t04", "crash", once="one"), "was killed by SIGSEGV, a crash in native code; its output is in"),
    "raises": (order("t04", "fail", "no luck", once="one"), "RuntimeError: no luck in fetcher"),
    "SystemExit": (order("t04", "leave", 5, once="one"), "SystemExit: 5"),
}


@pytest.mark.parametrize(("what", "failure"), ONCE.values(), ids=ONCE)
def test_others_take_over(what: dict[str, Any], failure: str, pool: Fetchers, orders: Orders) -> None:
    orders.give(what)
    check_done(pool, 1, failure)


def test_a_fetcher_that_is_killed_while_it_reads(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("t00", "wait", "never", once="one"))
    pool.prefetch(2)
    (number,) = until(lambda: orders.waiting("never"))
    (process,) = [pid for pid in pool.pids() if psutil.Process(pid).cmdline()[-1] == f"fetcher={number}"]
    os.kill(process, signal.SIGKILL)
    check_done(pool, 2, f"fetcher {number} was killed by SIGKILL")
    assert alive([process]) == []


def test_a_fetcher_that_is_stopped_is_not_waited_for(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("t00", "wait", "never", once="one"))
    pool.prefetch(3)
    (number,) = until(lambda: orders.waiting("never"))
    (process,) = [pid for pid in pool.pids() if psutil.Process(pid).cmdline()[-1] == f"fetcher={number}"]
    os.kill(process, signal.SIGSTOP)
    check_done(pool, 3, f"fetcher {number} said nothing for")
    until(lambda: alive([process]) == [])


def test_a_fetcher_that_fails_always_is_not_the_end(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "fail", "no luck", fetcher=1), order("*", "sleep", 0.01))
    weights = check_done(pool, 4, "RuntimeError: no luck in fetcher 1")
    assert 1 not in {row.fetcher for row in weights.report.fetchers}


def test_after_a_death_all_are_there_again(pool: Fetchers, orders: Orders) -> None:
    before = set(pool.pids())
    orders.give(order("t04", "exit", 3, once="one"))
    check_done(pool, 5, "ended with exit code 3")
    orders.give(order("*", "meet", PROCS))
    with fetch(pool, 6) as weights:
        assert weights.report.failures == ()
        assert [row.fetcher for row in weights.report.fetchers] == list(range(PROCS))
    assert len(set(pool.pids()) & before) == PROCS - 1


def test_fetchers_that_die_between_two_fetches(pool: Fetchers, orders: Orders) -> None:
    orders.give()
    processes = pool.pids()
    for process in processes:
        os.kill(process, signal.SIGKILL)
    until(lambda: alive(processes) == [])
    with fetch(pool, 7) as weights:
        check_weights(weights, 7)


# All fail.


def test_all_are_killed(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "signal", signal.SIGKILL))
    sentence = error_of(pool, 10)
    assert "was killed by SIGKILL, possibly out of memory" in sentence


def test_a_tensor_that_cannot_be_read(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("t05", "fail", "it is gone"))
    sentence = error_of(pool, 11)
    assert sentence.startswith("tensor 't05' of version 11 could not be fetched: fetcher ")
    told = sentence.partition("fetched: ")[2].split("; ")
    assert len(told) == 2
    assert len({cause.partition(":")[0] for cause in told}) == 2
    assert all("RuntimeError: it is gone in fetcher" in cause for cause in told)


def test_a_tensor_that_crashes_its_fetcher_is_named(pool: Fetchers, orders: Orders) -> None:
    """It is not the first of those that the fetcher was given."""
    orders.give(order("t07", "crash"), order("*", "sleep", 0.005))
    sentence = error_of(pool, 12)
    assert "'t07'" in sentence
    assert "SIGSEGV" in sentence


def test_after_a_failure_the_next_version_is_fetched(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("*", "fail", "no luck", version=13))
    error_of(pool, 13)
    with fetch(pool, 14) as weights:
        check_weights(weights, 14)


@pytest.mark.parametrize("where", ["names", "entry"])
def test_the_source_fails_where_it_is_asked_first(where: str, pool: Fetchers, orders: Orders) -> None:
    orders.give(order(where, "fail", "no such version", parent=True, version=15))
    assert error_of(pool, 15) == "the source failed: RuntimeError: no such version in fetcher -1"
    with fetch(pool, 16) as weights:
        check_weights(weights, 16)


@pytest.mark.parametrize("where", ["names", "entry"])
def test_the_source_fails_in_the_fetchers(where: str, pool: Fetchers, orders: Orders) -> None:
    orders.give(order(where, "fail", "no such version"))
    assert "RuntimeError: no such version in fetcher" in error_of(pool, 17)


def test_a_source_that_changed_meanwhile(pool: Fetchers, orders: Orders) -> None:
    orders.give(order("entry", "wait", "changed", parent=True, once="one"), tensors={"t": (64, 3)})
    pool.prefetch(18)
    until(lambda: orders.waiting("changed"))
    (orders.folder / "orders.json").write_text('{"tensors": {"t": [64, 4]}}')
    orders.sign("changed")
    assert "the source changed meanwhile, fetch this version again" in error_of(pool, 18)


def test_a_source_that_cannot_be_made_there(tmp_path: Path) -> None:
    with Fetchers(NotThere(), 2) as pool:
        assert "ValueError: not in a fetcher" in error_of(pool, 1)
        assert "ValueError: not in a fetcher" in error_of(pool, 2)


def _refuse() -> None:
    raise ValueError("not in a fetcher")


class NotThere:
    """A source that can be sent and not be received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()

    def names(self, version: int | None) -> list[str]:
        return ["t"]

    def entry(self, name: str) -> Any:
        return SourceEntry((4,), "U8")

    def read_into(self, name: str, destination: object) -> None:
        raise InputError("nobody may come here")


def test_a_source_that_hangs_where_it_is_asked_first(orders: Orders) -> None:
    orders.give(order("names", "wait", "late", parent=True))
    before = child_processes()
    pool = Fetchers(orders.source, 1)
    pool.prefetch(1)
    until(lambda: orders.waiting("late"))
    try:
        in_time(pool.close, lambda: None)
    finally:
        orders.sign("late")
        # The next test takes the sign away: who waits for it has to see it before.
        until(lambda: all(thread.name != "loadmaster-plan" for thread in threading.enumerate()))
    assert child_processes() == before


def test_fetchers_that_are_deaf_are_ended_too(orders: Orders) -> None:
    orders.give()
    before = child_processes()
    pool = Fetchers(orders.source, 2)
    fetch(pool, 1).close()
    for process in pool.pids():
        os.kill(process, signal.SIGSTOP)
    in_time(pool.close, lambda: None, 10)
    assert child_processes() == before


# The consumer ends.


class Consumer:
    """A process that fetches; see ``fetch_chaos.py``."""

    def __init__(self, orders: Orders, folder: Path, mode: str = "fetch") -> None:
        environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, str(CHAOS), "consumer", str(orders.folder), mode]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        assert self.child.stdout is not None
        self.pids = [int(word) for word in self.child.stdout.readline().split()]
        assert len(self.pids) >= 2

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        assert self.child.stdout is not None
        self.child.stdout.close()
        self.child.wait()
        for process in alive(self.pids):
            os.kill(process, signal.SIGKILL)


def test_a_consumer_that_is_killed_leaves_nothing(orders: Orders, temporary_folder: Path) -> None:
    """Not even where it was forked meanwhile, and the fork lives on."""
    orders.give(order("*", "wait", "never"))
    consumer = Consumer(orders, temporary_folder, "fork")
    forked = consumer.pids.pop()
    try:
        until(lambda: len(orders.waiting("never")) == 2, 60)
        assert len(live_leases()) == 2
        consumer.child.kill()
        until(lambda: alive(consumer.pids) == [], what="fetchers outlive their consumer")
        until(lambda: live_leases() == [], what="a lease is left")
        assert list(temporary_folder.iterdir()) == []
        assert alive([forked]) == [forked]
    finally:
        os.kill(forked, signal.SIGKILL)
        consumer.close()


def test_an_interrupt_ends_everything(orders: Orders, temporary_folder: Path) -> None:
    """Ctrl-C: the terminal sends it to the whole process group."""
    orders.give(order("*", "wait", "never"))
    consumer = Consumer(orders, temporary_folder)
    try:
        until(lambda: len(orders.waiting("never")) == 2, 60)
        os.killpg(consumer.child.pid, signal.SIGINT)
        assert consumer.child.wait(SECONDS) == 7
        assert alive(consumer.pids) == []
        until(lambda: live_leases() == [], what="a lease is left")
        assert list(temporary_folder.iterdir()) == []
    finally:
        consumer.close()


def test_a_consumer_that_ends_without_closing(orders: Orders, temporary_folder: Path) -> None:
    orders.give()
    consumer = Consumer(orders, temporary_folder, "leave")
    try:
        assert consumer.child.wait(60) == 0
        until(lambda: alive(consumer.pids) == [])
        assert list(temporary_folder.iterdir()) == []
    finally:
        consumer.close()


def test_a_consumer_that_is_killed_while_fetchers_start(orders: Orders, temporary_folder: Path) -> None:
    orders.give()
    consumer = Consumer(orders, temporary_folder, "start")
    consumer.child.kill()
    try:
        until(lambda: alive(consumer.pids) == [], what="fetchers outlive their consumer")
    finally:
        consumer.close()


# At random.


def test_chaos() -> None:
    """The long one: CHAOS=200, rounds."""
    rounds = os.environ.get("CHAOS", "5")
    done = subprocess.run(
        [sys.executable, str(CHAOS), rounds], capture_output=True, text=True, timeout=110 + int(rounds) * 20
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"rounds": {rounds}' in done.stdout
