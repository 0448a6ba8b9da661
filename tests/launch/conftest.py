"""Every test of this room: nothing is left behind, whatever became of the ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.helpers.leftovers import child_processes, open_files, thread_names


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own for temporary files; at the end no file, process, thread or open file is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = open_files(), child_processes(), thread_names()
    yield folder
    after = open_files(), child_processes(), thread_names()
    assert list(folder.iterdir()) == []
    assert [sorted(new - old, key=str) for new, old in zip(after, before, strict=True)] == [[], [], []]
