"""Leases: a process that loads says so, sees who else does, and follows its share while they come and go.

    join   lock the folder | map the generation | make the file, complete and locked | tell the others | unlock
    look   has the generation changed, or a tenth of a second passed? -> read who is there -> divide -> Share
    leave  lock the folder | remove the file | tell the others | the last one removes what is left | unlock

No thread, no process of its own, no signal. A neighbour that is killed tells nobody, which is why a look asks again for
the locks of its neighbours after a tenth of a second. See docs/leases.md.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic, sleep
from types import TracebackType
from typing import NamedTuple

from loadmaster.errors import InputError
from loadmaster.host import Host, read_host
from loadmaster.host.notices import warn_once
from loadmaster.share.fairness import Part, divide_fairly
from loadmaster.share.launcher import read_declared
from loadmaster.share.lease_file import LeaseFile, describe_process
from loadmaster.share.lease_folder import Folder, LeaseName, RefusedError, folder_path, open_folder
from loadmaster.share.share import Share, live_share, own_share, read_request

__all__ = ["Lease", "LiveLease", "lease", "leases_are_on", "live_leases"]

_log = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""How old the knowledge of who was killed may be when a look relies on it."""

CHECKED_AT_ONCE = 32
"""How many neighbours a look asks for their locks. With more of them each looks at those that follow it, so that all
together still see every death; who sees it tells the others."""

MANY = 64
MANY_SECONDS = 0.02
"""With more neighbours than the former the folder is read no more often than once in the latter, however often somebody
comes or goes: all who look read it then, and that must not become the work."""

SETTLE_SECONDS = 0.05
QUIET_SECONDS = 0.01
"""The first look waits until nobody has joined for the latter, at most the former."""

_NOT_MAPPED = memoryview(bytes(8)).cast("Q")


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A process that loads now.

    Attributes
    ----------
    pid
        In its own namespace.
    command
        The beginning of its command line.
    since
        Seconds since 1970.
    threads
        What it has at this moment.
    cpus
        Its usable CPUs.
    weight
        Its weight among its neighbours.
    ranks
        How many ranks its launcher declared on this host; None where none did.
    """

    pid: int
    command: str
    since: float
    threads: int
    cpus: tuple[int, ...]
    weight: float
    ranks: int | None


def leases_are_on(environ: Mapping[str, str]) -> bool:
    """Return whether leases are wanted: unless ``LOADMASTER_LEASES`` is ``off``.

    Raises
    ------
    InputError
        If it is neither ``on`` nor ``off``.
    """
    value = environ.get("LOADMASTER_LEASES", "on")
    if value not in ("on", "off"):
        raise InputError(f"LOADMASTER_LEASES must be on or off, not {value[:40]!r}")
    return value == "on"


def lease(
    weight: float = 1.0,
    *,
    threads: int | None = None,
    host: Host | None = None,
    environ: Mapping[str, str] | None = None,
) -> Lease:
    """Return a lease, which is held from ``with`` or ``join`` to the end of the block or ``leave``.

    While it is held the other processes of this host that load see this one, and ``look()`` returns its share of what
    all of them have.

    Parameters
    ----------
    weight
        Against that of the others: 2 gets twice the threads of 1.
    threads
        Threads asked for; by default ``LOADMASTER_THREADS``, else a fair part. An explicit number never follows.
    host
        By default the host is read when the lease is joined.
    environ
        The environment; by default that of this process.

    Raises
    ------
    InputError
        If ``weight`` is no number above 0.
    """
    return Lease(weight, threads=threads, host=host, environ=environ)


class Lease:
    """A claim of this process to its part of the host, for as long as it loads; see `lease`.

    All leases of a process together are one claim: their weight is the largest of theirs. A process that was forked
    from the holder holds nothing, and its looks return what was last known.
    """

    __slots__ = ("_asked", "_claim", "_division", "_host", "_part", "_settings", "_settled", "_share", "weight")

    def __init__(
        self,
        weight: float = 1.0,
        *,
        threads: int | None = None,
        host: Host | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise InputError(f"the weight of a lease must be a number above 0, not {weight!r}")
        self.weight = float(weight)
        self._asked = (threads, host, environ)
        self._claim: _Claim | None = None
        self._share: Share | None = None

    def __enter__(self) -> Lease:
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def join(self) -> None:
        """Let the others know that this process loads. Where that is not possible one warning says why.

        Raises
        ------
        InputError
            If the lease is held already, or an argument or a ``LOADMASTER_`` variable cannot be used.
        """
        threads, host, environ = self._asked
        environment = os.environ if environ is None else environ
        if self._share is not None:
            raise InputError("this lease is held already; make another one with lease()")
        wanted = leases_are_on(environment)
        self._host = read_host(environ=environment) if host is None else host
        self._division, self._settings = read_request(self._host, None, 1, threads, environment, "workers")
        self._part: Part | None = None
        self._settled = False
        self._share = own_share(self._host, self._division, self._settings)
        if wanted:
            self._claim = _join(self, environment)

    def leave(self) -> None:
        """Let the others know that this process no longer loads; without effect where the lease is not held."""
        claim, self._claim, self._share = self._claim, None, None
        if claim is not None:
            with _guard:
                claim.drop(self)

    def look(self) -> Share:
        """Return the share of this process at this moment.

        The same object as before where nothing has changed, at the price of reading one number from memory and the
        clock: no lock, no system call.

        The first look settles. A rank whose launcher declared n counts n from its first moment, and a process that is
        alone takes its share at once: it will follow when another one comes. One that finds a neighbour which has
        joined within the last 10 ms waits until nobody has joined for so long, for 50 ms at most, so that processes
        which start together begin with what they will have.

        Raises
        ------
        InputError
            If the lease is not held.
        """
        claim = self._claim
        if claim is None:
            return self._known()
        if claim.generation[0] == claim.seen and monotonic() < claim.check_at and self._part is claim.part:
            return self._share or self._known()
        return self._look_again(claim)

    def _known(self) -> Share:
        if self._share is None:
            raise InputError("this lease is not held: look inside `with`, or between join() and leave()")
        return self._share

    def _look_again(self, claim: _Claim) -> Share:
        if claim.lost or self._settings.explicit is not None:
            return self._known()
        if not self._settled:
            self._settled = True
            if self._division.ranks == 1:
                claim.settle()
        # Where another thread looks at this moment, what was known until now is good enough.
        if _guard.acquire(blocking=self._part is None):
            try:
                claim.refresh()
                self._follow(claim.part)
            finally:
                _guard.release()
        return self._known()

    def _follow(self, part: Part | None) -> None:
        if part is None or part is self._part or self._share is None:
            return
        now, before = live_share(self._host, self._division, self._settings, part), self._share
        if now.threads != before.threads:
            _log.info("threads of this process: %d -> %d (%s)", before.threads, now.threads, now.why)
        self._part = part
        self._share = before if now == before else now


def live_leases(environ: Mapping[str, str] | None = None) -> list[LiveLease]:
    """Return the processes of this host that load now, the first that began first; none where leases are off.

    What processes that were killed have left is removed on the way. No folder is made.

    Raises
    ------
    InputError
        If ``LOADMASTER_LEASES`` or ``LOADMASTER_DIR`` cannot be used.
    """
    environment = os.environ if environ is None else environ
    if not leases_are_on(environment):
        return []
    with _guard:
        try:
            folder = open_folder(environment, create=False)
            if folder is None:
                return []
            try:
                return _list(folder)
            finally:
                folder.close()
        except (RefusedError, OSError) as error:
            why = _reason(error, folder_path(environment))
            warn_once(__name__, f"the processes that load cannot be listed: {why}")
            return []


def _list(folder: Folder) -> list[LiveLease]:
    with folder.locked(0) as locked:
        if locked and folder.tidy() and folder.has_living():
            with contextlib.suppress(OSError, ValueError):
                _tell(folder.map_generation())
    names = folder.names()
    living = {name: found for name in names if LeaseName.parse(name) and (found := folder.read(name)) is not None}
    for name in _unknown(names):
        folder.warn(name, "it is no lease")
    parts = divide_fairly(found.to_claim(name, _finished(found, living, names)) for name, found in living.items())
    rows = [
        LiveLease(
            pid=found.pid,
            command=found.command,
            since=found.since,
            threads=parts[name].threads,
            cpus=tuple(sorted(found.cpus)),
            weight=found.weight,
            ranks=None if found.membership is None else found.membership.ranks,
        )
        for name, found in living.items()
    ]
    return sorted(rows, key=lambda row: (row.since, row.pid))


def _unknown(names: list[str]) -> Iterator[str]:
    ours = ("done", "new", "generation")
    return (name for name in names if LeaseName.parse(name) is None and name.partition(".")[0] not in ours)


def _finished(found: LeaseFile, living: Mapping[str, LeaseFile], names: list[str]) -> int:
    """How many ranks of a lease's group have ended: left word of it, or left a lease that nobody holds."""
    if found.membership is None:
        return 0
    group = found.membership.group
    ended = set()
    for name in names:
        words = name.split(".")
        if words[0] in ("lease", "done") and len(words) > 2 and words[1] == group and name not in living:
            ended.add(words[2])
    loading = [other.membership for other in living.values() if other.membership is not None]
    return len(ended.difference(other.member for other in loading if other.group == group))


def _reason(error: Exception, path: str) -> str:
    """The same words whenever the same goes wrong: the system's message has the name of a file that changes."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def _tell(generation: memoryview | None) -> None:
    """Tell all who look that something has changed.

    The number is drawn, not counted: two processes that tell at once cannot undo each other's change.
    """
    if generation is not None:
        generation[0] = int.from_bytes(os.urandom(8), "little")


# The one claim of this process


class _Asked(NamedTuple):
    """What one lease of this process asks for."""

    lease: Lease
    file: LeaseFile


_guard = threading.RLock()
"""Held while this process does anything in a folder. A fork waits for it: no lock that is held for a moment only can be
inherited by a child, which would hold it for longer."""

_claims: dict[str, _Claim] = {}
"""By folder; one, unless somebody changes ``LOADMASTER_DIR`` in between."""

_hooked = False


def _join(holder: Lease, environ: Mapping[str, str]) -> _Claim | None:
    declared = read_declared(environ)
    file = describe_process(holder._host, holder._division, holder._settings, declared, environ, holder.weight)
    path = ""
    with _guard:
        try:
            path = folder_path(environ)
            _hook()
            claim = _claims.get(path) or _Claim(environ)
            claim.add(_Asked(holder, file))
        except (RefusedError, OSError) as error:
            why = _reason(error, path)
            warn_once(__name__, f"this process loads without a lease, with the declared number of ranks: {why}")
            return None
        _claims[path] = claim
    return claim


class _Claim:
    """What this process claims in one folder, for all leases that it holds there, and what it knows of the others.

    Attributes
    ----------
    generation
        Changes when anybody comes or goes.
    seen
        What it was when the folder was last read.
    check_at
        When to ask for the neighbours' locks again, on the monotonic clock.
    part
        What this process gets; the same object while it does not change.
    lost
        Whether this is a child of the process whose claim it is.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        self.asked: list[_Asked] = []
        self.folder: Folder | None = None
        self.file: LeaseFile | None = None
        self.name = ""
        self.descriptor = -1
        self.generation = _NOT_MAPPED
        self.seen = -1
        self.check_at = 0.0
        self.read_at = -math.inf
        self.part: Part | None = None
        self.lost = False
        self.neighbours: dict[str, LeaseFile | None] = {}  # None for what is ignored
        self.checked = ""

    # Coming and going

    def add(self, asked: _Asked) -> None:
        self.asked.append(asked)
        try:
            self._publish()
        except BaseException:
            self.asked.remove(asked)
            if self.file is None and self.folder is not None:
                self.folder.close()
            raise

    def drop(self, holder: Lease) -> None:
        """One lease less; with the last one the claim ends."""
        self.asked = [asked for asked in self.asked if asked.lease is not holder]
        if self.lost:
            return
        if self.asked:
            with contextlib.suppress(RefusedError, OSError):
                self._publish()
            return
        for path in [path for path, claim in _claims.items() if claim is self]:
            del _claims[path]
        self._withdraw()

    def _publish(self) -> None:
        """Have a file that says what all leases of this process ask for."""
        file = self._merged()
        if self.folder is None:
            self.folder = open_folder(self.environ, create=True)
        elif file == self.file:
            return
        assert self.folder is not None
        with self.folder.locked() as locked:
            if not locked:
                raise RefusedError(f"{self.folder.path} is locked by a process that does not go on")
            if self.descriptor < 0:
                self.folder.forget_group(file.membership)
            try:
                name, descriptor = self.folder.publish(file)
            except BaseException:
                if not self.folder.has_living():
                    self.folder.tidy()
                raise
            if self.descriptor >= 0:
                self.folder.remove(self.name)
                os.close(self.descriptor)
            self.name, self.descriptor, self.file = name, descriptor, file
            if self.generation is _NOT_MAPPED:
                self.generation = self._mapped(self.folder)
            self.seen = -1
            self._tell()

    def _merged(self) -> LeaseFile:
        first = self.asked[0].file
        files = [asked.file for asked in self.asked]
        explicit = [file.threads for file in files if file.threads is not None]
        return replace(
            first,
            weight=max(file.weight for file in files),
            threads=max(explicit) if len(explicit) == len(files) else None,
            at_most=max(file.at_most for file in files),
        )

    def _mapped(self, folder: Folder) -> memoryview:
        """The generation; without one everything works, a tenth of a second later."""
        try:
            return folder.map_generation() or _NOT_MAPPED
        except (OSError, ValueError) as error:
            why = _reason(error, folder.path)
            warn_once(__name__, f"changes among processes that load are noticed late: {why}")
            return _NOT_MAPPED

    def _withdraw(self) -> None:
        folder, descriptor = self.folder, self.descriptor
        self.folder, self.descriptor = None, -1
        if folder is None:
            return
        try:
            with contextlib.suppress(OSError), folder.locked() as locked:
                folder.remove(self.name)
                if locked and not folder.has_living():
                    folder.tidy()
                self._tell()
        finally:
            os.close(descriptor)
            folder.close()

    def _tell(self) -> None:
        if self.generation is not _NOT_MAPPED:
            _tell(self.generation)

    # Looking

    def refresh(self) -> None:
        """Read who is there, as far as it may have changed, and divide again if it has."""
        seen = self.generation[0]  # first: what changes from here on will be seen by the next look
        now = monotonic()
        if len(self.neighbours) > MANY and now < self.read_at + MANY_SECONDS:
            return
        check, self.read_at = now >= self.check_at, now
        try:
            self._read(check)
        except (RefusedError, OSError) as error:
            why = _reason(error, folder_path(self.environ))
            warn_once(__name__, f"neighbours that load cannot be read: {why}")
        self.seen = seen
        if check:
            self.check_at = now + CHECK_SECONDS

    def _read(self, check: bool) -> None:
        if self.folder is None or self.file is None:
            return
        names = self.folder.names()
        if self.name not in names:
            names = self._come_back()
        dead = []
        known = {name: self.neighbours[name] for name in names if name in self.neighbours}
        for name in names:
            if name not in known and name != self.name and LeaseName.parse(name) is not None:
                known[name] = self.folder.read(name)
                if known[name] is None:
                    dead.append(name)
        for name in _unknown(names):
            self.folder.warn(name, "it is no lease")
        if check:
            dead += [name for name, file in known.items() if file is None and name not in dead]  # not swept as yet
            dead += [name for name in self._due(known) if not self.folder.is_alive(name)]
        self.neighbours = known | dict.fromkeys(dead)
        self._sweep(dead)
        living = {name: file for name, file in self.neighbours.items() if file is not None} | {self.name: self.file}
        claims = [file.to_claim(name, _finished(file, living, names)) for name, file in living.items()]
        part = divide_fairly(claims)[self.name]
        if part != self.part:
            self.part = part

    def _due(self, known: Mapping[str, LeaseFile | None]) -> list[str]:
        """The neighbours whose locks are to be asked for now: those that follow the ones of the last time."""
        living = sorted(name for name, file in known.items() if file is not None)
        if len(living) <= CHECKED_AT_ONCE:
            return living
        last = self.checked or self.name
        start = next((i for i, name in enumerate(living) if name > last), 0)
        due = (living[start:] + living[:start])[:CHECKED_AT_ONCE]
        self.checked = due[-1]
        return due

    def _sweep(self, dead: list[str]) -> None:
        """Remove leases of processes that were killed, unless somebody else is about to."""
        if not dead or self.folder is None:
            return
        with self.folder.locked(0) as locked:
            if locked and [name for name in dead if self.folder.sweep(name)]:
                self._tell()

    def _come_back(self) -> list[str]:
        """Somebody has removed our lease, or the whole folder: make it again."""
        assert self.folder is not None
        self.folder.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.folder, self.descriptor, self.generation, self.neighbours = None, -1, _NOT_MAPPED, {}
        self._publish()
        return [] if self.folder is None else self.folder.names()

    def settle(self) -> None:
        """Wait until nobody has joined for a moment; not at all where nobody else is there or all began long ago."""
        until = monotonic() + SETTLE_SECONDS
        while True:
            with _guard:
                self.refresh()
            now = monotonic()
            ages = [now - file.started for file in self.neighbours.values() if file is not None]
            if now >= until or not any(0 <= age < QUIET_SECONDS for age in ages):
                return
            sleep(0.001)


# The process itself


def _hook() -> None:
    """See to forks and to the end of this process; at its first lease, since importing changes nothing."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        atexit.register(_at_exit)


def _before_fork() -> None:
    _guard.acquire()


def _after_fork() -> None:
    _guard.release()


def _in_child() -> None:
    """Let go of the parent's leases: a lock belongs to all who have the descriptor, and ends with the last of them."""
    global _guard
    _guard = threading.RLock()
    for claim in _claims.values():
        claim.lost = True
        if claim.descriptor >= 0:
            os.close(claim.descriptor)
        if claim.folder is not None:
            claim.folder.close()
        claim.folder, claim.descriptor, claim.generation, claim.seen = None, -1, _NOT_MAPPED, 0
        claim.check_at = math.inf
    _claims.clear()


def _at_exit() -> None:
    with _guard:
        for claim in list(_claims.values()):
            claim.asked.clear()
            claim._withdraw()
        _claims.clear()
