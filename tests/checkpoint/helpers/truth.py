"""What each tensor-parallel rank must hold, in plain torch operations on whole tensors.

    part = rows | columns | heads(8) | ...          part(tensor, rank, ranks) -> what that rank keeps

Written from how engines cut a model, and not from our tables: linear layers, whose output is the first dimension, are
cut by rows, those that take a cut input by columns, attention at heads, a vocabulary after it was padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional

Part = Callable[[torch.Tensor, int, int], torch.Tensor]


def whole(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Every rank keeps all of it."""
    return tensor


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """An equal block of the output: the first dimension of a weight, the only one of a bias."""
    return along(0)(tensor, rank, ranks)


def columns(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """An equal block of the input: the last dimension."""
    return along(-1)(tensor, rank, ranks)


def along(dim: int) -> Part:
    """An equal block of one dimension, the numbers of which must divide."""

    def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        assert tensor.shape[dim] % ranks == 0
        return tensor.chunk(ranks, dim)[rank]

    return part


def heads(count: int) -> Part:
    """Whole heads of the first dimension; where ranks outnumber them, each head goes to a group of ranks."""

    def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        by_head = tensor.unflatten(0, (count, -1))
        if count < ranks:
            by_head = by_head.repeat_interleave(ranks // count, 0)
        return by_head.chunk(ranks)[rank].flatten(0, 1)

    return part


def fused(*parts: tuple[int, Part]) -> Part:
    """Several projections in one, of so many parts each (``fused((8, q), (2, k), (2, v))``), each cut by itself."""
    total = sum(size for size, _ in parts)

    def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        unit = tensor.shape[0] // total
        pieces = tensor.split([size * unit for size, _ in parts])
        return torch.cat([cut(piece, rank, ranks) for (_, cut), piece in zip(parts, pieces, strict=True)])

    return part


def query_key_value(query: int, key: int) -> Part:
    """A fused projection of so many query heads, and as many key heads as value heads."""
    return fused((query, heads(query)), (key, heads(key)), (key, heads(key)))


def halves(dim: int) -> Part:
    """Gate and up, one after the other along ``dim``, each cut by itself."""

    def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        return torch.cat([along(dim)(half, rank, ranks) for half in tensor.chunk(2, dim)], dim)

    return part


def pairs(dim: int) -> Part:
    """Gate and up in turns along ``dim``: the pairs stay together."""

    def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        by_pair = tensor.unflatten(dim, (-1, 2))
        return along(dim if dim >= 0 else dim - 1)(by_pair, rank, ranks).flatten(
            *((dim, dim + 1) if dim >= 0 else (dim - 1, dim))
        )

    return part


def vocabulary(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Rows of a vocabulary; one that does not divide is filled with zeros to a multiple of 64 that does."""
    count = tensor.shape[0]
    if count % ranks:
        multiple = 64 * ranks // math.gcd(64, ranks)
        missing = -count % multiple
        bits = tensor.view(torch.uint8).reshape(count, -1)
        padded = torch.nn.functional.pad(bits, (0, 0, 0, missing))
        tensor = padded.view(tensor.dtype).reshape(count + missing, *tensor.shape[1:])
    return tensor.chunk(ranks)[rank]
