"""What the fetchers of an actor system have fetched, put together in the process that asked for it.

Each has fetched its part into memory of its own and returned handles; here they become one mapping of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from loadmaster.errors import FetchError
from loadmaster.fetch.deal import Place
from loadmaster.fetch.shared_memory import ArenaHandle, SharedArena
from loadmaster.fetch.weights import Weights
from loadmaster.fetch.worker import FetchedPart
from loadmaster.observe.fetch_report import FetchReport

__all__ = ["weights_of"]


def weights_of(parts: Sequence[FetchedPart], *, seconds: float | None = None) -> Weights:
    """Open what the fetchers of an actor system have fetched: all tensors of one version, in place.

    Every arena is mapped once, at once, so that the weights last until they are closed, whatever becomes of the
    fetchers. The names come in natural order (``layers.2`` before ``layers.10``), however many fetchers there were.

    Parameters
    ----------
    parts : sequence of FetchedPart
        One of each fetcher of this host, in any order.
    seconds : float, optional
        What the fetch took, for the report; without it the time of the slowest fetcher.

    Raises
    ------
    FetchError
        A part is missing, the parts are of several versions, or a name comes twice.
    SharedMemoryError
        A fetcher is gone, or has given the memory back for newer versions.
    """
    parts = sorted(parts, key=lambda part: part.report.fetcher)
    _check_parts(parts)
    numbers: dict[ArenaHandle, int] = {}
    places: dict[str, Place] = {}
    for part in parts:
        for name, handle in part.handles.items():
            if name in places:
                raise FetchError(
                    f"tensor {name!r} came from two fetchers, so they saw different tensors in version "
                    f"{part.version}; the source changed meanwhile, fetch it again"
                )
            arena = numbers.setdefault(handle.arena, len(numbers))
            places[name] = Place(arena, handle.offset, handle.dtype, handle.shape)
    reports = [part.report for part in parts]
    report = FetchReport(
        version=parts[0].version,
        tensors=len(places),
        num_bytes=sum(row.num_bytes for row in reports),
        seconds=max(sum(row.seconds.values()) for row in reports) if seconds is None else seconds,
        fetchers=reports,
    )
    arenas = [handle.open() for handle in numbers]
    in_order = {name: places[name] for name in sorted(places, key=_natural)}
    return Weights(in_order, tuple(arenas), report, _closer(arenas))


def _check_parts(parts: Sequence[FetchedPart]) -> None:
    if not parts:
        raise FetchError("there are no weights without the part of at least one fetcher")
    versions = list(dict.fromkeys(part.version for part in parts))
    if len(versions) > 1:
        listed = " and ".join(str(version) for version in versions)
        raise FetchError(f"parts of versions {listed} cannot be put together; fetch one version from all fetchers")
    if len({part.digest for part in parts}) > 1:
        raise FetchError(
            f"the fetchers saw different tensors in version {versions[0]}; the source changed meanwhile, fetch it again"
        )
    found = [part.report.fetcher for part in parts]
    for number, fetcher in enumerate(found):
        if fetcher != number:
            wrong = f"fetcher {fetcher} gave two parts" if fetcher < number else _missing(number)
            raise FetchError(f"{wrong} of version {versions[0]}: one part of each fetcher is needed")
    if len(found) < parts[0].fetchers:
        raise FetchError(f"{_missing(len(found))} of version {versions[0]}: one part of each fetcher is needed")


def _missing(fetcher: int) -> str:
    return f"the part of fetcher {fetcher} is missing"


_DIGITS = re.compile(r"(\d+)")


def _natural(name: str) -> list[Any]:
    """Sorts numbers in a name by their value. Split by digits, every second piece is a number."""
    pieces: list[Any] = _DIGITS.split(name)
    pieces[1::2] = map(int, pieces[1::2])
    return pieces


def _closer(arenas: list[SharedArena]) -> Callable[[], bool]:
    """What `Weights.close` calls: closes the arenas, which are its own, and forgets them; whether all are unmapped."""

    def give_back() -> bool:
        free = [arena.close() for arena in arenas]
        arenas.clear()
        return all(free)

    return give_back
