"""Child processes that load: without rights, under signals, with files that change beneath them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

DROP_RIGHTS = """
import os
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
"""
"""What a child runs to lose root's rights, once all it imports is imported and it stands in its folder: nobody may
search the folders that lead there."""


def run_child(code: str, folder: Path, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` in ``folder`` and return what it said; a child that hangs fails the test."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
