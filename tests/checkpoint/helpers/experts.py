"""Checkpoints with experts, and the banks that each rank must hold, in plain torch operations on whole tensors.

    FAMILIES[name].make(...) -> tensors of one layer      FAMILIES[name].banks(tensors, experts, rank, ranks) -> banks

Written from how the formats store an expert and how engines stack them, and not from our tables of banks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loadmaster import Checkpoint, load_experts

from .files import assert_same, bits_of, random_tensor, write_index, write_raw

F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
DTYPE_NAMES = {
    torch.uint8: "U8", F8: "F8_E4M3", E8M0: "F8_E8M0", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
"""What follows ``experts.`` in a name -> tensor."""


class Sizes(NamedTuple):
    """What a layer's shapes follow from."""

    experts: int
    hidden: int
    intermediate: int


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other along the first dimension, also for dtypes that torch cannot join."""
    first = parts[0]
    if first.element_size() > 1:
        return torch.cat(list(parts))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(first.dtype)


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row of a bank after the other."""
    return joined([row[None] for row in rows])


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's equal block of the rows."""
    each = tensor.shape[0] // ranks
    assert each * ranks == tensor.shape[0]
    return tensor[rank * each : (rank + 1) * each]


def columns(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's equal block of the second dimension."""
    each = tensor.shape[1] // ranks
    assert each * ranks == tensor.shape[1]
    return tensor[:, rank * each : (rank + 1) * each]


class _Seeds:
    """Another seed for each tensor."""

    def __init__(self, seed: int) -> None:
        self._seed = 1000 * seed

    def tensor(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        self._seed += 1
        return random_tensor(shape, dtype, self._seed)

    def scale(self) -> torch.Tensor:
        """A positive scalar, small as those of real checkpoints are."""
        return self.tensor(torch.float32, 1)[0].abs() / 500 + 1e-4


# NVFP4: two values a byte, a scale for 16 of them, and a scalar.


def _nvfp4(packed: str, scale: str, scalar: str, ignored: str) -> Callable[[Sizes, int], Tensors]:
    def make(sizes: Sizes, seed: int) -> Tensors:
        seeds, tensors = _Seeds(seed), {}
        hidden, inter = sizes.hidden, sizes.intermediate
        for expert in range(sizes.experts):
            for name, out, into in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
                stem = f"{expert}.{name}_proj."
                tensors[stem + packed] = seeds.tensor(torch.uint8, out, into // 2)
                tensors[stem + scale] = seeds.tensor(F8, out, into // 16)
                tensors[stem + scalar] = seeds.scale()
                tensors[stem + ignored] = seeds.scale()
        return tensors

    return make


def _nvfp4_banks(packed: str, scale: str, scalar: str, factor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def banks(tensors: Tensors, experts: Sequence[int], rank: int, ranks: int) -> dict[str, torch.Tensor]:
        def both(kind: str) -> torch.Tensor:
            pairs = [[tensors[f"{expert}.{name}_proj.{kind}"] for name in ("gate", "up")] for expert in experts]
            return stacked([joined([rows(part, rank, ranks) for part in pair]) for pair in pairs])

        def down(kind: str) -> torch.Tensor:
            return stacked([columns(tensors[f"{expert}.down_proj.{kind}"], rank, ranks) for expert in experts])

        def spread(names: Sequence[str], number: int) -> torch.Tensor:
            bank = torch.empty(len(experts), len(names) * number, dtype=torch.float16)
            for row, expert in enumerate(experts):
                for index, name in enumerate(names):
                    value = factor(tensors[f"{expert}.{name}_proj.{scalar}"]).reshape(())
                    bank[row, index * number : (index + 1) * number] = value.to(torch.float16)
            return bank

        gate_up = both(packed)
        down_packed = down(packed)
        return {
            "gate_up_packed": gate_up,
            "gate_up_scale": both(scale),
            "gate_up_global": spread(("gate", "up"), gate_up.shape[1] // 2),
            "down_packed": down_packed,
            "down_scale": down(scale),
            "down_global": spread(("down",), down_packed.shape[1]),
        }

    return banks


# MXFP4 of gpt-oss: all experts in one tensor, gate and up in turns.


def _mxfp4(sizes: Sizes, seed: int) -> Tensors:
    seeds = _Seeds(seed)
    experts, hidden, inter = sizes
    return {
        "gate_up_proj_blocks": seeds.tensor(torch.uint8, experts, 2 * inter, hidden // 32, 16),
        "gate_up_proj_scales": seeds.tensor(torch.uint8, experts, 2 * inter, hidden // 32),
        "gate_up_proj_bias": seeds.tensor(torch.bfloat16, experts, 2 * inter),
        "down_proj_blocks": seeds.tensor(torch.uint8, experts, hidden, inter // 32, 16),
        "down_proj_scales": seeds.tensor(torch.uint8, experts, hidden, inter // 32),
        "down_proj_bias": seeds.tensor(torch.bfloat16, experts, hidden),
    }


def _mxfp4_banks(tensors: Tensors, experts: Sequence[int], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    def gate_up(kind: str) -> torch.Tensor:
        whole = tensors[f"gate_up_proj_{kind}"]
        gates, ups = whole[:, ::2], whole[:, 1::2]
        return torch.stack(
            [torch.cat([rows(gates[expert], rank, ranks), rows(ups[expert], rank, ranks)]) for expert in experts]
        )

    def down(kind: str) -> torch.Tensor:
        return torch.stack([columns(tensors[f"down_proj_{kind}"][expert], rank, ranks) for expert in experts])

    return {
        "gate_up_blocks": gate_up("blocks"),
        "gate_up_scales": gate_up("scales"),
        "gate_up_bias": gate_up("bias"),
        "down_blocks": down("blocks"),
        "down_scales": down("scales"),
        "down_bias": tensors["down_proj_bias"][list(experts)],
    }


# A tensor for each projection of each expert, alone or with a scale for each block of 128 by 128.


def _per_expert(names: Mapping[str, str], dtype: torch.dtype, scaled: bool) -> Callable[[Sizes, int], Tensors]:
    def make(sizes: Sizes, seed: int) -> Tensors:
        seeds, tensors = _Seeds(seed), {}
        hidden, inter = sizes.hidden, sizes.intermediate
        for expert in range(sizes.experts):
            for name, out, into in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
                tensors[f"{expert}.{names[name]}.weight"] = seeds.tensor(dtype, out, into)
                if scaled:
                    shape = (-(-out // 128), -(-into // 128))
                    tensors[f"{expert}.{names[name]}.weight_scale_inv"] = seeds.tensor(torch.float32, *shape)
        return tensors

    return make


def _per_expert_banks(names: Mapping[str, str], kinds: Mapping[str, str]) -> Any:
    def banks(tensors: Tensors, experts: Sequence[int], rank: int, ranks: int) -> dict[str, torch.Tensor]:
        def row(expert: int, kind: str) -> torch.Tensor:
            pair = [tensors[f"{expert}.{names[name]}.{kind}"] for name in ("gate", "up")]
            return joined([rows(part, rank, ranks) for part in pair])

        def down(expert: int, kind: str) -> torch.Tensor:
            return columns(tensors[f"{expert}.{names['down']}.{kind}"], rank, ranks)

        made = {}
        for suffix, kind in kinds.items():
            made[f"gate_up{suffix}"] = stacked([row(expert, kind) for expert in experts])
        for suffix, kind in kinds.items():
            made[f"down{suffix}"] = stacked([down(expert, kind) for expert in experts])
        return made

    return banks


# All experts in one tensor, gate before up.


def _fused(sizes: Sizes, seed: int) -> Tensors:
    seeds = _Seeds(seed)
    experts, hidden, inter = sizes
    return {
        "gate_up_proj": seeds.tensor(torch.bfloat16, experts, 2 * inter, hidden),
        "down_proj": seeds.tensor(torch.bfloat16, experts, hidden, inter),
    }


def _fused_banks(tensors: Tensors, experts: Sequence[int], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    gates, ups = tensors["gate_up_proj"].chunk(2, 1)
    return {
        "gate_up": torch.stack(
            [torch.cat([rows(gates[expert], rank, ranks), rows(ups[expert], rank, ranks)]) for expert in experts]
        ),
        "down": torch.stack([columns(tensors["down_proj"][expert], rank, ranks) for expert in experts]),
    }


class Family(NamedTuple):
    """A format: its tensors of one layer, its banks, and what hidden and intermediate size are multiples of."""

    make: Callable[[Sizes, int], Tensors]
    banks: Callable[[Tensors, Sequence[int], int, int], dict[str, torch.Tensor]]
    hidden: int
    intermediate: int
    prefix: str = "model.layers.{}.mlp.experts."


_MODELOPT = ("weight", "weight_scale", "weight_scale_2")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale")
_QWEN = {name: f"{name}_proj" for name in ("gate", "up", "down")}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}

FAMILIES: dict[str, Family] = {
    "nvfp4-modelopt": Family(_nvfp4(*_MODELOPT, "input_scale"), _nvfp4_banks(*_MODELOPT, lambda scale: scale), 16, 16),
    "nvfp4-compressed-tensors": Family(
        _nvfp4(*_COMPRESSED, "input_global_scale"), _nvfp4_banks(*_COMPRESSED, lambda scale: 1.0 / scale), 16, 16
    ),
    "mxfp4-gpt-oss": Family(_mxfp4, _mxfp4_banks, 32, 32),
    "fp8-blocks": Family(
        _per_expert(_QWEN, F8, True), _per_expert_banks(_QWEN, {"": "weight", "_scale": "weight_scale_inv"}), 8, 128
    ),
    "per-expert": Family(_per_expert(_QWEN, torch.bfloat16, False), _per_expert_banks(_QWEN, {"": "weight"}), 1, 1),
    "per-expert-mixtral": Family(
        _per_expert(_MIXTRAL, torch.bfloat16, False),
        _per_expert_banks(_MIXTRAL, {"": "weight"}),
        1,
        1,
        "model.layers.{}.block_sparse_moe.experts.",
    ),
    "fused": Family(_fused, _fused_banks, 1, 1),
}
"""By the names of the built-in layouts."""


Banks = dict[int, Mapping[str, torch.Tensor]]
SIZES = {
    "nvfp4-modelopt": Sizes(4, 32, 64),
    "nvfp4-compressed-tensors": Sizes(4, 16, 128),
    "mxfp4-gpt-oss": Sizes(4, 64, 128),
    "fp8-blocks": Sizes(4, 24, 512),
    "per-expert": Sizes(4, 6, 12),
    "per-expert-mixtral": Sizes(4, 5, 8),
    "fused": Sizes(4, 6, 12),
}
"""Sizes that 2 and 4 ranks can share."""


def moe_tensors(family: str, sizes: Sizes, layers: Sequence[int] = (0,), seed: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of a model: the experts of ``layers``, and what every model has besides."""
    tensors = {"model.embed_tokens.weight": random_tensor((64, 5), seed=seed)}
    for layer in layers:
        stem = f"model.layers.{layer}."
        tensors[f"{stem}input_layernorm.weight"] = random_tensor((5,), seed=seed + layer)
        tensors[f"{stem}mlp.shared_experts.up_proj.weight"] = random_tensor((8, 5), seed=seed + layer)
        prefix = FAMILIES[family].prefix.format(layer)
        tensors |= {prefix + name: tensor for name, tensor in FAMILIES[family].make(sizes, seed + 100 * layer).items()}
    tensors["lm_head.weight"] = random_tensor((64, 5), seed=seed + 1)
    return tensors


def wanted_banks(
    family: str, tensors: Mapping[str, torch.Tensor], layer: int, experts: Sequence[int], rank: int = 0, ranks: int = 1
) -> dict[str, torch.Tensor]:
    """What the banks of ``layer`` must hold for ``experts``, of which this is tensor-parallel ``rank`` of ``ranks``."""
    prefix = FAMILIES[family].prefix.format(layer)
    of_layer = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return FAMILIES[family].banks(of_layer, experts, rank, ranks)


def write_ordered(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a file whose tensors lie in this very order, which the library would change."""
    header, data, end = {}, [], 0
    for name, tensor in tensors.items():
        data.append(bits_of(tensor))
        begin, end = end, end + len(data[-1])
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_raw(path, json.dumps(header), b"".join(data))


def write_moe(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    file_of: Callable[[str], int] = lambda name: 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write tensors in this order to the files that ``file_of`` tells by name, with an index; return the folder."""
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(f"part-{file_of(name)}.safetensors", {})[name] = tensor
    for file, part in shards.items():
        write_ordered(folder / file, part)
    write_index(folder, {name: file for file, part in shards.items() for name in part})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(path: Path | Checkpoint, **more: Any) -> Banks:
    banks: Banks = {}
    load_experts(banks, path, **more)
    return banks


def assert_banks(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names in the same order, the same dtypes, shapes and bits; contiguous."""
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert_same(got[name], tensor, name)
        assert got[name].is_contiguous(), name
