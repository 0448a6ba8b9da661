"""Reading threads come and go with the share, between pieces, and every byte is read once all the same."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from loadmaster.checkpoint import reader
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.pieces import Piece, plan_pieces
from loadmaster.checkpoint.placement import place_whole
from loadmaster.checkpoint.reader import read_pieces
from loadmaster.checkpoint.target import new_memory

from .conftest import left_behind
from .helpers.files import random_tensor, write_file


class Share:
    """Says a number of threads, and sees how many run at once at each piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: dict[int, int]) -> None:
        self.now = after.pop(0)
        self.seen: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []
        self._after = after
        self._lock = threading.Lock()
        self._pieces = 0
        real = reader._Worker.execute

        def execute(worker: reader._Worker, piece: Piece) -> None:
            with self._lock:
                self._pieces += 1
                self.now = self._after.get(self._pieces, self.now)
            real(worker, piece)
            with self._lock:
                running = sum(member.name.startswith("loadmaster-read") for member in threading.enumerate())
                self.seen.append((self.now, running))
                self.read.append((self.now, threading.get_ident()))

        monkeypatch.setattr(reader._Worker, "execute", execute)

    def __call__(self) -> int:
        return self.now


def load(path: Path, threads: Share) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    placements = place_whole(checkpoint.values())
    tensors, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations, piece_bytes=4096)
    assert len(pieces) > 50
    read_pieces(pieces, checkpoint.files, threads)
    assert len(threads.seen) == len(pieces)
    return tensors


@pytest.fixture
def truth() -> dict[str, torch.Tensor]:
    return {name: random_tensor((512, 64)) for name in "abcdefgh"}


@pytest.fixture
def path(tmp_path: Path, truth: dict[str, torch.Tensor]) -> Path:
    return write_file(tmp_path / "model.safetensors", truth)


@pytest.mark.parametrize(
    "after", [{0: 1, 10: 4}, {0: 4, 10: 1}, {0: 2, 10: 5, 20: 1, 30: 3}, {0: 0}], ids=["rise", "fall", "both", "none"]
)
def test_threads_follow_the_share_and_every_byte_is_read(
    after: dict[int, int], path: Path, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(monkeypatch, dict(after))
    tensors = load(path, share)
    assert {name for name in truth if not torch.equal(tensors[name], truth[name])} == set()
    assert left_behind() == []


def test_a_share_that_rises_is_used_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(monkeypatch, {0: 1, 10: 4})
    load(path, share)
    assert max(running for now, running in share.seen if now == 1) == 1
    assert max(running for now, running in share.seen if now == 4) == 4


def test_a_share_that_falls_is_kept_within_a_batch_of_each_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_PIECES", 1)
    share = Share(monkeypatch, {0: 4, 10: 1})
    load(path, share)
    after = Counter(thread for now, thread in share.read if now == 1)
    *others, survivor = sorted(after, key=after.__getitem__)
    assert after[survivor] > 90
    assert all(after[thread] <= 2 for thread in others), "the batch that it was at, and one that it had taken already"


def test_where_no_more_threads_are_to_be_had_those_that_run_do_the_work(
    path: Path, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(monkeypatch, {0: 3})
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("loadmaster-read"):
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    tensors = load(path, share)
    assert all(torch.equal(tensors[name], truth[name]) for name in truth)
    assert {running for _, running in share.seen} == {1}
