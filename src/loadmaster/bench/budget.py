"""The time that a bench may take: what does not fit into it is not begun, and what overruns it is stopped."""

from __future__ import annotations

import time

from loadmaster.errors import InputError

__all__ = ["Budget"]

RESERVE = 0.15, 5.0
"""Part of the time, and seconds at the most, that are kept for stopping processes and drawing."""


class Budget:
    """``seconds`` from now on.

    Raises
    ------
    InputError
        Less than a second, in which no process even starts.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 1:
            raise InputError(f"--seconds must be at least 1, not {seconds}")
        part, most = RESERVE
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds - min(part * seconds, most)

    @property
    def left(self) -> float:
        """Seconds that are left, never less than none."""
        return max(0.0, self.deadline - time.monotonic())

    def fits(self, seconds: float) -> bool:
        """Whether something that takes so long would be done in time."""
        return seconds <= self.left

    def portion(self, sections: int) -> Budget:
        """The budget of the next of ``sections`` sections of a bench, which all get as much of what is left."""
        part = Budget(self.seconds)
        part.deadline = time.monotonic() + self.left / sections
        return part

    def part(self, others: int) -> float:
        """Seconds that one arm may take while ``others`` have not had their turn: half of what is left, the last all.

        One arm that collapses can then not keep the others from being measured.
        """
        return self.left / 2 if others else self.left
