"""Where the tensors of experts go in their banks, as data: patterns with named groups -> bank, part, row.

    model.layers.3.mlp.experts.17.up_proj.weight_scale
                 |             |  |       |
               layer      expert  projection, kind      "up weight_scale" -> bank gate_up_scale, row 17, second part

A layout has one pattern and a table of banks. A bank lists its parts in order, each named ``"projection kind"``; a
tensor without an expert in its name holds all experts along its first dimension. What ``ignore`` matches has no bank
(activation scales); any other tensor of the experts that the table does not know is an error that names it.

As JSON (``--experts-layout FILE.json``), the same words::

    {"pattern": "...", "ignore": "...",
     "banks": {"gate_up": {"parts": ["gate weight", "up weight"], "intermediate": 0}}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadmaster.errors import CheckpointError, InputError

__all__ = ["EXPERTS", "LAYOUTS", "Bank", "BankLayout", "layout_of", "read_layout"]

EXPERTS = ".experts."
"""What the name of every expert tensor holds, whatever its layout."""


@dataclass(frozen=True, kw_only=True)
class Bank:
    """One bank of a layer: ``[experts, rows of all parts, ...]``.

    Attributes
    ----------
    parts
        What is stacked along the rows, in order, as ``"projection kind"``.
    intermediate
        The dimension of one expert's part that tensor parallelism cuts: 0 rows, 1 columns, None not at all.
    halves
        A part is gate and up in one tensor, one after the other along its rows.
    interleaved
        As ``halves``, but gate and up rows alternate in the file; in the bank they are halves.
    scales
        The bank of the weights that this one scales in blocks, whose borders a rank's part has to keep.
    block
        Rows or columns of those weights that one scale along ``intermediate`` stands for.
    spread
        The parts are scalars, each spread over its rows of this other bank, as float16.
    reciprocal
        The bank holds one over the scalar.
    """

    parts: tuple[str, ...]
    intermediate: int | None = None
    halves: bool = False
    interleaved: bool = False
    scales: str = ""
    block: int = 1
    spread: str = ""
    reciprocal: bool = False


@dataclass(frozen=True, kw_only=True)
class BankLayout:
    """A pattern for the names of expert tensors, and the banks that they fill; see the module."""

    name: str
    pattern: str
    banks: Mapping[str, Bank]
    ignore: str = r"(?!)"
    _places: dict[str, tuple[str, int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for text in (self.pattern, self.ignore):
            try:
                groups = re.compile(text).groupindex
            except (re.error, OverflowError, RecursionError) as broken:
                raise InputError(f"experts layout {self.name!r}: {text!r} is no regular expression: {broken}") from None
            if text == self.pattern and not {"layer", "projection"} <= set(groups):
                raise InputError(f"experts layout {self.name!r}: the pattern needs the groups layer and projection")
        for name, bank in self.banks.items():
            for other in filter(None, (bank.spread, bank.scales)):
                if other not in self.banks or self.banks[other].spread or self.banks[other].scales:
                    raise InputError(
                        f"experts layout {self.name!r}: {name} goes by {other!r}, which is no bank of weights of it"
                    )
            if (bank.halves or bank.interleaved) and bank.intermediate == 1:
                raise InputError(
                    f"experts layout {self.name!r}: {name} has gate and up in its rows; no columns are cut"
                )
            for index, part in enumerate(bank.parts):
                if part in self._places:
                    raise InputError(f"experts layout {self.name!r}: {part!r} has two places")
                self._places[part] = (name, index)

    def place_of(self, projection: str, kind: str | None) -> tuple[str, int] | None:
        """Return bank and part of a projection's tensor, None where the table has none."""
        return self._places.get(f"{projection} {kind}" if kind else projection)


_LAYER = r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?experts\."
_GATE_UP_DOWN = _LAYER + r"(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\."


def _pair(gate: str, up: str, **options: Any) -> Bank:
    return Bank(parts=(gate, up), **options)


def _one(part: str, **options: Any) -> Bank:
    return Bank(parts=(part,), **options)


def _nvfp4(name: str, packed: str, scale: str, scalar: str, ignore: str, reciprocal: bool) -> BankLayout:
    return BankLayout(
        name=name,
        pattern=_GATE_UP_DOWN + rf"(?P<kind>{packed}|{scale}|{scalar})",
        ignore=_GATE_UP_DOWN.replace("?P<layer>", "?:").replace("?P<expert>", "?:") + ignore,
        banks={
            "gate_up_packed": _pair(f"gate {packed}", f"up {packed}", intermediate=0),
            "gate_up_scale": _pair(f"gate {scale}", f"up {scale}", intermediate=0),
            "gate_up_global": _pair(f"gate {scalar}", f"up {scalar}", spread="gate_up_packed", reciprocal=reciprocal),
            "down_packed": _one(f"down {packed}", intermediate=1),
            "down_scale": _one(f"down {scale}", intermediate=1),
            "down_global": _one(f"down {scalar}", spread="down_packed", reciprocal=reciprocal),
        },
    )


LAYOUTS: dict[str, BankLayout] = {
    layout.name: layout
    for layout in (
        # NVIDIA ModelOpt: two values a byte, a scale for 16 values, a scalar for each tensor.
        _nvfp4("nvfp4-modelopt", "weight", "weight_scale", "weight_scale_2", r"input_scale", False),
        # compressed-tensors stores the divisor where ModelOpt stores the factor.
        _nvfp4(
            "nvfp4-compressed-tensors",
            "weight_packed",
            "weight_scale",
            "weight_global_scale",
            r"input_global_scale",
            True,
        ),
        BankLayout(
            name="mxfp4-gpt-oss",
            pattern=_LAYER + r"(?P<projection>gate_up|down)_proj(?P<kind>_blocks|_scales|_bias)",
            banks={
                "gate_up_blocks": _one("gate_up _blocks", intermediate=0, interleaved=True),
                "gate_up_scales": _one("gate_up _scales", intermediate=0, interleaved=True),
                "gate_up_bias": _one("gate_up _bias", intermediate=0, interleaved=True),
                "down_blocks": _one("down _blocks", intermediate=1),
                "down_scales": _one("down _scales", intermediate=1),
                "down_bias": _one("down _bias"),
            },
        ),
        BankLayout(
            name="fp8-blocks",
            pattern=_GATE_UP_DOWN + r"(?P<kind>weight|weight_scale_inv)",
            banks={
                "gate_up": _pair("gate weight", "up weight", intermediate=0),
                "gate_up_scale": _pair(
                    "gate weight_scale_inv", "up weight_scale_inv", intermediate=0, scales="gate_up", block=128
                ),
                "down": _one("down weight", intermediate=1),
                "down_scale": _one("down weight_scale_inv", intermediate=1, scales="down", block=128),
            },
        ),
        BankLayout(
            name="per-expert",
            pattern=_GATE_UP_DOWN + r"(?P<kind>weight)",
            banks={
                "gate_up": _pair("gate weight", "up weight", intermediate=0),
                "down": _one("down weight", intermediate=1),
            },
        ),
        BankLayout(
            name="per-expert-mixtral",
            pattern=_LAYER + r"(?P<expert>\d+)\.(?P<projection>w1|w2|w3)\.(?P<kind>weight)",
            banks={
                "gate_up": _pair("w1 weight", "w3 weight", intermediate=0),
                "down": _one("w2 weight", intermediate=1),
            },
        ),
        BankLayout(
            name="fused",
            pattern=_LAYER + r"(?P<projection>gate_up|down)_proj",
            banks={
                "gate_up": _one("gate_up", intermediate=0, halves=True),
                "down": _one("down", intermediate=1),
            },
        ),
    )
}
"""The built-in layouts, by name. For the checkpoint formats: ModelOpt's and compressed-tensors' NVFP4 exports, and the
published checkpoints of gpt-oss, DeepSeek-V3, Qwen3-MoE and Mixtral."""


def layout_of(names: Iterable[str], path: str) -> BankLayout:
    """Return the built-in layout whose banks the expert tensors of the first layer fill.

    Raises
    ------
    CheckpointError
        There is none; names the first tensor that the nearest layout does not know, or the bank that stays empty.
    """
    experts = [name for name in names if EXPERTS in name]
    if not experts:
        raise CheckpointError(f"{path} has no expert tensors: no name holds {EXPERTS!r}")
    layer = experts[0][: experts[0].index(EXPERTS) + len(EXPERTS)]
    wanted = [name for name in experts if name.startswith(layer)]
    known, problem = -1, ""
    for layout in LAYOUTS.values():
        number, unknown, empty = _fit(layout, wanted)
        if not unknown and not empty:
            return layout
        if number > known:
            what = f"does not know {unknown!r}" if unknown else f"needs tensors for {empty}, and there are none"
            known, problem = number, f"the nearest, {layout.name!r}, {what}"
    raise CheckpointError(
        f"{path}: no built-in layout fits its expert tensors; {problem}; describe them with --experts-layout FILE.json"
    )


def _fit(layout: BankLayout, names: Iterable[str]) -> tuple[int, str, str]:
    """How many names the layout knows, the first that it does not, and the first bank that none of them fills."""
    match, ignored = re.compile(layout.pattern).fullmatch, re.compile(layout.ignore).fullmatch
    number, unknown, filled = 0, "", set()
    for name in names:
        found = match(name)
        place = found and layout.place_of(found["projection"], found.groupdict().get("kind"))
        if place:
            filled.add(place[0])
        if place or ignored(name):
            number += 1
        else:
            unknown = unknown or name
    return number, unknown, next((bank for bank in layout.banks if bank not in filled), "")


def read_layout(path: str | os.PathLike[str]) -> BankLayout:
    """Read a layout from a JSON file.

    Raises
    ------
    InputError
        The file cannot be read, or says something that is no layout; names what.
    """
    file = Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as refused:
        raise InputError(f"{file} cannot be read: {refused.strerror or refused}") from None
    except (ValueError, RecursionError) as broken:
        raise InputError(f"{file} is not valid JSON: {broken}") from None
    if not isinstance(document, dict) or not isinstance(document.get("banks"), dict) or not document["banks"]:
        raise InputError(f"{file} is no experts layout: it needs 'pattern' and a table of 'banks'")
    texts: dict[str, Any] = {"pattern": document.get("pattern"), "ignore": document.get("ignore", r"(?!)")}
    unknown = set(document) - {"pattern", "ignore", "banks", "name"}
    if unknown or not all(isinstance(text, str) for text in texts.values()):
        wrong = f"it has {sorted(unknown)[0]!r}" if unknown else "'pattern' and 'ignore' must be texts"
        raise InputError(f"{file} is no experts layout: {wrong}")
    banks = {name: _bank(file, name, row) for name, row in document["banks"].items()}
    return BankLayout(name=str(file), pattern=texts["pattern"], ignore=texts["ignore"], banks=banks)


_KINDS: dict[str, Any] = {
    "parts": lambda value: isinstance(value, list) and value and all(isinstance(part, str) for part in value),
    "intermediate": lambda value: value is None or (type(value) is int and value in (0, 1)),
    "halves": lambda value: isinstance(value, bool),
    "interleaved": lambda value: isinstance(value, bool),
    "scales": lambda value: isinstance(value, str),
    "block": lambda value: type(value) is int and value > 0,
    "spread": lambda value: isinstance(value, str),
    "reciprocal": lambda value: isinstance(value, bool),
}


def _bank(file: Path, name: str, row: Any) -> Bank:
    if not isinstance(row, dict) or "parts" not in row:
        raise InputError(f"{file}: bank {name!r} needs a list of 'parts'")
    for key, value in row.items():
        if key not in _KINDS or not _KINDS[key](value):
            raise InputError(f"{file}: bank {name!r}: {key} cannot be {value!r}")
    return Bank(**{**row, "parts": tuple(row["parts"])})
