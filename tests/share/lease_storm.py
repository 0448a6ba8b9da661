"""A storm: processes join, look and leave at random while a third of them are killed.

    python tests/share/lease_storm.py 64 30     # processes, seconds

At each quiet moment exactly those that hold a lease are seen, by all, and what they have adds up.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from lease_processes import Process, until

from loadmaster.host import read_host
from loadmaster.share.lease import live_leases


def storm(processes: int, seconds: float, seed: int = 1) -> dict[str, int]:
    """Run it in the folder ``LOADMASTER_DIR`` and return what was counted; raises AssertionError."""
    chance = random.Random(seed)
    folder = Path(os.environ["LOADMASTER_DIR"])
    all_of_them = [Process() for _ in range(processes)]
    counted = {"quiet moments": 0, "killed": 0, "most leases": 0}
    try:
        assert all(process.pid for process in all_of_them)
        end = time.monotonic() + seconds
        while time.monotonic() < end or not counted["quiet moments"]:
            for process in all_of_them:
                process.send("storm", chance.randrange(1 << 30), 40)
            condemned = chance.sample(all_of_them, max(1, processes // 3))
            for process in condemned:
                process.kill()
            counted["killed"] += len(condemned)
            living = [process for process in all_of_them if process not in condemned]
            holders = [process for process in living if process.answer()]
            _check(holders, folder)
            counted["quiet moments"] += 1
            counted["most leases"] = max(counted["most leases"], len(holders))
            for process in condemned:
                _close(process)
            all_of_them = living + [Process() for _ in condemned]
        for process in all_of_them:
            assert process.pid
            assert [line for line in process.log() if not line.startswith("INFO")] == []
            assert process.close() == 0
        assert list(folder.iterdir()) == []
    finally:
        for process in all_of_them:
            if process.child.poll() is None:
                process.kill()
            _close(process)
    return counted


def _check(holders: list[Process], folder: Path) -> None:
    """All see the same, and it is right; those that look first have a moment to notice who was killed."""
    cores = read_host().compute_cpus

    def looks() -> list[tuple[int, int]]:
        for process in holders:
            process.send("look")
        found = [process.answer() for process in holders]
        return [(row["workers"], row["threads"]) for row in found]

    expected = [(len(holders), min(16, max(1, cores // len(holders))))] * len(holders) if holders else []
    until(lambda: looks() == expected)
    assert sorted(row.pid for row in live_leases()) == sorted(process.pid for process in holders)
    assert len(list(folder.glob("lease.*"))) == len(holders)
    assert sum(threads for _, threads in looks()) <= max(cores, len(holders))


def _close(process: Process) -> None:
    for stream in (process.child.stdin, process.child.stdout):
        if stream is not None and not stream.closed:
            stream.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        os.environ["LOADMASTER_DIR"] = temporary
        print(json.dumps(storm(int(sys.argv[1]), float(sys.argv[2]))))
