"""Arenas of shared memory and handles to them: sealed, nameless, and safe to use in any order."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.helpers.files import assert_same, random_tensor
from loadmaster.checkpoint.dtypes import DTYPES, torch_dtype
from loadmaster.errors import SharedMemoryError
from loadmaster.fetch import shared_memory
from loadmaster.fetch.shared_memory import ArenaHandle, Handle, SharedArena, check_available, open_handle

MIB = 1 << 20
IS_ROOT = os.geteuid() == 0
as_root = [pytest.mark.root, pytest.mark.skipif(not IS_ROOT, reason="only root can become another user or mount")]

OPENER = """
import os, pickle, sys
import torch
from loadmaster.errors import SharedMemoryError

def read(handle):
    return handle.open().double().sum().item()

def fill(handle, value):
    handle.open().fill_(value)

def read_as(user, handle):
    if os.getuid() != user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    return read(handle)

while True:
    try:
        name, *arguments = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        answer = globals()[name](*arguments)
    except SharedMemoryError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Opener:
    """Another process that opens handles."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def ask(self, *question: Any) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(pickle.dumps(question))
        answer = pickle.load(self.child.stdout)
        if isinstance(answer, SharedMemoryError):
            raise answer
        return answer

    def close(self) -> None:
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()
        assert self.child.wait(30) == 0


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    made = Opener()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = descriptors(), mappings(), names_in_dev_shm()
    yield
    gc.collect()
    assert (descriptors(), mappings(), names_in_dev_shm()) == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return sum("loadmaster-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def names_in_dev_shm() -> set[str]:
    """The files there that may be arenas."""
    names = [path.name for path in Path("/dev/shm").glob("loadmaster-*")]
    return {name for name in names if re.fullmatch("loadmaster-[a-z0-9_]{8}", name)}


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may crash."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def allocated(arena: SharedArena) -> int:
    """Bytes of memory that the kernel has given to the file."""
    return os.fstat(arena.descriptor).st_blocks * 512


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena.create(MIB)
    yield made
    gc.collect()
    made.close()


def without_memfd(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """As on a kernel, or with a Python, that does not have it."""
    if how == "python":
        monkeypatch.delattr(os, "memfd_create")
    else:

        def refuse(*_: object) -> int:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(os, "memfd_create", refuse)


KINDS = ["memfd", "python", "kernel"]


@pytest.fixture(params=KINDS)
def any_arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedArena]:
    """An arena of each kind of file."""
    if request.param != "memfd":
        without_memfd(monkeypatch, request.param)
    made = SharedArena.create(MIB)
    yield made
    gc.collect()
    made.close()


# The arena.


def test_the_size_is_sealed(arena: SharedArena) -> None:
    for size in (0, MIB - 1, MIB + 1, 1 << 40):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    assert os.fstat(arena.descriptor).st_size == MIB
    with pytest.raises(PermissionError):  # and the seals are
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_file_has_no_name(any_arena: SharedArena) -> None:
    assert names_in_dev_shm() == set()
    assert os.fstat(any_arena.descriptor).st_nlink == 0


def test_no_child_process_inherits_the_descriptor(any_arena: SharedArena) -> None:
    assert not os.get_inheritable(any_arena.descriptor)


def test_close_closes_the_descriptor_and_may_be_repeated(any_arena: SharedArena) -> None:
    descriptor = any_arena.descriptor
    assert any_arena.close()
    assert any_arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_collected_arena_is_closed() -> None:
    arena = SharedArena.create(MIB)
    descriptor = arena.descriptor
    del arena
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_close_does_not_close_what_got_the_same_number_later() -> None:
    first = SharedArena.create(MIB)
    number = first.descriptor
    first.close()
    second = SharedArena.create(MIB)
    assert second.descriptor == number
    first.close()
    del first
    gc.collect()
    assert os.fstat(second.descriptor).st_size == MIB
    second.close()


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.torch_name and dtype.bits >= 8])
def test_tensors_of_every_dtype(name: str, arena: SharedArena) -> None:
    truth = random_tensor((3, 5), torch_dtype(name), seed=4)
    tensor = arena.tensor(128, name, (3, 5))
    tensor.view(torch.uint8).copy_(truth.view(torch.uint8))
    assert_same(arena.tensor(128, name, (3, 5)), truth)
    assert bytes(arena.buffer[128 : 128 + truth.nbytes]) == truth.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 7, 2)])
def test_tensors_without_elements(shape: tuple[int, ...], arena: SharedArena) -> None:
    assert arena.tensor(MIB, "BF16", shape).shape == shape


def test_a_tensor_without_dimensions(arena: SharedArena) -> None:
    arena.tensor(64, "F64", ()).fill_(2.5)
    assert arena.tensor(64, "F64", (1,)).item() == 2.5


@pytest.mark.parametrize(("offset", "count"), [(-64, 1), (MIB, 1), (MIB - 2, 1), (0, MIB // 4 + 1), (1 << 60, 1)])
def test_a_tensor_outside_its_arena_is_refused(offset: int, count: int, arena: SharedArena) -> None:
    sentence = rf"a tensor of shape \[{count}\] at byte {offset} is not inside its arena of {MIB} bytes"
    with pytest.raises(SharedMemoryError, match=sentence):
        arena.tensor(offset, "F32", (count,))


def test_the_last_byte_can_be_used(arena: SharedArena) -> None:
    arena.tensor(MIB - 4, "F32", (1,)).fill_(7)
    assert arena.tensor(MIB - 4, "F32", (1,)).item() == 7


def test_an_arena_of_no_bytes() -> None:
    arena = SharedArena.create(0)
    assert bytes(arena.buffer) == b""
    arena.reserve(0, 0)
    assert arena.tensor(0, "F32", (0,)).numel() == 0
    with pytest.raises(SharedMemoryError):
        arena.tensor(0, "U8", (1,))
    arena.close()


LATE = """
import faulthandler, gc
faulthandler.enable()
from loadmaster.fetch.shared_memory import SharedArena

def made():
    arena = SharedArena.create(1 << 20)
    tensor = arena.tensor(4096, "F32", (1000,))
    tensor.fill_(3)
    return arena, tensor

def check(tensor):
    gc.collect()
    assert (tensor == 3).all()
    tensor.fill_(4)
    assert (tensor == 4).all()

def closed():
    arena, tensor = made()
    assert arena.close() is False, "an arena in use was unmapped"
    assert arena.close() is False
    check(tensor)

def collected():
    arena, tensor = made()
    arena.close()
    del arena
    check(tensor)

def part_of_a_tensor():
    arena, tensor = made()
    tensor = tensor[10:20].view(2, 5)
    assert arena.close() is False, "an arena in use was unmapped"
    check(tensor)

def another_after_closing():
    arena, tensor = made()
    assert arena.remap() is False, "an arena in use was mapped anew"
    check(tensor)

def a_handle():
    arena, tensor = made()
    other = arena.handle().open()
    tensor = other.tensor(4096, "F32", (1000,))
    assert other.close() is False, "an opened arena in use was unmapped"
    arena.close()
    del arena, other
    check(tensor)

for case in (closed, collected, part_of_a_tensor, another_after_closing, a_handle):
    print(case.__name__, flush=True)
    case()
print("all")
"""


@pytest.mark.processes
def test_a_tensor_outlives_its_arena() -> None:
    done = run_python(LATE)
    assert done.stdout.splitlines()[-1:] == ["all"], done.stderr


def test_memory_is_mapped_anew_where_nobody_uses_it(arena: SharedArena) -> None:
    arena.tensor(0, "U8", (16,)).fill_(9)
    inode = os.fstat(arena.descriptor).st_ino
    assert arena.remap()
    assert os.fstat(arena.descriptor).st_ino == inode
    assert arena.tensor(0, "U8", (16,)).tolist() == [9] * 16


# Its memory.


def test_no_memory_is_taken_before_it_is_reserved(arena: SharedArena) -> None:
    assert allocated(arena) == 0
    arena.reserve(0, MIB)
    assert allocated(arena) == MIB


def test_a_range_is_reserved_without_the_rest() -> None:
    arena = SharedArena.create(64 * MIB)
    arena.reserve(3 * MIB + 5, 4 * MIB)
    assert 4 * MIB <= allocated(arena) <= 12 * MIB  # in huge pages, if the system has them for shared memory
    arena.reserve(3 * MIB + 5, 4 * MIB)
    assert allocated(arena) <= 12 * MIB
    arena.close()


@pytest.mark.parametrize("range_", [(0, 0), (MIB, 0), (5, -1)])
def test_nothing_to_reserve(range_: tuple[int, int], arena: SharedArena) -> None:
    arena.reserve(*range_)
    assert allocated(arena) == 0


def test_reserving_keeps_what_is_there(any_arena: SharedArena) -> None:
    any_arena.tensor(0, "U8", (MIB,)).fill_(5)
    any_arena.reserve(0, MIB)
    assert any_arena.tensor(0, "U8", (MIB,)).eq(5).all()


def test_a_kernel_that_cannot_populate_allocates(arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_madvise", lambda: None)
    arena.reserve(0, MIB)
    assert allocated(arena) == MIB


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC, errno.EFAULT])
def test_memory_that_is_refused(code: int, arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, length: int) -> bool:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shared_memory, "_populate", refuse)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 3 * MIB)
    with pytest.raises(SharedMemoryError, match=r"1\.00 MiB of shared memory were asked for, .* 3\.00 MiB are left"):
        arena.reserve(0, MIB)


def test_another_error_of_the_kernel_is_not_taken_for_that(arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, length: int) -> bool:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(shared_memory, "_populate", refuse)
    with pytest.raises(PermissionError):
        arena.reserve(0, MIB)


@pytest.mark.processes
@pytest.mark.parametrize("root", [pytest.param(True, marks=as_root)])
def test_a_full_file_system_is_an_error_and_no_crash(root: bool, tmp_path: Path) -> None:
    """Touching such memory is a SIGBUS; reserving it says so before."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(8 * MIB)
            arena = SharedArena.from_descriptor(os.dup(file.fileno()), 8 * MIB)
            with pytest.raises(SharedMemoryError, match=r"8\.00 MiB of shared memory were asked for"):
                arena.reserve(0, 8 * MIB)
            arena.close()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_more_than_there_is_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 3 * MIB)
    check_available(3 * MIB, "the weights")
    sentence = r"the weights need 3\.00 MiB of shared memory, and only 3\.00 MiB are available here"
    with pytest.raises(SharedMemoryError, match=sentence):
        check_available(3 * MIB + 1, "the weights")


LIMITED = """
import resource, sys
from loadmaster.errors import SharedMemoryError
from loadmaster.fetch.shared_memory import SharedArena
resource.setrlimit(getattr(resource, sys.argv[1]), (1 << 30, 1 << 30))
descriptors = len(__import__("os").listdir("/proc/self/fd"))
try:
    SharedArena.create(1 << 31)
except SharedMemoryError as error:
    print(error)
assert len(__import__("os").listdir("/proc/self/fd")) == descriptors
SharedArena.create(1 << 20).close()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ("RLIMIT_AS", "2.00 GiB of shared memory cannot be mapped: [Errno 12] Cannot allocate memory"),
        ("RLIMIT_FSIZE", "2.00 GiB of shared memory cannot be had: [Errno 27] File too large"),
    ],
)
def test_a_limit_of_the_process(limit: str, sentence: str) -> None:
    done = run_python(LIMITED, limit)
    assert (done.stdout.strip(), done.stderr) == (sentence, "")


def test_no_descriptor_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    filler = [os.open("/dev/null", os.O_RDONLY)]
    while filler[-1] < highest:
        filler.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (filler[-1] + 1, hard))
    try:
        with pytest.raises(SharedMemoryError, match=r"1\.00 MiB of shared memory cannot be had: .*Too many open files"):
            SharedArena.create(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filler:
            os.close(descriptor)


GROUP = """
import sys
from loadmaster.errors import SharedMemoryError
from loadmaster.fetch.shared_memory import check_available
sys.stdin.readline()
check_available(8 << 20, "a little")
try:
    check_available(1 << 30, "the weights")
except SharedMemoryError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.parametrize("root", [pytest.param(True, marks=as_root)])
def test_the_limit_of_a_real_group(root: bool) -> None:
    controller = Path("/sys/fs/cgroup/memory")
    group = controller / f"loadmaster-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
    except OSError as error:
        pytest.skip(f"no group can be made in {controller}: {error.strerror}")
    try:
        with subprocess.Popen(
            [sys.executable, "-c", GROUP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
            output, _ = child.communicate("\n", timeout=60)
    finally:
        group.rmdir()
    assert output.startswith("the weights need 1.00 GiB of shared memory, and only 2")
    assert output.endswith("MiB are available here\n")


# Without memfd.


@pytest.mark.parametrize("how", ["python", "kernel"])
def test_without_memfd_a_file_of_dev_shm_takes_its_place(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_memfd(monkeypatch, how)
    arena = SharedArena.create(MIB)
    path = os.readlink(f"/proc/self/fd/{arena.descriptor}")  # noqa: PTH115  it has no path any more
    assert path.startswith("/dev/shm/loadmaster-")
    assert path.endswith(" (deleted)")
    assert allocated(arena) == MIB  # so that a full /dev/shm shows at once
    arena.close()


def test_a_refusal_of_memfd_is_not_taken_for_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(SharedMemoryError, match="Too many open files in system"):
        SharedArena.create(MIB)


def test_a_full_dev_shm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    without_memfd(monkeypatch, "python")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryError, match=r"1\.00 MiB of shared memory cannot be had: .*No space left"):
        SharedArena.create(MIB)


KILLED = """
import os, sys, time
from loadmaster.fetch.shared_memory import SharedArena
del os.memfd_create
arena = SharedArena.create(1 << 20)
arena.buffer[:4] = b"full"
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_killed_process_leaves_nothing_in_dev_shm() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    assert names_in_dev_shm() == set()


# Handles.


def handle_to(arena: SharedArena, value: float = 1.0) -> Handle:
    arena.tensor(4096, "F32", (1000,)).fill_(value)
    return Handle(arena.handle(), 4096, "F32", (1000,))


def test_a_handle_is_small(arena: SharedArena) -> None:
    handle = handle_to(arena)
    sent = pickle.dumps(handle)
    assert len(sent) < 250
    assert pickle.loads(sent) == handle


def test_a_handle_in_the_same_process(any_arena: SharedArena) -> None:
    tensor = handle_to(any_arena, 2).open()
    assert tensor.eq(2).all()
    any_arena.tensor(4096, "F32", (1,)).fill_(5)
    assert tensor[0] == 5


@pytest.mark.processes
def test_bytes_go_both_ways_between_processes(any_arena: SharedArena, opener: Opener) -> None:
    handle = handle_to(any_arena, 2)
    assert opener.ask("read", handle) == 2000
    opener.ask("fill", handle, 3)
    assert any_arena.tensor(4096, "F32", (1000,)).eq(3).all()


def test_handles_of_one_arena_share_one_mapping_and_no_descriptors(arena: SharedArena) -> None:
    handle = arena.handle()
    before = descriptors(), mappings()
    tensors = [open_handle(Handle(handle, 64 * number, "F32", (4,))) for number in range(10_000)]
    found = descriptors(), mappings()
    tensors[77].fill_(8)
    seen = arena.tensor(64 * 77, "F32", (1,)).item()
    del tensors
    gc.collect()
    assert seen == 8
    assert found[0] <= before[0] + 1
    assert found[1] <= before[1] + 1
    assert (descriptors(), mappings()) == before


def test_threads_that_open_one_arena_share_one_mapping(arena: SharedArena) -> None:
    handle = handle_to(arena)
    before = mappings()
    barrier = threading.Barrier(16)
    tensors: list[torch.Tensor] = []

    def run() -> None:
        barrier.wait()
        tensors.extend(handle.open() for _ in range(50))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tensors) == 800
    found = mappings()
    tensors.clear()
    assert found <= before + 1


def test_an_opened_arena_can_be_closed_and_opened_again(arena: SharedArena) -> None:
    handle = handle_to(arena, 4)
    for _ in range(3):
        opened = handle.arena.open()
        assert opened.tensor(4096, "F32", (1,)).item() == 4
        assert opened.close()
        del opened


def test_a_closed_arena_that_is_still_around_does_not_spoil_new_handles(arena: SharedArena) -> None:
    handle = handle_to(arena, 4)
    opened = handle.arena.open()
    assert opened.close()
    assert handle.open().eq(4).all()
    del opened


CLOSED = "process {pid} has closed these weights; fetch them again"
GONE = "process {pid}, which held these weights, is gone, and they are gone with it; fetch them again"


def refusal(handle: Handle) -> str:
    with pytest.raises(SharedMemoryError) as caught:
        handle.open()
    return str(caught.value)


def test_a_closed_arena(arena: SharedArena) -> None:
    handle = handle_to(arena)
    arena.close()
    assert refusal(handle) == CLOSED.format(pid=os.getpid())


def open_file(path: Path) -> Callable[[], None]:
    descriptor = os.open(path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 2 * MIB)
    return lambda: os.close(descriptor)


def open_read_only(path: Path) -> Callable[[], None]:
    (path / "other").touch()
    descriptor = os.open(path / "other", os.O_RDONLY)
    return lambda: os.close(descriptor)


def open_folder(path: Path) -> Callable[[], None]:
    descriptor = os.open(path, os.O_RDONLY)
    return lambda: os.close(descriptor)


def open_socket(path: Path) -> Callable[[], None]:
    return socket.socket().close


def open_pipe(path: Path) -> Callable[[], None]:
    ends = os.pipe()
    return lambda: [os.close(end) for end in ends] and None


def open_arena(path: Path) -> Callable[[], None]:
    arena = SharedArena.create(MIB)
    return lambda: arena.close() and None


@pytest.mark.parametrize("reuse", [open_file, open_read_only, open_folder, open_socket, open_pipe, open_arena])
def test_the_descriptor_leads_to_something_else_now(
    reuse: Callable[[Path], Callable[[], None]], tmp_path: Path
) -> None:
    arena = SharedArena.create(MIB)
    handle = handle_to(arena)
    arena.close()
    put_away = reuse(tmp_path)
    assert os.path.lexists(f"/proc/self/fd/{handle.arena.descriptor}")
    before = descriptors()
    try:
        assert refusal(handle) == CLOSED.format(pid=os.getpid())
        assert descriptors() == before
    finally:
        put_away()


def test_another_process_has_the_number_now(arena: SharedArena) -> None:
    handle = handle_to(arena)
    other = handle._replace(arena=handle.arena._replace(started=handle.arena.started + 1))
    assert refusal(other) == GONE.format(pid=os.getpid())


def test_there_is_no_such_process(arena: SharedArena) -> None:
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    handle = handle_to(arena)
    assert refusal(handle._replace(arena=handle.arena._replace(pid=highest + 1))) == GONE.format(pid=highest + 1)


OWNER = """
import pickle, sys, time
from loadmaster.fetch.shared_memory import Handle, SharedArena
arena = SharedArena.create(1 << 20)
arena.buffer[4096:4100] = b"full"
pickle.dump(Handle(arena.handle(), 4096, "U8", (4,)), sys.stdout.buffer)
sys.stdout.buffer.flush()
time.sleep(60)
"""


@pytest.mark.processes
def test_weights_of_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        handle: Handle = pickle.load(child.stdout)
        tensor = handle.open()
        assert bytes(tensor.tolist()) == b"full"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        again = handle._replace(offset=0)  # a zombie now; what is open stays
        assert bytes(tensor.tolist()) == b"full"
        assert bytes(again.open()[:4].tolist()) == b"\0" * 4
        del tensor
        gc.collect()
        assert "fetch them again" in refusal(handle)
        child.wait()
    assert refusal(handle) == GONE.format(pid=child.pid)


@pytest.mark.processes
@pytest.mark.parametrize("root", [pytest.param(True, marks=as_root)])
def test_another_user_is_refused_and_told_why(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = [SharedArena.create(MIB)]
    without_memfd(monkeypatch, "python")
    arenas.append(SharedArena.create(MIB))
    stranger = Opener()
    try:
        for arena in arenas:
            with pytest.raises(SharedMemoryError) as caught:
                stranger.ask("read_as", 65534, handle_to(arena))
            assert str(caught.value) == (
                f"the weights of process {os.getpid()} cannot be opened: Permission denied; "
                "only processes of the same user can"
            )
    finally:
        stranger.close()
        for arena in arenas:
            arena.close()


def test_a_handle_beyond_its_arena(arena: SharedArena) -> None:
    handle = handle_to(arena)
    with pytest.raises(SharedMemoryError, match="is not inside its arena"):
        handle._replace(shape=(MIB,)).open()


def test_a_handle_that_claims_more_than_there_is(arena: SharedArena) -> None:
    handle = arena.handle()._replace(num_bytes=2 * MIB)
    assert refusal(Handle(handle, 0, "U8", (1,))) == CLOSED.format(pid=os.getpid())


def test_descriptors_that_are_sent_are_taken_over(arena: SharedArena) -> None:
    handle_to(arena, 6)
    other = SharedArena.from_descriptor(os.dup(arena.descriptor), MIB)
    number = other.descriptor
    assert other.tensor(4096, "F32", (1,)).item() == 6
    assert other.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_descriptor_that_cannot_be_mapped_is_closed_all_the_same() -> None:
    descriptor = os.open(tempfile.gettempdir(), os.O_RDONLY)
    with pytest.raises((OSError, SharedMemoryError)):
        SharedArena.from_descriptor(descriptor, MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(descriptor)


def test_handles_compare_by_what_they_name(arena: SharedArena) -> None:
    assert arena.handle() == arena.handle()
    assert isinstance(hash(arena.handle()), int)
    assert arena.handle() == ArenaHandle(*arena.handle())
