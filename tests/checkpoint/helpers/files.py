"""Files to load: written by the safetensors library, or byte by byte where the library would refuse."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX_NAME = "model.safetensors.index.json"


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes of every value, the same for the same seed."""
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """A tensor of random values; floats are finite and not denormal, so that conversions are exact to compare."""
    if dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    count = 1
    for size in shape:
        count *= size
    bits = random_bytes(count * dtype.itemsize, seed)
    if dtype == torch.bool:
        bits = bits & 1
    return bits.view(dtype).reshape(shape)


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write one safetensors file with the library, and a ``config.json`` beside it; return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def write_raw(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with any header text, any data and any header length, right or wrong."""
    text = header.encode("utf-8") if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def described(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool = True) -> Path:
    """Write several files, and the index of them; return the folder."""
    for name, tensors in shards.items():
        write_file(folder / name, tensors)
    if index:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> Path:
    """Write an index with any map; return the index."""
    path = folder / INDEX_NAME
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def library_tensors(*files: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files, as the library gives them, in file order."""
    tensors = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                tensors[name] = file.get_tensor(name)
    return tensors


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in order, whatever its strides."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    """The same dtype, shape and bits (so that NaN equals itself and -0 is not 0)."""
    assert got.dtype == wanted.dtype, name
    assert tuple(got.shape) == tuple(wanted.shape), name
    assert bits_of(got) == bits_of(wanted), name


def assert_all_same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names in the same order, and the same tensors."""
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert_same(got[name], tensor, name)
