"""Compares loaded tensors, byte for byte, with what the `safetensors` library gives for the same slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.dtypes import SUB_BYTE_DTYPES, import_torch, torch_dtype
from loadmaster.checkpoint.folder import Checkpoint
from loadmaster.checkpoint.placement import Move, Placement
from loadmaster.errors import LoadmasterError, MissingDependencyError
from loadmaster.observe.report import Verified

if TYPE_CHECKING:
    import torch

__all__ = ["VerificationError", "verify_placements"]

CHUNK_BYTES = 64 << 20
"""The most that is taken from the reference at once."""


class VerificationError(LoadmasterError):
    """A loaded tensor differs from the reference; names the tensor and the first byte."""


def verify_placements(
    tensors: Mapping[str, torch.Tensor], checkpoint: Checkpoint, placements: Sequence[Placement]
) -> Verified:
    """Compare every placed byte of ``tensors``, padding included; return how much was compared.

    Raises
    ------
    VerificationError
        A byte differs.
    """
    num_bytes = 0
    files = _Reference()
    for placement in placements:
        tensor = tensors[placement.name]
        for moved, expected in _expected_parts(files, placement):
            _compare(placement, moved, tensor, expected)
        _compare_padding(placement, tensor)
        num_bytes += placement.num_bytes
    return Verified(len(placements), num_bytes)


class _Reference:
    """The safetensors library's view of the files, opened one at a time."""

    def __init__(self) -> None:
        try:
            from safetensors import safe_open
        except ModuleNotFoundError:
            raise MissingDependencyError(
                "safetensors is not installed, and verifying compares with it: pip install 'loadmaster[torch]'"
            ) from None
        self._safe_open = safe_open
        self._file = ""
        self._open: Any = None

    def of(self, file: str) -> Any:
        if file != self._file:
            self._open, self._file = self._safe_open(file, "pt"), file
        return self._open


def _expected_parts(files: _Reference, placement: Placement) -> Iterator[tuple[Move, torch.Tensor]]:
    """The reference's tensors for each move, in pieces of bounded size along the first dimension."""
    entry = placement.entry
    shape = entry.storage_shape
    try:
        reference = files.of(entry.file)
        if not shape:
            yield Move(0, 0, 1, 0), reference.get_tensor(entry.name)
            return
        # The library's slices of a sub-byte dtype count elements, and ours bytes.
        of_bytes = entry.dtype not in SUB_BYTE_DTYPES
        part = reference.get_slice(entry.name) if of_bytes else reference.get_tensor(entry.name)
        for move in placement.moves or (Move(0, 0, shape[0], 0),):
            if move.dim == 0:
                yield from _rows(part, move, placement)
            else:
                yield move, part[(slice(None),) * move.dim + (slice(move.start, move.stop),)]
    except LoadmasterError:
        raise
    except Exception as unreadable:  # the library has no common error for a file that has changed
        raise VerificationError(f"{entry.file} cannot be verified: {unreadable}") from None


def _rows(part: Any, move: Move, placement: Placement) -> Iterator[tuple[Move, torch.Tensor]]:
    shape = placement.entry.storage_shape
    row_bytes = max(1, placement.entry.num_bytes // max(1, shape[0]))
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(move.start, move.stop, rows):
        stop = min(move.stop, start + rows)
        yield Move(0, start, stop, move.at + start - move.start), part[start:stop]


def _compare(placement: Placement, move: Move, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    torch = import_torch()
    got = tensor.narrow(move.dim, move.at, move.stop - move.start) if placement.shape else tensor
    if placement.dtype != placement.entry.dtype:
        expected = expected.to(torch_dtype(placement.dtype))
    ours, theirs = _bytes_of(got), _bytes_of(expected)
    if torch.equal(ours, theirs):
        return
    where = int((ours != theirs).nonzero()[0]) if ours.shape == theirs.shape else 0
    raise VerificationError(
        f"tensor {placement.name!r} of {placement.entry.file} differs from the reference at byte {where} of {move}"
    )


def _compare_padding(placement: Placement, tensor: torch.Tensor) -> None:
    """Every byte that no move fills is zero."""
    if not placement.moves:
        return
    dim = placement.moves[0].dim
    end = 0
    for start, stop in [*sorted((move.at, move.at + move.stop - move.start) for move in placement.moves), (None, None)]:
        gap = tensor.narrow(dim, end, (placement.shape[dim] if start is None else start) - end)
        if gap.numel() and bool(_bytes_of(gap).any()):
            raise VerificationError(f"tensor {placement.name!r} of {placement.entry.file} is not zero in its padding")
        end = stop or end


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(import_torch().uint8)
