from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_environments import ENVIRONMENTS

from loadmaster.errors import InputError
from loadmaster.share import launcher
from loadmaster.share.launcher import LAUNCHERS, Declared, Launcher, expand_slurm_tasks, read_declared


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_launcher_is_understood(name: str) -> None:
    assert read_declared(ENVIRONMENTS[name]) == Declared(4, 1, name)


def test_each_row_of_the_table_is_tested() -> None:
    assert {row.name for row in LAUNCHERS} | {"loadmaster"} == set(ENVIRONMENTS)


def test_nothing_is_declared_in_a_plain_shell() -> None:
    assert read_declared({"PATH": "/bin", "RANK": "0"}) == Declared()


@pytest.mark.parametrize(
    ("environ", "only_global"),
    [
        ({"WORLD_SIZE": "16", "RANK": "3"}, "WORLD_SIZE=16"),
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "1"}, "SLURM_NTASKS=64"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "many"}, ""),
    ],
)
def test_a_global_size_is_no_local_size(environ: dict[str, str], only_global: str) -> None:
    declared = read_declared(environ)
    assert declared.workers is None
    assert declared.only_global == only_global


def test_a_global_size_of_one_leaves_no_question() -> None:
    assert read_declared({"WORLD_SIZE": "1"}) == Declared(1, 0)


@pytest.mark.parametrize("variable", [row.size_variable for row in LAUNCHERS])
@pytest.mark.parametrize("value", ["", "0", "-1", "two", "1.5", "99999999", "9" * 5000])
def test_an_unusable_size_is_named_and_not_counted(variable: str, value: str) -> None:
    declared = read_declared({variable: value, "CROSS_SIZE": "1"})
    assert declared.workers is None
    (problem,) = declared.problems
    assert problem.startswith(f"{variable}={value[:40]!r}")


@pytest.mark.parametrize("rank", ["4", "-1", "", "one", "9" * 5000])
def test_an_unusable_rank_is_unknown(rank: str) -> None:
    declared = read_declared({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": rank})
    assert (declared.workers, declared.rank) == (4, None)
    assert len(declared.problems) == (rank == "4")


def test_the_larger_of_two_sizes_counts_with_a_warning() -> None:
    declared = read_declared(ENVIRONMENTS["torchrun"] | {"MPI_LOCALNRANKS": "8", "MPI_LOCALRANKID": "6"})
    assert (declared.workers, declared.rank, declared.launcher) == (8, 6, "MPICH or Intel MPI")
    (problem,) = declared.problems
    assert "torchrun says 4" in problem
    assert "MPICH or Intel MPI says 8" in problem


def test_two_launchers_that_agree_are_no_problem() -> None:
    declared = read_declared(ENVIRONMENTS["torchrun"] | ENVIRONMENTS["Slurm"])
    assert declared == Declared(4, 1, "torchrun")


def test_one_task_that_starts_many_ranks_is_no_problem() -> None:
    srun = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert read_declared(ENVIRONMENTS["torchrun"] | srun) == Declared(4, 1, "torchrun")


def test_our_variables_come_first() -> None:
    environ = ENVIRONMENTS["torchrun"] | {"MPI_LOCALNRANKS": "16", "LOADMASTER_LOCAL_SIZE": "2"}
    assert read_declared(environ) == Declared(2, 1, "loadmaster")
    assert read_declared(environ | {"LOADMASTER_LOCAL_RANK": "0"}).rank == 0


def test_our_rank_may_go_with_a_launchers_size() -> None:
    assert read_declared(ENVIRONMENTS["torchrun"] | {"LOADMASTER_LOCAL_RANK": "3"}) == Declared(4, 3, "torchrun")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LOADMASTER_LOCAL_SIZE": "0"}, "LOADMASTER_LOCAL_SIZE must be a whole number of at least 1, not '0'"),
        ({"LOADMASTER_LOCAL_SIZE": ""}, "LOADMASTER_LOCAL_SIZE must be a whole number of at least 1, not ''"),
        ({"LOADMASTER_LOCAL_SIZE": "70000"}, "LOADMASTER_LOCAL_SIZE must be at most 65536, not 70000"),
        ({"LOADMASTER_LOCAL_RANK": "x"}, "LOADMASTER_LOCAL_RANK must be a whole number from 0, not 'x'"),
        (
            {"LOADMASTER_LOCAL_RANK": "2", "LOADMASTER_LOCAL_SIZE": "2"},
            "LOADMASTER_LOCAL_RANK must be a whole number from 0 below 2, the ranks on this host, not '2'",
        ),
    ],
)
def test_our_variables_raise_when_unusable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_declared(environ)
    assert str(error.value) == message


def slurm_tasks(text: str, node: str | None) -> int | None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": text} | ({} if node is None else {"SLURM_NODEID": node})
    return read_declared(environ).workers


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [
        ("4(x2),3", "0", 4),
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("4(x2),3", "3", 4),
        ("4(x2),3", None, 4),
        ("2,8", None, 8),
        ("2,8", "x", 8),
        ("2,8", "0", 2),
        ("5", "0", 5),
        ("1(x999999)", "999998", 1),
        ("4(x0),3", "0", 3),
    ],
)
def test_slurm_tasks_of_a_node(text: str, node: str | None, tasks: int) -> None:
    assert slurm_tasks(text, node) == tasks


@pytest.mark.parametrize("text", ["4(x2", "4x2", ",", "4,,3", "(x2)", "4(x-1)", "four"])
def test_slurm_lists_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not in the form 4\(x2\),3"):
        expand_slurm_tasks(text)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=6), st.integers(0, 29))
def test_slurm_lists_expand_to_one_number_a_node(runs: list[tuple[int, int]], node: int) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    per_node = [tasks for tasks, nodes in runs for _ in range(nodes)]
    assert slurm_tasks(text, str(node)) == (per_node[node] if node < len(per_node) else max(per_node))


@pytest.mark.parametrize(("size", "nodes", "ranks"), [("8", "2", 4), ("7", "2", 4), ("3", "1", 3), ("3", None, 3)])
def test_flux_ranks_are_spread_over_its_nodes(size: str, nodes: str | None, ranks: int) -> None:
    environ = {"FLUX_JOB_SIZE": size} | ({} if nodes is None else {"FLUX_JOB_NNODES": nodes})
    assert read_declared(environ).workers == ranks


def test_a_common_name_needs_its_marker() -> None:
    assert read_declared({"LOCAL_SIZE": "8"}) == Declared()


def test_the_table_is_open_to_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LAUNCHERS", (Launcher("new", "NEW_SIZE", "NEW_RANK"),))
    assert read_declared({"NEW_SIZE": "3", "NEW_RANK": "2"}) == Declared(3, 2, "new")
