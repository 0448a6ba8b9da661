"""Loadmaster loads model weights into the processes of one host, each with its fair share of the CPUs.

    import loadmaster as lm

    lm.host()                                       what this process may use, with reasons
    lm.share()                                      this process's part of it
    with lm.lease() as mine: mine.look()            the same, while others that load come and go
    with lm.load_threads(): ...                     any loader inside runs with the share
    with lm.load_pool(max_workers=32) as pool: ...  an executor that stays inside the share, teams included
    for name, tensor in lm.paced(weights): ...      a weights iterator in step with the share
    lm.set_process_threads(lm.share())              once, in a process that does nothing but load
    lm.load(target, path, shard=lm.Shard(rank=0, ranks=2))
    lm.load_experts(banks, path)                    the experts of a mixture of experts into banks
    lm.open_checkpoint(path), lm.iter_tensors(path)
    with lm.Fetchers(lm.CheckpointSource(path), procs=8) as fetchers: fetchers.fetch(version=3)

Importing changes nothing and needs no torch; the names that need it import it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# These two are functions and rooms of the house at once, and the import of a room binds its name: bind them last.
from loadmaster.host import host
from loadmaster.share import share

if TYPE_CHECKING:
    from loadmaster.checkpoint.bank_layout import BankLayout
    from loadmaster.checkpoint.expert_plan import ExpertShard
    from loadmaster.checkpoint.experts import load_experts
    from loadmaster.checkpoint.folder import Checkpoint, open_checkpoint
    from loadmaster.checkpoint.load import iter_tensors, load
    from loadmaster.checkpoint.placement import Move, Placement
    from loadmaster.checkpoint.sharding import Shard
    from loadmaster.checkpoint.table import Entry
    from loadmaster.checkpoint.tensor_parallel import TensorParallelPlan
    from loadmaster.errors import LoadmasterError
    from loadmaster.fetch.checkpoint_source import CheckpointSource
    from loadmaster.fetch.dcp import DcpSource
    from loadmaster.fetch.fetchers import Fetchers
    from loadmaster.fetch.torchstore import TorchStoreSource
    from loadmaster.host import Host
    from loadmaster.observe.report import Report
    from loadmaster.share import Share
    from loadmaster.share.lease import Lease, lease
    from loadmaster.threads.pace import paced
    from loadmaster.threads.pool import load_pool
    from loadmaster.threads.scope import load_threads
    from loadmaster.threads.setup import set_process_threads

__version__ = "0.1.0"

__all__ = [
    "BankLayout",
    "Checkpoint",
    "CheckpointSource",
    "DcpSource",
    "Entry",
    "ExpertShard",
    "Fetchers",
    "Host",
    "Lease",
    "LoadmasterError",
    "Move",
    "Placement",
    "Report",
    "Shard",
    "Share",
    "TensorParallelPlan",
    "TorchStoreSource",
    "host",
    "iter_tensors",
    "lease",
    "load",
    "load_experts",
    "load_pool",
    "load_threads",
    "open_checkpoint",
    "paced",
    "set_process_threads",
    "share",
]

_HOMES = {
    "BankLayout": "loadmaster.checkpoint.bank_layout",
    "Checkpoint": "loadmaster.checkpoint.folder",
    "CheckpointSource": "loadmaster.fetch.checkpoint_source",
    "DcpSource": "loadmaster.fetch.dcp",
    "Entry": "loadmaster.checkpoint.table",
    "ExpertShard": "loadmaster.checkpoint.expert_plan",
    "Fetchers": "loadmaster.fetch.fetchers",
    "Host": "loadmaster.host",
    "Lease": "loadmaster.share.lease",
    "LoadmasterError": "loadmaster.errors",
    "Move": "loadmaster.checkpoint.placement",
    "Placement": "loadmaster.checkpoint.placement",
    "Report": "loadmaster.observe.report",
    "Shard": "loadmaster.checkpoint.sharding",
    "Share": "loadmaster.share",
    "TensorParallelPlan": "loadmaster.checkpoint.tensor_parallel",
    "TorchStoreSource": "loadmaster.fetch.torchstore",
    "iter_tensors": "loadmaster.checkpoint.load",
    "lease": "loadmaster.share.lease",
    "load": "loadmaster.checkpoint.load",
    "load_experts": "loadmaster.checkpoint.experts",
    "load_pool": "loadmaster.threads.pool",
    "load_threads": "loadmaster.threads.scope",
    "open_checkpoint": "loadmaster.checkpoint.folder",
    "paced": "loadmaster.threads.pace",
    "set_process_threads": "loadmaster.threads.setup",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'loadmaster' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
