"""The arenas of a pool of fetchers: at most two versions are in memory, and what is given back may be used again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from loadmaster.errors import FetchError
from loadmaster.fetch.shared_memory import SharedArena, check_available

__all__ = ["VERSIONS_IN_MEMORY", "ArenaKeeper", "KeyedArena"]

VERSIONS_IN_MEMORY = 2
"""The one that is served and the one that is prefetched."""


class KeyedArena(NamedTuple):
    """An arena and its number, by which the fetchers know it."""

    key: int
    arena: SharedArena


class ArenaKeeper:
    """Hands out the arenas of a version and takes them back; for any thread.

    Parameters
    ----------
    keeps : bool
        Whether the memory of one version that was given back stays for the next one: reading into memory that was
        touched before is about three times as fast.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._lock = threading.RLock()  # the collector may close weights while this very thread holds it
        self._taken: list[tuple[int | None, list[KeyedArena]]] = []
        self._spare: list[KeyedArena] = []
        self._stale: list[int] = []
        self._next = 0

    def take(self, version: int | None, sizes: Sequence[int]) -> list[KeyedArena]:
        """Return an arena for each of ``sizes``.

        Raises
        ------
        FetchError
            Two versions are in memory already.
        SharedMemoryError
            The memory is not to be had.
        """
        with self._lock:
            if len(self._taken) >= VERSIONS_IN_MEMORY:
                those = " and ".join(str(taken) for taken, _ in self._taken)
                raise FetchError(
                    f"versions {those} are still in memory; close one of them before version {version} is fetched"
                )
            spare, self._spare = self._spare, []
            fits = len(spare) == len(sizes) and all(
                one.arena.num_bytes >= size for one, size in zip(spare, sizes, strict=True)
            )
            if not fits:
                self._let_go(spare)
                check_available(sum(sizes), f"the weights of version {version}")
                spare = self._make(sizes)
            self._taken.append((version, spare))
            return spare

    def _make(self, sizes: Sequence[int]) -> list[KeyedArena]:
        made: list[KeyedArena] = []
        try:
            for size in sizes:
                made.append(KeyedArena(self._next, SharedArena.create(size)))
                self._next += 1
        except BaseException:
            self._let_go(made)
            raise
        return made

    def give_back(self, arenas: list[KeyedArena], complete: bool = True) -> bool:
        """Take the arenas of a version back; whether nobody in this process uses them any more.

        Those of a version that was given up are never used again: a fetcher may still be writing to them.
        """
        with self._lock:
            self._taken = [row for row in self._taken if row[1] is not arenas]
            keeps = self._keeps and complete and not self._spare
            if keeps and all(one.arena.remap() for one in arenas):
                self._spare = arenas
                return True
            return self._let_go(arenas)

    def _let_go(self, arenas: Sequence[KeyedArena]) -> bool:
        self._stale += [one.key for one in arenas]
        free = [one.arena.close() for one in arenas]
        return all(free)

    def stale(self) -> list[int]:
        """The numbers of arenas that are no more, once each: fetchers have to let them go too."""
        with self._lock:
            stale, self._stale = self._stale, []
        return stale

    def close(self) -> None:
        """Let go of what is spare, now and from now on."""
        with self._lock:
            self._keeps = False
            self._let_go(self._spare)
            self._spare = []
