"""What this process claims in the folder of leases, and what it knows of the others; see `loadmaster.share.lease`.

add      lock the folder | make the file, complete and locked | map the generation | tell the others | unlock
refresh  read who is there | ask some for their locks | sweep the dead | divide
drop     lock the folder | remove the file | the last one removes what is left | tell the others | unlock
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic, sleep

from loadmaster.host.notices import warn_once
from loadmaster.share.fairness import Part, divide_fairly
from loadmaster.share.lease_file import LeaseFile
from loadmaster.share.lease_folder import Folder, LeaseName, RefusedError, folder_path, open_folder

__all__ = ["ProcessClaim", "divide_living", "guard", "join_claim", "reason", "tell", "unknown"]

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


guard = threading.RLock()
"""Held while this process does anything in a folder. A fork waits for it: no lock that is held for a moment only can be
inherited by a child, which would hold it for longer."""

_claims: dict[str, ProcessClaim] = {}
"""By folder; one, unless somebody changes ``LOADMASTER_DIR`` in between."""

_hooked = False


def join_claim(holder: object, file: LeaseFile, environ: Mapping[str, str]) -> ProcessClaim | None:
    """Return the claim of this process with one lease more; None, after a warning, where there can be none."""
    path = ""
    with guard:
        try:
            path = folder_path(environ)
            _hook()
            claim = _claims.get(path) or ProcessClaim(environ)
            claim.add(holder, file)
        except (RefusedError, OSError) as error:
            why = reason(error, path)
            warn_once(__name__, f"this process loads without a lease, with the declared number of ranks: {why}")
            return None
        _claims[path] = claim
    return claim


class ProcessClaim:
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
        self.asked: dict[object, LeaseFile] = {}  # holder -> what it asks for
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

    def add(self, holder: object, file: LeaseFile) -> None:
        """One lease more."""
        self.asked[holder] = file
        try:
            self._publish()
        except BaseException:
            del self.asked[holder]
            if self.file is None and self.folder is not None:
                self.folder.close()
            raise

    def drop(self, holder: object) -> None:
        """One lease less; with the last one the claim ends."""
        self.asked.pop(holder, None)
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
            self._announce()

    def _merged(self) -> LeaseFile:
        files = list(self.asked.values())
        explicit = [file.threads for file in files if file.threads is not None]
        return replace(
            files[0],
            weight=max(file.weight for file in files),
            threads=max(explicit) if len(explicit) == len(files) else None,
            at_most=max(file.at_most for file in files),
        )

    def _mapped(self, folder: Folder) -> memoryview:
        """The generation; without one everything works, a tenth of a second later."""
        try:
            return folder.map_generation() or _NOT_MAPPED
        except (OSError, ValueError) as error:
            why = reason(error, folder.path)
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
                self._announce()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            folder.close()

    def _announce(self) -> None:
        if self.generation is not _NOT_MAPPED:
            tell(self.generation)

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
            why = reason(error, folder_path(self.environ))
            warn_once(__name__, f"neighbours that load cannot be read: {why}")
        self.seen = seen
        if check:
            self.check_at = now + CHECK_SECONDS

    def _read(self, check: bool) -> None:
        names = [] if self.folder is None else self.folder.names()
        if self.name not in names:
            self._come_back()
            names = [] if self.folder is None else self.folder.names()
        if self.folder is None or self.file is None:
            return
        dead = []
        known = {name: self.neighbours[name] for name in names if name in self.neighbours}
        for name in names:
            if name not in known and name != self.name and LeaseName.parse(name) is not None:
                known[name] = self.folder.read(name)
                if known[name] is None:
                    dead.append(name)
        for name in unknown(names):
            self.folder.warn(name, "it is no lease")
        if check:
            dead += [name for name, file in known.items() if file is None and name not in dead]  # not swept as yet
            dead += [name for name in self._due(known) if not self.folder.is_alive(name)]
        self.neighbours = known | dict.fromkeys(dead)
        self._sweep(dead)
        living = {name: file for name, file in self.neighbours.items() if file is not None} | {self.name: self.file}
        part = divide_living(living, names)[self.name]
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
                self._announce()

    def _come_back(self) -> None:
        """Somebody has removed our lease, or the whole folder: make it again."""
        if self.folder is not None:
            self.folder.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.folder, self.descriptor, self.generation, self.neighbours = None, -1, _NOT_MAPPED, {}
        self._publish()

    def settle(self) -> None:
        """Wait until nobody has joined for a moment; not at all where nobody else is there or all began long ago."""
        until = monotonic() + SETTLE_SECONDS
        while True:
            with guard:
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
    guard.acquire()


def _after_fork() -> None:
    guard.release()


def _in_child() -> None:
    """Let go of the parent's leases: a lock belongs to all who have the descriptor, and ends with the last of them."""
    for claim in _claims.values():
        claim.lost = True
        if claim.descriptor >= 0:
            os.close(claim.descriptor)
        if claim.folder is not None:
            claim.folder.close()
        claim.folder, claim.descriptor, claim.generation, claim.seen = None, -1, _NOT_MAPPED, 0
        claim.check_at = math.inf
    _claims.clear()
    guard.release()  # the thread that forked has it, and is the only one here


def _at_exit() -> None:
    with guard:
        for claim in list(_claims.values()):
            claim.asked.clear()
            claim._withdraw()
        _claims.clear()


# What all who look have in common


def unknown(names: list[str]) -> Iterator[str]:
    """The names in the folder that are none of ours."""
    ours = ("done", "new", "generation")
    return (name for name in names if LeaseName.parse(name) is None and name.partition(".")[0] not in ours)


def divide_living(living: Mapping[str, LeaseFile], names: list[str]) -> dict[str, Part]:
    """What each live lease gets, by its name; ``names`` are all names in the folder."""
    ended: dict[str, set[str]] = {}
    for name in names:
        kind, _, rest = name.partition(".")
        if kind in ("lease", "done") and name not in living:  # left word that it has ended, or was killed
            group, _, member = rest.partition(".")
            ended.setdefault(group, set()).add(member.partition(".")[0])
    for file in living.values():
        if file.membership is not None:
            ended.get(file.membership.group, set()).discard(file.membership.member)
    return divide_fairly(
        file.to_claim(name, 0 if file.membership is None else len(ended.get(file.membership.group, ())))
        for name, file in living.items()
    )


def reason(error: Exception, path: str) -> str:
    """The same words whenever the same goes wrong: the system's message has the name of a file that changes."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def tell(generation: memoryview | None) -> None:
    """Tell all who look that something has changed.

    The number is drawn, not counted: two processes that tell at once cannot undo each other's change.
    """
    if generation is not None:
        generation[0] = int.from_bytes(os.urandom(8), "little")
