"""A process that holds leases as it is told on standard input, and answers each line with a line of JSON.

A line is a JSON list: the name of a function below, and its arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from made_hosts import make_host

from loadmaster.share import lease_claim, lease_folder
from loadmaster.share.lease import Lease, lease, live_leases

held: list[Lease] = []
logged: list[str] = []
children: list[int] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logged.append(f"{record.levelname} {record.getMessage()}")


def join(cores: list[int] | None = None, weight: float = 1.0, threads: int | None = None, quota: float = 0) -> None:
    """Hold one more lease; on a host of these cores where they are given, else on this one."""
    host = None if cores is None else make_host([(core,) for core in cores], quota=quota or None)
    made = lease(weight, threads=threads, host=host)
    made.join()
    held.append(made)


def crowd(number: int) -> None:
    """Hold so many leases as if so many processes did."""
    with lease() as own:
        claim = own._claim
        assert claim is not None
        assert claim.file is not None
        folder = lease_folder.open_folder(os.environ, create=True)
        assert folder is not None
        for _ in range(number):
            folder.publish(claim.file)


def leave() -> None:
    held.pop().leave()


def look(index: int = -1) -> dict[str, Any]:
    found = held[index].look()
    return {"threads": found.threads, "workers": found.workers, "why": found.why, "rank": found.rank}


def joined_look() -> list[Any]:
    """Join, look, and say how many seconds the look took, and how often it slept."""
    join()
    slept = []
    sleep = lease_claim.sleep
    lease_claim.sleep = lambda seconds: (slept.append(seconds), sleep(seconds))  # type: ignore[assignment]
    begin = time.monotonic()
    look()
    lease_claim.sleep = sleep
    return [time.monotonic() - begin, len(slept)]


def live() -> list[dict[str, Any]]:
    return [{"pid": row.pid, "threads": row.threads, "weight": row.weight} for row in live_leases()]


def log() -> list[str]:
    found = logged[:]
    logged.clear()
    return found


def called() -> list[str]:
    """What a look calls when nothing has changed."""
    made = held[-1]
    made.look()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, what: calls.append(what.__name__) if event == "c_call" else None)
    made.look()
    sys.setprofile(None)
    return [name for name in calls if name != "setprofile"]


def fork() -> int:
    """Start a child by a fork; it lives on until it is killed."""
    child = os.fork()
    if child == 0:
        os.close(0)
        while True:
            signal.pause()
    children.append(child)
    return child


def fork_and_leave() -> list[int]:
    """What a look returns in a fork, before and after the fork leaves the lease that its parent holds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = held[-1]
        before = inherited.look().threads
        inherited.leave()
        with lease() as own:
            os.write(writing, json.dumps([before, own.look().workers]).encode())
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 1000)
    os.waitpid(child, 0)
    found: list[int] = json.loads(answer)
    return found


def run() -> int:
    """Start another program, which inherits all that may be inherited."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
    children.append(child.pid)
    return child.pid


def fork_while_others_look(times: int) -> None:
    """Fork again and again while threads join, look and leave."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lease() as own:
                own.look()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(times):
        child = os.fork()
        if child == 0:
            with lease() as own:
                own.look()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()


def die_at_every_line(others: int = 0, stride: int = 1) -> int:
    """Join, look and leave in forks, each of which is killed one line of the package later.

    After each the only leases and files must be those of so many others. Returns the number of lines. With a stride
    only every so many lines are tried.
    """
    expected = 2 if others else 0
    folder = Path(os.environ["LOADMASTER_DIR"])
    for line in range(1, 5000, stride):
        child = os.fork()
        if child == 0:
            _kill_at(line)
            with lease() as own:
                own.look()
            sys.settrace(None)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return line
        assert len(live_leases()) == others, f"killed at line {line}"
        left = [path.name for path in folder.glob("*")]
        assert len(left) == expected, f"killed at line {line}: {left}"
    raise AssertionError("no end")


def _kill_at(line: int) -> None:
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if "/share/lease" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def storm(seed: int, steps: int) -> bool:
    """Join, look and leave at random; return whether a lease is held at the end."""
    chance = random.Random(seed)
    for _ in range(steps):
        if held and chance.random() < 0.3:
            leave()
        elif len(held) < 2 and chance.random() < 0.3:
            join()
        elif held:
            found = held[-1].look()
            assert found.threads >= 1
            assert found.workers >= 1
        time.sleep(chance.random() * 0.005)
    return bool(held)


def without_nameless_files() -> None:
    lease_folder._TMPFILE = 0  # type: ignore[attr-defined]


def become(user: int) -> None:
    os.setuid(user)


def wait_for_the_folder(seconds: float) -> None:
    lease_folder.LOCK_SECONDS = seconds


def forbid_flock(error: int) -> None:
    """Have the kernel refuse flock to this process, as a sandbox does."""
    number = {"x86_64": 73, "aarch64": 32}[os.uname().machine]
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    rows = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x50000 | error), (give, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(program, len(program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(buffer)), 16)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0
    assert prctl(22, 2, ctypes.byref(filters), 0, 0) == 0


def hooks() -> list[int]:
    """How many fork hooks and exit hooks: importing and building a lease, and joining and leaving, have installed."""
    import atexit

    installed: list[str] = []
    fork_hook, exit_hook = os.register_at_fork, atexit.register
    os.register_at_fork = lambda **more: (installed.append("fork"), fork_hook(**more))  # type: ignore[assignment]
    atexit.register = lambda *more: (installed.append("exit"), exit_hook(*more))  # type: ignore[assignment]
    made = lease()
    before = len(installed)
    with made:
        pass
    with lease():
        pass
    return [before, len(installed)]


def main() -> None:
    logging.getLogger("loadmaster").addHandler(_Keep())
    logging.getLogger("loadmaster").setLevel(logging.INFO)
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = globals()[name](*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
