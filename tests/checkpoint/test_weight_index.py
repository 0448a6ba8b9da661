"""The index: the quick way says what the thorough one says, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.checkpoint.table import Entry, TensorTable
from loadmaster.checkpoint.weight_index import WeightMap, _parse_any, _parse_plain, check_index, parse_index
from loadmaster.errors import CheckpointError

INDEX = Path("folder/model.safetensors.index.json")
MAPS = st.dictionaries(
    st.text("ab.{},:é\n", max_size=4), st.sampled_from(["one", "two.safetensors", "sub/three"]), min_size=1
)


def as_dict(weight_map: WeightMap) -> dict[str, str]:
    return {name: weight_map.files[file] for name, file in zip(weight_map.names, weight_map.file, strict=True)}


@given(weight_map=MAPS, indent=st.sampled_from([None, 0, 2, "\t"]), first=st.booleans())
def test_an_index_is_read_as_json_reads_it(weight_map: dict[str, str], indent: Any, first: bool) -> None:
    rest = {"metadata": {"total_size": 3}}
    document: dict[str, Any] = {"weight_map": weight_map, **rest} if first else {**rest, "weight_map": weight_map}
    for ascii_only in (True, False):
        text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
        assert as_dict(parse_index(INDEX, text)) == weight_map
        quick = _parse_plain(text)
        if quick is None:
            assert is_unusual(weight_map)
        else:
            assert as_dict(quick) == weight_map


def is_unusual(weight_map: dict[str, str]) -> bool:
    """Whether a name is none that writers write: escaped or not ASCII, or with what ends the map in it."""
    return any(not name.isascii() or "}" in name or "\n" in name for name in weight_map)


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=400)
def test_a_mutated_index_is_read_as_json_reads_it_or_not_quickly(random: Random) -> None:
    text = bytearray(
        json.dumps({"m": 1, "weight_map": {"a": "x", "b.c": "y", "d": "x"}}, indent=random.choice([None, 1])).encode()
    )
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text))
        piece = random.choice(
            [
                b"",
                b'"',
                b",",
                b":",
                b" ",
                b"{",
                b"}",
                b"\n",
                b"\\",
                b"a",
                b"\x00",
                b'"a": "y",',
                bytes(text[at : at + 8]),
            ]
        )
        text[at : at + random.randint(0, 2)] = piece
    quick = _parse_plain(bytes(text))
    if quick is not None:
        assert as_dict(quick) == as_dict(_parse_any(INDEX, bytes(text)))


def test_what_writers_write_is_read_the_quick_way() -> None:
    text = json.dumps(
        {"metadata": {}, "weight_map": {f"layers.{n}.w": f"{n % 3}.safetensors" for n in range(50)}}, indent=2
    )
    assert _parse_plain(text.encode()) is not None


def test_a_name_given_twice_is_not_read_quickly() -> None:
    text = b'{"weight_map": {"a": "one", "a": "two"}}'
    assert _parse_plain(text) is None
    assert as_dict(parse_index(INDEX, text)) == {"a": "two"}  # as JSON has it


def tables() -> dict[str, TensorTable]:
    """Two files: a and b in one, c in the other."""
    rows = {"folder/one": ["a", "b"], "folder/two": ["c"]}
    return {
        file: TensorTable.of(file, [Entry(name, "U8", (1,), file, 10 + n, 1) for n, name in enumerate(names)])
        for file, names in rows.items()
    }


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one", "b": "one", "c": "two"}, ""),
        ({"c": "two", "a": "one"}, ""),  # b is more than the index names
        ({"a": "one", "b": "two", "c": "two"}, "names the tensor 'b' in two, and it is in folder/one"),
        ({"a": "one", "b": "one", "d": "two"}, "names the tensor 'd' in two, which does not hold it"),
    ],
)
def test_an_index_that_names_the_wrong_file_is_refused(weight_map: dict[str, str], message: str) -> None:
    parsed = parse_index(INDEX, json.dumps({"weight_map": weight_map}).encode())
    if not message:
        check_index(parsed, tables(), INDEX)
        return
    with pytest.raises(CheckpointError) as caught:
        check_index(parsed, tables(), INDEX)
    assert str(caught.value) == f"{INDEX} {message}"


def test_half_a_character_in_a_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="half of a surrogate pair"):
        parse_index(INDEX, b'{"weight_map": {"\\ud800": "one"}}')
