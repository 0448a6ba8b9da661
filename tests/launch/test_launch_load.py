"""A load into several ranks: what is checked before one starts, what each is told, and what becomes of their reports.

The ranks run one after the other in this process; real ones are in ``tests/cli``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
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
    return seen


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
