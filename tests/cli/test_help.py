"""``--help`` answers at once, which it can as long as nothing heavy is imported for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cli.helpers.command import loadmaster

pytestmark = pytest.mark.processes

HELP = {
    "": ["plan", "load", "fetch", "bench"],
    "load": ["CKPT", "--ranks", "--shard", "--threads", "--tp-plan", "--dtype", "--verify", "--quiet", "--json"],
    "fetch": ["SOURCE", "--procs", "--version", "--keep-memory", "--verify", "--quiet", "--json"],
    "plan": ["--ranks", "--json"],
    "bench": ["load", "experts", "fetch", "collapse", "sweep", "scope", "make-checkpoint"],
    "bench load": ["CKPT", "--arms", "--repeat", "--seconds", "--verify", "--plot", "--json"],
    "bench experts": ["CKPT", "--experts-by", "--arms", "--repeat", "--seconds", "--verify", "--plot", "--json"],
    "bench fetch": ["CKPT", "--procs", "--arms", "--repeat", "--seconds", "--verify", "--plot", "--json"],
    "bench collapse": ["--ranks", "--copy-bytes", "--threads-per-rank", "--repeat", "--seconds", "--plot", "--json"],
    "bench sweep": ["--ranks", "--copy-bytes", "--repeat", "--seconds", "--plot", "--json"],
    "bench scope": ["--ranks", "--copy-bytes", "--copy-seconds", "--repeat", "--seconds", "--plot", "--json"],
    "bench make-checkpoint": ["DIR", "--family", "--size"],
}
HEAVY = {"torch", "numpy", "safetensors", "psutil", "multiprocessing", "rich", "threadpoolctl", "matplotlib"}


@pytest.mark.parametrize(("command", "words"), HELP.items(), ids=HELP)
def test_help_tells_what_there_is_and_imports_nothing_heavy(command: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loadmaster", *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: loadmaster " + command)
    assert [word for word in words if word not in done.stdout] == []
    imported = set(re.findall(r"\|\s+([\w.]+)$", done.stderr, re.MULTILINE))
    assert "loadmaster.cli.app" in imported
    assert HEAVY & {name.partition(".")[0] for name in imported} == set()


def test_the_command_alone_shows_its_help_and_counts_as_wrong_usage() -> None:
    done = loadmaster()
    assert (done.code, done.stderr) == (2, "")
    assert done.stdout.startswith("Usage: loadmaster ")
