"""What users rely on: the public names and their signatures, an import that changes nothing, and life without torch."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import loadmaster as lm

NAMES = [
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

SIGNATURES = {
    "host": "() -> 'Host'",
    "share": (
        "(workers: 'int | None' = None, *, threads: 'int | None' = None, host: 'Host | None' = None, "
        "environ: 'Mapping[str, str] | None' = None) -> 'Share'"
    ),
    "load_threads": "(threads: 'Threads' = 'auto', *, only: 'Only | None' = None) -> 'LoadThreads'",
    "load_pool": "(max_workers: 'int | None' = None, threads: 'Threads' = 'auto') -> 'Iterator[ThreadPoolExecutor]'",
    "paced": "(weights: 'Iterable[_Item]', threads: 'Threads' = 'auto') -> 'Iterator[_Item]'",
    "set_process_threads": "(share: 'Share | int', inter_op: 'bool' = False) -> 'None'",
    "lease": (
        "(weight: 'float' = 1.0, *, threads: 'int | None' = None, host: 'Host | None' = None, "
        "environ: 'Mapping[str, str] | None' = None) -> 'Lease'"
    ),
    "Lease.join": "(self) -> 'None'",
    "Lease.leave": "(self) -> 'None'",
    "Lease.look": "(self) -> 'Share'",
    "load": (
        "(target: 'torch.nn.Module | MutableMapping[str, torch.Tensor]', "
        "path: 'str | os.PathLike[str] | Checkpoint', *, shard: 'Shard | None' = None, "
        "placement: 'Placements | None' = None, dtype: 'torch.dtype | None' = None, threads: 'int | None' = None, "
        "cold: 'bool' = False, drop_cache: 'bool' = False, progress: 'Progress | None' = None) -> 'Report'"
    ),
    "load_experts": (
        "(banks: 'MutableMapping[int, Mapping[str, torch.Tensor]]', path: 'str | os.PathLike[str] | Checkpoint', *, "
        "layout: 'BankLayout | None' = None, shard: 'ExpertShard | None' = None, on_layer: 'OnLayer | None' = None, "
        "threads: 'int | None' = None, cold: 'bool' = False, drop_cache: 'bool' = False, "
        "progress: 'Callable[[int, int], None] | None' = None) -> 'Report'"
    ),
    "ExpertShard": (
        "(*, tp_rank: 'int' = 0, tp_ranks: 'int' = 1, ep_rank: 'int' = 0, ep_ranks: 'int' = 1, "
        "ep: \"Literal['blocks', 'strided']\" = 'blocks') -> None"
    ),
    "BankLayout": "(*, name: 'str', pattern: 'str', banks: 'Mapping[str, Bank]', ignore: 'str' = '(?!)') -> None",
    "Checkpoint.subset": "(self, keep: 'Callable[[str], bool]') -> 'Checkpoint'",
    "open_checkpoint": "(path: 'str | os.PathLike[str]') -> 'Checkpoint'",
    "iter_tensors": (
        "(path: 'str | os.PathLike[str] | Checkpoint', *, shard: 'Shard | None' = None, "
        "dtype: 'torch.dtype | None' = None, threads: 'int | None' = None) -> 'Iterator[tuple[str, torch.Tensor]]'"
    ),
    "Checkpoint.read": "(self, name: 'str') -> 'torch.Tensor'",
    "Checkpoint.read_slice": "(self, name: 'str', slices: 'Sequence[slice | int]') -> 'torch.Tensor'",
    "Fetchers": (
        "(source: 'Source', procs: 'int' = 8, *, keep_memory: 'bool' = False, "
        "progress: 'Progress | None' = None) -> 'None'"
    ),
    "Fetchers.fetch": "(self, version: 'int | None' = None) -> 'Weights'",
    "Fetchers.prefetch": "(self, version: 'int | None' = None) -> 'None'",
    "Fetchers.afetch": "(self, version: 'int | None' = None) -> 'Weights'",
    "Fetchers.start": "(self, wait: 'bool' = False) -> 'None'",
    "Fetchers.close": "(self) -> 'None'",
    "CheckpointSource": "(path: 'str | os.PathLike[str]', *, threads: 'int' = 1) -> 'None'",
    "DcpSource": "(path: 'str | os.PathLike[str]', *, prefix: 'str' = '', threads: 'int' = 1) -> 'None'",
    "TorchStoreSource": (
        "(store: 'Any' = None, prefix: 'str' = 'policy_ver_{version:010d}.', *, "
        "connect: 'Callable[[], Any] | None' = None, leave_out: 'Sequence[str]' = ('MAPPING',)) -> 'None'"
    ),
    "Host.refresh": "(self) -> 'Host'",
    "Report.as_dict": "(self) -> 'dict[str, Any]'",
    "Shard": "(*, rank: 'int', ranks: 'int', plan: 'TensorParallelPlan' = <factory>) -> None",
    "TensorParallelPlan": "(overrides: 'Mapping[str, str] | None' = None) -> 'None'",
}

FIELDS = {
    "Entry": ["name", "dtype", "shape", "file", "offset", "num_bytes"],
    "Move": ["dim", "start", "stop", "at"],
    "Placement": ["entry", "name", "dtype", "shape", "moves"],
}

WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"


def run_python(code: str, *arguments: str) -> Any:
    """Run ``code`` in a fresh process and return what it printed, which is JSON.

    Its environment is the least that Python needs: this process has imported the package, and may have been changed.
    """
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"norm.weight": np.arange(6, dtype=np.float32)}, path)
    return path


def test_the_public_names_are_these() -> None:
    assert lm.__all__ == NAMES
    assert [name for name in NAMES if name not in dir(lm)] == []
    assert all(getattr(lm, name).__name__ == name for name in NAMES)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'loadmaster' has no attribute 'lode'"):
        lm.lode  # noqa: B018


@pytest.mark.parametrize(("name", "signature"), SIGNATURES.items(), ids=SIGNATURES)
def test_the_public_signatures_are_these(name: str, signature: str) -> None:
    first, _, method = name.partition(".")
    value = getattr(lm, first)
    assert str(inspect.signature(getattr(value, method) if method else value)) == signature


@pytest.mark.parametrize(("name", "fields"), FIELDS.items(), ids=FIELDS)
def test_the_fields_of_the_plain_records_are_these(name: str, fields: list[str]) -> None:
    assert list(getattr(lm, name)._fields) == fields


def test_every_public_function_and_class_says_what_it_does() -> None:
    assert [name for name in NAMES if not inspect.getdoc(getattr(lm, name))] == []


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (files("loadmaster") / "py.typed").is_file()


@pytest.mark.processes
def test_importing_changes_nothing_and_imports_no_torch() -> None:
    state = """
def state():
    return {
        "environment": dict(os.environ),
        "threads": os.listdir("/proc/self/task"),
        "files": sorted(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "handlers": [str(handler) for handler in logging.getLogger().handlers],
        "filters": [str(row) for row in warnings.filters],
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": os.getcwd(),
        "path": sys.path[:],
    }
"""
    before, after, heavy = run_python(
        "import json, logging, os, resource, signal, sys, warnings\n"
        + state
        + "before = state()\nimport loadmaster\nafter = state()\n"
        + "heavy = sorted({'torch', 'numpy', 'safetensors', 'rich', 'typer', 'psutil'} & set(sys.modules))\n"
        + "print(json.dumps([before, after, heavy]))"
    )
    assert before == after
    assert heavy == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "first",
    ["loadmaster.host.topology", "loadmaster.share.launcher", "loadmaster.host", "loadmaster.share", "loadmaster.cli"],
)
def test_host_and_share_stay_functions_whatever_is_imported_first(first: str) -> None:
    """Each name is a room of the house as well, and importing a room binds its name in the package."""
    cpus, threads = run_python(
        f"import {first}\nimport loadmaster as lm\nimport loadmaster.host.quota, loadmaster.share.cpusets, json\n"
        "from loadmaster.host import Limit\n"
        "print(json.dumps([len(lm.host().cpus), lm.share(workers=1).threads]))"
    )
    assert cpus == len(os.sched_getaffinity(0))
    assert threads >= 1


@pytest.mark.processes
def test_what_needs_no_torch_works_without_it(checkpoint: Path) -> None:
    host_cpus, names, exit_code = run_python(
        WITHOUT_TORCH
        + "import contextlib, io, json, loadmaster as lm\nfrom loadmaster.cli.app import run\n"
        + "with contextlib.redirect_stdout(io.StringIO()):\n    code = run(['plan', '--ranks', '2', '--json'])\n"
        + "print(json.dumps([len(lm.host().cpus), list(lm.open_checkpoint(sys.argv[1])), code]))",
        os.fspath(checkpoint),
    )
    assert (host_cpus, names, exit_code) == (len(os.sched_getaffinity(0)), ["norm.weight"], 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    "call",
    [
        "lm.load({}, path)",
        "next(lm.iter_tensors(path))",
        "lm.open_checkpoint(path).read('norm.weight')",
        "lm.load_threads(1).__enter__()",
        "lm.load_pool(1).__enter__()",
        "next(lm.paced([1]))",
        "lm.set_process_threads(1)",
    ],
)
def test_a_missing_torch_is_one_sentence_with_the_command_that_installs_it(call: str, checkpoint: Path) -> None:
    kind, sentence, exit_code = run_python(
        WITHOUT_TORCH
        + f"import json, loadmaster as lm\npath = sys.argv[1]\ntry:\n    {call}\nexcept Exception as error:\n"
        + "    print(json.dumps([type(error).__name__, str(error), getattr(error, 'exit_code', None)]))",
        os.fspath(checkpoint),
    )
    assert (kind, exit_code) == ("MissingDependencyError", 2)
    assert sentence.startswith("torch is not installed")
    assert "pip install 'loadmaster[torch]'" in sentence
    assert "\n" not in sentence


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["load"], id="load"),
        pytest.param(["fetch"], id="fetch"),
        pytest.param(["bench", "load", "--repeat", "1"], id="bench load"),
        pytest.param(["bench", "fetch", "--repeat", "1"], id="bench fetch"),
    ],
)
def test_the_command_without_torch_ends_with_one_sentence(command: list[str], checkpoint: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = subprocess.run(
        [Path(sysconfig.get_path("scripts"), "loadmaster"), *command, "--quiet", checkpoint],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(blocker), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("loadmaster: torch is not installed")
    assert sentence.endswith("pip install 'loadmaster[torch]'")
