"""One process's part of the host: how many threads, on which CPUs, and why.

Host + ranks on it (argument, launcher) -> equal parts -> what the user set -> Share
Live leases, where this process holds one -> a fair part instead of an equal one
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from loadmaster.host import Host, read_host
from loadmaster.host.notices import warn_once
from loadmaster.share.cpusets import deal_cores, node_of
from loadmaster.share.division import Division, divide, divide_as_declared, divide_as_live
from loadmaster.share.fairness import Part
from loadmaster.share.launcher import LAUNCHERS, OURS, parse_ranks, read_declared
from loadmaster.share.settings import Bound, Settings, ray_assigned_cpus, read_settings

__all__ = [
    "MAX_THREADS_PER_PROCESS",
    "Share",
    "exports_for",
    "live_share",
    "own_share",
    "plan_shares",
    "read_request",
    "share",
    "upper_bound",
]

MAX_THREADS_PER_PROCESS = 16
"""More threads than this in one process have to be asked for.

Source: published for one process alone on a host of 224 logical CPUs: 551 s with 112 threads, 163 s with 8.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of the host.

    Attributes
    ----------
    threads
        Threads for work that keeps CPUs busy, at least 1.
    cpus
        The CPUs of this process. All usable ones where this process does not know its number among the ranks.
    workers
        Ranks that share the host.
    why
        The reason for the number, such as ``6 cores / 2 ranks``.
    rank
        This process among the ranks on this host, from 0; None where unknown.
    node
        The NUMA node that holds all of ``cpus``; None where there is none.
    """

    threads: int
    cpus: tuple[int, ...]
    workers: int
    why: str
    rank: int | None = None
    node: int | None = None


def share(
    workers: int | None = None,
    *,
    threads: int | None = None,
    host: Host | None = None,
    environ: Mapping[str, str] | None = None,
) -> Share:
    """Return this process's part of the host.

    Parameters
    ----------
    workers
        Ranks on this host. By default what ``LOADMASTER_LOCAL_SIZE`` or the launcher declares, else 1.
    threads
        Threads asked for; by default ``LOADMASTER_THREADS``, else an equal part of the host.
    host
        By default the host is read now.
    environ
        The environment; by default that of this process.

    Raises
    ------
    InputError
        If an argument or a ``LOADMASTER_`` variable cannot be used.
    """
    environment = os.environ if environ is None else environ
    host = read_host(environ=environment) if host is None else host
    here, settings = read_request(host, workers, 1, threads, environment, "workers")
    return own_share(host, here, settings)


def plan_shares(
    host: Host,
    ranks: int | None,
    threads: int | None = None,
    *,
    pool: int = 1,
    environ: Mapping[str, str] | None = None,
) -> tuple[Share, ...]:
    """Return the share of each of the ranks that are to be started on a host.

    Parameters
    ----------
    ranks
        Ranks on this host. None for those that the environment declares: then, where Slurm has narrowed the CPUs to
        this process's own, only this process's share is returned.
    threads
        Threads asked for, for each rank.
    pool
        Python workers in each rank, each of which starts a team: ``threads`` of a share is then the size of one team.

    Raises
    ------
    InputError
        If an argument or ``LOADMASTER_THREADS`` cannot be used.
    """
    environment = os.environ if environ is None else environ
    here, settings = read_request(host, ranks, parse_ranks(pool, "--pool"), threads, environment, "--ranks")
    if here.parts < here.ranks:
        return (own_share(host, here, settings),)
    number, why = _decide(host, here, settings)
    dealt = deal_cores(host, here.ranks)
    nodes = {cpus: node_of(host, cpus) for cpus in set(dealt)}
    return tuple(Share(number, cpus, here.ranks, why, rank, nodes[cpus]) for rank, cpus in enumerate(dealt))


def exports_for(share: Share, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give ranks of such a share its number of threads.

    ``OMP_NUM_THREADS`` for whatever starts a team, the number of ranks for Loadmaster in each of them, and what keeps
    the launcher, if the environment tells which, from binding a rank to fewer CPUs than it has threads.
    """
    launcher = read_declared(environ).launcher
    exports = {"OMP_NUM_THREADS": str(share.threads), OURS.size_variable: str(share.workers)}
    rows = [row for row in LAUNCHERS if row.name == launcher]
    return exports | {name: value.format(threads=share.threads) for row in rows for name, value in row.exports}


def read_request(
    host: Host, ranks: int | None, pool: int, threads: int | None, environ: Mapping[str, str], name: str
) -> tuple[Division, Settings]:
    """What the host is divided into, and what the user set; problems with either are logged."""
    declared = read_declared(environ)
    settings = read_settings(threads, environ, ray_assigned_cpus())
    for problem in (*declared.problems, *settings.problems):
        warn_once(__name__, problem)
    if ranks is None:
        return divide_as_declared(host, declared, environ, pool), settings
    return divide(parse_ranks(ranks, name), declared.rank, pool), settings


def own_share(host: Host, here: Division, settings: Settings) -> Share:
    """This process's part of a host that is divided so."""
    number, why = _decide(host, here, settings)
    whole = here.rank is None or here.parts == 1
    cpus = host.cpus if whole else deal_cores(host, here.parts)[here.rank or 0]
    return Share(number, cpus, here.ranks, why, here.rank, node_of(host, cpus))


def live_share(host: Host, here: Division, settings: Settings, part: Part) -> Share:
    """This process's part of a host of which live leases leave it ``part``, whatever was declared."""
    live = divide_as_live(here, part)
    if live.among == here.among:
        return own_share(host, here._replace(threads=part.threads), settings)
    number, why = _decide(host, live, settings)
    rank = None if here.ranks == 1 else here.rank
    return Share(number, host.cpus, live.ranks, why, rank, node_of(host, host.cpus))


def upper_bound(here: Division, settings: Settings) -> Bound:
    """The lowest bound on the threads of one team that is neither the host's nor the neighbours'."""
    ceiling = Bound(max(1, MAX_THREADS_PER_PROCESS // here.pool), f"at most {MAX_THREADS_PER_PROCESS} per process")
    bounds = [ceiling, *settings.bounds, *([] if here.bound is None else [here.bound])]
    return min(bounds, key=lambda bound: bound.threads)


def _decide(host: Host, here: Division, settings: Settings) -> tuple[int, str]:
    """The number of threads, and the reason for it."""
    divisor = here.parts * here.pool
    equal = max(1, host.compute_cpus // divisor)
    why = f"{_capacity(host)} / {here.among}"
    if divisor > host.compute_cpus:
        why += f": {_oversubscribed(host)}"
    if settings.explicit is not None:
        asked = settings.explicit
        given = min(asked.threads, len(host.cpus))
        few = f", but only {given} CPUs are usable" if given < asked.threads else ""
        return given, f"{asked.reason} {asked.threads}{few} ({why} gives {equal})"
    number = equal if here.threads is None else here.threads
    lowest = upper_bound(here, settings)
    notes = [here.note, settings.raised if number > 1 else ""]
    if lowest.threads < max(number, equal) and lowest.threads <= number:
        number, notes = lowest.threads, [lowest.reason, *notes]
    elif number != equal:
        notes = [f"of which {number} are a fair part", *notes]
    return number, ", ".join([why, *filter(None, notes)])


def _oversubscribed(host: Host) -> str:
    values = {limit.name: limit.value for limit in host.limits}
    if values.get("affinity", math.inf) < values.get("cpuset", values.get("online", 0)):
        # Perhaps the launcher gave each rank CPUs of its own, so that nothing is wrong.
        return "the affinity of this process leaves fewer cores than there are ranks"
    return "the host is oversubscribed by processes, which no thread count can mend"


def _capacity(host: Host) -> str:
    """What is divided, in words: the limit that binds."""
    binding = host.binding
    if binding.name == "quota":
        return f"quota {round(binding.value, 2)}"
    if binding.name == "hint":
        return f"{binding.where} {binding.value}"
    return f"{len(host.cores)} core{'s' * (len(host.cores) > 1)}"
