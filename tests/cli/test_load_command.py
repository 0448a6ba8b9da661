"""``loadmaster load`` from end to end: what it prints when it succeeds, and how it ends when a rank does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoint.helpers.experts import Sizes, moe_tensors, wanted_banks, write_moe
from cli.helpers.command import Done, command_line, hooked, loadmaster, on_terminal
from launch.helpers.leftovers import alive_at_the_end

pytestmark = pytest.mark.processes

PHASES = ["start", "open", "plan", "read", "convert", "verify"]
WHOLE_BY_EVERY_RANK = re.compile(r"norm\.weight$")
SECONDS_TO_END = 3.0
"""Between the end of the slowest rank's work and that of the command: all ranks end, each an interpreter with torch."""


def tensor_sizes(folder: Path) -> dict[str, int]:
    """The bytes of every tensor, as the safetensors library gives them."""
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.offset_keys()}
    return sizes


@pytest.fixture(scope="module")
def verified(checkpoint: Path) -> tuple[Done, float]:
    """A load into two ranks, verified, and the seconds that it took as seen from here."""
    started = time.monotonic()
    done = loadmaster("load", checkpoint, "--ranks", 2, "--verify", "--json")
    return done, time.monotonic() - started


def test_the_keys_of_the_json_are_these(verified: tuple[Done, float]) -> None:
    done, _ = verified
    assert (done.code, done.stderr) == (0, "")
    report = done.document
    assert list(report) == [
        "ok",
        "checkpoint",
        "ranks",
        "load_seconds",
        "wall_seconds",
        "gib_per_second",
        "verified",
    ]
    assert list(report["verified"]) == ["tensors", "bytes"]
    for rank in report["ranks"]:
        assert list(rank) == [
            "rank",
            "tensors",
            "bytes_read",
            "bytes_placed",
            "seconds",
            "threads",
            "why",
            "peak_rss",
        ]
        assert list(rank["seconds"]) == PHASES


def test_the_json_counts_the_tensors_and_bytes_of_each_rank(verified: tuple[Done, float], checkpoint: Path) -> None:
    report = verified[0].document
    sizes = tensor_sizes(checkpoint)
    placed = sum(size if WHOLE_BY_EVERY_RANK.search(name) else size // 2 for name, size in sizes.items())
    assert report["ok"] is True
    assert report["checkpoint"] == str(checkpoint)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert rank["tensors"] == len(sizes)
        assert rank["bytes_placed"] == placed
        assert placed <= rank["bytes_read"] <= sum(sizes.values())
        assert rank["threads"] >= 1
        assert "2 ranks" in rank["why"]
        assert rank["peak_rss"] > placed
    assert report["verified"] == {"tensors": 2 * len(sizes), "bytes": 2 * placed}
    assert report["gib_per_second"] == pytest.approx(2 * placed / (1 << 30) / report["load_seconds"])


def test_the_seconds_of_the_phases_add_up_to_the_wall_time(verified: tuple[Done, float]) -> None:
    done, seconds_from_outside = verified
    report = done.document
    slowest = max(sum(rank["seconds"].values()) for rank in report["ranks"])
    assert all(second >= 0 for rank in report["ranks"] for second in rank["seconds"].values())
    assert slowest <= report["wall_seconds"] <= seconds_from_outside
    assert report["wall_seconds"] - slowest < SECONDS_TO_END
    loading = [sum(rank["seconds"][phase] for phase in PHASES[1:-1]) for rank in report["ranks"]]
    assert max(loading) <= report["load_seconds"] < max(loading) + 1.0
    assert all(rank["seconds"]["verify"] > 0 for rank in report["ranks"])


def test_whole_copies_are_shown_as_a_table_and_progress_on_a_terminal(checkpoint: Path, temporary_folder: Path) -> None:
    done, shown = on_terminal("load", checkpoint, "--ranks", 2, "--shard", "none", "--threads", 1, "--verify")
    assert done.code == 0, shown
    sizes = tensor_sizes(checkpoint)
    rows = [line.split() for line in done.stdout.splitlines()]
    placed = f"{sum(sizes.values()) / (1 << 20):.2f}"
    assert ["rank", "tensors", "read", "placed", "threads", "peak", "memory"] in rows
    assert ["rank", *(word for phase in PHASES for word in (phase, "s"))] in rows
    for rank in ("0", "1"):
        amounts, seconds = [row for row in rows if row[:1] == [rank]]
        assert amounts[1:7] == [str(len(sizes)), placed, "MiB", placed, "MiB", "1"]
        assert float(amounts[7]) > 0
        assert len(seconds) == 1 + len(PHASES)
        assert all(float(second) >= 0 for second in seconds[1:])
    text = " ".join(done.stdout.split())
    assert "threads: --threads 1" in text
    assert f"verified: {2 * len(sizes)} tensors, {2 * sum(sizes.values())} bytes" in text
    assert f"loaded {2 * sum(sizes.values()) / (1 << 20):.1f} MiB into 2 ranks in " in text
    for rank in ("rank 0", "rank 1"):
        assert rank in shown


def test_quiet_prints_the_result_and_what_a_rank_has_said(
    checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> None:
    file = next(checkpoint.glob("*1-of-*.safetensors"))
    words = ["load", file, "--ranks", 2, "--shard", "none", "--dtype", "float32", "--quiet"]
    done, shown = on_terminal(*words, environment=hooked(tmp_path, rank1="say"))
    assert done.code == 0
    assert shown.splitlines() == ["rank 1: a word from a library", "rank 1: and another one"]
    sizes = [size for name, size in tensor_sizes(checkpoint).items() if name in names_in(file)]
    read, placed = (f"{factor * sum(sizes) / (1 << 20):.2f}" for factor in (1, 2))  # from BF16 to twice the bytes
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[1:2] == [str(len(sizes))]]
    assert [row[2:6] for row in rows] == [[read, "MiB", placed, "MiB"]] * 2
    assert " into 2 ranks in " in done.stdout
    assert "verified" not in done.stdout


def names_in(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.offset_keys())


def test_a_warning_is_given_once_however_many_ranks_have_cause_for_it(tmp_path: Path, temporary_folder: Path) -> None:
    save_file({"encoder.weight": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    done = loadmaster("load", tmp_path / "model.safetensors", "--ranks", 2, "--verify", "--json")
    assert done.code == 0
    assert done.sentence.startswith("loadmaster: no tensor-parallel rule applies to ")


EXPERTS = Sizes(4, 32, 64)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with two layers of experts in three files; not to be changed."""
    tensors = moe_tensors("nvfp4-modelopt", EXPERTS, (0, 1))
    folder = tmp_path_factory.mktemp("checkpoint") / "moe"
    return write_moe(folder, tensors, lambda name: sum(map(ord, name)) % 3, {"num_experts": 4}), tensors


def bank_bytes(tensors: dict[str, torch.Tensor], experts: list[int], rank: int = 0, ranks: int = 1) -> int:
    banks = [wanted_banks("nvfp4-modelopt", tensors, layer, experts, rank, ranks) for layer in (0, 1)]
    return sum(bank.nbytes for of_layer in banks for bank in of_layer.values())


@pytest.mark.parametrize(
    ("options", "kept"),
    [([], None), (["--experts-by", "strided", "--cold", "--drop-cache"], [0, 2]), (["--experts-by", "blocks"], [0, 1])],
    ids=["tp", "strided and cold", "blocks"],
)
def test_experts_go_into_banks_and_every_byte_is_verified(
    experts: tuple[Path, dict[str, torch.Tensor]], temporary_folder: Path, options: list[str], kept: list[int] | None
) -> None:
    """The keys of the JSON are those of any load."""
    path, tensors = experts
    done = loadmaster("load", path, "--ranks", 2, "--experts", "--verify", "--json", *options)
    assert done.code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "O_DIRECT" not in line] == []
    report = done.document
    assert list(report) == ["ok", "checkpoint", "ranks", "load_seconds", "wall_seconds", "gib_per_second", "verified"]
    rest = {name: tensor.nbytes for name, tensor in tensors.items() if ".mlp.experts." not in name}
    of_rest = sum(size if "norm" in name else size // 2 for name, size in rest.items())
    of_banks = bank_bytes(tensors, kept) if kept else bank_bytes(tensors, [0, 1, 2, 3], 0, 2)
    for rank in report["ranks"]:
        assert list(rank["seconds"]) == PHASES
        assert rank["bytes_placed"] == of_rest + of_banks
        assert rank["tensors"] == len(rest) + 2 * 9 * len(kept or [0, 1, 2, 3])
    assert report["verified"] == {"tensors": 2 * (len(rest) + 12), "bytes": 2 * (of_rest + of_banks)}


def test_experts_of_other_names_go_by_a_file(tmp_path: Path, temporary_folder: Path) -> None:
    """The layout alone says that there are experts."""
    tensors = {f"blocks.0.experts.{expert}.w": torch.full((4, 6), float(expert)) for expert in range(2)}
    path = write_moe(tmp_path / "own", tensors)
    layout = tmp_path / "layout.json"
    pattern = r"blocks\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<projection>w)"
    layout.write_text(json.dumps({"pattern": pattern, "banks": {"w": {"parts": ["w"], "intermediate": 0}}}))
    done = loadmaster("load", path, "--ranks", 2, "--experts-layout", layout, "--verify", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.document["verified"] == {"tensors": 2, "bytes": 2 * 4 * 6 * 4}


def test_a_wrong_byte_of_a_bank_is_found_by_verify(
    experts: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, temporary_folder: Path
) -> None:
    path = write_moe(tmp_path / "alone", {name: tensor for name, tensor in experts[1].items() if ".experts." in name})
    environment = {**hooked(tmp_path, rank0="corrupt"), "READ_HOOK_CALL": "1"}  # all of them are read in one call
    done = loadmaster("load", path, "--experts", "--verify", "--json", environment=environment)
    assert done.code == 1
    assert re.fullmatch(
        r"loadmaster: rank 0: bank \w+ of layer \d differs from the reference at expert \d", done.sentence
    )
    assert (done.document["ok"], done.document["verified"]) == (False, None)


def test_a_file_that_is_truncated_while_it_is_read_is_one_sentence(
    own_checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> None:
    done = loadmaster("load", own_checkpoint, "--quiet", environment=hooked(tmp_path, rank0="truncate"))
    assert (tmp_path / "rank0").exists()
    assert (done.code, done.stdout) == (1, "")
    match = re.fullmatch(
        r"loadmaster: rank 0: (\S+) was truncated while it was being read.* at offset (\d+), in tensor '(.*)'",
        done.sentence,
    )
    assert match is not None, done.stderr
    file, offset = Path(match[1]), int(match[2])
    assert file.stat().st_size == offset
    header = file.read_bytes()[8:]
    length = int.from_bytes(file.read_bytes()[:8], "little")
    begin, end = json.loads(header[:length])[match[3]]["data_offsets"]
    assert 8 + length + begin <= offset < 8 + length + end


def test_a_rank_that_is_killed_while_it_reads_is_one_sentence(
    checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> None:
    done = loadmaster(
        "load", checkpoint, "--ranks", 2, "--json", environment=hooked(tmp_path, rank0="wait", rank1="kill")
    )
    assert done.code == 1
    assert done.sentence == (
        "loadmaster: rank 1 was killed by SIGKILL, possibly out of memory; the other rank was stopped"
    )
    assert done.document["ok"] is False
    assert done.document["ranks"] == []
    assert alive_at_the_end(hooked_processes(tmp_path), seconds=0) == []


def test_a_byte_that_differs_is_found_by_verify(checkpoint: Path, tmp_path: Path, temporary_folder: Path) -> None:
    done = loadmaster("load", checkpoint, "--verify", "--json", environment=hooked(tmp_path, rank0="corrupt"))
    assert done.code == 1
    assert re.fullmatch(
        r"loadmaster: rank 0: tensor '.*' of .* differs from the reference at byte \d+ .*", done.sentence
    )
    assert (done.document["ok"], done.document["verified"]) == (False, None)


def hooked_processes(folder: Path) -> list[int]:
    """The process numbers of the ranks that have come to their action."""
    return [int(path.read_text()) for path in sorted(folder.glob("rank[0-9]"))]


@pytest.fixture
def reading(
    checkpoint: Path, tmp_path: Path, temporary_folder: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A load whose two ranks are in the middle of reading, in a process group of its own, and their numbers."""
    process = subprocess.Popen(
        command_line("load", checkpoint, "--ranks", 2, "--shard", "none"),
        env={**os.environ, **hooked(tmp_path, rank0="wait", rank1="wait")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        while len(ranks := hooked_processes(tmp_path)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        yield process, ranks
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_ends_everything_with_one_sentence(reading: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = reading
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 1
    assert alive_at_the_end(ranks, seconds=0) == []
    lines = [line for line in stderr.splitlines() if line and not line.startswith("loading: ")]
    assert lines == ["loadmaster: interrupted; nothing is left running"]
    assert stdout == ""


def test_a_command_that_is_killed_leaves_no_rank(reading: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = reading
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert alive_at_the_end(ranks) == []
