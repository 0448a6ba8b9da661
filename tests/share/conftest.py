from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadmaster.host import notices

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))  # the dumps are shared with the tests of that room

from host_dumps import Dumps


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return Dumps(tmp_path_factory.mktemp("dumps"))


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees a process that has logged nothing yet."""
    monkeypatch.setattr(notices, "_logged", set())
