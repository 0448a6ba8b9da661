"""``bench experts``: every arm fills the same banks, within its time."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from loadmaster.bench.experts import bench_experts, expert_arms
from loadmaster.bench.load import panels
from loadmaster.bench.make_checkpoint import make_checkpoint
from loadmaster.errors import InputError
from loadmaster.launch.load import LoadSettings

COMMAND = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Banks with interleaved rows, which is what every arm has something to do for."""
    folder = tmp_path_factory.mktemp("experts") / "checkpoint"
    make_checkpoint(folder, "gpt-oss", 16 << 20)
    return folder


@pytest.mark.processes
def test_every_arm_fills_the_same_banks_and_can_be_drawn(checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "experts.svg"
    words = [
        COMMAND,
        "bench",
        "experts",
        str(checkpoint),
        "--repeat",
        "1",
        "--verify",
        "--plot",
        str(picture),
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    record: dict[str, Any] = json.loads(done.stdout)
    assert list(record) == ["bench", "machine", "versions", "command", "date", "settings", "arms"]
    known = expert_arms(record["machine"]["compute_cpus"], interleaved=True, ranks=1)
    assert "cat-after" in known
    assert [arm["name"] for arm in record["arms"]] == ["limit", *known]
    assert all(len(arm["seconds"]) == 1 and arm["stopped_after_seconds"] is None for arm in record["arms"])
    assert len({(arm["bytes"], arm["tensors"]) for arm in record["arms"]}) == 1
    assert record["settings"]["seconds"] == 300
    text = picture.read_text()
    assert [name for name in ("limit", *known) if name not in text] == []


def test_an_arm_that_is_none_is_an_error_before_anything_is_measured(checkpoint: Path) -> None:
    steps: list[str] = []
    with pytest.raises(InputError, match="there is no arm 'limit'; known are loadmaster, published"):
        bench_experts(checkpoint, LoadSettings(experts=True), arms=["limit"], on_step=steps.append)
    assert steps == []


def test_no_time_is_a_record_without_figures(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadmaster.bench.turns.warm_page_cache", lambda files, deadline: False)
    record = bench_experts(checkpoint, LoadSettings(experts=True), seconds=1)
    assert {arm.stopped_after for arm in record.arms} == {0.0}
    (panel,) = panels(record)
    assert [name for name, _ in panel.arms] == [arm.name for arm in record.arms]
    json.dumps(record.as_dict())
