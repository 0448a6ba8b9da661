"""The folder in which leases lie, and how files there come, are known to be alive, and go.

    lease.<group>.<member>.<token>   one process's claim; alive while the process holds a lock (flock) on it
    done.<group>.<member>            a rank that has ended while others of its group still load
    new.<token>                      a lease that is being made, on file systems without nameless files
    generation                       changes whenever a lease comes or goes; mapped by all

A lease becomes visible complete and locked, so one that is not locked belongs to a process that has ended, however it
ended. Whoever comes, goes or sweeps holds a lock on the folder itself. Whoever only looks holds none: it asks for a
shared lock on a lease, which only the owner's exclusive one refuses, so that two who look never take each other for an
owner. Names are never used twice, so a name that led to a dead lease never leads to a live one.

A process may be killed between any two steps. What it leaves is an unlocked file, or a generation that nobody needs;
both are removed by the next that looks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from loadmaster.errors import InputError
from loadmaster.host.notices import warn_once
from loadmaster.share.lease_file import MAX_BYTES, LeaseFile, Membership, parse_lease

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Folder", "LeaseName", "RefusedError", "folder_path", "open_folder"]

LOCK_SECONDS = 5.0
"""How long to wait for the lock on the folder. It is held for a fraction of a millisecond, unless its holder was
stopped in between, by a debugger or with a container that was frozen; then loading goes on without leases."""

_GENERATION = "generation"
_GENERATION_BYTES = 64
_NONE = "-"
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _CLOEXEC | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class RefusedError(Exception):
    """A folder that cannot hold leases; the text is a sentence on why."""


class LeaseName(NamedTuple):
    """The parts of a lease's name; group and member are ``-`` for a process that no launcher declared."""

    group: str
    member: str

    @classmethod
    def of(cls, membership: Membership | None) -> LeaseName:
        return cls(_NONE, _NONE) if membership is None else cls(membership.group, membership.member)

    @classmethod
    def parse(cls, name: str) -> LeaseName | None:
        """Return the parts, or None for what is no lease."""
        words = name.split(".")
        return cls(words[1], words[2]) if len(words) == 4 and words[0] == "lease" else None

    @property
    def is_rank(self) -> bool:
        return self.group != _NONE


def folder_path(environ: Mapping[str, str]) -> str:
    """Return where leases lie: ``LOADMASTER_DIR``, else the user's run-time folder, else shared memory.

    Raises
    ------
    InputError
        If ``LOADMASTER_DIR`` is no absolute path.
    RefusedError
        If this platform has no locks that end with their process.
    """
    if fcntl is None:
        raise RefusedError("this platform has no flock")
    given = environ.get("LOADMASTER_DIR")
    if given:
        if not os.path.isabs(given) or "\0" in given:  # noqa: PTH117
            raise InputError(f"LOADMASTER_DIR must be an absolute path, not {given[:80]!r}")
        return given
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError, ValueError):
        if runtime.startswith("/") and os.stat(runtime).st_uid == os.geteuid():  # noqa: PTH116
            return f"{runtime}/loadmaster"
    return f"/dev/shm/loadmaster-{os.geteuid()}"


def open_folder(environ: Mapping[str, str], *, create: bool) -> Folder | None:
    """Open the folder; None where there is none and it is not to be made.

    The user's own folder has to be nobody else's: mode 0700. One that was named in ``LOADMASTER_DIR`` may belong to
    root and may be readable by others; it may be writable by others if its sticky bit keeps them from removing what is
    not theirs, as in ``/tmp``. Then the leases of all users count.

    Raises
    ------
    InputError
        If ``LOADMASTER_DIR`` is no absolute path.
    RefusedError
        If it is not such a folder.
    OSError
        If it cannot be made or opened.
    """
    path = folder_path(environ)
    given = bool(environ.get("LOADMASTER_DIR"))
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)  # noqa: PTH102
    try:
        descriptor = os.open(path, os.O_RDONLY | _CLOEXEC | os.O_DIRECTORY | (0 if given else _NO_FOLLOW))
    except FileNotFoundError:
        if create:
            raise
        return None
    try:
        return Folder(path, descriptor, _check(path, os.fstat(descriptor), given))
    except BaseException:
        os.close(descriptor)
        raise


def _check(path: str, found: os.stat_result, given: bool) -> bool:
    """Whether other users share the folder; raises RefusedError where it must not be used."""
    if found.st_uid != os.geteuid() and not (given and found.st_uid == 0):
        raise RefusedError(f"{path} belongs to user {found.st_uid}")
    mode = stat.S_IMODE(found.st_mode)
    if not given and mode & 0o077:
        raise RefusedError(f"{path} has mode {mode:04o}, not 0700")
    if given and mode & 0o022 and not mode & stat.S_ISVTX:
        raise RefusedError(f"others may write in {path} (mode {mode:04o}) and no sticky bit keeps them from our files")
    return bool(mode & 0o022)


class Folder:
    """An open folder of leases.

    Attributes
    ----------
    shared
        Whether other users' leases count.
    """

    __slots__ = ("descriptor", "path", "shared")

    def __init__(self, path: str, descriptor: int, shared: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.shared = shared

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    @contextlib.contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[bool]:
        """Hold the lock on the folder; yields False where somebody else held it for so long."""
        pause, until = 0.0001, time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
        while not _lock(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
        try:
            yield True
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)  # noqa: PTH208

    # Leases

    def publish(self, lease: LeaseFile) -> tuple[str, int]:
        """Make a lease, complete and locked; return its name and the descriptor that holds the lock.

        The caller holds the lock on the folder.
        """
        group, member = LeaseName.of(lease.membership)
        token = os.urandom(8).hex()
        name, draft = f"lease.{group}.{member}.{token}", f"new.{token}"
        descriptor = self._nameless()
        if descriptor is not None:
            try:
                self._fill(descriptor, lease)
                with contextlib.suppress(OSError):  # no /proc
                    os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=self.descriptor)
                    return name, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOEXEC | _NO_FOLLOW
        descriptor = os.open(draft, flags, 0o600, dir_fd=self.descriptor)
        try:
            self._fill(descriptor, lease)
            os.rename(draft, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self.descriptor)
            os.close(descriptor)
            raise
        return name, descriptor

    def _nameless(self) -> int | None:
        """A file without a name, or None where there is no such thing."""
        if not _TMPFILE:
            return None
        try:
            return os.open(".", _TMPFILE | os.O_RDWR | _CLOEXEC, 0o600, dir_fd=self.descriptor)
        except OSError:
            return None

    def _fill(self, descriptor: int, lease: LeaseFile) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, 0o644 if self.shared else 0o600)  # whatever the umask says
        content = lease.to_json()
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, name: str) -> LeaseFile | None:
        """Return what a live lease says; None for one whose process has ended, and for what is no lease at all.

        The latter gets one warning.
        """
        try:
            with self._opened(name) as descriptor:
                if descriptor is None:
                    return None
                content = os.read(descriptor, MAX_BYTES + 1)
                alive = _is_locked(descriptor)
            lease = parse_lease(content)
        except (RefusedError, OSError, ValueError) as error:
            self.warn(name, str(error))
            return None
        return lease if alive else None

    def is_alive(self, name: str) -> bool:
        """Whether the owner of a lease lives; False for what is no lease at all."""
        try:
            with self._opened(name) as descriptor:
                return descriptor is not None and _is_locked(descriptor)
        except (RefusedError, OSError):
            return False

    def warn(self, name: str, why: str) -> None:
        warn_once(__name__, f"{self.path}/{name[:100]!s} is ignored, since {why}")

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """Open a file that may be a lease; None where it is gone."""
        try:
            descriptor = os.open(name, _READ, dir_fd=self.descriptor)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            link = error.errno == errno.ELOOP
            raise RefusedError("it is a symbolic link" if link else f"it cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise RefusedError("it is no regular file")
            if found.st_uid != os.geteuid() and not self.shared:
                raise RefusedError(f"it belongs to user {found.st_uid}")
            if found.st_size > MAX_BYTES:
                raise RefusedError(f"it has {found.st_size} bytes")
            yield descriptor if found.st_nlink else None
        finally:
            os.close(descriptor)

    # Going and sweeping: the caller holds the lock on the folder

    def remove(self, name: str) -> bool:
        """Remove a lease, and return whether that was possible.

        A rank whose siblings still load leaves word that it has ended: its lease is renamed, which needs no room and
        cannot be interrupted half-way.
        """
        own = LeaseName.parse(name)
        if own is not None and own.is_rank and self._has_others(name, own.group):
            done = f"done.{own.group}.{own.member}"
            with contextlib.suppress(OSError):
                os.rename(name, done, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
                return True
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)
            return True
        return False

    def sweep(self, name: str) -> bool:
        """Remove a lease if its process has ended and it is in every way one of ours; return whether it was removed."""
        try:
            with self._opened(name) as descriptor:
                if descriptor is None or _is_locked(descriptor):
                    return False
                parse_lease(os.read(descriptor, MAX_BYTES + 1))
                return self._is_same(name, descriptor) and self.remove(name)
        except (RefusedError, OSError, ValueError):
            return False

    def tidy(self) -> bool:
        """Remove all that processes which have ended left behind; return whether there was any lease of such."""
        names = self.names()
        leases = {name: parsed for name in names if (parsed := LeaseName.parse(name)) is not None}
        swept = {name for name in leases if self.sweep(name)}
        living = {name: parsed for name, parsed in leases.items() if name not in swept and self.is_alive(name)}
        groups = {parsed.group for parsed in living.values()}
        for name in self.names() if swept else names:
            words = name.split(".")
            if (
                (words[0] == "done" and len(words) == 3 and words[1] not in groups)
                or (words[0] == "new" and len(words) == 2 and not self.is_alive(name))
                or (name == _GENERATION and not living)
            ):
                self._unlink_own(name)
        return bool(swept)

    def forget_group(self, membership: Membership | None) -> None:
        """Forget the ranks of a group that have ended, where none of it loads: those that come now are a new run's."""
        if membership is None or self._has_others("", membership.group):
            return
        for name in self.names():
            if name.startswith(f"lease.{membership.group}."):
                self.sweep(name)
            elif name.startswith(f"done.{membership.group}."):
                self._unlink_own(name)

    def has_living(self) -> bool:
        """Whether anybody holds a lease here."""
        return any(self.is_alive(name) for name in self.names() if LeaseName.parse(name) is not None)

    def _has_others(self, name: str, group: str) -> bool:
        start = f"lease.{group}."
        return any(self.is_alive(other) for other in self.names() if other.startswith(start) and other != name)

    def _is_same(self, name: str, descriptor: int) -> bool:
        found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(descriptor))

    def _unlink_own(self, name: str) -> None:
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
                os.unlink(name, dir_fd=self.descriptor)

    # The generation

    def map_generation(self) -> memoryview | None:
        """Map the generation as one number of 64 bits; None where it cannot be mapped.

        In a folder that users share it is not: whoever may write the file may cut it off, and a mapping of what is no
        more kills the process that reads it. The caller holds the lock on the folder.
        """
        if self.shared:
            return None
        flags = os.O_RDWR | os.O_CREAT | _CLOEXEC | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(_GENERATION, flags, 0o600, dir_fd=self.descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.EINVAL, f"{self.path}/{_GENERATION} is no file of ours")
            # Written, not only made longer: where the file system is full, a page that is not there kills whoever
            # touches it.
            if found.st_size < _GENERATION_BYTES and os.pwrite(descriptor, bytes(_GENERATION_BYTES), 0) < 8:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return memoryview(mmap.mmap(descriptor, _GENERATION_BYTES)).cast("Q")
        finally:
            os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Take a lock if nobody holds another; return whether it was taken."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(descriptor: int) -> bool:
    """Whether the owner of a lease holds its lock. The shared one that is taken here goes with the descriptor."""
    return not _lock(descriptor, fcntl.LOCK_SH)
