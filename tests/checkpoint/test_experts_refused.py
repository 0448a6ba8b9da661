"""What is no bank: an expert that is missing, given twice or of another shape is one sentence that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster import BankLayout, ExpertShard, load_experts
from loadmaster.checkpoint.bank_layout import LAYOUTS, Bank
from loadmaster.errors import CheckpointError, InputError, PlacementError

from .helpers.experts import SIZES, Banks, Sizes, loaded, moe_tensors, write_moe
from .helpers.files import described, random_tensor, write_raw
from .helpers.headers import Pairs, dump


def spoilt(family: str, change: Callable[[dict[str, torch.Tensor]], Any], sizes: Sizes | None = None) -> Any:
    """The tensors of a family after a change."""
    tensors = moe_tensors(family, sizes or SIZES[family], layers=(1,))
    change(tensors)
    return tensors


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def given(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


def of_all(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Change every tensor of the experts whose name ends so."""

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name and name.endswith(suffix):
                tensors[name] = change(tensor).contiguous()

    return apply


AT = "model.layers.1.mlp.experts."
FP8 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str]] = {
    "an expert is missing": (
        "per-expert",
        lambda tensors: [tensors.pop(f"{AT}2.{name}_proj.weight") for name in ("gate", "up", "down")],
        {},
        r"layer 1: 'gate weight' of expert 2 is missing \(bank gate_up\)",
    ),
    "a projection is missing": (
        "per-expert",
        without(f"{AT}3.up_proj.weight"),
        {},
        r"layer 1: 'up weight' of expert 3 is missing \(bank gate_up\)",
    ),
    "a scale is missing": (
        "nvfp4-modelopt",
        without(f"{AT}0.down_proj.weight_scale_2"),
        {},
        r"layer 1: 'down weight_scale_2' of expert 0 is missing \(bank down_global\)",
    ),
    "a bank is empty": (
        "mxfp4-gpt-oss",
        without(f"{AT}down_proj_bias"),
        {},
        r"{path}: no built-in layout .* 'mxfp4-gpt-oss', needs tensors for down_bias, .*--experts-layout FILE.*",
    ),
    "given twice by two models": (
        "per-expert",
        given("draft.layers.1.mlp.experts.0.up_proj.weight", random_tensor((12, 6))),
        {},
        r"{file}: tensor '(\w+\.)+0\.up_proj\.weight' takes the place that '(\w+\.)+0\.up_proj\.weight' has already",
    ),
    "given twice with another number": (
        "per-expert",
        given(f"{AT}01.up_proj.weight", random_tensor((12, 6))),
        {},
        rf"{{file}}: tensor '{AT}01\.up_proj\.weight' takes the place that '{AT}1\.up_proj\.weight' has already",
    ),
    "another shape than the others": (
        "per-expert",
        given(f"{AT}2.down_proj.weight", random_tensor((6, 11))),
        {},
        rf"{{file}}: tensor '{AT}2\.down_proj\.weight' of dtype BF16 and shape \[6, 11\] does not fit a bank with "
        rf"'{AT}0\.down_proj\.weight' of dtype BF16 and shape \[6, 12\]",
    ),
    "the same size in another shape": (
        "per-expert",
        given(f"{AT}2.gate_proj.weight", random_tensor((6, 12))),
        {},
        rf"{{file}}: tensor '{AT}2\.gate_proj\.weight' of dtype BF16 and shape \[6, 12\] does not fit .*",
    ),
    "another dtype than the others": (
        "per-expert",
        given(f"{AT}3.up_proj.weight", random_tensor((12, 6), torch.float16)),
        {},
        rf"{{file}}: tensor '{AT}3\.up_proj\.weight' of dtype F16 and shape \[12, 6\] does not fit .* dtype BF16 .*",
    ),
    "up of another dtype than gate": (
        "per-expert",
        of_all("up_proj.weight", lambda tensor: tensor.half()),
        {},
        rf"{{file}}: tensor '{AT}0\.up_proj\.weight' of dtype F16 .* does not fit a bank with .*gate_proj.*",
    ),
    "up of another width than gate": (
        "per-expert",
        of_all("up_proj.weight", lambda tensor: tensor[:, :5]),
        {},
        rf"{{file}}: tensor '{AT}0\.up_proj\.weight' .*\[12, 5\] does not fit a bank with .*\[12, 6\]",
    ),
    "up with other rows than gate": (
        "nvfp4-modelopt",
        of_all("up_proj.weight", lambda tensor: tensor[:32]),
        {},
        rf"{{file}}: tensor '{AT}0\.up_proj\.weight' .*\[32, 16\] does not fit a bank with .*\[64, 16\]",
    ),
    "an unknown projection": (
        "per-expert",
        given(f"{AT}0.side_proj.weight", random_tensor((3,))),
        {"layout": LAYOUTS["per-expert"]},
        rf"{{file}}: the experts layout 'per-expert' has no place for tensor '{AT}0\.side_proj\.weight'",
    ),
    "an unknown projection, and no layout was asked for": (
        "nvfp4-modelopt",
        given(f"{AT}0.side_proj.weight", random_tensor((3,))),
        {},
        rf"{{path}}: no built-in .* 'nvfp4-modelopt', does not know '{AT}0\.side_proj\.weight'; .*",
    ),
    "an unknown kind": (
        "nvfp4-modelopt",
        given(f"{AT}0.up_proj.zero_point", random_tensor((3,))),
        {"layout": LAYOUTS["nvfp4-modelopt"]},
        rf"{{file}}: the experts layout 'nvfp4-modelopt' has no place for tensor '{AT}0\.up_proj\.zero_point'",
    ),
    "a part that the table has not": (
        "per-expert",
        lambda tensors: None,
        {"layout": BankLayout(name="own", pattern=LAYOUTS["per-expert"].pattern, banks={"b": Bank(parts=("x y",))})},
        rf"{{file}}: tensor '{AT}0\.gate_proj\.weight' has an unknown projection or kind",
    ),
    "a layout for other names": (
        "per-expert",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name],
        {"layout": LAYOUTS["per-expert"]},
        "{path} has no tensor that the experts layout 'per-expert' knows",
    ),
    "no experts": (
        "per-expert",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name],
        {},
        "{path} has no expert tensors: no name holds '\\.experts\\.'",
    ),
    "a layer that is no number": (
        "per-expert",
        given("layers.first.experts.0.up", random_tensor((3,))),
        {
            "layout": BankLayout(
                name="own",
                pattern=r"layers\.(?P<layer>\w+)\.experts\.(?P<expert>\d+)\.(?P<projection>up)",
                ignore="model.*",
                banks={"b": Bank(parts=("up",))},
            )
        },
        r"{file}: tensor 'layers\.first\.experts\.0\.up': layer 'first' or expert '0' is no number",
    ),
    "a scale that is no scalar": (
        "nvfp4-modelopt",
        given(f"{AT}1.up_proj.weight_scale_2", random_tensor((2,), torch.float32)),
        {},
        rf"{{file}}: tensor '{AT}1\.up_proj\.weight_scale_2' of dtype F32 and shape \[2\] is no single float32 scale",
    ),
    "a scale of another dtype": (
        "nvfp4-modelopt",
        given(f"{AT}1.down_proj.weight_scale_2", random_tensor((2,), torch.bfloat16)),
        {},
        rf"{{file}}: tensor '{AT}1\.down_proj\.weight_scale_2' of dtype BF16 and shape \[2\] is no single .*",
    ),
    "a scalar for a matrix": (
        "per-expert",
        of_all("down_proj.weight", lambda tensor: tensor[0, 0]),
        {},
        rf"{{file}}: tensor '{AT}0\.down_proj\.weight' of shape \[\] is no part of a bank",
    ),
    "a scalar for all experts": (
        "fused",
        of_all("down_proj", lambda tensor: tensor[0, 0, 0]),
        {},
        rf"{{file}}: tensor '{AT}down_proj' of shape \[\] does not hold 4 experts",
    ),
    "scalars for everything": (
        "fused",
        of_all("_proj", lambda tensor: tensor[0, 0, 0]),
        {},
        rf"{{file}}: tensor '{AT}gate_up_proj' of shape \[\] holds no experts",
    ),
    "a vector for all experts": (
        "fused",
        of_all("down_proj", lambda tensor: tensor[:, 0, 0]),
        {},
        rf"{{file}}: tensor '{AT}down_proj' of shape \[4\] is no part of a bank",
    ),
    "no expert in the tensor for all": (
        "fused",
        of_all("_proj", lambda tensor: tensor[:0]),
        {},
        rf"{{file}}: tensor '{AT}gate_up_proj' of shape \[0, 24, 6\] holds no experts",
    ),
    "fewer experts for one part": (
        "fused",
        of_all("down_proj", lambda tensor: tensor[:3]),
        {},
        rf"{{file}}: tensor '{AT}down_proj' of shape \[3, 6, 12\] does not hold 4 experts",
    ),
    "fewer experts than config.json says": (
        "fused",
        lambda tensors: None,
        {"config": {"num_experts": 5}},
        rf"{{file}}: tensor '{AT}gate_up_proj' of shape \[4, 24, 6\] does not hold 5 experts",
    ),
    "fewer single experts than config.json says": (
        "per-expert",
        lambda tensors: None,
        {"config": {"text_config": {"n_routed_experts": 5}}},
        r"layer 1: 'gate weight' of expert 4 is missing \(bank gate_up\)",
    ),
    "more experts than config.json says": (
        "per-expert",
        lambda tensors: None,
        {"config": {"num_local_experts": 3}},
        r"layer 1 has an expert 3, and config\.json says 3 experts",
    ),
    "gate and up in an odd number of rows": (
        "fused",
        of_all("gate_up_proj", lambda tensor: tensor[:, :23]),
        {},
        rf"tensor '{AT}gate_up_proj': 23 rows do not hold gate and up of one size",
    ),
    "interleaved gate and up in an odd number of rows": (
        "mxfp4-gpt-oss",
        of_all("gate_up_proj_scales", lambda tensor: tensor[:, :255]),
        {},
        rf"tensor '{AT}gate_up_proj_scales': 255 rows do not hold gate and up of one size",
    ),
    "rows that do not divide": (
        "per-expert",
        lambda tensors: None,
        {"shard": ExpertShard(tp_rank=0, tp_ranks=5)},
        rf"tensor '{AT}0\.gate_proj\.weight' of shape \[12, 6\]: 12 along the intermediate dimension do not divide "
        "among 5 ranks",
    ),
    "columns of scales that do not divide": (
        "nvfp4-modelopt",
        lambda tensors: None,
        {"shard": ExpertShard(tp_rank=0, tp_ranks=8)},
        rf"tensor '{AT}0\.down_proj\.weight_scale' of shape \[32, 4\]: 4 along .* do not divide among 8 ranks",
    ),
    "halves that do not divide": (
        "fused",
        lambda tensors: None,
        {"shard": ExpertShard(tp_rank=0, tp_ranks=24)},
        rf"tensor '{AT}gate_up_proj' of shape \[4, 24, 6\]: 12 along .* do not divide among 24 ranks",
    ),
    "more ranks than blocks of scales": (
        "fp8-blocks",
        lambda tensors: None,
        {"shard": ExpertShard(tp_rank=0, tp_ranks=8)},
        rf"tensor '{AT}0\.gate_proj\.weight_scale_inv' of shape \[4, 1\]: 4 along the intermediate dimension do not "
        r"divide among 8 ranks \(each stands for 128\)",
    ),
    "a border within a block of scales": (
        "fp8-blocks",
        lambda tensors: None,
        {"sizes": Sizes(4, 24, 192), "shard": ExpertShard(tp_rank=0, tp_ranks=2)},
        rf"tensor '{AT}0\.gate_proj\.weight_scale_inv': 192 along the intermediate dimension of "
        rf"'{AT}0\.gate_proj\.weight' do not divide among 2 ranks in blocks of 128",
    ),
    "experts that do not divide": (
        "per-expert",
        lambda tensors: None,
        {"shard": ExpertShard(ep_rank=0, ep_ranks=3)},
        "layer 1: 4 experts do not divide among 3 ranks",
    ),
    "more ranks than experts": (
        "per-expert",
        lambda tensors: None,
        {"shard": ExpertShard(ep_rank=0, ep_ranks=8, ep="strided")},
        "layer 1: 4 experts do not divide among 8 ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_bank_is_one_sentence_and_nothing_is_handed_out(case: str, tmp_path: Path) -> None:
    family, change, more, words = REFUSED[case]
    more = dict(more)
    path = write_moe(tmp_path, spoilt(family, change, more.pop("sizes", None)), config=more.pop("config", None))
    banks: Banks = {}
    with pytest.raises((CheckpointError, PlacementError)) as caught:
        load_experts(banks, path, on_layer=lambda *_: pytest.fail("a layer was handed out"), **more)
    assert banks == {}
    places = words.replace("{path}", str(tmp_path)).replace("{file}", str(tmp_path / "part-0.safetensors"))
    assert re.fullmatch(places, str(caught.value)), caught.value


@pytest.mark.parametrize("dtype", ["U4", "I4", "F6_E2M3"])
def test_dtype_that_torch_has_not_names_file_and_tensor(tmp_path: Path, dtype: str) -> None:
    size = 3 if dtype == "F6_E2M3" else 2
    names = [f"layers.0.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    infos = [(name, described(dtype, [1, 4], size * at, size * at + size)) for at, name in enumerate(names)]
    path = write_raw(tmp_path / "model.safetensors", dump(Pairs(infos)), bytes(3 * size))
    banks: Banks = {}
    with pytest.raises(CheckpointError, match=rf"{path}: tensor 'layers\.0\.experts\.0\.gate.*' is {dtype}, which"):
        load_experts(banks, path)
    assert banks == {}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"tp_rank": 2, "tp_ranks": 2}, "tensor-parallel rank 2 of 2 ranks does not exist"),
        ({"tp_rank": -1, "tp_ranks": 2}, "tensor-parallel rank -1 of 2 ranks does not exist"),
        ({"tp_ranks": 0}, "tensor-parallel rank 0 of 0 ranks does not exist"),
        ({"ep_rank": 1}, "expert-parallel rank 1 of 1 ranks does not exist"),
        ({"ep_ranks": -3}, "expert-parallel rank 0 of -3 ranks does not exist"),
        ({"ep": "rows"}, "experts are dealt in 'blocks' or 'strided', not 'rows'"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(where: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        ExpertShard(**where)
    assert str(caught.value) == words


def test_scalars_that_do_not_go_into_the_rows(tmp_path: Path) -> None:
    layout = BankLayout(
        name="own",
        pattern=r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)",
        banks={"weight": Bank(parts=("w",)), "scale": Bank(parts=("a", "b"), spread="weight")},
    )
    tensors = {f"layers.0.experts.0.{name}": torch.ones(1) for name in "ab"}
    path = write_moe(tmp_path, {**tensors, "layers.0.experts.0.w": torch.ones(3, 2)})
    with pytest.raises(PlacementError, match=r"2 scalars \(bank scale\) .* the 3 rows of bank weight"):
        loaded(path, layout=layout)


@pytest.mark.parametrize(
    ("more", "error"),
    [({"path": "/nowhere/at/all"}, CheckpointError), ({"threads": 0}, InputError), ({"threads": "two"}, InputError)],
)
def test_wrong_argument_is_one_sentence_and_changes_nothing(
    tmp_path: Path, more: dict[str, Any], error: type[Exception]
) -> None:
    path = write_moe(tmp_path, moe_tensors("per-expert", SIZES["per-expert"]))
    banks: Banks = {}
    with pytest.raises(error) as caught:
        load_experts(banks, **{"path": path, **more})
    assert banks == {}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alone", ["gate", "up"])
def test_a_tensor_for_all_experts_beside_tensors_for_each(tmp_path: Path, alone: str) -> None:
    """A layout may allow both forms, but one bank takes one of them."""
    layout = BankLayout(
        name="own",
        pattern=r"layers\.(?P<layer>\d+)\.experts\.(?:(?P<expert>\d+)\.)?(?P<projection>gate|up)",
        banks={"both": Bank(parts=("gate", "up"))},
    )
    fused = "up" if alone == "gate" else "gate"
    tensors = {f"layers.0.experts.{expert}.{alone}": random_tensor((3, 3), seed=expert) for expert in range(3)}
    tensors[f"layers.0.experts.{fused}"] = random_tensor((3, 3, 3))
    with pytest.raises(CheckpointError, match=r"'layers\.0\.experts\.(0\.)?up' .* does not fit a bank with"):
        loaded(write_moe(tmp_path / "one", tensors), layout=layout)
    tensors[f"layers.0.experts.{alone}"] = random_tensor((3, 3, 3))
    with pytest.raises(CheckpointError, match=rf"'layers\.0\.experts\.0\.{alone}' repeats a part of"):
        loaded(write_moe(tmp_path / "two", tensors), layout=layout)
    tensors = {name: tensor for name, tensor in tensors.items() if name.count(".") == 3}
    assert list(loaded(write_moe(tmp_path / "three", tensors), layout=layout)[0]) == ["both"]
