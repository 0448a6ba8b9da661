"""The part of each tensor that one tensor-parallel rank keeps: the plan's styles applied to the checkpoint's shapes.

    name -> (module, parameter) -> style -> dimension -> parts -> moves
    ...q_proj.weight   q_proj, weight   colwise   0       heads   rows 1024..2048 -> 0
    ...qkv_proj.weight                  packed    0       q|k|v   one move per part

Attention is cut at heads, whose numbers come from ``config.json``; without them a dimension is cut in equal blocks.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadmaster.checkpoint.folder import Checkpoint
from loadmaster.checkpoint.placement import Move, Placement, converted_dtype
from loadmaster.checkpoint.table import Entry
from loadmaster.checkpoint.tensor_parallel import STYLES, Style, TensorParallelPlan
from loadmaster.errors import InputError, PlacementError

__all__ = ["Shard", "place_shard"]

_log = logging.getLogger(__name__)

VOCABULARY_PADDING = 64
"""Engines pad the vocabulary to such a multiple before they divide it (``DEFAULT_VOCAB_PADDING_SIZE`` of vLLM)."""

FP8_BLOCK = 128
"""Rows and columns that share one ``weight_scale_inv`` where config.json has no ``weight_block_size`` (DeepSeek-V3)."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WEIGHTS = {"weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"}
_QUERY_LIKE = {"q_proj", "q_b_proj", "kv_b_proj", "o_proj", "dense", "sinks"}
_KEY_LIKE = {"k_proj", "v_proj"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's tensor-parallel part of a model.

    Parameters
    ----------
    rank, ranks : int
        This rank, from 0, and how many there are.
    plan : TensorParallelPlan
        The table of patterns and styles; default the built-in one.
    """

    rank: int
    ranks: int
    plan: TensorParallelPlan = field(default_factory=TensorParallelPlan)

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise InputError(f"rank {self.rank} of {self.ranks} ranks does not exist")


class _Part(NamedTuple):
    """A part of a dimension: rows, heads in them where known, and whether ranks may share a head."""

    size: int
    heads: int | None = None
    shared: bool = False


class _Heads(NamedTuple):
    """Attention heads of the model, None where config.json does not say."""

    query: int | None
    key: int | None
    fp8_block: tuple[int, int]


def place_shard(checkpoint: Checkpoint, shard: Shard, dtype: str | None = None) -> list[Placement]:
    """Return a placement for every tensor of ``checkpoint``: the part that ``shard`` keeps, or the whole.

    Parameters
    ----------
    dtype : str, optional
        The safetensors dtype that plain floating-point tensors become.

    Raises
    ------
    PlacementError
        A dimension that does not divide among the ranks; names the tensor. Vocabulary rows are padded instead.
    """
    sharder = _Sharder(checkpoint, shard)
    placements = [
        Placement(entry, name, converted_dtype(entry, dtype), *sharder.cut(entry)) for name, entry in checkpoint.items()
    ]
    sharder.warn_about_rows_without_effect()
    return placements


class _Sharder:
    """Applies one shard's plan; remembers the cut of each (module pattern, shape), of which a model has few."""

    def __init__(self, checkpoint: Checkpoint, shard: Shard) -> None:
        self.checkpoint = checkpoint
        self.shard = shard
        self.heads = _heads_of(checkpoint.config)
        self.used_patterns: set[str] = set()
        # Layers and experts of one shape are alike, unless a row of the user's names a number.
        self._pattern_of = str if shard.plan.names_numbers else lambda name: _NUMBER.sub("0", name)
        self._cuts: dict[tuple[str, tuple[int, ...], str], tuple[tuple[int, ...], tuple[Move, ...]]] = {}

    def cut(self, entry: Entry) -> tuple[tuple[int, ...], tuple[Move, ...]]:
        """Return the target's shape and moves; no moves where the rank keeps the whole."""
        key = (self._pattern_of(entry.name), entry.shape, entry.dtype)
        known = self._cuts.get(key)
        if known is None:
            known = self._cuts[key] = self._cut(entry)
        return known

    def _cut(self, entry: Entry) -> tuple[tuple[int, ...], tuple[Move, ...]]:
        shape = entry.storage_shape
        module, parameter = _split(entry.name)
        found = self.shard.plan.find(self._pattern_of(module))
        if found is None:
            return shape, ()
        pattern, style = found
        self.used_patterns.add(pattern)
        style = self._style_of_bank(entry, style)
        dim = _dimension(style, parameter, shape)
        if dim is None or self.shard.ranks == 1:
            return shape, ()
        if parameter == "weight_scale_inv":
            return self._cut_block_scale(entry, module, dim)
        return self._cut_dimension(entry, module.rpartition(".")[2], style, dim)

    def _style_of_bank(self, entry: Entry, style: Style) -> Style:
        """A bank [experts, in, out] is told from [experts, out, in] by the shape of the projection beside it."""
        if len(entry.shape) != 3 or not entry.name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return style
        folder = entry.name.rpartition(".")[0]
        gate_up, down = self.checkpoint.get(f"{folder}.gate_up_proj"), self.checkpoint.get(f"{folder}.down_proj")
        if gate_up is None or down is None or len(gate_up.shape) != 3 or len(down.shape) != 3:
            return style
        if gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]:
            return STYLES["interleaved_transposed_colwise" if entry is gate_up else "transposed_rowwise"]
        return style

    def _cut_dimension(
        self, entry: Entry, leaf: str, style: Style, dim: int
    ) -> tuple[tuple[int, ...], tuple[Move, ...]]:
        shape = entry.storage_shape
        if style.vocabulary or (leaf == "lm_head" and style.weight_dim == -2):
            return _replace(shape, dim, *self._vocabulary(shape[dim], dim))
        moves = []
        at = begin = 0
        for part in self._parts(entry, leaf, style, shape[dim]):
            start, stop = self._block(entry, dim, part, style.unit)
            moves.append(Move(dim, begin + start, begin + stop, at))
            at += stop - start
            begin += part.size
        return _replace(shape, dim, at, moves)

    def _vocabulary(self, rows: int, dim: int) -> tuple[int, list[Move]]:
        ranks, rank = self.shard.ranks, self.shard.rank
        multiple = math.lcm(VOCABULARY_PADDING, ranks)
        padded = rows if rows % ranks == 0 else math.ceil(rows / multiple) * multiple
        size = padded // ranks
        start = min(rows, rank * size)
        return size, [Move(dim, start, min(rows, start + size), 0)]

    def _parts(self, entry: Entry, leaf: str, style: Style, size: int) -> list[_Part]:
        """Split a dimension into the parts that are fused in it."""
        query, key = self.heads.query, self.heads.key
        if leaf == "qkv_proj":
            if query is None or key is None or size % (query + 2 * key):
                raise PlacementError(
                    f"tensor {entry.name!r}: {size} rows of fused query, key and value need num_attention_heads and "
                    f"num_key_value_heads of config.json to be divided, and it says {query} and {key}"
                )
            head = size // (query + 2 * key)
            return [_Part(query * head, query), _Part(key * head, key, True), _Part(key * head, key, True)]
        if style.packed:
            if size % 2:
                raise PlacementError(f"tensor {entry.name!r}: {size} rows do not hold two fused parts of one size")
            return [_Part(size // 2), _Part(size // 2)]
        if leaf in _QUERY_LIKE and query is not None and size % query == 0:
            return [_Part(size, query)]
        if leaf in _KEY_LIKE and key is not None and size % key == 0:
            return [_Part(size, key, True)]
        return [_Part(size)]

    def _block(self, entry: Entry, dim: int, part: _Part, unit: int) -> tuple[int, int]:
        """This rank's block of a part: whole heads where they are known; few KV heads go to groups of ranks."""
        rank, ranks = self.shard.rank, self.shard.ranks
        size, heads, shared = part
        if heads is not None and shared and heads < ranks and ranks % heads == 0:
            head = size // heads
            index = rank * heads // ranks
            return index * head, (index + 1) * head
        if (heads is not None and heads % ranks) or size % (ranks * unit):
            counted = (
                f"{heads} heads" if heads is not None else f"{size // unit} gate-up pairs" if unit == 2 else f"{size}"
            )
            raise PlacementError(
                f"tensor {entry.name!r} of shape {list(entry.shape)}: {counted} along dimension {dim} "
                f"do not divide among {ranks} ranks"
            )
        step = size // ranks
        return rank * step, (rank + 1) * step

    def _cut_block_scale(self, entry: Entry, module: str, dim: int) -> tuple[tuple[int, ...], tuple[Move, ...]]:
        """Scales of square blocks follow the rows or columns of their weight, which must fall on block borders."""
        weight = self.checkpoint.get(f"{module}.weight")
        if weight is None or len(weight.shape) != len(entry.shape):
            raise PlacementError(f"tensor {entry.name!r} scales {module}.weight, which the checkpoint does not hold")
        moves = self.cut(weight)[1]
        block = self.heads.fp8_block[dim - len(entry.shape)] if len(entry.shape) >= 2 else FP8_BLOCK
        if not moves:
            return entry.storage_shape, ()
        scaled, at = [], 0
        for move in moves:
            if move.start % block or (move.stop % block and move.stop != weight.shape[dim]):
                raise PlacementError(
                    f"tensor {entry.name!r}: rows {move.start} to {move.stop} of its weight do not end on blocks of "
                    f"{block} when divided among {self.shard.ranks} ranks"
                )
            start, stop = move.start // block, math.ceil(move.stop / block)
            scaled.append(Move(dim, start, stop, at))
            at += stop - start
        return _replace(entry.storage_shape, dim, at, scaled)

    def warn_about_rows_without_effect(self) -> None:
        """A row of the user's that matched nothing, and a plan that matched nothing at all, are said once."""
        for pattern in self.shard.plan.overrides:
            if pattern not in self.used_patterns:
                _log.warning("tp plan: %r matches no tensor of %s", pattern, self.checkpoint.path)
        if self.shard.ranks > 1 and self.checkpoint and not any(moves for _, moves in self._cuts.values()):
            _log.warning(
                "no tensor-parallel rule applies to %s: each of %d ranks loads the whole",
                self.checkpoint.path,
                self.shard.ranks,
            )


def _heads_of(config: Mapping[str, Any]) -> _Heads:
    text = config.get("text_config")
    model: Mapping[str, Any] = text if isinstance(text, dict) else config
    query = _positive(model.get("num_attention_heads"))
    key = _positive(model.get("num_key_value_heads")) or query
    quantization = model.get("quantization_config") or config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(block, list) and len(block) == 2 and _positive(block[0]) and _positive(block[1]):
        return _Heads(query, key, (block[0], block[1]))
    return _Heads(query, key, (FP8_BLOCK, FP8_BLOCK))


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and parameter; a bare parameter, such as a bank, is its own module."""
    module, _, last = name.rpartition(".")
    if module and (last in _WEIGHTS or last == "bias"):
        return module, last
    return name, "weight"


def _dimension(style: Style, parameter: str, shape: Sequence[int]) -> int | None:
    """The dimension to cut, from 0; None where the tensor is kept whole, as scalars and per-tensor scales are."""
    from_end = style.bias_dim if parameter == "bias" else style.weight_dim
    if from_end is None or math.prod(shape) <= 1:
        return None
    dim = max(0, len(shape) + from_end)
    if parameter in ("weight", "bias"):
        return dim
    # The scales of a weight that is cut by columns: one per row stays whole, as does one for all columns.
    of_rows = from_end == -1 and len(shape) < 2
    return None if of_rows or shape[dim] == 1 else dim


def _replace(
    shape: tuple[int, ...], dim: int, size: int, moves: Sequence[Move]
) -> tuple[tuple[int, ...], tuple[Move, ...]]:
    return (*shape[:dim], size, *shape[dim + 1 :]), tuple(moves)
