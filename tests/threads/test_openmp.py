"""The count of the calling thread, and no other; and what the loaded run times and torch's backend allow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import threadpoolctl
import torch
from hypothesis import given
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.threads import openmp, pool, scope
from loadmaster.threads.openmp import RunTimes, parse_backend, run_times, set_threads_here, use_one_thread_here
from loadmaster.threads.setup import set_process_threads
from threads.conftest import USABLE_CPUS, counts, in_fresh_thread, mkl_threads, needs_two_cpus, os_threads, wait_until


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


INFO = """ATen/Parallel:
\tat::get_num_threads() : 2
OpenMP 201511 (a.k.a. OpenMP 4.5)
ATen parallel backend: {}
"""


@pytest.mark.parametrize("backend", ["OpenMP", "native thread pool", "native thread pool and TBB"])
def test_the_backend_is_read_from_what_torch_says_about_itself(backend: str) -> None:
    assert parse_backend(INFO.format(backend)) == backend
    assert parse_backend(INFO.format(f"{backend}  ") + "more\n") == backend


@pytest.mark.parametrize("text", ["", "ATen parallel backend:", "ATen parallel backend:\nOpenMP", "OpenMP 201511"])
def test_a_backend_that_is_not_told_is_an_empty_text(text: str) -> None:
    assert parse_backend(text) == ""


@given(st.text())
def test_any_text_names_a_backend_or_none(text: str) -> None:
    assert parse_backend(text) == parse_backend(text).strip()


def test_this_torch_names_its_backend() -> None:
    assert openmp.torch_backend() in torch.__config__.parallel_info()
    assert openmp.torch_backend()


@pytest.mark.parametrize("default", [1, 2, 5])
def test_what_new_threads_begin_with_is_asked_in_a_thread_that_needs_no_python(default: int) -> None:
    torch.set_num_threads(default)
    set_threads_here(3)
    assert openmp.threads_of_new_threads() == in_fresh_thread(torch.get_num_threads) == default
    assert openmp._probe_in_python() == default
    assert torch.get_num_threads() == 3


def test_where_the_probe_has_no_native_form_python_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_native_probe", lambda: None)
    torch.set_num_threads(4)
    assert openmp.threads_of_new_threads() == 4


def test_asking_for_the_counts_of_this_thread_changes_none() -> None:
    def work() -> bool:
        given = openmp.CountsHere(3, 0 if mkl_threads() is None else 5)
        openmp.set_counts_here(given)
        return openmp.counts_here() == given == openmp.counts_here()

    assert in_fresh_thread(work)


def test_the_run_times_are_looked_for_again_only_when_a_library_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [7]
    monkeypatch.setattr(openmp, "_libraries_loaded", lambda: loads[0])
    monkeypatch.setattr(openmp, "_found", None)
    first = run_times()
    assert run_times() is first
    loads[0] = 8
    assert run_times() is not first


def openblas() -> Any:
    found = [row for row in run_times().blas if row.internal_api == "openblas"]
    if not found:
        pytest.skip("there is no OpenBLAS with threads of its own in this process")
    return found[0]


@pytest.fixture
def two_threads_of_openblas() -> Iterator[Any]:
    pool = openblas()
    before = pool.num_threads
    pool.set_num_threads(2)
    yield pool
    pool.set_num_threads(before)


@needs_two_cpus
def test_openblas_is_lowered_inside_and_restored(two_threads_of_openblas: Any) -> None:
    pool = two_threads_of_openblas
    with contextlib.suppress(ValueError), lm.load_threads(1):
        assert pool.num_threads == 1
        with lm.load_threads(2):
            assert pool.num_threads == 1
        raise ValueError("of the loader")
    assert pool.num_threads == 2


@needs_two_cpus
def test_openblas_is_never_raised(two_threads_of_openblas: Any) -> None:
    pool = two_threads_of_openblas
    pool.set_num_threads(1)
    torch.set_num_threads(1)
    with lm.load_threads(2):
        assert (torch.get_num_threads(), pool.num_threads) == (2, 1)
    assert pool.num_threads == 1


@needs_two_cpus
def test_openblas_stays_when_only_a_raise_is_wanted(two_threads_of_openblas: Any) -> None:
    with lm.load_threads(1, only="raise"):
        assert two_threads_of_openblas.num_threads == 2


@needs_two_cpus
def test_openblas_is_lowered_for_good_in_a_process_that_only_loads(two_threads_of_openblas: Any) -> None:
    """With or without an open scope, and it is not raised either."""
    pool = two_threads_of_openblas
    set_process_threads(5)
    assert pool.num_threads == 2
    with lm.load_threads(2):
        set_process_threads(1)
        assert pool.num_threads == 1
    assert pool.num_threads == 1
    pool.set_num_threads(2)
    set_process_threads(1)
    assert pool.num_threads == 1


NATIVE = "torch was built with a native thread pool, which keeps its first count for ever"


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_native_backend_is_left_alone_and_warned_about_once(
    before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(before)
    monkeypatch.setattr(scope, "torch_backend", lambda: "native thread pool")
    with caplog.at_level(logging.DEBUG, "loadmaster"):
        for threads in (1, USABLE_CPUS):
            with lm.load_threads(threads) as share:
                assert counts() == (before, before)
                assert (share.threads, share.why) == (before, NATIVE)
            assert counts() == (before, before)
        assert list(lm.paced([1, 2])) == [1, 2]
    assert [(row.levelname, row.getMessage()) for row in caplog.records if row.levelno >= logging.INFO] == [
        ("WARNING", f"load_threads: {NATIVE}: its threads are left as they are; set OMP_NUM_THREADS at start")
    ]


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_pool_on_a_native_backend_divides_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "torch_backend", lambda: "native thread pool")
    monkeypatch.setattr(pool, "torch_backend", lambda: "native thread pool")
    with lm.load_pool(8) as executor:
        assert executor._max_workers == 2
        assert counts() == (2, 2)


@pytest.mark.parametrize(
    ("platform", "backend", "explicit", "left_alone"),
    [
        ("linux", "OpenMP", False, False),
        ("linux", "OpenMP", True, False),
        ("linux", "", False, False),
        ("darwin", "OpenMP", False, True),
        ("darwin", "OpenMP", True, False),
        ("linux", "native thread pool", True, True),
        ("darwin", "native thread pool", True, True),
    ],
)
@pytest.mark.usefixtures("nothing_said_yet")
def test_where_the_count_is_left_alone(platform: str, backend: str, explicit: bool, left_alone: bool) -> None:
    assert bool(scope._why_left_alone(platform, backend, explicit)) == left_alone


def test_on_macos_nothing_is_changed_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "1")
    monkeypatch.setattr(scope.sys, "platform", "darwin")
    with lm.load_threads() as share:
        assert counts() == (2, 2)
        assert (share.threads, "macOS" in share.why) == (2, True)
    with lm.load_threads(1) as share:
        assert counts() == (1, 1)


@needs_two_cpus
def test_the_members_of_a_team_go_when_they_are_released() -> None:
    def work() -> tuple[int, bool]:
        before = os_threads()
        set_threads_here(8)
        torch.ones(1 << 20).add_(1)
        members = os_threads() - before
        openmp.release_idle_team()
        return len(members), wait_until(lambda: not members & os_threads())

    assert in_fresh_thread(work) == (7, True)


@needs_two_cpus
def test_a_team_is_released_when_a_raise_ends_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(scope, "release_idle_team", lambda: released.append(torch.get_num_threads()))
    torch.set_num_threads(1)
    with lm.load_threads(2):
        with lm.load_threads(1):
            assert released == [1]
        assert released == [1]
    assert released == [1, 1]
    torch.set_num_threads(2)
    with lm.load_threads(1):
        pass
    assert released == [1, 1]
