"""`load_threads` lowers and raises torch's threads for a block or a function, and puts back exactly what was there."""

from __future__ import annotations

import logging
import queue
import re
import threading
from typing import Any

import pytest
import threadpoolctl
import torch

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.threads import openmp, scope
from threads.conftest import USABLE_CPUS, counts, in_fresh_thread, needs_two_cpus


def openmp_threads() -> list[int]:
    """What the OpenMP run times themselves say about this thread."""
    return [row["num_threads"] for row in threadpoolctl.threadpool_info() if row["user_api"] == "openmp"]


def test_lowering_reaches_this_thread_and_the_ones_that_start_meanwhile() -> None:
    with lm.load_threads(1) as share:
        assert share.threads == 1
        assert counts() == (1, 1)
        assert set(openmp_threads()) == {1}
    assert counts() == (2, 2)
    assert set(openmp_threads()) == {2}


@needs_two_cpus
def test_raising_reaches_this_thread_alone() -> None:
    torch.set_num_threads(1)
    with lm.load_threads(2) as share:
        assert share.threads == 2
        assert counts() == (2, 1)
        assert set(openmp_threads()) == {2}
    assert counts() == (1, 1)
    assert set(openmp_threads()) == {1}


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_passes_and_everything_is_put_back(before: int, threads: int, kind: type[BaseException]) -> None:
    torch.set_num_threads(before)

    def fail() -> None:
        with lm.load_threads(threads):
            assert torch.get_num_threads() == threads
            raise kind("of the loader")

    with pytest.raises(kind, match="of the loader"):
        fail()
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.parametrize("scopes", [(1, 2), (2, 1), (1, 2, 1), (2, 1, 2), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("before", [1, 2])
def test_scopes_within_each_other_each_put_back_what_they_found(before: int, scopes: tuple[int, ...]) -> None:
    """What a fresh thread starts with counts as well: a scope that raises does not touch it."""
    torch.set_num_threads(before)

    def enter(inner: tuple[int, ...]) -> None:
        found = counts()
        if inner:
            with lm.load_threads(inner[0]):
                assert torch.get_num_threads() == inner[0]
                enter(inner[1:])
        assert counts() == found

    enter(scopes)
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.parametrize("here", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_with_a_count_of_its_own_gets_it_back_and_no_other_thread_does(here: int, threads: int) -> None:
    openmp.set_threads_here(here)
    assert counts() == (here, 2)
    with lm.load_threads(threads):
        assert torch.get_num_threads() == threads
    assert counts() == (here, 2)


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_a_decorated_function_runs_with_the_share_every_time(before: int, threads: int) -> None:
    torch.set_num_threads(before)

    @lm.load_threads(threads)
    def load(factor: int, *, plus: int) -> int:
        """Load something."""
        return factor * torch.get_num_threads() + plus

    assert load.__doc__ == "Load something."
    assert counts() == (before, before)
    for _ in range(2):
        assert load(10, plus=3) == 10 * threads + 3
        assert counts() == (before, before)


def test_auto_is_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    with lm.load_threads() as share:
        assert share == lm.share()
        assert share.threads == torch.get_num_threads() == 1
        assert "LOADMASTER_THREADS" in share.why
    assert counts() == (2, 2)


def test_a_number_above_the_usable_cpus_is_capped_and_says_so() -> None:
    with lm.load_threads(10_000) as share:
        assert share.threads == torch.get_num_threads() == USABLE_CPUS
        assert f"10000, but only {USABLE_CPUS} CPUs are usable" in share.why
    assert counts() == (2, 2)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, None, "two", "", [1]], ids=repr)
def test_a_number_that_is_none_is_an_error_that_names_itself(threads: Any) -> None:
    with pytest.raises(InputError) as caught, lm.load_threads(threads):
        pytest.fail("the block is not to run")
    assert "threads" in str(caught.value)
    assert repr(threads) in str(caught.value)
    assert counts() == (2, 2)


def test_making_a_scope_changes_nothing() -> None:
    lm.load_threads(1)
    assert counts() == (2, 2)


def test_another_thread_that_runs_already_is_left_alone() -> None:
    questions: queue.Queue[bool] = queue.Queue()
    answers: queue.Queue[int] = queue.Queue()

    def answer() -> None:
        while questions.get():
            answers.put(torch.get_num_threads())

    other = threading.Thread(target=answer)
    other.start()

    def ask() -> int:
        questions.put(True)
        return answers.get()

    assert ask() == 2
    with lm.load_threads(1):
        assert ask() == 2
    assert ask() == 2
    questions.put(False)
    other.join()


def test_a_scope_in_another_thread_puts_back_what_that_thread_had() -> None:
    def load() -> tuple[int, int, int]:
        before = torch.get_num_threads()
        with lm.load_threads(1):
            within = torch.get_num_threads()
        return before, within, torch.get_num_threads()

    assert in_fresh_thread(load) == (2, 1, 2)
    assert counts() == (2, 2)


def test_a_change_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loadmaster"), lm.load_threads(1) as share:
        pass
    (record,) = [record for record in caplog.records if record.name.startswith("loadmaster.threads")]
    assert record.levelno == logging.INFO
    message = record.getMessage()
    pattern = re.escape(f"torch intra-op threads: 2 -> 1 ({share.why}), restored to 2 after ") + r"\d+\.\d s"
    assert re.fullmatch(pattern, message)


def test_an_unchanged_count_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """One line for those who look for it, and none for everybody else."""
    torch.set_num_threads(1)
    with caplog.at_level(logging.DEBUG, "loadmaster"), lm.load_threads(1) as share:
        pass
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage().startswith(f"torch intra-op threads: 1, as before ({share.why}), for ")


def test_the_scope_is_the_public_one() -> None:
    assert lm.load_threads is scope.load_threads
