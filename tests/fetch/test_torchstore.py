"""Key-value stores as sources: in this process, by a socket from another one, with and without a word for shapes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.helpers.files import assert_all_same, random_tensor
from loadmaster.errors import InputError, LoadmasterError
from loadmaster.fetch.source import Part, SourceEntry, SourceReader, can_split
from loadmaster.fetch.torchstore import POLICY_PREFIX, TorchStoreSource

from .helpers import stores
from .helpers.sources import fetch_all
from .helpers.stores import DescribingStore, DottedStore, PlainStore, SocketConnect, SocketStore, StoreServer

TESTS = Path(__file__).parents[1]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        "model.norm.weight": random_tensor((12,), torch.bfloat16, version),
        "model.layers.0.weight": random_tensor((6, 4), torch.float32, version + 100),
        "scalar": random_tensor((), torch.float32, version + 200),
        "empty": torch.empty((0, 3)),
    }


def keys_of(*versions: int, pattern: str = POLICY_PREFIX) -> dict[str, torch.Tensor]:
    return {
        pattern.format(version=version) + name: tensor
        for version in versions
        for name, tensor in weights(version).items()
    }


def parts_of(names: list[str]) -> list[Part]:
    """The parts of known tensors, made without asking for their entries."""
    known = weights(0)
    return [
        Part(name, 0, max(1, known[name].shape[0] if known[name].dim() else 1), 128 * number, known[name].nbytes, True)
        for number, name in enumerate(names)
        if known[name].nbytes
    ]


KINDS = [PlainStore, DottedStore, DescribingStore]


@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_what_the_store_has_under_its_prefix(kind: Callable[..., Any]) -> None:
    store = kind(keys_of(1, 2, 20))
    with SourceReader(TorchStoreSource(store)) as reader:
        for version in (1, 20, 2):
            assert_all_same(fetch_all(reader, version), weights(version))


@pytest.mark.parametrize("kind", [PlainStore, DottedStore])
@pytest.mark.parametrize("pattern", ["policy/{version}/", "v{version}.", "weights-{version:03d}.of.", "w{version}"])
def test_any_prefix_will_do_and_a_longer_number_is_another_version(kind: Callable[..., Any], pattern: str) -> None:
    store = kind(keys_of(1, 11, pattern=pattern) if pattern != "w{version}" else keys_of(1, pattern=pattern))
    with SourceReader(TorchStoreSource(store, pattern)) as reader:
        assert_all_same(fetch_all(reader, 1), weights(1))


@pytest.mark.parametrize("kind", [DottedStore, DescribingStore])
def test_a_prefix_without_a_version_is_the_same_for_all(kind: Callable[..., Any]) -> None:
    store = kind(weights(1))
    with SourceReader(TorchStoreSource(store, "")) as reader:
        assert_all_same(fetch_all(reader, None), weights(1))
        store.values.update(weights(2))
        assert_all_same(fetch_all(reader, 2), weights(2))


def test_a_store_that_gives_whole_tensors_is_not_split() -> None:
    assert not can_split(TorchStoreSource(DottedStore({})))


def test_a_dotted_store_is_asked_for_whole_words() -> None:
    store = DottedStore(keys_of(7))
    source = TorchStoreSource(store)
    assert source.names(7) == list(weights(7))
    assert store.asked == [("keys", "policy_ver_0000000007")]
    source.close()


def test_a_tensor_is_got_once_even_where_only_that_tells_its_shape() -> None:
    store = DottedStore(keys_of(1, 2))
    with SourceReader(TorchStoreSource(store)) as reader:
        for version in (1, 2):
            parts = parts_of(reader.names(version))
            buffer = memoryview(bytearray(600))
            store.asked.clear()
            reader.read_parts(parts, buffer, lambda: False)
            assert store.calls("get") == [f"policy_ver_{version:010d}.{part.name}" for part in parts]
            for part in parts:
                wanted = weights(version)[part.name].reshape(-1).view(torch.uint8).numpy().tobytes()
                assert bytes(buffer[part.offset : part.offset + part.num_bytes]) == wanted


def test_shapes_are_remembered_for_later_versions() -> None:
    store = DottedStore(keys_of(1, 2))
    source = TorchStoreSource(store)
    for version in (1, 2):
        for name in source.names(version):
            assert source.entry(name).shape == tuple(weights(version)[name].shape)
    assert len(store.calls("get")) == len(weights(1))
    source.close()


def test_what_told_the_shapes_of_one_version_is_not_given_out_for_the_next() -> None:
    store = DottedStore({"w": torch.zeros(3)})
    source = TorchStoreSource(store, "")
    source.names(1)
    source.entry("w")
    store.values["w"] = torch.ones(3)
    source.names(2)
    destination = torch.zeros(3)
    source.read_into("w", destination)
    assert destination.tolist() == [1, 1, 1]
    source.close()


def test_a_store_that_describes_its_tensors_is_asked_for_that_and_fills_memory_in_place() -> None:
    store = DescribingStore(keys_of(1))
    with SourceReader(TorchStoreSource(store)) as reader:
        assert_all_same(fetch_all(reader, 1), weights(1))
    assert store.calls("get") == []
    assert [key.removeprefix("policy_ver_0000000001.") for key in store.calls("get in place")] == [
        name for name, tensor in weights(1).items() if tensor.numel()
    ]


def test_a_second_argument_of_get_that_is_a_default_is_no_place_for_a_tensor() -> None:
    class Describing(PlainStore):
        def meta(self, key: str) -> torch.Tensor:
            return self.values[key]

    with SourceReader(TorchStoreSource(Describing(keys_of(1)))) as reader:
        assert_all_same(fetch_all(reader, 1), weights(1))
        names = reader.names(1)
        del reader.source._given.values["policy_ver_0000000001.scalar"]
        with pytest.raises(LoadmasterError, match=r"the store has NoneType as 'policy_ver_0000000001.scalar'"):
            reader.source.read_into("scalar", torch.zeros(()))
        assert "scalar" in names


def test_a_store_that_describes_and_only_returns_tensors_is_copied_from() -> None:
    class Returning(DescribingStore):
        async def get(self, key: str, inplace_tensor: Any = None, tensor_slice_spec: Any = None) -> Any:
            return self.values[key]

    with SourceReader(TorchStoreSource(Returning(keys_of(1)))) as reader:
        assert_all_same(fetch_all(reader, 1), weights(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.zeros(4, 6), r"shape \[4, 6\]"),
        (torch.zeros(6, 4, dtype=torch.float16), r"(torch.float16|F16)"),
        (torch.zeros(1, 4), r"shape \[1, 4\]"),
    ],
    ids=["shape", "dtype", "broadcastable"],
)
def test_a_tensor_that_comes_otherwise_later_is_refused_with_both(
    kind: Callable[..., Any], other: torch.Tensor, found: str
) -> None:
    store = kind(keys_of(1, 2))
    store.values["policy_ver_0000000002.model.layers.0.weight"] = other
    source = TorchStoreSource(store)
    source.names(1)
    assert source.entry("model.layers.0.weight") == SourceEntry((6, 4), "F32")
    source.names(2)
    destination = torch.full((6, 4), 7.0)
    with pytest.raises(LoadmasterError, match=rf"tensor 'model.layers.0.weight' .*{found}.*F?32 of shape \[6, 4\]"):
        source.read_into("model.layers.0.weight", destination)
    assert destination.eq(7).all()
    source.close()


def test_what_is_no_tensor_is_left_out_or_refused_with_its_key() -> None:
    values = {**keys_of(1), "policy_ver_0000000001.MAPPING": {}, "policy_ver_0000000001.steps": 12}
    source = TorchStoreSource(DottedStore(values))
    assert source.names(1) == [*weights(1), "steps"]
    with pytest.raises(LoadmasterError, match=r"has int as 'policy_ver_0000000001.steps', .* name it in leave_out="):
        source.entry("steps")
    source.close()
    source = TorchStoreSource(DottedStore(values), leave_out=["MAPPING", "steps"])
    assert source.names(1) == list(weights(1))
    source.close()


def test_a_version_that_is_not_there_is_refused() -> None:
    source = TorchStoreSource(DottedStore(keys_of(1)))
    with pytest.raises(LoadmasterError, match=r"has no tensor whose key begins with 'policy_ver_0000000002.'"):
        source.names(2)
    with pytest.raises(InputError, match="needs a version, and none was given"):
        source.names(None)
    with pytest.raises(InputError, match=r"names\(version\) comes before all other calls"):
        source.entry("scalar")
    source.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"needs a store, or connect= with a function that returns one"),
        ({"store": PlainStore({}), "connect": stores.connect_plain}, r"needs a store, or connect="),
        ({"store": object()}, r"object is no store of tensors: it lacks keys and get"),
    ],
)
def test_it_needs_one_store(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TorchStoreSource(**arguments)


@pytest.mark.parametrize("connect", [stores.connect_plain, stores.connect_waiting])
def test_a_function_may_connect_to_the_store_plainly_or_waiting(connect: Callable[[], Any]) -> None:
    source = pickle.loads(pickle.dumps(TorchStoreSource(connect=connect)))
    with SourceReader(source) as reader:
        assert fetch_all(reader, 1)["w"].tolist() == [0, 1, 2, 3, 4]


def test_what_was_connected_is_closed_at_the_end_and_connected_again_after() -> None:
    stores.CONNECTED.clear()
    source = TorchStoreSource(connect=stores.connect_waiting)
    for _ in range(2):
        assert source.names(1) == source.names(1) == ["w"]
        source.close()
    assert [store.closed for store in stores.CONNECTED] == [1, 1]
    given = DottedStore(keys_of(1))
    source = TorchStoreSource(given)
    source.names(1)
    source.close()
    assert given.closed == 0


def test_a_function_that_connects_to_nothing_is_refused() -> None:
    source = TorchStoreSource(connect=stores.connect_nothing)
    with pytest.raises(InputError, match="object is no store of tensors: it lacks keys and get"):
        source.names(1)


def test_a_module_is_a_store_and_is_pickled_by_its_name() -> None:
    with SourceReader(pickle.loads(pickle.dumps(TorchStoreSource(stores)))) as reader:
        assert fetch_all(reader, 1)["w"].tolist() == [0, 1, 2, 3, 4]


def test_all_calls_run_in_one_loop_and_a_copy_has_its_own() -> None:
    store = DottedStore(keys_of(1, 2))
    source = TorchStoreSource(store)
    with SourceReader(source) as reader:
        fetch_all(reader, 1)
        text = pickle.dumps(source)
        fetch_all(reader, 2)
        assert len(store.loops) == 1
    copy = pickle.loads(text)
    assert (copy._known, copy._held, copy._version_prefix) == ({}, None, None)
    with SourceReader(copy) as reader:
        assert_all_same(fetch_all(reader, 2), weights(2))


def test_within_a_running_loop_it_is_refused_and_in_a_thread_it_works() -> None:
    source = TorchStoreSource(DottedStore(keys_of(1)))

    async def inside() -> None:
        with pytest.raises(InputError, match=r"asyncio.to_thread"):
            source.names(1)
        assert await asyncio.to_thread(source.names, 1) == list(weights(1))

    asyncio.run(inside())
    source.close()


# Another process


def test_a_store_behind_a_socket_keeps_one_connection_for_all_versions() -> None:
    with StoreServer(DottedStore(keys_of(1, 2))) as server:
        with SourceReader(TorchStoreSource(connect=SocketConnect(server.port))) as reader:
            for version in (1, 2, 1):
                assert_all_same(fetch_all(reader, version), weights(version))
        assert server.connections == 1


@pytest.mark.processes
@pytest.mark.parametrize("by", ["copy", "connect"])
def test_another_process_gets_the_same_from_the_pickled_source(by: str) -> None:
    with StoreServer(DottedStore(keys_of(1, 2))) as server:
        if by == "copy":
            source = TorchStoreSource(SocketStore(server.port))
        else:
            source = TorchStoreSource(connect=SocketConnect(server.port))
        done = subprocess.run(
            [sys.executable, "-m", "fetch.helpers.stores"],
            input=pickle.dumps((source, [1, 2])),
            cwd=TESTS,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        first, second = pickle.loads(done.stdout)
        assert_all_same(first, weights(1))
        assert_all_same(second, weights(2))
        assert server.connections == 1
