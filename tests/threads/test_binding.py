"""What is said where the affinity mask and the team do not fit."""

from __future__ import annotations

import pytest

from loadmaster.host import Host
from loadmaster.threads.binding import binding_problem
from share.made_hosts import make_host, smt_host

BOUND_TO_ONE = make_host([[0]], online=range(8))
WHOLE = make_host([[0], [1], [2], [3]])


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_a_bound_thread_is_said_with_the_variable_that_bound_it(variable: str) -> None:
    sentence = binding_problem(BOUND_TO_ONE, 1, {variable: " true "})
    assert sentence == (
        f"{variable}=true has bound this thread to 1 of 8 CPUs, probably when torch was imported, and processes "
        "started from here inherit that: take os.sched_getaffinity(0) before the import and set it again after, or "
        "unset the variable"
    )


def test_one_place_can_be_a_whole_core() -> None:
    """With ``OMP_PLACES=cores``."""
    host = smt_host(1, of_cores=4)
    assert binding_problem(host, 1, {"OMP_PROC_BIND": "close"}).startswith("OMP_PROC_BIND=close has bound this thread")
    assert "2 of 8 CPUs" in binding_problem(host, 1, {"OMP_PROC_BIND": "close"})


@pytest.mark.parametrize(
    ("host", "threads", "environ"),
    [
        pytest.param(WHOLE, 4, {"OMP_PROC_BIND": "true"}, id="bound, and the mask is whole"),
        pytest.param(BOUND_TO_ONE, 1, {}, id="pinned by the user"),
        pytest.param(BOUND_TO_ONE, 1, {"OMP_PROC_BIND": "false"}, id="binding is off"),
        pytest.param(BOUND_TO_ONE, 1, {"OMP_PROC_BIND": " FALSE "}, id="binding is off, in capitals"),
        pytest.param(BOUND_TO_ONE, 1, {"KMP_AFFINITY": "none"}, id="binding is off for the Intel run time"),
        pytest.param(BOUND_TO_ONE, 1, {"KMP_AFFINITY": "disabled"}, id="no affinity in the Intel run time"),
        pytest.param(BOUND_TO_ONE, 1, {"GOMP_CPU_AFFINITY": ""}, id="blank"),
        pytest.param(make_host([[0]]), 1, {"OMP_PROC_BIND": "true"}, id="a host of one CPU"),
        pytest.param(make_host([[0], [1]], online=range(8)), 2, {"OMP_PROC_BIND": "true"}, id="narrow and fitting"),
        pytest.param(WHOLE, 1, {}, id="a team that is smaller than the mask"),
    ],
)
def test_nothing_is_said_where_mask_and_team_fit(host: Host, threads: int, environ: dict[str, str]) -> None:
    assert binding_problem(host, threads, environ) == ""


@pytest.mark.parametrize(
    ("host", "threads", "words"),
    [
        (BOUND_TO_ONE, 2, "a team of 2 threads has to run on 1 CPU: the affinity mask is narrower"),
        (make_host([[0], [1]], online=range(8)), 4, "a team of 4 threads has to run on 2 CPUs: the affinity mask is"),
    ],
)
def test_a_team_that_is_larger_than_the_mask_is_said(host: Host, threads: int, words: str) -> None:
    assert binding_problem(host, threads, {}).startswith(words)
