"""Which tensors of known architectures a tensor-parallel rank keeps a part of: a table of name patterns.

The words are those of the ``tp_plan`` of Hugging Face transformers (``ParallelInterface``): a pattern of module names
in which ``*`` stands for one component and ``**`` for any number, and a style. A pattern matches the end of a name, so
one row serves ``model.layers.0.self_attn.q_proj`` and ``language_model.model.layers.0.self_attn.q_proj``. What no row
matches is loaded whole by every rank.

    style              weight [out, in]                                      bias [out]
    colwise            rows (dimension -2) in equal blocks                   with its rows
    rowwise            columns (dimension -1) in equal blocks                whole
    packed_colwise     rows of each fused part (gate|up) by itself           with its rows
    packed_rowwise     columns of each fused part by itself                  whole
    embedding_rowwise  vocabulary rows, padded as engines do                 with its rows
    replicate          whole                                                 whole

`placement_of_shard` turns the table into placements; how a dimension is cut is in `sharding`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from loadmaster.errors import InputError

__all__ = ["STYLES", "TP_PLAN", "Style", "TensorParallelPlan", "read_tp_plan"]


class Style(NamedTuple):
    """How the parameters of a module are cut.

    ``weight_dim`` and ``bias_dim`` count from the end and None means whole; ``packed`` parts are cut one by one;
    ``vocabulary`` rows are padded where they do not divide; ``unit`` neighbours along the dimension stay together.
    """

    weight_dim: int | None
    bias_dim: int | None
    packed: bool = False
    vocabulary: bool = False
    unit: int = 1


_COLUMN = Style(-2, -1)
_ROW = Style(-1, None)
_WHOLE = Style(None, None)

STYLES: dict[str, Style] = {
    "colwise": _COLUMN,
    "rowwise": _ROW,
    "packed_colwise": Style(-2, -1, packed=True),
    "packed_rowwise": Style(-1, None, packed=True),
    "embedding_rowwise": Style(-2, -1, vocabulary=True),
    "embedding_colwise": _ROW,
    "replicate": _WHOLE,
    # Banks that keep the input dimension first, [experts, in, out], and gate and up interleaved along out.
    "transposed_rowwise": Style(-2, None),
    "interleaved_transposed_colwise": Style(-1, -1, unit=2),
    # MXFP4: blocks are [experts, out, in / 32, 16] and scales [experts, out, in / 32].
    "interleaved_colwise": Style(-2, -1, unit=2),
    "interleaved_blocks_colwise": Style(-3, -1, unit=2),
    "blocks_rowwise": Style(-2, None),
    "interleaved_bias": Style(-1, -1, unit=2),
    # Words of transformers that differ in communication, not in the part that a rank keeps.
    "colwise_rep": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "local_colwise": _COLUMN,
    "local_packed_colwise": Style(-2, -1, packed=True),
    "rowwise_rep": _ROW,
    "rowwise_split_input": _ROW,
    "local_rowwise": _ROW,
    "replicated": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "sequence_parallel": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "moe_tp_experts": _WHOLE,
    "all_reduce": _WHOLE,
    "gather": _WHOLE,
    "local": _WHOLE,
}

TP_PLAN: dict[str, str] = {
    # Towers of multimodal models have heads of their own, and engines replicate them.
    "vision_tower.**": "replicate",
    "vision_model.**": "replicate",
    "visual.**": "replicate",
    "audio_tower.**": "replicate",
    # Vocabulary.
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    # Attention: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma, Phi, GPT-OSS, DeepSeek without q_lora.
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.dense": "rowwise",  # Phi 1 and 2
    "layers.*.self_attn.qkv_proj": "packed_colwise",  # Phi 3 and 4
    "layers.*.self_attn.sinks": "colwise",  # GPT-OSS: one number per head
    # Multi-head latent attention: DeepSeek V2 and V3.
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    # Feed-forward.
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "packed_colwise",  # Phi 3 and 4
    "layers.*.mlp.fc1": "colwise",  # Phi 1 and 2
    "layers.*.mlp.fc2": "rowwise",
    # Mixtures of experts, a module per expert: Qwen, DeepSeek; Mixtral and Phi-MoE.
    "layers.*.mlp.experts.*.gate_proj": "colwise",
    "layers.*.mlp.experts.*.up_proj": "colwise",
    "layers.*.mlp.experts.*.down_proj": "rowwise",
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
    "layers.*.mlp.shared_experts.gate_proj": "colwise",
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
    "layers.*.block_sparse_moe.experts.*.w1": "colwise",
    "layers.*.block_sparse_moe.experts.*.w3": "colwise",
    "layers.*.block_sparse_moe.experts.*.w2": "rowwise",
    # Mixtures of experts, fused banks. GPT-OSS keeps gate and up interleaved along the cut dimension, so that an even
    # block holds whole pairs; the others keep them as halves, and the shapes tell which of the two a bank is.
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts.gate_up_proj_bias": "interleaved_bias",
    "layers.*.mlp.experts.gate_up_proj_blocks": "interleaved_blocks_colwise",
    "layers.*.mlp.experts.gate_up_proj_scales": "interleaved_colwise",
    "layers.*.mlp.experts.down_proj_blocks": "blocks_rowwise",
    "layers.*.mlp.experts.down_proj_scales": "rowwise",
}
"""The rows of the built-in plan, first match first."""


class TensorParallelPlan:
    """The built-in table with a user's rows before it; finds the style of a tensor by its name.

    Parameters
    ----------
    overrides : mapping of str to str
        Pattern to style, as in `TP_PLAN`; they win over the built-in rows. A number in one stands for itself.

    Raises
    ------
    InputError
        A style that is none of `STYLES`.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        self.overrides = dict(overrides or {})
        for pattern, style in self.overrides.items():
            if style not in STYLES:
                raise InputError(f"tp plan: {pattern!r} has the unknown style {style!r}; known are {', '.join(STYLES)}")
        rows = [*self.overrides.items(), *TP_PLAN.items()]
        self._rows = [(pattern, _compile(pattern), STYLES[style]) for pattern, style in rows]
        self.names_numbers = any(re.search(r"(^|\.)\d+(\.|$)", pattern) for pattern in self.overrides)
        self._found: dict[str, tuple[str, Style] | None] = {}

    def find(self, module: str) -> tuple[str, Style] | None:
        """Return the pattern and style of the first row that matches ``module``, a name without ``.weight``."""
        try:
            return self._found[module]
        except KeyError:
            found = next(((pattern, style) for pattern, regex, style in self._rows if regex.fullmatch(module)), None)
            return self._found.setdefault(module, found)


def _compile(pattern: str) -> re.Pattern[str]:
    """``layers.*.mlp`` matches any name that ends so at a dot; the digits of layers and experts arrive as ``0``."""
    parts = re.split(r"(\*\*|\*)", pattern)
    words = {"**": r".*", "*": r"[^.]+"}
    return re.compile(r"(?:.*\.)?" + "".join(words.get(part, re.escape(part)) for part in parts))


def read_tp_plan(path: str | os.PathLike[str]) -> TensorParallelPlan:
    """Read rows that override the built-in table from a JSON file: an object of patterns and styles."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as refused:
        raise InputError(f"tp plan {path} cannot be read: {refused.strerror or refused}") from None
    except (ValueError, RecursionError) as broken:
        raise InputError(f"tp plan {path} is not valid JSON: {broken}") from None
    if not isinstance(rows, dict) or not all(isinstance(style, str) for style in rows.values()):
        raise InputError(f"tp plan {path} must be an object of name patterns and styles")
    return TensorParallelPlan(rows)
