"""What the file of a lease says: one process's claim, as JSON of version 1. See docs/leases.md.

Whatever reads it takes nothing on trust: a file is in the stated form, or it is none of ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from loadmaster.host import Host, format_cpulist
from loadmaster.host.cpulist import parse_cpulist
from loadmaster.share.division import Division
from loadmaster.share.fairness import Claim, Group, Quota
from loadmaster.share.launcher import LAUNCHERS, MAX_RANKS, OURS, Declared
from loadmaster.share.settings import Settings
from loadmaster.share.share import upper_bound

__all__ = ["MAX_BYTES", "LeaseFile", "Membership", "describe_process", "parse_lease"]

MAX_BYTES = 64 << 10
"""No lease file is larger; one that is belongs to somebody else."""

VERSION = 1
_MAX_COMMAND = 80
_MAX_THREADS = 1 << 20
_parse_cpulist = lru_cache(64)(parse_cpulist)  # most leases of a host name the same CPUs
_MAX_NUMBER = 1e18  # a whole number of Python's may have more digits than a float can hold


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place among the ranks that its launcher started: the group's name, their number, this one's name."""

    group: str
    ranks: int
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFile:
    """One process's claim.

    Attributes
    ----------
    pid
        In its own namespace, for people to read; nothing is decided by it.
    command
        The beginning of its command line.
    since
        When it began to load, in seconds since 1970, for people to read.
    started
        The same on the clock that nobody sets (``time.monotonic``).
    cpus
        Its usable CPUs.
    cores
        Their cores, each named by its lowest CPU that is online.
    threads
        Threads that its user asked for; None where it follows.
    at_most
        Threads that it can use at the most.
    """

    pid: int
    command: str
    since: float
    started: float
    cpus: frozenset[int]
    cores: frozenset[int]
    weight: float = 1.0
    quotas: tuple[Quota, ...] = ()
    membership: Membership | None = None
    threads: int | None = None
    at_most: int = 1

    def to_json(self) -> bytes:
        """Return the content of the file."""
        group = self.membership
        document = {
            "version": VERSION,
            "pid": self.pid,
            "command": self.command,
            "since": self.since,
            "started": self.started,
            "weight": self.weight,
            "cpus": format_cpulist(self.cpus),
            "cores": format_cpulist(self.cores),
            "quotas": [{"id": quota.id, "cpus": quota.cpus} for quota in self.quotas],
            "group": None if group is None else {"id": group.group, "ranks": group.ranks, "member": group.member},
            "threads": self.threads,
            "at_most": self.at_most,
        }
        return json.dumps(document).encode()

    def to_claim(self, name: str, finished: int = 0) -> Claim:
        """Return what the arithmetic needs; ``finished`` ranks of the group have ended."""
        group = None if self.membership is None else Group(self.membership.group, self.membership.ranks, finished)
        return Claim(name, self.cores, self.weight, self.quotas, group, self.threads, self.at_most)


def describe_process(
    host: Host, here: Division, settings: Settings, declared: Declared, environ: Mapping[str, str], weight: float
) -> LeaseFile:
    """Return the claim of this process."""
    names = {cpu: core[0] for core in host.online_cores for cpu in core}
    explicit = settings.explicit
    return LeaseFile(
        pid=os.getpid(),
        command=_command(os.getpid()),
        since=time.time(),
        started=time.monotonic(),
        cpus=frozenset(host.cpus),
        cores=frozenset(names.get(core[0], core[0]) for core in host.cores),
        weight=weight,
        quotas=_quotas(host),
        membership=_membership(here, declared, environ),
        threads=None if explicit is None else min(explicit.threads, len(host.cpus)),
        at_most=upper_bound(here, settings).threads,
    )


def parse_lease(content: bytes) -> LeaseFile:
    """Return the claim in a file's content; keys that are not known are passed over.

    Raises
    ------
    ValueError
        If it is in another form; says which.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    if document.get("version") != VERSION:
        raise ValueError(f"its version is {str(document.get('version'))[:20]}, not {VERSION}")
    fields = _Fields(document)
    command = document.get("command")
    if not isinstance(command, str):
        raise ValueError("its command is no text")
    return LeaseFile(
        pid=fields.whole("pid", 1, 1 << 32),
        command=_printable(command),
        since=fields.number("since"),
        started=fields.number("started"),
        weight=fields.number("weight", above=0.0),
        cpus=fields.cpus("cpus"),
        cores=fields.cpus("cores"),
        quotas=fields.quotas(),
        membership=fields.membership(),
        threads=None if document.get("threads") is None else fields.whole("threads", 1, _MAX_THREADS),
        at_most=fields.whole("at_most", 1, _MAX_THREADS),
    )


class _Fields:
    """Reads the values of a JSON object, each checked."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def whole(self, key: str, low: int, high: int) -> int:
        value = self.document.get(key)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"its {key} is no whole number from {low} to {high}")
        return value

    def number(self, key: str, above: float = -1.0) -> float:
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < _MAX_NUMBER:
            raise ValueError(f"its {key} is no number{'' if above < 0 else f' above {above:g}'}")
        return float(value)

    def text(self, key: str) -> str:
        value = self.document.get(key)
        if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,200}", value):
            raise ValueError(f"its {key} is no short text")
        return value

    def cpus(self, key: str) -> frozenset[int]:
        value = self.document.get(key)
        cpus = _parse_cpulist(value) if isinstance(value, str) else frozenset()
        if not cpus:
            raise ValueError(f"its {key} are no list of CPUs")
        return cpus

    def quotas(self) -> tuple[Quota, ...]:
        listed = self.document.get("quotas")
        if not isinstance(listed, list) or not all(isinstance(quota, dict) for quota in listed):
            raise ValueError("its quotas are no list of objects")
        rows = [_Fields(quota) for quota in listed]
        return tuple(Quota(row.text("id"), row.whole("cpus", 1, _MAX_THREADS)) for row in rows)

    def membership(self) -> Membership | None:
        value = self.document.get("group")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError("its group is no object")
        row = _Fields(value)
        return Membership(row.text("id"), row.whole("ranks", 1, MAX_RANKS), row.text("member"))


def _quotas(host: Host) -> tuple[Quota, ...]:
    """The bounds on this process that others may have as well.

    A control group is known by its folder's device and inode: two containers may both see theirs at the same path. A
    hint says how much of the host is to be used, and so holds for all who were told the same.
    """
    found = []
    for limit in host.limits:
        if limit.name == "quota":
            found.append(Quota(_identity(limit.where), max(1, math.floor(limit.value))))
        elif limit.name == "hint":
            found.append(Quota(f"{limit.where}={limit.value:g}", int(limit.value)))
    return tuple(found)


def _identity(file: str) -> str:
    try:
        folder = os.stat(os.path.dirname(file))  # noqa: PTH116, PTH120 (a Path costs more than the call)
    except OSError:
        return file[-200:]
    return f"{folder.st_dev}:{folder.st_ino}"


def _membership(here: Division, declared: Declared, environ: Mapping[str, str]) -> Membership | None:
    """The ranks that this process divides the host with, as the launcher declared them; None where it is alone.

    They are one group where the variables that name the launcher's job are the same, or ``LOADMASTER_GROUP``. Where
    there are none, it is the session (``setsid``) that they have in common: not the parent, since a script may stand
    between the launcher and each rank.
    """
    if here.ranks == 1 or here.parts < here.ranks:
        return None
    row = next((row for row in (*LAUNCHERS, OURS) if row.name == declared.launcher), OURS)
    job = [f"{name}={environ[name]}" for name in {*OURS.job, *row.job} if name in environ]
    identity = sorted(job) or [f"session {os.getsid(0)} of {_pid_namespace()}"]
    words = "\n".join([row.name, str(here.ranks), *identity])
    member = f"p{os.getpid()}" if here.rank is None else str(here.rank)
    return Membership(hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:16], here.ranks, member)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _command(pid: int) -> str:
    """The command line of this process, ``pid``: a fork has its parent's."""
    try:
        words = Path("/proc/self/cmdline").read_bytes()[:1000].rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    program = words[0].rpartition(b"/")[2]
    return _printable(b" ".join([program, *words[1:]]).decode("utf-8", "replace"))


def _printable(text: str) -> str:
    """The beginning of a text, with nothing in it that a terminal obeys."""
    shown = text[: _MAX_COMMAND + 1]
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else " " for letter in shown)
    return shown if len(shown) <= _MAX_COMMAND else shown[: _MAX_COMMAND - 3] + "..."
