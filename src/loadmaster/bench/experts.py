"""`loadmaster bench experts`: banks filled straight from the files, against the ways that are in use.

published    threads read whole files into a buffer, then `copy_` puts each tensor into its row; every rank reads all
cat-after    interleaved banks: our reader first, then `cat` of every second row
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from loadmaster.bench.budget import Budget
from loadmaster.bench.load import END, SECONDS, Arm, ArmJob, ArmRank, choose_arms, measure_arms, start_together
from loadmaster.bench.record import BenchRecord
from loadmaster.checkpoint.bank_layout import EXPERTS, Bank, BankLayout
from loadmaster.checkpoint.dtypes import import_torch, torch_dtype
from loadmaster.checkpoint.expert_plan import BanksPlan, plan_banks
from loadmaster.checkpoint.experts import load_experts_of_rank
from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
from loadmaster.checkpoint.load import load_rank
from loadmaster.checkpoint.table import Entry
from loadmaster.checkpoint.verify import verify_banks
from loadmaster.host import host
from loadmaster.launch.load import LoadSettings
from loadmaster.launch.rank import RankContext
from loadmaster.share.lease import lease
from loadmaster.threads.importing import require_torch

__all__ = ["bench_experts", "expert_arms"]

READING_THREADS = 4
"""Threads with which the published design reads a file."""

Banks = dict[int, Mapping[str, Any]]


def expert_arms(compute_cpus: int, interleaved: bool, ranks: int) -> dict[str, Arm]:
    """Return the arms for a host and a layout, by name."""
    here = "loadmaster.bench.experts:"
    what = f"{READING_THREADS} threads read whole files, copy_ into the banks, every rank reads all"
    arms = [
        Arm(name="loadmaster", what="our reader, into the banks", function=here + "banks_in_rank", threads=0),
        Arm(name="published", what=f"{what}, torch's default team", function=here + "copy_in_rank", threads=None),
    ]
    for threads in sorted({1, compute_cpus}):
        words = f"{what}, {threads} thread{'s' * (threads > 1)}"
        arms.append(Arm(name=f"published-{threads}", what=words, function=here + "copy_in_rank", threads=threads))
    if interleaved and ranks == 1:
        arms.append(
            Arm(
                name="cat-after",
                what=f"our reader, then cat of every second row, {compute_cpus} threads",
                function=here + "cat_in_rank",
                threads=compute_cpus,
            )
        )
    return {arm.name: arm for arm in arms}


def bench_experts(
    path: str | os.PathLike[str],
    settings: LoadSettings,
    *,
    arms: Sequence[str] | None = None,
    repeat: int = 5,
    seconds: float = SECONDS,
    on_step: Callable[[str], None] | None = None,
) -> BenchRecord:
    """Run the arms ``repeat`` times, or as often as ``seconds`` allow, interleaved; the limit comes first.

    Raises
    ------
    InputError
        An arm that does not exist.
    """
    require_torch()
    budget = Budget(seconds)
    checkpoint = open_checkpoint(path)
    layout = settings.layout_for(checkpoint)
    interleaved = any(bank.interleaved for bank in layout.banks.values())
    chosen = choose_arms(expert_arms(host().compute_cpus, interleaved, settings.ranks), arms)
    plans = [plan_banks(checkpoint, layout, settings.expert_shard(rank)) for rank in range(settings.ranks)]
    results = measure_arms(
        checkpoint,
        settings,
        chosen,
        rank_bytes=[plan.num_bytes for plan in plans],
        tensors=sum(plan.num_entries for plan in plans),
        repeat=repeat,
        budget=budget,
        on_step=on_step,
    )
    return BenchRecord(
        bench="experts",
        settings={
            "checkpoint": os.fspath(path),
            "ranks": settings.ranks,
            "layout": layout.name,
            "experts_by": settings.experts_by,
            "verified": settings.verify,
            "repeat": repeat,
            "seconds": seconds,
        },
        arms=results,
    )


def banks_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """The arm of our reader."""
    import_torch()
    banks: Banks = {}
    start_together(context, job.num_bytes)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(job.path)
    with lease() as held:
        load_experts_of_rank(
            banks,
            checkpoint,
            layout=job.settings.layout,
            shard=job.settings.expert_shard(job.rank),
            on_layer=None,
            held=held,
            progress=None,
        )
    return _finish(job, context, banks, time.perf_counter() - begin)


def copy_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """The arm of the published design."""
    import_torch()
    start_together(context, job.num_bytes)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(job.path)
    layout = job.settings.layout_for(checkpoint)
    plan = plan_banks(checkpoint, layout, job.settings.expert_shard(job.rank))
    banks = _empty_banks(plan)
    entries = [entry for name, entry in checkpoint.items() if EXPERTS in name]
    for file in checkpoint.files:
        buffer = _read_whole(file)
        for entry in entries:
            if entry.file == file:
                _copy(_tensor_in(buffer, entry), entry, banks, layout, checkpoint, job)
    return _finish(job, context, banks, time.perf_counter() - begin)


def _empty_banks(plan: BanksPlan) -> Banks:
    torch = import_torch()
    return {
        layer.number: {bank.name: torch.empty(bank.shape, dtype=torch_dtype(bank.dtype)) for bank in layer.banks}
        for layer in plan.layers
    }


def _read_whole(file: str) -> Any:
    torch = import_torch()
    size = Path(file).stat().st_size
    buffer = torch.empty(size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    step = -(-size // READING_THREADS)
    with Path(file).open("rb", buffering=0) as stream, ThreadPoolExecutor(READING_THREADS) as pool:
        list(
            pool.map(
                lambda start: _read_range(stream.fileno(), view[start : start + step], start), range(0, size, step)
            )
        )
    return buffer


def _read_range(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.preadv(descriptor, [view[done:]], offset + done)


def _tensor_in(buffer: Any, entry: Entry) -> Any:
    part = buffer[entry.offset : entry.offset + entry.num_bytes]
    dtype = torch_dtype(entry.dtype)
    if entry.offset % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(entry.storage_shape)


class _Place(NamedTuple):
    """Where one expert's part goes."""

    bank: Bank
    tensor: Any
    row: int
    part: int


def _copy(tensor: Any, entry: Entry, banks: Banks, layout: BankLayout, checkpoint: Checkpoint, job: ArmJob) -> None:
    """Write one tensor of the file to its rows, with `copy_`."""
    for place, part in _places(tensor, entry, banks, layout, job):
        bank, target, row, index = place
        of_parts = target.shape[1] // len(bank.parts)
        into = target[row, index * of_parts : (index + 1) * of_parts]
        if bank.spread:
            scale = part.float()
            into.copy_((scale.reciprocal() if bank.reciprocal else scale).half().expand(of_parts))
            continue
        halves = [part[0::2], part[1::2]] if bank.interleaved else list(part.chunk(2)) if bank.halves else [part]
        shard = job.settings.expert_shard(job.rank)
        if bank.intermediate is not None:
            halves = [half.chunk(shard.tp_ranks, bank.intermediate)[shard.tp_rank] for half in halves]
        rows = of_parts // len(halves)
        for number, half in enumerate(halves):
            into[number * rows : (number + 1) * rows].copy_(half)


def _places(tensor: Any, entry: Entry, banks: Banks, layout: BankLayout, job: ArmJob) -> Iterator[tuple[_Place, Any]]:
    found = re.fullmatch(layout.pattern, entry.name)
    if found is None:
        return
    words = found.groupdict()
    place = layout.place_of(words["projection"], words.get("kind"))
    assert place is not None
    layer = int(words["layer"])
    target = banks[layer][place[0]]
    shard = job.settings.expert_shard(job.rank)
    kept = shard.experts(target.shape[0] * shard.ep_ranks, layer)
    if words.get("expert") is None:
        for row, expert in enumerate(kept):
            yield _Place(layout.banks[place[0]], target, row, place[1]), tensor[expert]
    elif int(words["expert"]) in kept:
        row = kept.index(int(words["expert"]))
        yield _Place(layout.banks[place[0]], target, row, place[1]), tensor


def cat_in_rank(job: ArmJob, context: RankContext) -> ArmRank:
    """Interleaved banks: read as they are, then brought into halves with torch."""
    torch = import_torch()
    start_together(context, 2 * job.num_bytes)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(job.path)
    layout = job.settings.layout_for(checkpoint)
    tensors: dict[str, Any] = {}
    with lease() as held:
        load_rank(tensors, checkpoint.subset(lambda name: EXPERTS in name), None, dtype=None, held=held, progress=None)
    banks: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(layout.pattern, name)
        assert found is not None
        words = found.groupdict()
        place = layout.place_of(words["projection"], words.get("kind"))
        assert place is not None
        bank = layout.banks[place[0]]
        whole = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1) if bank.interleaved else tensor
        banks.setdefault(int(words["layer"]), {})[place[0]] = whole
    return _finish(job, context, dict(banks), time.perf_counter() - begin)


def _finish(job: ArmJob, context: RankContext, banks: Banks, seconds: float) -> ArmRank:
    context.progress(END)
    context.barrier()  # a rank that counts or verifies would take CPUs from one that still loads
    checkpoint = open_checkpoint(job.path)
    layout = job.settings.layout_for(checkpoint)
    shard = job.settings.expert_shard(job.rank)
    if job.settings.verify:
        verify_banks(banks, checkpoint, layout, shard)
    plan = plan_banks(checkpoint, layout, shard)
    return ArmRank(seconds=seconds, num_bytes=plan.num_bytes, tensors=plan.num_entries)
