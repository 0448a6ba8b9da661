"""What the environment of a rank says before the rank starts."""

from __future__ import annotations

import os

import pytest

from loadmaster.share import share
from loadmaster.threads.environment import rank_environment


def test_a_rank_is_told_its_threads_its_number_and_how_many_there_are() -> None:
    given = {"HOME": "/home/user", "OMP_NUM_THREADS": "12", "LOADMASTER_LOCAL_RANK": "7"}
    before = dict(given)
    assert rank_environment(3, 1, 4, given) == {
        "HOME": "/home/user",
        "OMP_NUM_THREADS": "3",
        "LOADMASTER_LOCAL_RANK": "1",
        "LOADMASTER_LOCAL_SIZE": "4",
    }
    assert given == before


def test_the_environment_of_this_process_is_the_default_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")
    before = dict(os.environ)
    environment = rank_environment(2, 0, 1)
    assert os.environ == before
    assert environment == {
        **before,
        "OMP_NUM_THREADS": "2",
        "LOADMASTER_LOCAL_RANK": "0",
        "LOADMASTER_LOCAL_SIZE": "1",
    }


def test_a_rank_reads_its_place_among_the_ranks_from_it() -> None:
    part = share(environ=rank_environment(1, 2, 3, {}))
    assert (part.rank, part.workers, part.threads) == (2, 3, 1)
