"""Checkpoint families as data: the names, shapes and configuration of real models, scaled to a wanted size.

A family is a table with one row per tensor: its name, how it is stored, its shape. Shapes are written with one letter
per dimension (``LETTERS``): ``2M`` is twice a dimension, ``AD`` a product, ``AD+2KD`` a sum, and a final ``/n`` divides
the whole, rounding up. A row with ``{expert}`` is repeated for each expert, a row of a layer for each layer.

    FAMILIES --fit(size)--> Model(widths, layers) --tensors()--> TensorSpec, ...     (no numpy, no files)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from loadmaster.errors import InputError

__all__ = ["DTYPE_BYTES", "FAMILIES", "Family", "Model", "TensorSpec", "family_named", "fit"]

Shape = tuple[int, ...]
Widths = Mapping[str, int]

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}

LETTERS = {
    "num_attention_heads": "A",
    "kv_lora_rank": "C",
    "head_dim": "D",
    "num_experts": "E",
    "num_local_experts": "E",
    "n_routed_experts": "E",
    "hidden_size": "H",
    "intermediate_size": "I",
    "num_key_value_heads": "K",
    "q_lora_rank": "L",
    "moe_intermediate_size": "M",
    "qk_nope_head_dim": "N",
    "qk_rope_head_dim": "R",
    "shared_expert_intermediate_size": "S",
    "v_head_dim": "U",
    "vocab_size": "V",
    "tensor_columns": "W",
}


class Width(NamedTuple):
    """One dimension of a family: the real one, and how it shrinks for a smaller checkpoint.

    ``step`` is what it stays a multiple of, so that 8 ranks can share it, and also the least it can be. It keeps its
    real value until the scale is below ``1 / late``: head sizes and expert counts stay real longer than hidden sizes.
    """

    real: int
    step: int
    late: int = 1

    def at(self, scale: float) -> int:
        """Return the dimension at ``scale`` (1 is the real model)."""
        return max(self.step, int(self.real * min(1.0, scale * self.late)) // self.step * self.step)


def _heads(query: int, key_value: int, size: int) -> dict[str, Width]:
    """Return the widths of attention: few heads for a small checkpoint first, then small heads."""
    counts = {"num_attention_heads": Width(query, 8), "num_key_value_heads": Width(key_value, 8)}
    return {**counts, "head_dim": Width(size, 16, late=query // 8)}


class TensorSpec(NamedTuple):
    """One tensor to write; ``pattern`` names the kind of values that are valid in it."""

    name: str
    dtype: str
    shape: Shape
    pattern: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Part(NamedTuple):
    """One tensor of a storage format; ``divisors`` divide the last dimensions (rounding up), ``tail`` follows them."""

    name: str
    dtype: str
    pattern: str
    divisors: Shape = ()
    tail: Shape = ()
    scalar: bool = False

    def shape(self, whole: Shape) -> Shape:
        """Return the shape of this part of a tensor that has the shape ``whole`` when it is not quantized."""
        if self.scalar:
            return ()
        divisors = (1,) * (len(whole) - len(self.divisors)) + self.divisors
        return tuple(-(-extent // divisor) for extent, divisor in zip(whole, divisors, strict=True)) + self.tail


# ModelOpt writes NVFP4 as two values a byte, a scale per 16 and two scalars; gpt-oss writes MXFP4 as 32 values in 16
# bytes and a scale for them; DeepSeek writes a scale per 128 x 128 block.
STORAGE: dict[str, tuple[Part, ...]] = {
    "bf16": (Part("{name}", "BF16", "bf16"),),
    "f32": (Part("{name}", "F32", "f32"),),
    "fp8": (Part("{name}", "F8_E4M3", "fp8"), Part("{name}_scale_inv", "F32", "f32", divisors=(128, 128))),
    "nvfp4": (
        Part("{name}", "U8", "u8", divisors=(2,)),
        Part("{name}_scale", "F8_E4M3", "fp8_scale", divisors=(16,)),
        Part("{name}_scale_2", "F32", "f32", scalar=True),
        Part("{module}.input_scale", "F32", "f32", scalar=True),
    ),
    "mxfp4": (
        Part("{name}_blocks", "U8", "u8", divisors=(32,), tail=(16,)),
        Part("{name}_scales", "U8", "e8m0", divisors=(32,)),
    ),
}


class Row(NamedTuple):
    """One line of a family's table."""

    name: str
    storage: str
    shape: tuple[str, ...]

    def specs(self, letters: Widths) -> list[TensorSpec]:
        """Return the tensors that store this row, with ``{layer}`` and ``{expert}`` still in their names."""
        whole = tuple(_extent(extent, letters) for extent in self.shape)
        names = {"name": self.name, "module": self.name.removesuffix(".weight")}
        parts = STORAGE[self.storage]
        return [TensorSpec(part.name.format(**names), part.dtype, part.shape(whole), part.pattern) for part in parts]


def _extent(expression: str, letters: Widths) -> int:
    """Return the value of a dimension such as ``"H"``, ``"2M"``, ``"AD+2KD"`` or ``"H/16"``."""
    total, _, divisor = expression.partition("/")
    value = sum(_product(term, letters) for term in total.split("+"))
    return -(-value // int(divisor or 1))


def _product(term: str, letters: Widths) -> int:
    word = term.lstrip("0123456789")
    return int(term.removesuffix(word) or 1) * math.prod(letters[letter] for letter in word)


def _rows(*tables: str, prefix: str = "") -> tuple[Row, ...]:
    lines = (line.split() for table in tables for line in table.strip().splitlines())
    return tuple(Row(prefix + name, storage, tuple(shape)) for name, storage, *shape in lines)


def _layer(*tables: str) -> tuple[Row, ...]:
    return _rows(*tables, prefix="model.layers.{layer}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is common to the checkpoints of one family: the widths of the real model, its tensors and its configuration.

    ``first_layer`` is the table of layer 0 where that differs (a dense layer before mixture-of-experts layers);
    ``wanted_layers`` is how deep a small checkpoint of it should be, before it may be as wide as the real one.
    """

    model_type: str
    architecture: str
    widths: Mapping[str, Width]
    layer: tuple[Row, ...]
    first_layer: tuple[Row, ...] = ()
    before: tuple[Row, ...] = _rows("model.embed_tokens.weight bf16 V H")
    after: tuple[Row, ...] = _rows("model.norm.weight bf16 H", "lm_head.weight bf16 V H")
    config: Mapping[str, Any] = field(default_factory=dict)
    wanted_layers: int = 8

    @property
    def least_layers(self) -> int:
        """The fewest layers that have every tensor of the family."""
        return 2 if self.first_layer else 1


NORMS = """
    input_layernorm.weight              bf16  H
    post_attention_layernorm.weight     bf16  H
"""
ATTENTION = """
    self_attn.q_proj.weight             bf16  AD H
    self_attn.k_proj.weight             bf16  KD H
    self_attn.v_proj.weight             bf16  KD H
    self_attn.o_proj.weight             bf16  H AD
"""
QKV_BIAS = """
    self_attn.q_proj.bias               bf16  AD
    self_attn.k_proj.bias               bf16  KD
    self_attn.v_proj.bias               bf16  KD
"""
QK_NORM = """
    self_attn.q_norm.weight             bf16  D
    self_attn.k_norm.weight             bf16  D
"""
DENSE = """
    mlp.gate_proj.weight                bf16  I H
    mlp.up_proj.weight                  bf16  I H
    mlp.down_proj.weight                bf16  H I
"""
FUSED = """
    self_attn.qkv_proj.weight           bf16  AD+2KD H
    self_attn.o_proj.weight             bf16  H AD
    mlp.gate_up_proj.weight             bf16  2I H
    mlp.down_proj.weight                bf16  H I
"""
MIXTRAL_EXPERTS = """
    block_sparse_moe.gate.weight                    bf16  E H
    block_sparse_moe.experts.{expert}.w1.weight     bf16  I H
    block_sparse_moe.experts.{expert}.w2.weight     bf16  H I
    block_sparse_moe.experts.{expert}.w3.weight     bf16  I H
"""
QWEN_EXPERTS = """
    mlp.gate.weight                         bf16  E H
    mlp.experts.{expert}.gate_proj.weight   bf16  M H
    mlp.experts.{expert}.up_proj.weight     bf16  M H
    mlp.experts.{expert}.down_proj.weight   bf16  H M
    mlp.shared_expert.gate_proj.weight      bf16  S H
    mlp.shared_expert.up_proj.weight        bf16  S H
    mlp.shared_expert.down_proj.weight      bf16  H S
    mlp.shared_expert_gate.weight           bf16  1 H
"""
EXPERTS_ALONE = """
    mlp.experts.{expert}.gate_proj.weight   bf16  M H
    mlp.experts.{expert}.up_proj.weight     bf16  M H
    mlp.experts.{expert}.down_proj.weight   bf16  H M
"""
NVFP4_EXPERTS = """
    mlp.gate.weight                         bf16   E H
    mlp.experts.{expert}.gate_proj.weight   nvfp4  M H
    mlp.experts.{expert}.up_proj.weight     nvfp4  M H
    mlp.experts.{expert}.down_proj.weight   nvfp4  H M
"""
GPT_OSS = """
    self_attn.o_proj.bias                   bf16   H
    self_attn.sinks                         bf16   A
    mlp.router.weight                       bf16   E H
    mlp.router.bias                         bf16   E
    mlp.experts.gate_up_proj                mxfp4  E 2I H
    mlp.experts.gate_up_proj_bias           bf16   E 2I
    mlp.experts.down_proj                   mxfp4  E H I
    mlp.experts.down_proj_bias              bf16   E H
"""
LATENT_ATTENTION = """
    self_attn.q_a_proj.weight               fp8   L H
    self_attn.q_a_layernorm.weight          bf16  L
    self_attn.q_b_proj.weight               fp8   AN+AR L
    self_attn.kv_a_proj_with_mqa.weight     fp8   C+R H
    self_attn.kv_a_layernorm.weight         bf16  C
    self_attn.kv_b_proj.weight              fp8   AN+AU C
    self_attn.o_proj.weight                 fp8   H AU
"""
DEEPSEEK_EXPERTS = """
    mlp.gate.weight                         bf16  E H
    mlp.gate.e_score_correction_bias        f32   E
    mlp.experts.{expert}.gate_proj.weight   fp8   M H
    mlp.experts.{expert}.up_proj.weight     fp8   M H
    mlp.experts.{expert}.down_proj.weight   fp8   H M
    mlp.shared_experts.gate_proj.weight     fp8   M H
    mlp.shared_experts.up_proj.weight       fp8   M H
    mlp.shared_experts.down_proj.weight     fp8   H M
"""

FAMILIES: dict[str, Family] = {
    "llama": Family(  # Llama 3.1 8B
        model_type="llama",
        architecture="LlamaForCausalLM",
        widths={
            "hidden_size": Width(4096, 128),
            "intermediate_size": Width(14336, 64),
            **_heads(32, 8, 128),
            "vocab_size": Width(128256, 64),
        },
        wanted_layers=24,  # as small models have: Qwen 2.5 0.5B
        layer=_layer(NORMS, ATTENTION, DENSE),
        config={"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False},
    ),
    "qwen3": Family(  # Qwen3 8B
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        widths={
            "hidden_size": Width(4096, 128),
            "intermediate_size": Width(12288, 64),
            **_heads(32, 8, 128),
            "vocab_size": Width(151936, 64),
        },
        wanted_layers=24,
        layer=_layer(NORMS, ATTENTION, QK_NORM, DENSE),
        config={"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False},
    ),
    "phi3": Family(  # Phi-4 mini: 24 query heads on 8 key-value heads, the output head tied to the embedding
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        widths={
            "hidden_size": Width(3072, 128),
            "intermediate_size": Width(8192, 64),
            **_heads(24, 8, 128),
            "vocab_size": Width(200064, 64),
        },
        wanted_layers=24,
        layer=_layer(NORMS, FUSED),
        after=_rows("model.norm.weight bf16 H"),
        config={"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True},
    ),
    "mixtral": Family(  # Mixtral 8x7B
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        widths={
            "hidden_size": Width(4096, 128),
            "intermediate_size": Width(14336, 64),
            **_heads(32, 8, 128),
            "num_local_experts": Width(8, 8),
            "vocab_size": Width(32000, 64),
        },
        layer=_layer(NORMS, ATTENTION, MIXTRAL_EXPERTS),
        config={"hidden_act": "silu", "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    "qwen-moe": Family(  # Qwen1.5-MoE-A2.7B, with the 64 experts of Qwen2-57B-A14B (60 do not divide by 8 ranks)
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        widths={
            "hidden_size": Width(2048, 128),
            "intermediate_size": Width(5632, 64),
            "moe_intermediate_size": Width(1408, 64),
            "shared_expert_intermediate_size": Width(5632, 64),
            **_heads(16, 16, 128),
            "num_experts": Width(64, 8, late=8),
            "vocab_size": Width(151936, 64),
        },
        layer=_layer(NORMS, ATTENTION, QKV_BIAS, QWEN_EXPERTS),
        config={"hidden_act": "silu", "num_experts_per_tok": 4, "decoder_sparse_step": 1, "tie_word_embeddings": False},
    ),
    "gpt-oss": Family(  # gpt-oss-20b; intermediate 2816 for its 2880, which is 90 blocks of 32: not for 8 ranks
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        widths={
            "hidden_size": Width(2880, 64),
            "intermediate_size": Width(2880, 256),
            **_heads(64, 8, 64),
            "num_local_experts": Width(32, 8, late=8),
            "vocab_size": Width(201088, 64),
        },
        layer=_layer(NORMS, ATTENTION, QKV_BIAS, GPT_OSS),
        config={
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            },
        },
    ),
    "deepseek-fp8": Family(  # DeepSeek-V3; widths stay multiples of 8 ranks x 128, so that no block of scales is split
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        widths={
            "hidden_size": Width(7168, 128),
            "intermediate_size": Width(18432, 1024),
            "moe_intermediate_size": Width(2048, 1024),
            "num_attention_heads": Width(128, 16),
            "num_key_value_heads": Width(128, 16),
            "q_lora_rank": Width(1536, 128),
            "kv_lora_rank": Width(512, 128),
            "qk_nope_head_dim": Width(128, 128),
            "qk_rope_head_dim": Width(64, 64),
            "v_head_dim": Width(128, 128),
            "n_routed_experts": Width(256, 8),
            "vocab_size": Width(129280, 64),
        },
        first_layer=_layer(NORMS, LATENT_ATTENTION, DENSE.replace("bf16", "fp8")),
        layer=_layer(NORMS, LATENT_ATTENTION, DEEPSEEK_EXPERTS),
        config={
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        },
    ),
    "nvfp4-moe": Family(  # Qwen3-30B-A3B as ModelOpt writes it; 8 key-value heads for its 4, for 8 ranks
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        widths={
            "hidden_size": Width(2048, 128),
            "intermediate_size": Width(6144, 128),
            "moe_intermediate_size": Width(768, 128),
            **_heads(32, 8, 128),
            "num_experts": Width(128, 8, late=8),
            "vocab_size": Width(151936, 64),
        },
        layer=_layer(NORMS, ATTENTION, QK_NORM, NVFP4_EXPERTS),
        config={
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "group_size": 16,
                "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"],
            },
        },
    ),
    "small-experts": Family(  # nothing but experts of 16 KiB tensors: what each tensor costs on its way into a bank
        model_type="small_experts",
        architecture="SmallExperts",
        widths={
            "hidden_size": Width(128, 128),
            "moe_intermediate_size": Width(64, 64),
            "num_experts": Width(128, 8),
        },
        before=(),
        layer=_layer(EXPERTS_ALONE),
        after=(),
    ),
    "small-tensors": Family(  # nothing but tensors of 4 KiB: what each tensor costs, whatever its size
        model_type="small_tensors",
        architecture="SmallTensors",
        widths={"tensor_columns": Width(64, 64)},
        before=(),
        layer=_layer("tensor.weight bf16 32 W"),
        after=(),
    ),
}


def family_named(name: str) -> Family:
    """Return the family called ``name``, or raise an ``InputError`` that says which there are."""
    if name not in FAMILIES:
        raise InputError(f"there is no checkpoint family {name!r}; the families are {', '.join(FAMILIES)}")
    return FAMILIES[name]


Repeated = list[tuple[int, list[TensorSpec]]]


@dataclass(frozen=True)
class Model:
    """A family with its widths and its number of layers settled: all that its tensors depend on."""

    family: Family
    widths: Widths
    num_layers: int = 0

    @cached_property
    def _letters(self) -> Widths:
        return {LETTERS[key]: width for key, width in self.widths.items()}

    @cached_property
    def _layers(self) -> tuple[Repeated, Repeated]:
        """The tensors of the first layer and of all others, by groups, each with how often it is in a layer."""
        return self._repeated(self.family.first_layer or self.family.layer), self._repeated(self.family.layer)

    def _repeated(self, rows: tuple[Row, ...]) -> Repeated:
        groups = itertools.groupby(rows, key=lambda row: "{expert}" in row.name)
        return [
            (self._letters["E"] if per_expert else 1, [spec for row in group for spec in row.specs(self._letters)])
            for per_expert, group in groups
        ]

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor, in the order of the model; those of one expert together."""
        yield from self._outer(self.family.before)
        for layer in range(self.num_layers):
            for count, specs in self._layers[layer > 0]:
                for expert in range(count):
                    for name, dtype, shape, pattern in specs:
                        yield TensorSpec(name.format(layer=layer, expert=expert), dtype, shape, pattern)
        yield from self._outer(self.family.after)

    def _outer(self, rows: tuple[Row, ...]) -> Iterator[TensorSpec]:
        return (spec for row in rows for spec in row.specs(self._letters))

    def config(self) -> dict[str, Any]:
        """Return what ``config.json`` says of this model."""
        names = {"architectures": [self.family.architecture], "model_type": self.family.model_type}
        layers = {"num_hidden_layers": self.num_layers, "torch_dtype": "bfloat16"}
        return {**names, **self.widths, **layers, **self.family.config}

    def layer_bytes(self, layer: int) -> int:
        """Return the bytes of one layer."""
        return sum(count * spec.num_bytes for count, specs in self._layers[layer > 0] for spec in specs)

    def outer_bytes(self) -> int:
        """Return the bytes of all tensors outside the layers."""
        return sum(spec.num_bytes for spec in self._outer(self.family.before + self.family.after))

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return self.outer_bytes() + self.layer_bytes(0) + (self.num_layers - 1) * self.layer_bytes(1)


# From the real model down, each step 2/3 to 3/4 of the one before.
SCALES = tuple(part * 0.5**halvings for halvings in range(10) for part in (1.0, 0.75))


def fit(name: str, size_bytes: int, layers: int | None = None, **fixed: int) -> Model:
    """Return the widest model of the family ``name`` that has about ``size_bytes`` of tensors.

    The wanted number of layers matters more than real widths, real widths more than further layers; the vocabulary
    takes up what whole layers leave.

    Parameters
    ----------
    layers
        This many layers, whatever widths that gives.
    fixed
        Widths that are given and not scaled, such as ``tensor_columns=64``.

    Raises
    ------
    InputError
        There is no such family, or none of its models is within 5 % of the size.
    """
    family = family_named(name)
    models = [model for scale in SCALES if (model := _fit_at(family, size_bytes, scale, fixed, layers))]
    for least_layers in (family.wanted_layers, 8, 4, 2, 1):
        deep = [(_miss(model, size_bytes), model) for model in models if model.num_layers >= least_layers]
        close = next((model for miss, model in deep if miss <= 0.01), None)
        closest = close or min(deep, key=lambda pair: pair[0], default=(1.0, None))[1]
        if closest and _miss(closest, size_bytes) <= 0.05:
            return closest
    smallest = Model(family, _widths(family, 0.0, fixed), layers or family.least_layers)
    of_layers = f" in {layers} layer{'s' * (layers > 1)}" if layers else ""
    raise InputError(
        f"no {name} checkpoint has about {size_bytes} bytes{of_layers}; the smallest one has {smallest.num_bytes()}"
    )


def _fit_at(family: Family, size_bytes: int, scale: float, fixed: Widths, layers: int | None) -> Model | None:
    """Return the model of one scale that fills ``size_bytes``, or None where that has too few or not ``layers``."""
    widths = _widths(family, scale, fixed)
    least = Model(family, widths)
    most = 1 + (size_bytes - least.outer_bytes() - least.layer_bytes(0)) // least.layer_bytes(1)
    layers = layers or most
    if not family.least_layers <= layers <= most:
        return None
    rest = size_bytes - Model(family, widths, layers).num_bytes()
    if "vocab_size" in widths:
        width = family.widths["vocab_size"]
        more = Model(family, {**widths, "vocab_size": widths["vocab_size"] + width.step})
        steps = rest // (more.outer_bytes() - least.outer_bytes())
        widths["vocab_size"] = min(width.real, widths["vocab_size"] + steps * width.step)
    return Model(family, widths, layers)


def _widths(family: Family, scale: float, fixed: Widths) -> dict[str, int]:
    widths = {key: width.at(scale) for key, width in family.widths.items()}
    if "vocab_size" in widths:  # room to grow: it takes what whole layers leave
        widths["vocab_size"] = family.widths["vocab_size"].at(scale / 4)
    return {**widths, **fixed}


def _miss(model: Model, size_bytes: int) -> float:
    """Return by how much of ``size_bytes`` the model misses it."""
    return abs(model.num_bytes() - size_bytes) / size_bytes
