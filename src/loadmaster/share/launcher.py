"""Which launcher started this process, and how many ranks it started on this host: a table, one row a launcher.

A global number of ranks is never taken for the number on this host. It counts the ranks of all hosts, and where several
engines share a host it counts only those of one.

Sources: the launchers' own manuals: torchrun ("Environment Variables"), mpirun(1) of Open MPI, MPICH's and Intel MPI's
Hydra, PALS (mpiexec(1)), MVAPICH2's user guide, srun(1) of Slurm, flux-environment(7), DeepSpeed's launcher/launch.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

from loadmaster.errors import InputError
from loadmaster.host.limits import parse_count

__all__ = [
    "LAUNCHERS",
    "MAX_RANKS",
    "OURS",
    "Declared",
    "Launcher",
    "expand_slurm_tasks",
    "parse_index",
    "parse_ranks",
    "read_declared",
]

MAX_RANKS = 1 << 16
"""More ranks than this on one host are a slip of the keyboard."""


class Declared(NamedTuple):
    """What the environment declares about the ranks on this host.

    Attributes
    ----------
    workers
        Ranks on this host, or None where nothing tells.
    rank
        This process among them, from 0, or None.
    launcher
        Name of the launcher that told; empty where none did.
    only_global
        ``WORLD_SIZE=16`` or the like, where nothing but the number of ranks on all hosts is known; else empty.
    problems
        Sentences on values that cannot be used, or contradict each other.
    """

    workers: int | None = None
    rank: int | None = None
    launcher: str = ""
    only_global: str = ""
    problems: tuple[str, ...] = ()


def parse_ranks(value: int | str, name: str) -> int:
    """Return a number of ranks on one host.

    Raises
    ------
    InputError
        If it is no whole number from 1 to ``MAX_RANKS``; names the setting and its value.
    """
    count = parse_count(value, name)
    if count > MAX_RANKS:
        raise InputError(f"{name} must be at most {MAX_RANKS}, not {count}")
    return count


def parse_index(text: str) -> int | None:
    """Return a whole number from 0, or None for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def expand_slurm_tasks(text: str) -> list[tuple[int, int]]:
    """Return (tasks, nodes) runs of Slurm's ``4(x2),3``, here [(4, 2), (3, 1)].

    Raises
    ------
    ValueError
        If the text has another form.
    """
    runs = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item.strip())
        if not match or int(match[1]) < 1:
            raise ValueError("it is not in the form 4(x2),3")
        runs.append((int(match[1]), int(match[2] or 1)))
    return runs


def _plain(text: str, environ: Mapping[str, str]) -> int:
    return _count(text)


def _slurm(text: str, environ: Mapping[str, str]) -> int:
    """Tasks on this node: the step's own list at this node's number, or the fullest node where that is unknown."""
    runs = expand_slurm_tasks(text)
    node = parse_index(environ.get("SLURM_NODEID", ""))
    ends = accumulate(nodes for _, nodes in runs)
    fullest = max(tasks for tasks, _ in runs)
    return next((tasks for (tasks, _), end in zip(runs, ends, strict=True) if node is not None and node < end), fullest)


def _flux(text: str, environ: Mapping[str, str]) -> int:
    """Ranks of the job over its nodes, which Flux fills evenly; rounded up, since fewer threads are the safer error."""
    return -(-_count(text) // _count(environ.get("FLUX_JOB_NNODES", "1")))


class Launcher(NamedTuple):
    """One row.

    Attributes
    ----------
    size_variable, rank_variable
        Variables that hold the number of ranks on this host, and this process among them.
    read
        Turns the text of the former, and the environment, into the number; raises ValueError.
    marker
        A variable that has to be there too, where the others have names that anyone might use.
    exports
        Variables, besides ``OMP_NUM_THREADS``, that keep this launcher from binding a rank to fewer CPUs than it has
        threads; ``{threads}`` stands for their number.
    job
        Variables that together name the job, the same in all of its ranks.
    """

    name: str
    size_variable: str
    rank_variable: str
    read: Callable[[str, Mapping[str, str]], int] = _plain
    marker: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    job: tuple[str, ...] = ()


# Open MPI 4 and 5 read one each, and bind a rank to one core by default where there are few ranks.
_OPEN_MPI = (("OMPI_MCA_hwloc_base_binding_policy", "none"), ("PRTE_MCA_hwloc_default_binding_policy", "none"))
_INTEL_MPI = (("I_MPI_PIN_DOMAIN", "omp"),)
_PALS = (("PALS_DEPTH", "{threads}"), ("PALS_CPU_BIND", "depth"))
_MVAPICH = (("MV2_ENABLE_AFFINITY", "0"),)

_TORCHRUN_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")

LAUNCHERS = (
    # and accelerate, Ray Train, DeepSpeed over torchrun
    Launcher("torchrun", "LOCAL_WORLD_SIZE", "LOCAL_RANK", job=_TORCHRUN_JOB),
    Launcher("DeepSpeed", "LOCAL_SIZE", "LOCAL_RANK", marker="CROSS_SIZE", job=("MASTER_ADDR", "MASTER_PORT")),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        exports=_OPEN_MPI,
        job=_OPEN_MPI_JOB,
    ),
    Launcher("MPICH or Intel MPI", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", exports=_INTEL_MPI),
    Launcher("PALS", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID", exports=_PALS, job=("PALS_APID",)),
    Launcher("MVAPICH", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", exports=_MVAPICH),
    Launcher("Slurm", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", _slurm, job=_SLURM_JOB),
    Launcher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", _flux, job=("FLUX_JOB_ID",)),
)
OURS = Launcher("loadmaster", "LOADMASTER_LOCAL_SIZE", "LOADMASTER_LOCAL_RANK", job=("LOADMASTER_GROUP",))

_GLOBAL_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)


def read_declared(environ: Mapping[str, str]) -> Declared:
    """Return the number of ranks on this host and this process among them, as far as the environment declares them.

    ``LOADMASTER_LOCAL_SIZE`` comes first. Of launchers that contradict each other the larger number counts. A launcher
    of one process per host does not contradict another that it started, as ``srun`` and ``torchrun`` are combined.

    Raises
    ------
    InputError
        If ``LOADMASTER_LOCAL_SIZE`` or ``LOADMASTER_LOCAL_RANK`` cannot be used.
    """
    problems: list[str] = []
    found = _read_launchers(environ, problems)
    declared = max(found, key=lambda row: row.workers or 0, default=Declared())
    several = {row.workers: f"{row.launcher} says {row.workers}" for row in found if row.workers != 1}
    if len(several) > 1 and OURS.size_variable not in environ:
        said = ", ".join(several.values())
        problems.append(f"launchers disagree about the number of ranks on this host: {said}; the largest counts")
    if not found:
        declared = _read_global(environ)
    return _apply_ours(declared, found, environ)._replace(problems=tuple(problems))


def _read_launchers(environ: Mapping[str, str], problems: list[str]) -> list[Declared]:
    found = []
    for launcher in LAUNCHERS:
        text = environ.get(launcher.size_variable)
        if text is None or (launcher.marker and launcher.marker not in environ):
            continue
        try:
            workers = launcher.read(text, environ)
        except ValueError as error:
            problems.append(f"{launcher.size_variable}={text[:40]!r} of {launcher.name} is not counted: {error}")
            continue
        rank = parse_index(environ.get(launcher.rank_variable, ""))
        if rank is not None and rank >= workers:
            problems.append(f"{launcher.rank_variable}={rank} of {launcher.name} is not below its {workers} ranks")
            rank = None
        found.append(Declared(workers, rank, launcher.name))
    return found


def _read_global(environ: Mapping[str, str]) -> Declared:
    for variable in _GLOBAL_SIZES:
        size = parse_index(environ.get(variable, ""))
        if size == 1:
            return Declared(workers=1, rank=0)
        if size:
            return Declared(only_global=f"{variable}={size}")
    return Declared()


def _apply_ours(declared: Declared, found: list[Declared], environ: Mapping[str, str]) -> Declared:
    """Let the variables of our own come first."""
    size, rank = environ.get(OURS.size_variable), environ.get(OURS.rank_variable)
    if size is not None:
        workers = parse_ranks(size, OURS.size_variable)
        ranks = [row.rank for row in found if row.rank is not None and row.rank < workers]
        declared = Declared(workers, ranks[0] if ranks else None, OURS.name)
    if rank is not None:
        number = parse_index(rank.strip())
        if number is None or (declared.workers is not None and number >= declared.workers):
            below = "" if declared.workers is None else f" below {declared.workers}, the ranks on this host"
            raise InputError(f"{OURS.rank_variable} must be a whole number from 0{below}, not {rank[:40]!r}")
        declared = declared._replace(rank=number)
    return declared


def _count(text: str) -> int:
    number = parse_index(text.strip())
    if not number or number > MAX_RANKS:
        raise ValueError(f"it is not a whole number from 1 to {MAX_RANKS}")
    return number
