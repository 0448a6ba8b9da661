"""One process's part of the host: how many threads, on which CPUs, and why.

Host + ranks on it (argument, launcher) -> equal parts -> what the user set -> Share
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loadmaster.host import Host, read_host
from loadmaster.host.notices import warn_once
from loadmaster.share.cpusets import deal_cores, node_of
from loadmaster.share.launcher import LAUNCHERS, OURS, Declared, parse_ranks, read_declared
from loadmaster.share.settings import Bound, Settings, ray_assigned_cpus, read_settings

__all__ = ["MAX_THREADS_PER_PROCESS", "Share", "exports_for", "plan_shares", "share"]

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
    declared = read_declared(environment)
    settings = read_settings(threads, environment, ray_assigned_cpus())
    for problem in (*declared.problems, *settings.problems):
        warn_once(__name__, problem)
    if workers is None:
        here = _declared_division(host, declared, environment)
    else:
        here = _division(parse_ranks(workers, "workers"), declared.rank)
    number, why = _decide(host, here, settings)
    whole = here.rank is None or here.parts == 1
    cpus = host.cpus if whole else deal_cores(host, here.parts)[here.rank or 0]
    return Share(number, cpus, here.ranks, why, here.rank, node_of(host, cpus))


def plan_shares(
    host: Host,
    ranks: int,
    threads: int | None = None,
    *,
    pool: int = 1,
    environ: Mapping[str, str] | None = None,
) -> tuple[Share, ...]:
    """Return the share of each of the ranks that are to be started on a host.

    Parameters
    ----------
    ranks
        Ranks on this host.
    threads
        Threads asked for, for each rank.
    pool
        Python workers in each rank, each of which starts a team: ``threads`` of a share is then the size of one team.

    Raises
    ------
    InputError
        If an argument or ``LOADMASTER_THREADS`` cannot be used.
    """
    count, pool = parse_ranks(ranks, "--ranks"), parse_ranks(pool, "--pool")
    settings = read_settings(threads, os.environ if environ is None else environ)
    for problem in settings.problems:
        warn_once(__name__, problem)
    number, why = _decide(host, _division(count, None, pool), settings)
    dealt = deal_cores(host, count)
    nodes = {cpus: node_of(host, cpus) for cpus in set(dealt)}
    return tuple(Share(number, cpus, count, why, rank, nodes[cpus]) for rank, cpus in enumerate(dealt))


def exports_for(launcher: str, share: Share) -> dict[str, str]:
    """Return the variables that give ranks of such a share its number of threads.

    ``OMP_NUM_THREADS`` for whatever starts a team, the number of ranks for Loadmaster in each of them, and what keeps
    the launcher of this name from binding a rank to fewer CPUs than it has threads.
    """
    exports = {"OMP_NUM_THREADS": str(share.threads), OURS.size_variable: str(share.workers)}
    rows = [row for row in LAUNCHERS if row.name == launcher]
    return exports | {name: value.format(threads=share.threads) for row in rows for name, value in row.exports}


class _Division(NamedTuple):
    """Into how many parts the usable CPUs are divided.

    Attributes
    ----------
    ranks
        Ranks on the host.
    parts
        Ranks among which the usable CPUs are divided: one, where the launcher has divided them already.
    pool
        Teams in each rank.
    bound
        What the launcher was told to give one rank, where it did not see to that itself.
    note
        Words for the end of the reason.
    """

    ranks: int
    parts: int
    among: str
    rank: int | None = None
    pool: int = 1
    bound: Bound | None = None
    note: str = ""


def _division(ranks: int, rank: int | None, pool: int = 1) -> _Division:
    among = f"{ranks} rank{'s' * (ranks > 1)}" + (f" / {pool} pool workers" if pool > 1 else "")
    known = 0 if ranks == 1 else rank if rank is not None and rank < ranks else None
    return _Division(ranks, ranks, among, known, pool)


def _declared_division(host: Host, declared: Declared, environ: Mapping[str, str]) -> _Division:
    if declared.only_global:
        unknown = f"local rank count unknown (only {declared.only_global} is set)"
        return _division(1, None)._replace(rank=None, note=unknown)
    here = _division(declared.workers or 1, declared.rank)
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    if declared.launcher != "Slurm" or not text.isdecimal() or int(text) < 1:
        return here
    if _is_own_mask(host, here.ranks, int(text)):
        return here._replace(parts=1, among=f"1 task, narrowed by Slurm (SLURM_CPUS_PER_TASK={text})")
    return here._replace(bound=Bound(int(text), f"SLURM_CPUS_PER_TASK={text}"))


def _is_own_mask(host: Host, tasks: int, task_cpus: int) -> bool:
    """Whether Slurm has narrowed the affinity to this one task, so that the CPUs must not be divided again.

    Slurm counts hardware threads or cores, as configured, and hands out whole cores. A mask for all tasks of this host
    would have at least ``tasks * task_cpus`` CPUs.
    """
    return (
        tasks > 1
        and set(host.cpus) < set(host.online)
        and len(host.cores) <= task_cpus
        and len(host.cpus) < tasks * task_cpus
    )


def _decide(host: Host, here: _Division, settings: Settings) -> tuple[int, str]:
    """The number of threads, and the reason for it."""
    divisor = here.parts * here.pool
    number = max(1, host.compute_cpus // divisor)
    why = f"{_capacity(host)} / {here.among}"
    if divisor > host.compute_cpus:
        why += ": the host is oversubscribed by processes, which no thread count can mend"
    if settings.explicit is not None:
        asked = settings.explicit
        given = min(asked.threads, len(host.cpus))
        few = f", but only {given} CPUs are usable" if given < asked.threads else ""
        return given, f"{asked.reason} {asked.threads}{few} ({why} gives {number})"
    ceiling = Bound(max(1, MAX_THREADS_PER_PROCESS // here.pool), f"at most {MAX_THREADS_PER_PROCESS} per process")
    bounds = [ceiling, *settings.bounds, *([] if here.bound is None else [here.bound])]
    lowest = min(bounds, key=lambda bound: bound.threads)
    notes = [here.note, settings.raised if number > 1 else ""]
    if lowest.threads < number:
        number, notes = lowest.threads, [lowest.reason, *notes]
    return number, ", ".join([why, *filter(None, notes)])


def _capacity(host: Host) -> str:
    """What is divided, in words: the limit that binds."""
    binding = host.binding
    if binding.name == "quota":
        return f"quota {round(binding.value, 2)}"
    if binding.name == "hint":
        return f"{binding.where} {binding.value}"
    return f"{len(host.cores)} core{'s' * (len(host.cores) > 1)}"
