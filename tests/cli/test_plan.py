from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadmaster.cli.app import run

CPU = "sys/devices/system/cpu"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not broken, whatever the width of the terminal that runs the tests."""
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 4 cores with 2 hardware threads each on 2 nodes, 2 of the cores slow, and a quota of 3.5 CPUs."""
    files = {
        f"{CPU}/online": "0-7\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "proc/self/cgroup": "0::/pod\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/pod/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/pod/cpu.weight": "100\n",
    }
    for cpu in range(8):
        files[f"{CPU}/cpu{cpu}/topology/core_cpus_list"] = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        files[f"{CPU}/cpu{cpu}/cpu_capacity"] = "500\n" if cpu in (0, 1, 4, 5) else "1024\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["plan", "--json", *map(str, arguments)]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_json_form_is_frozen(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "quota 3.5 / 2 ranks"
    cores_from = "/sys/devices/system/cpu/cpu*/topology/core_cpus_list"
    assert plan_json(capsys, "--ranks", 2, "--root", root) == {
        "host": {
            "cpus": [0, 1, 2, 3, 4, 5, 6, 7],
            "cores": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "nodes": {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]},
            "kinds": {"capacity 500": [0, 1, 4, 5], "capacity 1024": [2, 3, 6, 7]},
            "quota": 3.5,
            "compute_cpus": 3,
            "limits": [
                {"name": "online", "value": 8, "where": "/sys/devices/system/cpu/online", "binding": False},
                {"name": "cores", "value": 4, "where": cores_from, "binding": False},
                {"name": "quota", "value": 3.5, "where": "/sys/fs/cgroup/pod/cpu.max", "binding": True},
                {"name": "weight", "value": 100, "where": "/sys/fs/cgroup/pod/cpu.weight", "binding": False},
            ],
        },
        "ranks": [
            {"rank": 0, "threads": 1, "cpus": [0, 1, 2, 3], "node": 0, "why": why},
            {"rank": 1, "threads": 1, "cpus": [4, 5, 6, 7], "node": 1, "why": why},
        ],
        "leases": [],
    }


def test_nothing_known_is_null_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CPU).mkdir(parents=True)
    (tmp_path / CPU / "online").write_text("0-1\n")
    document = plan_json(capsys, "--root", tmp_path)
    assert document["host"]["nodes"] == {}
    assert document["host"]["kinds"] is None
    assert document["host"]["quota"] is None
    assert document["ranks"] == [{"rank": 0, "threads": 2, "cpus": [0, 1], "node": None, "why": "2 cores / 1 rank"}]


def test_this_host_is_planned_for_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan_json(capsys, "--ranks", 2)
    assert len(document["ranks"]) == 2
    assert sum(limit["binding"] for limit in document["host"]["limits"]) == 1


def test_the_text_has_limits_ranks_and_a_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--ranks", "2", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["quota", "3.5", "binds", "/sys/fs/cgroup/pod/cpu.max"] in lines
    assert sum("binds" in line for line in lines) == 1
    assert ["0", "1", "0", "0-3"] in lines
    assert ["1", "1", "1", "4-7"] in lines
    assert "Kinds of core, slowest first: capacity 500: 0-1,4-5; capacity 1024: 2-3,6-7.\n" in text
    assert text.endswith("\nEach rank gets 1 thread: quota 3.5 / 2 ranks.\n")


def test_more_ranks_than_cores_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--ranks", "6", "--root", str(root)]) == 0
    assert "oversubscribed by processes, which no thread count can mend" in capsys.readouterr().out


def test_a_pool_is_planned_with_its_product(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--ranks", "2", "--pool", "3", "--root", str(root)]) == 0
    assert "2 ranks x 3 pool workers x 1 thread = 6 threads for 3 compute CPUs" in capsys.readouterr().out
    document = plan_json(capsys, "--ranks", 1, "--pool", 2, "--root", root)
    assert document["pool"] == {"workers": 2, "threads": 2}
    assert document["ranks"][0]["threads"] == 1


def test_cpus_is_an_upper_bound(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = plan_json(capsys, "--cpus", 2, "--root", root)
    assert document["host"]["compute_cpus"] == 2
    assert document["host"]["limits"][-1] == {"name": "hint", "value": 2, "where": "--cpus", "binding": True}
    assert document["ranks"][0]["why"] == "--cpus 2 / 1 rank"


def test_the_launcher_says_how_many_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert len(plan_json(capsys)["ranks"]) == 3
    assert len(plan_json(capsys, "--ranks", 2)["ranks"]) == 2


def test_this_shell_says_nothing_about_another_host(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    document = plan_json(capsys, "--root", root)
    assert [rank["threads"] for rank in document["ranks"]] == [3]
    monkeypatch.setenv("LOADMASTER_CPUS", "2")
    assert plan_json(capsys, "--root", root)["host"]["compute_cpus"] == 2


def test_env_prints_lines_that_a_shell_takes(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["plan", "--env", "--ranks", "3", "--root", str(root)]) == 0
    assert capsys.readouterr().out == "export OMP_NUM_THREADS=1\nexport LOADMASTER_LOCAL_SIZE=3\n"
    monkeypatch.setenv("MV2_COMM_WORLD_LOCAL_SIZE", "2")
    assert run(["plan", "--env"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert ["export", "MV2_ENABLE_AFFINITY=0"] in lines
    assert all(line[0] == "export" and len(line) == 2 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "-2"], "--ranks"),
        (["--ranks", "two"], "--ranks"),
        (["--ranks", "70000"], "--ranks must be at most 65536, not 70000"),
        (["--pool", "0"], "--pool"),
        (["--cpus", "0"], "--cpus"),
        (["--root", "/does/not/exist"], "/does/not/exist is no folder"),
        (["--json", "--env"], "--json and --env exclude each other"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_a_bad_variable_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADMASTER_CPUS", "lots")
    assert run(["plan"]) == 2
    assert capsys.readouterr().err == "loadmaster: LOADMASTER_CPUS must be a whole number of at least 1, not 'lots'\n"


@pytest.mark.processes
@pytest.mark.parametrize("form", ["--json", "--env"])
def test_planning_imports_nothing_heavy(form: str) -> None:
    code = (
        "import sys; from loadmaster.cli.app import run; code = run(sys.argv[1:]); "
        "print([name for name in ('torch', 'numpy', 'psutil') if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", form], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.strip() == "[]"
