"""A load into several ranks: what is checked before one starts, what each is told, and what becomes of their reports.

The ranks run one after the other in this process; real ones are in ``tests/cli``.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.helpers.experts import Sizes, moe_tensors, wanted_banks, write_moe
from loadmaster.checkpoint.bank_layout import LAYOUTS, Bank, BankLayout
from loadmaster.checkpoint.reader import CacheUse
from loadmaster.checkpoint.sharding import Shard
from loadmaster.errors import CheckpointError, InputError, LoadmasterError, PlacementError
from loadmaster.launch import load as launch_load
from loadmaster.launch.load import LoadSettings, load_in_rank, load_ranks
from loadmaster.observe.report import Verified
from loadmaster.share import Share, share

NUMBERS = {"layers.0.mlp.up_proj.weight": 8 * 16, "layers.0.special.weight": 4 * 16, "norm.weight": 16}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    shapes = {"layers.0.mlp.up_proj.weight": (8, 16), "layers.0.special.weight": (4, 16), "norm.weight": (16,)}
    save_file({name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, path)
    return path


def shares(ranks: int) -> list[Share]:
    return [Share(threads=2, cpus=(0,), workers=ranks, why="4 cores / 2 ranks", rank=rank) for rank in range(ranks)]


class Context:
    """A rank's line to its parent, which is here."""

    def __init__(self, rank: int, on_progress: Callable[[int, Any], None] | None) -> None:
        self.rank = rank
        self.barriers = 0
        self._on_progress = on_progress

    def barrier(self) -> None:
        self.barriers += 1

    def progress(self, value: Any) -> None:
        if self._on_progress is not None:
            self._on_progress(self.rank, value)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Let ranks run in this process; says what they were given."""
    seen: dict[str, Any] = {}

    def run_here(
        function: str,
        jobs: Sequence[Any],
        *,
        environments: Sequence[Mapping[str, str]],
        on_progress: Callable[[int, Any], None] | None = None,
        on_output: Callable[[int, str], None] | None = None,
    ) -> list[Any]:
        contexts = [Context(rank, on_progress) for rank in range(len(jobs))]
        seen.update(function=function, environments=environments, contexts=contexts, on_output=on_output)
        done = [
            load_in_rank(pickle.loads(pickle.dumps(job)), context)  # type: ignore[arg-type]
            for job, context in zip(jobs, contexts, strict=True)
        ]
        return [pickle.loads(pickle.dumps(result)) for result in done]

    monkeypatch.setattr(launch_load, "run_ranks", run_here)
    yield seen
    # A rank's process is silent about what its parent has said; this one is to speak again.
    logging.getLogger("loadmaster.checkpoint.sharding").setLevel(logging.NOTSET)


def test_sharded_ranks_load_their_parts(here: dict[str, Any], checkpoint: Path) -> None:
    report = load_ranks(checkpoint, LoadSettings(ranks=2, verify=True), shares(2))
    part = share()  # a rank looks for itself, and follows from there
    placed = 2 * (NUMBERS["layers.0.mlp.up_proj.weight"] // 2 + NUMBERS["layers.0.special.weight"] + 16)
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert [rank.bytes_placed for rank in report.ranks] == [placed, placed]
    assert [rank.tensors for rank in report.ranks] == [3, 3]
    assert [(rank.threads, rank.why) for rank in report.ranks] == [(part.threads, part.why)] * 2
    assert report.verified == Verified(6, 2 * placed)
    assert report.checkpoint == str(checkpoint)
    assert report.ok
    assert report.load_seconds > max(rank.seconds["read"] for rank in report.ranks)


def test_whole_ranks_load_everything(here: dict[str, Any], checkpoint: Path) -> None:
    report = load_ranks(checkpoint, LoadSettings(ranks=3, sharded=False), shares(3))
    assert [rank.bytes_placed for rank in report.ranks] == [2 * sum(NUMBERS.values())] * 3
    assert report.verified is None
    assert all(rank.seconds["verify"] == 0 for rank in report.ranks)
    assert all(rank.seconds["start"] > 0 for rank in report.ranks)


def test_rows_of_the_users_plan_and_a_dtype_reach_the_ranks(here: dict[str, Any], checkpoint: Path) -> None:
    settings = LoadSettings(ranks=2, tp_plan={"special": "rowwise"}, dtype="float32", verify=True)
    report = load_ranks(checkpoint, settings, shares(2))
    numbers = (NUMBERS["layers.0.mlp.up_proj.weight"] + NUMBERS["layers.0.special.weight"]) // 2 + 16
    assert [rank.bytes_placed for rank in report.ranks] == [4 * numbers] * 2
    assert all(rank.seconds["convert"] > 0 for rank in report.ranks)
    assert report.verified == Verified(6, 8 * numbers)


def test_the_ranks_are_told_who_they_are_and_meet_before_they_load(here: dict[str, Any], checkpoint: Path) -> None:
    def hear(rank: int, text: str) -> None:
        raise AssertionError(text)

    load_ranks(checkpoint, LoadSettings(ranks=2), shares(2), on_output=hear)
    assert here["function"] == "loadmaster.launch.load:load_in_rank"
    assert [environment["LOADMASTER_LOCAL_RANK"] for environment in here["environments"]] == ["0", "1"]
    assert {environment["LOADMASTER_LOCAL_SIZE"] for environment in here["environments"]} == {"2"}
    assert {environment["OMP_NUM_THREADS"] for environment in here["environments"]} == {"2"}
    assert [context.barriers for context in here["contexts"]] == [1, 1]
    assert here["on_output"] is hear
    load_ranks(checkpoint, LoadSettings(ranks=2, verify=True), shares(2))
    assert [context.barriers for context in here["contexts"]] == [2, 2]  # nobody verifies while another one loads


def test_progress_is_told_as_it_comes_and_ends_with_the_whole(
    here: dict[str, Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_rank = launch_load.load_rank

    def load_slowly(*arguments: Any, progress: Callable[[int, int], None], **settings: Any) -> Any:
        progress(1, 7)
        return load_rank(*arguments, progress=progress, **settings)

    monkeypatch.setattr(launch_load, "load_rank", load_slowly)
    told: dict[int, list[Any]] = {0: [], 1: []}
    load_ranks(
        checkpoint,
        LoadSettings(ranks=2, sharded=False),
        shares(2),
        on_progress=lambda rank, value: told[rank].append(value),
    )
    whole = 2 * sum(NUMBERS.values())
    for values in told.values():
        assert values[0] == (1, 7)
        assert values[-1] == (whole, whole)


def test_one_rank_has_no_shard_to_load() -> None:
    assert LoadSettings(ranks=1).shard(0) is None
    assert LoadSettings(ranks=2, sharded=False).shard(1) is None
    shard = LoadSettings(ranks=2, tp_plan={"special": "rowwise"}).shard(1)
    assert isinstance(shard, Shard)
    assert (shard.rank, shard.ranks, shard.plan.overrides) == (1, 2, {"special": "rowwise"})


@pytest.mark.parametrize(
    ("settings", "kind", "sentence"),
    [
        (LoadSettings(ranks=16), PlacementError, "do not divide among 16 ranks"),
        (LoadSettings(ranks=2, tp_plan={"norm": "sideways"}), InputError, "unknown style 'sideways'"),
        (LoadSettings(dtype="float7"), InputError, "'float7' is none that tensors can be converted to"),
    ],
    ids=["ranks", "plan", "dtype"],
)
def test_bad_input_is_found_before_a_rank_is_started(
    settings: LoadSettings,
    kind: type[LoadmasterError],
    sentence: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_load, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(kind, match=sentence):
        load_ranks(checkpoint, settings, shares(settings.ranks))


def test_a_missing_checkpoint_is_found_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_load, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(CheckpointError, match="does not exist"):
        load_ranks(tmp_path / "nowhere", LoadSettings(), shares(1))


# With the experts in banks.

SIZES = Sizes(4, 32, 64)


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two layers of experts, and what every model has besides."""
    tensors = moe_tensors("nvfp4-modelopt", SIZES, (0, 1))
    return write_moe(tmp_path / "moe", tensors), tensors


def bank_bytes(tensors: Mapping[str, torch.Tensor], experts: Sequence[int], rank: int = 0, ranks: int = 1) -> int:
    banks = [wanted_banks("nvfp4-modelopt", tensors, layer, experts, rank, ranks) for layer in (0, 1)]
    return sum(bank.nbytes for of_layer in banks for bank in of_layer.values())


@pytest.mark.parametrize(
    ("settings", "experts_of", "parts"),
    [
        (LoadSettings(ranks=2, experts=True), [[0, 1, 2, 3]] * 2, 2),
        (LoadSettings(ranks=2, experts=True, experts_by="blocks"), [[0, 1], [2, 3]], 1),
        (LoadSettings(ranks=2, experts=True, experts_by="strided"), [[0, 2], [1, 3]], 1),
        (LoadSettings(ranks=2, experts=True, sharded=False, experts_by="strided"), [[0, 1, 2, 3]] * 2, 1),
        (LoadSettings(ranks=1, experts=True, experts_by="blocks"), [[0, 1, 2, 3]], 1),
    ],
    ids=["tp", "blocks", "strided", "whole", "one rank"],
)
def test_ranks_load_their_experts_into_banks_and_the_rest_as_tensors(
    here: dict[str, Any],
    experts: tuple[Path, dict[str, torch.Tensor]],
    settings: LoadSettings,
    experts_of: list[list[int]],
    parts: int,
) -> None:
    path, tensors = experts
    settings = replace(settings, verify=True)
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    report = load_ranks(path, settings, shares(settings.ranks))
    plain = load_ranks(write_moe(path.parent / "rest", rest), replace(settings, experts=False), shares(settings.ranks))
    for rank, (with_banks, of_rest, kept) in enumerate(zip(report.ranks, plain.ranks, experts_of, strict=True)):
        placed = bank_bytes(tensors, kept, rank if parts > 1 else 0, parts)
        assert with_banks.rank == rank
        assert with_banks.bytes_placed - of_rest.bytes_placed == placed
        assert with_banks.tensors - of_rest.tensors == 2 * 9 * len(kept)  # without the scales of activations
        assert set(with_banks.seconds) == set(of_rest.seconds)
    assert report.verified is not None
    assert report.verified.bytes == report.bytes_placed
    assert report.verified.tensors == settings.ranks * (len(rest) + 2 * 6)


def test_a_layout_and_the_use_of_the_cache_reach_the_ranks(
    here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = BankLayout(
        name="own",
        pattern=r"blocks\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<projection>w)",
        banks={"w": Bank(parts=("w",), intermediate=1)},
    )
    tensors = {f"blocks.0.experts.{expert}.w": torch.full((3, 4), float(expert)) for expert in range(2)}
    path = write_moe(tmp_path, {**tensors, "norm.weight": torch.ones(5)})
    seen = []
    for name in ("load_rank", "load_experts_of_rank"):
        real = getattr(launch_load, name)

        def load(*arguments: Any, real: Any = real, **named: Any) -> Any:
            seen.append(named["cache"])
            return real(*arguments, **named)

        monkeypatch.setattr(launch_load, name, load)
    settings = LoadSettings(ranks=2, experts=True, layout=layout, verify=True, cache=CacheUse(cold=True, drop=True))
    report = load_ranks(path, settings, shares(2))
    assert [rank.bytes_placed for rank in report.ranks] == [2 * 3 * 2 * 4 + 5 * 4] * 2
    assert seen == [CacheUse(cold=True, drop=True)] * 4


def test_progress_of_experts_goes_on_from_that_of_the_rest(
    here: dict[str, Any], experts: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    told: list[tuple[int, int]] = []
    report = load_ranks(
        experts[0], LoadSettings(experts=True), shares(1), on_progress=lambda _, value: told.append(value)
    )
    amounts = [done for done, _ in told]
    assert amounts == sorted(amounts)
    done, total = told[-1]
    assert done == total
    assert report.bytes_placed // 2 < total <= report.bytes_placed  # spread scalars are placed and never read


def test_a_checkpoint_of_experts_alone(here: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is left that a rule of tensor parallelism could apply to, and nothing is said about it."""
    tensors = {name: tensor for name, tensor in moe_tensors("fused", SIZES).items() if ".experts." in name}
    report = load_ranks(write_moe(tmp_path, tensors), LoadSettings(ranks=2, experts=True, verify=True), shares(2))
    assert report.bytes_placed == sum(tensor.nbytes for tensor in tensors.values())
    assert report.verified == Verified(4, report.bytes_placed)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("settings", "kind", "sentence"),
    [
        (LoadSettings(ranks=8, experts=True), PlacementError, "do not divide among 8 ranks"),
        (LoadSettings(ranks=3, experts=True, experts_by="strided"), PlacementError, "4 experts do not divide among 3"),
        (LoadSettings(experts=True, layout=LAYOUTS["fused"]), CheckpointError, "'fused' has no place for tensor"),
    ],
    ids=["ranks", "experts", "layout"],
)
def test_experts_that_cannot_be_placed_are_found_before_a_rank_is_started(
    experts: tuple[Path, dict[str, torch.Tensor]],
    settings: LoadSettings,
    kind: type[LoadmasterError],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_load, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(kind, match=sentence):
        load_ranks(experts[0], settings, shares(settings.ranks))


def test_a_dense_checkpoint_has_no_banks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_load, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(CheckpointError, match="has no expert tensors"):
        load_ranks(checkpoint, LoadSettings(experts=True), shares(1))
