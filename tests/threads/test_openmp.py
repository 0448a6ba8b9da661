"""The count of the calling thread, and no other."""

from __future__ import annotations

import logging

import pytest
import threadpoolctl
import torch

from loadmaster.threads import openmp
from loadmaster.threads.openmp import RunTimes, run_times, set_threads_here, use_one_thread_here
from threads.conftest import counts, in_fresh_thread


def openmp_threads() -> set[int]:
    """What the OpenMP run times themselves say about this thread."""
    return {row["num_threads"] for row in threadpoolctl.threadpool_info() if row["user_api"] == "openmp"}


def test_one_thread_here_leaves_every_other_thread_as_it_is() -> None:
    def work() -> tuple[int, set[int], tuple[int, int]]:
        use_one_thread_here()
        return torch.get_num_threads(), openmp_threads(), counts()

    assert in_fresh_thread(work) == (1, {1}, (1, 2))
    assert counts() == (2, 2)
    assert openmp_threads() == {2}


def test_one_thread_here_holds_though_torch_sets_a_thread_up_late() -> None:
    """torch gives a thread its count when it first runs something in parallel there."""

    def work() -> int:
        use_one_thread_here()
        torch.ones(1 << 20).add_(1)
        return torch.get_num_threads()

    assert in_fresh_thread(work) == 1


def test_one_thread_here_reaches_the_calling_thread_when_it_is_the_main_one() -> None:
    use_one_thread_here()
    assert counts() == (1, 2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_can_be_set_here(threads: int) -> None:
    def work() -> tuple[bool, int, set[int]]:
        return set_threads_here(threads), torch.get_num_threads(), openmp_threads()

    assert in_fresh_thread(work) == (True, threads, {threads})


def test_the_run_time_that_torch_has_loaded_is_found() -> None:
    paths = {row["filepath"] for row in threadpoolctl.threadpool_info() if row["user_api"] == "openmp"}
    assert {controller.filepath for controller in run_times().openmp} == paths
    assert paths


def test_without_a_run_time_nothing_is_set_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build of torch without OpenMP is not here."""
    monkeypatch.setattr(openmp, "run_times", lambda: RunTimes((), ()))
    with caplog.at_level(logging.DEBUG, "loadmaster"):
        assert set_threads_here(1) is False
        use_one_thread_here()
    assert counts() == (2, 2)
    assert "no OpenMP run time is loaded" in caplog.text
