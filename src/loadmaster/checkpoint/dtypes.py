"""The element types of the safetensors format: their size in bits, and what torch calls them.

The names and sizes are those of the format's reference library (``Dtype`` of safetensors 0.8); torch packs two F4
elements into one ``float4_e2m1fn_x2``. U4 and I4 belong to the format's wider family: the reference library does not
write them, and torch has no ordinary storage type for them, so they open and are refused when they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loadmaster.errors import CheckpointError, InputError
from loadmaster.threads.importing import import_torch

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "SUB_BYTE_DTYPES",
    "Dtype",
    "import_torch",
    "item_bytes",
    "name_of_torch_dtype",
    "parse_dtype",
    "torch_dtype",
]


class Dtype(NamedTuple):
    """One element type: its bits in the file, its name in torch ("" where torch has none), whether it is a float."""

    bits: int
    torch_name: str
    floating: bool = False


DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, "bool"),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "U16": Dtype(16, "uint16"),
    "I16": Dtype(16, "int16"),
    "U32": Dtype(32, "uint32"),
    "I32": Dtype(32, "int32"),
    "U64": Dtype(64, "uint64"),
    "I64": Dtype(64, "int64"),
    "F16": Dtype(16, "float16", floating=True),
    "BF16": Dtype(16, "bfloat16", floating=True),
    "F32": Dtype(32, "float32", floating=True),
    "F64": Dtype(64, "float64", floating=True),
    "C64": Dtype(64, "complex64"),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F4": Dtype(4, "float4_e2m1fn_x2"),
    "U4": Dtype(4, ""),
    "I4": Dtype(4, ""),
    "F6_E2M3": Dtype(6, ""),
    "F6_E3M2": Dtype(6, ""),
}
"""``floating`` marks the plain floating-point types that a load may convert among; scaled 8-bit and 4-bit types carry
meaning only together with their scales and are never converted."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element in storage units of the safetensors dtype ``dtype`` (two F4 elements count as one)."""
    return max(1, DTYPES[dtype].bits >> 3)


SUB_BYTE_DTYPES = frozenset(name for name, dtype in DTYPES.items() if dtype.bits < 8)
"""Several of their elements share a byte."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the safetensors dtype ``name``.

    Raises
    ------
    CheckpointError
        The installed torch has no such dtype.
    """
    torch = import_torch()
    dtype = getattr(torch, DTYPES[name].torch_name, None) if DTYPES[name].torch_name else None
    if dtype is None:
        raise CheckpointError(f"dtype {name} has no counterpart in torch {torch.__version__}, so it cannot be read")
    return dtype  # type: ignore[no-any-return]


def parse_dtype(word: str) -> torch.dtype:
    """Return the plain floating-point dtype that ``word`` names as torch does, such as ``bfloat16``.

    Raises
    ------
    InputError
        It names none that tensors can be converted to.
    """
    names = {dtype.torch_name: name for name, dtype in DTYPES.items() if dtype.floating}
    if word not in names:
        raise InputError(f"dtype {word!r} is none that tensors can be converted to; these are {', '.join(names)}")
    return torch_dtype(names[word])


def name_of_torch_dtype(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype, such as ``BF16`` for ``torch.bfloat16``."""
    wanted = str(dtype).removeprefix("torch.")
    for name, known in DTYPES.items():
        if known.torch_name == wanted:
            return name
    raise CheckpointError(f"torch dtype {wanted} has no counterpart in the safetensors format")
