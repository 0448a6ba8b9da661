"""Layouts as data: what the built-in ones know, how one is found, and each thing that a file of one can get wrong."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster import BankLayout, ExpertShard, open_checkpoint
from loadmaster.checkpoint.bank_layout import LAYOUTS, Bank, layout_of, read_layout
from loadmaster.checkpoint.verify import verify_banks
from loadmaster.errors import CheckpointError, InputError

from .helpers.experts import FAMILIES, SIZES, assert_banks, loaded, moe_tensors, wanted_banks, write_moe
from .helpers.files import random_tensor

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"

# Built-in layouts.


def test_the_built_in_layouts_are_these() -> None:
    assert list(LAYOUTS) == [
        "nvfp4-modelopt",
        "nvfp4-compressed-tensors",
        "mxfp4-gpt-oss",
        "fp8-blocks",
        "per-expert",
        "per-expert-mixtral",
        "fused",
    ]
    assert all(layout.name == name for name, layout in LAYOUTS.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_own_names_tell_its_layout(family: str) -> None:
    names = moe_tensors(family, SIZES[family], (0, 2))
    assert layout_of(names, "here") is LAYOUTS[family]
    assert layout_of(reversed(list(names)), "here") is LAYOUTS[family]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.mlp.experts.7.up_proj.weight", ("12", "7", "up", "weight")),
        ("language_model.model.layers.0.mlp.experts.0.down_proj.weight", ("0", "0", "down", "weight")),
        ("layers.3.feed_forward.experts.44.gate_proj.weight", ("3", "44", "gate", "weight")),
        ("layers.3.experts.44.gate_proj.weight", ("3", "44", "gate", "weight")),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.1.mlp.shared_experts.0.up_proj.weight", None),
        ("model.layers.1.mlp.experts.x.up_proj.weight", None),
        ("model.layers.1.mlp.experts.0.up_proj.weight.more", None),
        ("mylayers.1.mlp.experts.0.up_proj.weight", None),
    ],
)
def test_names_that_hold_a_projection_of_an_expert(name: str, place: tuple[str, ...] | None) -> None:
    found = re.fullmatch(LAYOUTS["per-expert"].pattern, name)
    assert (found and found.group("layer", "expert", "projection", "kind")) == place


def test_places_of_projections_and_kinds() -> None:
    layout = LAYOUTS["nvfp4-modelopt"]
    assert layout.place_of("gate", "weight") == ("gate_up_packed", 0)
    assert layout.place_of("up", "weight_scale_2") == ("gate_up_global", 1)
    assert layout.place_of("down", "weight_scale") == ("down_scale", 0)
    assert layout.place_of("side", "weight") is None
    assert layout.place_of("down", None) is None
    assert LAYOUTS["fused"].place_of("gate_up", None) == ("gate_up", 0)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "here has no expert tensors: no name holds '.experts.'"),
        (["model.norm.weight", "model.shared_experts.weight"], "here has no expert tensors: no name holds '.experts.'"),
        (
            ["layers.0.experts.0.gate_proj.weight", "layers.0.experts.0.down_proj.weight.scales"],
            "here: no built-in layout fits its expert tensors; the nearest, 'nvfp4-modelopt', does not know "
            "'layers.0.experts.0.down_proj.weight.scales'; describe them with --experts-layout FILE.json",
        ),
        (
            ["layers.0.experts.0.w1.weight"],
            "here: no built-in layout fits its expert tensors; the nearest, 'per-expert-mixtral', needs tensors for "
            "down, and there are none; describe them with --experts-layout FILE.json",
        ),
    ],
)
def test_names_that_no_layout_fits(names: list[str], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(names, "here")
    assert str(caught.value) == words


# Layouts from files.


def as_document(layout: BankLayout) -> dict[str, Any]:
    banks = {name: {**asdict(bank), "parts": list(bank.parts)} for name, bank in layout.banks.items()}
    return {"name": layout.name, "pattern": layout.pattern, "ignore": layout.ignore, "banks": banks}


def written(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_built_in_layout_can_be_written_as_a_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, as_document(LAYOUTS[name]))
    layout = read_layout(path)
    assert layout.name == str(path)
    assert (layout.pattern, layout.ignore) == (LAYOUTS[name].pattern, LAYOUTS[name].ignore)
    assert layout.banks == LAYOUTS[name].banks
    assert read_layout(str(path)) == layout
    tensors = moe_tensors(name, SIZES[name])
    banks = loaded(write_moe(tmp_path / "model", tensors), layout=layout)
    assert_banks(banks[0], wanted_banks(name, tensors, 0, [0, 1, 2, 3]))


BANK = {"parts": ["w"]}
PATTERN = r"layers\.(?P<layer>\d+)\.experts\.(?P<projection>w)"


def bank(**options: Any) -> dict[str, Any]:
    """A layout of one bank with these options, besides one of weights."""
    return {"pattern": PATTERN, "banks": {"weight": BANK, "b": {"parts": ["b"], **options}}}


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", r"{file} is not valid JSON: .*"),
    "deep": ("[" * 100_000, r"{file} is not valid JSON: .*"),
    "a list": ([], r"{file} is no experts layout: it needs 'pattern' and a table of 'banks'"),
    "no banks": ({"pattern": PATTERN}, r"{file} is no experts layout: it needs 'pattern' and a table of 'banks'"),
    "empty banks": ({"pattern": PATTERN, "banks": {}}, r"{file} is no experts layout: it needs .*"),
    "a list of banks": ({"pattern": PATTERN, "banks": [BANK]}, r"{file} is no experts layout: it needs .*"),
    "no pattern": ({"banks": {"a": BANK}}, r"{file} is no experts layout: 'pattern' and 'ignore' must be texts"),
    "a number as pattern": ({"pattern": 3, "banks": {"a": BANK}}, r"{file} .*: 'pattern' and 'ignore' must be texts"),
    "null to ignore": ({**bank(), "ignore": None}, r"{file} .*: 'pattern' and 'ignore' must be texts"),
    "another key": ({**bank(), "patern": "x", "z": 1}, r"{file} is no experts layout: it has 'patern'"),
    "no expression": (
        {**bank(), "pattern": "(?P<layer>"},
        r"experts layout '{file}': '\(\?P<layer>' is no regular expression: .*",
    ),
    "no expression to ignore": ({**bank(), "ignore": "*"}, r"experts layout '{file}': '\*' is no regular .*"),
    "an endless repetition": (
        {**bank(), "ignore": "a{99999999999999999999}"},
        r"experts layout '{file}': 'a\{99999999999999999999\}' is no regular expression: .*",
    ),
    "no groups": (
        {**bank(), "pattern": "(?P<projection>x)"},
        r"experts layout '{file}': the pattern needs the groups layer and projection",
    ),
    "no parts": ({"pattern": PATTERN, "banks": {"a": {}}}, r"{file}: bank 'a' needs a list of 'parts'"),
    "a bank that is a list": ({"pattern": PATTERN, "banks": {"a": ["w"]}}, r"{file}: bank 'a' needs a list of 'parts'"),
    "empty parts": (bank(parts=[]), r"{file}: bank 'b': parts cannot be \[\]"),
    "parts as a text": (bank(parts="w"), r"{file}: bank 'b': parts cannot be 'w'"),
    "a number as part": (bank(parts=["w", 1]), r"{file}: bank 'b': parts cannot be \['w', 1\]"),
    "the same part twice": (bank(parts=["c", "c"]), r"experts layout '{file}': 'c' has two places"),
    "the same part in two banks": (bank(parts=["w"]), r"experts layout '{file}': 'w' has two places"),
    "a third dimension": (bank(intermediate=2), r"{file}: bank 'b': intermediate cannot be 2"),
    "a dimension that is true": (bank(intermediate=True), r"{file}: bank 'b': intermediate cannot be True"),
    "a dimension in words": (bank(intermediate="rows"), r"{file}: bank 'b': intermediate cannot be 'rows'"),
    "halves in words": (bank(halves="yes"), r"{file}: bank 'b': halves cannot be 'yes'"),
    "interleaved by number": (bank(interleaved=1), r"{file}: bank 'b': interleaved cannot be 1"),
    "a reciprocal by number": (bank(reciprocal=0), r"{file}: bank 'b': reciprocal cannot be 0"),
    "no block": (bank(block=0), r"{file}: bank 'b': block cannot be 0"),
    "half a block": (bank(block=1.5), r"{file}: bank 'b': block cannot be 1\.5"),
    "a block that is true": (bank(block=True), r"{file}: bank 'b': block cannot be True"),
    "scales of a list": (bank(scales=["weight"]), r"{file}: bank 'b': scales cannot be \['weight'\]"),
    "a spread that is null": (bank(spread=None), r"{file}: bank 'b': spread cannot be None"),
    "another option": (bank(rows=3), r"{file}: bank 'b': rows cannot be 3"),
    "scales of no bank": (
        bank(scales="wait"),
        r"experts layout '{file}': b goes by 'wait', which is no bank of weights of it",
    ),
    "spread over no bank": (bank(spread="wait"), r"experts layout '{file}': b goes by 'wait', which is no bank of .*"),
    "spread over itself": (bank(spread="b"), r"experts layout '{file}': b goes by 'b', which is no bank of .*"),
    "scales of itself": (bank(scales="b"), r"experts layout '{file}': b goes by 'b', which is no bank of .*"),
    "halves whose columns are cut": (
        bank(halves=True, intermediate=1),
        r"experts layout '{file}': b has gate and up in its rows; no columns are cut",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_layout_is_one_sentence(tmp_path: Path, case: str) -> None:
    document, words = WRONG[case]
    path = written(tmp_path, document)
    with pytest.raises(InputError) as caught:
        read_layout(path)
    assert re.fullmatch(words.replace("{file}", re.escape(str(path))), str(caught.value)), caught.value


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read: No such file or directory"):
        read_layout(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_layout(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"pattern": "\xe9"}')
    with pytest.raises(InputError, match=r"latin\.json is not valid JSON"):
        read_layout(tmp_path / "latin.json")


def test_a_layout_made_in_python_is_checked_too() -> None:
    with pytest.raises(InputError, match="experts layout 'own': the pattern needs the groups layer and projection"):
        BankLayout(name="own", pattern="x", banks={"a": Bank(parts=("w",))})
    with pytest.raises(InputError, match="experts layout 'own': 'w' has two places"):
        BankLayout(name="own", pattern=PATTERN, banks={"a": Bank(parts=("w",)), "b": Bank(parts=("v", "w"))})


# The page about it.


def test_the_layout_on_the_page_works(tmp_path: Path) -> None:
    """It is read, fills its banks, and every rank's part is that of plain operations."""
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    layout = read_layout(written(tmp_path, text))
    tensors = {}
    for expert in range(2):
        for seed, (name, shape) in enumerate((("up", (128, 8)), ("gate", (128, 8)), ("down", (8, 128)))):
            stem = f"model.layers.0.moe.experts.{expert}.{name}."
            tensors[stem + "q"] = random_tensor(shape, torch.uint8, 10 * expert + seed)
            scale = tuple(-(-size // 64) for size in shape)
            tensors[stem + "s"] = random_tensor(scale, torch.float32, 10 * expert + seed)
            tensors[stem + "g"] = torch.tensor(1.5 + expert + seed)
            tensors[stem + "input_amax"] = torch.tensor(1.0)
    path = write_moe(tmp_path / "model", tensors)
    for rank in range(2):
        shard = ExpertShard(tp_rank=rank, tp_ranks=2)
        banks = loaded(path, layout=layout, shard=shard)
        verify_banks(banks, open_checkpoint(path), layout, shard)
        up, gate, down = (tensors[f"model.layers.0.moe.experts.1.{name}.q"] for name in ("up", "gate", "down"))
        assert torch.equal(banks[0]["up_gate"][1], torch.cat([up.chunk(2)[rank], gate.chunk(2)[rank]]))
        assert torch.equal(banks[0]["down"][1], down.chunk(2, 1)[rank])
        assert banks[0]["up_gate_global"][1].unique().tolist() == [*(1 / torch.tensor([3.5, 2.5])).half().tolist()]
        assert banks[0]["down_global"][1].tolist() == [4.5] * 8


def test_the_page_names_every_layout_bank_and_option() -> None:
    text = PAGE.read_text()
    for name, layout in LAYOUTS.items():
        assert f"`{name}`" in text
        assert [bank for bank in layout.banks if f"`{bank}`" not in text] == []
    assert [key for key in asdict(Bank(parts=("w",))) if f"`{key}`" not in text] == []


def test_the_hook_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no CUDA it does nothing; the load is that of every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert "cudaHostRegister" in code
    path = write_moe(tmp_path / "model", moe_tensors("fused", SIZES["fused"]))
    names: dict[str, Any] = {}
    exec(compile(code.replace('"CKPT"', repr(str(path))), str(PAGE), "exec"), names)
    assert list(names["banks"]) == [0]
