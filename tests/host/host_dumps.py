"""The dumps of real hosts beside the repository, and the right answers for them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "hosts"
WHY_SKIPPED = f"the host dumps are not here: {FOLDER}"


def load_truths() -> list[dict[str, Any]]:
    """One entry a dump; empty where the dumps are not there."""
    truth = FOLDER / "truth.json"
    entries: list[dict[str, Any]] = json.loads(truth.read_text()) if truth.exists() else []
    return entries


class Dumps:
    """Extracts each dump once a session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def root(self, name: str) -> Path:
        """The folder that plays ``/`` for this dump."""
        root = self._folder / name
        if not root.exists():
            with tarfile.open(FOLDER / "dumps" / f"{name}.tar.xz") as archive:
                if hasattr(tarfile, "tar_filter"):
                    archive.extractall(self._folder, filter="tar")
                else:
                    archive.extractall(self._folder)
        return root
