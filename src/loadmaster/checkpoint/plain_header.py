"""The quick way through a header as all writers write it: no blanks, the usual fields in their order, nothing escaped.

Ten quotes a tensor, at fixed distances from each other but for the name, the dtype, the shape and the two numbers:

    "model.norm.weight":{"dtype":"BF16","shape":[4096],"data_offsets":[0,8192]},"...
    0                 1  2     3 4    5 6     7        8            9          next 0

so that a header is a table before anything of it has become an object. Whatever differs, right or wrong, is left to
the thorough way (`safetensors._parse_any`): this one never says that a header is broken.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from loadmaster.checkpoint.dtypes import DTYPES
from loadmaster.checkpoint.table import Kind, TensorTable
from loadmaster.checkpoint.texts import Texts, decimals, groups, word

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Words = NDArray[np.uint64]

__all__ = ["parse_plain"]

_METADATA = b'{"__metadata__":'
_QUOTE, _COMMA = b'",'
_BYTE = np.uint64(0xFF)

_LONG = 1 << 16
"""Metadata longer than this, and as many blanks at the end, are read the thorough way."""

_LITERALS = tuple(
    (quote, distance, word(text))
    for quote, distance, text in (
        (1, 0, b'":{"dtyp'),
        (1, 3, b'"dtype":'),
        (8, -2, b'],"data_'),
        (8, 1, b"data_off"),
        (9, -5, b'fsets":['),
    )
)
"""What stands at a distance from a quote of every tensor. Dtype and shape with what is between them are one text, of
which there are few: `_kind_of` looks at it."""

_DISTANCES = ((3, 4, 2), (8, 9, 13))
"""Pairs of quotes and how far they are apart, where no literal tells it."""

_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_SHAPE = re.compile(rf"(?:{_SIZE}(?:,{_SIZE})*)?")


def parse_plain(file: str, text: bytes) -> tuple[TensorTable, dict[str, str]] | None:
    """Parse the header ``text``; None where it is not as writers write it.

    What is found is complete but for how the tensors follow each other in the file, which `parse_header` checks.
    """
    found = _split_metadata(text)
    if found is None:
        return None
    metadata, start, stop = found
    quotes = np.flatnonzero(np.frombuffer(text, np.uint8) == _QUOTE)
    quotes = quotes[np.searchsorted(quotes, start) :]
    if not len(quotes) or len(quotes) % 10:
        return None
    places = quotes.reshape(-1, 10).T
    names = Texts(text, places[0] + 1, places[1])
    numbers = _numbers_of(text, names.words, places, start, stop)
    if numbers is None or "__metadata__" in names.take(names.lengths == len("__metadata__")):
        return None
    begin, end = numbers
    described = names.between(places[4] + 1, places[8] - 2)
    kind, firsts = groups(described)
    try:
        kinds = [_kind_of(described[int(first)]) for first in firsts]
    except (KeyError, ValueError):
        return None
    table = TensorTable(file, names, kinds, kind, begin + (8 + len(text)))
    if not np.array_equal(end - begin, table.num_bytes) or not names.is_distinct():
        return None
    order = np.lexsort((table.num_bytes, begin))
    return table.take(order), metadata


def _split_metadata(text: bytes) -> tuple[dict[str, str], int, int] | None:
    """Metadata, the place of the first tensor's quote, and that behind the last one's brace."""
    if not text.isascii():
        return None
    metadata: Any = {}
    start = 1
    if text.startswith(_METADATA):
        try:
            decoder = json.JSONDecoder(object_pairs_hook=list, parse_constant=_refuse)
            pairs, start = decoder.raw_decode(text[:_LONG].decode(), len(_METADATA))
            metadata = dict(pairs)
        except (ValueError, TypeError, RecursionError):
            return None
        strings = all(type(key) is type(value) is str for key, value in metadata.items())
        # An escaped code may be half a character; a list of pairs in JSON looks like an object here.
        if not strings or len(metadata) != len(pairs) or b"\\u" in text[:start] or text[start - 1 : start] != b"}":
            return None
        start += 1
    end = text[-_LONG:]
    stop = len(text) - (len(end) - len(end.rstrip(b" "))) - 1
    opened = text[start - 1 : start] == (b"{" if start == 1 else b",")
    closed = text[stop - 2 : stop + 1] == b"]}}"
    return (metadata, start, stop) if opened and closed and text.find(b"\\", start) < 0 else None


def _refuse(word: str) -> None:
    raise ValueError(word)


def _numbers_of(text: bytes, words: Words, places: Integers, start: int, stop: int) -> tuple[Integers, Integers] | None:
    """The two data offsets of each tensor, given the places of its quotes; None if what is around them is not plain."""
    if any(np.any(places[b] - places[a] != distance) for a, b, distance in _DISTANCES):
        return None
    if any(np.any(words[places[quote] + distance] != literal) for quote, distance, literal in _LITERALS):
        return None
    if np.frombuffer(text, np.uint8)[start:].min() < 0x20 or places[0][0] != start:
        return None
    begin, comma = decimals(words, places[9] + 3)
    end, bracket = decimals(words, comma + 1)
    closes = np.append(places[0][1:] - 3, stop - 2)  # "]}," and the next tensor
    if np.any(words[comma] & _BYTE != _COMMA) or not np.array_equal(bracket, closes):
        return None
    behind = words[closes[:-1]] & np.uint64(0xFFFFFF)
    if np.any(behind != int.from_bytes(b"]},", "little")) or np.any(begin < 0) or np.any(end < 0):
        return None
    return begin, end


def _kind_of(described: str) -> Kind:
    """The kind in ``BF16","shape":[4096,1024``; ValueError or KeyError where there is anything to say about it."""
    dtype, shape = described.split('","shape":[')
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    bits = math.prod(sizes) * DTYPES[dtype].bits
    # The product, also before a zero, must fit 64 bits for the reference; here it fits without a look at the order.
    if not _SHAPE.fullmatch(shape) or bits & 7 or math.prod(max(size, 1) for size in sizes) >= 1 << 59:
        raise ValueError(shape)
    return Kind(dtype, sizes, bits >> 3)
