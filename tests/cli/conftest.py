"""A checkpoint to load, and a folder for temporary files in which nothing may be left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.bench.make_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like checkpoint of 8 MiB in 3 files; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    make_checkpoint(folder, "llama", 8 << 20, shard_bytes=3 << 20)
    return folder


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "llama"))


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command puts its temporary files; the test fails if one is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []
