"""``loadmaster fetch`` from end to end: what it reports, what it finds when bytes differ, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from cli.helpers.command import Done, command_line, hooked, loadmaster, run_here
from launch.helpers.leftovers import alive_at_the_end

pytestmark = pytest.mark.processes

KEYS = [
    "ok",
    "version",
    "tensors",
    "bytes",
    "seconds",
    "plan_seconds",
    "gib_per_second",
    "spread",
    "failures",
    "fetchers",
]
KEYS += ["source", "verified"]
PHASES = ["waiting", "opening", "reading", "assembling"]


def tensor_sizes(folder: Path) -> dict[str, int]:
    """The bytes of every tensor, as the safetensors library gives them."""
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.offset_keys()}
    return sizes


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of version 7 that torch wrote, with a step beside the tensors; not to be changed."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"layers.{row}.weight": torch.randn(300, 200, generator=generator) for row in range(8)}
    tensors |= {"norm": torch.randn(200, generator=generator).to(torch.bfloat16), "scale": torch.tensor(0.5)}
    folder = tmp_path_factory.mktemp("dcp") / "step-7"
    with warnings.catch_warnings():  # there is no process group
        warnings.simplefilter("ignore")
        save({"model": tensors, "step": 7}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder, tensors


@pytest.fixture(scope="module")
def verified(checkpoint: Path) -> Done:
    """A fetch with two fetchers, verified."""
    return loadmaster("fetch", checkpoint, "--procs", 2, "--verify", "--json")


def test_the_keys_of_the_json_are_these(verified: Done) -> None:
    assert (verified.code, verified.stderr) == (0, "")
    report = verified.document
    assert list(report) == KEYS
    assert list(report["verified"]) == ["tensors", "bytes"]
    for row in report["fetchers"]:
        assert list(row["seconds"]) == PHASES


def test_the_json_counts_what_the_fetchers_have_fetched(verified: Done, checkpoint: Path) -> None:
    report = verified.document
    sizes = tensor_sizes(checkpoint)
    assert (report["ok"], report["version"], report["failures"]) == (True, None, [])
    assert report["source"] == str(checkpoint)
    assert (report["tensors"], report["bytes"]) == (len(sizes), sum(sizes.values()))
    assert report["verified"] == {"tensors": len(sizes), "bytes": sum(sizes.values())}
    assert sum(row["num_bytes"] for row in report["fetchers"]) == report["bytes"]
    assert report["gib_per_second"] == pytest.approx(report["bytes"] / (1 << 30) / report["seconds"])
    assert len({row["pid"] for row in report["fetchers"]}) == len(report["fetchers"])
    assert all(row["threads"] >= 1 and row["why"] for row in report["fetchers"])


def test_a_version_is_shown_as_tables_and_sentences(
    dcp_folder: tuple[Path, dict[str, torch.Tensor]], temporary_folder: Path
) -> None:
    """The version is put into the path; the folder is one of torch.distributed.checkpoint."""
    folder, tensors = dcp_folder
    pattern = folder.with_name("step-{version}")
    done = loadmaster("fetch", pattern, "--version", 7, "--procs", 1, "--verify", "--quiet", "--keep-memory")
    assert (done.code, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["fetcher", "bundles", "stolen", "tensors", "bytes", "threads"] in rows
    assert ["fetcher", *(word for phase in PHASES for word in (phase, "s"))] in rows
    counts, seconds = [row for row in rows if row[:1] == ["0"]]
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert counts[2:6] == ["0", str(len(tensors)), f"{num_bytes / (1 << 20):.2f}", "MiB"]
    assert len(seconds) == 1 + len(PHASES)
    assert re.search(r"^threads: .+", done.stdout, re.MULTILINE)
    assert re.search(r"^fetched 1\.\d+ MiB of version 7 with 1 fetcher in .* GiB/s; spread 1\.00 ", done.stdout, re.M)
    count = f"{len(tensors)} tensors, {num_bytes} bytes"
    assert f"verified: {count}, all as torch.distributed.checkpoint gives them" in done.stdout


def with_reads(folder: Path, hook: str) -> dict[str, str]:
    """The environment in which ``hook`` sees every read of a fetcher: ``call``, its number, and ``buffers``."""
    (folder / "sitecustomize.py").write_text(HOOK.replace("HOOK", hook))
    return {"PYTHONPATH": os.pathsep.join([os.fspath(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


HOOK = """
import os, time
_preadv, call = os.preadv, 0
def hooked(descriptor, buffers, offset):
    global call
    call += 1
    count = _preadv(descriptor, buffers, offset)
    HOOK
    return count
if "LOADMASTER_LOCAL_RANK" in os.environ:
    os.preadv = hooked
"""


def test_progress_is_told_while_bytes_are_placed(checkpoint: Path, tmp_path: Path, temporary_folder: Path) -> None:
    """The fetcher waits for longer than there is between two lines."""
    environment = with_reads(tmp_path, "call == 3 and time.sleep(4)")
    done = loadmaster("fetch", checkpoint, "--procs", 1, environment=environment)
    assert done.code == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines
    assert [line for line in lines if not re.match(r"loading: .* of 8\.\d+ MiB, ", line)] == []


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_byte_that_differs_is_found_by_verify(
    kind: str,
    checkpoint: Path,
    dcp_folder: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    temporary_folder: Path,
) -> None:
    """One byte of every large read is another one."""
    path = checkpoint if kind == "safetensors" else dcp_folder[0]
    environment = with_reads(tmp_path, "if len(largest := max(buffers, key=len)) > 100_000: largest[1000] ^= 1")
    done = loadmaster("fetch", path, "--procs", 1, "--verify", "--json", environment=environment)
    assert done.code == 1, done.stderr
    assert re.fullmatch(r"loadmaster: tensor '.*' of .* differs from the reference at byte \d+.*", done.sentence)
    assert list(done.document) == KEYS
    assert (done.document["ok"], done.document["verified"]) == (False, None)


def test_a_source_that_needs_a_version_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "fetch", tmp_path / "step-{version}")
    assert (done.code, done.stdout) == (2, "")
    assert done.sentence == f"loadmaster: {tmp_path}/step-{{version}} needs a version, and none was given"


def test_a_source_that_is_missing_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "fetch", tmp_path / "step-{version}", "--version", "3", "--procs", "1", "--json")
    assert done.code == 2
    assert done.sentence == f"loadmaster: {tmp_path}/step-3 does not exist"
    report = done.document
    assert list(report) == KEYS
    assert (report["ok"], report["version"], report["source"]) == (False, 3, f"{tmp_path}/step-{{version}}")
    assert [report[key] for key in ("bytes", "seconds", "gib_per_second", "fetchers")] == [None, None, None, []]


@pytest.mark.parametrize("procs", ["0", "-1", "two"])
def test_a_number_of_fetchers_that_is_none(procs: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, "fetch", checkpoint, "--procs", procs)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch(r"loadmaster: .*--procs.*", done.sentence)


def test_a_fetcher_that_is_killed_is_reported_and_its_work_is_done_by_the_other(
    checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> None:
    done = loadmaster(
        "fetch", checkpoint, "--procs", 2, "--verify", "--json", environment=hooked(tmp_path, rank0="say", rank1="kill")
    )
    assert done.code == 0, done.stderr
    assert "fetcher 1 was killed by SIGKILL, possibly out of memory" in done.document["failures"]
    assert done.document["verified"]["tensors"] == len(tensor_sizes(checkpoint))
    assert "fetcher 1 was killed by SIGKILL" in done.stderr
    (pid,) = [int((tmp_path / "rank1").read_text())]
    assert alive_at_the_end([pid], seconds=0) == []


def test_a_file_that_is_truncated_while_it_is_read_is_one_sentence_at_the_end(
    own_checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> None:
    done = loadmaster("fetch", own_checkpoint, "--procs", 1, "--quiet", environment=hooked(tmp_path, rank0="truncate"))
    assert (tmp_path / "rank0").exists()
    assert (done.code, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"loadmaster: .* could not be fetched: fetcher 0: .*truncated.*", last), done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def fetching(
    checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A fetch whose two fetchers are in the middle of reading, in a process group of its own, and their numbers."""
    process = subprocess.Popen(
        command_line("fetch", checkpoint, "--procs", 2, "--quiet"),
        env={**os.environ, **hooked(tmp_path, rank0="wait", rank1="wait")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        while len(fetchers := sorted(tmp_path.glob("rank[0-9]"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        yield process, [int(path.read_text()) for path in fetchers]
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_ends_everything_with_one_sentence(fetching: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, fetchers = fetching
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 1
    assert alive_at_the_end(fetchers, seconds=0) == []
    assert (stdout, stderr) == ("", "loadmaster: interrupted; nothing is left running\n")


def test_a_command_that_is_killed_leaves_no_fetcher(fetching: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, fetchers = fetching
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert alive_at_the_end(fetchers) == []
