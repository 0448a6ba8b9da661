"""Promises of the scope that only a process of its own can show: idle threads, two run times, affinity, for good."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import loadmaster as lm
from loadmaster.errors import InputError
from loadmaster.share import share
from loadmaster.threads.openmp import run_times
from loadmaster.threads.setup import set_process_threads
from threads.conftest import USABLE_CPUS, counts, needs_two_cpus, run_python

pytestmark = pytest.mark.processes

TASKS = """
import time

def tasks():
    return set(os.listdir("/proc/self/task"))

def new_become(number, before, seconds=20):
    # How many threads there are that were not there before: ``number``, as soon as it is that.
    deadline = time.monotonic() + seconds
    while len(tasks() - before) != number and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(tasks() - before)
"""


@needs_two_cpus
def test_a_raise_leaves_no_idle_threads_in_a_rank_that_was_started_with_one() -> None:
    """And the scope says one line, which names everything."""
    facts = run_python(
        TASKS
        + """
import torch
from loadmaster.threads.openmp import set_threads_here
weights = torch.ones(1 << 20)
weights.add_(1)
before = tasks()
with lm.load_threads(2) as share:
    weights.add_(1)
    facts["inside"] = new_become(1, before)
facts["after"] = new_become(0, before)
scope = lm.load_threads(2)
scope.__enter__()
set_threads_here(8)
weights.add_(1)
facts["inside with 8"] = new_become(7, before)
scope.__exit__(None, None, None)
facts["after 8"] = new_become(0, before)
facts["counts"] = counts()
facts["why"] = share.why
""",
        OMP_NUM_THREADS="1",
    )
    assert (facts["inside"], facts["after"]) == (1, 0)
    assert (facts["inside with 8"], facts["after 8"]) == (7, 0)
    assert facts["counts"] == [1, 1]
    line = re.escape(f"torch intra-op threads: 1 -> 2 ({facts['why']}), restored to 1 after ") + r"\d+\.\d s"
    assert [(level, re.fullmatch(line, text) is not None) for level, text in facts["said"]] == [("INFO", True)] * 2


@needs_two_cpus
def test_two_openmp_run_times_are_warned_about_once_and_both_counts_are_set(tmp_path: Path) -> None:
    """The second one is loaded after the first scope: it is not overlooked."""
    (first,) = [row.filepath for row in run_times().openmp if "libgomp" in row.filepath][:1] or [""]
    if not first:
        pytest.skip("this torch brings no libgomp that could be copied")
    second = shutil.copy(first, tmp_path / "libgomp-second.so.1")
    facts = run_python(
        """
import ctypes, torch
with lm.load_threads(1):
    pass
facts["said with one"] = [row for row in said if row[0] == "WARNING"]
library = ctypes.CDLL(sys.argv[1])
library.omp_set_num_threads(2)
torch.set_num_threads(2)
for _ in range(2):
    with lm.load_threads(1):
        facts["inside"] = [torch.get_num_threads(), library.omp_get_max_threads()]
facts["after"] = [torch.get_num_threads(), library.omp_get_max_threads()]
from loadmaster.threads.openmp import run_times
facts["paths"] = [row.filepath for row in run_times().openmp]
""",
        os.fspath(second),
    )
    assert facts["said with one"] == []
    assert (facts["inside"], facts["after"]) == ([1, 1], [2, 2])
    (warning,) = [message for level, message in facts["said"] if level == "WARNING"]
    assert warning.startswith("2 OpenMP run times are loaded in this process, ")
    assert sorted(facts["paths"]) == sorted({os.path.realpath(first), os.path.realpath(second)})
    assert all(path in warning for path in facts["paths"])


@needs_two_cpus
def test_a_bound_run_time_does_not_narrow_this_process_when_we_import_torch() -> None:
    facts = run_python(
        """
facts["before"] = sorted(os.sched_getaffinity(0))
with lm.load_threads() as share:
    import torch
    weights = torch.ones(1 << 20).add_(1)
    facts["inside"] = sorted(os.sched_getaffinity(0))
facts["after"] = sorted(os.sched_getaffinity(0))
facts["child"] = os.popen("nproc").read().strip()
facts["threads"] = share.threads
""",
        OMP_PROC_BIND="true",
    )
    assert facts["before"] == facts["inside"] == facts["after"] == sorted(os.sched_getaffinity(0))
    assert facts["child"] == str(USABLE_CPUS)
    assert [message for level, message in facts["said"] if level == "WARNING"] == []


@needs_two_cpus
def test_a_process_that_the_run_time_has_bound_already_is_warned_about_once() -> None:
    facts = run_python(
        """
before = len(os.sched_getaffinity(0))
import torch
facts["masks"] = [before, len(os.sched_getaffinity(0))]
for _ in range(2):
    with lm.load_threads():
        pass
facts["after"] = len(os.sched_getaffinity(0))
""",
        OMP_PROC_BIND="true",
    )
    if facts["masks"][1] == facts["masks"][0]:
        pytest.skip("this OpenMP run time does not bind the thread that loads it")
    assert facts["after"] == facts["masks"][1]  # the scope puts back what it found
    (warning,) = [message for level, message in facts["said"] if level == "WARNING"]
    assert warning.startswith(f"OMP_PROC_BIND=true has bound this thread to 1 of {facts['masks'][0]} CPUs")


INTER_OP_WORK = """
import torch
unit = torch.jit.CompilationUnit('''
def one(x):
    return x + 1

def work(x):
    future = torch.jit.fork(one, x)
    return torch.jit.wait(future)
''')
unit.work(torch.ones(2))
"""


@needs_two_cpus
def test_a_process_that_only_loads_is_set_up_once_and_a_second_call_is_no_error() -> None:
    facts = run_python(
        """
import torch
facts["before"] = torch.get_num_interop_threads()
lm.set_process_threads(lm.share(threads=2), inter_op=True)
facts["first"] = [counts(), torch.get_num_interop_threads()]
facts["said first"] = list(said)
lm.set_process_threads(1, inter_op=True)
facts["second"] = [counts(), torch.get_num_interop_threads()]
lm.set_process_threads(1)
lm.set_process_threads(2, inter_op=True)
facts["same again"] = [counts(), torch.get_num_interop_threads()]
with lm.load_threads(1):
    facts["scope"] = counts()
facts["after"] = counts()
""",
        OMP_NUM_THREADS="1",
    )
    assert facts["first"] == [[2, 2], 2]
    assert facts["second"] == [[1, 1], 2]
    assert facts["same again"] == [[2, 2], 2]
    assert (facts["scope"], facts["after"]) == ([1, 1], [2, 2])
    assert facts["said first"][0][1].startswith("torch intra-op threads: 1 -> 2 (")
    assert facts["said first"][0][1].endswith("), for this process")
    assert facts["said first"][1:] == [["INFO", f"torch inter-op threads: {facts['before']} -> 2, for this process"]]
    notes = [row for row in facts["said"] if "inter-op threads: left at" in row[1]]
    reason = "since torch lets them be set once, before they are used"
    assert notes == [
        ["INFO", f"torch inter-op threads: left at 2 instead of 1, {reason}"],
        ["INFO", f"torch inter-op threads: left at 2, {reason}"],
    ]


def test_inter_op_threads_that_cannot_be_set_any_more_are_left_with_a_note() -> None:
    """torch has used them before."""
    facts = run_python(
        f"{INTER_OP_WORK}\nfacts['before'] = torch.get_num_interop_threads()\n"
        "lm.set_process_threads(7, inter_op=True)\nfacts['now'] = torch.get_num_interop_threads()"
    )
    assert facts["now"] == facts["before"]
    levels, lines = zip(*facts["said"], strict=True)
    assert set(levels) == {"INFO"}
    assert [line for line in lines if "inter-op" in line] == [
        f"torch inter-op threads: left at {facts['now']} instead of 7, since torch lets them be set once, before they "
        "are used"
    ]


def test_inter_op_threads_are_set_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_interop_threads", asked.append)
    set_process_threads(1)
    assert asked == []
    assert counts() == (1, 1)
    set_process_threads(share(threads=1), inter_op=True)
    assert asked == [1]


@needs_two_cpus
@pytest.mark.parametrize(("before", "scope_of", "for_good"), [(2, 2, 1), (1, 2, 1), (3, 1, 2), (2, 1, 2)])
def test_what_is_set_for_good_within_a_scope_stays_after_it(before: int, scope_of: int, for_good: int) -> None:
    torch.set_num_threads(before)
    with lm.load_threads(scope_of):
        set_process_threads(for_good)
        assert counts() == (for_good, min(for_good, scope_of))
    assert counts() == (for_good, for_good)
    with lm.load_threads(1):
        assert counts() == (1, 1)
    assert counts() == (for_good, for_good)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "2"], ids=repr)
def test_a_share_that_is_none_is_an_error_that_names_it(wrong: Any) -> None:
    with pytest.raises(InputError, match="a share or a positive integer is needed") as caught:
        set_process_threads(wrong)
    assert repr(wrong) in str(caught.value)
    assert counts() == (2, 2)
