"""The parent of the ranks ends: so do they, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.helpers import parent as parent_program
from launch.helpers.leftovers import alive_at_the_end, is_alive

pytestmark = pytest.mark.processes

RANKS = 3


@contextmanager
def parent_of_ranks(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a parent in a session of its own; give it and the process numbers of its ranks, which all run by then."""
    parent = subprocess.Popen(
        [sys.executable, os.fspath(parent_program.__file__), str(RANKS)],
        env={**os.environ, "TMPDIR": os.fspath(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent.stdout, parent.stderr:
        ranks = [int(parent.stdout.readline()) for _ in range(RANKS)]
        try:
            yield parent, ranks
        finally:
            parent.kill()
            parent.wait()
            for rank in ranks:
                if is_alive(rank):
                    os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_parent_that_is_killed_takes_its_ranks_with_it(number: signal.Signals, temporary_folder: Path) -> None:
    with parent_of_ranks(temporary_folder) as (parent, ranks):
        assert [rank for rank in ranks if not is_alive(rank)] == []
        parent.send_signal(number)
        assert parent.wait() == -number
        assert alive_at_the_end(ranks) == []


def test_an_interrupt_of_the_whole_group_ends_the_ranks_before_their_parent(temporary_folder: Path) -> None:
    with parent_of_ranks(temporary_folder) as (parent, ranks):
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait() == 7
        assert alive_at_the_end(ranks, seconds=0) == []
        assert parent.stderr is not None
        assert parent.stderr.read() == ""


def test_ranks_go_on_when_only_they_are_interrupted(temporary_folder: Path) -> None:
    with parent_of_ranks(temporary_folder) as (parent, ranks):
        for rank in ranks:
            os.kill(rank, signal.SIGINT)
        assert alive_at_the_end(ranks, seconds=0.2) == ranks
        assert parent.poll() is None
