"""Compares loaded tensors, byte for byte, with what the `safetensors` library gives for the same slices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.bank_layout import BankLayout
from loadmaster.checkpoint.dtypes import SUB_BYTE_DTYPES, import_torch, torch_dtype
from loadmaster.checkpoint.expert_plan import ExpertShard
from loadmaster.checkpoint.folder import Checkpoint
from loadmaster.checkpoint.placement import Move, Placement
from loadmaster.checkpoint.table import Entry
from loadmaster.errors import LoadmasterError, MissingDependencyError
from loadmaster.observe.report import Verified

if TYPE_CHECKING:
    import torch

__all__ = ["VerificationError", "verify_banks", "verify_placements"]

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


def verify_banks(
    banks: Mapping[int, Mapping[str, torch.Tensor]],
    checkpoint: Checkpoint,
    layout: BankLayout,
    shard: ExpertShard,
) -> Verified:
    """Compare every byte of ``banks`` with a plain implementation: whole tensors, torch's operations, expert by expert.

    Raises
    ------
    VerificationError
        A byte differs.
    """
    reference = _BankReference(checkpoint, layout, shard.tp_rank, shard.tp_ranks)
    number = num_bytes = 0
    for layer, of_layer in banks.items():
        experts = shard.experts(reference.number_of(layer), layer)
        for name, tensor in of_layer.items():
            where = f"bank {name} of layer {layer}"
            if tensor.shape[0] != len(experts):
                raise VerificationError(f"{where} holds {tensor.shape[0]} experts, not {len(experts)}")
            for row, expert in enumerate(experts):
                ours, theirs = _bytes_of(tensor[row]), _bytes_of(reference.row(layer, name, expert))
                if ours.shape != theirs.shape or bool((ours != theirs).any()):
                    raise VerificationError(f"{where} differs from the reference at expert {expert}")
            number += 1
            num_bytes += tensor.nbytes
    return Verified(number, num_bytes)


class _BankReference:
    """One expert's row of a bank, from the safetensors library's tensors."""

    def __init__(self, checkpoint: Checkpoint, layout: BankLayout, tp_rank: int, tp_ranks: int) -> None:
        self._files = _Reference()
        self._layout = layout
        self._tp_rank, self._tp_ranks = tp_rank, tp_ranks
        self._entries: dict[tuple[int, str, int | None], Entry] = {}
        for name, entry in checkpoint.items():
            found = re.fullmatch(layout.pattern, name)
            if found is not None:
                words = found.groupdict()
                part = " ".join(filter(None, (words["projection"], words.get("kind"))))
                expert = words.get("expert")
                self._entries[int(words["layer"]), part, None if expert is None else int(expert)] = entry

    def number_of(self, layer: int) -> int:
        """The number of experts of ``layer``."""
        keys = [key for key in self._entries if key[0] == layer]
        fused = [self._entries[key].shape[0] for key in keys if key[2] is None]
        return max([*fused, *(expert + 1 for _, _, expert in keys if expert is not None)])

    def row(self, layer: int, name: str, expert: int) -> torch.Tensor:
        """What bank ``name`` of ``layer`` should hold for ``expert``."""
        torch = import_torch()
        bank = self._layout.banks[name]
        if bank.spread:
            weight = self.row(layer, bank.spread, expert)
            scales = [self._part(layer, part, expert).float().reshape(()) for part in bank.parts]
            scales = [scale.reciprocal() if bank.reciprocal else scale for scale in scales]
            rows = weight.shape[0] // len(scales)
            return torch.cat([scale.half().expand(rows) for scale in scales])  # type: ignore[no-any-return]
        parts: list[Any] = []
        for part in bank.parts:
            tensor = self._part(layer, part, expert)
            if bank.interleaved:
                parts += [tensor[0::2], tensor[1::2]]
            else:
                parts += tensor.chunk(2) if bank.halves else [tensor]
        if bank.intermediate is not None:
            parts = [part.chunk(self._tp_ranks, bank.intermediate)[self._tp_rank] for part in parts]
        whole = [part.contiguous().view(torch.uint8) if part.element_size() == 1 else part for part in parts]
        return torch.cat(whole)  # type: ignore[no-any-return]

    def _part(self, layer: int, part: str, expert: int) -> torch.Tensor:
        alone = self._entries.get((layer, part, expert))
        entry = alone or self._entries[layer, part, None]
        try:
            file = self._files.of(entry.file)
            return file.get_tensor(entry.name) if alone else file.get_slice(entry.name)[expert]  # type: ignore[no-any-return]
        except Exception as unreadable:  # the library has no common error for a file that has changed
            raise VerificationError(f"{entry.file} cannot be verified: {unreadable}") from None


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
