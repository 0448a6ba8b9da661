"""Leases where something is wrong: files that are none, folders of others, file systems and sandboxes that refuse."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lease_processes import Process, Start, until

from loadmaster.share import lease_folder
from loadmaster.share.lease import lease, live_leases
from loadmaster.share.lease_folder import folder_path

pytestmark = pytest.mark.processes

FOUR = [0, 1, 2, 3]
WITHOUT = "this process loads without a lease, with the declared number of ranks: "
LIBC = ctypes.CDLL(None, use_errno=True)


def loads_without(process: Process, *words: str) -> str:
    """Hold a lease that is none; return the only warning, which has all of these words."""
    for _ in range(2):
        process.join(FOUR)
        assert process.look()["threads"] == 2  # two ranks are declared
        process.leave()
    (warning,) = process.log()
    assert warning.startswith(f"WARNING {WITHOUT}")
    for word in words:
        assert word in warning
    return str(warning)


def declared(start: Start, **environment: str) -> Process:
    return start(LOADMASTER_LOCAL_SIZE="2", **environment)


# Files that are no leases


def symlink(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def huge(path: Path) -> None:
    path.write_bytes(b" " * 65537)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def foreign(path: Path) -> None:
    path.write_text("{}")
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can make a file of another user")


def without(key: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        good = next(path.parent.glob("lease.-.-.*"))
        document = json.loads(good.read_text())
        del document[key]
        path.write_text(json.dumps(document))

    return make


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("lease.-.-.1", symlink, "it is a symbolic link"),
        ("lease.-.-.1", huge, "it has 65537 bytes"),
        ("lease.-.-.1", Path.mkdir, "it is no regular file"),
        ("lease.-.-.1", fifo, "it is no regular file"),
        ("lease.-.-.1", Path.touch, "it is not JSON"),
        ("lease.-.-.1", lambda path: path.write_bytes(b"[" * 60000), "it is not JSON"),
        ("lease.-.-.1", lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not JSON"),
        ("lease.-.-.1", lambda path: path.write_text("[]"), "it is not a JSON object"),
        ("lease.-.-.1", lambda path: path.write_text('{"version": 2}'), "its version is 2, not 1"),
        ("lease.-.-.1", without("cores"), "its cores are no list of CPUs"),
        ("lease.-.-.1", foreign, "it belongs to user 12345"),
        ("notes.txt", Path.touch, "it is no lease"),
        ("lease.old", Path.touch, "it is no lease"),
    ],
)
def test_what_is_no_lease_is_ignored_with_one_warning(
    start: Start, folder: Path, name: str, make: Callable[[Path], object], why: str
) -> None:
    one, two = start(), start()
    one.join(FOUR)
    make(folder / name)
    two.join(FOUR)
    for _ in range(2):
        assert [process.look()["threads"] for process in (one, two)] == [2, 2]
        assert len(two.live()) == 2
    for process in (one, two):
        assert [line for line in process.log() if line.startswith("WARNING")] == [
            f"WARNING {folder}/{name} is ignored, since {why}"
        ]
    one.leave()
    two.leave()
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_lease_that_nobody_holds_is_none(start: Start, folder: Path) -> None:
    one, two = start(), start()
    one.join(FOUR)
    (good,) = folder.glob("lease.*")
    good.with_name("lease.-.-.copy").write_bytes(good.read_bytes())
    two.join(FOUR)
    assert two.look()["threads"] == 2
    assert not good.with_name("lease.-.-.copy").exists()


def test_who_looks_is_not_taken_for_the_owner(start: Start, folder: Path) -> None:
    one = start()
    one.join(FOUR)
    (good,) = folder.glob("lease.*")
    dead = good.with_name("lease.-.-.dead")
    dead.write_bytes(good.read_bytes())
    with dead.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert len(one.live()) == 1
        assert one.look()["workers"] == 1
    assert not dead.exists()


def test_keys_that_are_not_known_are_passed_over(start: Start, folder: Path) -> None:
    one, two = start(), start()
    one.join(FOUR)
    (good,) = folder.glob("lease.*")
    document = json.loads(good.read_text())
    copy = good.with_name("lease.-.-.newer")
    copy.write_text(json.dumps({**document, "colour": "blue"}))
    with copy.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        two.join(FOUR)
        assert two.look()["workers"] == 3


# Folders


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_folder_that_others_may_change_is_refused(start: Start, folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    loads_without(declared(start), f"others may write in {folder} (mode {mode:04o})")
    assert list(folder.iterdir()) == []
    assert live_leases() == []


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_the_folder_of_a_user_is_nobody_elses(start: Start, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "loadmaster"
    folder.mkdir()
    folder.chmod(mode)
    one = declared(start, LOADMASTER_DIR="", XDG_RUNTIME_DIR=str(tmp_path))
    loads_without(one, f"{folder} has mode {mode:04o}, not 0700")


def test_the_folder_in_the_run_time_folder_is_made_for_the_user_alone(start: Start, tmp_path: Path) -> None:
    one = start(LOADMASTER_DIR="", XDG_RUNTIME_DIR=str(tmp_path))
    one.join()
    assert (tmp_path / "loadmaster").stat().st_mode & 0o7777 == 0o700
    assert len(list((tmp_path / "loadmaster").iterdir())) == 2


def test_a_symbolic_link_in_place_of_the_folder_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "loadmaster").symlink_to(tmp_path / "elsewhere")
    loads_without(declared(start, LOADMASTER_DIR="", XDG_RUNTIME_DIR=str(tmp_path)), str(tmp_path / "loadmaster"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_where_the_folder_is(tmp_path: Path) -> None:
    uid = os.geteuid()
    assert folder_path({}) == f"/dev/shm/loadmaster-{uid}"
    assert folder_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/loadmaster"
    assert folder_path({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == f"/dev/shm/loadmaster-{uid}"
    assert folder_path({"XDG_RUNTIME_DIR": "relative"}) == f"/dev/shm/loadmaster-{uid}"
    assert folder_path({"XDG_RUNTIME_DIR": str(tmp_path), "LOADMASTER_DIR": "/a"}) == "/a"


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(start: Start, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    loads_without(declared(start), f"{folder} belongs to user 12345")


def test_a_folder_that_cannot_be_made(start: Start, folder: Path) -> None:
    loads_without(declared(start, LOADMASTER_DIR=str(folder / "deep" / "deeper")), "No such file or directory")
    folder.write_text("")
    loads_without(declared(start), "Not a directory")


@pytest.mark.root
def test_users_share_a_folder_that_a_sticky_bit_protects(start: Start) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        Path(shared).chmod(0o1777)
        mine, theirs = start(LOADMASTER_DIR=shared), start(LOADMASTER_DIR=shared)
        theirs.become(65534)
        mine.join(FOUR)
        theirs.join(FOUR)
        for process in (mine, theirs):
            until(lambda process=process: process.look()["workers"] == 2)  # type: ignore[misc]
            assert len(process.live()) == 2
        theirs.kill()
        assert until(lambda: mine.look()["workers"] == 1) < 0.2
        theirs = start(LOADMASTER_DIR=shared)
        theirs.become(65534)
        theirs.join(FOUR)
        mine.kill()
        assert until(lambda: theirs.look()["workers"] == 1) < 0.5
        theirs.leave()
        assert mine.child.returncode == -9
        assert [line for line in theirs.log() if not line.startswith("INFO")] == []
        left = list(Path(shared).iterdir())
        assert len(left) <= 1  # what root has left only root may remove
        live = start(LOADMASTER_DIR=shared)
        assert live.live() == []
        assert list(Path(shared).iterdir()) == []


def test_a_holder_of_the_folder_that_does_not_go_on_is_not_waited_for_long(start: Start, folder: Path) -> None:
    one, two = declared(start), start()
    two.join(FOUR)
    for process in (one, two):
        process.wait_for_the_folder(0.05)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        loads_without(one, f"{folder} is locked by a process that does not go on")
        assert len(one.live()) == 1
        two.leave()
        assert list(folder.glob("lease.*")) == []
    finally:
        os.close(descriptor)


# File systems and sandboxes


@pytest.fixture
def mount(folder: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a file system in memory at the folder, with options; it is unmounted at the end."""
    mounted = []

    def make(options: str) -> None:
        if not mounted:
            folder.mkdir()
        flags = 0 if not mounted else 32 | 1  # MS_REMOUNT | MS_RDONLY
        if LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"mode=0700{options}".encode()) != 0:
            pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
        mounted.append(options)

    yield make
    if mounted:
        LIBC.umount2(os.fsencode(folder), 2)  # MNT_DETACH


@pytest.mark.root
@pytest.mark.parametrize("options", [",size=4k", ",nr_inodes=2"])
def test_a_full_file_system(start: Start, folder: Path, mount: Callable[[str], None], options: str) -> None:
    mount(options)
    (folder / "filler").write_bytes(b"x" * 4096 if "size" in options else b"")
    loads_without(declared(start), "No space left on device")
    assert live_leases() == []


@pytest.mark.root
def test_room_for_the_lease_alone(start: Start, folder: Path, mount: Callable[[str], None]) -> None:
    mount(",size=4k")
    one = start()
    one.join(FOUR)
    assert one.look()["threads"] == 4
    (warning,) = one.log()
    assert "changes among processes that load are noticed late: " in warning
    assert len(one.live()) == 1
    one.leave()
    assert list(folder.iterdir()) == []


@pytest.mark.root
def test_a_read_only_file_system(start: Start, folder: Path, mount: Callable[[str], None]) -> None:
    mount("")
    mount("")
    loads_without(declared(start), "Read-only file system")


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOLCK])
def test_a_sandbox_that_forbids_locks(start: Start, folder: Path, error: int) -> None:
    one = declared(start)
    one.forbid_flock(error)
    loads_without(one, os.strerror(error))
    assert list(folder.iterdir()) == []


def test_a_system_without_flock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease_folder, "fcntl", None)
    with lease() as own:
        assert own.look().workers == 1
    assert [record.message for record in caplog.records] == [f"{WITHOUT}this platform has no flock"]


def test_a_generation_that_is_none_makes_changes_late_but_not_lost(start: Start, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "generation").symlink_to("/etc/passwd")
    one, two = start(), start()
    one.join(FOUR)
    two.join(FOUR)
    until(lambda: [process.look()["threads"] for process in (one, two)] == [2, 2], 0.3)
    two.leave()
    until(lambda: one.look()["threads"] == 4, 0.3)
    assert ["late" in line for line in one.log() if line.startswith("WARNING")] == [True]
    assert Path("/etc/passwd").stat().st_size > 8


def test_a_generation_that_was_cut_off_is_made_whole_before_it_is_mapped(start: Start, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "generation").touch()
    one = start()
    one.join(FOUR)
    assert one.look()["threads"] == 4
    assert (folder / "generation").stat().st_size == 64
