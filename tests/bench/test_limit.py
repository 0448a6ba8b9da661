"""The limit beside every figure: all bytes are read, and what cannot be read gives an error and no figure."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadmaster.bench import limit
from loadmaster.bench.limit import LimitStoppedError, limit_kind, limit_seconds
from loadmaster.errors import LoadmasterError

PIECE = 8 << 20
needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
KINDS = [pytest.param("C", marks=[needs_a_compiler, pytest.mark.processes]), "Python"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Measure in C, and as on a host without a compiler."""
    if request.param == "Python":
        limit._program.cache_clear()
        monkeypatch.setenv("PATH", "/nowhere")
    assert limit_kind() == request.param
    yield request.param
    if request.param == "Python":
        limit._program.cache_clear()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files: one of a piece and a half, one of 5 bytes."""
    paths = [tmp_path / "large", tmp_path / "small"]
    paths[0].write_bytes(bytes(PIECE + PIECE // 2))
    paths[1].write_bytes(b"small")
    return [str(path) for path in paths]


SIZES = {
    "a part of the first": PIECE // 3,
    "a piece": PIECE,
    "the first": PIECE + PIECE // 2,
    "both": PIECE + PIECE // 2 + 5,
    "both and the first again": 2 * (PIECE + PIECE // 2) + 5,
    "one byte more than both": PIECE + PIECE // 2 + 6,
}


@pytest.mark.parametrize("num_bytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_reading_takes_time(kind: str, files: list[str], num_bytes: int, threads: int) -> None:
    assert 0 < limit_seconds(files, num_bytes, threads) < 30


@needs_a_compiler
@pytest.mark.processes
@pytest.mark.parametrize("num_bytes", SIZES.values(), ids=SIZES)
def test_the_program_reads_as_many_bytes_as_it_was_told(files: list[str], num_bytes: int) -> None:
    """The kernel counts what a process reads, and tells as long as nobody has waited for the process."""
    program = limit._program()
    words = [f"/proc/self/fd/{program}", "2", str(num_bytes), *files]
    with subprocess.Popen(words, pass_fds=[int(program or 0)], stdout=subprocess.PIPE) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        account = Path(f"/proc/{process.pid}/io").read_text()
    assert process.returncode == 0
    counted = int(account.split()[1])
    assert num_bytes <= counted < num_bytes + 16384  # what the dynamic linker reads comes on top


@pytest.mark.parametrize("num_bytes", SIZES.values(), ids=SIZES)
def test_python_reads_every_byte_of_the_memory_once(
    files: list[str], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit._program.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    read: list[int] = []
    read_into = limit.read_into

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(read_into(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(limit, "read_into", counted)
    assert limit_seconds(files, num_bytes, 2) > 0
    limit._program.cache_clear()
    assert sum(read) == num_bytes
    assert max(read) <= PIECE


def test_a_file_that_is_missing_is_an_error_and_no_figure(kind: str, files: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  counts
    with pytest.raises(LoadmasterError, match=f"the limit could not be measured: {missing}: No such file"):
        limit_seconds([files[0], missing], 2 * PIECE, 1)
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208


def test_a_file_that_cannot_be_read_is_an_error_and_no_figure(kind: str, files: list[str], tmp_path: Path) -> None:
    """A folder can be opened and cannot be read."""
    with pytest.raises(LoadmasterError, match=r"the limit could not be measured: .*directory"):
        limit_seconds([str(tmp_path)], 8, 1)


@needs_a_compiler
@pytest.mark.processes
def test_small_files_may_be_read_over_and_over(files: list[str]) -> None:
    """However often, they are opened once."""
    code = (
        "import resource, sys\n"
        "from loadmaster.bench.limit import LimitStoppedError, limit_kind, limit_seconds\n"
        "assert limit_kind() == 'C'\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {resource.getrlimit(resource.RLIMIT_NOFILE)[1]}))\n"
        "print(limit_seconds([sys.argv[1]], 1000, 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, files[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@needs_a_compiler
@pytest.mark.processes
def test_the_program_is_built_once_and_leaves_nothing_behind(tmp_path: Path, files: list[str]) -> None:
    code = (
        "import sys\nfrom loadmaster.bench import limit\n"
        "for _ in range(2):\n    limit.limit_seconds([sys.argv[1]], 5, 1)\n"
        "assert limit._program() == limit._program()\nassert limit.limit_kind() == 'C'\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", code, files[1]], env=environment, check=True)
    assert list(folder.iterdir()) == []


def test_a_limit_that_takes_too_long_is_stopped(kind: str, files: list[str]) -> None:
    with pytest.raises(LimitStoppedError, match="was stopped"):
        limit_seconds(files, 256 << 20, 1, 1e-6)
