"""Small models of every architecture: their real tensor names, shapes, and the part that each rank keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .files import random_tensor
from .truth import Part, along, columns, halves, heads, pairs, query_key_value, rows, vocabulary, whole

LAYER = "model.layers.11."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
ONE, TWO, FOUR, EIGHT = 1, 2, 4, 8

Rows = dict[str, tuple[tuple[int, ...], Part]]


class Architecture(NamedTuple):
    """Its config.json, the shape and the part of every tensor, dtypes that are not BF16, and ranks that divide it."""

    config: Mapping[str, Any]
    tensors: Rows
    dtypes: Mapping[str, torch.dtype] = {}
    ranks: tuple[int, ...] = (ONE, TWO, FOUR, EIGHT)

    def made(self) -> dict[str, torch.Tensor]:
        """The tensors, with random values."""
        return {
            name: random_tensor(shape, self.dtypes.get(name, torch.bfloat16), seed=number)
            for number, (name, (shape, _)) in enumerate(self.tensors.items())
        }


def attention(query: int, key: int, size: int, hidden: int, *, bias: bool = False) -> Rows:
    """Query, key and value by heads; the output projection by columns, its bias whole."""
    names = {"q_proj": query, "k_proj": key, "v_proj": key}
    rows_: Rows = {f"{ATTENTION}{name}.weight": ((count * size, hidden), heads(count)) for name, count in names.items()}
    if bias:
        rows_ |= {f"{ATTENTION}{name}.bias": ((count * size,), heads(count)) for name, count in names.items()}
    return {**rows_, ATTENTION + "o_proj.weight": ((hidden, query * size), columns)}


def feed_forward(prefix: str, inner: int, hidden: int) -> Rows:
    """Gate and up by rows, down by columns."""
    return {
        prefix + "gate_proj.weight": ((inner, hidden), rows),
        prefix + "up_proj.weight": ((inner, hidden), rows),
        prefix + "down_proj.weight": ((hidden, inner), columns),
    }


def outside(vocabulary_rows: int, hidden: int) -> Rows:
    """Embedding, output head, norms."""
    return {
        "model.embed_tokens.weight": ((vocabulary_rows, hidden), vocabulary),
        LAYER + "input_layernorm.weight": ((hidden,), whole),
        LAYER + "post_attention_layernorm.weight": ((hidden,), whole),
        "model.norm.weight": ((hidden,), whole),
        "lm_head.weight": ((vocabulary_rows, hidden), vocabulary),
    }


def config(query: int, key: int | None, **more: Any) -> dict[str, Any]:
    """Numbers of heads as config.json gives them."""
    return {"num_attention_heads": query, **({} if key is None else {"num_key_value_heads": key}), **more}


def _experts(prefix: str, count: int, inner: int, hidden: int) -> Rows:
    """A module for each expert."""
    merged: Rows = {}
    for expert in range(count):
        merged |= feed_forward(f"{prefix}{expert}.", inner, hidden)
    return merged


def _with_scales(weights: Rows, suffix: str, block: int) -> Rows:
    """Block scales beside the weights: a block of rows and columns each, cut as its weight is."""
    scales: Rows = {}
    for name, (shape, part) in weights.items():
        blocks = tuple(-(-size // block) for size in shape)
        scales[name.replace(".weight", suffix)] = (blocks, rows if part is not columns and part is not whole else part)
    return {**weights, **scales}


_LATENT = {
    ATTENTION + "q_a_proj.weight": ((128, 256), whole),
    ATTENTION + "q_b_proj.weight": ((8 * 192, 128), heads(8)),
    ATTENTION + "kv_a_proj_with_mqa.weight": ((192, 256), whole),
    ATTENTION + "kv_b_proj.weight": ((8 * 256, 128), heads(8)),
    ATTENTION + "o_proj.weight": ((256, 8 * 128), columns),
}
_DEEPSEEK_BLOCKS: Rows = {
    **_with_scales(_LATENT, ".weight_scale_inv", 128),
    **_with_scales(feed_forward(MLP + "experts.7.", 1024, 256), ".weight_scale_inv", 128),
    **_with_scales(feed_forward(MLP + "shared_experts.", 1024, 256), ".weight_scale_inv", 128),
}

_GPT_OSS_ATTENTION: Rows = {
    **attention(8, 2, 8, 64, bias=True),
    ATTENTION + "o_proj.bias": ((64,), whole),
    ATTENTION + "sinks": ((8,), heads(8)),
    MLP + "router.weight": ((4, 64), whole),
    MLP + "router.bias": ((4,), whole),
}
_NVFP4: Rows = {}
for _name, (_shape, _part) in feed_forward(MLP + "experts.3.", 256, 128).items():
    _module = _name.removesuffix(".weight")
    _NVFP4 |= {
        _module + ".weight": ((_shape[0], _shape[1] // 2), _part),
        _module + ".weight_scale": ((_shape[0], _shape[1] // 16), _part),
        _module + ".weight_scale_2": ((), whole),
        _module + ".input_scale": ((), whole),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama, a key-value head for each rank": Architecture(
        config(8, 8), {**outside(64, 32), **attention(8, 8, 4, 32), **feed_forward(MLP, 48, 32)}
    ),
    "llama, grouped queries on two key-value heads": Architecture(
        config(16, 2), {**outside(128, 32), **attention(16, 2, 4, 32), **feed_forward(MLP, 48, 32)}
    ),
    "llama, one key-value head for all": Architecture(config(8, 1), attention(8, 1, 4, 32)),
    "llama without num_key_value_heads": Architecture(config(8, None), attention(8, 8, 4, 32)),
    "a multimodal model with its numbers in text_config": Architecture(
        {"num_attention_heads": 3, "text_config": config(8, 2), "vision_config": config(3, 3)},
        {
            "language_model." + name: row
            for name, row in {**attention(8, 2, 4, 32), **feed_forward(MLP, 48, 32), **outside(64, 32)}.items()
        }
        | {
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": ((9, 9), whole),
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias": ((9,), whole),
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": ((9, 9), whole),
            "model.vision_tower.encoder.layers.1.mlp.fc2.weight": ((9, 9), whole),
            "model.visual.blocks.layers.1.mlp.down_proj.weight": ((9, 9), whole),
            "visual.merger.mlp.0.weight": ((9, 9), whole),
            "vision_model.encoder.layers.0.self_attn.k_proj.weight": ((9, 9), whole),
            "audio_tower.layers.0.self_attn.v_proj.weight": ((9, 9), whole),
            "multi_modal_projector.linear_1.weight": ((9, 9), whole),
        },
    ),
    "qwen 2, biases on query, key and value": Architecture(
        config(8, 2), {**attention(8, 2, 4, 32, bias=True), **feed_forward(MLP, 48, 32)}
    ),
    "qwen 3, norms of query and key": Architecture(
        config(8, 4),
        {
            **attention(8, 4, 4, 32),
            ATTENTION + "q_norm.weight": ((4,), whole),
            ATTENTION + "k_norm.weight": ((4,), whole),
            **feed_forward(MLP, 48, 32),
        },
    ),
    "gemma, more norms, no output head": Architecture(
        config(8, 4),
        {
            "model.embed_tokens.weight": ((192, 32), vocabulary),
            LAYER + "pre_feedforward_layernorm.weight": ((32,), whole),
            LAYER + "post_feedforward_layernorm.weight": ((32,), whole),
            **attention(8, 4, 4, 32),
            **feed_forward(MLP, 48, 32),
        },
    ),
    "phi 2, biases everywhere": Architecture(
        config(8, None),
        {
            **{
                f"{ATTENTION}{name}.{kind}": ((32, 32)[: 2 if kind == "weight" else 1], heads(8))
                for name in ("q_proj", "k_proj", "v_proj")
                for kind in ("weight", "bias")
            },
            ATTENTION + "dense.weight": ((32, 32), columns),
            ATTENTION + "dense.bias": ((32,), whole),
            MLP + "fc1.weight": ((64, 32), rows),
            MLP + "fc1.bias": ((64,), rows),
            MLP + "fc2.weight": ((32, 64), columns),
            MLP + "fc2.bias": ((32,), whole),
            "lm_head.weight": ((100, 32), vocabulary),
            "lm_head.bias": ((100,), vocabulary),
        },
    ),
    "phi 3, fused projections, grouped queries": Architecture(
        config(8, 2),
        {
            ATTENTION + "qkv_proj.weight": (((8 + 2 + 2) * 4, 32), query_key_value(8, 2)),
            ATTENTION + "o_proj.weight": ((32, 32), columns),
            MLP + "gate_up_proj.weight": ((2 * 24, 32), halves(0)),
            MLP + "down_proj.weight": ((32, 24), columns),
        },
    ),
    "phi 3, fused projections with biases": Architecture(
        config(8, 8),
        {
            ATTENTION + "qkv_proj.weight": ((24 * 4, 32), query_key_value(8, 8)),
            ATTENTION + "qkv_proj.bias": ((24 * 4,), query_key_value(8, 8)),
            MLP + "gate_up_proj.bias": ((2 * 24,), halves(0)),
            MLP + "gate_up_proj.weight": ((2 * 24, 32), halves(0)),
        },
    ),
    "mixtral": Architecture(
        config(8, 2),
        {
            **attention(8, 2, 4, 32),
            LAYER + "block_sparse_moe.gate.weight": ((4, 32), whole),
            **{
                f"{LAYER}block_sparse_moe.experts.{expert}.{name}.weight": (shape, part)
                for expert in range(2)
                for name, shape, part in (("w1", (48, 32), rows), ("w3", (48, 32), rows), ("w2", (32, 48), columns))
            },
        },
    ),
    "qwen mixture of experts": Architecture(
        config(8, 8),
        {
            **attention(8, 8, 4, 32, bias=True),
            MLP + "gate.weight": ((4, 32), whole),
            **_experts(MLP + "experts.", 2, 16, 32),
            **feed_forward(MLP + "shared_expert.", 48, 32),
            MLP + "shared_expert_gate.weight": ((1, 32), whole),
        },
    ),
    "deepseek, latent attention and block scales": Architecture(
        config(8, 8, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        {
            **_DEEPSEEK_BLOCKS,
            ATTENTION + "q_a_layernorm.weight": ((128,), whole),
            ATTENTION + "kv_a_layernorm.weight": ((128,), whole),
            MLP + "gate.weight": ((8, 256), whole),
            MLP + "gate.e_score_correction_bias": ((8,), whole),
        },
        {name: torch.float32 if name.endswith("_inv") else torch.float8_e4m3fn for name in _DEEPSEEK_BLOCKS},
        ranks=(ONE, TWO, FOUR),
    ),
    "deepseek, blocks of another size": Architecture(
        config(8, 8, quantization_config={"weight_block_size": [32, 64]}),
        {
            MLP + "gate_proj.weight": ((256, 128), rows),
            MLP + "gate_proj.weight_scale_inv": ((8, 2), rows),
            MLP + "down_proj.weight": ((96, 512), columns),
            MLP + "down_proj.weight_scale_inv": ((3, 8), columns),
        },
    ),
    "block scales of fused and of shared projections": Architecture(
        config(8, 2),
        {
            ATTENTION + "qkv_proj.weight": ((12 * 128, 128), query_key_value(8, 2)),
            ATTENTION + "qkv_proj.weight_scale_inv": ((12, 1), query_key_value(8, 2)),
            ATTENTION + "k_proj.weight": ((2 * 128, 64), heads(2)),
            ATTENTION + "k_proj.weight_scale_inv": ((2, 1), heads(2)),
            MLP + "gate_up_proj.weight": ((2 * 1024, 64), halves(0)),
            MLP + "gate_up_proj.weight_scale_inv": ((16, 1), halves(0)),
        },
    ),
    "deepseek without a low rank of queries": Architecture(
        config(8, 8), {ATTENTION + "q_proj.weight": ((8 * 24, 32), heads(8))}
    ),
    "gpt-oss in bf16, banks with the input first, gate and up in turns": Architecture(
        config(8, 2),
        {
            **_GPT_OSS_ATTENTION,
            MLP + "experts.gate_up_proj": ((4, 64, 2 * 32), pairs(-1)),
            MLP + "experts.gate_up_proj_bias": ((4, 2 * 32), pairs(-1)),
            MLP + "experts.down_proj": ((4, 32, 64), along(1)),
            MLP + "experts.down_proj_bias": ((4, 64), whole),
        },
    ),
    "gpt-oss in mxfp4": Architecture(
        config(8, 2),
        {
            **_GPT_OSS_ATTENTION,
            MLP + "experts.gate_up_proj_blocks": ((4, 2 * 256, 2, 16), pairs(1)),
            MLP + "experts.gate_up_proj_scales": ((4, 2 * 256, 2), pairs(1)),
            MLP + "experts.gate_up_proj_bias": ((4, 2 * 256), pairs(-1)),
            MLP + "experts.down_proj_blocks": ((4, 64, 8, 16), along(2)),
            MLP + "experts.down_proj_scales": ((4, 64, 8), along(2)),
            MLP + "experts.down_proj_bias": ((4, 64), whole),
        },
        {
            f"{MLP}experts.{name}": torch.uint8
            for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
        },
    ),
    "fused banks with the output first, gate and up as halves": Architecture(
        config(8, 8),
        {
            MLP + "experts.gate_up_proj": ((4, 2 * 16, 64), halves(1)),
            MLP + "experts.down_proj": ((4, 64, 16), along(2)),
        },
    ),
    "fused banks, as wide as they are long": Architecture(
        config(8, 8),
        {
            MLP + "experts.gate_up_proj": ((4, 2 * 32, 32), halves(1)),
            MLP + "experts.down_proj": ((4, 32, 32), along(2)),
        },
    ),
    "nvfp4, packed weights with scales": Architecture(
        config(8, 8),
        _NVFP4,
        {
            name: torch.uint8
            if name.endswith(".weight")
            else torch.float8_e4m3fn
            if name.endswith(".weight_scale")
            else torch.float32
            for name in _NVFP4
        },
    ),
    "eight-bit weights with a scale for each channel": Architecture(
        config(8, 2),
        {
            ATTENTION + "k_proj.weight": ((2 * 4, 32), heads(2)),
            ATTENTION + "k_proj.weight_scale": ((2 * 4, 1), heads(2)),
            MLP + "down_proj.weight": ((32, 48), columns),
            MLP + "down_proj.weight_scale": ((32, 1), whole),
            MLP + "up_proj.weight": ((48, 32), rows),
            MLP + "up_proj.weight_scale": ((48, 1), rows),
            MLP + "gate_proj.weight": ((48, 32), rows),
            MLP + "gate_proj.weight_scale": ((1,), whole),
            LAYER + "mlp.gate_up_proj.weight": ((48, 32), halves(0)),
            LAYER + "mlp.gate_up_proj.weight_scale": ((48, 1), halves(0)),
            ATTENTION + "qkv_proj.weight": ((12 * 4, 32), query_key_value(8, 2)),
            ATTENTION + "qkv_proj.weight_scale": ((12 * 4, 1), query_key_value(8, 2)),
        },
    ),
    "eight-bit weights with a vector of scales": Architecture(
        config(8, 8),
        {
            MLP + "up_proj.weight": ((48, 32), rows),
            MLP + "up_proj.weight_scale": ((48,), rows),
            MLP + "down_proj.weight": ((32, 48), columns),
            MLP + "down_proj.weight_scale": ((32,), whole),
        },
    ),
    "weights of a four-bit dtype, two to a byte": Architecture(
        config(8, 8),
        {
            MLP + "up_proj.weight": ((48, 16), rows),
            MLP + "down_proj.weight": ((32, 24), columns),
            MLP + "gate_up_proj.weight": ((48, 16), halves(0)),
        },
        {f"{MLP}{name}.weight": torch.float4_e2m1fn_x2 for name in ("up_proj", "down_proj", "gate_up_proj")},
    ),
    "a vocabulary that no number of ranks divides": Architecture(
        config(8, 8),
        {
            "model.embed_tokens.weight": ((257, 32), vocabulary),
            "lm_head.weight": ((257, 32), vocabulary),
        },
    ),
    "a vocabulary smaller than its padding": Architecture(
        config(8, 8), {"model.embed_tokens.weight": ((3, 32), vocabulary), "lm_head.weight": ((3, 32), vocabulary)}
    ),
}
