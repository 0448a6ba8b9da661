"""A process that was forked from one with torch: a large operation would hang there, so the scope forces one thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.threads import forks, scope, setup
from loadmaster.threads.forks import forked_with_torch, library_address
from threads.conftest import counts, needs_two_cpus, run_python

CHILD = """
import signal, time

def in_child(function, seconds=20):
    # What a forked child's function returns; None where it hangs or fails. It is ended after ``seconds``.
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            said.clear()
            text = json.dumps([function(), said]).encode()
            os.write(theirs, text)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None

def large_operation():
    import torch
    return float(torch.ones(1 << 20).add_(1).sum())

def in_a_scope():
    with lm.load_threads(2) as share:
        inside = counts()
        total = large_operation()
    return [share.threads, inside, total, "spawn" in share.why]
"""

FORKED = [1, [1, 1], float(2 << 20), True]


@needs_two_cpus
@pytest.mark.processes
def test_a_fork_of_a_process_that_used_torch_runs_with_one_thread_and_does_not_hang() -> None:
    facts = run_python(
        CHILD
        + """
import multiprocessing

def without_torch():
    import torch
    return in_a_scope()

facts["forked before torch"] = in_child(without_torch)
facts["parent"] = in_a_scope()
facts["forked"] = in_child(in_a_scope)
facts["for good"] = in_child(lambda: [lm.set_process_threads(2), counts(), large_operation()])
facts["paced"] = in_child(lambda: [counts() for _ in lm.paced([1, 2])])

def in_pool():
    with lm.load_pool(8, 2) as pool:
        return [pool._max_workers, pool.submit(counts).result(), pool.submit(large_operation).result()]

facts["pool"] = in_child(in_pool)
facts["only a raise"] = in_child(lambda: [lm.load_threads(2, only="raise").__enter__().threads, counts()])
facts["grandchild"] = in_child(lambda: in_child(in_a_scope))

queue = multiprocessing.get_context("fork").SimpleQueue()
worker = multiprocessing.get_context("fork").Process(target=lambda: queue.put(in_a_scope()))
worker.start()
worker.join(20)
facts["multiprocessing"] = None if worker.exitcode is None else queue.get()
facts["parent after"] = [in_a_scope()[:3], counts()]
""",
        OMP_NUM_THREADS="2",
    )
    assert facts["parent"] == [2, [2, 2], float(2 << 20), False]
    result, said = facts["forked before torch"]
    assert result == [2, [2, 2], float(2 << 20), False]
    assert [row for row in said if row[0] == "WARNING"] == []
    result, said = facts["forked"]
    assert result == FORKED
    assert [row for row in said if row[0] == "WARNING"] == [["WARNING", scope.FORKED]]
    assert "spawn" in scope.FORKED
    assert facts["multiprocessing"] == FORKED
    assert facts["for good"][0] == [None, [1, 1], float(2 << 20)]
    assert facts["paced"][0] == [[1, 1], [1, 1]]
    assert facts["pool"][0] == [1, [1, 1], float(2 << 20)]
    assert facts["only a raise"][0] == [1, [1, 1]]
    assert facts["grandchild"][0][0] == FORKED
    assert facts["parent after"] == [[2, [2, 2], float(2 << 20)], [2, 2]]


@needs_two_cpus
@pytest.mark.processes
def test_a_fork_while_a_scope_is_open_waits_for_nobody() -> None:
    """A scope of another thread, a lock that another thread holds, and the scope that the child was forked in."""
    facts = run_python(
        CHILD
        + """
import torch
from loadmaster.threads.process import process_counts
torch.set_num_threads(2)
large_operation()
opened, held, done = threading.Event(), threading.Event(), threading.Event()

def other():
    with lm.load_threads(1):
        opened.set()
        held.wait()
        with process_counts().lock:
            opened.set()
            done.wait()

thread = threading.Thread(target=other)
thread.start()
opened.wait()
facts["scope of another thread"] = in_child(in_a_scope)
scope = lm.load_threads(1)
scope.__enter__()
opened.clear()
held.set()
opened.wait()
facts["lock of another thread"] = in_child(in_a_scope)
facts["its own scope"] = in_child(lambda: [scope.__exit__(None, None, None), torch.get_num_threads()])
done.set()
thread.join()
scope.__exit__(None, None, None)
facts["after"] = counts()
""",
        OMP_NUM_THREADS="2",
    )
    assert facts["scope of another thread"][0] == FORKED
    assert facts["lock of another thread"][0] == FORKED
    assert facts["its own scope"][0] == [None, 2]
    assert facts["after"] == [2, 2]


@needs_two_cpus
@pytest.mark.processes
def test_a_fork_server_that_has_no_torch_forces_nothing(tmp_path: Path) -> None:
    """Its processes import torch themselves."""
    (tmp_path / "work_of_child.py").write_text(
        "def work(queue):\n"
        "    import loadmaster as lm\n"
        "    with lm.load_threads(2) as share:\n"
        "        import torch\n"
        "        torch.ones(1 << 20).add_(1)\n"
        "        queue.put([share.threads, torch.get_num_threads()])\n"
    )
    facts = run_python(
        """
import multiprocessing
sys.path.insert(0, sys.argv[1])
from work_of_child import work
context = multiprocessing.get_context("forkserver")
queue = context.SimpleQueue()
process = context.Process(target=work, args=(queue,))
process.start()
process.join(60)
facts["child"] = queue.get()
""",
        os.fspath(tmp_path),
        OMP_NUM_THREADS="2",
    )
    assert facts["child"] == [2, 2]


def test_this_process_was_not_forked() -> None:
    assert not forked_with_torch()


@pytest.mark.usefixtures("nothing_said_yet")
def test_what_a_fork_forces_is_put_back_and_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (scope, setup):
        monkeypatch.setattr(module, "forked_with_torch", lambda: True)
    for threads in (1, 2):
        with lm.load_threads(threads) as share:
            assert counts() == (1, 1)
            assert (share.threads, share.why) == (1, scope.FORKED)
        assert counts() == (2, 2)
    assert [row.getMessage() for row in caplog.records if row.levelname == "WARNING"] == [scope.FORKED]


# What is read from /proc


@pytest.mark.parametrize(
    ("stat", "forked"),
    [
        ("7 (python) S 1 7 7 0 -1 4194304 5 0 0", False),
        ("7 (python) S 1 7 7 0 -1 4194368 5 0 0", True),
        ("7 (a) S (b) S 1 7 7 0 -1 64 5 0 0", True),
        ("7 (a) 64 64 64 64 64 64 64) S 1 7 7 0 -1 0 5 0 0", False),
        ("7 (python) S 1", False),
        ("", False),
        ("7 (python) S 1 7 7 0 -1 none 5", False),
    ],
)
def test_the_flag_of_a_fork_without_an_exec(stat: str, forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks.Path, "read_text", lambda path: stat)
    assert forks._forked_without_exec() == forked


@given(name=st.text(max_size=20), flags=st.integers(0, 1 << 31))
def test_no_name_of_a_process_hides_its_flags(name: str, flags: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks.Path, "read_text", lambda path: f"7 ({name}) S 1 7 7 0 -1 {flags} 5 0 0 0 0")
        assert forks._forked_without_exec() == bool(flags & 0x40)


@given(st.text())
def test_any_text_of_the_kernel_is_read_without_an_error(text: str) -> None:
    library_address(text, "libtorch_cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks.Path, "read_text", lambda path: text)
        assert forks._forked_without_exec() in (True, False)


MAPS = """\
00400000-00401000 r-xp 00000000 08:01 5  /usr/bin/python3.11
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f1000000000-7f1000001000 r--p 00000000 08:01 6  /venv/site packages/torch/lib/{}
7f1000001000-7f1000002000 r-xp 00001000 08:01 6  /venv/site packages/torch/lib/{}
7f2000000000-7f2000001000 rw-p 00000000 00:00 0  [heap]
"""


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("libtorch_cpu.so", "7f1000000000"),
        ("libtorch_cpu.so.2", "7f1000000000"),
        ("libtorch.so", None),
        ("notlibtorch_cpu.so", None),
    ],
)
def test_where_a_library_is_mapped_first(name: str, address: str | None) -> None:
    assert library_address(MAPS.format(name, name), "libtorch_cpu") == address
    assert library_address("", "libtorch_cpu") is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 47), st.sampled_from(["", "/lib/libc.so.6", "/x y/libtorch_cpu.so", "libtorch_cpu/a"])
        )
    )
)
def test_the_first_of_many_mappings(rows: list[tuple[int, str]]) -> None:
    maps = "".join(f"{start:08x}-{start + 4096:08x} r-xp 00000000 08:01 6    {path}\n" for start, path in rows)
    expected = next((f"{start:08x}" for start, path in rows if path.endswith("libtorch_cpu.so")), None)
    assert library_address(maps, "libtorch_cpu") == expected


@pytest.mark.parametrize(
    ("own", "of_parent", "same_program", "forked"),
    [
        ("7f10", "7f10", True, True),
        ("7f10", "7f20", True, False),
        ("7f10", None, True, False),
        (None, None, True, True),
        ("7f10", "7f20", False, True),
    ],
)
def test_an_inherited_library_lies_where_the_parent_has_it(
    own: str | None, of_parent: str | None, same_program: bool, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that is gone or cannot be seen is the case that is not safe."""
    monkeypatch.setattr(forks, "_forked_without_exec", lambda: True)
    monkeypatch.setattr(forks, "_library_address", lambda process: own if process == "self" else of_parent)
    monkeypatch.setattr(forks, "_program", lambda process: "python" if process == "self" or same_program else "init")
    assert forks._forked_with_torch.__wrapped__(os.getpid()) == forked


def test_a_process_without_torch_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_forked_with_torch", lambda pid: True)
    assert forked_with_torch()
    monkeypatch.setitem(forks.sys.modules, "torch", None)
    assert not forked_with_torch()
    assert torch.get_num_threads() == 2
