"""`run_ranks` when all goes well: results, barriers, progress, text and environment of real ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.helpers.rank_functions import ACT
from loadmaster.launch.spawn import run_ranks
from loadmaster.threads.environment import rank_environment

pytestmark = pytest.mark.processes


def run(*jobs: tuple[str, Any], **settings: Callable[..., None]) -> list[Any]:
    """Run one rank per job in the environment of this process."""
    return run_ranks(ACT, jobs, environments=[dict(os.environ)] * len(jobs), **settings)


def test_results_come_in_the_order_of_the_jobs_whoever_ends_first(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    jobs = [("follow", (second, third)), ("follow", (first, second)), ("follow", (None, first))]
    assert run(*jobs) == [0, 1, 2]


def test_a_job_and_a_result_of_any_size_arrive(tmp_path: Path) -> None:
    large = bytes(range(256)) * 40_000  # larger than the buffer of the line between the two
    assert run(("answer", large)) == [(0, large)]


def test_no_jobs_need_no_ranks() -> None:
    assert run() == []


def test_a_barrier_opens_when_the_last_rank_has_come_and_opens_again() -> None:
    first, second = zip(*run(*[("meet", 2)] * 3), strict=True)
    for barrier in (first, second):
        assert min(after for _, after in barrier) >= max(before for before, _ in barrier)
    assert min(before for before, _ in second) >= max(before for before, _ in first)


def test_the_collector_leaves_alone_what_there_was_at_a_barrier() -> None:
    ((before, after),) = run(("frozen", 0))
    assert before == 0
    assert after > 1000  # the objects of imported modules


def test_a_barrier_does_not_wait_for_ranks_that_are_done() -> None:
    early, ((before, after),) = run(("answer", None), ("meet", 1))
    assert early == (0, None)
    assert after >= before


def test_progress_arrives_in_order_with_the_number_of_the_rank() -> None:
    told: list[tuple[int, Any]] = []
    counts = run(
        ("tell", [(1, 10), (10, 10)]), ("tell", ["half", None]), on_progress=lambda *message: told.append(message)
    )
    assert counts == [2, 2]
    assert [value for rank, value in told if rank == 0] == [(1, 10), (10, 10)]
    assert [value for rank, value in told if rank == 1] == ["half", None]
    assert len(told) == 4


def test_messages_of_several_threads_do_not_mix() -> None:
    told: list[Any] = []
    run(("tell_from_threads", 8), on_progress=lambda _, value: told.append(value))
    for thread in range(8):
        own = [message for message in told if message[0] == thread]
        assert own == [(thread, number, bytes([thread]) * 500_000) for number in range(8)]


def test_progress_that_nobody_asked_for_is_dropped() -> None:
    assert run(("tell", [1])) == [1]


def test_text_of_a_rank_that_ends_well_is_handed_over_once() -> None:
    heard: list[tuple[int, str]] = []
    run(("write", "a warning\n"), ("write", ""), on_output=lambda *text: heard.append(text))
    assert heard == [(0, "a warning")]


def test_text_on_standard_output_is_handed_over_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not wait in a buffer of the rank until the rank ends."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    heard: list[tuple[int, str]] = []
    run(("say", "a word"), on_output=lambda *text: heard.append(text))
    assert heard == [(0, "a word")]


def test_text_that_is_not_utf_8_is_handed_over_as_well_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, str]] = []
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    run_ranks(ACT, [("write", "caf\xe9")], environments=[environment], on_output=lambda *text: heard.append(text))
    assert heard == [(0, "caf\ufffd")]


def test_a_rank_finds_the_environment_that_was_given_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given |= {"PYTHONPATH": "/nowhere", "ANSWER": "42"}
    monkeypatch.setenv("OF_THE_PARENT_ONLY", "1")
    environments = [rank_environment(threads, rank, 2, given) for rank, threads in enumerate((3, 1))]
    for rank, found in enumerate(run_ranks(ACT, [("describe", None)] * 2, environments=environments)):
        environment = found["environment"]
        environment.pop("LC_CTYPE", None)  # Python sets it in the C locale (PEP 538)
        assert environment == {
            **given,
            "OMP_NUM_THREADS": "31"[rank],
            "LOADMASTER_OMP_NUM_THREADS": "",
            "LOADMASTER_LOCAL_RANK": str(rank),
            "LOADMASTER_LOCAL_SIZE": "2",
        }


@pytest.mark.parametrize("folder", ["modules", "with space", "with:colon"])
def test_a_rank_imports_from_where_its_parent_does(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / folder)])
    (found,) = run(("describe", None))
    assert found["path"] == sys.path
    assert found["executable"] == sys.executable


def test_an_import_path_that_is_no_text_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes no notice of such an entry."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert run(("answer", 1)) == [(0, 1)]


def test_a_rank_does_not_read_the_input_of_its_parent(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("words for the parent\n")
    before = os.dup(0)
    try:
        with words.open() as stream:
            os.dup2(stream.fileno(), 0)
            (found,) = run(("describe", None))
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert found["input"] == ""


def test_a_rank_ignores_the_interrupt_that_its_parent_answers() -> None:
    assert run(("survive_interrupt", None)) == ["survived"]


@pytest.mark.parametrize("module", ["pickle", "signal", "loadmaster"])
def test_files_of_the_current_folder_are_not_taken_for_modules(
    module: str, tmp_path: Path, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text("raise SystemExit('the file of the current folder was run')")
    monkeypatch.chdir(tmp_path)
    try:
        assert run(("answer", 1)) == [(0, 1)]
    finally:
        for log in temporary_folder.iterdir():
            log.unlink()
