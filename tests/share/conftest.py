from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.host import notices

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))  # the dumps are shared with the tests of that room

from host_dumps import Dumps
from lease_processes import Process, Start


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return Dumps(tmp_path_factory.mktemp("dumps"))


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees a process that has logged nothing yet."""
    monkeypatch.setattr(notices, "_logged", set())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "leases"
    monkeypatch.setenv("LOADMASTER_DIR", str(path))
    return path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts processes; those that are still there at the end are killed."""
    started: list[Process] = []

    def make(**environment: str) -> Process:
        started.append(Process(environment))
        return started[-1]

    yield make
    for process in started:
        if process.child.poll() is None:
            process.kill()
        for stream in (process.child.stdin, process.child.stdout):
            assert stream is not None
            stream.close()
