"""``loadmaster leases``, and the leases that ``loadmaster plan`` shows."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cli.helpers.command import run_here
from loadmaster.share import lease as lease_module
from loadmaster.share.lease import LiveLease, lease

NOBODY = "no process loads now\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this process alone holds leases."""
    monkeypatch.setenv("LOADMASTER_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path / "leases"


def test_nobody_loads(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run_here(capsys, "leases") == (0, NOBODY, "")
    assert run_here(capsys, "leases", "--json").document == {"leases": []}
    assert not folder.exists()


def test_the_json_form_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    with lease(2.0) as own:
        begin, threads = time.time(), own.look().threads
        (row,) = run_here(capsys, "leases", "--json").document["leases"]
        assert list(row) == ["pid", "command", "since", "threads", "cpus", "weight", "ranks"]
        assert row["pid"] == os.getpid()
        assert isinstance(row["command"], str)
        assert row["since"] == pytest.approx(begin, abs=60)
        assert (row["threads"], row["weight"], row["ranks"]) == (threads, 2.0, None)
        assert row["cpus"] == sorted(os.sched_getaffinity(0))
        (planned,) = run_here(capsys, "plan", "--json").document["leases"]
        assert planned == row
    assert run_here(capsys, "plan", "--json").document["leases"] == []


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with lease() as own:
        threads = own.look().threads
        for command in ("leases", "plan"):
            lines = [line.split() for line in run_here(capsys, command).stdout.splitlines()]
            (heading,) = [line for line in lines if line[:1] == ["process"]]
            assert heading == ["process", "that", "loads", "pid", "since", "threads", "CPUs"]
            (row,) = [line for line in lines if str(os.getpid()) in line]
            assert row[-2] == str(threads)
            assert row[-4].startswith("20")


def test_a_long_command_does_not_make_the_table_wider_than_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = LiveLease(4194304, "python " + "x" * 73, 1.8e9, 16, tuple(range(128)), 1.0, None)
    monkeypatch.setattr(lease_module, "live_leases", lambda: [row])
    text = run_here(capsys, "leases").stdout
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "python xxxxxxxxxxxxxxxxxxxx..." in text
    assert "0-127" in text


def test_another_host_has_no_leases_that_are_known_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1\n")
    with lease():
        assert run_here(capsys, "plan", "--root", tmp_path, "--json").document["leases"] == []


@pytest.mark.parametrize("command", ["leases", "plan"])
def test_a_bad_variable_is_one_sentence(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADMASTER_LEASES", "maybe")
    done = run_here(capsys, command)
    assert (done.code, done.stdout) == (2, "")
    assert done.sentence == "loadmaster: LOADMASTER_LEASES must be on or off, not 'maybe'"
