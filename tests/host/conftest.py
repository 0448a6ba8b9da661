from __future__ import annotations

import pytest
from host_dumps import Dumps

from loadmaster.host import notices


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return Dumps(tmp_path_factory.mktemp("dumps"))


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees a process that has logged nothing yet."""
    monkeypatch.setattr(notices, "_logged", set())
