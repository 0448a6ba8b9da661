"""Pictures: what cannot be drawn is said before anything is measured, and what is drawn has all names and figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cli.helpers.command import run_here, without_privileges
from loadmaster.bench import plot
from loadmaster.bench.plot import Panel, check_plot, draw
from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import LoadmasterError, MissingDependencyError


def arm(name: str, *seconds: float, stopped_after: float | None = None) -> ArmResult:
    return ArmResult(name=name, what="", seconds=seconds, num_bytes=1, tensors=1, stopped_after=stopped_after)


ARMS = [
    arm("limit", 0.1, 0.12, 0.11),
    arm("loadmaster", 0.2, 0.25, 0.21),
    arm("torch-default", 6.0, 9.0, 7.5),
    arm("torch-8", stopped_after=131.85),
    arm("never", stopped_after=0.0),
]
BARS = Panel(title="seven ranks", unit="seconds", arms=[(one.name, one) for one in ARMS])
CURVES = Panel(
    title="one copy",
    unit="microseconds",
    factor=1e6,
    curves={"as shipped": [(4, arm("a", 0.01)), (400, arm("b"))], "scope": [(4, arm("c", 0.1)), (400, arm("d", 1, 3))]},
    along="bytes in a copy",
    marked={"share: 4": 4},
    ticks={4: "four", 400: "many"},
)


def test_a_picture_has_machine_command_names_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["loadmaster", "bench", "load", "x" * 90, "--ranks", "2", "--plot", "p" * 90])
    path = tmp_path / "picture.svg"
    draw(BenchRecord(bench="load", settings={}, arms=ARMS), [BARS, CURVES], path)
    text = path.read_text()
    machine = BenchRecord(bench="load", settings={}, arms=[]).as_dict()["machine"]
    wanted = ["loadmaster bench load", "Linux", machine["kernel"], "x" * 90, "p" * 90, "seven ranks", "seconds, median"]
    wanted += [one.name for one in ARMS] + ["0.11", "0.21", "7.5", "132, stopped", "not run", "logarithmic"]
    wanted += ["one copy", "microseconds", "bytes in a copy", "as shipped", "scope", "share: 4", "four", "many"]
    assert [word for word in wanted if word not in text] == []


def test_a_picture_may_be_a_png(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw(BenchRecord(bench="load", settings={}, arms=ARMS), [BARS], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_finished_can_still_be_drawn(tmp_path: Path) -> None:
    arms = [arm("torch-default", stopped_after=3.0), arm("never", stopped_after=0.0)]
    bars = Panel(title="", unit="seconds", arms=[(one.name, one) for one in arms])
    curves = Panel(title="", unit="seconds", curves={"all": [(1, arms[0]), (2, arms[1])]})
    draw(BenchRecord(bench="load", settings={}, arms=arms), [bars, curves], tmp_path / "picture.svg")


def test_every_bar_begins_within_the_picture() -> None:
    """A logarithmic axis begins below the least of all figures, whatever the longest bars are."""
    axes = Figure().subplots()
    arms = [arm("fast", 0.087, 0.17), arm("slow", 4.5, 16.0), arm("stopped", stopped_after=0.05)]
    plot._draw_bars(axes, Panel(title="", unit="seconds", arms=[(one.name, one) for one in arms]))
    left, right = axes.get_xlim()
    assert left == pytest.approx(0.01)
    assert right > 16


@pytest.mark.parametrize(("seconds", "logarithmic"), [((1.0, 19.0), False), ((1.0, 21.0), True), ((), False)])
def test_figures_that_are_far_apart_are_on_a_logarithmic_axis(seconds: tuple[float, ...], logarithmic: bool) -> None:
    panel = Panel(title="", unit="", arms=[("", arm("", second)) for second in seconds])
    assert panel.logarithmic is logarithmic


def other_suffix(folder: Path) -> Path:
    return folder / "picture.pdf"


def no_suffix(folder: Path) -> Path:
    return folder / "picture"


def no_folder(folder: Path) -> Path:
    return folder / "nowhere" / "picture.png"


def is_a_folder(folder: Path) -> Path:
    (folder / "picture.png").mkdir()
    return folder / "picture.png"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (other_suffix, "draws .png or .svg, not 'picture.pdf'"),
        (no_suffix, "draws .png or .svg, not 'picture'"),
        (no_folder, "there is no folder"),
        (is_a_folder, "is a folder"),
    ],
)
@pytest.mark.parametrize("bench", ["collapse", "sweep", "scope", "load nowhere", "experts nowhere"])
def test_a_path_that_cannot_be_drawn_is_an_error_before_anything_is_measured(
    path: Callable[[Path], Path], words: str, bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint that is not there would be found at once."""
    done = run_here(capsys, "bench", *bench.split(), "--plot", path(tmp_path))
    assert (done.code, done.stdout) == (2, "")
    assert words in done.sentence


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_path_that_may_not_be_written_is_an_error(kind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "picture.png"
    if kind == "file":
        path.touch()
        path.chmod(0o444)
    else:
        tmp_path.chmod(0o555)
    code = f"from loadmaster.bench.plot import *; from pathlib import Path; check_plot(Path({str(path)!r}))"
    words = without_privileges([sys.executable, "-c", code])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    tmp_path.chmod(0o755)
    assert "cannot be written: permission denied" in done.stderr


def test_without_matplotlib_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loadmaster\[plot\]'"):
        check_plot(tmp_path / "picture.png")


def test_a_picture_that_cannot_be_written_in_the_end_is_one_sentence(tmp_path: Path) -> None:
    check_plot(tmp_path / "picture.png")
    (tmp_path / "picture.png").mkdir()
    with pytest.raises(LoadmasterError, match=r"picture.png cannot be written: Is a directory"):
        draw(BenchRecord(bench="load", settings={}, arms=ARMS), [BARS], tmp_path / "picture.png")
