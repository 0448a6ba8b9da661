"""Into how many parts the usable CPUs are divided, and what a launcher has divided already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loadmaster.host import Host
from loadmaster.share.fairness import Part
from loadmaster.share.launcher import Declared, parse_index
from loadmaster.share.settings import Bound

__all__ = ["Division", "divide", "divide_as_declared", "divide_as_live"]


class Division(NamedTuple):
    """Into how many parts the usable CPUs are divided.

    Attributes
    ----------
    ranks
        Ranks on the host.
    parts
        Ranks among which the usable CPUs are divided: one, where the launcher has divided them already.
    among
        The same in words.
    rank
        This process among the ranks, or None where unknown.
    pool
        Teams in each rank.
    bound
        What the launcher was told to give one rank, where it did not see to that itself.
    note
        Words for the end of the reason.
    threads
        What live leases leave to this process, where they are known; else the usable CPUs over the parts.
    """

    ranks: int
    parts: int
    among: str
    rank: int | None = None
    pool: int = 1
    bound: Bound | None = None
    note: str = ""
    threads: int | None = None


def divide(ranks: int, rank: int | None, pool: int = 1) -> Division:
    """Divide equally among ranks, and in each rank among the workers of a pool."""
    known = 0 if ranks == 1 else rank if rank is not None and rank < ranks else None
    return Division(ranks, ranks, _among(f"{ranks} rank{'s' * (ranks > 1)}", pool), known, pool)


def divide_as_declared(host: Host, declared: Declared, environ: Mapping[str, str], pool: int = 1) -> Division:
    """Divide as the environment declares the ranks on this host; by one where it says nothing."""
    if declared.only_global:
        unknown = f"local rank count unknown (only {declared.only_global} is set)"
        return divide(1, None, pool)._replace(rank=None, note=unknown)
    here = divide(declared.workers or 1, declared.rank, pool)
    task_cpus = parse_index(environ.get("SLURM_CPUS_PER_TASK", ""))
    if declared.launcher != "Slurm" or not task_cpus:
        return here
    setting = f"SLURM_CPUS_PER_TASK={task_cpus}"
    if _is_own_mask(host, here.ranks, task_cpus):
        return here._replace(parts=1, among=_among(f"1 task, as Slurm narrowed it ({setting})", pool))
    return here._replace(bound=Bound(task_cpus, setting))


def divide_as_live(here: Division, part: Part) -> Division:
    """Divide as the live leases have it, instead of as it was declared.

    Declared ranks that are still to come are in the part; those that have ended are not.
    """
    if part.processes > part.ranks:
        among = f"{part.processes} processes that load"
    elif part.ranks < here.parts:
        among = f"{part.ranks} of {here.parts} ranks still to load"
    elif part.ranks > here.parts:
        among = f"{part.ranks} ranks that load"
    else:
        among = here.among
    return here._replace(ranks=part.processes, parts=part.processes, among=among, threads=part.threads)


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


def _among(ranks: str, pool: int) -> str:
    return f"{ranks} / {pool} pool workers" if pool > 1 else ranks
