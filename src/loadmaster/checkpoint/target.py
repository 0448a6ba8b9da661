"""Where a load puts its tensors: new memory, a mapping's tensors, or the parameters and buffers of a module."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.dtypes import import_torch, name_of_torch_dtype, torch_dtype
from loadmaster.checkpoint.memory import ALIGNMENT, Arena
from loadmaster.checkpoint.pieces import Destinations
from loadmaster.checkpoint.placement import Placement, check_dtype, covered_bytes
from loadmaster.errors import CheckpointError, InputError, PlacementError

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "new_memory", "target_of"]


class Target:
    """Placements with the memory that each goes to; ``hand_out`` gives the tensors away once all are complete."""

    def __init__(self, placements: Sequence[Placement], existing: Mapping[str, torch.Tensor]) -> None:
        self.placements = placements
        fresh = [placement for placement in placements if placement.name not in existing] if existing else placements
        self.tensors, self.destinations = new_memory(fresh)
        if existing:
            made = iter(zip(self.destinations.buffers, self.destinations.offsets, strict=True))
            places = [
                _in_place(placement, existing[placement.name]) if placement.name in existing else next(made)
                for placement in placements
            ]
            self.destinations = Destinations([buffer for buffer, _ in places], [offset for _, offset in places])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(placement.num_bytes for placement in self.placements)

    def hand_out(self) -> None:
        """Give the complete tensors to whom they were loaded for."""


def _in_place(placement: Placement, tensor: torch.Tensor) -> tuple[memoryview, int]:
    """The memory of an existing tensor, zeroed where the placement does not cover it all."""
    if covered_bytes(placement) < placement.num_bytes:
        tensor.detach().zero_()
    return memoryview(_bytes_of(tensor)), 0


def new_memory(placements: Sequence[Placement]) -> tuple[dict[str, torch.Tensor], Destinations]:
    """Lay the tensors out in one arena, in order, each at a multiple of 64 bytes; return them and their places."""
    _check_dtypes(placements)
    sizes = [-(-placement.num_bytes // ALIGNMENT) * ALIGNMENT for placement in placements]
    offsets = list(itertools.accumulate(sizes, initial=0))
    arena = Arena(offsets.pop())
    make = arena.tensor
    tensors = {
        placement.name: make(offset, placement.dtype, placement.shape)
        for placement, offset in zip(placements, offsets, strict=True)
    }
    return tensors, Destinations([arena.buffer] * len(offsets), offsets)


def _check_dtypes(placements: Sequence[Placement]) -> None:
    """Name the first tensor whose dtype the installed torch does not have."""
    for dtype in {placement.dtype for placement in placements}:
        try:
            torch_dtype(dtype)
        except CheckpointError as unknown:
            first = next(placement for placement in placements if placement.dtype == dtype)
            raise CheckpointError(f"{first.entry.file}: tensor {first.name!r}: {unknown}") from None


class _NewMapping(Target):
    def __init__(self, mapping: MutableMapping[str, torch.Tensor], placements: Sequence[Placement]) -> None:
        super().__init__(placements, {})
        self._mapping = mapping

    def hand_out(self) -> None:
        self._mapping.update(self.tensors)


class _Filled(Target):
    """Tensors that exist: in plain memory they are filled in place, elsewhere by a copy; on meta they are replaced."""

    def __init__(self, state: Mapping[str, torch.Tensor], placements: Sequence[Placement]) -> None:
        self._state = state
        placements = [_fitted(placement, state[placement.name]) for placement in placements]
        direct = {
            placement.name: state[placement.name]
            for placement in placements
            if _is_plain_memory(state[placement.name]) and placement.num_bytes
        }
        super().__init__(placements, direct)

    def hand_out(self) -> None:
        torch = import_torch()
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if self._state[name].is_meta:
                    self._replace(name, tensor)
                else:
                    self._state[name].copy_(tensor)

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        """Put a new tensor where one without memory was."""
        assert isinstance(self._state, MutableMapping)
        self._state[name] = tensor


class _Module(_Filled):
    """The parameters and buffers of a module; a tied one is replaced under all its names."""

    def __init__(self, module: torch.nn.Module, placements: Sequence[Placement]) -> None:
        super().__init__(_state_of(module), placements)
        self._module = module

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        torch = import_torch()
        old = self._state[name]
        new = torch.nn.Parameter(tensor, old.requires_grad) if isinstance(old, torch.nn.Parameter) else tensor
        for tied, other in self._state.items():
            if other is old:
                owner, _, leaf = tied.rpartition(".")
                setattr(self._module.get_submodule(owner), leaf, new)


def target_of(target: torch.nn.Module | MutableMapping[str, torch.Tensor], placements: Sequence[Placement]) -> Target:
    """Return the `Target` for what a caller of ``load`` gave, names and shapes checked.

    Raises
    ------
    PlacementError
        A name that only the target or only the checkpoint has, or another shape.
    """
    if isinstance(target, MutableMapping):
        if not target:
            return _NewMapping(target, placements)
        _check_names(dict(target), placements)
        return _Filled(target, placements)
    torch = import_torch()
    if isinstance(target, torch.nn.Module):
        _check_names(_state_of(target), placements)
        return _Module(target, placements)
    raise InputError(f"the target must be a torch module or a mutable mapping of tensors, not {type(target).__name__}")


def _state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True)


def _check_names(state: Mapping[str, torch.Tensor], placements: Sequence[Placement]) -> None:
    """Every name on both sides; a tied tensor counts as given when it is given under its other name."""
    names = {placement.name for placement in placements}
    given = {id(tensor) for name, tensor in state.items() if name in names}
    missing = [name for name, tensor in state.items() if name not in names and id(tensor) not in given]
    unexpected = [name for name in names if name not in state]
    if missing:
        raise PlacementError(f"the checkpoint has no tensor for {_some(missing)} of the target")
    if unexpected:
        raise PlacementError(f"the target has no place for {_some(sorted(unexpected))} of the checkpoint")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _fitted(placement: Placement, tensor: torch.Tensor) -> Placement:
    """The placement with the dtype of an existing tensor, whose shape must be the placement's."""
    if tuple(tensor.shape) != tuple(placement.shape):
        raise PlacementError(
            f"tensor {placement.name!r} has the shape {list(placement.shape)} in the checkpoint "
            f"and {list(tensor.shape)} in the target"
        )
    try:
        fitted = placement._replace(dtype=name_of_torch_dtype(tensor.dtype))
    except CheckpointError as unknown:
        raise PlacementError(f"tensor {placement.name!r} of the target: {unknown}") from None
    check_dtype(fitted)
    return fitted


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    torch = import_torch()
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.layout == torch.strided)


def _bytes_of(tensor: torch.Tensor) -> Any:
    torch = import_torch()
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return flat.view(torch.uint8).numpy()
