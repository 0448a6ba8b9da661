"""Arms that take turns: every repetition has one of each, so that a noisy moment of the machine meets all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadmaster.bench.budget import Budget
from loadmaster.bench.limit import LimitStoppedError
from loadmaster.bench.record import ArmResult

__all__ = ["CannotError", "StoppedError", "Turn", "take_turns", "warm_page_cache"]


class StoppedError(Exception):
    """An arm overran its time; ``after`` are the seconds that it had been at its work."""

    def __init__(self, after: float) -> None:
        super().__init__()
        self.after = after


class CannotError(Exception):
    """An arm cannot run here; says why."""


@dataclass
class Turn:
    """One arm, or the limit, which takes its turn in every repetition; ``cannot`` is why it takes none."""

    name: str
    what: str
    measure: Callable[[float], float]
    cannot: str = ""
    seconds: list[float] = field(default_factory=list)
    stopped_after: float | None = None

    @property
    def over(self) -> bool:
        """Whether it takes no more turns: it was stopped once, or cannot run."""
        return bool(self.cannot) or self.stopped_after is not None

    def take(self, files: Sequence[str], timeout: float) -> None:
        """Measure once, in at most ``timeout`` seconds."""
        begin = time.monotonic()
        if timeout <= 0 or not warm_page_cache(files, begin + timeout):
            if not self.seconds:
                self.stopped_after = 0.0
            return
        warmed = time.monotonic()
        try:
            self.seconds.append(self.measure(begin + timeout - warmed))
        except StoppedError as stopped:
            self.stopped_after = stopped.after
        except LimitStoppedError:
            self.stopped_after = time.monotonic() - warmed
        except CannotError as reason:
            self.cannot = str(reason)

    def result(self, num_bytes: int, tensors: int) -> ArmResult:
        """What all its turns have given."""
        return ArmResult(
            name=self.name,
            what=self.what,
            seconds=self.seconds,
            num_bytes=num_bytes,
            tensors=tensors,
            stopped_after=self.stopped_after,
        )


def take_turns(
    turns: Sequence[Turn], files: Sequence[str], repeat: int, budget: Budget, on_step: Callable[[str], None] | None
) -> None:
    """Let all ``turns`` measure ``repeat`` times, interleaved.

    No repetition is begun that would not fit into the budget, judged by the one before; what overruns it is stopped.
    """
    took = 0.0
    for number in range(repeat):
        if number and not budget.fits(took):
            break
        begin = time.monotonic()
        for index, turn in enumerate(turns):
            if turn.over:
                continue
            if on_step is not None:
                on_step(f"{turn.name}, {number + 1} of {repeat}")
            turn.take(files, budget.part(0 if number else len(turns) - index - 1))
        took = time.monotonic() - begin


def warm_page_cache(files: Sequence[str], deadline: float = math.inf) -> bool:
    """Read all files once, so that every repetition finds its bytes in memory, as the arm before it did.

    Returns whether that was done before ``deadline`` of the monotonic clock.
    """
    scratch = memoryview(bytearray(8 << 20))
    for file in files:
        with Path(file).open("rb", buffering=0) as stream:
            while stream.readinto(scratch):
                if time.monotonic() > deadline:
                    return False
    return True
