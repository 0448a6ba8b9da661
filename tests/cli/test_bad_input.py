"""Bad input and wrong usage: one sentence on standard error, exit code 2, nothing on standard output, no traceback."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cli.helpers.command import COMMAND, loadmaster, run_here, without_privileges


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A whole file, with a tensor that divides among 2 and 4 ranks and among no more."""
    path = tmp_path / "model.safetensors"
    save_file({"model.layers.0.mlp.up_proj.weight": np.ones((4, 8), np.float32), "norm": np.ones(3, np.float32)}, path)
    return path


def missing(file: Path) -> Path:
    return file.with_name("nowhere.safetensors")


def dangling(file: Path) -> Path:
    link = file.with_name("link.safetensors")
    link.symlink_to("nowhere.safetensors")
    return link


def too_long(file: Path) -> Path:
    return file.with_name("x" * 300)


def empty_folder(file: Path) -> Path:
    folder = file.with_name("empty")
    folder.mkdir()
    return folder


def folder_of_text(file: Path) -> Path:
    folder = empty_folder(file)
    (folder / "README.md").write_text("nothing to load")
    return folder


def folder_of_bin(file: Path) -> Path:
    folder = empty_folder(file)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    return folder


def bin_file(file: Path) -> Path:
    return file.rename(file.with_suffix(".bin"))


def index_file(file: Path) -> Path:
    path = file.with_name("model.safetensors.index.json")
    path.write_text('{"weight_map": {"norm": "model.safetensors"}}')
    return path


def index_of_missing_file(file: Path) -> Path:
    index_file(file).write_text('{"weight_map": {"norm": "model-00001-of-00001.safetensors"}}')
    return file.parent


def nothing(file: Path) -> Path:
    file.write_bytes(b"")
    return file


def text_file(file: Path) -> Path:
    file.write_text("This is no checkpoint, and its first eight bytes are no length.")
    return file


def truncated(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1])
    return file


def truncated_header(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:20])
    return file


def broken_header(file: Path) -> Path:
    file.write_bytes(struct.pack("<Q", 4) + b"{{{{")
    return file


def broken_config(file: Path) -> Path:
    file.with_name("config.json").write_text("{")
    return file


PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (missing, "{path} does not exist"),
    "dangling link": (dangling, "{path} is a link to a file that is missing"),
    "empty folder": (empty_folder, "{path} is empty"),
    "folder of text": (folder_of_text, "{path} holds no .safetensors file"),
    "folder of bin": (folder_of_bin, "{path} holds no .safetensors file but pytorch_model.bin; .*"),
    "bin": (bin_file, "{path} is a .bin checkpoint, .*"),
    "index": (index_file, "{path} is the index of a checkpoint; give the folder {folder}"),
    "index of a missing file": (index_of_missing_file, ".* model-00001-of-00001.safetensors, which is missing"),
    "nothing": (nothing, "{path} is no safetensors file: it ends after 0 bytes, .*"),
    "text": (text_file, "{path} is no safetensors file: .*"),
    "truncated": (truncated, "{path} is truncated: tensor '.*' needs bytes [0-9]+ to [0-9]+ and the file has [0-9]+"),
    "truncated header": (truncated_header, "{path} is truncated: the header needs [0-9]+ bytes .* has 20"),
    "broken header": (broken_header, "{path}: the header is not valid JSON: .*"),
    "broken config": (broken_config, "{folder}/config.json is not valid JSON: .*"),
    "name too long": (too_long, "{path} .*"),
}


@pytest.mark.parametrize(("spoil", "wanted"), PATHS.values(), ids=PATHS)
def test_a_checkpoint_that_cannot_be_opened(
    spoil: Callable[[Path], Path], wanted: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoil(file)
    done = run_here(capsys, "load", path)
    assert (done.code, done.stdout) == (2, "")
    pattern = wanted.replace("{path}", re.escape(str(path))).replace("{folder}", re.escape(str(file.parent)))
    assert re.fullmatch(f"loadmaster: {pattern}", done.sentence), done.stderr


def unreadable_file(file: Path) -> Path:
    file.chmod(0)
    return file


def unreadable_folder(file: Path) -> Path:
    folder = empty_folder(file)
    file.rename(folder / file.name)
    folder.chmod(0)
    return folder


def folder_without_entry(file: Path) -> Path:
    """Its names can be read, and nothing behind them."""
    folder = unreadable_folder(file)
    folder.chmod(0o400)
    return folder


def file_in_unreadable_folder(file: Path) -> Path:
    return unreadable_folder(file) / file.name


UNREADABLE = {
    "file": unreadable_file,
    "folder without entry": folder_without_entry,
    "file in an unreadable folder": file_in_unreadable_folder,
}


@pytest.mark.processes
@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE)
def test_a_checkpoint_that_may_not_be_read(spoil: Callable[[Path], Path], file: Path) -> None:
    path = spoil(file)
    try:
        done = loadmaster("load", path, words=without_privileges([COMMAND]))
    finally:
        for folder in file.parent.glob("empty"):
            folder.chmod(0o700)
    assert (done.code, done.stdout) == (2, "")
    assert str(path) in done.sentence
    assert re.search("cannot be read: Permission denied|is not readable", done.sentence), done.stderr


USAGE: dict[str, tuple[list[str], str]] = {
    f"{option} {value!r}": ([option, value], f".*'?{option}'?.+")  # the rest are typer's words, of any version
    for option in ("--ranks", "--threads")
    for value in ("0", "-1", "two", "1.5", "")
} | {
    "too many ranks": (["--ranks", "100000"], "--ranks must be at most 65536, not 100000"),
    "ranks beyond 64 bits": (["--ranks", "1" * 30], "--ranks must be .*"),
    "threads beyond 64 bits": (["--threads", "1" * 30], "--threads must be .*"),
    "shard": (["--shard", "pp"], "Invalid value for '--shard': .*'pp'.*"),
    "option": (["--rank", "2"], "No such option.*--rank.*"),
    "two checkpoints": (["another"], "Got unexpected extra argument.*another.*"),
    "ranks more than the dimension": (
        ["--ranks", "8"],
        r"tensor 'model.layers.0.mlp.up_proj.weight' of shape \[4, 8\]: 4 along .* do not divide among 8 ranks",
    ),
    "ranks that do not divide": (["--ranks", "3"], ".* 4 along dimension 0 do not divide among 3 ranks"),
    "dtype": (["--dtype", "float7"], "dtype 'float7' is none that tensors can be converted to; .*float32.*"),
    "dtype of integers": (["--dtype", "int8"], "dtype 'int8' is none that tensors can be converted to; .*"),
    "name in torch that is no dtype": (["--dtype", "nn"], "dtype 'nn' is none that tensors can be converted to; .*"),
}


@pytest.mark.parametrize(("options", "wanted"), USAGE.values(), ids=USAGE)
def test_an_option_that_cannot_be_used(
    options: list[str], wanted: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, "load", file, *options)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch(f"loadmaster: {wanted}", done.sentence), done.stderr


PLANS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "tp plan {path} cannot be read: No such file or directory"),
    "no JSON": (b"{", "tp plan {path} is not valid JSON: .*"),
    "no text": (b"\xff\xfe", "tp plan {path} is not valid JSON: .*"),
    "list": (b'["colwise"]', "tp plan {path} must be an object of name patterns and styles"),
    "number as style": (b'{"a": 1}', "tp plan {path} must be an object of name patterns and styles"),
    "unknown style": (
        b'{"a.b": "diagonal"}',
        "tp plan.*: 'a.b' has the unknown style 'diagonal'; known are colwise, .*",
    ),
    "deep": (b"[" * 100_000, "tp plan {path} .*"),
}


@pytest.mark.parametrize(("content", "wanted"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_be_used(
    content: bytes | None, wanted: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    if content is not None:
        plan.write_bytes(content)
    done = run_here(capsys, "load", file, "--ranks", 2, "--tp-plan", plan)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch("loadmaster: " + wanted.replace("{path}", re.escape(str(plan))), done.sentence), done.stderr


def experts_of(file: Path) -> Path:
    """A checkpoint of four experts that none of the built-in layouts lacks anything of."""
    shapes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": np.ones(shape, np.float32)
        for expert in range(4)
        for name, shape in shapes.items()
    }
    path = file.with_name("experts.safetensors")
    save_file(tensors, path)
    return path


def one_expert_less(file: Path) -> Path:
    path = experts_of(file)
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, path)
    return path


def unknown_projection(file: Path) -> Path:
    path = experts_of(file)
    save_file({**load_file(path), "model.layers.0.mlp.experts.0.side_proj.weight": np.ones(3, np.float32)}, path)
    return path


EXPERTS: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "dense": (Path, ["--experts"], r"{path} has no expert tensors: no name holds '\.experts\.'"),
    "dense with a layout": (
        Path,
        ["--experts-layout", "{layout}"],
        "{path} has no tensor that the experts layout '{layout}' knows",
    ),
    "one expert less": (
        one_expert_less,
        ["--experts"],
        r"layer 0: 'up weight' of expert 2 is missing \(bank gate_up\)",
    ),
    "unknown projection": (
        unknown_projection,
        ["--experts"],
        r"{path}: no built-in layout .* does not know 'model\.layers\.0\.mlp\.experts\.0\.side_proj\.weight'; .*",
    ),
    "ranks": (experts_of, ["--experts", "--ranks", "4"], "tensor '.*' of shape .*: 6 along .* among 4 ranks"),
    "ranks of whole experts": (
        experts_of,
        ["--experts", "--ranks", "3", "--experts-by", "strided"],
        "layer 0: 4 experts do not divide among 3 ranks",
    ),
    "way to deal": (experts_of, ["--experts-by", "rows"], "Invalid value for '--experts-by': .*'rows'.*"),
    "way to deal what is not asked for": (
        experts_of,
        ["--experts-by", "tp"],
        "--experts-by deals experts to ranks, and needs --experts",
    ),
    "missing layout": (
        experts_of,
        ["--experts-layout", "/nowhere.json"],
        "/nowhere.json cannot be read: No such file or directory",
    ),
    "other layout": (
        experts_of,
        ["--experts-layout", "{layout}"],
        "{path}: the experts layout '{layout}' has no place for tensor 'model.*'",
    ),
}


@pytest.mark.parametrize(("make", "options", "wanted"), EXPERTS.values(), ids=EXPERTS)
def test_experts_that_cannot_be_loaded(
    make: Callable[[Path], Path],
    options: list[str],
    wanted: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, layout = make(file), tmp_path / "layout.json"
    layout.write_text(r'{"pattern": "b(?P<layer>\\d)\\.experts\\.(?P<projection>w)", "banks": {"w": {"parts": ["w"]}}}')
    done = run_here(capsys, "load", path, *(option.replace("{layout}", str(layout)) for option in options))
    assert (done.code, done.stdout) == (2, "")
    words = wanted.replace("{path}", re.escape(str(path))).replace("{layout}", re.escape(str(layout)))
    assert re.fullmatch(f"loadmaster: {words}", done.sentence), done.stderr


LAYOUT_FILES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "{path} is not valid JSON: .*"),
    "no text": (b"\xff\xfe", "{path} is not valid JSON: .*"),
    "list": (b"[]", "{path} is no experts layout: it needs 'pattern' and a table of 'banks'"),
    "option": (
        b'{"pattern": "x", "banks": {"w": {"parts": ["w"], "dim": 0}}}',
        "{path}: bank 'w': dim cannot be 0",
    ),
    "expression": (
        b'{"pattern": "(", "banks": {"w": {"parts": ["w"]}}}',
        r"experts layout '{path}': '\(' is no regular expression: .*",
    ),
}


@pytest.mark.parametrize(("content", "wanted"), LAYOUT_FILES.values(), ids=LAYOUT_FILES)
def test_a_layout_of_experts_that_cannot_be_used(
    content: bytes, wanted: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "layout.json"
    layout.write_bytes(content)
    done = run_here(capsys, "load", file, "--experts-layout", layout)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch("loadmaster: " + wanted.replace("{path}", re.escape(str(layout))), done.sentence), done.stderr


VARIABLES = {
    "LOADMASTER_THREADS": "LOADMASTER_THREADS must be a whole number of at least 1, not 'many'",
    "LOADMASTER_CPUS": "LOADMASTER_CPUS must be a whole number of at least 1, not 'many'",
}


@pytest.mark.parametrize(("variable", "wanted"), VARIABLES.items(), ids=VARIABLES)
def test_a_variable_that_cannot_be_used(
    variable: str, wanted: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "many")
    done = run_here(capsys, "load", file)
    assert (done.code, done.stdout, done.sentence) == (2, "", f"loadmaster: {wanted}")


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no checkpoint": (["load"], "Missing argument 'CKPT'.*"),
    "unknown command": (["lode"], "No such command 'lode'.*"),
    "unknown bench": (["bench", "lode"], "No such command 'lode'.*"),
    "no repetition": (["bench", "load", "x", "--repeat", "0"], "Invalid value for '--repeat': .*"),
    "bench of a missing path": (["bench", "load", "/nowhere"], "/nowhere does not exist"),
}


@pytest.mark.parametrize(("words", "wanted"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be_run(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, *words)
    assert (done.code, done.stdout) == (2, "")
    assert re.fullmatch(f"loadmaster: {wanted}", done.sentence), done.stderr


@pytest.mark.parametrize("options", [["--ranks", "8"], ["--tp-plan", "/nowhere"]], ids=["load", "plan"])
def test_a_program_that_asked_for_json_gets_it_whatever_was_wrong(
    options: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, "load", file, "--json", *options)
    assert done.code == 2
    assert done.sentence.startswith("loadmaster: ")
    document = done.document
    assert document.pop("wall_seconds") >= 0
    assert document == {
        "ok": False,
        "checkpoint": str(file),
        "ranks": [],
        "load_seconds": None,
        "gib_per_second": None,
        "verified": None,
    }


IN_A_PROCESS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "missing": (missing, []),
    "empty folder": (empty_folder, []),
    "bin": (bin_file, []),
    "truncated": (truncated, []),
    "no ranks": (Path, ["--ranks", "0"]),
    "ranks in letters": (Path, ["--ranks", "two"]),
    "negative threads": (Path, ["--threads", "-1"]),
    "ranks more than the dimension": (Path, ["--ranks", "8"]),
    "plan": (Path, ["--ranks", "2", "--tp-plan", "/nowhere.json"]),
    "dtype": (Path, ["--dtype", "float7"]),
    "experts of a dense checkpoint": (Path, ["--experts"]),
}


@pytest.mark.processes
@pytest.mark.parametrize(("spoil", "options"), IN_A_PROCESS.values(), ids=IN_A_PROCESS)
def test_the_process_ends_with_exit_code_2_and_one_sentence(
    spoil: Callable[[Path], Path], options: list[str], file: Path
) -> None:
    done = loadmaster("load", spoil(file), *options)
    assert (done.code, done.stdout) == (2, "")
    assert done.sentence.startswith("loadmaster: ")
    assert "Traceback" not in done.stderr
