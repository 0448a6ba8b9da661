from __future__ import annotations

import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_environments import ENVIRONMENTS
from made_hosts import make_host, smt_host

from loadmaster.errors import InputError
from loadmaster.share import Share, exports_for, plan_shares, share

SIX_CORES = smt_host(6)
OVERSUBSCRIBED = "the host is oversubscribed by processes, which no thread count can mend"


@pytest.mark.parametrize(
    ("host", "ranks", "threads", "why"),
    [
        (SIX_CORES, 1, 6, "6 cores / 1 rank"),
        (SIX_CORES, 2, 3, "6 cores / 2 ranks"),
        (SIX_CORES, 4, 1, "6 cores / 4 ranks"),
        (smt_host(32), 2, 16, "32 cores / 2 ranks"),
        (smt_host(112), 1, 16, "112 cores / 1 rank, at most 16 per process"),
        (smt_host(112), 4, 16, "112 cores / 4 ranks, at most 16 per process"),
        (smt_host(8, quota=4.0), 2, 2, "quota 4.0 / 2 ranks"),
        (smt_host(8, quota=7.65), 1, 7, "quota 7.65 / 1 rank"),
        (smt_host(8, quota=0.5), 1, 1, "quota 0.5 / 1 rank"),
        (smt_host(1), 1, 1, "1 core / 1 rank"),
        (
            smt_host(2),
            3,
            1,
            f"2 cores / 3 ranks: {OVERSUBSCRIBED}",
        ),
        (
            smt_host(8, quota=2.0),
            4,
            1,
            f"quota 2.0 / 4 ranks: {OVERSUBSCRIBED}",
        ),
    ],
)
def test_threads_and_their_reason(host: object, ranks: int, threads: int, why: str) -> None:
    shares = plan_shares(host, ranks, environ={})  # type: ignore[arg-type]
    assert [found.threads for found in shares] == [threads] * ranks
    assert {found.why for found in shares} == {why}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_the_same_ranks_get_the_same_share_under_every_launcher(launcher: str) -> None:
    host = smt_host(16)
    found = share(host=host, environ=ENVIRONMENTS[launcher])
    assert found == plan_shares(host, 4, environ={})[1]
    assert found == share(4, host=host, environ={"LOCAL_RANK": "1", "LOADMASTER_LOCAL_RANK": "1"})


def test_an_argument_comes_above_all() -> None:
    environ = ENVIRONMENTS["torchrun"] | {"LOADMASTER_LOCAL_SIZE": "3"}
    found = share(2, host=SIX_CORES, environ=environ)
    assert (found.workers, found.threads, found.rank) == (2, 3, 1)


def test_a_process_without_a_rank_keeps_all_cpus() -> None:
    found = share(host=SIX_CORES, environ={"LOCAL_WORLD_SIZE": "2"})
    assert (found.threads, found.rank, found.cpus) == (3, None, SIX_CORES.cpus)


def test_a_global_size_divides_nothing() -> None:
    found = share(host=SIX_CORES, environ={"WORLD_SIZE": "16", "RANK": "7"})
    assert (found.threads, found.workers, found.rank) == (6, 1, None)
    assert found.why == "6 cores / 1 rank, local rank count unknown (only WORLD_SIZE=16 is set)"


def test_a_process_alone_is_rank_zero() -> None:
    assert share(host=SIX_CORES, environ={}) == Share(6, SIX_CORES.cpus, 1, "6 cores / 1 rank", 0, None)


# What the user set


@pytest.mark.parametrize(
    ("environ", "threads", "why"),
    [
        ({"OMP_NUM_THREADS": "2"}, 2, "6 cores / 2 ranks, OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "4,2"}, 3, "6 cores / 2 ranks"),
        ({"OMP_NUM_THREADS": "1"}, 1, "6 cores / 2 ranks, OMP_NUM_THREADS=1"),
        (
            {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"},
            3,
            "6 cores / 2 ranks, OMP_NUM_THREADS=1 is torchrun's default",
        ),
        ({"LOADMASTER_THREADS": "5"}, 5, "LOADMASTER_THREADS 5 (6 cores / 2 ranks gives 3)"),
        ({"LOADMASTER_THREADS": "1"}, 1, "LOADMASTER_THREADS 1 (6 cores / 2 ranks gives 3)"),
        (
            {"LOADMASTER_THREADS": "99"},
            12,
            "LOADMASTER_THREADS 99, but only 12 CPUs are usable (6 cores / 2 ranks gives 3)",
        ),
    ],
)
def test_what_the_user_set_wins_and_is_named(environ: dict[str, str], threads: int, why: str) -> None:
    for found in (plan_shares(SIX_CORES, 2, environ=environ)[0], share(2, host=SIX_CORES, environ=environ)):
        assert found.threads == threads
        assert found.why == why


def test_an_explicit_number_may_pass_the_ceiling() -> None:
    found = plan_shares(smt_host(112), 1, 64, environ={"OMP_NUM_THREADS": "2"})[0]
    assert found.threads == 64
    assert found.why == "--threads 64 (112 cores / 1 rank gives 112)"


def test_the_lowest_bound_is_the_reason() -> None:
    found = plan_shares(smt_host(112), 1, environ={"OMP_NUM_THREADS": "20"})[0]
    assert (found.threads, found.why) == (16, "112 cores / 1 rank, at most 16 per process")
    found = plan_shares(smt_host(112), 1, environ={"OMP_NUM_THREADS": "4"})[0]
    assert (found.threads, found.why) == (4, "112 cores / 1 rank, OMP_NUM_THREADS=4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, not '0'"),
        ({"workers": -3}, "workers must be a whole number of at least 1, not '-3'"),
        ({"workers": 10**6}, "workers must be at most 65536, not 1000000"),
        ({"threads": 0}, "--threads must be a whole number of at least 1, not '0'"),
        (
            {"environ": {"LOADMASTER_THREADS": "many"}},
            "LOADMASTER_THREADS must be a whole number of at least 1, not 'many'",
        ),
        (
            {"environ": {"LOADMASTER_LOCAL_SIZE": "no"}},
            "LOADMASTER_LOCAL_SIZE must be a whole number of at least 1, not 'no'",
        ),
    ],
)
def test_bad_input_names_itself(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        share(**({"host": SIX_CORES, "environ": {}} | arguments))  # type: ignore[arg-type]
    assert str(error.value) == message


def test_a_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        share(host=SIX_CORES, environ={"OMP_NUM_THREADS": "auto", "LOCAL_WORLD_SIZE": "x"})
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert {record.name.split(".")[0] for record in caplog.records} == {"loadmaster"}


# Slurm


def slurm(tasks: str, task_cpus: str) -> dict[str, str]:
    return {
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1",
        "SLURM_CPUS_PER_TASK": task_cpus,
    }


def test_a_mask_that_slurm_narrowed_is_not_divided_again() -> None:
    narrowed = smt_host(4, of_cores=32)  # 8 of 64 CPUs
    found = share(host=narrowed, environ=slurm("8", "8"))
    assert (found.threads, found.cpus, found.workers, found.rank) == (4, narrowed.cpus, 8, 1)
    assert found.why == "4 cores / 1 task, as Slurm narrowed it (SLURM_CPUS_PER_TASK=8)"
    assert plan_shares(narrowed, None, environ=slurm("8", "8")) == (found,)


def test_whole_cores_for_half_a_core_asked_are_not_divided_again() -> None:
    assert share(host=smt_host(2, of_cores=32), environ=slurm("16", "3")).threads == 2


def test_a_mask_that_slurm_left_alone_is_divided_and_bounded() -> None:
    found = share(host=smt_host(32), environ=slurm("4", "16"))
    assert (found.threads, found.why) == (8, "32 cores / 4 ranks")
    found = share(host=smt_host(32), environ=slurm("4", "6"))
    assert (found.threads, found.why) == (6, "32 cores / 4 ranks, SLURM_CPUS_PER_TASK=6")


def test_a_mask_for_all_tasks_of_the_job_is_divided() -> None:
    job = smt_host(16, of_cores=32)  # the job has half of the host, its 4 tasks are not bound
    assert share(host=job, environ=slurm("4", "8")).threads == 4


def test_a_mask_for_all_tasks_on_cores_of_four_threads_is_divided() -> None:
    job = make_host([range(4 * core, 4 * core + 4) for core in range(4)], online=range(64))
    assert share(host=job, environ=slurm("4", "4")).threads == 1


def test_a_mask_of_the_whole_host_is_divided() -> None:
    overcommitted = make_host([(cpu,) for cpu in range(4)])
    assert share(host=overcommitted, environ=slurm("2", "4")).threads == 2


def test_ranks_that_torchrun_starts_in_one_task_divide_its_cpus() -> None:
    environ = slurm("1", "16") | ENVIRONMENTS["torchrun"] | {"SLURM_LOCALID": "0"}
    assert share(host=smt_host(8, of_cores=64), environ=environ).threads == 2


@pytest.mark.parametrize("text", ["", "x", "0", "9" * 5000])
def test_unusable_cpus_per_task_are_passed_over(text: str) -> None:
    assert share(host=smt_host(32), environ=slurm("4", text)).threads == 8


def test_a_rank_bound_to_one_core_is_not_said_to_oversubscribe() -> None:
    found = share(host=make_host([(3,)], online=range(8)), environ=ENVIRONMENTS["Open MPI"])
    assert found.threads == 1
    assert found.why == "1 core / 4 ranks: the affinity of this process leaves fewer cores than there are ranks"


# Pools, and what a shell needs


@pytest.mark.parametrize(
    ("num_cores", "ranks", "pool", "threads", "why"),
    [
        (24, 2, 3, 4, "24 cores / 2 ranks / 3 pool workers"),
        (64, 2, 4, 4, "64 cores / 2 ranks / 4 pool workers, at most 16 per process"),
        (64, 1, 20, 1, "64 cores / 1 rank / 20 pool workers, at most 16 per process"),
        (
            6,
            2,
            4,
            1,
            f"6 cores / 2 ranks / 4 pool workers: {OVERSUBSCRIBED}",
        ),
    ],
)
def test_a_pool_divides_the_share_of_each_rank(num_cores: int, ranks: int, pool: int, threads: int, why: str) -> None:
    shares = plan_shares(smt_host(num_cores), ranks, pool=pool, environ={})
    assert len(shares) == ranks
    assert {(found.threads, found.why) for found in shares} == {(threads, why)}


@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        ("", {}),
        ("torchrun", {}),
        ("Open MPI", {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}),
        ("MPICH or Intel MPI", {"I_MPI_PIN_DOMAIN": "omp"}),
        ("PALS", {"PALS_DEPTH": "4", "PALS_CPU_BIND": "depth"}),
        ("MVAPICH", {"MV2_ENABLE_AFFINITY": "0"}),
    ],
)
def test_exports_for_a_shell(launcher: str, more: dict[str, str]) -> None:
    environ = ENVIRONMENTS.get(launcher, {})
    found = plan_shares(smt_host(16), 4, environ=environ)[0]
    assert exports_for(found, environ) == {"OMP_NUM_THREADS": "4", "LOADMASTER_LOCAL_SIZE": "4"} | more


@given(st.integers(1, 40), st.integers(1, 50), st.none() | st.floats(0.1, 64))
def test_threads_never_oversubscribe_unless_there_are_more_ranks_than_cpus(
    num_cores: int, ranks: int, quota: float | None
) -> None:
    host = smt_host(num_cores, quota=quota)
    shares = plan_shares(host, ranks, environ={})
    assert all(1 <= found.threads <= 16 for found in shares)
    assert sum(found.threads for found in shares) <= max(host.compute_cpus, ranks)
    assert all(found.threads * 2 <= len(found.cpus) for found in shares)


def test_a_share_travels_to_other_processes() -> None:
    found = plan_shares(SIX_CORES, 2, environ={})[1]
    assert pickle.loads(pickle.dumps(found)) == found
