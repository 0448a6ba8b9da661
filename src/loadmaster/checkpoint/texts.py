"""Many short texts that lie in one buffer, compared all at once and eight bytes at a time.

A header names up to 100,000 tensors. To make a string of each and to look it up takes longer than the kernel takes to
read its tensor; here a column of names is a buffer with two arrays of places, and is told apart by numbers:

    ..."layers.0.mlp.gate.weight":{"dtype"...       starts   [4, ...]     8 bytes from each start on, in the end those
        layers.0                                    stops    [28, ...]    before the stop: a column of numbers each
                .mlp.gate.weight

Numbers mixed out of the columns (hashes) say which texts may be equal, and the columns themselves whether they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Words = NDArray[np.uint64]

__all__ = ["Texts", "decimals", "groups", "word", "words_of"]

_LONG = 1024
"""Texts longer than this are compared by Python, one by one: the work grows with the longest of all."""

_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_FACTOR = np.uint64(0x1E3779B97F4A7C15)  # from the golden ratio: odd, and its bits are spread evenly
_SHIFTS = (np.uint64(32), np.uint64(29))


def words_of(buffer: bytes) -> Words:
    """The 8 bytes from each place of ``buffer`` on as a number, little-endian, without a copy of each.

    Zeros follow the end, as many as a short text may be read beyond its own end.
    """
    padded = buffer + bytes(_LONG + 8)
    words: Words = np.ndarray((len(padded) - 7,), np.dtype("<u8"), padded, 0, (1,))
    return words


def word(text: bytes) -> int:
    """The number that 8 bytes are in `words_of`."""
    assert len(text) == 8
    return int.from_bytes(text, "little")


_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x80) * _ONES
_HIGH_BITS = np.array([0, *(0x80 << 8 * count for count in range(8))], np.uint64)
"""The high bit of each lane by itself, from the first byte on."""


def decimals(words: Words, at: Integers) -> tuple[Integers, Integers]:
    """Parse the decimal number at each place: its value, -1 for what is no plain one, and the place behind it.

    Plain are 1 to 15 digits without a sign or leading zeros. Eight digits are taken at once, as lanes of a number:
    their pairs are joined, then the pairs of these, then the halves.
    """
    value, length = _up_to_eight(words[at])
    more, further = _up_to_eight(words[at + length])
    further = np.where(length == 8, further, 0)
    value = np.where(further > 0, value * _TENS[further] + more, value)
    length = length + further
    behind = at + length
    leading_zero = (words[at] & np.uint64(0xFF) == ord("0")) & (length > 1)
    return np.where((length == 0) | (length == 16) | leading_zero, -1, value), behind


_TENS = 10 ** np.arange(9)


def _up_to_eight(word: Words) -> tuple[Integers, Integers]:
    """The number that the leading digits of 8 bytes make, and how many they are."""
    lanes = word ^ (np.uint64(ord("0")) * _ONES)
    others = ((lanes + np.uint64(0x76) * _ONES) | lanes) & _HIGH  # the high bit where a lane is above 9
    first = others & (~others + np.uint64(1))
    length = np.searchsorted(_HIGH_BITS, first) - 1
    length[first == 0] = 8
    lanes <<= (64 - 8 * np.maximum(length, 1)).astype(np.uint64)  # leading zeros where there are fewer
    for factor, mask, shift in _JOINS:
        lanes = ((lanes & mask) * factor) >> shift
    return np.where(length > 0, lanes.astype(np.int64), 0), length


_JOINS = tuple(
    (np.uint64(10 ** (size) << 8 * size | 1), np.uint64(mask), np.uint64(8 * size))
    for size, mask in ((1, 0x0F0F0F0F0F0F0F0F), (2, 0x00FF00FF00FF00FF), (4, 0x0000FFFF0000FFFF))
)


class Texts:
    """The texts between ``starts`` and ``stops``, int64 arrays of places in ``buffer``, which is UTF-8."""

    def __init__(self, buffer: bytes, starts: Integers, stops: Integers, words: Words | None = None) -> None:
        self.buffer = buffer
        self.starts = starts
        self.stops = stops
        self.words = words_of(buffer) if words is None else words

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Put strings one behind the other."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(b"".join(encoded), ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> str:
        return self.buffer[self.starts[index] : self.stops[index]].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return Texts, (self.buffer, self.starts, self.stops)

    def tolist(self) -> list[str]:
        """Every text as a string."""
        places = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        if self.buffer.isascii():
            whole = self.buffer.decode()
            return [whole[start:stop] for start, stop in places]
        return [self.buffer[start:stop].decode() for start, stop in places]

    def between(self, starts: Integers, stops: Integers) -> Texts:
        """Other texts of the same buffer."""
        return Texts(self.buffer, starts, stops, self.words)

    def take(self, rows: Any) -> Texts:
        """The texts at ``rows``, numbers or a mask."""
        return self.between(self.starts[rows], self.stops[rows])

    @cached_property
    def lengths(self) -> Integers:
        """Bytes of each text."""
        return self.stops - self.starts

    def is_distinct(self) -> bool:
        """Whether no text is there twice."""
        ordered = np.sort(self.hashes)
        return bool(np.all(ordered[1:] != ordered[:-1])) or len(set(self.tolist())) == len(self)

    def are_the_same(self) -> bool:
        """Whether there is one text only, all the time."""
        if self._longest > _LONG:
            return len(set(self.tolist())) <= 1
        return all(bool(np.all(column == column[:1])) for column in (self.lengths, *self._columns()))

    @cached_property
    def hashes(self) -> Words:
        """A number for each text: equal ones for equal texts, and nearly always different ones for others."""
        if self._longest <= _LONG:
            return self._mixed(self._columns())
        short = self.lengths <= _LONG  # hashed as those in other lists are
        result = np.empty(len(self), np.uint64)
        result[short] = self.take(short).hashes
        result[~short] = [hash(text) & 0xFFFF_FFFF_FFFF_FFFF for text in self.take(~short)]
        return result

    def _mixed(self, columns: Iterable[Words]) -> Words:
        """One number out of the columns; those that begin behind the end of a text do not count for it."""
        result = self.lengths.astype(np.uint64)
        for number, column in enumerate(columns):
            mixed = column * (_FACTOR + np.uint64(2 * number))
            for shift in _SHIFTS:  # so that a change in any byte reaches all bits, from the top byte on too
                mixed ^= mixed >> shift
                mixed *= _FACTOR
            mixed ^= mixed >> _SHIFTS[0]
            if 8 * number >= self._shortest:
                mixed *= 8 * number < self.lengths
            result += mixed
        return result

    @cached_property
    def _longest(self) -> int:
        return int(self.lengths.max(initial=0))

    @cached_property
    def _shortest(self) -> int:
        return int(self.lengths.min()) if len(self) else 0

    def _columns(self) -> Iterator[Words]:
        """The texts as numbers of 8 bytes, column by column.

        From where a text has no 8 bytes more it is its last 8; of a text that has less than 8 the others are zero.
        """
        last = np.maximum(self.stops - 8, self.starts)
        for at in range(0, self._longest, 8):
            column = self.words[np.minimum(self.starts + at, last)]
            if self._shortest < 8:
                column &= _MASKS[np.minimum(self.lengths, 8)]
            yield column


def groups(*texts: Texts) -> tuple[Integers, Integers]:
    """Number the different texts, or the different rows of several lists of them.

    Returns the number of each row, and for each number the first row that has it.
    """
    if max(one._longest for one in texts) <= _LONG:
        columns: list[Integers | Words] = []
        mixed = np.zeros(len(texts[0]), np.uint64)
        for one in texts:
            own = list(one._columns())
            columns += [one.lengths, *own]
            mixed = mixed * _FACTOR + one._mixed(own)
        numbers, firsts = _number(mixed)
        like = firsts[numbers]
        if all(np.array_equal(column, column[like]) for column in columns):
            return numbers, firsts
    known: dict[tuple[str, ...], int] = {}  # two texts have one hash: what nobody will see who does not look for it
    rows = zip(*texts, strict=True)
    numbers = np.array([known.setdefault(row, len(known)) for row in rows], np.int64)
    return _number(numbers.astype(np.uint64))


def _number(values: Words) -> tuple[Integers, Integers]:
    """As `numpy.unique` with first places and inverse; three times as fast, since its sort need not be stable."""
    order = np.argsort(values)
    ordered = values[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(values)]
    numbers = np.empty(len(values), np.int64)
    numbers[order] = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    firsts = np.minimum.reduceat(order, starts) if len(starts) else starts
    return numbers, firsts
