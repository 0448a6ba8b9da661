"""Targets: modules and mappings filled in place, all names and shapes checked before a byte is written."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loadmaster import Shard, load
from loadmaster.checkpoint import target as target_module
from loadmaster.errors import InputError, PlacementError

from .helpers.files import assert_same, bits_of, random_tensor, write_file


class Small(nn.Module):
    """Parameters and buffers of several dtypes, nested."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4, device=device, dtype=dtype)
        self.inner = nn.ModuleDict({"norm": nn.BatchNorm1d(4, device=device, dtype=dtype)})
        self.scale = nn.Parameter(torch.zeros((), device=device, dtype=dtype), requires_grad=False)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Random tensors for every name of a module."""
    return {
        name: random_tensor(tuple(tensor.shape), tensor.dtype, seed=number)
        for number, (name, tensor) in enumerate(module.state_dict().items())
    }


@pytest.fixture
def made(tmp_path: Path) -> Callable[[dict[str, torch.Tensor]], Path]:
    def write(tensors: dict[str, torch.Tensor]) -> Path:
        return write_file(tmp_path / "model.safetensors", tensors)

    return write


Made = Callable[[dict[str, torch.Tensor]], Path]


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


# Modules.


def test_module_is_filled_in_place(made: Made) -> None:
    module = Small()
    wanted, before = tensors_of(module), addresses(module)
    parameters = dict(module.named_parameters())
    report = load(module, made(wanted))
    assert addresses(module) == before
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == {
        name: id(parameter) for name, parameter in parameters.items()
    }
    for name, tensor in module.state_dict().items():
        assert_same(tensor, wanted[name], name)
    assert parameters["first.weight"].requires_grad
    assert not parameters["scale"].requires_grad
    assert report.ranks[0].tensors == len(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_module_keeps_its_dtype(made: Made, dtype: torch.dtype) -> None:
    module = Small(dtype=dtype)
    before = addresses(module)
    source = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors_of(module).items()
    }
    load(module, made(source))
    assert addresses(module) == before
    for name, tensor in module.state_dict().items():
        assert_same(tensor, source[name].to(tensor.dtype), name)


def test_module_keeps_its_dtype_against_the_one_asked_for(made: Made) -> None:
    module = nn.Linear(3, 2, dtype=torch.float32)
    wanted = tensors_of(module)
    load(module, made(wanted), dtype=torch.float16)
    for name, tensor in module.state_dict().items():
        assert_same(tensor, wanted[name], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_module_on_the_meta_device_gets_new_memory(made: Made, dtype: torch.dtype) -> None:
    module = Small("meta", dtype)
    wanted = tensors_of(Small(dtype=torch.bfloat16))
    load(module, made(wanted))
    for name, tensor in module.state_dict().items():
        assert not tensor.is_meta, name
        assert_same(tensor, wanted[name].to(dtype) if wanted[name].is_floating_point() else wanted[name], name)
    assert isinstance(module.first.weight, nn.Parameter)
    assert module.first.weight.requires_grad
    assert not module.scale.requires_grad
    assert set(dict(module.named_parameters())) == {
        "first.weight",
        "first.bias",
        "inner.norm.weight",
        "inner.norm.bias",
        "scale",
    }


def test_module_from_the_meta_device_trains(made: Made) -> None:
    """Autograd sees separate tensors: a buffer that a forward pass changes does not spoil the weights beside it."""
    module = nn.Sequential(nn.BatchNorm1d(4, device="meta"), nn.BatchNorm1d(4, device="meta"))
    load(module, made(tensors_of(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)))))
    module(torch.randn(5, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_module_that_is_meta_in_part(made: Made) -> None:
    module = Small()
    module.first = nn.Linear(6, 4, device="meta", dtype=torch.bfloat16)
    kept = module.inner["norm"].weight.data_ptr()
    wanted = tensors_of(Small())
    load(module, made(wanted))
    assert module.inner["norm"].weight.data_ptr() == kept
    for name, tensor in module.state_dict().items():
        assert_same(tensor, wanted[name], name)


class Tied(nn.Module):
    """An output head that is the embedding."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, device=device)
        self.head = nn.Linear(3, 5, bias=False, device=device)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_tied_weights_are_given_once_and_stay_tied(made: Made, device: str, names: tuple[str, ...]) -> None:
    module = Tied(device)
    wanted = random_tensor((5, 3), torch.float32)
    load(module, made({name: wanted.clone() for name in names}))
    assert_same(module.embed.weight, wanted)
    assert_same(module.head.weight, wanted)
    assert module.head.weight is module.embed.weight


def test_parameter_that_is_not_contiguous_is_filled_as_it_lies(made: Made) -> None:
    module = nn.Linear(6, 4, bias=False)
    module.weight = nn.Parameter(torch.zeros(6, 4).t())
    address, strides = module.weight.data_ptr(), module.weight.stride()
    wanted = random_tensor((4, 6), torch.float32)
    load(module, made({"weight": wanted}))
    assert (module.weight.data_ptr(), module.weight.stride()) == (address, strides)
    assert torch.equal(module.weight, wanted)
    assert module.weight.requires_grad


def test_buffer_that_is_not_saved_is_left_alone(made: Made) -> None:
    module = nn.Linear(3, 2, bias=False)
    module.register_buffer("cache", torch.full((2,), 7.0), persistent=False)
    load(module, made({"weight": random_tensor((2, 3), torch.float32)}))
    assert module.cache.tolist() == [7.0, 7.0]


def test_module_may_hold_one_rank(made: Made) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.ModuleDict({"mlp": nn.ModuleDict({"down_proj": nn.Linear(4, 3, bias=False)})})
            self.layers = nn.ModuleList([layer])

    module = Block()
    name = "layers.0.mlp.down_proj.weight"
    whole = random_tensor((3, 8), torch.float32)
    load(module, made({name: whole}), shard=Shard(rank=1, ranks=2))
    assert_same(module.state_dict()[name], whole[:, 4:].contiguous())


# What does not fit.


def refused(target: Any, path: Path) -> str:
    before = {name: bits_of(tensor) for name, tensor in state(target).items() if not tensor.is_meta}
    with pytest.raises(PlacementError) as caught:
        load(target, path)
    after = {name: bits_of(tensor) for name, tensor in state(target).items() if not tensor.is_meta}
    assert after == before, "a target that does not fit is not touched"
    return str(caught.value)


def state(target: Any) -> Any:
    return target.state_dict() if isinstance(target, nn.Module) else target


@pytest.fixture(params=["module", "mapping", "meta module"])
def kind(request: pytest.FixtureRequest) -> Callable[[nn.Module], Any]:
    if request.param == "mapping":
        return lambda module: dict(module.state_dict())
    if request.param == "meta module":
        return lambda module: module.to("meta")
    return lambda module: module


def test_tensor_that_the_checkpoint_lacks_is_named(made: Made, kind: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(3, 2)
    message = refused(kind(module), made({"weight": torch.ones(2, 3)}))
    assert "the checkpoint has no tensor for 'bias' of the target" in message


def test_tensor_that_the_target_lacks_is_named(made: Made, kind: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(3, 2, bias=False)
    message = refused(kind(module), made({"weight": torch.ones(2, 3), "bias": torch.ones(2)}))
    assert "the target has no place for 'bias' of the checkpoint" in message


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (2, 3, 1)])
def test_other_shape_is_named_with_both(made: Made, kind: Callable[[nn.Module], Any], shape: tuple[int, ...]) -> None:
    message = refused(kind(nn.Linear(3, 2, bias=False)), made({"weight": torch.ones(shape)}))
    assert "'weight'" in message
    assert f"{list(shape)} in the checkpoint" in message
    assert "[2, 3] in the target" in message


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int64, torch.float32),
        (torch.float32, torch.int64),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.uint8, torch.int8),
        (torch.float32, torch.complex64),
    ],
)
def test_dtype_that_would_change_the_meaning_is_named(made: Made, source: torch.dtype, target: torch.dtype) -> None:
    message = refused({"a": torch.zeros(4).to(target)}, made({"a": torch.zeros(4).to(source)}))
    assert "'a'" in message
    assert "only plain floating-point dtypes are converted" in message


def test_dtype_that_no_file_can_hold_names_the_tensor(made: Made) -> None:
    with pytest.raises(InputError, match="'a'"):
        load({"a": torch.zeros(4, dtype=torch.complex128)}, made({"a": torch.zeros(4)}))


def test_many_names_are_counted(made: Made) -> None:
    target = {f"t{number}": torch.zeros(1) for number in range(9)}
    assert "'t1', 't2', 't3' and 5 more" in refused(target, made({"t0": torch.ones(1)}))


@pytest.mark.parametrize("target", [None, [], "model", torch.zeros(3), object(), (("a", 1),)])
def test_target_that_is_none(made: Made, target: Any) -> None:
    path = made({"a": torch.ones(1)})
    with pytest.raises(
        InputError, match=f"a torch module or a mutable mapping of tensors, not {type(target).__name__}"
    ):
        load(target, path)


# Mappings that hold tensors.


@pytest.mark.parametrize("mapping", [dict, OrderedDict, UserDict])
def test_mapping_is_filled_in_place(made: Made, mapping: Callable[[Any], Any]) -> None:
    held = {
        "plain": torch.zeros(4, 6, dtype=torch.bfloat16),
        "converted": torch.zeros(5),
        "transposed": torch.zeros(6, 4).t(),
        "part": torch.full((10, 4), 7.0)[3:7],
        "every second": torch.full((8,), 7.0)[::2],
        "one of two": torch.zeros(1, 2)[:, 0],
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 3),
        "mask": torch.zeros(3, dtype=torch.bool),
        "scaled": torch.zeros(4).to(torch.float8_e8m0fnu),
        "packed": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    target = mapping(held)
    source = {name: random_tensor(tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    source["converted"] = source["converted"].double()
    base = held["part"]._base
    load(target, made(source))
    for name, tensor in held.items():
        assert target[name] is tensor
        assert_same(tensor, source[name].to(tensor.dtype), name)
    assert base is not None
    assert set(base[:3].flatten().tolist()) == set(base[7:].flatten().tolist()) == {7.0}
    assert held["every second"]._base is not None
    assert held["every second"]._base[1::2].tolist() == [7.0] * 4


@pytest.mark.parametrize("contiguous", [True, False])
def test_padding_of_a_tensor_that_exists_becomes_zero(made: Made, contiguous: bool) -> None:
    name = "lm_head.weight"
    whole = random_tensor((5, 4), torch.float32)
    target = {name: torch.full((32, 4), 7.0) if contiguous else torch.full((4, 32), 7.0).t()}
    load(target, made({name: whole}), shard=Shard(rank=0, ranks=2))
    assert torch.equal(target[name][:5], whole)
    assert not target[name][5:].any()


def test_parameters_in_a_mapping_are_filled_though_they_require_gradients(made: Made) -> None:
    name = "lm_head.weight"
    whole = random_tensor((5, 4), torch.float32)
    target = {name: nn.Parameter(torch.full((32, 4), 7.0))}
    load(target, made({name: whole}), shard=Shard(rank=0, ranks=2))
    assert torch.equal(target[name][:5], whole)
    assert not target[name][5:].any()
    assert target[name].requires_grad


def test_parameters_in_a_mapping_may_be_transposed(made: Made) -> None:
    target = {"a": nn.Parameter(torch.zeros(6, 4).t())}
    wanted = random_tensor((4, 6), torch.float32)
    load(target, made({"a": wanted}))
    assert torch.equal(target["a"], wanted)
    assert target["a"].requires_grad
    assert target["a"].is_leaf


def test_plain_memory_is_read_into_without_memory_between(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the memory of a model is what nobody has: only what does not lie in order takes the way round."""
    between: list[str] = []
    real = target_module.new_memory

    def noting(placements: list[Any]) -> Any:
        between.extend(placement.name for placement in placements)
        return real(placements)

    monkeypatch.setattr(target_module, "new_memory", noting)
    module = nn.Linear(6, 4)
    load(module, made({"weight": torch.ones(4, 6), "bias": torch.ones(4, dtype=torch.bfloat16)}))
    assert between == []
    load({"a": torch.zeros(3), "b": torch.zeros(2, 2).t()}, made({"a": torch.ones(3), "b": torch.ones(2, 2)}))
    assert between == ["b"]


def test_mapping_of_meta_tensors_is_not_left_without_values(made: Made) -> None:
    """A copy to the meta device does nothing and says nothing: these tensors are replaced, as in a module."""
    target = {"a": torch.empty(3, device="meta"), "b": torch.zeros(3)}
    source = {"a": random_tensor((3,), torch.float32), "b": random_tensor((3,), torch.float32, seed=1)}
    load(target, made(source))
    for name, tensor in source.items():
        assert_same(target[name], tensor, name)


def test_new_tensors_of_a_mapping_lie_apart(made: Made) -> None:
    """Each at a multiple of 64 bytes, so that no two share a line of the cache, and none overlaps another."""
    source = {f"t{number}": random_tensor((number,), torch.uint8, seed=number) for number in range(1, 130)}
    target: dict[str, torch.Tensor] = {}
    load(target, made(source))
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in target.values())
    assert all(address % 64 == 0 for address, _ in places)
    assert all(one + size <= two for (one, size), (two, _) in itertools.pairwise(places))
    for name, tensor in source.items():
        assert_same(target[name], tensor, name)
        target[name].zero_()
    assert not any(tensor.any() for tensor in target.values())
