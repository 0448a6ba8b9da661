"""What the asking process tells the fetchers of a checkpoint, so that they need not read its headers."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from checkpoint.helpers.files import assert_same, random_tensor, write_shards
from loadmaster.errors import CheckpointError
from loadmaster.fetch.checkpoint_source import CheckpointSource
from loadmaster.fetch.deal import deal
from loadmaster.fetch.source import SourceReader

TENSORS = {
    "matrix": random_tensor((50, 3), torch.float32, 1),
    "vector": random_tensor((7,), torch.bfloat16, 2),
    "scalar": random_tensor((), torch.int64, 3),
    "empty": torch.empty((0, 4), dtype=torch.float16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = list(TENSORS)
    halves = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    return write_shards(tmp_path, {file: {name: TENSORS[name] for name in half} for file, half in halves.items()})


def test_entries_are_those_that_are_asked_for_one_by_one(folder: Path) -> None:
    reader, plain = SourceReader(CheckpointSource(folder)), CheckpointSource(folder)
    assert [name for name, _ in reader.tensors(None)] == plain.names(None)
    assert dict(reader.tensors(None)) == {name: plain.entry(name) for name in TENSORS}


def test_what_is_located_is_read_by_a_source_that_has_not_begun(folder: Path) -> None:
    asking, fetching = SourceReader(CheckpointSource(folder)), SourceReader(CheckpointSource(folder))
    dealt = deal(asking.tensors(None), 2)
    memory = [bytearray(num_bytes) for num_bytes in dealt.arena_bytes]
    for queue in dealt.queues:
        for bundle in queue:
            located = pickle.loads(pickle.dumps(asking.locate(bundle.parts)))
            fetching.read_located(located, memoryview(memory[bundle.arena]), lambda: False)
    for name, wanted in TENSORS.items():
        place = dealt.places[name]
        if wanted.numel():
            flat = torch.frombuffer(memory[place.arena], dtype=wanted.dtype, count=wanted.numel(), offset=place.offset)
            assert_same(flat.view(wanted.shape), wanted, name)


@pytest.mark.parametrize("how", ["truncated", "replaced"])
def test_a_file_that_is_not_what_it_was_when_its_header_was_read(folder: Path, how: str) -> None:
    reader = SourceReader(CheckpointSource(folder))
    dealt = deal([row for row in reader.tensors(None) if row[0] == "matrix"], 1)
    located = reader.locate(dealt.queues[0][0].parts)
    file = Path(located.files[0][0])
    if how == "truncated":
        os.truncate(file, located.rows[0][2] + 8)
    else:
        file.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="in tensor 'matrix'" if how == "truncated" else "was changed"):
        reader.read_located(located, memoryview(bytearray(dealt.arena_bytes[0])), lambda: False)


def test_a_source_without_such_a_way_is_asked_for_parts() -> None:
    class Plain:
        def names(self, version: int | None) -> list[str]:
            return ["a"]

        def entry(self, name: str) -> torch.Tensor:
            return torch.zeros(3)

        def get(self, name: str) -> torch.Tensor:
            return torch.zeros(3)

    reader = SourceReader(Plain())
    assert [entry.shape for _, entry in reader.tensors(None)] == [(3,)]
    assert reader.locate([]) is None
