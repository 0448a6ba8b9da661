"""The header: what the safetensors library accepts is accepted with the same values, what it rejects is rejected."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save_file

from loadmaster.checkpoint.folder import open_checkpoint
from loadmaster.checkpoint.plain_header import parse_plain
from loadmaster.checkpoint.safetensors import MAX_HEADER_BYTES, FileIdentity, _parse_any, read_header
from loadmaster.errors import CheckpointError

from .helpers.files import described, random_tensor, write_file, write_raw
from .helpers.headers import Model, Pairs, Raw, differs_on_purpose, dump, mutated_model, right_model
from .helpers.waiting import in_time

Rows = dict[str, tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that every example of a property writes anew."""
    return tmp_path_factory.mktemp("headers") / "model.safetensors"


def library_says(path: Path) -> tuple[Rows, dict[str, str], list[str]] | None:
    """Names with dtype and shape, metadata and the order of the file, or None where the library rejects the file."""
    try:
        with safe_open(path, "pt") as file:
            rows = {}
            for name in file.keys():  # noqa: SIM118 - the library's file is no mapping
                part = file.get_slice(name)
                rows[name] = (part.get_dtype(), tuple(part.get_shape()))
            return rows, file.metadata() or {}, list(file.offset_keys())
    except SafetensorError:
        return None


def check_against_library(path: Path) -> bool:
    """Compare both readers on one file; whether it was accepted."""
    library = library_says(path)
    if library is None:
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value).replace(str(path), "")
        return False
    header = read_header(path)
    rows, metadata, _ = library
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.tensors.entries()} == rows
    assert header.metadata == metadata
    whole = path.read_bytes()
    data = {name: bytes(info["data"]) for name, info in deserialize(whole)}
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for entry in header.tensors.entries():
        assert entry.file == str(path)
        assert whole[entry.offset : entry.offset + entry.num_bytes] == data[entry.name]
        assert entry.num_bytes == len(data[entry.name])
        assert entry.offset == end, "entries come in the order of their bytes, without a hole"
        end += entry.num_bytes
    assert end == len(whole)
    return True


def written(path: Path, model: Model) -> Path:
    return write_raw(path, model.text, model.data, model.header_length)


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=300)
def test_accepts_every_right_file_with_the_values_of_the_library(scratch: Path, random: Random) -> None:
    assert check_against_library(written(scratch, right_model(random)))


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=2500)
def test_rejects_exactly_what_the_library_rejects(scratch: Path, random: Random) -> None:
    model = mutated_model(random)
    note(model)
    if not differs_on_purpose(model.text):
        check_against_library(written(scratch, model))


def one_tensor(*more: tuple[Any, Any], shape: Any = None, offsets: Any = None) -> str:
    """Two bytes of data in one tensor, with further fields or other values."""
    fields = [("dtype", "U8"), ("shape", shape or [2]), ("data_offsets", offsets or [0, 2]), *more]
    return dump(Pairs([("a", Pairs(fields))]))


# Found by the property above; each is where Python's JSON and that of the library part.
@pytest.mark.parametrize(
    "header",
    [
        pytest.param(one_tensor(("extra", Raw('"\\ud800"'))), id="half a surrogate in a foreign field"),
        pytest.param(one_tensor(("extra", Raw('"\\ud83d\\ude00"'))), id="a whole surrogate pair"),
        pytest.param(one_tensor((Raw('"\\ud800"'), 1)), id="half a surrogate as a foreign key"),
        pytest.param(
            one_tensor(("extra", 1)).replace("{", '{"__metadata__":{"a":"\\ud800"},', 1),
            id="half a surrogate in the metadata",
        ),
        pytest.param(
            one_tensor(("extra", 1)).replace("{", '{"__metadata__":{"\\ud800":"a"},', 1),
            id="half a surrogate as a key of the metadata",
        ),
        pytest.param(one_tensor(("extra", Raw("[" * 125 + "]" * 125))), id="nested as deep as allowed"),
        pytest.param(one_tensor(("extra", Raw("[" * 126 + "]" * 126))), id="nested too deep"),
        pytest.param(one_tensor(("extra", Raw("1e999"))), id="a number beyond a double"),
        pytest.param(one_tensor(("extra", Raw("1e-999"))), id="a number below a double"),
        pytest.param(one_tensor(("extra", Raw("9" * 400))), id="an integer beyond a double"),
        pytest.param(one_tensor(offsets=[Raw("-0"), 2]), id="minus zero as an offset"),
        pytest.param(one_tensor(shape=[2, Raw("-0")]), id="minus zero as a size"),
        pytest.param(one_tensor(("extra", Raw("-0"))), id="minus zero in a foreign field"),
        pytest.param(one_tensor(("extra", Raw('[{"a": -0}, -0.0, "-0"]'))), id="minus zero deep in a foreign field"),
        pytest.param(one_tensor(("-0", "-0")), id="minus zero as text"),
        pytest.param(one_tensor(shape=[2, Raw("1.0")]), id="a float as a size"),
        pytest.param(one_tensor(shape=[[1], 1 << 62]), id="a list as a size"),
        pytest.param(one_tensor(shape=[1 << 62, "ab"]), id="text as a size"),
    ],
)
def test_json_is_that_of_the_library(tmp_path: Path, header: str) -> None:
    check_against_library(write_raw(tmp_path / "model.safetensors", header, b"ab"))


def test_mutations_reach_both_verdicts_and_every_message(scratch: Path) -> None:
    """The property above is worth nothing if the mutated files are all rejected, or all for one reason."""
    accepted, reasons = 0, set()
    for seed in range(1500):
        path = written(scratch, mutated_model(Random(seed)))
        try:
            read_header(path)
        except CheckpointError as rejected:
            reasons.update(words for words in REASONS if words in str(rejected))
        else:
            accepted += 1
    assert 200 < accepted < 1300
    assert reasons == set(REASONS)


REASONS = (
    "is truncated: the header needs",
    "the format's limit",
    "is not valid JSON",
    "not an object of tensors",
    "__metadata__ must map",
    "is not described by an object",
    "has no ",
    "the unknown dtype",
    "needs a list as shape and two data_offsets",
    "where a 64-bit size is needed",
    "overlaps the tensor before it",
    "leaves a hole before it",
    "before its begin",
    "too large for 64-bit sizes",
    "does not fill whole bytes",
    "and its data offsets",
    "belong to no tensor",
    "is truncated: tensor",
)


def headed(*tensors: tuple[str, Any]) -> str:
    return dump(Pairs(tensors))


def test_every_dtype_of_the_library_opens_as_it_says(tmp_path: Path) -> None:
    """One file with every dtype that torch can write; offsets absolute, shapes in elements."""
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2,
    ]  # fmt: skip
    path = write_file(tmp_path / "all.safetensors", {str(dtype): random_tensor((2, 4), dtype) for dtype in dtypes})
    assert check_against_library(path)
    assert len(read_header(path).tensors) == len(dtypes)


# The deliberate differences of the module's docstring, one by one.


def test_difference_a_name_given_twice_is_an_error(tmp_path: Path) -> None:
    info = described("U8", [2], 0, 2)
    path = write_raw(tmp_path / "twice.safetensors", f'{{"a":{json.dumps(info)},"a":{json.dumps(info)}}}', b"ab")
    assert library_says(path) is not None
    with pytest.raises(CheckpointError, match=r"twice\.safetensors.*'a' is given twice"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ('{"a":["U8",[2],[0,2]]}', "tensor 'a' is not described by an object"),
        ('{"a":{"dtype":{"U8":null},"shape":[2],"data_offsets":[0,2]}}', "tensor 'a' has the unknown dtype"),
        (
            '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            "'x' is given twice",
        ),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":{"y":1,"y":1}}}', "'y' is given twice"),
    ],
    ids=["a tensor as a list", "a dtype as an object", "metadata twice", "a foreign field twice"],
)
def test_difference_forms_that_no_writer_produces(tmp_path: Path, header: str, words: str) -> None:
    path = write_raw(tmp_path / "form.safetensors", header, b"ab")
    assert library_says(path) is not None
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("dtype", ["U4", "I4"])
def test_difference_four_bit_integers_open_and_are_refused_when_read(tmp_path: Path, dtype: str) -> None:
    header = headed(("nibbles", described(dtype, [2, 4], 0, 4)), ("whole", described("U8", [2], 4, 6)))
    path = write_raw(tmp_path / "nibbles.safetensors", header, b"abcdef")
    assert library_says(path) is None
    checkpoint = open_checkpoint(path)
    assert checkpoint["nibbles"][1:3] == (dtype, (2, 4))
    assert checkpoint.read("whole").tolist() == [101, 102]
    with pytest.raises(CheckpointError, match=f"dtype {dtype} has no counterpart in torch"):
        checkpoint.read("nibbles")


# What a rejection says: the file, and the tensor and the offsets where there are any.


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (headed(("a", described("U8", [2], 1, 3))), b"abc", ["'a'", "hole", "offset 1 ", "0 was expected"]),
        (
            headed(("a", described("U8", [2], 0, 2)), ("b", described("U8", [2], 1, 3))),
            b"abc",
            ["'b'", "overlaps", "offset 1 ", "2 was expected"],
        ),
        (headed(("a", described("U8", [2], 0, 3))), b"abc", ["'a'", "needs 2 bytes", "0 to 3 hold 3"]),
        (headed(("a", described("F32", [2], 0, 4))), b"abcd", ["'a'", "F32", "[2]", "needs 8 bytes", "0 to 4 hold 4"]),
        (headed(("a", described("U8", [2], 3, 1))), b"abc", ["'a'", "ends at data offset 1", "begin at 3"]),
        (headed(("a", described("U8", [0], 0, 0)), ("b", described("U8", [2], 0, -1))), b"", ["'b'", "-1"]),
        (headed(("a", described("F4", [3], 0, 1))), b"a", ["'a'", "F4", "[3]", "whole bytes"]),
        (headed(("a", described("U8", [1 << 63, 2], 0, 1))), b"a", ["'a'", "too large for 64-bit sizes"]),
        (headed(("a", described("U8", [1 << 63, 2, 0], 0, 0))), b"", ["'a'", "too large for 64-bit sizes"]),
        (headed(("a", described("F64", [1 << 61], 0, 0))), b"", ["'a'", "too large for 64-bit sizes"]),
        (headed(("a", described("F99", [2], 0, 2))), b"ab", ["'a'", "unknown dtype 'F99'"]),
        (headed(("a", {"dtype": "U8", "shape": [2]})), b"ab", ["'a'", "no data_offsets"]),
        (headed(("a", {"shape": [2], "data_offsets": [0, 2]})), b"ab", ["'a'", "no dtype"]),
        (headed(("a", {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]})), b"a", ["'a'", "True"]),
        (headed(("a", {"dtype": "U8", "shape": [2], "data_offsets": [0, 2, 2]})), b"ab", ["'a'", "two data_offsets"]),
        (headed(("a", {"dtype": "U8", "shape": 2, "data_offsets": [0, 2]})), b"ab", ["'a'", "list as shape"]),
        (headed(("a", 7)), b"", ["'a'", "not described by an object"]),
        (headed(("__metadata__", {"a": 1})), b"", ["__metadata__ must map names to strings"]),
        (headed((Raw('"\\ud800"'), described("U8", [0], 0, 0))), b"", ["surrogate"]),
        (headed(("a", described("U8", [2], 0, 2))), b"abc", ["1 bytes after offset", "belong to no tensor"]),
        ("[]", b"", ["JSON list, not an object of tensors"]),
        ('{"a":', b"", ["not valid JSON"]),
        ("[" * 100_000, b"", ["not valid JSON"]),
        (b"\xff{}", b"", ["not valid JSON"]),
        ("", b"", ["not valid JSON"]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else None,
)  # fmt: skip
def test_rejection_names_file_tensor_and_offset(
    tmp_path: Path, header: str | bytes, data: bytes, words: list[str]
) -> None:
    path = write_raw(tmp_path / "broken.safetensors", header, data)
    assert library_says(path) is None
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert [word for word in [str(path), *words] if word not in message] == []


def test_truncation_names_the_tensor_that_is_cut_and_where_it_should_end(tmp_path: Path) -> None:
    header = headed(("first", described("U8", [4], 0, 4)), ("second", described("U8", [6], 4, 10)))
    path = write_raw(tmp_path / "cut.safetensors", header, b"0123456789")
    start, size = 8 + len(header), path.stat().st_size
    for kept in range(size):
        os.truncate(path, kept) if kept else path.write_bytes(b"")
        write_raw(path, header, b"0123456789")
        os.truncate(path, kept)
        assert not check_against_library(path)
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        message = str(caught.value)
        if kept < start:
            assert f"ends after {kept} bytes" in message or f"needs {start} bytes and the file has {kept}" in message
        else:
            name, begin, end = ("first", 0, 4) if kept < start + 4 else ("second", 4, 10)
            assert f"tensor {name!r} needs bytes {start + begin} to {start + end} and the file has {kept}" in message


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_huge_header_length_is_refused_before_anything_is_allocated(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "huge.safetensors", "{}", length=length)
    assert not check_against_library(path)
    with pytest.raises(CheckpointError, match=f"a header of {length} bytes, more than the format's limit"):
        read_header(path)


def test_longest_header_that_the_format_allows_opens(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES) + b"{}")
        file.write(b" " * (MAX_HEADER_BYTES - 2))
    assert check_against_library(path)


# Files that are none.


def test_pipe_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is not a regular file"):
        in_time(lambda: read_header(path), lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))


def test_folder_socket_and_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket.safetensors"))
    try:
        for path in (tmp_path / "folder.safetensors", tmp_path / "socket.safetensors", Path("/dev/zero")):
            with pytest.raises(CheckpointError) as caught:
                read_header(path)
            assert str(path) in str(caught.value)
    finally:
        server.close()


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


def test_identity_is_that_of_the_file_that_was_read(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"a": torch.zeros(3)})
    assert read_header(path).identity == FileIdentity.of(path.stat())
    assert FileIdentity.of(path.stat()) == (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)


def test_storage_shape_counts_two_four_bit_elements_as_one(tmp_path: Path) -> None:
    header = headed(
        ("four", described("F4", [2, 6], 0, 6)),
        ("eight", described("F8_E8M0", [2, 6], 6, 18)),
        ("scalar", described("F32", [], 18, 22)),
    )
    path = write_raw(tmp_path / "shapes.safetensors", header, bytes(22))
    shapes = {entry.name: entry.storage_shape for entry in read_header(path).tensors.entries()}
    assert shapes == {"four": (2, 3), "eight": (2, 6), "scalar": ()}


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=500)
def test_a_header_as_writers_write_it_is_read_as_any_other(random: Random) -> None:
    """The quick way says nothing, or what the thorough one says."""
    for model in (right_model(random), mutated_model(random)):
        quick = parse_plain("file", model.text)
        if quick is not None:
            assert (quick[0].entries(), quick[1]) == _parse_any("file", model.text)


PLAIN = (
    b'{"__metadata__":{"format":"pt"},"a.b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
    b'"c":{"dtype":"F32","shape":[],"data_offsets":[12,16]},"d":{"dtype":"F4","shape":[4],"data_offsets":[16,18]}}  '
)


@pytest.mark.parametrize(
    "replacement", [b"", b" ", b'"', b",", b"[", b"}", b"0", b"7", b"x", b"xf", b"\\", b"\x01", b"\xc3"]
)
def test_a_byte_that_differs_is_noticed_or_harmless(replacement: bytes) -> None:
    assert parse_plain("file", PLAIN) is not None
    for at in range(len(PLAIN)):
        for text in (PLAIN[:at] + replacement + PLAIN[at + 1 :], PLAIN[:at] + replacement + PLAIN[at:]):
            quick = parse_plain("file", text)
            if quick is not None:
                assert (quick[0].entries(), quick[1]) == _parse_any("file", text), text


def test_a_tensor_that_does_not_fill_its_last_byte_is_not_read_quickly() -> None:
    text = b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}'
    assert parse_plain("file", text) is None
    with pytest.raises(CheckpointError, match="does not fill whole bytes"):
        _parse_any("file", text)


def test_what_writers_write_is_read_the_quick_way(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": random_tensor((2, 3)), "b": random_tensor(())}, path, {"k": "v"})
    raw = path.read_bytes()
    text = raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]
    tensors, metadata = parse_plain(str(path), text) or pytest.fail("the thorough way would be taken")
    assert (tensors.names.tolist(), metadata) == (["a", "b"], {"k": "v"})
