"""Folders of ``torch.distributed.checkpoint``: written by four ranks in every sharding, or by one process.

Run as a script, ``python -m fetch.helpers.dcp_folders FOLDER RENDEZVOUS``, it is the four ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

RANKS = 4
SECONDS = 60.0
TESTS = Path(__file__).parents[2]

F32, BF16 = torch.float32, torch.bfloat16
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((16, 6), F32),
    "rows.uneven": ((10, 3), BF16),
    "rows.some empty": ((3, 5), F32),
    "columns": ((6, 8), BF16),
    "columns.uneven": ((5, 10), F32),
    "columns.wide": ((40, 4096), BF16),
    "vector": ((13,), BF16),
    "one element": ((1,), F32),
    "last of three": ((3, 4, 10), BF16),
    "middle of three": ((3, 10, 7), F32),
    "both": ((10, 6), BF16),
    "both of three": ((4, 6, 10), F32),
    "rows and copies": ((7, 4), BF16),
    "rows twice": ((18, 3), F32),
    "replicated": ((5, 4), BF16),
    "scalar": ((), F32),
    "plain": ((6, 2), torch.int64),
    "plain scalar": ((), BF16),
    "flags": ((9,), torch.bool),
    "eighth": ((8, 6), torch.float8_e4m3fn),
    "empty": ((0, 4), F32),
    "old sharded": ((12, 5), BF16),
}
"""What the ranks write, each in the sharding that `sharded_state` gives it."""

LAYERS = {"layers.0.weight": (24, 20), "layers.0.bias": (24,), "layers.1.weight": (6, 24), "layers.1.bias": (6,)}
"""The parameters of a model that FSDP2 shards, and of one whose layers are tensor-parallel as well."""


def truth() -> dict[str, torch.Tensor]:
    """Every tensor, whole, by the name that it has in the folder."""
    tensors = {name: _values(name, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    for model in ("model", "parallel"):
        tensors |= {f"{model}.{name}": _values(model + name, shape, F32) for name, shape in LAYERS.items()}
    return tensors


def _values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = torch.randint(0, 100, shape, generator=generator).to(torch.float32)
    return values.to(dtype) if dtype != torch.bool else values > 50


def sharded_state(rank: int) -> dict[str, Any]:
    """The state dict of one rank; the process group is there."""
    from torch import nn
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import ShardMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = truth()
    line = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def split(name: str, *placements: Any) -> torch.Tensor:
        mesh = square if len(placements) == 2 else line
        return distribute_tensor(whole[name], mesh, placements, src_data_rank=None)  # gloo scatters few dtypes

    state: dict[str, Any] = {
        name: split(name, Shard(0))
        for name in ("rows", "rows.uneven", "rows.some empty", "vector", "one element", "eighth", "flags")
    }
    state |= {name: split(name, Shard(1)) for name in ("columns", "columns.uneven", "columns.wide", "middle of three")}
    state["last of three"] = split("last of three", Shard(2))
    state["both"] = split("both", Shard(0), Shard(1))
    state["both of three"] = split("both of three", Shard(1), Shard(2))
    state["rows and copies"] = split("rows and copies", Shard(0), Replicate())
    state["rows twice"] = split("rows twice", Shard(0), Shard(0))
    state |= {name: split(name, Replicate()) for name in ("replicated", "scalar", "empty")}
    state |= {name: whole[name].clone() for name in ("plain", "plain scalar")}

    rows = SHAPES["old sharded"][0][0] // RANKS
    local = whole["old sharded"][rank * rows : (rank + 1) * rows].clone()
    metadata = ShardMetadata([rank * rows, 0], list(local.shape), placement=f"rank:{rank}/cpu")
    state["old sharded"] = sharded_tensor.init_from_local_shards([OldShard(local, metadata)], *SHAPES["old sharded"][0])

    for key, mesh in (("model", line), ("parallel", square["data"])):
        model = nn.Module()
        model.layers = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 6))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(whole[f"{key}.{name}"])
        if key == "parallel":
            parallelize_module(model.layers, square["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for layer in (model.layers[0], model):
            fully_shard(layer, mesh=mesh)
        state[key] = model.state_dict()
    state["step"] = 17
    state["words"] = {"of": ["some", "kind"]}
    return state


def _rank(rank: int, folder: str, rendezvous: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS / 2)
    )
    dcp.save(sharded_state(rank), checkpoint_id=folder)
    dist.destroy_process_group()


def write_with_ranks(folder: Path, rendezvous: Path) -> None:
    """Write a folder with four ranks, each a process; none is left, whatever happens."""
    command = [sys.executable, "-m", "fetch.helpers.dcp_folders", str(folder), str(rendezvous)]
    writer = subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = writer.communicate(timeout=SECONDS)
    finally:
        if writer.poll() is None:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.communicate()
    assert writer.returncode == 0, said


def main() -> int:
    """Fork the ranks, once torch is imported, and wait for them; the first that fails ends the others."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, *sys.argv[1:3]), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def write_alone(folder: Path, state: Mapping[str, Any], **settings: Any) -> Path:
    """Write a folder in this process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, **settings))
    return folder


def doctor(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a folder."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


if __name__ == "__main__":
    sys.exit(main())
