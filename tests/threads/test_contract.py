"""What `load_threads` promises about counts: which threads it reaches, and that nothing of it is left.

The promises that only a process of its own can show are in `test_processes` and `test_forks`.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.threads import openmp, process, scope
from threads.conftest import USABLE_CPUS, counts, in_fresh_thread, mkl_threads, needs_two_cpus

ROOM = Path(scope.__file__).parent
needs_mkl = pytest.mark.skipif(mkl_threads() is None, reason="this torch has no MKL")


def counts_of_a_pool(workers: int) -> list[int]:
    """What each worker of a pool that starts now begins with; all of them run at the same time."""
    meeting = threading.Barrier(workers)

    def look() -> int:
        meeting.wait(60)
        return torch.get_num_threads()

    with ThreadPoolExecutor(workers) as pool:
        return [future.result() for future in [pool.submit(look) for _ in range(workers)]]


# Which threads are reached


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_a_pool_of_32_that_starts_inside_never_has_the_raised_count(before: int, threads: int) -> None:
    torch.set_num_threads(before)
    with lm.load_threads(threads):
        assert counts_of_a_pool(32) == [1] * 32
        assert torch.get_num_threads() == threads
    assert counts_of_a_pool(4) == [before] * 4


@needs_two_cpus
@needs_mkl
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_mkl_follows_in_this_thread_and_in_new_ones(before: int, threads: int) -> None:
    torch.set_num_threads(before)
    assert (mkl_threads(), in_fresh_thread(mkl_threads)) == (before, before)
    with lm.load_threads(threads):
        assert (mkl_threads(), in_fresh_thread(mkl_threads)) == (threads, 1)
    assert (mkl_threads(), in_fresh_thread(mkl_threads)) == (before, before)


@needs_mkl
def test_a_count_of_mkl_that_differs_from_the_one_of_torch_comes_back() -> None:
    def work() -> tuple[int | None, int | None]:
        openmp.set_counts_here(openmp.CountsHere(2, 5))
        with lm.load_threads(1):
            within = mkl_threads()
        return within, mkl_threads()

    assert in_fresh_thread(work) == (1, 5)


@contextlib.contextmanager
def thread_that_runs(name: str) -> Iterator[None]:
    """A thread that does nothing until the block ends."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def lines_on_running_threads(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(row.levelname, row.getMessage()) for row in caplog.records if "run already" in row.getMessage()]


def test_threads_that_run_already_are_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scope, "_said", [])
    with caplog.at_level(logging.INFO, "loadmaster"), thread_that_runs("engine-watchdog"):
        for _ in range(2):
            with lm.load_threads(1):
                pass
    line = "threads that run already keep their intra-op count if they have used torch: engine-watchdog"
    assert lines_on_running_threads(caplog) == [("INFO", line)]


@needs_two_cpus
def test_threads_that_run_already_are_not_mentioned_by_a_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scope, "_said", [])
    torch.set_num_threads(1)
    with caplog.at_level(logging.INFO, "loadmaster"), thread_that_runs("engine-watchdog"), lm.load_threads(2):
        pass
    assert lines_on_running_threads(caplog) == []


def test_a_process_of_one_thread_has_nothing_to_mention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scope, "_said", [])
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    with caplog.at_level(logging.INFO, "loadmaster"), lm.load_threads(1):
        pass
    assert lines_on_running_threads(caplog) == []


# Restored, whatever happens


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_an_interrupt_from_the_keyboard_while_a_loader_runs(before: int, threads: int) -> None:
    """A real signal, which arrives while the loader copies."""
    torch.set_num_threads(before)
    loads = threading.Event()

    def interrupt() -> None:
        loads.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()

    def load() -> None:
        weights = torch.zeros(1000)
        with lm.load_threads(threads):
            while True:
                weights.add_(1)
                loads.set()

    with pytest.raises(KeyboardInterrupt):
        load()
    other.join()
    assert counts() == (before, before)


class InterruptAtLine:
    """Raises KeyboardInterrupt before the ``number``-th line that runs in the room ``threads``.

    A signal can also arrive before ``__exit__`` or ``_leave`` have begun to do anything, and no Python code can catch
    that: their lines before the first step are not counted. Nor are lines with ``with``: Python looks for signals
    neither between a lock and its block nor between a block and its lock, but does trace the line there. What C calls
    back can raise nothing.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if Path(frame.f_code.co_filename).parent == ROOM else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._cannot_be_caught(frame):
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line

    def _cannot_be_caught(self, frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return frame.f_code.co_name in ("__exit__", "first") or line == "try:" or line.startswith("with ")


@contextlib.contextmanager
def interrupted(number: int) -> Iterator[InterruptAtLine]:
    before, tracer = sys.gettrace(), InterruptAtLine(number)
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(before)


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_an_interrupt_at_any_line_of_entering_and_leaving(before: int, threads: int) -> None:
    torch.set_num_threads(before)
    with lm.load_threads(threads):
        pass  # what is looked up once has been looked up
    wheres: list[str] = []
    for number in range(10_000):
        with interrupted(number) as tracer, contextlib.suppress(KeyboardInterrupt), lm.load_threads(threads):
            pass
        assert counts() == (before, before), f"interrupted at {tracer.where}"
        if not tracer.where:
            break
        wheres.append(tracer.where)
    assert {where.partition(",")[0] for where in wheres} >= {"_enter", "_apply", "join", "leave", "close", "_restore"}


@needs_two_cpus
@pytest.mark.parametrize("step", ["recent_host", "Lease", "binding_problem", "process_counts", "set_threads_here"])
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_scope_that_cannot_be_entered_leaves_nothing(
    step: str, before: int, threads: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the step has done its work or not."""
    torch.set_num_threads(before)
    for after_work in (False, True):
        real = getattr(scope, step)
        failed: list[bool] = []

        def once(
            *words: Any, real: Any = real, late: bool = after_work, failed: list[bool] = failed, **named: Any
        ) -> Any:
            first = not failed
            failed.append(True)
            if first and not late:
                raise kind("in a step")
            found = real(*words, **named)
            if first:
                raise kind("in a step")
            return found

        with monkeypatch.context() as patch:
            patch.setattr(scope, step, once)
            with pytest.raises(kind, match="in a step"), lm.load_threads(threads):
                pytest.fail("the block is not to run")
        assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_a_second_interrupt_while_leaving_is_passed_on_and_all_is_put_back(
    before: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(before)
    real, calls = process.ProcessCounts.leave, []

    def leave(counts_of_process: process.ProcessCounts, of: object) -> None:
        calls.append(of)
        if len(calls) == 1:
            raise KeyboardInterrupt("a second one")
        real(counts_of_process, of)

    monkeypatch.setattr(process.ProcessCounts, "leave", leave)
    scope_of_load = lm.load_threads(threads)
    with pytest.raises(KeyboardInterrupt, match="a second one"), scope_of_load:
        pass
    assert counts() == (before, before)
    with scope_of_load:  # it was left, and can be entered again
        assert torch.get_num_threads() == threads
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "failed"])
def test_a_decorated_generator_is_a_scope_from_its_first_item_to_its_end(before: int, threads: int, end: str) -> None:
    torch.set_num_threads(before)

    @lm.load_threads(threads)
    def weights() -> Iterator[int]:
        yield torch.get_num_threads()
        if end == "failed":
            raise ValueError("of the source")
        yield torch.get_num_threads()

    found = weights()
    assert counts() == (before, before)
    assert next(found) == threads
    assert torch.get_num_threads() == threads
    if end == "exhausted":
        assert list(found) == [threads]
    elif end == "closed":
        found.close()  # type: ignore[attr-defined]
    elif end == "failed":
        with pytest.raises(ValueError, match="of the source"):
            next(found)
    else:
        del found
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("threads", [(1, 2), (2, 1)], ids=str)
def test_scopes_of_one_thread_may_end_in_any_order(before: int, first_out: int, threads: tuple[int, int]) -> None:
    torch.set_num_threads(before)
    scopes = [lm.load_threads(number) for number in threads]
    for one in scopes:
        one.__enter__()
    assert counts() == (threads[1], 1)
    scopes[first_out].__exit__(None, None, None)
    left = threads[1 - first_out]
    assert counts() == (left, min(before, left))
    scopes[1 - first_out].__exit__(None, None, None)
    assert counts() == (before, before)


class OtherThread:
    """A thread that does what it is told, one thing after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def do(self, function: Callable[[], Any]) -> Any:
        found: Future[Any] = self._pool.submit(function)
        return found.result(60)

    def __enter__(self) -> OtherThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def leave(one: scope.LoadThreads) -> None:
    one.__exit__(None, None, None)


@needs_two_cpus
def test_the_last_scope_out_restores_what_new_threads_begin_with() -> None:
    torch.set_num_threads(3)
    with OtherThread() as other:
        first, second = lm.load_threads(1), lm.load_threads(2)
        first.__enter__()
        assert other.do(torch.get_num_threads) == 1  # it started inside
        other.do(second.__enter__)
        assert counts() == (1, 1)
        leave(first)
        assert counts() == (3, 2)
        assert other.do(torch.get_num_threads) == 2
        other.do(lambda: leave(second))
        assert counts() == (3, 3)
        assert other.do(torch.get_num_threads) == 1  # what it began with


@needs_two_cpus
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1), (2, 2)])
def test_a_loader_that_sets_the_count_itself_leaves_nothing_either(before: int, threads: int) -> None:
    torch.set_num_threads(before)
    with lm.load_threads(threads):
        torch.set_num_threads(3)
        assert counts() == (3, 3)
    assert counts() == (before, before)


@needs_two_cpus
@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize(("before", "threads"), [(1, 2), (2, 1)])
def test_a_scope_that_another_thread_leaves(before: int, threads: int, caplog: pytest.LogCaptureFixture) -> None:
    """New threads begin as before at once, and the first thread is put back by its next scope."""
    torch.set_num_threads(before)
    one = lm.load_threads(threads)
    one.__enter__()
    with OtherThread() as other:
        began = other.do(torch.get_num_threads)
        other.do(lambda: leave(one))
        assert other.do(torch.get_num_threads) == began
    assert [row.getMessage() for row in caplog.records if row.levelname == "WARNING"] == [
        "load_threads: a scope was left in another thread than it was entered in; the first one keeps its count until "
        "its next scope"
    ]
    assert counts() == (threads, before)
    # What the next scope finds is the count from before, so that this one has nothing to move.
    with lm.load_threads(before, only="lower" if threads < before else "raise"):
        assert torch.get_num_threads() == before
    assert counts() == (before, before)


def test_a_scope_that_another_thread_leaves_moves_the_affinity_of_neither() -> None:
    mask = os.sched_getaffinity(0)
    one_cpu = {min(mask)}
    one = lm.load_threads(1)
    one.__enter__()
    with OtherThread() as other:
        other.do(lambda: os.sched_setaffinity(0, one_cpu))
        other.do(lambda: leave(one))
        assert other.do(lambda: os.sched_getaffinity(0)) == one_cpu
    with lm.load_threads(2):
        pass
    assert os.sched_getaffinity(0) == mask


@needs_two_cpus
@pytest.mark.parametrize("fails", [False, True])
def test_a_loader_that_narrows_the_affinity_gets_the_mask_back(fails: bool) -> None:
    mask = os.sched_getaffinity(0)
    with contextlib.suppress(ValueError), lm.load_threads(1):
        os.sched_setaffinity(0, {min(mask)})
        if fails:
            raise ValueError("of the loader")
    assert os.sched_getaffinity(0) == mask


@needs_two_cpus
def test_a_narrowed_affinity_is_seen_by_the_next_scope() -> None:
    """The host is not read again for each scope."""
    mask = os.sched_getaffinity(0)
    with lm.load_threads(2) as share:
        assert share.threads == 2
    try:
        os.sched_setaffinity(0, {min(mask)})
        with lm.load_threads(2) as share:
            assert share.threads == torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_the_inter_op_count_is_left_alone() -> None:
    before = torch.get_num_interop_threads()
    with lm.load_threads(1):
        assert torch.get_num_interop_threads() == before
    assert torch.get_num_interop_threads() == before


def test_one_scope_can_be_entered_again_once_it_was_left() -> None:
    one = lm.load_threads(1)
    for _ in range(2):
        with one:
            assert counts() == (1, 1)
            with pytest.raises(InputError, match="entered already"), one:
                pytest.fail("the block is not to run")
            assert counts() == (1, 1)
        assert counts() == (2, 2)


def test_an_async_function_cannot_be_decorated() -> None:
    async def load() -> None: ...

    async def weights() -> Any:
        yield 1

    for function in (load, weights):
        with pytest.raises(InputError, match="async"):
            lm.load_threads(1)(function)


Step = tuple[str, int, int, str | None]
"""Enter or leave, in which thread, with how many threads or which of its open scopes, and ``only``."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "leave"]),
        st.integers(0, 2),
        st.integers(1, 2),
        st.sampled_from([None, None, "raise", "lower"]),
    ),
    max_size=14,
)


class Model:
    """What the counts have to be, in the simplest words."""

    def __init__(self, base: int, threads: int) -> None:
        self.base = base
        self.open: list[list[tuple[scope.LoadThreads, int, int | None]]] = [[] for _ in range(threads)]

    def here(self, thread: int) -> int:
        """The count of a thread: that of its innermost scope."""
        return self.open[thread][-1][1] if self.open[thread] else self.base

    def enter(self, thread: int, threads: int, only: str | None, entered: scope.LoadThreads) -> None:
        found = self.here(thread)
        inside = {"raise": max(found, threads), "lower": min(found, threads), None: threads}[only]
        self.open[thread].append((entered, inside, None if only == "raise" else threads))

    def fresh(self) -> int:
        """The count of a new thread: the least that an open scope wants."""
        wanted = [least for scopes in self.open for _, _, least in scopes if least is not None]
        return min([self.base, *wanted])


@needs_two_cpus
@given(base=st.integers(1, 3), steps=STEPS)
@settings(max_examples=60)
def test_scopes_in_several_threads_in_any_order(base: int, steps: list[Step]) -> None:
    torch.set_num_threads(base)
    model = Model(base, 3)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(OtherThread()) for _ in range(3)]
        assert [other.do(torch.get_num_threads) for other in others] == [base] * 3
        for kind, thread, number, only in steps:
            scopes = model.open[thread]
            if kind == "enter":
                entered = scope.LoadThreads(number, only=only)  # type: ignore[arg-type]
                model.enter(thread, number, only, entered)
                others[thread].do(entered.__enter__)
            elif scopes:
                left = scopes.pop(-1 if number == 1 else 0)[0]
                others[thread].do(lambda left=left: leave(left))
            assert [other.do(torch.get_num_threads) for other in others] == [model.here(i) for i in range(3)]
            assert counts() == (base, model.fresh())
        for thread, other in enumerate(others):
            for entered, _, _ in reversed(model.open[thread]):
                other.do(lambda entered=entered: leave(entered))
        assert [other.do(torch.get_num_threads) for other in others] == [base] * 3
    assert counts() == (base, base)


# Once per phase


@pytest.fixture
def settings_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every setting of a count, by whatever way."""
    made: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            made.append(name)
            return real(*words)

        return call

    monkeypatch.setattr(torch, "set_num_threads", noted("torch", torch.set_num_threads))
    for module in (scope, process):
        monkeypatch.setattr(module, "set_counts_here", noted("counts", module.set_counts_here))
    monkeypatch.setattr(scope, "set_threads_here", noted("threads", scope.set_threads_here))
    return made


@needs_two_cpus
@pytest.mark.parametrize(
    ("before", "threads", "made"),
    [(1, 2, ["threads", "counts"]), (2, 1, ["torch", "counts", "threads", "torch", "counts", "counts"])],
)
def test_a_count_is_set_when_a_scope_begins_and_ends_and_never_between(
    before: int, threads: int, made: list[str], settings_made: list[str]
) -> None:
    torch.set_num_threads(before)
    settings_made.clear()
    weights = [torch.zeros(64) for _ in range(500)]
    with lm.load_threads(threads):
        for weight in lm.paced(weights, threads):
            weight.add_(1)
        half = len(settings_made)
    assert settings_made == made
    assert half == len(made) // 2


def test_a_scope_that_has_nothing_to_change_sets_nothing_in_between(settings_made: list[str]) -> None:
    with lm.load_threads(1):
        settings_made.clear()
        for _ in range(10):
            with lm.load_threads(1):
                pass
        assert settings_made == []


# Only one way


@needs_two_cpus
@pytest.mark.parametrize(
    ("before", "threads", "only", "here", "fresh"),
    [
        (1, 2, "raise", 2, 1),
        (2, 1, "raise", 2, 2),
        (3, 2, "raise", 3, 3),
        (2, 2, "raise", 2, 2),
        (1, 2, "lower", 1, 1),
        (2, 1, "lower", 1, 1),
        (3, 2, "lower", 2, 2),
        (2, 2, "lower", 2, 2),
    ],
)
def test_only_a_raise_or_only_a_lowering(before: int, threads: int, only: Any, here: int, fresh: int) -> None:
    torch.set_num_threads(before)
    with lm.load_threads(threads, only=only) as share:
        assert counts() == (here, fresh)
        assert share.threads == here
        assert (f"left at {here} since only a {only} is wanted" in share.why) == (here != threads)
    assert counts() == (before, before)


@needs_two_cpus
def test_only_a_lowering_looks_at_new_threads_by_themselves() -> None:
    torch.set_num_threads(3)
    openmp.set_threads_here(1)
    with lm.load_threads(2, only="lower"):
        assert counts() == (1, 2)
    assert counts() == (1, 3)


@pytest.mark.parametrize("only", ["up", "", "RAISE", 1, True], ids=repr)
def test_any_other_only_is_an_error_that_names_it(only: Any) -> None:
    with pytest.raises(InputError, match="only must be 'raise' or 'lower'") as caught:
        lm.load_threads(1, only=only)
    assert repr(only) in str(caught.value)


# Explicit values


def test_a_capped_number_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loadmaster"), lm.load_threads(10_000):
        pass
    assert f"load_threads(10000): {USABLE_CPUS}, since only so many CPUs are usable" in caplog.messages


def test_a_number_that_fits_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loadmaster"), lm.load_threads(1):
        pass
    assert "so many CPUs" not in caplog.text


@pytest.mark.parametrize("value", ["", " "])
def test_a_blank_variable_is_as_good_as_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lm.load_threads() as unset:
        pass
    monkeypatch.setenv("LOADMASTER_THREADS", value)
    with lm.load_threads() as share:
        assert share == unset


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5"])
def test_a_variable_that_is_no_number_is_an_error_that_names_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", value)
    with pytest.raises(InputError, match=f"LOADMASTER_THREADS must be .*{value}"), lm.load_threads():
        pytest.fail("the block is not to run")
    assert counts() == (2, 2)


def test_a_number_in_the_call_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_THREADS", "10000")
    with lm.load_threads(1) as share:
        assert counts() == (1, 1)
    assert share.why.startswith("load_threads 1 (")
