"""The ``loadmaster`` command as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadmaster.cli.app import run
from observe.helpers.terminal import run_on_terminal

COMMAND = os.fspath(Path(sysconfig.get_path("scripts"), "loadmaster"))
READ_HOOK = Path(__file__).with_name("read_hook")


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """What it printed, which is JSON and nothing else."""
        return json.loads(self.stdout)

    @property
    def sentence(self) -> str:
        """The only line on standard error."""
        (line,) = self.stderr.splitlines()
        return line


def loadmaster(
    *arguments: object, environment: Mapping[str, str] | None = None, words: Sequence[str] = (COMMAND,)
) -> Done:
    """Run the command to its end; ``words`` is what runs it."""
    done = subprocess.run(
        [*words, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """Run the command in this process, which has torch already: for tables of cases that must not take minutes."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    stdout, stderr = capsys.readouterr()
    return Done(code, stdout, stderr)


def command_line(*arguments: object) -> list[str]:
    """The words of the command."""
    return [COMMAND, *map(str, arguments)]


def hooked(folder: Path, **ranks: str) -> dict[str, str]:
    """The environment in which ranks do something while they read; see ``read_hook/sitecustomize.py``.

    ``rank0="kill"`` and so on; ``folder`` gets a file for each rank that has come to its action.
    """
    paths = [os.fspath(READ_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    actions = {rank.removeprefix("rank"): action for rank, action in ranks.items()}
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "READ_HOOK_ACTIONS": json.dumps(actions),
        "READ_HOOK_FOLDER": os.fspath(folder),
    }


def without_privileges(words: Sequence[str]) -> list[str]:
    """The command line that runs ``words`` so that a file's mode counts for root as well."""
    if os.geteuid() != 0:
        return list(words)
    return [sys.executable, os.fspath(Path(__file__).with_name("drop_privileges.py")), *words]


def on_terminal(*arguments: object, environment: Mapping[str, str] | None = None) -> tuple[Done, str]:
    """Run the command with standard error on a terminal; return how it ended and what the terminal got."""
    code, stdout, shown = run_on_terminal(command_line(*arguments), environment)
    return Done(code, stdout, ""), shown
