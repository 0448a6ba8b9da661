"""Names of experts: asking once for all that are alike finds what asking for each name finds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.checkpoint import expert_names
from loadmaster.checkpoint.bank_layout import LAYOUTS, Bank, BankLayout
from loadmaster.checkpoint.expert_names import collect_experts, layout_that_fits
from loadmaster.checkpoint.expert_plan import ExpertShard, plan_banks
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.table import TensorColumns
from loadmaster.errors import CheckpointError

from .helpers.experts import SIZES, moe_tensors, write_moe
from .helpers.files import described, write_raw
from .helpers.headers import Pairs, dump

Found = dict[int, dict[str, list[tuple[list[int], list[int] | None]]]]


def found(checkpoint: Checkpoint, layout: BankLayout | None) -> Found | str:
    """What was collected, or the error."""
    try:
        _, layers = collect_experts(checkpoint, TensorColumns(checkpoint.tables), layout)
    except CheckpointError as error:
        return str(error)
    return {
        layer: {
            bank: [(part.rows.tolist(), None if part.experts is None else part.experts.tolist()) for part in parts]
            for bank, parts in banks.items()
        }
        for layer, banks in layers.items()
    }


def named(folder: Path, names: list[str]) -> Checkpoint:
    """A checkpoint of one byte for each name."""
    rows = [(name, described("U8", [1], at, at + 1)) for at, name in enumerate(names)]
    return open_checkpoint(write_raw(folder / "names.safetensors", dump(Pairs(rows)), bytes(len(names))))


PARTS = st.tuples(
    st.sampled_from(["model.layers.", "layers.", "a.experts.layers.", ""]),
    st.sampled_from(["0", "1", "12", "x"]),
    st.sampled_from([".mlp.experts.", ".experts.", ".experts.experts.", ".experts.3.experts.", ".shared_experts."]),
    st.sampled_from(["0", "1", "2", "10", "01", "", "123456789012345678", "x"]),
    st.sampled_from([".gate_proj.weight", ".up_proj.weight", ".down_proj.weight", ".w", "", ".gate_proj.weight_scale"]),
)


@given(parts=st.lists(PARTS, min_size=1, max_size=10), data=st.data())
@settings(max_examples=300)
def test_asking_once_is_asking_for_each(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, ...]], data: st.DataObject
) -> None:
    names = list(dict.fromkeys("".join(words) for words in parts))
    checkpoint = named(tmp_path_factory.mktemp("names"), names)
    layout = data.draw(st.sampled_from([LAYOUTS["per-expert"], LAYOUTS["nvfp4-modelopt"], LAYOUTS["fused"]]))
    each = replace(layout, ignore=f"(?:{layout.ignore})")  # the same, and none of the built-in ones
    assert expert_names._Collector(layout, TensorColumns(checkpoint.tables))._asks_once
    assert not expert_names._Collector(each, TensorColumns(checkpoint.tables))._asks_once
    assert found(checkpoint, layout) == found(checkpoint, each)


@pytest.mark.parametrize(
    ("expert", "message"), [("4294967295", "expert 2 is missing"), ("9" * 30, "there is no expert 9")]
)
def test_a_huge_number_of_an_expert_costs_no_memory(tmp_path: Path, expert: str, message: str) -> None:
    names = [
        f"layers.0.experts.{number}.{part}_proj.weight"
        for number in ("0", "1", expert)
        for part in ("gate", "up", "down")
    ]
    with pytest.raises(CheckpointError, match=message):
        plan_banks(named(tmp_path, names), LAYOUTS["per-expert"], ExpertShard())


def test_a_number_of_experts_that_nobody_has_costs_no_memory(tmp_path: Path) -> None:
    names = [f"layers.0.experts.{number}.{part}_proj.weight" for number in "01" for part in ("gate", "up", "down")]
    named(tmp_path, names)
    (tmp_path / "config.json").write_text(f'{{"num_experts": {10**30}}}')
    with pytest.raises(CheckpointError, match="expert 2 is missing"):
        plan_banks(open_checkpoint(tmp_path), LAYOUTS["per-expert"], ExpertShard())


def test_a_negative_number_is_no_expert(tmp_path: Path) -> None:
    pattern = r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>-?\d+)\.(?P<projection>up)"
    layout = BankLayout(name="own", pattern=pattern, banks={"up": Bank(parts=("up",))})
    with pytest.raises(CheckpointError, match="there is no expert -1"):
        plan_banks(named(tmp_path, ["layers.0.experts.-1.up"]), layout, ExpertShard())


@pytest.mark.parametrize("family", SIZES)
def test_names_that_differ_in_the_expert_alone_are_one_question(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_moe(tmp_path, moe_tensors(family, SIZES[family], layers=(0, 12))))
    questions: list[str] = []
    ask = expert_names._Collector._ask

    def counted(self: expert_names._Collector, name: str, row: int) -> tuple[int, int]:
        questions.append(name)
        return ask(self, name, row)

    monkeypatch.setattr(expert_names._Collector, "_ask", counted)
    layout, layers = collect_experts(checkpoint, TensorColumns(checkpoint.tables), None)
    assert layout is layout_that_fits(checkpoint) is LAYOUTS[family]
    assert sorted(layers) == [0, 12]
    alike = {re.sub(r"experts\.\d+\.", "experts.N.", name) for name in checkpoint if ".experts." in name}
    assert len(questions) == len(alike)
