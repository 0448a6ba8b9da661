"""Verification: one wrong bit anywhere, padding included, is found and named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loadmaster import Checkpoint, ExpertShard, Move, Placement, Shard, load, load_experts, open_checkpoint
from loadmaster.checkpoint import verify
from loadmaster.checkpoint.bank_layout import LAYOUTS
from loadmaster.checkpoint.placement import place_whole
from loadmaster.checkpoint.sharding import place_shard
from loadmaster.checkpoint.verify import VerificationError, verify_banks, verify_placements
from loadmaster.errors import LoadmasterError, MissingDependencyError

from .helpers.experts import FAMILIES, SIZES, Banks, moe_tensors, write_moe
from .helpers.files import random_tensor, write_file

UP, DOWN, FUSED, HEAD = (
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.gate_up_proj.weight",
    "lm_head.weight",
)
Loaded = tuple[dict[str, torch.Tensor], Checkpoint, list[Placement]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    tensors = {
        UP: random_tensor((8, 6), seed=1),
        DOWN: random_tensor((6, 8), seed=2),
        FUSED: random_tensor((8, 3), torch.float32, seed=3),
        HEAD: random_tensor((5, 4), seed=4) + 10,
        "norm": random_tensor((7,), torch.float64, seed=5),
        "scalar": random_tensor((), torch.float32, seed=6),
        "counts": random_tensor((4,), torch.int64, seed=7),
        "scaled": random_tensor((4, 4), torch.float8_e4m3fn, seed=8),
        "exponents": random_tensor((3, 4), torch.float8_e8m0fnu, seed=9),
        "mask": random_tensor((3, 3), torch.bool, seed=10),
        "empty": torch.empty(3, 0),
        "none": torch.empty(0),
    }
    return open_checkpoint(write_file(tmp_path / "model.safetensors", tensors))


def loaded(checkpoint: Checkpoint, placements: list[Placement]) -> Loaded:
    tensors: dict[str, torch.Tensor] = {}
    load(tensors, checkpoint, placement=placements)
    return tensors, checkpoint, placements


@pytest.fixture(params=["whole", "rank 0 of 2", "rank 1 of 2", "whole in float32", "rank 1 of 2 in float64"])
def result(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Loaded:
    placements = {
        "whole": lambda: place_whole(checkpoint.values()),
        "rank 0 of 2": lambda: place_shard(checkpoint, Shard(rank=0, ranks=2)),
        "rank 1 of 2": lambda: place_shard(checkpoint, Shard(rank=1, ranks=2)),
        "whole in float32": lambda: place_whole(checkpoint.values(), "F32"),
        "rank 1 of 2 in float64": lambda: place_shard(checkpoint, Shard(rank=1, ranks=2), "F64"),
    }[request.param]()
    return loaded(checkpoint, placements)


def test_right_tensors_are_counted_to_the_byte(result: Loaded) -> None:
    verified = verify_placements(*result)
    tensors = result[0]
    assert verified.tensors == len(tensors)
    assert verified.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_every_flipped_byte_is_found_and_its_tensor_named(result: Loaded) -> None:
    """Each byte of each tensor in turn, one bit of it: also NaN payloads and the sign of zero."""
    tensors, checkpoint, placements = result
    for placement in placements:
        tensor = tensors[placement.name]
        memory = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        for byte in range(0, len(memory), 3):
            memory[byte] ^= 1 << byte % 8
            with pytest.raises(VerificationError, match=f"tensor '{placement.name}'") as caught:
                verify_placements(tensors, checkpoint, [placement])
            assert checkpoint.path in str(caught.value) or "padding" in str(caught.value)
            memory[byte] ^= 1 << byte % 8
    verify_placements(tensors, checkpoint, placements)


def test_first_wrong_byte_is_told(checkpoint: Checkpoint) -> None:
    tensors, _, placements = loaded(checkpoint, place_whole([checkpoint[UP]]))
    memory = tensors[UP].reshape(-1).view(torch.uint8)
    memory[37] ^= 1
    memory[50] ^= 1
    with pytest.raises(VerificationError, match="at byte 37 of"):
        verify_placements(tensors, checkpoint, placements)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_padding_that_is_not_zero_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    """Not only a number that is not 0: minus zero is another byte too."""
    checkpoint = open_checkpoint(write_file(tmp_path / "model.safetensors", {HEAD: random_tensor((5, 4), dtype)}))
    tensors, _, placements = loaded(checkpoint, place_shard(checkpoint, Shard(rank=0, ranks=2)))
    assert tensors[HEAD].shape == (32, 4)
    verify_placements(tensors, checkpoint, placements)
    memory = tensors[HEAD].view(torch.uint8)
    for row, bit in ((5, 1), (31, 128)):
        memory[row, -1] = bit
        with pytest.raises(VerificationError, match=r"tensor 'lm_head\.weight' .*not zero in its padding"):
            verify_placements(tensors, checkpoint, placements)
        memory[row, -1] = 0


@pytest.mark.parametrize("row", [0, 1, 4, 7])
def test_gap_before_and_between_moves_is_padding_too(checkpoint: Checkpoint, row: int) -> None:
    gaps = Placement(checkpoint[HEAD], HEAD, "BF16", (8, 4), (Move(0, 0, 2, 2), Move(0, 3, 5, 5)))
    tensors, _, placements = loaded(checkpoint, [gaps])
    verify_placements(tensors, checkpoint, placements)
    tensors[HEAD][row, 1] = 1
    with pytest.raises(VerificationError, match=r"lm_head\.weight"):
        verify_placements(tensors, checkpoint, placements)


def test_rows_of_a_long_tensor_are_compared_in_pieces(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK_BYTES", 30)
    tensors, _, placements = loaded(checkpoint, place_shard(checkpoint, Shard(rank=1, ranks=2)))
    verify_placements(tensors, checkpoint, placements)
    for name in (UP, FUSED):
        for byte in range(tensors[name].nbytes):
            memory = tensors[name].reshape(-1).view(torch.uint8)
            memory[byte] ^= 4
            with pytest.raises(VerificationError, match=name):
                verify_placements(tensors, checkpoint, placements)
            memory[byte] ^= 4


@pytest.mark.parametrize("where", [None, Shard(rank=1, ranks=2)])
def test_four_bit_tensors_are_verified(tmp_path: Path, where: Shard | None) -> None:
    """The library's slices count elements there, and ours bytes."""
    tensors = {UP: random_tensor((4, 6), torch.float4_e2m1fn_x2), DOWN: random_tensor((4, 6), torch.float4_e2m1fn_x2)}
    checkpoint = open_checkpoint(write_file(tmp_path / "model.safetensors", tensors))
    placements = place_shard(checkpoint, where) if where else place_whole(checkpoint.values())
    got, _, _ = loaded(checkpoint, placements)
    assert verify_placements(got, checkpoint, placements).bytes == sum(tensor.nbytes for tensor in got.values())
    got[DOWN].view(torch.uint8)[2, 1] ^= 1
    with pytest.raises(VerificationError, match=DOWN):
        verify_placements(got, checkpoint, placements)


def test_several_files_are_verified(tmp_path: Path) -> None:
    for number in range(3):
        write_file(tmp_path / f"part{number}.safetensors", {f"t{number}": random_tensor((3,), seed=number)})
    checkpoint = open_checkpoint(tmp_path)
    tensors, _, placements = loaded(checkpoint, place_whole(checkpoint.values()))
    assert verify_placements(tensors, checkpoint, placements).tensors == 3
    tensors["t2"][0] = 99
    with pytest.raises(VerificationError, match=r"'t2' of .*part2\.safetensors"):
        verify_placements(tensors, checkpoint, placements)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: os.truncate(path, 50),
        lambda path: path.unlink(),
        lambda path: write_file(path, {"another": torch.ones(3)}),
    ],
    ids=["truncated", "removed", "replaced"],
)
def test_file_that_changed_before_it_is_verified_is_one_sentence(
    checkpoint: Checkpoint, spoil: Callable[[Path], None]
) -> None:
    tensors, _, placements = loaded(checkpoint, place_whole(checkpoint.values()))
    spoil(Path(checkpoint.path))
    with pytest.raises(LoadmasterError) as caught:
        verify_placements(tensors, checkpoint, placements)
    assert checkpoint.path in str(caught.value)


def test_missing_library_is_one_sentence_with_the_command(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _, placements = loaded(checkpoint, place_whole(checkpoint.values()))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loadmaster\[torch\]'"):
        verify_placements(tensors, checkpoint, placements)


# Banks.


@pytest.mark.parametrize("where", [ExpertShard(), ExpertShard(tp_rank=1, tp_ranks=2, ep_rank=1, ep_ranks=2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_byte_of_any_bank_is_found_and_its_expert_named(tmp_path: Path, family: str, where: ExpertShard) -> None:
    """The first and the last byte of each expert's row, and one in between; one bit of it."""
    path = write_moe(tmp_path, moe_tensors(family, SIZES[family], (2,)))
    banks: Banks = {}
    load_experts(banks, path, shard=where)
    checkpoint, layout = open_checkpoint(path), LAYOUTS[family]
    experts = [2, 3] if where.ep_ranks == 2 else [0, 1, 2, 3]
    assert verify_banks(banks, checkpoint, layout, where).tensors == len(layout.banks)
    for name, bank in banks[2].items():
        memory = bank.view(torch.uint8).reshape(len(experts), -1)
        for row, expert in enumerate(experts):
            for byte in (0, memory.shape[1] // 2 + 1, memory.shape[1] - 1):
                memory[row, byte] ^= 1 << byte % 8
                with pytest.raises(
                    VerificationError,
                    match=f"bank {name} of layer 2 differs from the reference at expert {expert}$",
                ):
                    verify_banks({2: {name: bank}}, checkpoint, layout, where)
                memory[row, byte] ^= 1 << byte % 8
    verify_banks(banks, checkpoint, layout, where)


def test_banks_of_another_rank_or_number_of_experts_are_found(tmp_path: Path) -> None:
    path = write_moe(tmp_path, moe_tensors("per-expert", SIZES["per-expert"]))
    banks: Banks = {}
    load_experts(banks, path, shard=ExpertShard(ep_rank=0, ep_ranks=2))
    checkpoint, layout = open_checkpoint(path), LAYOUTS["per-expert"]
    with pytest.raises(VerificationError, match="bank gate_up of layer 0 holds 2 experts, not 4"):
        verify_banks(banks, checkpoint, layout, ExpertShard())
    with pytest.raises(VerificationError, match="bank gate_up of layer 0 differs from the reference at expert 2"):
        verify_banks(banks, checkpoint, layout, ExpertShard(ep_rank=1, ep_ranks=2))
    with pytest.raises(VerificationError, match="bank gate_up of layer 0 differs from the reference at expert 2"):
        verify_banks(banks, checkpoint, layout, ExpertShard(ep_rank=0, ep_ranks=2, ep="strided"))
    with pytest.raises(VerificationError, match="bank gate_up of layer 0 differs from the reference at expert 0"):
        verify_banks(banks, checkpoint, layout, ExpertShard(tp_rank=0, tp_ranks=2, ep_rank=0, ep_ranks=2))


@pytest.mark.parametrize(
    "spoil", [lambda path: os.truncate(path, 50), lambda path: path.unlink()], ids=["truncated", "removed"]
)
def test_file_that_changed_before_its_banks_are_verified_is_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = write_moe(tmp_path, moe_tensors("per-expert", SIZES["per-expert"]))
    banks: Banks = {}
    load_experts(banks, path)
    checkpoint = open_checkpoint(path)
    spoil(path / "part-0.safetensors")
    with pytest.raises(LoadmasterError) as caught:
        verify_banks(banks, checkpoint, LAYOUTS["per-expert"], ExpertShard())
    assert str(path / "part-0.safetensors") in str(caught.value)
