from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.errors import InputError
from loadmaster.share.settings import Bound, parse_omp_num_threads, ray_assigned_cpus, read_settings


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), (" 4\n", 4), ("+4", 4), ("4,2", 4), ("4, 2 ,1", 4), ("1", 1), ("04", 4)]
)
def test_what_the_openmp_run_time_accepts(text: str, threads: int) -> None:
    assert parse_omp_num_threads(text) == threads
    assert read_settings(None, {"OMP_NUM_THREADS": text}).bounds[0].threads == threads


@pytest.mark.parametrize(
    "text", ["0", "-1", "auto", "1.5", "", " ", "4,", ",4", "4,0", "4;2", "4 2", "0x4", "٤", "9" * 5000]
)
def test_what_the_openmp_run_time_ignores_is_named(text: str) -> None:
    settings = read_settings(None, {"OMP_NUM_THREADS": text})
    assert settings.bounds == ()
    (problem,) = settings.problems
    assert problem.startswith(f"OMP_NUM_THREADS={text[:40]!r} is no number of threads")
    assert "one thread per CPU" in problem


@given(st.text(max_size=12))
def test_any_text_is_a_number_of_threads_or_none(text: str) -> None:
    threads = parse_omp_num_threads(text)
    assert threads is None or threads >= 1


@pytest.mark.parametrize(
    ("marker", "setter"),
    [("TORCHELASTIC_RUN_ID", "torchrun"), ("RAY_JOB_ID", "Ray"), ("RAY_RAYLET_PID", "Ray")],
)
def test_a_one_that_a_launcher_set_does_not_bind(marker: str, setter: str) -> None:
    settings = read_settings(None, {"OMP_NUM_THREADS": "1", marker: "x"})
    assert settings.bounds == ()
    assert settings.raised == f"OMP_NUM_THREADS=1 is {setter}'s default"


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"OMP_NUM_THREADS": "3", "RAY_JOB_ID": "1"},
    ],
)
def test_a_number_of_the_user_binds(environ: dict[str, str]) -> None:
    text = environ["OMP_NUM_THREADS"]
    assert read_settings(None, environ).bounds == (Bound(int(text), f"OMP_NUM_THREADS={text}"),)


def test_the_argument_comes_before_the_variable_and_both_before_openmp() -> None:
    environ = {"LOADMASTER_THREADS": "3", "OMP_NUM_THREADS": "2"}
    assert read_settings(5, environ).explicit == Bound(5, "--threads")
    assert read_settings(None, environ).explicit == Bound(3, "LOADMASTER_THREADS")
    assert read_settings(None, environ).bounds == ()


@pytest.mark.parametrize("value", ["0", "-1", "auto", "1.5", "2 threads"])
def test_an_unusable_variable_of_ours_raises(value: str) -> None:
    with pytest.raises(InputError, match=f"LOADMASTER_THREADS must be a whole number of at least 1, not '{value}'"):
        read_settings(None, {"LOADMASTER_THREADS": value})


@pytest.mark.parametrize("value", ["", " ", "\t\n"])
def test_a_blank_variable_of_ours_is_as_good_as_unset(value: str) -> None:
    assert read_settings(None, {"LOADMASTER_THREADS": value}) == read_settings(None, {})
    environ = {"LOADMASTER_THREADS": value, "OMP_NUM_THREADS": "2"}
    assert read_settings(None, environ).bounds == (Bound(2, "OMP_NUM_THREADS=2"),)


@pytest.mark.parametrize("value", [0, -1])
def test_an_unusable_argument_raises(value: int) -> None:
    with pytest.raises(InputError, match=f"--threads must be a whole number of at least 1, not '{value}'"):
        read_settings(value, {})


@pytest.mark.parametrize(("assigned", "bound"), [(4.0, 4), (2.5, 2), (0.5, 1)])
def test_cpus_that_ray_assigned_are_an_upper_bound(assigned: float, bound: int) -> None:
    (found,) = read_settings(None, {}, assigned).bounds
    assert found == Bound(bound, f"Ray assigned {assigned:g} CPUs")


def ray_with(answer: Any) -> SimpleNamespace:
    return SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_assigned_resources=answer))


def fail() -> None:
    raise AssertionError("only in a worker")


@pytest.mark.parametrize(
    ("ray", "cpus"),
    [
        (ray_with(lambda: {"CPU": 4.0, "GPU": 1.0}), 4.0),
        (ray_with(lambda: {"GPU": 1.0}), None),
        (ray_with(lambda: {"CPU": 0.0}), None),
        (ray_with(fail), None),
        (SimpleNamespace(), None),
    ],
)
def test_ray_is_asked_for_the_cpus_it_assigned(ray: SimpleNamespace, cpus: float | None) -> None:
    assert ray_assigned_cpus({"ray": ray}) == cpus


def test_ray_is_not_imported_to_be_asked() -> None:
    assert ray_assigned_cpus({}) is None
