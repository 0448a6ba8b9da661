"""The table of patterns and styles: which row a module's name finds, and what a plan in a file may say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadmaster.checkpoint.tensor_parallel import STYLES, TP_PLAN, TensorParallelPlan, read_tp_plan
from loadmaster.errors import InputError

WORDS_OF_TRANSFORMERS = {
    "colwise",
    "rowwise",
    "colwise_rep",
    "rowwise_rep",
    "packed_colwise",
    "packed_rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    "local_colwise",
    "local_rowwise",
    "local_packed_colwise",
    "sequence_parallel",
    "gather",
    "local",
}


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("model.layers.0.self_attn.q_proj", "layers.*.self_attn.q_proj"),
        ("language_model.model.layers.17.self_attn.q_proj", "layers.*.self_attn.q_proj"),
        ("layers.0.mlp.experts.31.gate_proj", "layers.*.mlp.experts.*.gate_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj", "layers.*.mlp.experts.gate_up_proj"),
        ("embed_tokens", "embed_tokens"),
        ("model.embed_tokens", "embed_tokens"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj", "vision_tower.**"),
        ("model.visual.blocks.0.attn.qkv", "visual.**"),
    ],
)
def test_pattern_matches_the_end_of_a_name(module: str, pattern: str) -> None:
    found = TensorParallelPlan().find(module)
    assert found is not None
    assert found == (pattern, STYLES[TP_PLAN[pattern]])


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.q_projection",
        "model.layers.0.self_attn.q_proj.lora_A",
        "model.layers.0.self_attn.q_norm",
        "model.layers.self_attn.q_proj",
        "model.layers.0.1.self_attn.q_proj",
        "my_embed_tokens",
        "layersX0Xself_attnXq_proj",
        "model.layers.0.mlp.experts.0.1.gate_proj",
        "model.norm",
        "",
    ],
)
def test_other_names_match_nothing(module: str) -> None:
    assert TensorParallelPlan().find(module) is None


def test_star_is_one_component_and_two_stars_are_any_number() -> None:
    plan = TensorParallelPlan({"a.*.b": "colwise", "c.**.d": "rowwise", "e.**": "replicate"})
    for module, wanted in {
        "a.x.b": "a.*.b",
        "a.x.y.b": None,
        "c.x.d": "c.**.d",
        "c.x.y.z.d": "c.**.d",
        "e.x.y": "e.**",
    }.items():
        found = plan.find(module)
        assert (found and found[0]) == wanted


def test_overrides_come_first_in_their_order() -> None:
    plan = TensorParallelPlan({"embed_tokens": "replicate", "**": "colwise"})
    assert plan.find("model.embed_tokens") == ("embed_tokens", STYLES["replicate"])
    assert plan.find("anything.at.all") == ("**", STYLES["colwise"])


def test_words_of_transformers_are_known() -> None:
    assert set(STYLES) >= WORDS_OF_TRANSFORMERS
    assert set(TP_PLAN.values()) <= set(STYLES)


def test_unknown_style_names_itself_and_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'q_proj' has the unknown style 'columnwise'; known are colwise, rowwise"):
        TensorParallelPlan({"q_proj": "columnwise"})


def test_plan_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layers.*.mlp.up_proj": "replicate"}))
    plan = read_tp_plan(path)
    assert plan.overrides == {"layers.*.mlp.up_proj": "replicate"}
    assert plan.find("model.layers.0.mlp.up_proj") == ("layers.*.mlp.up_proj", STYLES["replicate"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must be an object"),
        ('{"a": 1}', "must be an object"),
        ('{"a": null}', "must be an object"),
        ('{"a": "sideways"}', "unknown style 'sideways'"),
    ],
)
def test_file_that_is_no_plan(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_tp_plan(path)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json cannot be read: No such file"):
        read_tp_plan(tmp_path / "gone.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_tp_plan(os.fspath(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(InputError, match=r"latin\.json is not valid JSON"):
        read_tp_plan(tmp_path / "latin.json")
