"""Other people's readers as arms of `bench load`, where they are installed: what each offers, and its loop in a rank.

safetensors-pread        the safetensors library reads into memory of the tensor, instead of mapping the file
fastsafetensors          whole files into a buffer, tensors that look into it
runai-model-streamer     threads fill a buffer, tensors come as they are there

All do the same work as our reader: every tensor, or its slices, is in memory that the process owns and has touched.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.checkpoint.dtypes import import_torch, torch_dtype
from loadmaster.checkpoint.placement import Placement

__all__ = ["LIBRARIES", "Library", "copy_slices", "empty_tensor", "is_importable"]

Tensors = dict[str, Any]


def is_importable(module: str) -> bool:
    """Whether a module is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


@functools.cache
def safetensors_has_pread() -> bool:
    """Whether the installed safetensors library reads with ``pread`` when asked to; tried on a file without tensors."""
    if not is_importable("safetensors"):
        return False
    from safetensors import SafetensorError, safe_open

    with tempfile.TemporaryDirectory(prefix="loadmaster-backends-") as folder:
        path = Path(folder, "empty.safetensors")
        path.write_bytes((2).to_bytes(8, "little") + b"{}")
        try:
            with safe_open(path, "np", backend="pread"):
                return True
        except (TypeError, SafetensorError):  # no such argument, no such backend
            return False


@dataclass(frozen=True, kw_only=True)
class Library:
    """One library: whether it is there, and how it fills placements.

    ``load`` returns the tensors, and what must live as long as they do.
    """

    what: str
    is_there: Callable[[], bool]
    load: Callable[[Sequence[Placement]], tuple[Tensors, Any]]


def empty_tensor(placement: Placement) -> Any:
    """A tensor of the placement's shape, not yet filled."""
    return import_torch().empty(placement.shape, dtype=torch_dtype(placement.dtype))


def copy_slices(placement: Placement, whole: Callable[[], Any], part: Callable[[], Any], tensor: Any) -> None:
    """Fill ``tensor``: with all of ``whole()``, or with the slices of ``part()`` that the placement moves."""
    if not placement.moves:
        tensor.copy_(whole().reshape(placement.shape))
        return
    if any(placement.shape[move.dim] > move.at + move.stop - move.start for move in placement.moves[-1:]):
        tensor.zero_()
    for move in placement.moves:
        index = (slice(None),) * move.dim + (slice(move.start, move.stop),)
        tensor.narrow(move.dim, move.at, move.stop - move.start).copy_(part()[index])


def _by_file(placements: Sequence[Placement]) -> Mapping[str, list[Placement]]:
    files: dict[str, list[Placement]] = {}
    for placement in placements:
        files.setdefault(placement.entry.file, []).append(placement)
    return files


def _load_pread(placements: Sequence[Placement]) -> tuple[Tensors, None]:
    """What the library gives is in memory of its own already: only what must be put together is copied."""
    from safetensors import safe_open

    tensors: Tensors = {}
    for file, here in _by_file(placements).items():
        opened = safe_open(file, "pt", backend="pread")
        for placement in here:
            tensors[placement.name] = _read_with_pread(placement, opened)
    return tensors, None


def _read_with_pread(placement: Placement, opened: Any) -> Any:
    name = placement.entry.name
    if not placement.moves:
        return opened.get_tensor(name).reshape(placement.shape)
    (move, *more) = placement.moves
    if not more and move.at == 0 and move.stop - move.start == placement.shape[move.dim]:
        part = opened.get_slice(name)[(slice(None),) * move.dim + (slice(move.start, move.stop),)]
        if part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes:
            return part
    tensor = empty_tensor(placement)
    copy_slices(placement, lambda: opened.get_tensor(name), lambda: opened.get_slice(name), tensor)
    return tensor


def _load_fastsafetensors(placements: Sequence[Placement]) -> tuple[Tensors, Any]:
    """Whole tensors stay in the buffer of their file, which lives on with them; slices are copied out of it."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    tensors: Tensors = {}
    kept: list[Any] = []
    for file, here in _by_file(placements).items():
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [file]})
        buffer = loader.copy_files_to_device()
        for placement in here:
            whole = buffer.get_tensor(placement.entry.name)
            if placement.moves:
                tensor = empty_tensor(placement)
                copy_slices(placement, lambda tensor=whole: tensor, lambda tensor=whole: tensor, tensor)  # type: ignore[misc]
                whole = tensor
            tensors[placement.name] = whole.reshape(placement.shape)
        if any(not placement.moves for placement in here):
            kept += [loader, buffer]
        else:
            buffer.close()
            loader.close()
    return tensors, kept


def _load_runai(placements: Sequence[Placement]) -> tuple[Tensors, None]:
    """A tensor is copied as it comes: the streamer uses its buffer again."""
    from runai_model_streamer import SafetensorsStreamer

    tensors: Tensors = {}
    wanted = {(file, placement.entry.name): placement for file, of in _by_file(placements).items() for placement in of}
    files: Iterator[str] = iter(_by_file(placements))
    for file in files:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([file])
            for name, whole in streamer.get_tensors():
                placement = wanted.get((file, name))
                if placement is None:
                    continue
                tensor = empty_tensor(placement)
                shaped = whole.reshape(placement.entry.storage_shape)
                copy_slices(placement, lambda tensor=shaped: tensor, lambda tensor=shaped: tensor, tensor)  # type: ignore[misc]
                tensors[placement.name] = tensor
    return tensors, None


LIBRARIES = {
    "safetensors-pread": Library(
        what="safe_open(backend='pread'), its tensors as they come",
        is_there=safetensors_has_pread,
        load=_load_pread,
    ),
    "fastsafetensors": Library(
        what="fastsafetensors, whole files into buffers, slices copied",
        is_there=lambda: is_importable("fastsafetensors"),
        load=_load_fastsafetensors,
    ),
    "runai-model-streamer": Library(
        what="runai-model-streamer, tensors copied as they come",
        is_there=lambda: is_importable("runai_model_streamer"),
        load=_load_runai,
    ),
}
