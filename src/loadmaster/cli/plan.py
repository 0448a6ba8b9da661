"""``loadmaster plan``: what each rank would get on a host, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.cli.leases import lease_documents, print_leases
from loadmaster.cli.options import JsonOption, print_json
from loadmaster.errors import InputError

if TYPE_CHECKING:
    from loadmaster.host import Host
    from loadmaster.share import Share
    from loadmaster.share.lease import LiveLease

__all__ = ["plan"]


def plan(
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of ranks; default what the launcher declares, else 1.")
    ] = None,
    pool: Annotated[
        int | None, typer.Option("--pool", min=1, help="Python workers in each rank, each of which starts a team.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, help="Use at most so many CPUs; default LOADMASTER_CPUS.")
    ] = None,
    root: Annotated[
        Path, typer.Option("--root", metavar="DIR", help="Plan for the host whose /sys and /proc are in this folder.")
    ] = Path("/"),
    as_json: JsonOption = False,
    as_env: Annotated[bool, typer.Option("--env", help="Print export lines for a shell.")] = False,
) -> None:
    """Show what each rank would get on this host, and why."""
    from loadmaster.host import read_host
    from loadmaster.share import exports_for, plan_shares

    if as_json and as_env:
        raise InputError("--json and --env exclude each other")
    environ = _environment_of(root)
    host = read_host(root, cpus, environ)
    shares = plan_shares(host, ranks, pool=pool or 1, environ=environ)
    if as_json:
        print_json(_document(host, shares, pool, _leases(root)))
    elif as_env:
        for name, value in exports_for(shares[0], environ).items():
            typer.echo(f"export {name}={value}")
    else:
        _print_tables(host, shares, pool, _leases(root))


def _is_this_host(root: Path) -> bool:
    return root.absolute() == Path("/").absolute()


def _leases(root: Path) -> list[LiveLease]:
    """The processes that load now; of another host nothing is known."""
    from loadmaster.share.lease import live_leases

    return live_leases() if _is_this_host(root) else []


def _environment_of(root: Path) -> Mapping[str, str]:
    """This process's environment; for another host only what was set for Loadmaster."""
    if _is_this_host(root):
        return os.environ
    return {name: value for name, value in os.environ.items() if name.startswith("LOADMASTER_")}


def _document(host: Host, shares: tuple[Share, ...], pool: int | None, leases: list[LiveLease]) -> dict[str, Any]:
    """The JSON form, which programs rely on."""
    limits = [
        {"name": limit.name, "value": limit.value, "where": limit.where, "binding": limit.binding}
        for limit in host.limits
    ]
    document: dict[str, Any] = {
        "host": {
            "cpus": host.cpus,
            "cores": host.cores,
            "nodes": host.nodes,
            "kinds": host.kinds,
            "quota": host.quota,
            "compute_cpus": host.compute_cpus,
            "limits": limits,
        },
        "ranks": [
            {"rank": share.rank, "threads": share.threads, "cpus": share.cpus, "node": share.node, "why": share.why}
            for share in shares
        ],
        "leases": lease_documents(leases),
    }
    if pool is not None:
        document["pool"] = {"workers": pool, "threads": pool * sum(share.threads for share in shares)}
    return document


def _print_tables(host: Host, shares: tuple[Share, ...], pool: int | None, leases: list[LiveLease]) -> None:
    from rich.console import Console
    from rich.table import Table

    from loadmaster.host import format_cpulist

    form: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}
    limits = Table("limit", "value", "", "read from", **form)
    limits.columns[1].justify = "right"
    limits.columns[3].overflow = "fold"
    for limit in host.limits:
        mark, style = ("binds", "bold") if limit.binding else ("", None)
        limits.add_row(limit.name, f"{limit.value:.10g}", mark, limit.where, style=style)
    ranks = Table("rank", "threads", "node", "CPUs", **form)
    ranks.columns[1].justify = "right"
    ranks.columns[3].overflow = "fold"
    for share in shares:
        cells = [share.rank, share.threads, share.node]
        ranks.add_row(*("-" if cell is None else str(cell) for cell in cells), format_cpulist(share.cpus))
    console = Console(highlight=False, markup=False)
    console.print(limits, "", ranks, "", sep="\n")
    if host.kinds:
        kinds = "; ".join(f"{kind}: {format_cpulist(cpus)}" for kind, cpus in host.kinds.items())
        console.print(f"Kinds of core, slowest first: {kinds}.", soft_wrap=True)
    if leases:
        print_leases(console, leases)
    console.print(_sentence(host, shares, pool), soft_wrap=True)


def _sentence(host: Host, shares: tuple[Share, ...], pool: int | None) -> str:
    """One sentence of reason."""
    threads, why = shares[0].threads, shares[0].why
    each = f"{threads} thread{'s' * (threads > 1)}"
    if pool is None:
        return f"Each rank gets {each}: {why}."
    product = f"{len(shares)} ranks x {pool} pool workers x {each}"
    return f"{product} = {len(shares) * pool * threads} threads for {host.compute_cpus} compute CPUs: {why}."
