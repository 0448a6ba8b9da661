"""Expert banks: every byte as plain torch operations on whole tensors have it, for every format and every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster import BankLayout, ExpertShard, load_experts, open_checkpoint
from loadmaster.checkpoint import pieces, vectored
from loadmaster.checkpoint.bank_layout import LAYOUTS, Bank
from loadmaster.checkpoint.verify import verify_banks
from loadmaster.errors import CheckpointError, PlacementError

from .helpers.children import run_child
from .helpers.experts import FAMILIES, SIZES, Banks, Sizes, assert_banks, loaded, moe_tensors, wanted_banks, write_moe
from .helpers.files import assert_same, bits_of, described, random_tensor, write_raw
from .helpers.headers import Pairs, dump

SHARDS = {
    "whole": ExpertShard(),
    **{f"rank {rank} of 2": ExpertShard(tp_rank=rank, tp_ranks=2) for rank in range(2)},
    **{f"rank {rank} of 4": ExpertShard(tp_rank=rank, tp_ranks=4) for rank in (0, 3)},
    **{f"block {rank} of 2": ExpertShard(ep_rank=rank, ep_ranks=2) for rank in range(2)},
    "block 3 of 4": ExpertShard(ep_rank=3, ep_ranks=4),
    **{f"stride {rank} of 2": ExpertShard(ep_rank=rank, ep_ranks=2, ep="strided") for rank in range(2)},
    "rank 1 of 2, block 1 of 2": ExpertShard(tp_rank=1, tp_ranks=2, ep_rank=1, ep_ranks=2),
    "rank 0 of 4, stride 1 of 2": ExpertShard(tp_rank=0, tp_ranks=4, ep_rank=1, ep_ranks=2, ep="strided"),
}
KEPT = {
    "block 0 of 2": [0, 1],
    "block 1 of 2": [2, 3],
    "block 3 of 4": [3],
    "stride 0 of 2": [0, 2],
    "stride 1 of 2": [1, 3],
    "rank 1 of 2, block 1 of 2": [2, 3],
    "rank 0 of 4, stride 1 of 2": [1, 3],
}


# Every byte.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """A checkpoint of each family: layers 1 and 3 have experts, those of a layer lie in three files."""
    made = {}
    for family, sizes in SIZES.items():
        tensors = moe_tensors(family, sizes, layers=(1, 3))
        folder = tmp_path_factory.mktemp("moe") / family
        made[family] = write_moe(folder, tensors, lambda name: sum(map(ord, name)) % 3), tensors
    return made


@pytest.mark.parametrize("where", SHARDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_banks_are_those_of_plain_operations(
    models: dict[str, tuple[Path, dict[str, torch.Tensor]]], family: str, where: str
) -> None:
    path, tensors = models[family]
    shard = SHARDS[where]
    banks: Banks = {}
    report = load_experts(banks, path, shard=shard)
    kept = KEPT.get(where, [0, 1, 2, 3])
    assert list(banks) == [1, 3]
    for layer, of_layer in banks.items():
        assert_banks(of_layer, wanted_banks(family, tensors, layer, kept, shard.tp_rank, shard.tp_ranks))
    placed = sum(bank.nbytes for of_layer in banks.values() for bank in of_layer.values())
    assert report.bytes_placed == placed
    verified = verify_banks(banks, open_checkpoint(path), LAYOUTS[family], shard)
    assert verified.bytes == placed
    assert verified.tensors == 2 * len(LAYOUTS[family].banks)


E, H, I = 4, 64, 128  # noqa: E741  the words of the formats
FORMS: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    "nvfp4-modelopt": {
        "gate_up_packed": (torch.uint8, (E, 2 * I, H // 2)),
        "gate_up_scale": (torch.float8_e4m3fn, (E, 2 * I, H // 16)),
        "gate_up_global": (torch.float16, (E, 2 * I)),
        "down_packed": (torch.uint8, (E, H, I // 2)),
        "down_scale": (torch.float8_e4m3fn, (E, H, I // 16)),
        "down_global": (torch.float16, (E, H)),
    },
    "mxfp4-gpt-oss": {
        "gate_up_blocks": (torch.uint8, (E, 2 * I, H // 32, 16)),
        "gate_up_scales": (torch.uint8, (E, 2 * I, H // 32)),
        "gate_up_bias": (torch.bfloat16, (E, 2 * I)),
        "down_blocks": (torch.uint8, (E, H, I // 32, 16)),
        "down_scales": (torch.uint8, (E, H, I // 32)),
        "down_bias": (torch.bfloat16, (E, H)),
    },
    "fp8-blocks": {
        "gate_up": (torch.float8_e4m3fn, (E, 2 * I, H)),
        "gate_up_scale": (torch.float32, (E, 2, 1)),
        "down": (torch.float8_e4m3fn, (E, H, I)),
        "down_scale": (torch.float32, (E, 1, 1)),
    },
    "per-expert": {"gate_up": (torch.bfloat16, (E, 2 * I, H)), "down": (torch.bfloat16, (E, H, I))},
}
FORMS["nvfp4-compressed-tensors"] = FORMS["nvfp4-modelopt"]
FORMS["per-expert-mixtral"] = FORMS["fused"] = FORMS["per-expert"]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_dtypes_and_shapes_of_the_banks_are_these(family: str, tmp_path: Path) -> None:
    (banks,) = loaded(write_moe(tmp_path, moe_tensors(family, Sizes(E, H, I)))).values()
    assert list(banks) == list(FORMS[family])
    assert {name: (bank.dtype, tuple(bank.shape)) for name, bank in banks.items()} == FORMS[family]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Sizes, ExpertShard, list[int], int]:
    """A family, its sizes, a rank of both kinds of parallelism, layers and the number of files."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    tp_ranks = draw(st.sampled_from([1, 1, 2, 3, 4]))
    ep_ranks = draw(st.integers(1, 3))
    each = 1 if family == "fp8-blocks" else draw(st.integers(1, 3))
    sizes = Sizes(
        ep_ranks * draw(st.integers(1, 3)),
        FAMILIES[family].hidden * draw(st.integers(1, 3)),
        FAMILIES[family].intermediate * tp_ranks * each,
    )
    shard = ExpertShard(
        tp_rank=draw(st.integers(0, tp_ranks - 1)),
        tp_ranks=tp_ranks,
        ep_rank=draw(st.integers(0, ep_ranks - 1)),
        ep_ranks=ep_ranks,
        ep=draw(st.sampled_from(["blocks", "strided"])),
    )
    layers = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=3)))
    return family, sizes, shard, layers, draw(st.integers(1, 3))


@given(case=cases(), order=st.randoms(use_true_random=False), threads=st.integers(1, 3))
@settings(max_examples=80)
def test_banks_of_any_shape_rank_and_order_in_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[str, Sizes, ExpertShard, list[int], int],
    order: Any,
    threads: int,
) -> None:
    family, sizes, shard, layers, files = case
    tensors = moe_tensors(family, sizes, layers)
    names = list(tensors)
    order.shuffle(names)
    file_of = {name: order.randrange(files) for name in names}
    path = write_moe(tmp_path_factory.mktemp("any"), {name: tensors[name] for name in names}, file_of.__getitem__)
    banks = loaded(path, shard=shard, threads=min(threads, len(os.sched_getaffinity(0))))
    if shard.ep == "strided":
        kept = [expert for expert in range(sizes.experts) if expert % shard.ep_ranks == shard.ep_rank]
    else:
        kept = list(torch.arange(sizes.experts).chunk(shard.ep_ranks)[shard.ep_rank])
    assert list(banks) == layers
    for layer in layers:
        assert_banks(
            banks[layer], wanted_banks(family, tensors, layer, [*map(int, kept)], shard.tp_rank, shard.tp_ranks)
        )
    verify_banks(banks, open_checkpoint(path), LAYOUTS[family], shard)


def test_scales_are_cast_as_torch_casts_them(tmp_path: Path) -> None:
    """Ties, denormals, zero, the largest half, what rounds up to infinity, and infinity itself."""
    values = [1.0, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 3e-8, 1e-30, 0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30]
    values += [float("inf"), -3.0, 1e-41]
    for family, scalar in (("nvfp4-modelopt", "weight_scale_2"), ("nvfp4-compressed-tensors", "weight_global_scale")):
        tensors = moe_tensors(family, Sizes(len(values), 16, 16))
        for expert, value in enumerate(values):
            for turn, name in enumerate(("gate", "up", "down")):
                scale = values[(expert + turn) % len(values)]
                tensors[f"model.layers.0.mlp.experts.{expert}.{name}_proj.{scalar}"] = torch.tensor(scale)
            assert value == values[expert]
        path = write_moe(tmp_path / family, tensors)
        banks = loaded(path)
        assert_banks(banks[0], wanted_banks(family, tensors, 0, range(len(values))))
        assert banks[0]["down_global"].isinf().any()
        verify_banks(banks, open_checkpoint(path), LAYOUTS[family], ExpertShard())


def test_a_scale_of_one_element_is_a_scalar_too(tmp_path: Path) -> None:
    tensors = moe_tensors("nvfp4-compressed-tensors", Sizes(2, 16, 16))
    for name in tensors:
        if name.endswith("global_scale"):
            tensors[name] = tensors[name].reshape(1)
    banks = loaded(write_moe(tmp_path, tensors))
    assert_banks(banks[0], wanted_banks("nvfp4-compressed-tensors", tensors, 0, [0, 1]))


def test_gate_and_up_of_interleaved_rows_come_to_their_halves(tmp_path: Path) -> None:
    """Rows 0, 2, 4, ... before rows 1, 3, 5, ..., more of them than one scratch holds."""
    tensors = moe_tensors("mxfp4-gpt-oss", Sizes(2, 2048, 1024))
    bias = torch.arange(4096, dtype=torch.int32).reshape(2, 2048).to(torch.bfloat16)
    tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = bias
    banks = loaded(write_moe(tmp_path, tensors))
    assert_banks(banks[0], wanted_banks("mxfp4-gpt-oss", tensors, 0, [0, 1]))
    assert_same(banks[0]["gate_up_bias"], torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))


def test_rows_longer_than_a_piece_of_reading(tmp_path: Path) -> None:
    """Parts of several MiB, whole and cut: long runs are read one by one, and pieces end in the middle of a part."""
    tensors = moe_tensors("per-expert", Sizes(2, 2, 1 << 20))
    path = write_moe(tmp_path, tensors)
    for rank in range(2):
        banks = loaded(path, shard=ExpertShard(tp_rank=rank, tp_ranks=2))
        assert_banks(banks[0], wanted_banks("per-expert", tensors, 0, [0, 1], rank, 2))
    assert_banks(loaded(path)[0], wanted_banks("per-expert", tensors, 0, [0, 1]))


def test_a_layout_of_ones_own_fills_its_banks(tmp_path: Path) -> None:
    """One scale for gate and up, spread over both; other names; a bank that no rank cuts."""
    layout = BankLayout(
        name="own",
        pattern=r"blocks\.(?P<layer>\d+)\.experts\.(?P<projection>\w+)\.(?P<expert>\d+)",
        ignore=r".*\.experts\.router",
        banks={
            "scale": Bank(parts=("factor",), spread="first", reciprocal=True),
            "first": Bank(parts=("one", "two"), intermediate=0),
            "rest": Bank(parts=("rest",)),
        },
    )
    tensors = {
        f"blocks.7.experts.{name}.{expert}": random_tensor(shape, dtype, seed=10 * expert + seed)
        for expert in (1, 0)
        for seed, (name, shape, dtype) in enumerate(
            [
                ("one", (4, 3), torch.float32),
                ("factor", (1,), torch.float32),
                ("two", (4, 3), torch.float32),
                ("rest", (2, 2, 2), torch.uint8),
            ]
        )
    }
    tensors["blocks.7.experts.router"] = random_tensor((3,))
    banks = loaded(write_moe(tmp_path, tensors), layout=layout, shard=ExpertShard(tp_rank=1, tp_ranks=2))

    def of(name: str) -> list[torch.Tensor]:
        return [tensors[f"blocks.7.experts.{name}.{expert}"] for expert in (0, 1)]

    assert list(banks) == [7]
    wanted = {
        "scale": (1 / torch.stack(of("factor"))).half().expand(2, 4),
        "first": torch.stack([torch.cat([one[2:], two[2:]]) for one, two in zip(of("one"), of("two"), strict=True)]),
        "rest": torch.stack(of("rest")),
    }
    assert_banks(banks[7], wanted)


@pytest.mark.parametrize("halves", ["halves", "interleaved"])
def test_halves_of_one_tensor_of_each_expert(tmp_path: Path, halves: str) -> None:
    layout = BankLayout(
        name="own",
        pattern=r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)",
        banks={"both": Bank(parts=("both",), intermediate=0, **{halves: True})},
    )
    tensors = {f"layers.0.experts.{expert}.both": random_tensor((12, 5), seed=expert) for expert in range(3)}
    path = write_moe(tmp_path, tensors)
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            rows = []
            for tensor in tensors.values():
                gate, up = tensor.chunk(2) if halves == "halves" else (tensor[::2], tensor[1::2])
                rows.append(torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]]))
            banks = loaded(path, layout=layout, shard=ExpertShard(tp_rank=rank, tp_ranks=ranks))
            assert_banks(banks[0], {"both": torch.stack(rows)})
            verify_banks(banks, open_checkpoint(path), layout, ExpertShard(tp_rank=rank, tp_ranks=ranks))


def test_the_text_config_tells_the_number_of_experts(tmp_path: Path) -> None:
    tensors = moe_tensors("per-expert", Sizes(3, 2, 2))
    for number, config in enumerate(
        [
            {"text_config": {"num_experts": 3}, "num_experts": 9},
            {"num_local_experts": 3},
            {"n_routed_experts": 3, "num_experts": None},
            {"num_experts": 0},
            {"num_experts": True},
            {"text_config": None},
        ]
    ):
        banks = loaded(write_moe(tmp_path / str(number), tensors, config=config))
        assert_banks(banks[0], wanted_banks("per-expert", tensors, 0, [0, 1, 2]))


def test_path_may_be_text_or_a_checkpoint_and_a_part_of_one(tmp_path: Path) -> None:
    """Experts of a second model under another prefix are left out by a subset."""
    tensors = moe_tensors("per-expert", Sizes(2, 3, 4))
    path = write_moe(tmp_path, {**tensors, "mtp.layers.0.mlp.experts.0.up_proj.weight": random_tensor((3, 3))})
    wanted = wanted_banks("per-expert", tensors, 0, [0, 1])
    with pytest.raises(CheckpointError, match=r"'mtp\.layers\.0\.mlp\.experts\.0\.up_proj\.weight'"):
        loaded(str(path))
    assert_banks(loaded(open_checkpoint(path).subset(lambda name: not name.startswith("mtp.")))[0], wanted)


def test_every_rank_reads_no_more_than_it_keeps_where_parts_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "GAP_BYTES", 0)
    tensors = moe_tensors("nvfp4-modelopt", Sizes(4, 32, 64))
    report = load_experts({}, write_moe(tmp_path, tensors), shard=ExpertShard(ep_rank=1, ep_ranks=2))
    kept = [
        tensor.nbytes
        for name, tensor in tensors.items()
        if (".experts.2." in name or ".experts.3." in name) and "input_scale" not in name
    ]
    assert report.ranks[0].bytes_read == sum(kept)
    assert report.ranks[0].tensors == len(kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_parallel_rank_reads_its_columns_alone_and_short_ones_by_whole_rows(
    models: dict[str, tuple[Path, dict[str, torch.Tensor]]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "GAP_BYTES", 0)
    path, _ = models[family]
    banks: Banks = {}
    short = load_experts(banks, path, shard=ExpertShard(tp_rank=1, tp_ranks=2)).ranks[0].bytes_read
    spread = [name for name, bank in LAYOUTS[family].banks.items() if bank.spread]
    needed = sum(bank.nbytes for layer in banks.values() for name, bank in layer.items() if name not in spread)
    scalars = 2 * 4 * 3 * 4 if spread else 0  # layers, experts, projections, bytes
    monkeypatch.setattr(vectored, "NARROW_RUN_BYTES", 0)
    exact = load_experts({}, path, shard=ExpertShard(tp_rank=1, tp_ranks=2)).ranks[0].bytes_read
    assert exact == needed + scalars
    assert exact < short < 2 * exact


@pytest.mark.parametrize(
    ("shard", "rank"),
    [
        (None, 0),
        (ExpertShard(tp_rank=1, tp_ranks=2), 1),
        (ExpertShard(ep_rank=3, ep_ranks=4), 3),
        (ExpertShard(tp_rank=1, tp_ranks=2, ep_rank=3, ep_ranks=4), 1),
    ],
)
def test_the_report_says_what_was_done(tmp_path: Path, shard: ExpertShard | None, rank: int) -> None:
    path = write_moe(tmp_path, moe_tensors("per-expert", Sizes(4, 8, 8)))
    banks: Banks = {}
    report = load_experts(banks, path, shard=shard, threads=1)
    (of_rank,) = report.ranks
    assert (report.checkpoint, of_rank.rank, of_rank.threads) == (str(path), rank, 1)
    assert of_rank.bytes_placed == sum(bank.nbytes for bank in banks[0].values())
    assert sum(of_rank.seconds.values()) == pytest.approx(report.load_seconds, abs=1e-3)


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensors = moe_tensors("mxfp4-gpt-oss", Sizes(2, 64, 64), layers=range(5))
    load_experts({}, write_moe(tmp_path, tensors), progress=lambda done, total: seen.append((done, total)))
    amounts = [done for done, _ in seen]
    assert amounts == sorted(amounts)
    assert seen[-1] == (sum(tensor.nbytes for name, tensor in tensors.items() if ".mlp.experts." in name),) * 2


def test_four_bit_tensors_are_banks_too(tmp_path: Path) -> None:
    """Two values share a byte; columns are cut between bytes."""
    names = [f"layers.0.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    infos = [(name, described("F4", [2, 4], 4 * at, 4 * at + 4)) for at, name in enumerate(names)]
    path = write_raw(tmp_path / "model.safetensors", dump(Pairs(infos)), bytes(range(12)))
    banks = loaded(path, shard=ExpertShard(tp_rank=1, tp_ranks=2))[0]
    assert {name: (bank.dtype, tuple(bank.shape)) for name, bank in banks.items()} == {
        "gate_up": (torch.float4_e2m1fn_x2, (1, 2, 2)),
        "down": (torch.float4_e2m1fn_x2, (1, 2, 1)),
    }
    assert bits_of(banks["gate_up"]) == bytes([2, 3, 6, 7])
    assert bits_of(banks["down"]) == bytes([9, 11])
    with pytest.raises(PlacementError, match="do not divide among 4 ranks"):
        loaded(path, shard=ExpertShard(tp_rank=1, tp_ranks=4))


@pytest.mark.processes
@pytest.mark.parametrize("family", ["nvfp4-modelopt", "mxfp4-gpt-oss"])
def test_the_process_holds_the_banks_and_little_more(tmp_path: Path, family: str) -> None:
    """No copy of a tensor lies anywhere in between: 2 MiB for a huge page begun, 1 MiB of scratch a thread."""
    path = write_moe(tmp_path / "large", moe_tensors(family, Sizes(4, 2048, 2048), (0, 1)))
    small = write_moe(tmp_path / "small", moe_tensors(family, Sizes(4, 32, 64)))
    code = """
        import sys, torch
        from loadmaster import load_experts
        from loadmaster.observe.memory import peak_rss
        load_experts({}, sys.argv[2])
        before = peak_rss()
        banks = {}
        load_experts(banks, sys.argv[1])
        held = sum(bank.nbytes for of_layer in banks.values() for bank in of_layer.values())
        print(held, peak_rss() - before)
    """
    done = run_child(code, tmp_path, str(path), str(small))
    assert done.returncode == 0, done.stderr
    held, risen = map(int, done.stdout.split())
    assert held > 48 << 20
    assert risen < held + (8 << 20)
