"""A weights iterator that keeps torch's thread count in step with the share while its caller loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from loadmaster.threads.scope import LoadThreads, Threads, load_threads

__all__ = ["paced"]

_Item = TypeVar("_Item")


def paced(weights: Iterable[_Item], threads: Threads = "auto") -> Iterator[_Item]:
    """Yield the items of ``weights`` within the scope of `load_threads`, whose count follows the share meanwhile.

    Following costs an item one number read from memory and one look at the clock.

    The scope is open from the first item to the last one, or until the iterator is closed or dropped, in the thread
    that iterates; the loop's body runs in it.

    Parameters
    ----------
    weights : iterable
        Such as an engine's iterator of ``(name, tensor)``.
    threads : int or "auto"
        As for `load_threads`; an explicit number does not follow.

    Raises
    ------
    InputError
        ``threads`` is neither ``auto`` nor a positive integer.
    """
    return _paced(weights, load_threads(threads))


def _paced(weights: Iterable[_Item], scope: LoadThreads) -> Iterator[_Item]:
    with scope:
        for item in weights:
            yield item
            scope.follow()
