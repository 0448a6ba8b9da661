"""Compares fetched weights byte for byte with what the library of their format reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from loadmaster.checkpoint.dtypes import import_torch
from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.load import place
from loadmaster.checkpoint.verify import VerificationError, verify_placements
from loadmaster.fetch.dcp import is_dcp
from loadmaster.fetch.weights import Weights
from loadmaster.observe.report import Verified

__all__ = ["verify_weights"]

REFERENCE_BYTES = 1 << 30
"""The most that is loaded for comparison at once, tensors that are larger apart."""


def verify_weights(weights: Weights, path: str) -> Verified:
    """Compare every byte of ``weights`` with what safetensors or torch.distributed.checkpoint read from ``path``.

    Raises
    ------
    VerificationError
        Names the first tensor that differs.
    """
    try:
        return _verify_dcp(weights, path) if is_dcp(path) else _verify_safetensors(weights, path)
    except VerificationError as differs:
        raise differs.with_traceback(None) from None  # the frames of the traceback would keep tensors in use


def _verify_safetensors(weights: Weights, path: str) -> Verified:
    checkpoint = open_checkpoint(path)
    return verify_placements(weights, checkpoint, place(checkpoint, None, None))


def _verify_dcp(weights: Weights, folder: str) -> Verified:
    """Compare every byte with what torch's own load of the folder gives."""
    torch = import_torch()
    for names in _batches(weights):
        expected = _load_dcp(folder, {name: torch.empty_like(weights[name]) for name in names})
        for name, wanted in expected.items():
            ours, theirs = (one.contiguous().reshape(-1).view(torch.uint8) for one in (weights[name], wanted))
            if not torch.equal(ours, theirs):
                where = int((ours != theirs).nonzero()[0])
                raise VerificationError(f"tensor {name!r} of {folder} differs from the reference at byte {where}")
    return Verified(len(weights), weights.report.num_bytes)


def _load_dcp(folder: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Fill ``tensors`` as torch.distributed.checkpoint does without a process group."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = dict(tensors)
    try:
        with warnings.catch_warnings():  # torch warns that there is no process group, and none is wanted
            warnings.simplefilter("ignore")
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except Exception as unreadable:  # torch has no common error for a folder that has changed
        told = " ".join(str(unreadable).split())
        raise VerificationError(f"{folder} cannot be verified: {told}") from None
    return state


def _batches(weights: Weights) -> Iterator[list[str]]:
    """The names, in parts of bounded size."""
    names: list[str] = []
    held = 0
    for name in weights:
        num_bytes = weights[name].nbytes
        if names and held + num_bytes > REFERENCE_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += num_bytes
    if names:
        yield names
