"""Loads one checkpoint into N ranks of this host: the parent's side and the rank's side of ``loadmaster load``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loadmaster.checkpoint.bank_layout import EXPERTS, BankLayout
from loadmaster.checkpoint.dtypes import import_torch, parse_dtype
from loadmaster.checkpoint.expert_names import layout_that_fits
from loadmaster.checkpoint.expert_plan import ExpertShard, plan_banks
from loadmaster.checkpoint.experts import load_experts_of_rank
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.load import load_rank, place
from loadmaster.checkpoint.reader import KEEP_CACHE, CacheUse
from loadmaster.checkpoint.sharding import Shard
from loadmaster.checkpoint.tensor_parallel import TensorParallelPlan
from loadmaster.checkpoint.verify import verify_banks, verify_placements
from loadmaster.host import recent_host
from loadmaster.launch.rank import RankContext
from loadmaster.launch.spawn import run_ranks
from loadmaster.observe.report import RankReport, Report, Verified
from loadmaster.share import Share
from loadmaster.share.lease import Lease, lease
from loadmaster.threads.environment import rank_environment
from loadmaster.threads.importing import require_torch

if TYPE_CHECKING:
    import torch

__all__ = ["LoadSettings", "load_in_rank", "load_ranks"]


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How ``ranks`` ranks load: their tensor-parallel shards or each the whole, converted or not, verified or not.

    ``tp_plan`` are rows that win over the built-in ones; ``dtype`` is a name of torch's, such as ``bfloat16``;
    ``threads`` is an explicit number for each rank, which otherwise follows its share while it loads. With
    ``experts`` the experts go into banks, as ``layout`` says or as their names do. ``experts_by`` deals them to the
    ranks: ``tp`` cuts each, ``blocks`` and ``strided`` give each rank whole ones. ``cache`` is for the page cache.
    """

    ranks: int = 1
    sharded: bool = True
    tp_plan: Mapping[str, str] | None = None
    dtype: str | None = None
    verify: bool = False
    threads: int | None = None
    experts: bool = False
    layout: BankLayout | None = None
    experts_by: str = "tp"
    cache: CacheUse = KEEP_CACHE

    def shard(self, rank: int) -> Shard | None:
        """The part of rank ``rank``, None for the whole."""
        if not self.sharded or self.ranks == 1:
            return None
        return Shard(rank=rank, ranks=self.ranks, plan=TensorParallelPlan(self.tp_plan))

    def expert_shard(self, rank: int) -> ExpertShard:
        """The part of the experts that rank ``rank`` keeps."""
        if not self.sharded or self.ranks == 1:
            return ExpertShard()
        if self.experts_by == "tp":
            return ExpertShard(tp_rank=rank, tp_ranks=self.ranks)
        kind: Any = self.experts_by
        return ExpertShard(ep_rank=rank, ep_ranks=self.ranks, ep=kind)

    def layout_for(self, checkpoint: Checkpoint) -> BankLayout:
        """The layout of the experts: the one that was given, or the one that fits."""
        return self.layout or layout_that_fits(checkpoint)


@dataclass(frozen=True, kw_only=True)
class _Job:
    path: str
    rank: int
    settings: LoadSettings
    started: float


@dataclass(frozen=True, kw_only=True)
class _Done:
    report: RankReport
    load_seconds: float
    verified: Verified | None


def load_ranks(
    path: str | os.PathLike[str],
    settings: LoadSettings,
    shares: Sequence[Share],
    *,
    on_progress: Callable[[int, tuple[int, int]], None] | None = None,
    on_output: Callable[[int, str], None] | None = None,
) -> Report:
    """Load the checkpoint at ``path`` in one process per share, and return what they did.

    Raises
    ------
    CheckpointError, PlacementError
        Bad input, found before a rank is started.
    RankError
        A rank failed; see `run_ranks`.
    """
    started = time.monotonic()
    require_torch()  # its import would make a wrong path wait for two seconds
    checkpoint = open_checkpoint(path)
    if settings.experts:
        plan_banks(checkpoint, settings.layout, settings.expert_shard(0))
    place(_apart_from_banks(checkpoint, settings), settings.shard(0), _dtype(settings))
    jobs = [_Job(path=os.fspath(path), rank=rank, settings=settings, started=started) for rank in range(len(shares))]
    cores = recent_host().compute_cpus
    group = {"LOADMASTER_GROUP": f"{os.getpid()}-{time.time_ns()}"}  # these ranks, and not those of another run
    environments = [
        rank_environment(share.threads, rank, len(shares), cores=cores) | group for rank, share in enumerate(shares)
    ]
    done = run_ranks(
        "loadmaster.launch.load:load_in_rank",
        jobs,
        environments=environments,
        on_progress=on_progress,
        on_output=on_output,
    )
    return _report(checkpoint, done, time.monotonic() - started)


def _apart_from_banks(checkpoint: Checkpoint, settings: LoadSettings) -> Checkpoint:
    """What is loaded as tensors of its own: everything, or all but the experts."""
    return checkpoint.subset(lambda name: EXPERTS not in name) if settings.experts else checkpoint


def _dtype(settings: LoadSettings) -> torch.dtype | None:
    return None if settings.dtype is None else parse_dtype(settings.dtype)


def _report(checkpoint: Checkpoint, done: Sequence[_Done], wall_seconds: float) -> Report:
    verified = [rank.verified for rank in done if rank.verified is not None]
    return Report(
        checkpoint=checkpoint.path,
        ranks=[rank.report for rank in done],
        load_seconds=max(rank.load_seconds for rank in done),
        wall_seconds=wall_seconds,
        verified=Verified(sum(part.tensors for part in verified), sum(part.bytes for part in verified))
        if verified
        else None,
    )


def load_in_rank(job: _Job, context: RankContext) -> _Done:
    """Load this rank's part; in the rank's process."""
    logging.getLogger("loadmaster.checkpoint.sharding").setLevel(logging.ERROR)  # the parent has warned already
    import_torch()
    tensors: dict[str, Any] = {}
    banks: dict[int, Mapping[str, Any]] = {}
    with lease(threads=job.settings.threads) as held:
        context.barrier()
        begin = time.monotonic()
        if job.settings.experts:
            report = _load_with_banks(tensors, banks, job, context, held)
        else:
            report = load_rank(
                tensors,
                job.path,
                job.settings.shard(job.rank),
                dtype=_dtype(job.settings),
                held=held,
                progress=lambda done, total: context.progress((done, total)),
                cache=job.settings.cache,
            ).ranks[0]
        load_seconds = time.monotonic() - begin
    verified = None
    seconds = {**report.seconds, "start": begin - job.started}
    if job.settings.verify:
        context.barrier()  # a rank that verifies would take CPUs from one that still loads
        verified = _verify(tensors, banks, job)
        seconds["verify"] = time.monotonic() - begin - load_seconds
    return _Done(report=replace(report, rank=job.rank, seconds=seconds), load_seconds=load_seconds, verified=verified)


def _load_with_banks(
    tensors: dict[str, Any], banks: dict[int, Mapping[str, Any]], job: _Job, context: RankContext, held: Lease
) -> RankReport:
    """Load the experts into banks and the rest as tensors, one after the other; their phases add up."""
    started = time.perf_counter()
    settings = job.settings
    checkpoint = open_checkpoint(job.path)
    opened = time.perf_counter() - started
    rest = _apart_from_banks(checkpoint, settings)
    expected = (checkpoint.num_bytes - rest.num_bytes) // (settings.ranks if settings.sharded else 1)
    first = load_rank(
        tensors,
        rest,
        settings.shard(job.rank),
        dtype=_dtype(settings),
        held=held,
        progress=lambda done, total: context.progress((done, total + expected)),
        cache=settings.cache,
    ).ranks[0]
    second = load_experts_of_rank(
        banks,
        checkpoint,
        layout=settings.layout,
        shard=settings.expert_shard(job.rank),
        on_layer=None,
        held=held,
        progress=lambda done, total: context.progress((first.bytes_placed + done, first.bytes_placed + total)),
        cache=settings.cache,
    ).ranks[0]
    seconds = {phase: first.seconds[phase] + second.seconds[phase] for phase in first.seconds}
    seconds["open"] += opened
    return replace(
        second,
        tensors=first.tensors + second.tensors,
        bytes_read=first.bytes_read + second.bytes_read,
        bytes_placed=first.bytes_placed + second.bytes_placed,
        seconds=seconds,
    )


def _verify(tensors: Mapping[str, Any], banks: Mapping[int, Mapping[str, Any]], job: _Job) -> Verified:
    settings = job.settings
    checkpoint = open_checkpoint(job.path)
    rest = _apart_from_banks(checkpoint, settings)
    verified = verify_placements(tensors, rest, place(rest, settings.shard(job.rank), _dtype(settings)))
    if not settings.experts:
        return verified
    shard = settings.expert_shard(job.rank)
    compared = verify_banks(banks, checkpoint, settings.layout_for(checkpoint), shard)
    return Verified(verified.tensors + compared.tensors, verified.bytes + compared.bytes)
