"""Reading: every byte of a plan once and in its place, whatever happens to the file, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadmaster.checkpoint import reader, vectored
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.pieces import Piece, plan_pieces
from loadmaster.checkpoint.placement import Move, Placement, place_whole
from loadmaster.checkpoint.reader import read_pieces
from loadmaster.checkpoint.target import new_memory
from loadmaster.errors import CheckpointError

from .conftest import left_behind
from .helpers.checkpoints import checkpoint_of, columns
from .helpers.children import run_child
from .helpers.files import assert_same, described, library_tensors, random_tensor, write_file, write_raw

CONVERSIONS = [
    (source, target)
    for source in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for target in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if source != target
]
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8"}


def read(
    checkpoint: Checkpoint, placements: list[Placement], threads: int = 2, **more: Any
) -> tuple[dict[str, torch.Tensor], reader.ReadResult]:
    """Read placements into new memory."""
    tensors, destinations = new_memory(placements)
    result = read_pieces(plan_pieces(placements, destinations), checkpoint.files, threads, **more)
    return tensors, result


def test_more_than_a_thousand_neighbours_of_a_few_bytes_are_read_in_a_few_calls(tmp_path: Path) -> None:
    header = {f"n{number:05}": described("U8", [3], 3 * number, 3 * number + 3) for number in range(2500)}
    path = write_raw(tmp_path / "many.safetensors", json.dumps(header), bytes(number % 251 for number in range(7500)))
    checkpoint = open_checkpoint(path)
    tensors, result = read(checkpoint, place_whole(checkpoint.values()), threads=1)
    assert result.bytes_read == 7500
    assert all(
        tensors[f"n{number:05}"].tolist() == [index % 251 for index in range(3 * number, 3 * number + 3)]
        for number in range(2500)
    )


def test_nothing_to_read_is_nothing(tmp_path: Path) -> None:
    assert read_pieces([], {}, 4) == reader.ReadResult()
    path = write_file(tmp_path / "empty.safetensors", {"a": torch.empty(0, 3), "b": torch.empty(2, 0)})
    checkpoint = open_checkpoint(path)
    tensors, result = read(checkpoint, place_whole(checkpoint.values()))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"a": (0, 3), "b": (2, 0)}
    assert result.bytes_read == 0


# Reading in place.


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A few MiB: wide rows that are read one by one, narrow rows that are copied at a stride, and vectors."""
    tensors = {
        "wide": random_tensor((3, 800_000), torch.bfloat16, seed=1),
        "square": random_tensor((1024, 1024), torch.bfloat16, seed=2),
        "narrow": random_tensor((4096, 96), torch.float32, seed=3),
        "vector": random_tensor((777,), torch.float64, seed=4),
        "half": random_tensor((512, 256), torch.float16, seed=5),
        "double": random_tensor((300, 200), torch.float64, seed=6),
    }
    return open_checkpoint(write_file(tmp_path_factory.mktemp("matrices") / "model.safetensors", tensors))


@pytest.fixture(scope="module")
def truth(matrices: Checkpoint) -> dict[str, torch.Tensor]:
    return library_tensors(*map(Path, matrices.files))


@pytest.fixture(params=["from a map", "through the scratch"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided pieces both ways."""
    if request.param == "through the scratch":
        monkeypatch.setattr(vectored, "_process_vm_writev", lambda: None)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("threads", [1, 3])
def test_columns_are_read_in_place(matrices: Checkpoint, truth: dict[str, torch.Tensor], threads: int) -> None:
    cuts = {"wide": (200_000, 600_000), "square": (256, 512), "narrow": (32, 64), "half": (0, 1), "double": (199, 200)}
    placements = [columns(matrices, name, *cut) for name, cut in cuts.items()]
    tensors, result = read(matrices, placements, threads)
    for name, (start, stop) in cuts.items():
        assert_same(tensors[name], truth[name][:, start:stop].contiguous(), name)
    assert result.bytes_read >= sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("source", "target"), CONVERSIONS, ids=lambda dtype: NAMES[dtype])
def test_conversion_is_that_of_torch(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    """Whole tensors, rows, columns and padded columns, more than a scratch of each; also values that overflow.

    (No NaN: torch itself gives it other bits in rows than in columns.)
    """
    tensor = random_tensor((700, 1100), source, seed=8)
    tensor[0, :4] = torch.tensor([float("inf"), float("-inf"), -0.0, torch.finfo(source).max])
    checkpoint = open_checkpoint(write_file(tmp_path / "model.safetensors", {"w": tensor}))
    entry, name = checkpoint["w"], NAMES[target]
    placements = [
        Placement(entry, "whole", name, (700, 1100)),
        Placement(entry, "rows", name, (100, 1100), (Move(0, 50, 150, 0),)),
        Placement(entry, "columns", name, (700, 300), (Move(1, 2, 302, 0),)),
        Placement(entry, "padded", name, (700, 30), (Move(1, 0, 10, 3), Move(1, 90, 100, 15))),
    ]
    tensors, result = read(checkpoint, placements)
    wanted = tensor.to(target)
    assert_same(tensors["whole"], wanted)
    assert_same(tensors["rows"], wanted[50:150])
    assert_same(tensors["columns"], wanted[:, 2:302])
    padded = torch.zeros(700, 30, dtype=target)
    padded[:, 3:13], padded[:, 15:25] = wanted[:, :10], wanted[:, 90:100]
    assert_same(tensors["padded"], padded)
    assert result.convert_seconds > 0


def test_conversion_of_rows_longer_than_the_scratch(matrices: Checkpoint, truth: dict[str, torch.Tensor]) -> None:
    tensors, _ = read(matrices, [columns(matrices, "wide", 1, 700_001, "F64")])
    assert_same(tensors["wide"], truth["wide"][:, 1:700_001].double())


def test_torch_keeps_its_threads_everywhere_else(matrices: Checkpoint) -> None:
    """In the thread that loads, and in one that starts afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        read(matrices, [columns(matrices, "wide", 1, 700_001, "F64")])
        seen = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3]


def test_conversion_runs_without_a_team_of_threads(matrices: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a reading thread torch has one thread, whatever it has elsewhere."""
    seen: list[int] = []
    real = reader._strided_tensor

    def noting(*arguments: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(reader, "_strided_tensor", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        read(matrices, [columns(matrices, "wide", 0, 700_000, "F32")])
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_progress_rises_to_all_bytes_in_the_calling_thread(matrices: Checkpoint) -> None:
    placements = place_whole(matrices.values())
    _, destinations = new_memory(placements)
    pieces = Slow(plan_pieces(placements, destinations, 1 << 20), seconds=0.05)
    seen: list[tuple[int, int]] = []
    read_pieces(pieces, matrices.files, 1, lambda done: seen.append((done, threading.get_ident())))
    amounts = [done for done, _ in seen]
    assert amounts == sorted(amounts)
    assert amounts[-1] == matrices.num_bytes
    assert len(set(amounts)) >= 3
    assert {thread for _, thread in seen} == {threading.get_ident()}


class Hooked(list[Piece]):
    """Pieces that do something when the reader comes to take piece ``number``: the middle of a read, for sure."""

    def __init__(self, pieces: list[Piece], number: int, hook: Callable[[], None]) -> None:
        super().__init__(pieces)
        self.number, self.hook = number, hook

    def __getitem__(self, index: Any) -> Any:
        self.last_taken = time.monotonic()
        if index == self.number:
            self.hook()
        return super().__getitem__(index)


class Slow(list[Piece]):
    """Pieces that take a while to come."""

    def __init__(self, pieces: list[Piece], seconds: float) -> None:
        super().__init__(pieces)
        self.seconds = seconds

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.seconds)
        self.last_taken = time.monotonic()
        return super().__getitem__(index)


# Files that change.


@pytest.fixture
def victim(tmp_path: Path) -> Checkpoint:
    """A file of its own to spoil: tensor ``b`` from its middle on, in pieces of 64 KiB."""
    tensors = {"a": random_tensor((256, 1024), seed=1), "b": random_tensor((256, 1024), seed=2)}
    return open_checkpoint(write_file(tmp_path / "victim.safetensors", tensors))


def spoilt(victim: Checkpoint, spoil: Callable[[], None], *, strided: bool = False, at: int = 6) -> str:
    """What a read says when ``spoil`` happens before piece ``at`` of 64 KiB is read; nothing may be left behind."""
    placements = [columns(victim, name, 0, 512) for name in victim] if strided else place_whole(victim.values())
    _, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations, 64 << 10)
    assert len(pieces) > at + 2

    def named(file: str, offset: int) -> str:
        assert file == victim["a"].file
        return "a" if offset < victim["b"].offset else "b"

    with pytest.raises(CheckpointError) as caught:
        read_pieces(Hooked(pieces, at, spoil), victim.files, 1, tensor_at=named)
    assert left_behind() == []
    assert victim["a"].file in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
def test_file_truncated_while_it_is_read(victim: Checkpoint, strided: bool) -> None:
    """Cut to half of ``b`` by another process, after ``a`` was read."""
    keep = victim["b"].offset + victim["b"].num_bytes // 2

    def truncate() -> None:
        assert (
            run_child(
                "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))", Path("/"), victim["a"].file, str(keep)
            ).returncode
            == 0
        )

    message = spoilt(victim, truncate, strided=strided, at=9)
    assert "truncated" in message
    assert "tensor 'b'" in message
    offset = int(message.split("offset ")[1].split(",")[0].split()[0])
    assert keep - (1 << 20) < offset <= victim["b"].offset + victim["b"].num_bytes


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
def test_file_truncated_behind_the_reader(victim: Checkpoint, strided: bool) -> None:
    """What was read already is gone from the file: nobody knows whether it was whole."""
    message = spoilt(victim, lambda: os.truncate(victim["a"].file, 2000), strided=strided, at=13)
    assert "truncated" in message


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
def test_file_truncated_within_its_last_page(victim: Checkpoint, strided: bool) -> None:
    """A map shows zeros from the end of the file to the end of the page, and no error: they are not taken for data."""
    size = Path(victim["a"].file).stat().st_size
    message = spoilt(victim, lambda: os.truncate(victim["a"].file, size - 1030), strided=strided)
    assert "truncated" in message
    assert "tensor 'b'" in message


def test_file_truncated_before_it_is_read(victim: Checkpoint) -> None:
    """Between the header and the first read, as when a download starts again."""
    keep = victim["b"].offset + 10
    os.truncate(victim["a"].file, keep)
    placements = place_whole(victim.values())
    with pytest.raises(CheckpointError, match="truncated") as caught:
        read(victim, placements, tensor_at=lambda file, offset: "a" if offset < victim["b"].offset else "b")
    message = str(caught.value)
    assert victim["a"].file in message
    assert "tensor 'b'" in message
    assert f"offset {keep}" in message


def test_file_modified_while_it_is_read(victim: Checkpoint) -> None:
    def modify() -> None:
        with Path(victim["a"].file).open("r+b") as file:
            file.seek(victim["a"].offset)
            file.write(b"\xff" * 100)

    assert "was changed while it was being read" in spoilt(victim, modify)


def test_file_that_grows_while_it_is_read(victim: Checkpoint) -> None:
    size = Path(victim["a"].file).stat().st_size
    assert "was changed" in spoilt(victim, lambda: os.truncate(victim["a"].file, size + 1))


def test_file_replaced_after_its_header_was_read(victim: Checkpoint, tmp_path: Path) -> None:
    """The new file would be read with the offsets of the old one."""
    write_file(tmp_path / "new.safetensors", {"a": random_tensor((256, 1024), seed=3), "b": random_tensor((256, 1024))})
    (tmp_path / "new.safetensors").rename(victim["a"].file)
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        read(victim, place_whole(victim.values()))


def test_file_replaced_while_it_is_read_stays_the_old_one(victim: Checkpoint, tmp_path: Path) -> None:
    """The open descriptor is that of the old file, which is whole: what a good writer does to replace a checkpoint."""
    old = library_tensors(Path(victim["a"].file))
    new = write_file(tmp_path / "new.safetensors", {"a": random_tensor((256, 1024), seed=3)})
    placements = place_whole(victim.values())
    tensors, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations, 64 << 10)
    read_pieces(Hooked(pieces, 6, lambda: os.replace(new, victim["a"].file)), victim.files, 1)  # noqa: PTH105
    for name, tensor in old.items():
        assert_same(tensors[name], tensor, name)


def test_file_removed_after_its_header_was_read(victim: Checkpoint) -> None:
    Path(victim["a"].file).unlink()
    with pytest.raises(CheckpointError, match=r"victim\.safetensors cannot be read: No such file"):
        read(victim, place_whole(victim.values()))


def test_read_that_fails_names_its_place(victim: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails: the error of the system call, with file, tensor and offset."""

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader, "read_into", failing)
    with pytest.raises(CheckpointError) as caught:
        read(victim, place_whole(victim.values()), tensor_at=lambda file, offset: "the tensor")
    message = str(caught.value)
    assert message == (
        f"{victim['a'].file} cannot be read at offset {victim['a'].offset}, in tensor 'the tensor': Input/output error"
    )


# Ends.


def test_error_of_one_thread_stops_the_others_and_leaves_nothing(matrices: Checkpoint) -> None:
    placements = place_whole(matrices.values())
    _, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations, 16 << 10)

    taken: list[int] = []

    class Failing(Slow):
        def __getitem__(self, index: Any) -> Any:
            taken.append(index)
            if index == 5:
                raise ZeroDivisionError
            return super().__getitem__(index)

    with pytest.raises(ZeroDivisionError):
        read_pieces(Failing(pieces, seconds=0.002), matrices.files, 3)
    assert left_behind() == []
    assert len(taken) < len(pieces) // 2


def test_error_of_the_progress_callback_leaves_nothing(matrices: Checkpoint) -> None:
    placements = place_whole(matrices.values())
    _, destinations = new_memory(placements)
    pieces = Slow(plan_pieces(placements, destinations, 64 << 10), seconds=0.02)

    def fail(done: int) -> None:
        raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        read_pieces(pieces, matrices.files, 2, fail)
    assert left_behind() == []
    assert time.monotonic() - started < 0.02 * len(pieces) / 2


@pytest.mark.parametrize("when", ["while the threads are started", "while they read"])
def test_keyboard_interrupt_ends_the_reading(matrices: Checkpoint, when: str) -> None:
    """Ctrl-C: a real signal, which the main thread takes wherever it is. Once it is out, nobody reads any more."""
    threads = 64 if when == "while the threads are started" else 2
    sent = threading.Event()

    class Interrupting(Slow):
        def __getitem__(self, index: Any) -> Any:
            if index == 0:
                for _ in range(5000):  # until the threads and the file are there
                    if threads != 2 or len(left_behind(patience=0)) == threads + 1:
                        break
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGINT)
                sent.set()
            return super().__getitem__(index)

    placements = place_whole(matrices.values())
    _, destinations = new_memory(placements)
    pieces = Interrupting(plan_pieces(placements, destinations, 4 << 10), seconds=0.001)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            read_pieces(pieces, matrices.files, threads)
        returned = time.monotonic()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left_behind() == []
    assert pieces.last_taken <= returned
    assert sent.is_set()


# Locks, signals and limits.


def ticks_during(work: Callable[[], Any]) -> tuple[int, float]:
    """How often another Python thread got its turn while ``work`` ran, and the seconds that this took."""
    times: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            times.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while len(times) < 2:
            time.sleep(0.001)
        begin = time.perf_counter()
        work()
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    return sum(begin < moment < end for moment in times), end - begin


@pytest.mark.parametrize("how", ["plain", "strided"])
def test_other_threads_run_while_one_system_call_reads(tmp_path: Path, how: str) -> None:
    """One call moves 192 MiB: with the interpreter's lock held no other thread would get a turn within it."""
    size = 192 << 20
    path = tmp_path / "holes.safetensors"
    path.touch()
    os.truncate(path, size)
    memory = np.empty(size, np.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if how == "plain":
            work: Callable[[], Any] = lambda: os_read(descriptor, memory)  # noqa: E731
        else:
            work = lambda: vectored.StridedCopier().copy(  # noqa: E731
                descriptor, 0, 2 << 20, memoryview(memory.data), 1 << 20, 1 << 20, 96
            )
        ticks, seconds = ticks_during(work)
    finally:
        os.close(descriptor)
    assert ticks >= max(3, seconds / 0.0005 / 50)


def os_read(descriptor: int, memory: np.ndarray[Any, Any]) -> None:
    vectored.read_into(descriptor, [memoryview(memory.data)], 0)


SIGNALS = """
    import os, signal, sys, threading
    from loadmaster.checkpoint.folder import open_checkpoint
    from loadmaster.checkpoint.pieces import Destinations, plan_pieces
    from loadmaster.checkpoint.placement import Move, Placement, place_whole
    from loadmaster.checkpoint.reader import read_pieces

    received = 0
    def handle(number, frame):
        global received
        received += 1
        for thread in threading.enumerate():
            if thread.name.startswith("loadmaster-read") and thread.ident:
                try:
                    signal.pthread_kill(thread.ident, signal.SIGUSR1)
                except ProcessLookupError:
                    pass

    signal.signal(signal.SIGALRM, handle)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.siginterrupt(signal.SIGALRM, True)
    signal.siginterrupt(signal.SIGUSR1, True)
    checkpoint = open_checkpoint(sys.argv[1])
    whole = place_whole(checkpoint.values())
    halves = [
        Placement(p.entry, p.name + ".half", p.dtype, (p.shape[0], p.shape[1] // 2), (Move(1, 0, p.shape[1] // 2, 0),))
        for p in whole
    ]
    with open(sys.argv[1], "rb") as file:
        raw = file.read()
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    for round in range(int(sys.argv[2])):
        placements = whole + halves
        buffers = [memoryview(bytearray(p.num_bytes)) for p in placements]
        read_pieces(plan_pieces(placements, Destinations(buffers, [0] * len(buffers)), 1 << 20), checkpoint.files, 2)
        for placement, buffer in zip(whole, buffers):
            entry = placement.entry
            assert buffer == raw[entry.offset : entry.offset + entry.num_bytes]
        for placement, buffer in zip(halves, buffers[len(whole) :]):
            entry, row = placement.entry, 2 * placement.entry.shape[1]
            rows = (raw[entry.offset + at : entry.offset + at + row // 2] for at in range(0, entry.num_bytes, row))
            assert buffer == b"".join(rows)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert received > 50, received
    assert "torch" not in sys.modules
"""


@pytest.mark.processes
def test_storm_of_signals_changes_nothing(tmp_path: Path) -> None:
    """Thousands of real signals a second, to the process and to the reading threads themselves."""
    tensors = {name: random_tensor((1024, 1024), seed=seed) for seed, name in enumerate("abcd")}
    path = write_file(tmp_path / "storm.safetensors", tensors)
    child = run_child(SIGNALS, tmp_path, str(path), "12")
    assert child.returncode == 0, child.stderr


TRUNCATIONS = """
    import os, random, sys
    from loadmaster.checkpoint.folder import open_checkpoint
    from loadmaster.checkpoint.pieces import Destinations, plan_pieces
    from loadmaster.checkpoint.placement import Move, Placement, place_whole
    from loadmaster.checkpoint.reader import read_pieces
    from loadmaster.errors import CheckpointError

    path, strided, rounds = sys.argv[1], sys.argv[2] == "strided", int(sys.argv[3])
    with open(path, "rb") as file:
        raw = file.read()
    failed = 0
    for round in range(rounds):
        victim = f"{path}.{round}"
        with open(victim, "wb") as file:
            file.write(raw)
        checkpoint = open_checkpoint(victim)
        (entry,) = checkpoint.values()
        whole = Placement(entry, entry.name, entry.dtype, entry.shape)
        half = whole._replace(shape=(entry.shape[0], entry.shape[1] // 2), moves=(Move(1, 0, entry.shape[1] // 2, 0),))
        placement = half if strided else whole
        buffer = memoryview(bytearray(placement.num_bytes))
        pieces = plan_pieces([placement], Destinations([buffer], [0]), 1 << 20)
        ready, begin = os.pipe()
        truncator = os.fork()
        if truncator == 0:
            os.read(ready, 1)
            for _ in range(random.Random(round).randrange(20000)):
                pass
            os.truncate(victim, len(raw) // 3)
            os._exit(0)
        os.write(begin, b"x")
        try:
            read_pieces(pieces, checkpoint.files, 2, None, lambda file, offset: entry.name)
        except CheckpointError as error:
            assert victim in str(error) and "truncated" in str(error), error
            failed += 1
        else:
            wanted = raw[entry.offset :]
            if strided:
                row = 2 * entry.shape[1]
                wanted = b"".join(wanted[at : at + row // 2] for at in range(0, len(wanted), row))
            assert buffer == wanted, "a truncated file was taken for a whole one"
        os.waitpid(truncator, 0)
        os.close(ready), os.close(begin)
        os.unlink(victim)
    print(failed)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["plain", "strided"])
def test_another_process_truncates_at_any_moment(tmp_path: Path, how: str) -> None:
    """Forty times: whole and right, or an error, and never a signal."""
    path = write_file(tmp_path / "any.safetensors", {"a": random_tensor((4096, 1024))})
    child = run_child(TRUNCATIONS, tmp_path, str(path), how, "40")
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 0


FEW_THREADS = """
    import os, resource, sys, threading, time
    from loadmaster.checkpoint.folder import open_checkpoint
    from loadmaster.checkpoint.placement import place_whole
    from loadmaster.checkpoint.pieces import Destinations, plan_pieces
    from loadmaster.checkpoint.reader import read_pieces

    checkpoint = open_checkpoint("model.safetensors")
    placements = place_whole(checkpoint.values())
    buffers = [memoryview(bytearray(placement.num_bytes)) for placement in placements]

    class Slow(list):
        def __getitem__(self, index):
            time.sleep(0.005)
            return super().__getitem__(index)

    pieces = Slow(plan_pieces(placements, Destinations(buffers, [0] * len(buffers)), 32768))
    os.setresgid(65501, 65501, 65501)
    os.setresuid(65501, 65501, 65501)
    resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
    try:
        read_pieces(pieces, checkpoint.files, 8)
        print("read")
    except Exception as error:
        print(type(error).__name__, error)
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    opened = [link for link in links if os.path.exists(link) and "safetensors" in os.readlink(link)]
    print(left, opened)
"""


@pytest.mark.processes
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="takes the identity of a user whose processes are counted")
def test_threads_that_cannot_start_leave_nothing_running(tmp_path: Path) -> None:
    """A limit on processes (containers have one): some threads start, the next does not."""
    path = write_file(tmp_path / "model.safetensors", {"a": random_tensor((1024, 1024))})
    path.chmod(0o644)
    tmp_path.chmod(0o755)
    child = run_child(FEW_THREADS, tmp_path)
    assert child.returncode == 0, child.stderr
    outcome, left = child.stdout.splitlines()
    assert left == "[] []"
    assert outcome == "read" or "thread" in outcome


def test_files_are_opened_once_and_closed(tmp_path: Path) -> None:
    checkpoint = checkpoint_of((8, 8), (8, 8), (8, 8), (8, 8), folder=tmp_path, files=2)
    during: list[list[str]] = []
    placements = place_whole(checkpoint.values())
    _, destinations = new_memory(placements)
    pieces = plan_pieces(placements, destinations)
    read_pieces(Hooked(pieces, 0, lambda: during.append(left_behind(patience=0))), checkpoint.files, 1)
    assert sorted(name for name in during[0] if ".safetensors" in name) == sorted(checkpoint.files)
    assert left_behind() == []


def test_unused_files_are_not_opened(tmp_path: Path) -> None:
    checkpoint = checkpoint_of((8, 8), (8, 8), folder=tmp_path, files=2)
    Path(checkpoint["t00001"].file).unlink()
    tensors, _ = read(checkpoint, place_whole([checkpoint["t00000"]]))
    assert_same(tensors["t00000"], random_tensor((8, 8), seed=0))
