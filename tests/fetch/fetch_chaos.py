"""Chaos: versions are fetched while fetchers, or the whole consumer, are killed at random moments.

    python tests/fetch/fetch_chaos.py 200       # rounds
    python tests/fetch/fetch_chaos.py 200 7     # and a seed

No wait is longer than 10 s, every result is complete and right or a clear error, and after each round nothing is left:
no process, no lease, no memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))

from fetch.fetch_sources import SECONDS, Orders, alive, arenas_of, check_weights, order, until
from loadmaster.errors import FetchError
from loadmaster.fetch.fetchers import Fetchers
from loadmaster.share.lease import live_leases

STARTING = 60.0
"""Fetchers import torch when they start, which takes as long as it takes."""


def chaos(rounds: int, seed: int) -> dict[str, float]:
    """Run it and return what was counted; raises AssertionError."""
    chance = random.Random(seed)
    counted = {"rounds": 0, "fetched": 0, "errors": 0, "killed": 0, "stopped": 0, "consumers": 0, "longest": 0.0}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as leases:
        os.environ["LOADMASTER_DIR"] = leases + "/leases"
        orders = Orders(Path(folder))
        pool = None
        try:
            for number in range(rounds):
                if number % 4 == 3:
                    _kill_a_consumer(orders, chance, counted)
                else:
                    if pool is None or chance.random() < 0.2:
                        if pool is not None:
                            _close(pool, counted)
                        pool = Fetchers(orders.source, chance.choice([2, 3]), keep_memory=chance.random() < 0.5)
                    _kill_a_fetcher(pool, orders, chance, counted, 100 * (number + 1))
                counted["rounds"] += 1
        finally:
            if pool is not None:
                _close(pool, counted)
        gc.collect()
        assert arenas_of(os.getpid()) == set(), "memory is left"
        assert live_leases() == []
    return counted


def _timed(counted: dict[str, float], begin: float) -> None:
    seconds = time.monotonic() - begin
    counted["longest"] = round(max(counted["longest"], seconds), 2)
    assert seconds < SECONDS, f"a wait of {seconds:.1f} s"


def _close(pool: Fetchers, counted: dict[str, float]) -> None:
    pids, begin = pool.pids(), time.monotonic()
    pool.close()
    _timed(counted, begin)
    assert alive(pids) == []


def _kill_a_fetcher(
    pool: Fetchers, orders: Orders, chance: random.Random, counted: dict[str, float], version: int
) -> None:
    """Fetch three versions, while one fetcher is killed or stopped at a moment of the second."""
    orders.give(order("*", "sleep", 0.01))
    pool.start()
    pids = until(pool.pids, STARTING)
    with _within(STARTING), pool.fetch(version) as weights:  # the processes may still start
        check_weights(weights, version)
    pids = pool.pids()
    condemned, sign = chance.choice(pids), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    timer = threading.Timer(chance.random() * 0.15, _send, (condemned, sign))
    timer.start()
    begin = time.monotonic()
    if chance.random() < 0.3:
        pool.prefetch(version + 1)
        if chance.random() < 0.5:
            version += 1
    failed = _fetch_or_fail(pool, version + 1)
    counted["errors" if failed else "fetched"] += 1
    _timed(counted, begin)
    assert failed is None or ("SIGKILL" in str(failed) or "said nothing" in str(failed)), failed
    timer.join()
    counted["killed" if sign == signal.SIGKILL else "stopped"] += 1
    with _within(STARTING), pool.fetch(version + 2) as weights:
        check_weights(weights, version + 2)
        counted["fetched"] += 1
    until(lambda: live_leases() == [], what="a lease is left")


def _fetch_or_fail(pool: Fetchers, version: int) -> FetchError | None:
    try:
        weights = pool.fetch(version)
    except FetchError as error:
        return error
    with weights:
        assert len(weights) == 12
        check_weights(weights, version)
    return None


def _kill_a_consumer(orders: Orders, chance: random.Random, counted: dict[str, float]) -> None:
    orders.give(order("*", "sleep", 0.02))
    command = [sys.executable, __file__, "consumer", str(orders.folder), "fetch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as consumer:
        assert consumer.stdout is not None
        pids = [int(word) for word in consumer.stdout.readline().split()]
        assert pids
        time.sleep(chance.random() * 3)  # the moment is what is random here
        consumer.kill()
    begin = time.monotonic()
    until(lambda: alive(pids) == [], what="fetchers outlive their consumer")
    until(lambda: live_leases() == [], what="a lease is left")
    _timed(counted, begin)
    counted["consumers"] += 1


def _send(process: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, sign)


@contextlib.contextmanager
def _within(seconds: float):  # type: ignore[no-untyped-def]
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds, "a wait is too long"


def consume(folder: str, mode: str) -> None:
    """Be a consumer: print the process numbers of the fetchers, and those of a fork, and fetch."""
    pool = Fetchers(Orders(Path(folder)).source, 2)
    pool.start()
    pids = until(lambda: len(pool.pids()) == 2 and pool.pids(), STARTING)
    if mode == "fork":
        forked = os.fork()
        if not forked:
            time.sleep(120)
            os._exit(0)
        pids = [*pids, forked]
    print(*pids, flush=True)
    if mode == "start":
        time.sleep(120)
    try:
        for version in range(1, 100):
            weights = pool.fetch(version)
            check_weights(weights, version)
            if mode == "leave":
                sys.exit(0)
            weights.close()
    except KeyboardInterrupt:
        sys.exit(7)


if __name__ == "__main__":
    if sys.argv[1] == "consumer":
        consume(*sys.argv[2:4])
    else:
        print(json.dumps(chaos(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)))
