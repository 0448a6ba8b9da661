"""Loaders of the shapes that engines have, inside the scope: the counts that they see, and not a byte that differs.

serial      slicing, transposes, cat, fp8 dequantisation and de-interleaving on the loading thread
pool        a pool of module loaders, one task per module
draft       a target model and then a separate draft model in one scope
failing     a loader that raises half-way
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import loadmaster as lm
from threads.conftest import counts, needs_two_cpus

HIDDEN, INNER, EXPERTS = 256, 512, 4
"""A tensor of 256 x 512 values is copied by a whole team: torch gives each member at least 32768."""

RAISED_AND_LOWERED = pytest.mark.parametrize(
    ("before", "threads"), [pytest.param(1, 2, marks=needs_two_cpus), (2, 1), pytest.param(2, 2, marks=needs_two_cpus)]
)
Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    """One layer as an engine holds it: fused, transposed and dequantised."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = empty(3 * HIDDEN, HIDDEN)
        self.output = empty(HIDDEN, HIDDEN)
        self.gate_up = empty(EXPERTS, 2 * INNER, HIDDEN)
        self.down = empty(HIDDEN, INNER)
        self.norm = empty(HIDDEN)
        self.register_buffer("frequencies", torch.zeros(HIDDEN // 2))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    def load(self, weights: Weights, prefix: str) -> None:
        """Load this layer the way an engine's own code does, on the calling thread."""
        own = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        with torch.no_grad():
            self.qkv.copy_(torch.cat([own["q"], own["k"], own["v"]]))
            self.output.copy_(own["output_transposed"].t())
            for expert in range(EXPERTS):
                interleaved = own["gate_up_interleaved"][expert]
                self.gate_up[expert].copy_(torch.cat([interleaved[0::2], interleaved[1::2]]))
            self.down.copy_(own["down_fp8"].to(torch.float32).mul_(own["down_scale"]).to(torch.bfloat16))
            self.norm.copy_(own["norm_of_two_ranks"][HIDDEN:])
            self.frequencies.copy_(own["frequencies"])
            self.num_updates.copy_(own["num_updates"])


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


def model(layers: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(layers))


def checkpoint(layers: int, seed: int) -> Weights:
    """What the loaders read, the same in every run."""
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    found: Weights = {}
    for layer in range(layers):
        found |= {f"{layer}.{name}": values(HIDDEN, HIDDEN) for name in ("q", "k", "v", "output_transposed")}
        found[f"{layer}.gate_up_interleaved"] = values(EXPERTS, 2 * INNER, HIDDEN)
        found[f"{layer}.down_fp8"] = values(HIDDEN, INNER).to(torch.float8_e4m3fn)
        found[f"{layer}.down_scale"] = torch.rand(HIDDEN, 1, generator=random)
        found[f"{layer}.norm_of_two_ranks"] = values(2 * HIDDEN)
        found[f"{layer}.frequencies"] = torch.rand(HIDDEN // 2, generator=random)
        found[f"{layer}.num_updates"] = torch.tensor(7 + layer)
    return found


def model_bytes(module: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer as the bytes that it holds."""
    rows = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in rows}


def load_serially(target: nn.ModuleList, weights: Weights, look: Callable[[], object] = lambda: None) -> None:
    for layer, block in enumerate(target):
        block.load(weights, f"{layer}.")
        look()


@pytest.fixture(scope="module")
def target_weights() -> Weights:
    return checkpoint(3, seed=1)


@pytest.fixture(scope="module")
def draft_weights() -> Weights:
    return checkpoint(1, seed=2)


@pytest.fixture
def plain(target_weights: Weights) -> dict[str, bytes]:
    """The bytes of the target model when it is loaded without a scope."""
    target = model(3)
    load_serially(target, target_weights)
    found = model_bytes(target)
    assert all(any(values) for values in found.values())
    return found


@RAISED_AND_LOWERED
def test_a_serial_loader(before: int, threads: int, target_weights: Weights, plain: dict[str, bytes]) -> None:
    torch.set_num_threads(before)
    target, seen = model(3), []
    with lm.load_threads(threads):
        load_serially(target, target_weights, lambda: seen.append(counts()))
    assert seen == [(threads, min(before, threads))] * 3
    assert counts() == (before, before)
    assert model_bytes(target) == plain


@RAISED_AND_LOWERED
def test_a_loader_that_iterates_over_paced_weights(
    before: int, threads: int, target_weights: Weights, plain: dict[str, bytes]
) -> None:
    torch.set_num_threads(before)
    target, given, seen = model(3), {}, set()
    for name, tensor in lm.paced(target_weights.items(), threads):
        given[name] = tensor.clone()
        seen.add(torch.get_num_threads())
    with lm.load_threads(threads):
        load_serially(target, given)
    assert seen == {threads}
    assert counts() == (before, before)
    assert model_bytes(target) == plain


@RAISED_AND_LOWERED
@pytest.mark.parametrize("workers", [3, 8])
def test_a_pool_of_module_loaders(
    before: int, threads: int, workers: int, target_weights: Weights, plain: dict[str, bytes]
) -> None:
    """The engine's own pool, started in the scope: no worker has more threads than before, or than the share."""
    torch.set_num_threads(before)
    target = model(3)
    together = threading.Barrier(3)

    def load(layer: int) -> int:
        together.wait(60)  # so that each module has a worker of its own
        target[layer].load(target_weights, f"{layer}.")
        return torch.get_num_threads()

    with lm.load_threads(threads):
        with ThreadPoolExecutor(workers) as pool:
            seen = list(pool.map(load, range(3)))
        assert torch.get_num_threads() == threads
    assert seen == [min(before, threads)] * 3
    assert counts() == (before, before)
    assert model_bytes(target) == plain


@RAISED_AND_LOWERED
def test_a_pool_of_module_loaders_that_stays_inside_the_share(
    before: int, threads: int, target_weights: Weights, plain: dict[str, bytes]
) -> None:
    torch.set_num_threads(before)
    target = model(3)

    def load(layer: int) -> tuple[int, str]:
        target[layer].load(target_weights, f"{layer}.")
        return torch.get_num_threads(), threading.current_thread().name

    with lm.load_pool(32, threads) as pool:
        seen = list(pool.map(load, range(3)))
    assert {number for number, _ in seen} == {1}
    assert len({name for _, name in seen}) <= threads
    assert counts() == (before, before)
    assert model_bytes(target) == plain


@RAISED_AND_LOWERED
def test_a_target_and_then_a_draft_model_in_one_scope(
    before: int, threads: int, target_weights: Weights, draft_weights: Weights, plain: dict[str, bytes]
) -> None:
    """The draft model's loader opens a scope of its own, as if it were alone."""
    torch.set_num_threads(before)
    alone = model(1)
    load_serially(alone, draft_weights)
    target, draft, seen = model(3), model(1), []

    @lm.load_threads(threads)
    def load_draft() -> None:
        load_serially(draft, draft_weights, lambda: seen.append(torch.get_num_threads()))

    with lm.load_threads(threads):
        load_serially(target, target_weights, lambda: seen.append(torch.get_num_threads()))
        load_draft()
        seen.append(torch.get_num_threads())
    assert seen == [threads] * 5
    assert counts() == (before, before)
    assert model_bytes(target) == plain
    assert model_bytes(draft) == model_bytes(alone)


class TruncatedError(Exception):
    """Of a loader whose file ends too early."""


@RAISED_AND_LOWERED
@pytest.mark.parametrize("way", ["block", "decorator", "paced", "pool"])
def test_a_loader_that_raises_half_way(
    before: int, threads: int, way: str, target_weights: Weights, plain: dict[str, bytes]
) -> None:
    """What was loaded until then is right, and the next attempt loads the rest."""
    torch.set_num_threads(before)
    target = model(3)

    def layers() -> Iterator[int]:
        yield from range(2)
        raise TruncatedError("the third layer")

    def load(layer: int) -> None:
        target[layer].load(target_weights, f"{layer}.")

    def in_block() -> None:
        with lm.load_threads(threads):
            for layer in layers():
                load(layer)

    @lm.load_threads(threads)
    def in_decorator() -> None:
        for layer in layers():
            load(layer)

    def in_paced() -> None:
        for layer in lm.paced(layers(), threads):
            load(layer)

    def in_pool() -> None:
        with lm.load_pool(threads=threads) as pool:
            for layer in layers():
                pool.submit(load, layer).result()

    attempt = {"block": in_block, "decorator": in_decorator, "paced": in_paced, "pool": in_pool}[way]
    with pytest.raises(TruncatedError, match="the third layer"):
        attempt()
    assert counts() == (before, before)
    half = {name: plain[name] for name in plain if not name.startswith("2.")}
    assert {name: values for name, values in model_bytes(target).items() if name in half} == half
    with lm.load_threads(threads):
        load(2)
    assert model_bytes(target) == plain
    assert counts() == (before, before)
