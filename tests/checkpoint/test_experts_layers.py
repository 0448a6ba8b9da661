"""Layers of experts are handed out one by one, complete, while the next are read; whatever fails ends the load."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster import BankLayout, ExpertShard, load_experts, open_checkpoint
from loadmaster.checkpoint import experts as room
from loadmaster.checkpoint import reader
from loadmaster.checkpoint.bank_layout import Bank
from loadmaster.errors import CheckpointError

from .conftest import left_behind
from .helpers.experts import FAMILIES, SIZES, Banks, Sizes, assert_banks, moe_tensors, wanted_banks, write_moe
from .helpers.files import random_tensor


def layers_in_files(folder: Path, family: str = "nvfp4-modelopt", layers: Sequence[int] = (0, 1, 2, 5)) -> Any:
    """A checkpoint with each layer in a file of its own, in order, and its tensors."""
    tensors = moe_tensors(family, SIZES[family], layers)
    order = {f"layers.{layer}.": number for number, layer in enumerate(layers)}

    def file_of(name: str) -> int:
        return next((number for part, number in order.items() if part in name), 0)

    return write_moe(folder, tensors, file_of), tensors


def before_reading(monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], None]) -> list[int]:
    """Let ``happens(number)`` be called before a piece of file ``number`` is read; lists the files begun."""
    begun: list[int] = []
    real = reader._Worker.execute

    def execute(worker: Any, piece: Any) -> None:
        number = int(Path(piece.file).stem.removeprefix("part-"))
        begun.append(number)
        happens(number)
        real(worker, piece)

    monkeypatch.setattr(reader._Worker, "execute", execute)
    return begun


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_handed_out_once_and_complete(tmp_path: Path, family: str) -> None:
    """Also where neighbours of one file are read in one go, and with every scalar spread."""
    path, tensors = layers_in_files(tmp_path / "files", family)
    one = write_moe(tmp_path / "one", tensors)
    here = threading.get_ident()
    seen: list[tuple[int, Mapping[str, torch.Tensor]]] = []
    all_banks: Banks = {}

    def on_layer(layer: int, banks: Mapping[str, torch.Tensor]) -> None:
        assert threading.get_ident() == here
        assert_banks(banks, wanted_banks(family, tensors, layer, [0, 1, 2, 3]))
        assert all_banks == {}
        seen.append((layer, banks))

    for folder in (path, one):
        seen.clear()
        all_banks.clear()
        load_experts(all_banks, folder, on_layer=on_layer, threads=1)
        assert [layer for layer, _ in seen] == [0, 1, 2, 5]
        for layer, banks in seen:
            assert all(all_banks[layer][name] is bank for name, bank in banks.items())


@pytest.mark.parametrize("piece_bytes", [64, 1000, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_complete_however_their_bytes_are_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, piece_bytes: int
) -> None:
    """Pieces end within a row and go on into the next layer; two threads read them in any order."""
    real = room.plan_runs
    monkeypatch.setattr(room, "plan_runs", lambda *work, others: real(*work, piece_bytes, others))
    sizes = Sizes(2, FAMILIES[family].hidden, 2 * FAMILIES[family].intermediate)
    tensors = moe_tensors(family, sizes, (0, 1, 2))
    path = write_moe(tmp_path, tensors)
    for shard in (ExpertShard(), ExpertShard(tp_rank=1, tp_ranks=2)):
        seen: list[int] = []

        def on_layer(
            layer: int, banks: Mapping[str, torch.Tensor], shard: ExpertShard = shard, seen: list[int] = seen
        ) -> None:
            assert_banks(banks, wanted_banks(family, tensors, layer, [0, 1], shard.tp_rank, shard.tp_ranks))
            seen.append(layer)

        load_experts({}, path, shard=shard, on_layer=on_layer)
        assert sorted(seen) == [0, 1, 2]


def test_layers_are_handed_out_in_the_order_in_which_they_are_complete(tmp_path: Path) -> None:
    """The files hold them the other way round."""
    tensors = moe_tensors("per-expert", SIZES["per-expert"], (0, 1, 2))
    path = write_moe(tmp_path, tensors, lambda name: 2 - int(name.split(".")[2]) if ".layers." in name else 0)
    seen: list[int] = []
    banks: Banks = {}
    load_experts(banks, path, on_layer=lambda layer, _: seen.append(layer), threads=1)
    assert seen == [2, 1, 0]
    assert list(banks) == [0, 1, 2]


def test_the_first_layers_are_handed_out_while_the_last_is_still_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = layers_in_files(tmp_path)
    used = threading.Event()
    before_reading(monkeypatch, lambda number: None if number < 3 or used.wait(10) else pytest.fail("nothing came"))
    seen: list[int] = []

    def on_layer(layer: int, banks: Mapping[str, torch.Tensor]) -> None:
        seen.append(layer)
        if len(seen) == 3:
            assert not used.is_set()
            used.set()

    load_experts({}, path, on_layer=on_layer, threads=1)
    assert seen == [0, 1, 2, 5]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_hook_that_fails_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What is being read comes to its end, nothing more is begun, and no thread or open file is left."""
    path, _ = layers_in_files(tmp_path)
    failing, failed = threading.Event(), threading.Event()
    real = room._Filling._hand_out

    def hand_out(*arguments: Any) -> None:
        try:
            real(*arguments)
        finally:
            failed.set()

    def wait(number: int) -> None:
        if number == 2:
            assert failing.wait(10)
            assert failed.wait(10)

    monkeypatch.setattr(room._Filling, "_hand_out", hand_out)
    begun = before_reading(monkeypatch, wait)

    def on_layer(layer: int, banks: Mapping[str, torch.Tensor]) -> None:
        if layer == 1:
            failing.set()
            raise error("pin")

    banks: Banks = {}
    with pytest.raises(error, match="pin"):
        load_experts(banks, path, on_layer=on_layer, threads=1)
    assert left_behind(patience=0) == []
    assert banks == {}
    assert sorted(set(begun)) == [0, 1, 2]
    assert begun.count(2) == 1


def test_a_hook_that_fails_with_the_last_layer(tmp_path: Path) -> None:
    path, _ = layers_in_files(tmp_path)
    banks: Banks = {}

    def on_layer(layer: int, _: Mapping[str, torch.Tensor]) -> None:
        if layer == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load_experts(banks, path, on_layer=on_layer)
    assert left_behind(patience=0) == []
    assert banks == {}


def test_an_interrupt_while_a_layer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes to this thread, which is waiting for the third layer."""
    path, _ = layers_in_files(tmp_path)
    waiting, interrupted = threading.Event(), threading.Event()
    real = room._Filling._hand_out

    def hand_out(*arguments: Any) -> None:
        try:
            waiting.set()
            real(*arguments)
        except KeyboardInterrupt:
            interrupted.set()
            raise

    def interrupt(number: int) -> None:
        if number == 2:
            assert waiting.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(10)

    monkeypatch.setattr(room._Filling, "_hand_out", hand_out)
    begun = before_reading(monkeypatch, interrupt)
    banks: Banks = {}
    with pytest.raises(KeyboardInterrupt):
        load_experts(banks, path, threads=1)
    assert left_behind(patience=0) == []
    assert banks == {}
    assert sorted(set(begun)) == [0, 1, 2]
    assert begun.count(2) == 1


def test_an_interrupt_while_the_reading_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the reading thread is started: it reads on to the end of its piece, and no further."""
    path, _ = layers_in_files(tmp_path)
    reading, interrupted = threading.Event(), threading.Event()
    real = room.ThreadPoolExecutor.submit

    def submit(*arguments: Any) -> Any:
        real(*arguments)
        assert reading.wait(10)
        raise KeyboardInterrupt

    def wait(number: int) -> None:
        reading.set()
        assert interrupted.wait(10)

    real_exit = room.ThreadPoolExecutor.__exit__

    def leave(*arguments: Any) -> Any:
        interrupted.set()
        return real_exit(*arguments)

    monkeypatch.setattr(room.ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(room.ThreadPoolExecutor, "__exit__", leave)
    begun = before_reading(monkeypatch, wait)
    banks: Banks = {}
    with pytest.raises(KeyboardInterrupt):
        load_experts(banks, path, threads=1)
    assert left_behind(patience=0) == []
    assert banks == {}
    assert len(begun) == 1


def test_a_file_that_is_truncated_meanwhile_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = layers_in_files(tmp_path)
    cut = open_checkpoint(path)["model.layers.5.mlp.experts.2.up_proj.weight"].offset + 7
    before_reading(monkeypatch, lambda number: os.truncate(path / "part-3.safetensors", cut) if number == 3 else None)
    seen: list[int] = []
    banks: Banks = {}
    with pytest.raises(CheckpointError, match=r"part-3\.safetensors was truncated") as caught:
        load_experts(banks, path, on_layer=lambda layer, _: seen.append(layer), threads=1)
    assert banks == {}
    assert seen == [0, 1, 2]
    assert f"offset {cut}, in tensor 'model.layers.5.mlp.experts.2.up_proj.weight'" in str(caught.value)


def test_a_file_that_is_changed_meanwhile_is_handed_out_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = layers_in_files(tmp_path)
    before_reading(monkeypatch, lambda number: os.utime(path / "part-0.safetensors", (1, 1)) if number == 3 else None)
    banks: Banks = {}
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors was changed while it was being read"):
        load_experts(banks, path, threads=1)
    assert banks == {}


def test_progress_that_fails_ends_the_load(tmp_path: Path) -> None:
    path, _ = layers_in_files(tmp_path)
    banks: Banks = {}

    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load_experts(banks, path, progress=progress)
    assert banks == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_a_byte_are_handed_out_once_too(tmp_path: Path, family: str) -> None:
    """Between layers that follow each other in the file as in memory, and as the only ones."""
    for number, (full, empty) in enumerate([((0, 3), (1, 2, 4)), ((), (0, 1))]):
        tensors: dict[str, torch.Tensor] = {}
        for layer in sorted((*full, *empty)):
            tensors |= moe_tensors(family, SIZES[family] if layer in full else Sizes(4, 0, 0), (layer,))
        path = write_moe(tmp_path / str(number), tensors)
        for shard in (ExpertShard(), ExpertShard(tp_rank=1, tp_ranks=2), ExpertShard(ep_rank=1, ep_ranks=2)):
            seen: list[int] = []
            banks: Banks = {}
            load_experts(banks, path, shard=shard, on_layer=lambda layer, _: seen.append(layer))  # noqa: B023
            assert sorted(seen) == sorted(banks) == sorted((*full, *empty))
            kept = [2, 3] if shard.ep_ranks == 2 else [0, 1, 2, 3]
            for layer in banks:
                assert_banks(banks[layer], wanted_banks(family, tensors, layer, kept, shard.tp_rank, shard.tp_ranks))


def test_a_layer_without_a_byte_between_two_that_are_read_in_one_go(tmp_path: Path) -> None:
    """Banks of a multiple of 64 bytes: the last of layer 0 and the first of layer 2 are one stretch of memory."""
    layout = BankLayout(
        name="own",
        pattern=r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<projection>w)",
        banks={"w": Bank(parts=("w",))},
    )
    tensors = {
        f"layers.{layer}.experts.0.w": random_tensor((rows, 32), seed=layer) for layer, rows in enumerate((2, 0, 3))
    }
    seen: list[int] = []
    banks: Banks = {}
    path = write_moe(tmp_path, tensors)
    load_experts(banks, path, layout=layout, on_layer=lambda layer, _: seen.append(layer))
    assert sorted(seen) == [0, 1, 2]
    for layer, tensor in enumerate(tensors.values()):
        assert_banks(banks[layer], {"w": tensor[None]})
