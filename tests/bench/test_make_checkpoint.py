"""``bench make-checkpoint``: what it writes is what the library reads, and nothing half-made looks whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from loadmaster.bench.families import DTYPE_BYTES, FAMILIES, fit
from loadmaster.bench.make_checkpoint import make_checkpoint, parse_size
from loadmaster.cli import bench_make_checkpoint
from loadmaster.errors import InputError, LoadmasterError

SIZE = 8 << 20
SHARD = 3 << 20


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("made") / request.param
    make_checkpoint(folder, request.param, SIZE, shard_bytes=SHARD)
    return request.param, folder


def config_of(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((folder / "config.json").read_text()))


def described(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor, as the safetensors library gives them."""
    safetensors = pytest.importorskip("safetensors")
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - the library's file is no mapping
                part = file.get_slice(name)
                tensors[name] = (part.get_dtype(), tuple(part.get_shape()))
    return tensors


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def blocks(extent: int) -> int:
    return -(-extent // 128)


LAYER = "model.layers.1."
EXPERT = LAYER + "mlp.experts.3."

# Family -> number of tensors in a layer beside its experts, number for each expert, the tensors that tell the family.
EXPECTED: dict[str, tuple[int, int, Any]] = {
    "llama": (9, 0, lambda c: {
        LAYER + "self_attn.q_proj.weight": ("BF16", (c.num_attention_heads * c.head_dim, c.hidden_size)),
        LAYER + "self_attn.k_proj.weight": ("BF16", (c.num_key_value_heads * c.head_dim, c.hidden_size)),
        LAYER + "self_attn.v_proj.weight": ("BF16", (c.num_key_value_heads * c.head_dim, c.hidden_size)),
        LAYER + "self_attn.o_proj.weight": ("BF16", (c.hidden_size, c.num_attention_heads * c.head_dim)),
        LAYER + "mlp.gate_proj.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
        LAYER + "mlp.up_proj.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
        LAYER + "mlp.down_proj.weight": ("BF16", (c.hidden_size, c.intermediate_size)),
        LAYER + "input_layernorm.weight": ("BF16", (c.hidden_size,)),
        LAYER + "post_attention_layernorm.weight": ("BF16", (c.hidden_size,)),
        "lm_head.weight": ("BF16", (c.vocab_size, c.hidden_size)),
    }),
    "qwen3": (11, 0, lambda c: {
        LAYER + "self_attn.q_norm.weight": ("BF16", (c.head_dim,)),
        LAYER + "self_attn.k_norm.weight": ("BF16", (c.head_dim,)),
    }),
    "phi3": (6, 0, lambda c: {
        LAYER + "self_attn.qkv_proj.weight": (
            "BF16", ((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, c.hidden_size)),
        LAYER + "mlp.gate_up_proj.weight": ("BF16", (2 * c.intermediate_size, c.hidden_size)),
    }),
    "mixtral": (7, 3, lambda c: {
        LAYER + "block_sparse_moe.gate.weight": ("BF16", (c.num_local_experts, c.hidden_size)),
        LAYER + "block_sparse_moe.experts.3.w1.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
        LAYER + "block_sparse_moe.experts.3.w2.weight": ("BF16", (c.hidden_size, c.intermediate_size)),
        LAYER + "block_sparse_moe.experts.3.w3.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
    }),
    "qwen-moe": (14, 3, lambda c: {
        LAYER + "self_attn.k_proj.bias": ("BF16", (c.num_key_value_heads * c.head_dim,)),
        LAYER + "mlp.gate.weight": ("BF16", (c.num_experts, c.hidden_size)),
        LAYER + "mlp.shared_expert.down_proj.weight": ("BF16", (c.hidden_size, c.shared_expert_intermediate_size)),
        LAYER + "mlp.shared_expert_gate.weight": ("BF16", (1, c.hidden_size)),
        EXPERT + "gate_proj.weight": ("BF16", (c.moe_intermediate_size, c.hidden_size)),
        EXPERT + "down_proj.weight": ("BF16", (c.hidden_size, c.moe_intermediate_size)),
    }),
    "gpt-oss": (19, 0, lambda c: {
        LAYER + "self_attn.sinks": ("BF16", (c.num_attention_heads,)),
        LAYER + "self_attn.o_proj.bias": ("BF16", (c.hidden_size,)),
        LAYER + "mlp.router.weight": ("BF16", (c.num_local_experts, c.hidden_size)),
        LAYER + "mlp.router.bias": ("BF16", (c.num_local_experts,)),
        LAYER + "mlp.experts.gate_up_proj_blocks": (
            "U8", (c.num_local_experts, 2 * c.intermediate_size, c.hidden_size // 32, 16)),
        LAYER + "mlp.experts.gate_up_proj_scales": (
            "U8", (c.num_local_experts, 2 * c.intermediate_size, c.hidden_size // 32)),
        LAYER + "mlp.experts.gate_up_proj_bias": ("BF16", (c.num_local_experts, 2 * c.intermediate_size)),
        LAYER + "mlp.experts.down_proj_blocks": (
            "U8", (c.num_local_experts, c.hidden_size, c.intermediate_size // 32, 16)),
        LAYER + "mlp.experts.down_proj_scales": (
            "U8", (c.num_local_experts, c.hidden_size, c.intermediate_size // 32)),
        LAYER + "mlp.experts.down_proj_bias": ("BF16", (c.num_local_experts, c.hidden_size)),
    }),
    "deepseek-fp8": (22, 6, lambda c: {
        "model.layers.0.mlp.gate_proj.weight": ("F8_E4M3", (c.intermediate_size, c.hidden_size)),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": ("F32", (blocks(c.intermediate_size), blocks(c.hidden_size))),
        LAYER + "self_attn.q_a_proj.weight": ("F8_E4M3", (c.q_lora_rank, c.hidden_size)),
        LAYER + "self_attn.q_a_layernorm.weight": ("BF16", (c.q_lora_rank,)),
        LAYER + "self_attn.q_b_proj.weight": (
            "F8_E4M3", (c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank)),
        LAYER + "self_attn.kv_a_proj_with_mqa.weight": (
            "F8_E4M3", (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)),
        LAYER + "self_attn.kv_a_proj_with_mqa.weight_scale_inv": (
            "F32", (blocks(c.kv_lora_rank + c.qk_rope_head_dim), blocks(c.hidden_size))),
        LAYER + "self_attn.kv_a_layernorm.weight": ("BF16", (c.kv_lora_rank,)),
        LAYER + "self_attn.kv_b_proj.weight": (
            "F8_E4M3", (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)),
        LAYER + "self_attn.o_proj.weight": ("F8_E4M3", (c.hidden_size, c.num_attention_heads * c.v_head_dim)),
        LAYER + "mlp.gate.e_score_correction_bias": ("F32", (c.n_routed_experts,)),
        LAYER + "mlp.shared_experts.up_proj.weight": ("F8_E4M3", (c.moe_intermediate_size, c.hidden_size)),
        EXPERT + "down_proj.weight": ("F8_E4M3", (c.hidden_size, c.moe_intermediate_size)),
        EXPERT + "down_proj.weight_scale_inv": ("F32", (blocks(c.hidden_size), blocks(c.moe_intermediate_size))),
    }),
    "nvfp4-moe": (9, 12, lambda c: {
        EXPERT + "gate_proj.weight": ("U8", (c.moe_intermediate_size, c.hidden_size // 2)),
        EXPERT + "gate_proj.weight_scale": ("F8_E4M3", (c.moe_intermediate_size, c.hidden_size // 16)),
        EXPERT + "up_proj.weight_scale_2": ("F32", ()),
        EXPERT + "up_proj.input_scale": ("F32", ()),
        EXPERT + "down_proj.weight": ("U8", (c.hidden_size, c.moe_intermediate_size // 2)),
        EXPERT + "down_proj.weight_scale": ("F8_E4M3", (c.hidden_size, c.moe_intermediate_size // 16)),
    }),
    "small-experts": (0, 3, lambda c: {
        EXPERT + "gate_proj.weight": ("BF16", (64, 128)),
        EXPERT + "down_proj.weight": ("BF16", (128, 64)),
    }),
    "small-tensors": (1, 0, lambda c: {LAYER + "tensor.weight": ("BF16", (32, 64))}),
}  # fmt: skip


def test_has_the_names_shapes_and_dtypes_of_the_family(checkpoint: tuple[str, Path]) -> None:
    family, folder = checkpoint
    tensors, config = described(folder), config_of(folder)
    per_layer, per_expert, expected = EXPECTED[family]
    for name, what in expected(config).items():
        assert tensors[name] == what, name
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(config, key)]
    count = getattr(config, experts[0]) if experts else 0
    of_experts = [bool(re.search(r"\.experts\.\d", name)) for name in tensors if name.startswith(LAYER)]
    assert (of_experts.count(False), of_experts.count(True)) == (per_layer, per_expert * count)
    assert {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")} == set(
        range(config.num_hidden_layers)
    )
    assert ("lm_head.weight" in tensors) == (not getattr(config, "tie_word_embeddings", True))


def test_the_library_would_write_the_same_files(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    _, folder = checkpoint
    for path in folder.glob("*.safetensors"):
        torch_files.save_file(torch_files.load_file(path), tmp_path / path.name, metadata={"format": "pt"})
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_the_index_names_every_tensor_once_where_it_is(checkpoint: tuple[str, Path]) -> None:
    safetensors = pytest.importorskip("safetensors")
    _, folder = checkpoint
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    paths = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in paths] == [
        f"model-{number:05}-of-{len(paths):05}.safetensors" for number in range(1, len(paths) + 1)
    ]
    found: dict[str, str] = {}
    for path in paths:
        with safetensors.safe_open(path, framework="np") as file:
            names = list(file.keys())
        assert not found.keys() & set(names)
        found |= dict.fromkeys(names, path.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == _data_bytes(folder)


def _data_bytes(folder: Path) -> int:
    size = 0
    for dtype, shape in described(folder).values():
        elements = 1
        for extent in shape:
            elements *= extent
        size += elements * DTYPE_BYTES[dtype]
    return size


def test_shards_hold_no_more_than_was_asked(checkpoint: tuple[str, Path]) -> None:
    _, folder = checkpoint
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            data_bytes = path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
        assert data_bytes <= SHARD


def test_small_checkpoint_is_one_file_without_an_index(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, "llama", 2 << 20)
    assert made.files == ("model.safetensors",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_values_are_finite_and_scales_positive(checkpoint: tuple[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    torch_files = pytest.importorskip("safetensors.torch")
    _, folder = checkpoint
    for path in folder.glob("*.safetensors"):
        for name, tensor in torch_files.load_file(path).items():
            if tensor.dtype == torch.uint8:
                assert "scales" not in name or int(tensor.max()) < 255, name
                continue
            values = tensor.float()
            assert bool(torch.isfinite(values).all()), name
            assert float(values.abs().max()) > 0, name
            assert "scale" not in name or float(values.min()) > 0, name


def test_no_two_rows_and_no_two_tensors_are_the_same(checkpoint: tuple[str, Path]) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    _, folder = checkpoint
    seen: set[bytes] = set()
    for path in folder.glob("*.safetensors"):
        for name, tensor in torch_files.load_file(path).items():
            row_bytes = tensor.shape[-1] * tensor.element_size() if tensor.ndim else 0
            if row_bytes < 32:
                continue  # so few random bits do repeat
            rows = tensor.reshape(-1, tensor.shape[-1]).view(torch.uint8).numpy()
            assert len({row.tobytes() for row in rows}) == len(rows), name
            seen_before = len(seen)
            seen.add(rows.tobytes())
            assert len(seen) == seen_before + 1, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size_bytes", [8 << 20, 100 * 10**6, 2 << 30, 20 << 30])
def test_size_is_close_and_divides_by_eight_ranks(family: str, size_bytes: int) -> None:
    model = fit(family, size_bytes)
    assert abs(model.num_bytes() - size_bytes) <= 0.05 * size_bytes
    for key, width in model.widths.items():
        assert width % 8 == 0, key


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "small-tensors"])
def test_computed_size_is_the_size_of_the_tensors(family: str) -> None:
    model = fit(family, 50 << 20)
    assert model.num_bytes() == sum(spec.num_bytes for spec in model.tensors())


def test_experts_of_two_gib_are_of_the_size_that_engines_see() -> None:
    sizes = {spec.num_bytes for spec in fit("nvfp4-moe", 2 << 30).tensors() if spec.name.endswith("gate_proj.weight")}
    assert all(100_000 <= size <= 400_000 for size in sizes)


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_number_of_layers_is_exact(layers: int) -> None:
    model = fit("nvfp4-moe", 300 << 20, layers)
    assert model.num_layers == layers
    assert abs(model.num_bytes() - (300 << 20)) <= 0.05 * (300 << 20)
    assert fit("nvfp4-moe", 300 << 20, 1).widths["hidden_size"] >= model.widths["hidden_size"]


def test_layers_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^no llama checkpoint has about 1000000 bytes in 90 layers; the smallest"):
        make_checkpoint(tmp_path, "llama", 1_000_000, layers=90)
    with pytest.raises(InputError, match=r"in 1 layer; the smallest"):
        make_checkpoint(tmp_path, "deepseek-fp8", 300 << 20, layers=1)  # its first layer has no experts
    with pytest.raises(InputError, match="number of tensors or of layers, not both"):
        make_checkpoint(tmp_path, "small-tensors", tensors=10, layers=2)
    with pytest.raises(InputError, match="number of tensors and of layers must be at least 1"):
        make_checkpoint(tmp_path, "llama", layers=0)
    assert list(tmp_path.iterdir()) == []


def test_same_arguments_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_checkpoint(tmp_path / name, "nvfp4-moe", SIZE, shard_bytes=SHARD, seed=seed)
    one, two, three = (digests(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one.keys() == three.keys()
    shards = [name for name in one if name.endswith(".safetensors")]
    assert all(one[name] != three[name] for name in shards)


def test_bytes_are_those_of_every_machine(tmp_path: Path) -> None:
    """The digest was written down once: another numpy, or a change of the writer, must not change what a seed gives."""
    make_checkpoint(tmp_path, "deepseek-fp8", SIZE, seed=7)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "3cc30167810d7e6a1114fb86730837ebe700e7dc16e9173d9d4c0295b244d753"


def test_number_of_small_tensors_is_exact(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "default", "small-tensors", tensors=300)
    assert (made.num_tensors, made.num_bytes) == (300, 300 * 4096)
    made = make_checkpoint(tmp_path / "larger", "small-tensors", 5_000_000, tensors=300)
    assert made.num_tensors == 300
    assert 0.95 * 5_000_000 < made.num_bytes <= 5_000_000


def test_a_checkpoint_that_is_there_is_reused(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path, "llama", SIZE, shard_bytes=SHARD)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = make_checkpoint(tmp_path, "llama", SIZE, shard_bytes=SHARD)
    assert (first.reused, second.reused) == (False, True)
    assert (first.files, first.num_bytes) == (second.files, second.num_bytes)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"family": "qwen3"},
        {"size_bytes": 2 * SIZE},
        {"shard_bytes": 2 * SHARD},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_checkpoint_is_not_touched(tmp_path: Path, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"family": "llama", "size_bytes": SIZE, "shard_bytes": SHARD, "seed": 0}
    make_checkpoint(tmp_path, **arguments)
    before = digests(tmp_path)
    with pytest.raises(InputError, match="something else"):
        make_checkpoint(tmp_path, **{**arguments, **change})
    assert digests(tmp_path) == before


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"something else already \(notes.txt\)"):
        make_checkpoint(tmp_path, "llama", SIZE)
    assert digests(tmp_path).keys() == {"notes.txt"}


@pytest.mark.parametrize("damage", ["truncated", "missing", "extra"])
def test_a_damaged_checkpoint_is_not_reused(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path, "llama", SIZE, shard_bytes=SHARD)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "missing":
        shard.unlink()
    else:
        shutil.copy(shard, tmp_path / "model-00004-of-00003.safetensors")
    with pytest.raises(InputError, match="something else"):
        make_checkpoint(tmp_path, "llama", SIZE, shard_bytes=SHARD)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"family": "lama"}, "no checkpoint family 'lama'; the families are llama, qwen3, phi3"),
        ({"size_bytes": 1000}, "the smallest one has"),
        ({"size_bytes": 0}, "at least 1"),
        ({"shard_bytes": 0}, "at least 1"),
        ({"seed": -1}, "seed at least 0"),
        ({"tensors": 5}, "for small-tensors only, not for llama"),
        ({"tensors": 0, "family": "small-tensors"}, "at least 1"),
        ({"tensors": 10**7, "family": "small-tensors"}, "need at least 640000000 bytes"),
    ],
)
def test_wrong_arguments_are_named_and_write_nothing(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    folder = tmp_path / "new"
    with pytest.raises(InputError, match=re.escape(sentence)):
        make_checkpoint(folder, **{"family": "llama", "size_bytes": SIZE, **arguments})
    assert not folder.exists()


def test_lack_of_disk_space_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=SIZE // 2))
    folder = tmp_path / "new"
    with pytest.raises(InputError, match=r"needs 0\.01 GiB, .*new has 0\.00 GiB free"):
        make_checkpoint(folder, "llama", SIZE)
    assert not folder.exists()


def test_more_than_the_disk_is_told_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "below"
    with pytest.raises(InputError, match=r"needs \d+\.\d\d GiB, the disk of .*below has \d+\.\d\d"):
        make_checkpoint(folder, "small-tensors", 10**18)
    assert not folder.exists()


def test_a_checkpoint_that_is_there_needs_no_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", SIZE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=0))
    assert make_checkpoint(tmp_path, "llama", SIZE).reused


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_place_that_is_no_folder_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"cannot make a checkpoint in {tmp_path / where}"):
        make_checkpoint(tmp_path / where, "llama", SIZE)


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere, so permissions cannot tell
    with pytest.raises(InputError, match="no permission to write"):
        make_checkpoint(tmp_path, "llama", SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(LoadmasterError, match="No space left on device") as caught:
        make_checkpoint(tmp_path / "new", "llama", SIZE)
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "whole", "nvfp4-moe", SIZE)
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: os.write(descriptor, b"".join(buffers)[:100_001]))
    make_checkpoint(tmp_path / "short", "nvfp4-moe", SIZE)
    assert digests(tmp_path / "short") == digests(tmp_path / "whole")


def test_two_runs_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(InputError, match="another process is making a checkpoint"):
            make_checkpoint(tmp_path, "llama", SIZE)
    finally:
        os.close(descriptor)


KILLED = """
import os, signal, sys
from pathlib import Path
from loadmaster.bench import make_checkpoint

folder, call, size, shard = sys.argv[1], *map(int, sys.argv[2:])
writev = os.writev

def killed(descriptor, buffers):
    global call
    call -= 1
    if call < 0:
        os.write(descriptor, b"".join(buffers)[:100_000])
        os.kill(os.getpid(), signal.SIGKILL)
    return writev(descriptor, buffers)

os.writev = killed
make_checkpoint.make_checkpoint(folder, "llama", size, shard_bytes=shard)
"""


@pytest.mark.processes
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("shard_bytes", [SHARD, 2 * SIZE])
def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path, call: int, shard_bytes: int) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(folder), str(call), str(SIZE), str(shard_bytes)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert list(folder.iterdir())
    assert all(path.name.endswith(".loadmaster-partial") for path in folder.iterdir())
    (folder / "model-00009-of-00009.safetensors.loadmaster-partial").touch()  # of a run with other arguments
    assert not make_checkpoint(folder, "llama", SIZE, shard_bytes=shard_bytes).reused
    make_checkpoint(tmp_path / "whole", "llama", SIZE, shard_bytes=shard_bytes)
    assert digests(folder) == digests(tmp_path / "whole")


def test_files_appear_only_when_all_are_written_and_the_index_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renamed = Path.rename, []

    def recorded(path: Path, target: Path) -> Path:
        if not renamed:
            assert len([found for found in tmp_path.iterdir() if found.name.endswith(".loadmaster-partial")]) == 5
        renamed.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", recorded)
    made = make_checkpoint(tmp_path, "llama", SIZE, shard_bytes=SHARD)
    assert renamed == ["config.json", "model.safetensors.index.json", *made.files]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5 gib", 3 << 29),
        ("64K", 65536),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "big", "-1", "2GiBs", "GiB", "1e9", "0", "0.0MB", "nan", "inf", "١", "9" * 400])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(text))):
        parse_size(text)


def run_command(*arguments: str) -> None:
    app = typer.Typer()
    app.command()(bench_make_checkpoint.make_checkpoint)
    app(args=list(arguments), standalone_mode=False)


def test_command_prints_what_it_made_and_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "made"), "--family", "phi3", "--size", "8MiB", "--shard-size", "3MiB", "--seed", "3"]
    run_command(*arguments)
    printed = capsys.readouterr().out
    assert re.search(r"phi3 checkpoint in .*made: 0\.01 GiB, \d+ tensors, 3 files, \d+\.\d\d GiB/s", printed)
    assert f"loadmaster load {tmp_path / 'made'} --ranks 2" in printed
    run_command(*arguments, "--json")
    made = json.loads(capsys.readouterr().out)
    assert (made["ok"], made["reused"], made["seed"], made["family"]) == (True, True, 3, "phi3")
    assert made["num_bytes"] == _data_bytes(tmp_path / "made")


def test_command_refuses_a_wrong_size(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'much' is no size"):
        run_command(str(tmp_path / "made"), "--size", "much")


def test_command_module_needs_neither_numpy_nor_torch() -> None:
    code = "import sys, loadmaster.cli.bench_make_checkpoint; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
