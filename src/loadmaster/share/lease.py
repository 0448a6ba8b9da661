"""Leases: a process that loads says so, sees who else does, and follows its share while they come and go.

    join   lock the folder | make the file, complete and locked | map the generation | tell the others | unlock
    look   has the generation changed, or a tenth of a second passed? -> read who is there -> divide -> Share
    leave  lock the folder | remove the file | tell the others | the last one removes what is left | unlock

No thread, no process of its own, no signal. A neighbour that is killed tells nobody, which is why a look asks again for
the locks of its neighbours after a tenth of a second. See docs/leases.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from types import TracebackType

from loadmaster.errors import InputError
from loadmaster.host import Host, read_host
from loadmaster.host.notices import warn_once
from loadmaster.share.fairness import Part
from loadmaster.share.launcher import read_declared
from loadmaster.share.lease_claim import (
    SETTLE_SECONDS,
    ProcessClaim,
    divide_living,
    guard,
    join_claim,
    reason,
    tell,
    unknown,
)
from loadmaster.share.lease_file import describe_process
from loadmaster.share.lease_folder import Folder, LeaseName, RefusedError, folder_path, open_folder
from loadmaster.share.share import Share, live_share, own_share, read_request

__all__ = ["Lease", "LiveLease", "lease", "leases_are_on", "live_leases"]

_log = logging.getLogger(__name__)


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
    from the holder holds nothing, and its looks return what was last known. Without ``logs`` it is left to the holder
    to say how the share changes.
    """

    __slots__ = (
        "_asked",
        "_claim",
        "_division",
        "_host",
        "_logs",
        "_part",
        "_settings",
        "_settled",
        "_share",
        "weight",
    )

    def __init__(
        self,
        weight: float = 1.0,
        *,
        threads: int | None = None,
        host: Host | None = None,
        environ: Mapping[str, str] | None = None,
        logs: bool = True,
    ) -> None:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise InputError(f"the weight of a lease must be a number above 0, not {weight!r}")
        self.weight = float(weight)
        self._asked = (threads, host, environ)
        self._logs = logs
        self._claim: ProcessClaim | None = None
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
            file = describe_process(
                self._host, self._division, self._settings, read_declared(environment), environment, self.weight
            )
            self._claim = join_claim(self, file, environment)

    def leave(self) -> None:
        """Let the others know that this process no longer loads; without effect where the lease is not held."""
        claim, self._claim, self._share = self._claim, None, None
        if claim is not None:
            with guard:
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

    def settle(self) -> Share:
        """Look, and if no other process loads, wait for ones that are just starting: 50 ms at most.

        For a holder that will not look again, and would keep the whole host from those that come a moment later.
        """
        until = monotonic() + SETTLE_SECONDS
        now = self.look()
        while self._claim is not None and now.workers == 1 and monotonic() < until:
            sleep(0.002)
            now = self.look()
        return now

    def _known(self) -> Share:
        if self._share is None:
            raise InputError("this lease is not held: look inside `with`, or between join() and leave()")
        return self._share

    def _look_again(self, claim: ProcessClaim) -> Share:
        if claim.lost or self._settings.explicit is not None:
            return self._known()
        if not self._settled:
            self._settled = True
            if self._division.ranks == 1:
                claim.settle()
        # Where another thread looks at this moment, what was known until now is good enough.
        if guard.acquire(blocking=self._part is None):
            try:
                if claim.part is None or claim.generation[0] != claim.seen or monotonic() >= claim.check_at:
                    claim.refresh()
                self._follow(claim.part)
            finally:
                guard.release()
        return self._known()

    def _follow(self, part: Part | None) -> None:
        if part is None or part is self._part or self._share is None:
            return
        now, before = live_share(self._host, self._division, self._settings, part), self._share
        if now.threads != before.threads and self._logs:
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
    with guard:
        try:
            folder = open_folder(environment, create=False)
            if folder is None:
                return []
            try:
                return _list(folder)
            finally:
                folder.close()
        except (RefusedError, OSError) as error:
            why = reason(error, folder_path(environment))
            warn_once(__name__, f"the processes that load cannot be listed: {why}")
            return []


def _list(folder: Folder) -> list[LiveLease]:
    with folder.locked(0) as locked:
        if locked and folder.tidy() and folder.has_living():
            with contextlib.suppress(OSError, ValueError):
                tell(folder.map_generation())
    names = folder.names()
    living = {name: found for name in names if LeaseName.parse(name) and (found := folder.read(name)) is not None}
    for name in unknown(names):
        folder.warn(name, "it is no lease")
    parts = divide_living(living, names)
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
