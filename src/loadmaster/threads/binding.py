"""Whether the affinity of this thread fits the team that it is about to start."""

from __future__ import annotations

from collections.abc import Mapping

from loadmaster.host import Host

__all__ = ["binding_problem"]

_VARIABLES = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNBOUND = ("", "false", "none", "disabled")


def binding_problem(host: Host, threads: int, environ: Mapping[str, str]) -> str:
    """Say in one sentence what is wrong with mask and team, or nothing.

    With ``OMP_PROC_BIND`` the OpenMP run time binds the thread that loads it, which is the one that imports torch, to
    its first place (OpenMP 5.2, section 21.1.3); what reads the mask afterwards takes this for all that there is.
    """
    bound = next((name for name in _VARIABLES if environ.get(name, "").strip().lower() not in _UNBOUND), "")
    values = {limit.name: limit.value for limit in host.limits}
    mask = int(values.get("affinity", len(host.cpus)))
    allowed = int(min(values.get("cpuset", values.get("online", mask)), values.get("online", mask)))
    if bound and len(host.cores) == 1 and mask < allowed:
        return (
            f"{bound}={environ[bound].strip()} has bound this thread to {mask} of {allowed} CPUs, probably when torch "
            "was imported, and processes started from here inherit that: take os.sched_getaffinity(0) before the "
            "import and set it again after, or unset the variable"
        )
    if mask < threads:
        return f"a team of {threads} threads has to run on {mask} CPU{'s' * (mask > 1)}: the affinity mask is narrower"
    return ""
