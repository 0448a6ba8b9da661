"""Headers as documents that can hold what no JSON writer writes: keys given twice, ``-0``, ``NaN``, half surrogates.

valid model --mutate one or more times--> model --text_of--> header text, data --write_raw--> file
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element of every dtype of the format, from its reference library's list."""

DELIBERATE_DTYPES = ("U4", "I4")
"""Dtypes that open here and that the library does not know."""

MANY = 1 << 64


class Raw(str):
    """Text that goes into the document as it is."""


class Pairs(list[tuple[Any, Any]]):
    """An object whose keys may repeat."""


@dataclass
class Model:
    """A header and its data; ``tensors`` is a list of name and description."""

    tensors: Pairs
    metadata: Any = None
    data_bytes: int = 0
    before: str = ""
    after: str = ""
    length_change: int = 0
    length: int | None = None
    edits: list[tuple[int, bytes, int]] = field(default_factory=list)

    @property
    def text(self) -> bytes:
        """The header's bytes, byte-level edits applied."""
        document = Pairs(self.tensors)
        if self.metadata is not None:
            document.insert(0, ("__metadata__", self.metadata))
        text = (self.before + dump(document) + self.after).encode("utf-8", "surrogatepass")
        for position, replacement, removed in self.edits:
            at = position % (len(text) + 1)
            text = text[:at] + replacement + text[at + removed :]
        return text

    @property
    def header_length(self) -> int:
        """What the first 8 bytes say."""
        true = len(self.text) + self.length_change
        return max(0, true) if self.length is None else self.length

    @property
    def data(self) -> bytes:
        """Data in which neighbouring tensors differ."""
        return bytes(index * 7 % 251 for index in range(self.data_bytes))


def dump(value: Any) -> str:
    """JSON text of a value that may hold `Raw` and `Pairs`."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


NAMES = ("model.layers.0.mlp.down_proj.weight", "a", "b", "", "é", "😀", '"', "\\", "\x00", "\x7f", "__metadata", "-0")
SIZES = (0, 1, 1, 2, 3, 4, 8, 16, 64)


def right_model(random: Random) -> Model:
    """A header that is right: tensors in a row, without a hole, in any order of the document."""
    tensors, end = Pairs(), 0
    for name in random.sample(NAMES, random.randint(0, 4)):
        dtype = random.choice(list(BITS))
        shape = random.choices(SIZES, k=random.randint(0, 3))
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8:
            shape, bits = [*shape, 4], bits * 4
        begin, end = end, end + bits // 8
        tensors.append((name, Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])])))
    random.shuffle(tensors)
    model = Model(tensors, data_bytes=end)
    if random.random() < 0.3:
        model.metadata = Pairs(zip(random.sample(NAMES, 2), random.sample(NAMES, 2), strict=True))
    return model


STRANGE: tuple[Any, ...] = (
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("-0"), Raw("-1"), Raw("0.0"), Raw("1e0"), Raw("1E+2"),
    Raw("1e999"), Raw("-1e400"), Raw("1e-999"), Raw("01"), Raw("1."), Raw(".5"), Raw("9" * 30), Raw("9" * 400),
    Raw("9" * 5000), Raw("-"), Raw("nul"), Raw("'a'"), Raw('"\\ud800"'), Raw('"\\ude00\\ud83d"'), Raw('"\\ud83d"'),
    Raw('"\\ud83d\\ude00"'), Raw('"\t"'), Raw('"\\x41"'), Raw('"\ud800"'), Raw("[1,]"), Raw("{,}"), Raw('{"a":1,}'),
    MANY, MANY - 1, MANY // 2, 1 << 63, -1, 0, 1, 2, 1.5, True, False, None, "", "U8", "u8", [], [0], [1, 2],
    [[1], 1 << 62], ["ab", 1 << 62], [{}, 2], [1 << 62, "ab"], Pairs([("a", 1), ("b", "c")]),
)  # fmt: skip
DEPTHS = (1, 2, 60, 61, 62, 63, 64, 120, 123, 124, 125, 126, 127, 128, 129, 990, 5000, 100_000)
SHAPES: tuple[list[int], ...] = (
    [], [0], [1], [3], [2, 3], [1, 1, 1, 1], [1 << 32, 1 << 32], [1 << 32, 1 << 32, 0], [0, 1 << 32, 1 << 32],
    [MANY - 1, 0], [MANY - 1], [0, MANY - 1], [1 << 61, 0], [0, 1 << 61], [1 << 61], [1 << 63, 2], [3, 1 << 63],
)  # fmt: skip


def _strange(random: Random) -> Any:
    """A value that has no place in a header, or only in some places."""
    kind = random.random()
    if kind < 0.1:
        depth = random.choice(DEPTHS)
        return Raw("[" * depth + "]" * depth)
    if kind < 0.2:
        depth = random.choice(DEPTHS)
        return Raw('{"a":' * depth + "0" + "}" * depth)
    return random.choice(STRANGE)


def _tensor(random: Random, model: Model) -> Pairs:
    """The description of a tensor; an empty one where none is an object any more."""
    return random.choice([info for _, info in model.tensors if isinstance(info, Pairs)] or [Pairs()])


def _set_field(random: Random, model: Model) -> None:
    """Give a field another value, or add one that the format does not know."""
    info, key = _tensor(random, model), random.choice(["dtype", "shape", "data_offsets", "extra"])
    info[:] = [*(pair for pair in info if pair[0] != key), (key, _strange(random))]


def _drop_field(random: Random, model: Model) -> None:
    info = _tensor(random, model)
    if info:
        info.pop(random.randrange(len(info)))


def _repeat_field(random: Random, model: Model) -> None:
    info = _tensor(random, model)
    if info:
        info.append(random.choice(info))


def _set_number(random: Random, model: Model) -> None:
    """Change one number of a shape or of the offsets, a little or a lot."""
    info = _tensor(random, model)
    for index, (key, value) in enumerate(info):
        if key in ("shape", "data_offsets") and isinstance(value, list) and value and random.random() < 0.5:
            place = random.randrange(len(value))
            number = value[place] if isinstance(value[place], int) else 0
            other = number + random.randint(-2, 2) if random.random() < 0.5 else _strange(random)
            info[index] = (key, [*value[:place], other, *value[place + 1 :]])


def _change_shape(random: Random, model: Model) -> None:
    info, shape = _tensor(random, model), random.choice(SHAPES)
    info[:] = [(key, shape if key == "shape" else value) for key, value in info]


def _permute_shape(random: Random, model: Model) -> None:
    info = _tensor(random, model)
    for index, (key, value) in enumerate(info):
        if key == "shape" and isinstance(value, list):
            info[index] = (key, random.sample(value, len(value)) + random.choice([[], [1], [0]]))


def _change_dtype(random: Random, model: Model) -> None:
    info, dtype = _tensor(random, model), random.choice([*BITS, *DELIBERATE_DTYPES, "F128", "BF16 ", "", "F4_E2M1"])
    info[:] = [(key, dtype if key == "dtype" else value) for key, value in info]


def _shuffle_offsets(random: Random, model: Model) -> None:
    """Give the tensors each other's offsets, or turn some pairs of them around."""
    infos = [info for _, info in model.tensors if isinstance(info, Pairs) and "data_offsets" in dict(info)]
    offsets = [dict(info)["data_offsets"] for info in infos]
    if random.random() < 0.5:
        random.shuffle(offsets)
    else:
        offsets = [pair[::-1] if isinstance(pair, list) and random.random() < 0.5 else pair for pair in offsets]
    for info, pair in zip(infos, offsets, strict=True):
        info[:] = [(key, pair if key == "data_offsets" else value) for key, value in info]


def _shift_offsets(random: Random, model: Model) -> None:
    """Move a tensor, which leaves a hole, an overlap, or bytes that nobody owns."""
    info, shift = _tensor(random, model), random.randint(-3, 3)
    for index, (key, value) in enumerate(info):
        if key == "data_offsets" and isinstance(value, list) and all(isinstance(number, int) for number in value):
            info[index] = (key, [number + shift for number in value])


def _replace_tensor(random: Random, model: Model) -> None:
    if model.tensors:
        index = random.randrange(len(model.tensors))
        model.tensors[index] = (model.tensors[index][0], _strange(random))


def _rename_tensor(random: Random, model: Model) -> None:
    if model.tensors:
        index = random.randrange(len(model.tensors))
        other = random.choice([*(name for name, _ in model.tensors), "__metadata__", Raw('"\\ud800"'), Raw("1")])
        model.tensors[index] = (other, model.tensors[index][1])


def _add_empty_tensor(random: Random, model: Model) -> None:
    """A tensor of no bytes anywhere: at the begin, at a border, inside another one, behind the end."""
    place = random.randint(0, model.data_bytes + 1)
    info = Pairs([("dtype", "F32"), ("shape", [0]), ("data_offsets", [place, place])])
    model.tensors.insert(random.randint(0, len(model.tensors)), ("empty", info))


def _change_metadata(random: Random, model: Model) -> None:
    key = random.choice([*NAMES, Raw('"\\ud800"')])
    model.metadata = _strange(random) if random.random() < 0.5 else Pairs([(key, _strange(random))])


def _replace_document(random: Random, model: Model) -> None:
    model.before, model.after = random.choice([("[", "]"), ('"', '"'), ("", "[]"), ("null", ""), ("7 ", "")])
    if random.random() < 0.5:
        model.tensors, model.metadata = Pairs(), None


def _change_ends(random: Random, model: Model) -> None:
    pieces = ("", " ", "  \n", "\t\r", "\0", "}", "{", "\ufeff", "\u00a0", "{}", ",")
    model.before, model.after = random.choice(pieces), random.choice(pieces)


def _change_data(random: Random, model: Model) -> None:
    model.data_bytes = max(0, model.data_bytes + random.randint(-4, 4))


def _change_length(random: Random, model: Model) -> None:
    if random.random() < 0.5:
        model.length_change = random.randint(-9, 9)
    else:
        model.length = random.choice([0, 1, 2, 100_000_000, 100_000_001, 1 << 32, 1 << 63, MANY - 1])


def _edit_bytes(random: Random, model: Model) -> None:
    new = random.choice([random.randbytes(random.randint(0, 2)), *(bytes([letter]) for letter in b'"{}[],:09- ')])
    model.edits.append((random.randint(0, 400), new, random.randint(0, 2)))


MUTATIONS: tuple[Callable[[Random, Model], None], ...] = (
    _set_field, _drop_field, _repeat_field, _set_number, _change_shape, _permute_shape, _change_dtype, _shuffle_offsets,
    _shift_offsets, _replace_tensor, _rename_tensor, _add_empty_tensor, _change_metadata, _replace_document,
    _change_ends, _change_data, _change_length, _edit_bytes,
)  # fmt: skip


def mutated_model(random: Random) -> Model:
    """A header that was right before one to three mutations; some still are."""
    model = right_model(random)
    for mutate in random.choices(MUTATIONS, k=random.choice([1, 1, 2, 3])):
        mutate(random, model)
    return model


def differs_on_purpose(text: bytes) -> bool:
    """Whether a header is one of those that the module's docstring names as handled otherwise than by the library."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        if len(set(keys)) != len(keys):
            repeated.append("a key")
        return dict(items)

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return False
    if repeated:
        return True
    infos = list(document.values()) if isinstance(document, dict) else []
    return any(
        isinstance(info, list)
        or (isinstance(info, dict) and (isinstance(info.get("dtype"), dict) or info.get("dtype") in DELIBERATE_DTYPES))
        for info in infos
    )
