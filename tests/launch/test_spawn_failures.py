"""`run_ranks` when a rank fails in any way: one sentence per rank, the others are stopped, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.helpers.leftovers import alive_at_the_end, is_alive, taken_text
from launch.helpers.rank_functions import ACT, wait_for_file
from loadmaster.errors import RankError
from loadmaster.launch.spawn import RanksStoppedError, run_ranks
from loadmaster.process import child

pytestmark = pytest.mark.processes


def failure_of(*jobs: tuple[str, Any], **settings: Callable[..., None]) -> str:
    """Run one rank per job, and return the sentences of the error that this must become."""
    with pytest.raises(RankError) as caught:
        run_ranks(ACT, jobs, environments=[dict(os.environ)] * len(jobs), **settings)
    assert caught.value.exit_code == 1
    return str(caught.value)


QUIET = {
    "expected": (("fail", "the file x is gone"), "rank 1: the file x is gone"),
    "bad input": (("fail_on_input", "the file x is no checkpoint"), "rank 1: the file x is no checkpoint"),
    "out of memory": (("exhaust", "8 GiB were wanted"), "rank 1: memory is exhausted: 8 GiB were wanted"),
    "exit code 3": (("leave", 3), "rank 1 ended with exit code 3 before it was done"),
    "exit code 0": (("leave", 0), "rank 1 ended with exit code 0 before it was done"),
    "SIGKILL": (("die", signal.SIGKILL), "rank 1 was killed by SIGKILL, possibly out of memory"),
    "SIGTERM": (("die", signal.SIGTERM), "rank 1 was killed by SIGTERM"),
    "real-time signal": (("die", 40), "rank 1 was killed by signal 40"),
}


@pytest.mark.parametrize(("job", "sentence"), QUIET.values(), ids=QUIET)
def test_a_rank_that_fails_is_one_sentence_and_the_others_are_stopped(job: tuple[str, Any], sentence: str) -> None:
    processes: list[int] = []
    others = [("wait", None)]
    found = failure_of(others[0], job, others[0], on_progress=lambda _, process: processes.append(process))
    assert found == f"{sentence}; the other 2 ranks were stopped"
    assert len(processes) == 2
    assert alive_at_the_end(processes, seconds=0) == []


def test_one_other_rank_is_not_several() -> None:
    sentence = failure_of(("fail", "no more"), ("wait", None))
    assert sentence == "rank 0: no more; the other rank was stopped"


def test_the_others_end_at_once_when_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SECONDS", 20.0)
    started = time.monotonic()
    failure_of(("fail", "no more"), ("wait", None), ("wait", None))
    assert time.monotonic() - started < 10


def test_a_rank_alone_has_no_others() -> None:
    assert failure_of(("fail", "no more")) == "rank 0: no more"


LOUD = {
    "unexpected": (
        ("fail_unexpectedly", "too small"),
        "rank 0 failed: ZeroDivisionError: too small; its output is in",
        r"Traceback .*in fail_unexpectedly\n.*ZeroDivisionError: too small\n\Z",
    ),
    "exit from Python": (
        ("exit_from_python", 3),
        "rank 0 failed: SystemExit: 3; its output is in",
        r"Traceback .*in exit_from_python\n.*SystemExit: 3\n\Z",
    ),
    "crash": (
        ("crash", None),
        "rank 0 was killed by SIGSEGV, a crash in native code; its output is in",
        r"\AFatal Python error: Segmentation fault\n.*string_at",
    ),
    "result that cannot be sent": (
        ("return_lambda", None),
        "rank 0 failed: ",
        r"Traceback .*lambda",
    ),
}


@pytest.mark.parametrize(("job", "sentence", "text"), LOUD.values(), ids=LOUD)
def test_what_a_failed_rank_wrote_is_kept_and_named(
    job: tuple[str, Any], sentence: str, text: str, temporary_folder: Path
) -> None:
    found = failure_of(job, ("wait", None))
    assert found.startswith(sentence)
    assert found.endswith("; the other rank was stopped")
    assert "\n" not in found
    kept = taken_text(temporary_folder, found)
    assert re.search(text, kept, re.DOTALL), kept


def test_a_rank_that_hangs_with_its_line_closed_is_said_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SECONDS", 0.1)
    processes: list[int] = []
    sentence = failure_of(("close_and_hang", None), on_progress=lambda _, process: processes.append(process))
    assert sentence == "rank 0 closed its connection and hangs"
    assert alive_at_the_end(processes, seconds=0) == []


@pytest.mark.parametrize("other", ["wait_without_listening", "wait_stopped"])
def test_a_rank_that_does_not_end_when_told_to_is_killed(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SECONDS", 0.1)
    processes: list[int] = []
    failure_of((other, None), ("fail", "no more"), on_progress=lambda _, process: processes.append(process))
    assert len(processes) == 1
    assert alive_at_the_end(processes, seconds=0) == []


def test_each_rank_that_failed_has_its_own_sentence(tmp_path: Path) -> None:
    """The parent is kept busy with a message of rank 1 until ranks 0 and 2 are dead, and sees both deaths at once."""
    first, last, sign = (str(tmp_path / name) for name in ("first", "last", "sign"))

    def let_die(_: int, __: int) -> None:
        for file in (first, last):
            wait_for_file(file)
        Path(sign).touch()
        for file in (first, last):
            os.waitid(os.P_PID, int(Path(file).read_text()), os.WEXITED | os.WNOWAIT)

    sentences = failure_of(
        ("die_at_the_sign", (first, sign, signal.SIGKILL)),
        ("wait", None),
        ("die_at_the_sign", (last, sign, signal.SIGABRT)),
        on_progress=let_die,
    )
    sentence, another = sentences.splitlines()
    assert sentence == "rank 0 was killed by SIGKILL, possibly out of memory"
    assert another == "rank 2 was killed by SIGABRT, native code gave up; the other rank was stopped"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_parent_stops_all_ranks(kind: type[BaseException]) -> None:
    processes: list[int] = []

    def interrupt(_: int, process: int) -> None:
        processes.append(process)
        if len(processes) == 2:
            raise kind("of the parent")

    with pytest.raises(kind, match="of the parent"):
        run_ranks(ACT, [("wait", None)] * 2, environments=[dict(os.environ)] * 2, on_progress=interrupt)
    assert alive_at_the_end(processes, seconds=0) == []


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "polled"])
def test_ranks_whose_time_is_over_are_stopped(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not watched:
        monkeypatch.setattr(child, "_watch", lambda _: None)
    processes: list[int] = []
    started = time.monotonic()
    with pytest.raises(RanksStoppedError, match="were not done in their time"):
        run_ranks(
            ACT,
            [("wait", None)] * 2,
            environments=[dict(os.environ)] * 2,
            on_progress=lambda _, process: processes.append(process),
            timeout_seconds=1.5,
        )
    assert 1.5 <= time.monotonic() - started < 10
    assert alive_at_the_end(processes, seconds=0) == []


def test_ranks_that_are_done_in_their_time_are_not_stopped() -> None:
    assert run_ranks(ACT, [("answer", 1)], environments=[dict(os.environ)], timeout_seconds=60) == [(0, 1)]


def test_a_rank_that_cannot_be_started_is_one_sentence_and_stops_the_ones_before_it() -> None:
    environments = [dict(os.environ), {**os.environ, "LARGE": "x" * (1 << 18)}]  # one string of more than 32 pages
    with pytest.raises(RankError, match=r"^rank 1 could not be started: Argument list too long$"):
        run_ranks(ACT, [("wait", None)] * 2, environments=environments)


def test_a_job_that_cannot_be_sent_leaves_no_process() -> None:
    with pytest.raises(Exception, match="lambda"):
        run_ranks(ACT, [("answer", lambda: None)], environments=[dict(os.environ)])


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_number_of_environments_other_than_that_of_the_jobs_is_an_error(jobs: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        run_ranks(ACT, [("wait", None)] * jobs, environments=[dict(os.environ)] * 2)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("launch.helpers.missing:act", "ModuleNotFoundError: No module named 'launch.helpers.missing'"),
        ("launch.helpers.rank_functions:missing", "AttributeError: "),
    ],
)
def test_a_function_that_is_not_there_is_one_sentence(function: str, wanted: str, temporary_folder: Path) -> None:
    with pytest.raises(RankError, match=f"^rank 0 failed: {wanted}") as caught:
        run_ranks(function, [None], environments=[dict(os.environ)])
    assert "Traceback" in taken_text(temporary_folder, str(caught.value))


def test_a_rank_that_is_killed_within_a_message_is_one_sentence() -> None:
    assert failure_of(("die_within_a_message", None)) == "rank 0 was killed by SIGKILL, possibly out of memory"


def test_a_result_that_cannot_be_received_is_one_sentence(temporary_folder: Path) -> None:
    assert failure_of(("return_unreadable", None)).startswith("rank 0 ")


@pytest.mark.parametrize("kind", ["program", "fork"])
def test_the_death_of_a_rank_is_seen_at_once_though_a_child_of_it_lives_on(kind: str, temporary_folder: Path) -> None:
    """The child holds the line of the rank open, so that the end of the line does not tell."""
    started = time.monotonic()
    sentence = failure_of(("die_with_a_child", kind))
    seconds = time.monotonic() - started
    child = int(taken_text(temporary_folder, sentence))
    if is_alive(child):
        os.kill(child, signal.SIGKILL)
    assert alive_at_the_end([child]) == []
    assert sentence.startswith("rank 0 was killed by SIGKILL, possibly out of memory")
    assert seconds < 2.5  # the child lives for 4 seconds
