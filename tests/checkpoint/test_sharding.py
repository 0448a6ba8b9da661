"""What each tensor-parallel rank is given: the same as plain torch operations cut from the library's tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loadmaster
from loadmaster import Shard
from loadmaster.bench.make_checkpoint import make_checkpoint
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.sharding import place_shard
from loadmaster.checkpoint.tensor_parallel import TensorParallelPlan
from loadmaster.errors import InputError, PlacementError

from .helpers.architectures import ARCHITECTURES, ATTENTION, EIGHT, FOUR, LAYER, MLP, ONE, TWO, Architecture
from .helpers.files import assert_same, bits_of, library_tensors, random_tensor, write_file
from .helpers.truth import Part, along, columns, halves, heads, pairs, query_key_value, rows, vocabulary, whole

CASES = [(name, ranks) for name, case in ARCHITECTURES.items() for ranks in case.ranks]


def load_rank(path: Path, rank: int, ranks: int, overrides: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
    """One rank's tensors."""
    tensors: dict[str, torch.Tensor] = {}
    loadmaster.load(tensors, path, shard=Shard(rank=rank, ranks=ranks, plan=TensorParallelPlan(overrides)))
    return tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files of the architectures, each made once."""
    folder = tmp_path_factory.mktemp("architectures")
    paths: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in paths:
            case = ARCHITECTURES[name]
            paths[name] = write_file(folder / str(len(paths)) / "model.safetensors", case.made(), case.config)
        return paths[name]

    return path_of


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_rank_holds_what_torch_cuts(made: Any, name: str, ranks: int) -> None:
    case: Architecture = ARCHITECTURES[name]
    path = made(name)
    tensors = library_tensors(path)
    for rank in range(ranks):
        got = load_rank(path, rank, ranks)
        assert list(got) == list(tensors)
        for tensor_name, (_, part) in case.tensors.items():
            assert_same(got[tensor_name], cut(tensors[tensor_name], part, rank, ranks), tensor_name)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cut(tensor: torch.Tensor, part: Part, rank: int, ranks: int) -> torch.Tensor:
    """The part, taken from integers of the same bits: torch has every operation for these, and not for 8-bit floats."""
    return part(tensor.view(INTEGERS[tensor.element_size()]), rank, ranks).contiguous().view(tensor.dtype)


# Checkpoints of real names and shapes, and the parts of them; `whole` is spelled out, so that no tensor is forgotten.

ATTENTION_PARTS: dict[str, str] = {
    "self_attn.q_proj.weight": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.v_proj.weight": "key",
    "self_attn.q_proj.bias": "query",
    "self_attn.k_proj.bias": "key",
    "self_attn.v_proj.bias": "key",
    "self_attn.o_proj.weight": "columns",
    "self_attn.o_proj.bias": "whole",
    "self_attn.q_norm.weight": "whole",
    "self_attn.k_norm.weight": "whole",
    "self_attn.sinks": "query",
    "self_attn.q_a_proj.weight": "whole",
    "self_attn.q_a_layernorm.weight": "whole",
    "self_attn.q_b_proj.weight": "query",
    "self_attn.kv_a_proj_with_mqa.weight": "whole",
    "self_attn.kv_a_layernorm.weight": "whole",
    "self_attn.kv_b_proj.weight": "query",
    "self_attn.qkv_proj.weight": "query_key_value",
}
OTHER_PARTS: dict[str, str] = {
    "model.embed_tokens.weight": "vocabulary",
    "lm_head.weight": "vocabulary",
    "model.norm.weight": "whole",
    "layernorm.weight": "whole",
    "mlp.gate.weight": "whole",
    "mlp.gate.e_score_correction_bias": "whole",
    "shared_expert_gate.weight": "whole",
    "block_sparse_moe.gate.weight": "whole",
    "mlp.router.weight": "whole",
    "mlp.router.bias": "whole",
    ".gate_proj.weight": "rows",
    ".up_proj.weight": "rows",
    ".down_proj.weight": "columns",
    "mlp.gate_up_proj.weight": "halves",
    ".w1.weight": "rows",
    ".w3.weight": "rows",
    ".w2.weight": "columns",
    "experts.gate_up_proj_blocks": "pairs of rows",
    "experts.gate_up_proj_scales": "pairs of rows",
    "experts.gate_up_proj_bias": "pairs of columns",
    "experts.down_proj_blocks": "blocks",
    "experts.down_proj_scales": "columns",
    "experts.down_proj_bias": "whole",
    "weight_scale_2": "whole",
    "input_scale": "whole",
}


def part_of(name: str, config: Mapping[str, Any]) -> Part:
    """The part of a tensor of a made checkpoint; scales go with their weight."""
    weight = name.removesuffix("_scale_inv").removesuffix("_scale") if name.endswith(("_inv", "weight_scale")) else name
    (word,) = {word for suffix, word in {**ATTENTION_PARTS, **OTHER_PARTS}.items() if weight.endswith(suffix)}
    query, key = config["num_attention_heads"], config["num_key_value_heads"]
    if weight != name and word == "query":
        word = "rows"  # a head has no whole number of blocks
    return {
        "query": heads(query),
        "key": heads(key),
        "query_key_value": query_key_value(query, key),
        "rows": rows,
        "columns": columns,
        "vocabulary": vocabulary,
        "whole": whole,
        "halves": halves(0),
        "pairs of rows": pairs(1),
        "pairs of columns": pairs(-1),
        "blocks": along(2),
    }[word]


FAMILIES = {
    "llama": 2 << 20,
    "qwen3": 2 << 20,
    "phi3": 2 << 20,
    "mixtral": 2 << 20,
    "qwen-moe": 3 << 20,
    "gpt-oss": 2 << 20,
    "deepseek-fp8": 8 << 20,
    "nvfp4-moe": 2 << 20,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / request.param
    make_checkpoint(folder, request.param, FAMILIES[request.param], shard_bytes=FAMILIES[request.param] // 2)
    return folder


@pytest.mark.parametrize("ranks", [ONE, TWO, FOUR, EIGHT])
def test_ranks_of_a_whole_model_hold_what_torch_cuts(family: Path, ranks: int) -> None:
    config = json.loads((family / "config.json").read_text())
    tensors = library_tensors(*sorted(family.glob("*.safetensors")))
    loaded = [load_rank(family, rank, ranks) for rank in range(ranks)]
    for name, tensor in tensors.items():
        part = part_of(name, config)
        for rank in range(ranks):
            assert_same(loaded[rank][name], cut(tensor, part, rank, ranks), f"{name} of rank {rank}")
    assert {tuple(got) for got in loaded} == {tuple(tensors)}
    if ranks > 1:
        cut_bytes = sum(tensor.nbytes for tensor in loaded[0].values())
        assert cut_bytes < 0.8 * sum(tensor.nbytes for tensor in tensors.values())


@given(
    ranks=st.sampled_from([2, 3, 4, 5, 8]),
    block=st.integers(1, 5),
    other=st.integers(1, 6),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    by_rows=st.booleans(),
)
@settings(max_examples=60)
def test_parts_of_the_ranks_concatenate_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, block: int, other: int, dtype: torch.dtype, by_rows: bool
) -> None:
    """Rows (colwise) and columns (rowwise) of any size that divides, also of matrices of one row or column."""
    shape = (block * ranks, other) if by_rows else (other, block * ranks)
    name = MLP + ("up_proj.weight" if by_rows else "down_proj.weight")
    tensor = random_tensor(shape, dtype)
    path = write_file(tmp_path_factory.mktemp("cat") / "model.safetensors", {name: tensor})
    parts = [load_rank(path, rank, ranks)[name] for rank in range(ranks)]
    assert {tuple(part.shape) for part in parts} == {(block, other) if by_rows else (other, block)}
    assert bits_of(torch.cat(parts, 0 if by_rows else 1)) == bits_of(tensor)


@given(ranks=st.sampled_from([2, 3, 4, 6, 8, 16]), count=st.integers(1, 400))
@settings(max_examples=60)
def test_vocabulary_of_any_size_is_padded_with_zeros_at_its_end(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, count: int
) -> None:
    tensor = random_tensor((count, 3)) + 10
    path = write_file(tmp_path_factory.mktemp("vocabulary") / "model.safetensors", {"lm_head.weight": tensor})
    parts = [load_rank(path, rank, ranks)["lm_head.weight"] for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts)
    assert torch.equal(joined[:count], tensor)
    assert not joined[count:].any()
    assert len(joined) == count if count % ranks == 0 else len(joined) % 64 == 0
    assert len(joined) - count < 64 * ranks


# What does not divide.


def placed(tmp_path: Path, tensors: Mapping[str, Any], ranks: int, config: Any = None, **more: Any) -> Any:
    """The placements of rank 0 of tensors that are given by shape."""
    made_tensors = {
        name: random_tensor(shape) if isinstance(shape, tuple) else shape for name, shape in tensors.items()
    }
    path = write_file(tmp_path / "model.safetensors", made_tensors, config or {})
    return place_shard(open_checkpoint(path), Shard(rank=0, ranks=ranks, **more))


@pytest.mark.parametrize(
    ("tensors", "ranks", "config", "words"),
    [
        ({MLP + "up_proj.weight": (6, 4)}, 4, {}, ["[6, 4]", "6 along dimension 0", "4 ranks"]),
        ({MLP + "down_proj.weight": (4, 6)}, 4, {}, ["[4, 6]", "6 along dimension 1", "4 ranks"]),
        ({MLP + "up_proj.bias": (6,)}, 4, {}, ["[6]", "6 along dimension 0"]),
        ({MLP + "up_proj.weight": (2, 4)}, 4, {}, ["[2, 4]", "2 along dimension 0"]),
        ({ATTENTION + "q_proj.weight": (24, 4)}, 4, {"num_attention_heads": 6}, ["6 heads", "dimension 0", "4 ranks"]),
        ({ATTENTION + "q_proj.weight": (8, 4)}, 8, {"num_attention_heads": 4}, ["4 heads", "8 ranks"]),
        ({ATTENTION + "o_proj.weight": (4, 24)}, 4, {"num_attention_heads": 6}, ["6 heads", "dimension 1"]),
        (
            {ATTENTION + "k_proj.weight": (12, 4)},
            4,
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            ["3 heads", "4 ranks"],
        ),
        (
            {ATTENTION + "k_proj.bias": (24,)},
            4,
            {"num_attention_heads": 8, "num_key_value_heads": 6},
            ["6 heads", "4 ranks"],
        ),
        ({ATTENTION + "k_proj.weight": (24, 4)}, 4, {"num_attention_heads": 6}, ["6 heads"]),
        ({ATTENTION + "sinks": (6,)}, 4, {"num_attention_heads": 6}, ["6 heads"]),
        ({ATTENTION + "qkv_proj.weight": (12, 4)}, 2, {}, ["num_attention_heads", "num_key_value_heads"]),
        ({ATTENTION + "qkv_proj.weight": (13, 4)}, 2, {"num_attention_heads": 2}, ["13 rows", "num_attention_heads"]),
        (
            {ATTENTION + "qkv_proj.weight": (48, 4)},
            4,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            ["6 heads", "4 ranks"],
        ),
        (
            {ATTENTION + "qkv_proj.weight": (32, 4)},
            8,
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            ["4 heads", "8 ranks"],
        ),
        ({MLP + "gate_up_proj.weight": (7, 4)}, 2, {}, ["7 rows", "two fused parts"]),
        ({MLP + "gate_up_proj.weight": (12, 4)}, 4, {}, ["6 along dimension 0"]),
        ({MLP + "experts.gate_up_proj_bias": (2, 12)}, 4, {}, ["6 gate-up pairs", "4 ranks"]),
        ({MLP + "experts.down_proj_blocks": (2, 8, 3, 16)}, 2, {}, ["3 along dimension 2", "2 ranks"]),
        (
            {MLP + "experts.gate_up_proj": (2, 8, 12), MLP + "experts.down_proj": (2, 6, 8)},
            4,
            {},
            ["along dimension", "4 ranks"],
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_names_the_tensor(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], ranks: int, config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        placed(tmp_path, tensors, ranks, config)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert any(repr(name) in message for name in tensors)


def test_block_scales_whose_blocks_would_be_split(tmp_path: Path) -> None:
    """192 rows a rank are one block and a half: no rank could scale its part."""
    name = MLP + "up_proj.weight"
    with pytest.raises(PlacementError, match=r"up_proj\.weight_scale_inv.*rows 0 to 192.*blocks of 128.*2 ranks"):
        placed(tmp_path, {name: (384, 4), name + "_scale_inv": (3, 1)}, 2)


def test_block_scales_whose_last_block_is_not_full(tmp_path: Path) -> None:
    """300 rows are three blocks, of which the second rank keeps the one that 44 rows fill."""
    name = MLP + "up_proj.weight"
    scales = random_tensor((3, 1), torch.float32)
    path = write_file(tmp_path / "model.safetensors", {name: random_tensor((300, 4)), name + "_scale_inv": scales})
    with pytest.raises(PlacementError, match="blocks of 128"):
        load_rank(path, 0, 2)
    path = write_file(
        tmp_path / "model.safetensors",
        {name: random_tensor((320, 4)), name + "_scale_inv": random_tensor((3, 1), torch.float32)},
        {"quantization_config": {"weight_block_size": [160, 128]}},
    )
    with pytest.raises(PlacementError, match=r"weight_scale_inv"):
        load_rank(path, 0, 4)


def test_block_scales_without_their_weight(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"scales .*up_proj\.weight, which the checkpoint does not hold"):
        placed(tmp_path, {MLP + "up_proj.weight_scale_inv": (4, 4)}, 2)


def test_four_bit_elements_are_not_torn_apart(tmp_path: Path) -> None:
    """Six elements in a row are three bytes: two ranks cannot share the middle one."""
    tensors = {MLP + "down_proj.weight": random_tensor((4, 3), torch.float4_e2m1fn_x2)}
    with pytest.raises(PlacementError, match=r"down_proj\.weight"):
        placed(tmp_path, tensors, 2)


def test_heads_unknown_cut_in_equal_blocks(tmp_path: Path) -> None:
    tensors = {ATTENTION + "q_proj.weight": (12, 4), ATTENTION + "k_proj.weight": (4, 4)}
    assert [placement.shape for placement in placed(tmp_path, tensors, 4)] == [(1, 4), (3, 4)]


@pytest.mark.parametrize("config", [{"num_attention_heads": "8"}, {"num_attention_heads": True}, {"text_config": 7}])
def test_config_that_gives_no_usable_numbers_is_as_good_as_none(tmp_path: Path, config: dict[str, Any]) -> None:
    (placement,) = placed(tmp_path, {ATTENTION + "q_proj.weight": (12, 4)}, 4, config)
    assert placement.shape == (3, 4)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, -1), (5, 4)])
def test_rank_that_does_not_exist(rank: int, ranks: int) -> None:
    with pytest.raises(InputError, match=f"rank {rank} of {ranks} ranks does not exist"):
        Shard(rank=rank, ranks=ranks)


# A plan of the user's.


def loaded_with(tmp_path: Path, tensors: Mapping[str, tuple[int, ...]], overrides: dict[str, str]) -> Any:
    """Rank 1 of 2 with overrides, and the whole tensors."""
    made_tensors = {name: random_tensor(shape, seed=len(name)) for name, shape in tensors.items()}
    path = write_file(tmp_path / "model.safetensors", made_tensors)
    return load_rank(path, 1, 2, overrides), made_tensors


def test_override_wins_over_the_table(tmp_path: Path) -> None:
    up, down, gate = (f"{MLP}{name}_proj.weight" for name in ("up", "down", "gate"))
    shapes = {up: (4, 6), down: (6, 4), gate: (4, 6), "custom.block.weight": (4, 6), "other.fused.weight": (8, 2)}
    overrides = {
        "mlp.up_proj": "replicate",
        "layers.*.mlp.down_proj": "colwise",
        "custom.block": "rowwise",
        "other.*": "packed_colwise",
    }
    got, tensors = loaded_with(tmp_path, shapes, overrides)
    assert_same(got[up], tensors[up])
    assert_same(got[down], tensors[down][3:])
    assert_same(got[gate], tensors[gate][2:])
    assert_same(got["custom.block.weight"], tensors["custom.block.weight"][:, 3:].contiguous())
    assert_same(got["other.fused.weight"], tensors["other.fused.weight"][[2, 3, 6, 7]])


def test_first_override_that_matches_wins(tmp_path: Path) -> None:
    name = MLP + "up_proj.weight"
    got, tensors = loaded_with(tmp_path, {name: (4, 6)}, {"**": "replicate", "mlp.up_proj": "rowwise"})
    assert_same(got[name], tensors[name])


def test_override_may_name_one_layer(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 3)]
    for number in (0, 3):
        got, tensors = loaded_with(
            tmp_path, dict.fromkeys(names, (4, 6)), {f"layers.{number}.mlp.up_proj": "replicate"}
        )
        assert {name: len(got[name]) for name in names} == {name: 4 if f".{number}." in name else 2 for name in tensors}


def test_override_of_the_output_head_is_no_vocabulary_any_more(tmp_path: Path) -> None:
    got, tensors = loaded_with(tmp_path, {"lm_head.weight": (5, 6)}, {"lm_head": "rowwise"})
    assert_same(got["lm_head.weight"], tensors["lm_head.weight"][:, 3:].contiguous())
    with pytest.raises(PlacementError, match=r"lm_head\.weight"):
        loaded_with(tmp_path, {"lm_head.weight": (5, 7)}, {"lm_head": "rowwise"})


def test_embedding_may_be_cut_by_columns(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    got, tensors = loaded_with(tmp_path, {name: (5, 6)}, {"embed_tokens": "embedding_colwise"})
    assert_same(got[name], tensors[name][:, 3:].contiguous())


def test_override_that_matches_nothing_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = TensorParallelPlan({"layers.*.mlp.fc3": "colwise", "up_proj": "colwise"})
    with caplog.at_level(logging.WARNING):
        placed(tmp_path, {f"model.layers.{n}.mlp.up_proj.weight": (4, 4) for n in range(3)}, 2, plan=plan)
    assert [record.getMessage() for record in caplog.records] == [
        f"tp plan: 'layers.*.mlp.fc3' matches no tensor of {tmp_path / 'model.safetensors'}"
    ]


def test_model_that_no_rule_knows_warns_and_loads_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (placement,) = placed(tmp_path, {"encoder.block.3.attention.weight": (5, 5)}, 4)
    assert placement.shape == (5, 5)
    assert placement.moves == ()
    (record,) = caplog.records
    assert "no tensor-parallel rule applies" in record.getMessage()
    assert "4 ranks" in record.getMessage()


def test_one_rank_and_a_known_model_warn_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        placed(tmp_path, {"encoder.block.3.attention.weight": (5, 5)}, 1)
        placed(tmp_path, {LAYER + "mlp.up_proj.weight": (4, 4)}, 2)
    assert caplog.records == []


def test_shard_converts_plain_floats(tmp_path: Path) -> None:
    tensors = {MLP + "down_proj.weight": random_tensor((6, 8)), MLP + "up_proj.weight": random_tensor((8, 6), seed=1)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    got: dict[str, torch.Tensor] = {}
    loadmaster.load(got, path, shard=Shard(rank=1, ranks=2), dtype=torch.float32)
    assert_same(got[MLP + "down_proj.weight"], tensors[MLP + "down_proj.weight"][:, 4:].float().contiguous())
    assert_same(got[MLP + "up_proj.weight"], tensors[MLP + "up_proj.weight"][4:].float())
