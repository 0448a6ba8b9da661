from __future__ import annotations

import os
from pathlib import Path

import pytest
from lease_storm import storm

pytestmark = pytest.mark.processes


@pytest.mark.usefixtures("folder")
def test_nothing_is_lost_in_a_storm(folder: Path) -> None:
    """The long one: STORM=64x30, processes and seconds."""
    folder.mkdir(mode=0o700)
    processes, _, seconds = os.environ.get("STORM", "16x3").partition("x")
    counted = storm(int(processes), float(seconds))
    assert counted["killed"] >= int(processes) // 3
    assert counted["quiet moments"] >= 1
