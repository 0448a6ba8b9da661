"""What a fetch gives: a mapping that gives its memory back once, however it ends."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loadmaster.errors import FetchError
from loadmaster.fetch.deal import Place
from loadmaster.fetch.shared_memory import SharedArena
from loadmaster.fetch.weights import Weights
from loadmaster.observe.fetch_report import FetchReport

PLACES = {
    "b": Place(1, 64, "F32", (2, 3)),
    "a": Place(0, 0, "U8", (5,)),
    "none": Place(0, 64, "BF16", (0, 4)),
    "scalar": Place(1, 0, "I64", ()),
}


class Maker:
    """Makes weights, counts what is given back, and closes the arenas as a pool does."""

    def __init__(self) -> None:
        self.given_back = 0

    def __call__(self, version: int | None = 3) -> Weights:
        arenas = [SharedArena.create(4096), SharedArena.create(4096)]
        arenas[0].buffer[:5] = b"abcde"
        arenas[1].tensor(64, "F32", (6,)).copy_(torch.arange(6.0))
        arenas[1].tensor(0, "I64", ()).fill_(-7)
        report = FetchReport(version=version, tensors=4, num_bytes=37, seconds=1.0, fetchers=())

        def give_back() -> bool:
            self.given_back += 1
            closed = [arena.close() for arena in arenas]
            return all(closed)

        return Weights(PLACES, arenas, report, give_back)


@pytest.fixture
def made() -> Iterator[Maker]:
    before = mapped()
    yield Maker()
    gc.collect()
    assert mapped() <= before


def mapped() -> int:
    return sum("loadmaster-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_is_a_mapping_in_the_order_of_the_source(made: Maker) -> None:
    with made() as weights:
        assert list(weights) == list(weights.keys()) == ["b", "a", "none", "scalar"]
        assert len(weights) == 4
        assert "a" in weights
        assert "c" not in weights
        assert weights["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert bytes(weights["a"].tolist()) == b"abcde"
        assert weights["none"].shape == (0, 4)
        assert weights["none"].dtype == torch.bfloat16
        assert weights["scalar"].item() == -7
        assert [name for name, tensor in weights.items() if tensor.numel() == 1] == ["scalar"]
        assert weights.get("c") is None
        with pytest.raises(KeyError, match="c"):
            weights["c"]


def test_a_tensor_is_made_once_and_shares_the_memory(made: Maker) -> None:
    with made() as weights:
        assert weights["a"] is weights["a"]
        other = weights.handle("a").open()
        weights["a"].fill_(65)
        assert bytes(other.tolist()) == b"AAAAA"
        del other


def test_a_model_takes_it_as_it_is(made: Maker) -> None:
    model = torch.nn.ParameterDict({"b": torch.nn.Parameter(torch.zeros(2, 3))})
    with made() as weights:
        model.load_state_dict({"b": weights["b"]})
    assert model["b"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("version", [None, 0, 12])
def test_it_says_what_it_is(version: int | None, made: Maker) -> None:
    weights = made(version)
    assert weights.version == weights.report.version == version
    assert repr(weights) == f"<Weights version {version}: 4 tensors, 37 bytes>"
    weights.close()
    assert repr(weights) == f"<Weights version {version}: 4 tensors, 37 bytes, closed>"


def test_closed_weights_refuse(made: Maker) -> None:
    weights = made()
    weights.close()
    for use in (
        lambda: weights["a"],
        lambda: weights.get("a"),
        lambda: list(weights),
        lambda: dict(weights),
        lambda: weights.handle("a"),
        weights.handles,
    ):
        with pytest.raises(FetchError, match="the weights of version 3 are closed"):
            use()


def test_closing_twice_gives_back_once(made: Maker) -> None:
    weights = made()
    weights.close()
    weights.close()
    with weights:
        pass
    del weights
    gc.collect()
    assert made.given_back == 1


def test_with_closes_after_an_error_too(made: Maker) -> None:
    with pytest.raises(ZeroDivisionError), made() as weights:
        raise ZeroDivisionError
    assert made.given_back == 1
    with pytest.raises(FetchError):
        weights["a"]


def test_collected_weights_are_closed_with_a_warning(made: Maker) -> None:
    held = [made()]
    assert held[0]["a"].numel() == 5
    with pytest.warns(ResourceWarning, match="<Weights version 3: 4 tensors, 37 bytes> was never closed"):
        held.clear()
    assert made.given_back == 1


def test_weights_that_were_not_made_do_not_complain() -> None:
    with pytest.raises(TypeError):
        Weights()  # type: ignore[call-arg]
    gc.collect()


def test_tensors_in_use_are_told_and_stay(made: Maker, caplog: pytest.LogCaptureFixture) -> None:
    weights = made()
    tensor = weights["b"]
    weights.close()
    assert [record.getMessage() for record in caplog.records] == [
        "weights of version 3 were closed while tensors of them are in use: their memory goes back with these"
    ]
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_goes_with_the_last_tensor_though_the_closed_weights_stay(made: Maker) -> None:
    before = mapped()
    weights = made()
    tensor = weights["b"]
    weights.close()
    del tensor
    gc.collect()
    assert mapped() == before
    del weights


def test_tensors_that_are_not_in_use_are_not_told(made: Maker, caplog: pytest.LogCaptureFixture) -> None:
    weights = made()
    assert weights["b"].sum() == 15
    weights.close()
    assert caplog.records == []


def test_handles_are_small_and_one_for_each_tensor(made: Maker) -> None:
    with made() as weights:
        handles = weights.handles()
        assert list(handles) == list(weights)
        assert handles == {name: weights.handle(name) for name in weights}
        sent = pickle.loads(pickle.dumps(handles))
        assert len(pickle.dumps(handles["b"])) < 250
        assert sent["b"].open().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert sent["none"].open().shape == (0, 4)
        assert handles["a"].arena.pid == os.getpid()


def test_handles_of_many_tensors_are_few_bytes_each(made: Maker) -> None:
    arena = SharedArena.create(1 << 20)
    places = {f"layers.{number}.weight": Place(0, 64 * number, "BF16", (4, 8)) for number in range(10_000)}
    report = FetchReport(version=1, tensors=10_000, num_bytes=1 << 20, seconds=1.0, fetchers=())
    with Weights(places, [arena], report, arena.close) as weights:
        assert len(pickle.dumps(weights.handles())) < 10_000 * 100
