"""Fetchers as Ray actors: started for real where Ray is installed, in a process of their own with a Ray of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.test_monarch import (
    SECONDS,
    check_threads,
    check_versions,
    fetch_threads,
    fetch_versions,
    run_scenario,
    versions,
)
from launch.test_monarch import tell as tell
from loadmaster.errors import MissingDependencyError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.launch import ray as module

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'loadmaster[ray]'"
)


@contextlib.contextmanager
def own_ray(folder: str) -> Iterator[Any]:
    """A Ray with one CPU: fewer than the fetchers, which ask for none."""
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def fetch_with_ray(folder: str, pattern: str) -> dict[str, Any]:
    with own_ray(folder):
        told = fetch_versions(module.spawn_fetchers, pattern)
        told["processes"] += [process.pid for process in psutil.Process().children(recursive=True)]
    return told


def fetch_threads_with_ray(folder: str) -> dict[str, Any]:
    with own_ray(folder) as ray:
        before = ray.available_resources().get("CPU")
        told = fetch_threads(module.spawn_fetchers)
        told["CPUs"] = [before, ray.available_resources().get("CPU")]
        told["processes"] += [process.pid for process in psutil.Process().children(recursive=True)]
    return told


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder of a short name, since Ray puts sockets into it; and what Ray keeps of a user."""
    path = tempfile.mkdtemp(prefix="lm-", dir="/tmp")
    yield path
    shutil.rmtree(path)


@needs_ray
@pytest.mark.processes
def test_fetchers_fetch_versions_and_one_that_dies_is_named(folder: str, tmp_path: Path) -> None:
    told = run_scenario("launch.test_ray.fetch_with_ray", folder, versions(tmp_path), environment={"HOME": folder})
    check_versions(told)


@needs_ray
@pytest.mark.processes
def test_fetchers_have_their_threads_and_take_no_cpu_of_ray(folder: str) -> None:
    told = run_scenario("launch.test_ray.fetch_threads_with_ray", folder, environment={"HOME": folder})
    check_threads(told)
    assert told["CPUs"] == [1.0, 1.0]


def test_without_ray_each_use_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingDependencyError, match=r"^Ray is not installed, and this needs it: pip install 'loadmaster\[ray\]'$"
    ):
        module.spawn_fetchers(CheckpointSource("x"))


@needs_ray
def test_ray_that_is_not_connected_is_a_sentence() -> None:
    code = (
        "from loadmaster.launch.ray import spawn_fetchers\n"
        "from loadmaster.errors import InputError\n"
        "from loadmaster.fetch.checkpoint_source import CheckpointSource\n"
        "try: spawn_fetchers(CheckpointSource('x'), 2)\n"
        "except InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout == ("Ray is not connected in this process; call ray.init() before the fetchers are started\n")
    assert os.environ.get("RAY_ADDRESS") is None
