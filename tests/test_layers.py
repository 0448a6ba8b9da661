"""The house of DESIGN.md: imports go downwards only, and nothing imports torch before it is needed.

The checker reads the source and runs nothing, so that an import inside a function, behind ``TYPE_CHECKING`` or by a
string counts as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import loadmaster

PACKAGE = Path(loadmaster.__file__).parent

BELOW: dict[str, set[str]] = {
    "errors": set(),
    "observe": {"errors"},
    "host": {"errors", "observe"},
    "share": {"errors", "observe", "host"},
    "threads": {"errors", "observe", "host", "share"},
    "checkpoint": {"errors", "observe", "host", "share", "threads"},
    "process": {"errors"},
    "fetch": {"errors", "observe", "host", "share", "threads", "checkpoint", "process"},
    "launch": {"errors", "observe", "host", "share", "threads", "checkpoint", "process", "fetch"},
    "doctor": {"errors", "observe", "host", "share", "threads", "checkpoint"},
    "bench": {"errors", "observe", "host", "share", "threads", "checkpoint", "process", "fetch", "launch"},
    "cli": {"errors", "observe", "host", "share", "threads", "checkpoint", "launch", "fetch", "doctor", "bench"},
    "__init__": {"errors", "observe", "host", "share", "threads", "checkpoint", "fetch"},
    "__main__": {"cli"},
}
"""Room -> the rooms that it may import from, besides itself."""

WITHOUT_TORCH = {"errors", "observe", "host", "share", "process"}
LAZY_PACKAGES = {"torch", "safetensors"}
_NAME_OF_OURS = re.compile(r"loadmaster(\.[A-Za-z_]\w*)+(:[A-Za-z_]\w*)?")


def violations(package: Path) -> list[str]:
    """Every import below ``package`` that goes upwards, sideways, or to torch where torch is not wanted."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(package).as_posix()
        found += [f"{where}:{line} imports {module}" for line, module in _wrong_rooms(tree, parts, package)]
        found += [f"{where}:{line} imports {module} too early" for line, module in _wrong_torch(tree, parts[0])]
    return found


def _wrong_rooms(tree: ast.AST, parts: tuple[str, ...], package: Path) -> Iterator[tuple[int, str]]:
    room = parts[0]
    for line, module in imported(tree, ("loadmaster", *parts)):
        if module.partition(".")[0] != "loadmaster":
            continue
        target = _room_of(module, package)
        if target != room and target not in BELOW.get(room, set()):
            yield line, module


def _room_of(module: str, package: Path) -> str:
    """The room that a dotted name leads to; names of the package itself, such as ``load``, belong to ``__init__``."""
    second = module.split(".")[1] if "." in module else ""
    return second if ((package / second).is_dir() and second) or (package / f"{second}.py").is_file() else "__init__"


def imported(tree: ast.AST, importer: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that a module imports, at any depth, also what it names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*importer[: -node.level]] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME_OF_OURS.fullmatch(node.value):
            yield node.lineno, node.value.partition(":")[0]


def _wrong_torch(tree: ast.Module, room: str) -> Iterator[tuple[int, str]]:
    if room in WITHOUT_TORCH:
        checked: list[ast.AST] = [tree]
    else:
        checked = list(_run_at_import(tree.body))
    for statement in checked:
        for line, module in imported(statement, ("loadmaster",)):
            if module.partition(".")[0] in LAZY_PACKAGES:
                yield line, module


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The simple statements that run when the module is imported: not functions, not what only type checkers see."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from _run_at_import(statement.orelse)
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        blocks += [case.body for case in getattr(statement, "cases", [])]
        if any(blocks):
            for block in blocks:
                yield from _run_at_import(block)
        else:
            yield statement


def test_every_import_of_the_package_goes_downwards() -> None:
    assert violations(PACKAGE) == []


def test_every_room_of_the_package_has_its_row() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms <= set(BELOW)
    assert {"errors", "observe", "host", "share", "threads", "checkpoint", "launch", "bench", "cli"} <= rooms


WRONG = {
    "host/bad.py": "from loadmaster.share import share",
    "share/bad.py": "import loadmaster.threads.scope as scope",
    "threads/bad.py": "from loadmaster import checkpoint",
    "checkpoint/bad.py": "def late():\n    from loadmaster.launch.spawn import run_ranks",
    "checkpoint/typed.py": "if TYPE_CHECKING:\n    from loadmaster.cli.load import load",
    "launch/bad.py": "from ..bench import load",
    "launch/deep/bad.py": "from ...cli import app",
    "fetch/bad.py": "from loadmaster.launch import spawn",
    "doctor/bad.py": "from loadmaster.bench.load import bench_load",
    "bench/bad.py": "function = 'loadmaster.cli.load:load'",
    "bench/by_string.py": "module = importlib.import_module('loadmaster.doctor.stacks')",
    "observe/bad.py": "from loadmaster.host import host",
    "errors.py": "from loadmaster.observe.words import format_bytes",
    "checkpoint/whole.py": "def late():\n    import loadmaster",
    "checkpoint/public.py": "from loadmaster import load",
    "unknown/bad.py": "from loadmaster.errors import InputError",
}
TOO_EARLY = {
    "host/bad.py": "def late():\n    import torch",
    "share/bad.py": "if TYPE_CHECKING:\n    import torch",
    "observe/bad.py": "def late():\n    from safetensors import safe_open",
    "threads/bad.py": "import torch.nn",
    "checkpoint/bad.py": "try:\n    import torch\nexcept ImportError:\n    torch = None",
    "launch/bad.py": "class Settings:\n    from torch import dtype",
    "bench/bad.py": "if TYPE_CHECKING:\n    import typing\nelse:\n    import torch",
    "cli/bad.py": "with suppress(ImportError):\n    import safetensors.torch",
    "__init__.py": "import torch",
}
RIGHT = {
    "errors.py": "import logging",
    "observe/good.py": "from loadmaster.errors import LoadmasterError\nimport rich",
    "share/good.py": "from loadmaster.host import host\nfrom . import lease",
    "launch/good.py": "from loadmaster.checkpoint.load import load\nfunction = 'loadmaster.launch.load:load_in_rank'",
    "checkpoint/good.py": "if TYPE_CHECKING:\n    import torch\n\n\ndef late():\n    import torch, safetensors",
    "cli/good.py": "from ..bench.load import bench_load",
    "bench/good.py": "def late():\n    from loadmaster.launch.spawn import run_ranks",
    "__main__.py": "from loadmaster.cli import main",
    "threads/torches.py": "import torchelastic",
}


def write_package(folder: Path, modules: dict[str, str]) -> Path:
    for room in BELOW:
        if room not in {"errors", "__init__", "__main__"}:
            (folder / room).mkdir()
            (folder / room / "__init__.py").touch()
    for name in ("errors.py", "__init__.py", "__main__.py"):
        (folder / name).touch()
    for name, source in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    return folder


@pytest.mark.parametrize(("module", "source"), WRONG.items(), ids=WRONG)
def test_the_checker_finds_an_import_that_goes_upwards(tmp_path: Path, module: str, source: str) -> None:
    (found,) = violations(write_package(tmp_path, {module: source}))
    assert re.fullmatch(rf"{module}:\d imports loadmaster\S*", found)


@pytest.mark.parametrize(("module", "source"), TOO_EARLY.items(), ids=TOO_EARLY)
def test_the_checker_finds_an_early_import_of_torch(tmp_path: Path, module: str, source: str) -> None:
    (found,) = violations(write_package(tmp_path, {module: source}))
    assert re.fullmatch(rf"{module}:\d imports (torch|safetensors)\S* too early", found)


def test_the_checker_lets_right_imports_pass(tmp_path: Path) -> None:
    assert violations(write_package(tmp_path, RIGHT)) == []
