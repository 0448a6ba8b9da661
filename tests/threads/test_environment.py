"""What the environment of a rank says before the rank starts."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadmaster.share import share
from loadmaster.share.settings import read_settings
from loadmaster.threads import environment, openmp
from loadmaster.threads.environment import openmp_of_torch, rank_environment, wait_policy


def test_a_rank_is_told_its_threads_its_number_and_how_many_there_are() -> None:
    given = {"HOME": "/home/user", "OMP_NUM_THREADS": "12", "LOADMASTER_LOCAL_RANK": "7"}
    before = dict(given)
    assert rank_environment(3, 1, 4, given) == {
        "HOME": "/home/user",
        "OMP_NUM_THREADS": "3",
        "LOADMASTER_OMP_NUM_THREADS": "12",
        "LOADMASTER_LOCAL_RANK": "1",
        "LOADMASTER_LOCAL_SIZE": "4",
    }
    assert given == before


def test_the_environment_of_this_process_is_the_default_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")
    before = dict(os.environ)
    inside = rank_environment(2, 0, 1)
    assert os.environ == before
    assert inside == {
        **before,
        "OMP_NUM_THREADS": "2",
        "LOADMASTER_OMP_NUM_THREADS": before.get("OMP_NUM_THREADS", ""),
        "LOADMASTER_LOCAL_RANK": "0",
        "LOADMASTER_LOCAL_SIZE": "1",
    }


@pytest.mark.parametrize(("of_user", "bound"), [({}, 4), ({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": ""}, 4)])
def test_what_the_user_set_is_a_bound_in_a_rank_and_what_we_set_is_none(of_user: dict[str, str], bound: int) -> None:
    """Also in a process that the rank starts in the same way."""
    environ = rank_environment(1, 0, 2, of_user)
    for inside in (environ, rank_environment(1, 1, 2, environ)):
        settings = read_settings(None, inside)
        assert min([4, *(row.threads for row in settings.bounds)]) == bound
        assert settings.problems == ()


def test_a_rank_reads_its_place_among_the_ranks_from_it() -> None:
    part = share(environ=rank_environment(1, 2, 3, {}))
    assert (part.rank, part.workers, part.threads) == (2, 3, 1)


GOMP, KMP = {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "0"}


@pytest.mark.parametrize(
    ("run_time", "shortened"), [("libgomp", GOMP), ("libomp", KMP), ("libiomp", KMP), ("", {}), ("libother", {})]
)
def test_the_knob_is_the_one_of_the_run_time_that_is_there(run_time: str, shortened: dict[str, str]) -> None:
    assert wait_policy({}, run_time) == shortened


@pytest.mark.parametrize("run_time", ["libgomp", "libomp", "libiomp"])
@pytest.mark.parametrize(
    "of_user",
    [
        {"OMP_WAIT_POLICY": "ACTIVE"},
        {"OMP_WAIT_POLICY": ""},
        {"GOMP_SPINCOUNT": "5"},
        {"KMP_BLOCKTIME": "200"},
        {"KMP_LIBRARY": "turnaround"},
    ],
    ids=str,
)
def test_what_the_user_set_for_waiting_stays(
    run_time: str, of_user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wait_policy(of_user, run_time) == {}
    monkeypatch.setattr(environment, "openmp_of_torch", lambda: run_time)
    inside = rank_environment(1, 0, 8, of_user, cores=2)
    assert {name: inside[name] for name in of_user} == of_user
    ours = {"OMP_NUM_THREADS", "LOADMASTER_OMP_NUM_THREADS", "LOADMASTER_LOCAL_RANK", "LOADMASTER_LOCAL_SIZE"}
    assert set(inside) == {*of_user, *ours}


@pytest.mark.parametrize("run_time", ["libgomp", "libomp", "libiomp", ""])
@pytest.mark.parametrize(
    ("ranks", "cores", "crowded"), [(1, 2, False), (2, 2, False), (3, 2, True), (64, 2, True), (64, None, False)]
)
def test_waiting_is_changed_only_where_processes_outnumber_cores_and_never_to_active(
    run_time: str, ranks: int, cores: int | None, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "openmp_of_torch", lambda: run_time)
    inside = rank_environment(1, 0, ranks, {}, cores=cores)
    knobs = {name: value for name, value in inside.items() if name.startswith(("GOMP_", "KMP_", "OMP_WAIT"))}
    assert knobs == (wait_policy({}, run_time) if crowded else {})
    assert "ACTIVE" not in inside.values()


def test_the_run_time_of_an_imported_torch_is_the_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, name in [
        (["/lib/libgomp.so.1"], "libgomp"),
        (["/lib/libgomp-a34b3233.so.1"], "libgomp"),
        (["/lib/libiomp5.so"], "libiomp"),
        (["/lib/libomp.so.5"], "libomp"),
        (["/lib/libgomp.so.1", "/other/libgomp-1.so"], "libgomp"),
        (["/lib/libgomp.so.1", "/lib/libiomp5.so"], ""),
        (["/lib/libother.so"], ""),
        ([], ""),
    ]:
        rows = tuple(SimpleNamespace(filepath=path) for path in files)
        monkeypatch.setattr(openmp, "run_times", lambda rows=rows: openmp.RunTimes(rows, ()))
        assert openmp_of_torch() == name


def test_the_run_time_of_a_torch_that_is_not_imported_is_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [os.fspath(tmp_path)])
    importlib.invalidate_caches()
    assert openmp_of_torch() == ""
    (tmp_path / "torch.libs").mkdir()
    (tmp_path / "torch.libs" / "libgomp-a34b3233.so.1").touch()
    assert openmp_of_torch() == "libgomp"
    (package / "lib" / "libiomp5.so").touch()
    assert openmp_of_torch() == ""  # which of the two is used cannot be told
    assert "torch" not in sys.modules


def test_without_torch_no_run_time_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [os.fspath(tmp_path)])
    importlib.invalidate_caches()
    assert openmp_of_torch() == ""


def test_a_torch_says_the_same_before_and_after_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has it loaded; what lies beside it is looked at as if it had not."""
    loaded = openmp_of_torch()
    monkeypatch.delitem(sys.modules, "torch")
    assert openmp_of_torch() in (loaded, "")
