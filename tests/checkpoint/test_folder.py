"""Opening a checkpoint: a file, a folder, an index, a hub's cache; and everything that can be wrong with them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint, paused_garbage_collection
from loadmaster.checkpoint.safetensors import read_header
from loadmaster.errors import CheckpointError

from .helpers.children import DROP_RIGHTS, run_child
from .helpers.files import (
    INDEX_NAME,
    assert_same,
    described,
    library_tensors,
    random_tensor,
    write_file,
    write_index,
    write_raw,
    write_shards,
)
from .helpers.waiting import in_time

ONE, TWO, THREE = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: random_tensor((3, 5), seed=sum(map(ord, name))) for name in names}


def refused(path: Path | str) -> str:
    """What opening ``path`` is refused with: one sentence."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(checkpoint: Checkpoint, wanted: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint) == set(wanted)
    assert len(checkpoint) == len(wanted)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert_same(checkpoint.read(name), tensor, name)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files with an index."""
    return write_shards(tmp_path / "model", {ONE: tensors("a", "b"), TWO: tensors("c"), THREE: tensors("d", "e")})


# What opens.


def test_file_opens(tmp_path: Path) -> None:
    path = write_file(tmp_path / "weights.safetensors", tensors("b", "a"), {"hidden_size": 5})
    checkpoint = open_checkpoint(path)
    assert_holds(checkpoint, tensors("a", "b"))
    assert checkpoint.path == str(path)
    assert list(checkpoint.files) == [str(path)]
    assert checkpoint.config == {"hidden_size": 5}
    assert "2 tensors" in repr(checkpoint)


def test_file_with_any_name_opens_also_by_a_path_as_text(tmp_path: Path) -> None:
    path = write_file(tmp_path / "blob", tensors("a"))
    assert_holds(open_checkpoint(str(path)), tensors("a"))


def test_folder_with_index_opens_in_the_order_of_files_and_offsets(shards: Path) -> None:
    checkpoint = open_checkpoint(shards)
    assert_holds(checkpoint, tensors("a", "b", "c", "d", "e"))
    files = [shards / name for name in (ONE, TWO, THREE)]
    assert list(checkpoint) == list(library_tensors(*files))
    assert list(checkpoint.files) == [str(file) for file in files]
    assert checkpoint.files[str(files[1])] == read_header(files[1]).identity
    assert checkpoint["c"].file == str(files[1])


def test_folder_of_files_opens_without_index(shards: Path) -> None:
    (shards / INDEX_NAME).unlink()
    (shards / "tokenizer.json").write_text("{}")
    (shards / "training.bin").write_bytes(b"not for us")
    assert_holds(open_checkpoint(shards), tensors("a", "b", "c", "d", "e"))


def test_index_decides_which_files_belong_to_the_checkpoint(shards: Path) -> None:
    """A folder may hold the same weights twice, as ``consolidated.safetensors`` beside the numbered files."""
    write_file(shards / "consolidated.safetensors", tensors("a", "b"))
    assert_holds(open_checkpoint(shards), tensors("a", "b", "c", "d", "e"))


def test_hub_cache_opens_as_it_is(tmp_path: Path) -> None:
    """``snapshots/<revision>/`` holds links into ``blobs/``, outside the folder that is opened."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    made = write_shards(tmp_path / "made", {ONE: tensors("a"), TWO: tensors("b"), THREE: tensors("c")})
    (made / "config.json").write_text('{"num_attention_heads": 4}')
    for number, file in enumerate(sorted(made.iterdir())):
        blob = blobs / f"{number:064x}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    checkpoint = open_checkpoint(snapshot)
    assert_holds(checkpoint, tensors("a", "b", "c"))
    assert checkpoint.config == {"num_attention_heads": 4}


def test_link_to_a_folder_and_index_in_a_sub_folder_open(tmp_path: Path) -> None:
    write_shards(tmp_path / "real", {"weights/x.safetensors": tensors("a"), "y.safetensors": tensors("b")})
    (tmp_path / "link").symlink_to("real")
    assert_holds(open_checkpoint(tmp_path / "link"), tensors("a", "b"))


def test_checkpoint_is_a_mapping_of_entries(shards: Path) -> None:
    checkpoint = open_checkpoint(shards)
    assert "a" in checkpoint
    assert "z" not in checkpoint
    assert checkpoint.get("z") is None
    assert checkpoint["d"].name == "d"
    with pytest.raises(KeyError):
        checkpoint["z"]
    with pytest.raises(CheckpointError, match="has no tensor 'z'"):
        checkpoint.read("z")


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """A sparse file of 64 GiB opens at once: nothing but its header is read."""
    header = json.dumps({"a": described("U8", [1 << 36], 0, 1 << 36)})
    path = write_raw(tmp_path / "sparse.safetensors", header)
    os.truncate(path, 8 + len(header) + (1 << 36))
    assert open_checkpoint(path).num_bytes == 1 << 36


# The index.


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../other/model.safetensors", "points outside the folder"),
        ("x/../../other/model.safetensors", "points outside the folder"),
        ("/etc/passwd", "points outside the folder"),
        ("..\\other.safetensors", "points outside the folder"),
        ("a\0.safetensors", "points outside the folder"),
        ("..", "points outside the folder"),
        ("", "where a file name is needed"),
        (7, "where a file name is needed"),
        (None, "where a file name is needed"),
        (["x.safetensors"], "where a file name is needed"),
    ],
)
def test_index_that_leaves_the_folder_is_refused(shards: Path, file: Any, words: str) -> None:
    write_file(shards.parent / "other" / "model.safetensors", tensors("f"))
    index = write_index(shards, {"a": ONE, "f": file})
    message = refused(shards)
    assert words in message
    assert str(index) in message
    assert "'f'" in message


def test_index_that_names_a_missing_file(shards: Path) -> None:
    (shards / TWO).unlink()
    message = refused(shards)
    assert str(shards / INDEX_NAME) in message
    assert f"{TWO}, which is missing" in message


def test_index_that_names_a_link_to_nothing(shards: Path) -> None:
    (shards / TWO).unlink()
    (shards / TWO).symlink_to("../blobs/gone")
    assert TWO in refused(shards)


def test_index_that_names_a_tensor_its_file_does_not_hold(shards: Path) -> None:
    write_index(shards, {"a": ONE, "b": ONE, "c": TWO, "d": THREE, "e": THREE, "f": TWO})
    message = refused(shards)
    assert "'f'" in message
    assert TWO in message
    assert "does not hold it" in message


def test_index_that_names_another_file_than_the_one_that_holds_the_tensor(shards: Path) -> None:
    write_index(shards, {"a": ONE, "b": ONE, "c": THREE, "d": THREE, "e": TWO})
    message = refused(shards)
    assert "'c'" in message
    assert str(shards / TWO) in message


def test_index_names_whole_file_names(tmp_path: Path) -> None:
    """``model.safetensors`` is not ``other-model.safetensors``, though one name ends with the other."""
    shards = {"model.safetensors": tensors("a"), "other-model.safetensors": tensors("b", "c")}
    folder = write_shards(tmp_path, shards, index=False)
    write_index(folder, {"a": "model.safetensors", "b": "model.safetensors", "c": "other-model.safetensors"})
    assert "'b'" in refused(folder)


def test_tensor_in_two_files_names_both(shards: Path) -> None:
    write_file(shards / TWO, tensors("a", "c"))
    message = refused(shards)
    assert "'a'" in message
    assert str(shards / ONE) in message
    assert str(shards / TWO) in message
    (shards / INDEX_NAME).unlink()
    assert "'a' is in two files" in refused(shards)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "has no weight_map"),
        ("7", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": null}', "has no weight_map"),
    ],
)
def test_index_that_is_broken(shards: Path, text: str, words: str) -> None:
    (shards / INDEX_NAME).write_text(text)
    message = refused(shards)
    assert words in message
    assert str(shards / INDEX_NAME) in message


def test_index_that_is_no_text(shards: Path) -> None:
    (shards / INDEX_NAME).write_bytes(b"\xff\xfe{}")
    assert f"{INDEX_NAME} is not valid JSON" in refused(shards)


def test_index_that_is_a_link_to_nothing_is_missed(shards: Path) -> None:
    """Half a download: to take the files that happen to be there for the whole would be a guess."""
    (shards / INDEX_NAME).unlink()
    (shards / INDEX_NAME).symlink_to("../blobs/gone")
    assert INDEX_NAME in refused(shards)


def test_index_given_instead_of_its_folder(shards: Path) -> None:
    message = refused(shards / INDEX_NAME)
    assert f"give the folder {shards}" in message


# Folders and files that are not what they should be.


def test_numbered_file_that_is_missing(shards: Path) -> None:
    (shards / INDEX_NAME).unlink()
    (shards / TWO).unlink()
    message = refused(shards)
    assert f"{TWO} is missing" in message
    assert str(shards) in message


def test_numbers_are_counted_for_each_name(tmp_path: Path) -> None:
    """An adapter of one file beside a model of two: each series is complete by itself."""
    write_shards(
        tmp_path,
        {
            "model-00001-of-00002.safetensors": tensors("a"),
            "model-00002-of-00002.safetensors": tensors("b"),
            "draft-00001-of-00001.safetensors": tensors("c"),
        },
        index=False,
    )
    assert_holds(open_checkpoint(tmp_path), tensors("a", "b", "c"))


def test_empty_folder(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path} is empty"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "model.ckpt", "tf_model.h5"])
def test_folder_of_another_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    message = refused(tmp_path)
    assert str(tmp_path) in message
    assert f"no .safetensors file but {name}" in message


def test_file_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    message = refused(tmp_path / "pytorch_model.bin")
    assert str(tmp_path / "pytorch_model.bin") in message
    assert "save it as safetensors" in message


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    assert "holds no .safetensors file" in refused(tmp_path)


def test_missing_path(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone") == f"{tmp_path / 'gone'} does not exist"
    write_file(tmp_path / "file", tensors("a"))
    assert str(tmp_path / "file" / "below") in refused(tmp_path / "file" / "below")
    assert "does not exist" in refused(tmp_path / "a\0b")


def test_path_that_is_too_long(tmp_path: Path) -> None:
    assert "File name too long" in refused(tmp_path / ("x" * 300))


def test_link_to_nothing_and_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("gone")
    assert "is a link to a file that is missing" in refused(tmp_path / "dangling")
    (tmp_path / "loop").symlink_to("loop")
    assert str(tmp_path / "loop") in refused(tmp_path / "loop")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../blobs/gone")
    assert "model.safetensors" in refused(tmp_path / "model")


def test_broken_file_in_a_folder_is_named(shards: Path) -> None:
    os.truncate(shards / TWO, 20)
    assert str(shards / TWO) in refused(shards)


def test_folder_named_like_a_file(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", tensors("a"))
    (tmp_path / "x.safetensors").mkdir()
    assert f"{tmp_path / 'x.safetensors'} " in refused(tmp_path)
    assert refused(tmp_path / "x.safetensors") == f"{tmp_path / 'x.safetensors'} is empty"
    write_index(tmp_path, {"a": "x.safetensors"})
    assert str(tmp_path / "x.safetensors") in refused(tmp_path)


@pytest.mark.parametrize("how", ["file", "folder", "index"])
def test_pipe_does_not_hang(tmp_path: Path, how: str) -> None:
    pipe = tmp_path / "x.safetensors"
    os.mkfifo(pipe)
    if how == "index":
        write_index(tmp_path, {"a": pipe.name})
    path = pipe if how == "file" else tmp_path
    message = in_time(lambda: refused(path), lambda: os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)))
    assert str(pipe) in message


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_pipe_in_the_place_of_a_document_does_not_hang(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / "model.safetensors", tensors("a"))
    pipe = tmp_path / name
    os.mkfifo(pipe)

    def opened() -> str:
        try:
            return ",".join(open_checkpoint(tmp_path))
        except CheckpointError as refused:
            return str(refused)

    answer = in_time(opened, lambda: os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)))
    assert answer == "a" or str(pipe) in answer


# config.json


def test_no_config_is_an_empty_one(tmp_path: Path) -> None:
    assert open_checkpoint(write_file(tmp_path / "model.safetensors", tensors("a"))).config == {}


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("", "is not valid JSON"), ("[1]", "is not a JSON object")]
)
def test_broken_config(tmp_path: Path, text: str, words: str) -> None:
    path = write_file(tmp_path / "model.safetensors", tensors("a"))
    (tmp_path / "config.json").write_text(text)
    for place in (path, tmp_path):
        message = refused(place)
        assert f"{tmp_path / 'config.json'} {words}" in message


def test_config_that_is_a_link_to_nothing_is_missed(tmp_path: Path) -> None:
    """Without the numbers of heads in it attention would be cut otherwise than the model needs."""
    write_file(tmp_path / "model.safetensors", tensors("a"))
    (tmp_path / "config.json").symlink_to("../blobs/gone")
    assert "config.json" in refused(tmp_path)


# Rights, with a child process that has none where the tests run as root.


@pytest.fixture(scope="module")
def without_rights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process without rights is told, for each thing that it may not read."""
    folder = tmp_path_factory.mktemp("rights")
    for name in ("file", "index", "config", "folder", "listed", "searched", "shard", "above"):
        write_shards(folder / name, {"model.safetensors": tensors("a")}, index=name in ("index", "shard"))
    (folder / "config" / "config.json").write_text("{}")
    for file in [folder, *folder.rglob("*")]:
        file.chmod(0o755 if file.is_dir() else 0o644)
    for name, mode in {
        "file/model.safetensors": 0o000,
        f"index/{INDEX_NAME}": 0o000,
        "config/config.json": 0o000,
        "shard/model.safetensors": 0o000,
        "folder": 0o000,
        "listed": 0o644,
        "searched": 0o311,
        "above": 0o000,
    }.items():
        (folder / name).chmod(mode)
    paths = [
        "file",
        "file/model.safetensors",
        "index",
        "config",
        "shard",
        "folder",
        "listed",
        "above/model.safetensors",
        "searched",
    ]
    code = f"""
        import json, sys
        from loadmaster.checkpoint.folder import open_checkpoint
        from loadmaster.errors import CheckpointError
        exec({DROP_RIGHTS!r})
        said = {{}}
        for path in sys.argv[1:]:
            try:
                open_checkpoint(path)
                said[path] = "opened"
            except CheckpointError as refused:
                said[path] = str(refused)
            except BaseException as error:
                said[path] = f"traceback of {{error!r}}"
        assert "torch" not in sys.modules
        print(json.dumps(said))
    """
    child = run_child(code, folder, *paths)
    for name in ("folder", "listed", "searched", "above"):
        (folder / name).chmod(0o755)
    assert child.returncode == 0, child.stderr
    said: dict[str, str] = json.loads(child.stdout)
    return said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("file", "file/model.safetensors"),
        ("file/model.safetensors", "file/model.safetensors"),
        ("index", f"index/{INDEX_NAME}"),
        ("config", "config/config.json"),
        ("shard", "shard/model.safetensors"),
        ("folder", "folder"),
        ("listed", "listed"),
        ("searched", "searched"),
        ("above/model.safetensors", "above/model.safetensors"),
    ],
)
def test_what_may_not_be_read_is_one_sentence(without_rights: dict[str, str], path: str, named: str) -> None:
    message = without_rights[path]
    assert message.startswith(named)
    assert "Permission denied" in message


# A part of a checkpoint.


def test_a_name_in_two_files_is_refused_beside_a_very_long_one(tmp_path: Path) -> None:
    write_shards(tmp_path, {"1.safetensors": {"x": torch.ones(1), "L" * 1025: torch.ones(1)}})
    write_shards(tmp_path, {"2.safetensors": {"x": torch.ones(1)}})
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="tensor 'x' is in two files"):
        open_checkpoint(tmp_path)


def test_subset_has_the_wanted_tensors_alone_and_leaves_the_whole_as_it_was(tmp_path: Path) -> None:
    write_shards(tmp_path, {f"{name}.safetensors": {name: torch.ones(3), f"{name}2": torch.ones(2)} for name in "ab"})
    whole = open_checkpoint(tmp_path)
    part = whole.subset(lambda name: name in ("b", "a2"))
    assert list(part) == ["a2", "b"]
    assert (len(whole), whole.num_bytes, part.num_bytes) == (4, 40, 20)
    assert (part.path, part.files, part.config) == (whole.path, whole.files, whole.config)
    assert part["b"] == whole["b"]
    assert torch.equal(part.read("a2"), torch.ones(2))
    with pytest.raises(CheckpointError, match="has no tensor 'a'"):
        part.read("a")
    assert list(part.subset(lambda name: False)) == []


# The collector.


def test_collector_is_paused_only_where_it_ran() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ZeroDivisionError), paused_garbage_collection():
        assert not gc.isenabled()
        with paused_garbage_collection():
            pass
        assert not gc.isenabled(), "an inner pause ended the outer one"
        raise ZeroDivisionError
    assert gc.isenabled()
