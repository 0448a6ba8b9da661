"""What a rank can do in these tests. Imports no torch, so that a rank starts in a few hundredths of a second.

`act` is what `run_ranks` calls; a job is the name of one of the other functions and its argument, so that the ranks of
one run can behave differently.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from loadmaster.errors import InputError, LoadmasterError
from loadmaster.launch.rank import RankContext

ACT = "launch.helpers.rank_functions:act"


def act(job: tuple[str, Any], context: RankContext) -> Any:
    """Do what the job says."""
    name, argument = job
    return globals()[name](argument, context)


def answer(value: Any, context: RankContext) -> Any:
    """Return what was sent, and who answers."""
    return context.rank, value


def describe(_: None, context: RankContext) -> dict[str, Any]:
    """Return what a rank finds around it."""
    return {
        "environment": dict(os.environ),
        "path": sys.path,
        "input": sys.stdin.readline(),
        "executable": sys.executable,
        "signals": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }


def follow(files: tuple[str | None, str], context: RankContext) -> int:
    """Wait until the first file is there, then make the second one and return: ranks end in a known order."""
    awaited, made = files
    if awaited is not None:
        wait_for_file(awaited)
    Path(made).touch()
    return context.rank


def wait_for_file(path: str) -> None:
    """Wait until a file is there."""
    while not Path(path).exists():
        time.sleep(0.002)


def frozen(job: int, context: RankContext) -> tuple[int, int]:
    """How many objects the collector leaves alone before and after a barrier."""
    before = gc.get_freeze_count()
    context.barrier()
    return before, gc.get_freeze_count()


def meet(barriers: int, context: RankContext) -> list[tuple[float, float]]:
    """Go through barriers, each rank a little later than the one before; return the times before and after each."""
    times = []
    for _ in range(barriers):
        time.sleep(0.02 * context.rank)
        before = time.monotonic()
        context.barrier()
        times.append((before, time.monotonic()))
    return times


def tell(values: list[Any], context: RankContext) -> int:
    """Send each value as progress."""
    for value in values:
        context.progress(value)
    return len(values)


def tell_from_threads(count: int, context: RankContext) -> None:
    """Send progress from several threads at once, each message in several writes."""

    def send(thread: int) -> None:
        for number in range(count):
            context.progress((thread, number, bytes([thread]) * 500_000))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write(text: str, _: RankContext) -> None:
    """Write to standard error."""
    sys.stderr.write(text)


def say(text: str, _: RankContext) -> None:
    """Write to standard output, which Python keeps back in a buffer where it is no terminal, and be slow to end."""
    print(text)
    atexit.register(time.sleep, 0.3)


def survive_interrupt(_: None, context: RankContext) -> str:
    """Take a SIGINT, as Ctrl-C sends it to every process of the terminal, and carry on."""
    os.kill(os.getpid(), signal.SIGINT)
    return "survived"


def wait(_: Any, context: RankContext) -> NoReturn:
    """Tell the parent the process number, meet the others, and wait for ever."""
    context.progress(os.getpid())
    context.barrier()
    while True:
        time.sleep(60)


def wait_without_listening(_: Any, context: RankContext) -> NoReturn:
    """As `wait`, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(_, context)


def wait_stopped(_: Any, context: RankContext) -> NoReturn:
    """Tell the parent the process number, meet the others, and be stopped, as by a debugger."""
    context.progress(os.getpid())
    context.barrier()
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("nobody continues this process")


def fail(message: str, context: RankContext) -> NoReturn:
    """Fail as expected, once the others wait."""
    context.barrier()
    raise LoadmasterError(message)


def fail_on_input(message: str, context: RankContext) -> NoReturn:
    """Fail on bad input, once the others wait."""
    context.barrier()
    raise InputError(message)


def exhaust(message: str, context: RankContext) -> NoReturn:
    """Run out of memory, once the others wait."""
    context.barrier()
    raise MemoryError(message)


def fail_unexpectedly(message: str, context: RankContext) -> NoReturn:
    """Raise what nobody foresaw, once the others wait."""
    context.barrier()
    raise ZeroDivisionError(message)


def exit_from_python(code: int, context: RankContext) -> NoReturn:
    """End as a script would, once the others wait."""
    context.barrier()
    sys.exit(code)


def leave(code: int, context: RankContext) -> NoReturn:
    """End at once without a word, as native code may."""
    context.barrier()
    os._exit(code)


def die(number: int, context: RankContext) -> NoReturn:
    """Be killed by a signal, once the others wait."""
    context.barrier()
    kill_self(number)


def die_at_the_sign(orders: tuple[str, str, int], context: RankContext) -> NoReturn:
    """Write the process number into the first file, and be killed by the signal once the second file is there."""
    own, sign, number = orders
    Path(f"{own}.partial").write_text(str(os.getpid()))
    Path(f"{own}.partial").rename(own)
    wait_for_file(sign)
    kill_self(number)


def crash(_: None, context: RankContext) -> NoReturn:
    """Touch memory that is not there, once the others wait."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    context.barrier()
    ctypes.string_at(0)
    raise AssertionError("address 0 is mapped")


def close_and_hang(_: None, context: RankContext) -> NoReturn:
    """Send nothing more to the parent, and live on."""
    context.progress(os.getpid())
    line = socket.socket(fileno=os.dup(context._connection.fileno()))
    line.shutdown(socket.SHUT_WR)
    while True:
        time.sleep(60)


def die_within_a_message(_: None, context: RankContext) -> NoReturn:
    """Be killed with half a message sent."""
    os.write(context._connection.fileno(), struct.pack("!i", 1000) + b"half")
    kill_self(signal.SIGKILL)


def die_with_a_child(kind: str, context: RankContext) -> NoReturn:
    """Be killed while a child of this rank, which a library may have started, lives on and has inherited its files."""
    if kind == "program":
        os.system("sleep 4 & echo $! >&2")
    elif (child := os.fork()) == 0:
        time.sleep(4)
        os._exit(0)
    else:
        sys.stderr.write(f"{child}\n")
    kill_self(signal.SIGKILL)


def return_lambda(_: None, context: RankContext) -> Any:
    """Return what cannot be sent."""
    return lambda: None


class Unreadable:
    """What can be sent and not be received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def return_unreadable(_: None, context: RankContext) -> Any:
    """Return what the parent cannot unpickle."""
    return Unreadable()


def kill_self(number: int) -> NoReturn:
    """Send this process a signal that ends it."""
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), number)
    while True:
        time.sleep(60)
