"""Element types: their sizes and torch names are those of the safetensors library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from loadmaster.checkpoint.dtypes import (
    DTYPES,
    import_torch,
    item_bytes,
    name_of_torch_dtype,
    parse_dtype,
    torch_dtype,
)
from loadmaster.errors import CheckpointError, InputError, MissingDependencyError

from .helpers.files import described, write_raw
from .helpers.headers import DELIBERATE_DTYPES, dump

WITHOUT_TORCH = {"U4", "I4", "F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("name", sorted(set(DTYPES) - set(DELIBERATE_DTYPES)))
def test_size_and_torch_dtype_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    """Eight elements of as many bits as the table says: the library opens it and gives a tensor of our torch dtype."""
    num_bytes = DTYPES[name].bits
    header = dump({}).replace("{}", f'{{"a": {dump_info(name, num_bytes)}}}')
    path = write_raw(tmp_path / "one.safetensors", header, bytes(num_bytes))
    with safe_open(path, "pt") as file:
        assert file.get_slice("a").get_dtype() == name
        if name in WITHOUT_TORCH:
            with pytest.raises(CheckpointError, match=f"dtype {name} has no counterpart"):
                torch_dtype(name)
            return
        tensor = file.get_tensor("a")
    assert tensor.dtype == torch_dtype(name)
    assert tensor.element_size() == item_bytes(name)
    assert name_of_torch_dtype(tensor.dtype) == name
    assert DTYPES[name].floating == (name in {"F16", "BF16", "F32", "F64"})


def dump_info(dtype: str, num_bytes: int) -> str:
    return str(described(dtype, [8], 0, num_bytes)).replace("'", '"')


@pytest.mark.parametrize("name", DELIBERATE_DTYPES)
def test_four_bit_integers_are_known_here_alone(tmp_path: Path, name: str) -> None:
    path = write_raw(tmp_path / "one.safetensors", f'{{"a": {dump_info(name, 4)}}}', bytes(4))
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    assert DTYPES[name].bits == 4
    with pytest.raises(CheckpointError, match=f"dtype {name} has no counterpart in torch"):
        torch_dtype(name)


def test_every_dtype_that_torch_can_save_has_a_name() -> None:
    """All of torch's dtypes that the library writes (its table of types) are known by the same name."""
    from safetensors.torch import _TYPES

    assert {name_of_torch_dtype(dtype): dtype for dtype in _TYPES.values()} == {
        name: dtype for name, dtype in _TYPES.items() if name in DTYPES
    }
    assert set(_TYPES) <= set(DTYPES)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.qint8])
def test_torch_dtype_that_no_file_can_hold(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"torch dtype {str(dtype).removeprefix('torch.')} has no counterpart"):
        name_of_torch_dtype(dtype)


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_dtype_by_its_torch_name(word: str, dtype: torch.dtype) -> None:
    assert parse_dtype(word) == dtype


@pytest.mark.parametrize("word", ["int8", "float8_e4m3fn", "BF16", "bf16", "", "torch.float32", "float"])
def test_word_that_names_no_dtype_to_convert_to(word: str) -> None:
    with pytest.raises(
        InputError, match=r"none that tensors can be converted to; these are float16, bfloat16"
    ) as caught:
        parse_dtype(word)
    assert repr(word) in str(caught.value)


def test_missing_torch_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_torch() is torch
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loadmaster\[torch\]'"):
        import_torch()


def test_torch_that_breaks_for_another_reason_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_module_that_torch_misses\n")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_torch_misses"):
        import_torch()
