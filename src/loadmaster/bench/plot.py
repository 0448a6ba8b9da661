"""Pictures of records: bars with their least and most, curves with a band, machine and command at the head.

matplotlib draws them and is imported when a picture is made, never before.
"""

from __future__ import annotations

import importlib.util
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadmaster.bench.record import ArmResult, BenchRecord
from loadmaster.errors import InputError, LoadmasterError, MissingDependencyError

__all__ = ["Panel", "check_plot", "draw"]

SUFFIXES = (".png", ".svg")

LOG_RATIO = 20.0
"""An axis is logarithmic where the largest median is more than so many times the least."""

WIDTH = 9.0
BAR_HEIGHT, CURVE_HEIGHT, PANEL_HEIGHT = 0.34, 3.4, 0.95
"""Inches: of the picture, of one bar, of a panel of curves, and what a panel needs for its title and axis."""

COMMAND_COLUMNS = 104
OURS, OTHERS, LIMIT, STOPPED = "#1f6f8b", "#9aa5b1", "#5b8c5a", "#c44536"
CURVE_COLORS = ("#c44536", "#1f6f8b", "#5b8c5a")
OUR_NAMES = ("loadmaster", "scope")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One part of a picture: bars, or curves.

    Attributes
    ----------
    arms
        Label and arm of each bar, top to bottom.
    curves
        Name of each curve and its points: where on the axis, and which arm.
    unit, factor
        What a second is multiplied by, and the name of the result.
    along
        What the horizontal axis of curves is.
    marked
        Label and place of vertical lines.
    ticks
        Place on the horizontal axis and its label.
    """

    title: str
    unit: str
    factor: float = 1.0
    arms: Sequence[tuple[str, ArmResult]] = ()
    curves: Mapping[str, Sequence[tuple[float, ArmResult]]] = field(default_factory=dict)
    along: str = ""
    marked: Mapping[str, float] = field(default_factory=dict)
    ticks: Mapping[int, str] = field(default_factory=dict)

    @property
    def logarithmic(self) -> bool:
        """Whether the figures are too far apart to be seen on a plain axis."""
        arms = [arm for _, arm in self.arms] + [arm for curve in self.curves.values() for _, arm in curve]
        medians = [arm.median for arm in arms if arm.finished and arm.median > 0]
        return bool(medians) and max(medians) > LOG_RATIO * min(medians)

    @property
    def height(self) -> float:
        """Inches that it needs."""
        return PANEL_HEIGHT + (CURVE_HEIGHT if self.curves else BAR_HEIGHT * len(self.arms))


def check_plot(path: Path) -> None:
    """Find out whether a picture can be made at ``path``, before anything is measured.

    Raises
    ------
    InputError
        Another suffix than .png or .svg, or a path that cannot be written.
    MissingDependencyError
        matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"--plot draws {' or '.join(SUFFIXES)}, not {path.name!r}")
    if path.is_dir():
        raise InputError(f"--plot {path} is a folder")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--plot {path} cannot be written: permission denied")
    try:
        found = importlib.util.find_spec("matplotlib")
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise MissingDependencyError(
            "matplotlib is not installed, and --plot draws with it: pip install 'loadmaster[plot]'"
        )


def draw(record: BenchRecord, panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels below each other and write the picture.

    Raises
    ------
    LoadmasterError
        The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head = _head(record.as_dict())
    head_height = 0.3 + 0.19 * (1 + len(head))
    height = head_height + sum(panel.height for panel in panels)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head_height / height), hspace=0.06)  # type: ignore[union-attr,call-arg]
    figure.text(0.012, 1 - 0.1 / height, f"loadmaster bench {record.bench}", va="top", weight="bold", size=12)
    figure.text(0.012, 1 - 0.36 / height, "\n".join(head), va="top", size=8, family="monospace", linespacing=1.35)
    rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[panel.height for panel in panels])
    for axes, panel in zip(rows[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    try:
        with rc_context({"svg.fonttype": "none"}):  # words stay words, which can be searched
            figure.savefig(path, dpi=150)
    except OSError as refused:
        raise LoadmasterError(f"{path} cannot be written: {refused.strerror}") from None


def _head(document: Mapping[str, Any]) -> list[str]:
    machine, versions = document["machine"], document["versions"]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}, {machine['cpus']} CPUs"
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    lines = [f"{machine['cpu']}: {cores}, Linux {machine['kernel']}{torch}, {document['date'][:10]}"]
    lines += textwrap.wrap(document["command"], COMMAND_COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    if panel.curves:
        _draw_curves(axes, panel)
    else:
        _draw_bars(axes, panel)


def _draw_bars(axes: Any, panel: Panel) -> None:
    """One bar an arm, from the top; whiskers are the least and the most, and the median stands at the end."""
    scale = "log" if panel.logarithmic else "linear"
    axes.set_xscale(scale)
    shown = [
        panel.factor * value for _, arm in panel.arms for value in (*arm.seconds, arm.stopped_after or 0) if value > 0
    ]
    least, most = (min(shown), max(shown)) if shown else (1.0, 1.0)
    left = 10.0 ** math.floor(math.log10(least / 1.5)) if scale == "log" else 0.0
    for row, (label, arm) in enumerate(panel.arms):
        _draw_bar(axes, row, label, arm, panel)
    axes.set_yticks(range(len(panel.arms)), [label for label, _ in panel.arms])
    axes.set_ylim(len(panel.arms) - 0.4, -0.6)
    if scale == "log":
        _plain_ticks(axes.xaxis)
    axes.set_xlim(left, most * 4 if scale == "log" else most * 1.22)
    axes.set_xlabel(
        f"{panel.unit}, median; whiskers: least and most" + (", logarithmic" if scale == "log" else ""), size=9
    )
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_bar(axes: Any, row: int, label: str, arm: ArmResult, panel: Panel) -> None:
    end = _end(arm) * panel.factor
    if not arm.finished:
        words = f">{_number((arm.stopped_after or 0) * panel.factor)}, stopped" if arm.stopped_after else "not run"
        if arm.stopped_after:
            axes.barh(row, end, color="white", edgecolor=STOPPED, hatch="///", height=0.62)
        axes.annotate(words, (end or axes.get_xlim()[0], row), (4, 0), textcoords="offset points", va="center", size=8)
        return
    middle, least, most = (panel.factor * value for value in (arm.median, min(arm.seconds), max(arm.seconds)))
    color = LIMIT if label == "limit" else OURS if any(name in label for name in OUR_NAMES) else OTHERS
    axes.barh(row, middle, color=color, height=0.62)
    if most > least:
        error = [[max(0.0, middle - least)], [max(0.0, most - middle)]]
        axes.errorbar(middle, row, xerr=error, fmt="none", ecolor="#333333", elinewidth=1, capsize=3)
    axes.annotate(_number(middle), (most, row), (5, 0), textcoords="offset points", va="center", size=8)


def _plain_ticks(axis: Any) -> None:
    """0.01, 1, 100 on a logarithmic axis, in place of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _end(arm: ArmResult) -> float:
    return max(arm.seconds) if arm.finished else arm.stopped_after or 0.0


def _draw_curves(axes: Any, panel: Panel) -> None:
    """A line through the medians and a band from the least to the most."""
    if panel.logarithmic:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    places = [place for curve in panel.curves.values() for place, _ in curve]
    margin = 0.05 * (max(places) - min(places)) or 0.5
    axes.set_xlim(min(places) - margin, max(places) + margin)
    if max(places) > LOG_RATIO * min(places):
        axes.set_xscale("log")
        axes.set_xlim(min(places) / 1.4, max(places) * 1.4)
    for color, (name, curve) in zip(CURVE_COLORS, panel.curves.items(), strict=False):
        known = [(place, arm) for place, arm in curve if arm.finished]
        across = [place for place, _ in known]
        rows = [[panel.factor * pick(arm.seconds) for _, arm in known] for pick in (min, max)]
        axes.fill_between(across, *rows, color=color, alpha=0.18, linewidth=0)
        middle = [panel.factor * arm.median for _, arm in known]
        axes.plot(across, middle, color=color, marker="o", markersize=4, label=name)
    for label, place in panel.marked.items():
        axes.axvline(place, color=CURVE_COLORS[1], linestyle="--", linewidth=1.2, label=label)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.minorticks_off()
    if not panel.logarithmic:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.along, size=9)
    axes.set_ylabel(f"{panel.unit}, median and range" + (" (log)" if panel.logarithmic else ""), size=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    if all(not arm.finished for curve in panel.curves.values() for _, arm in curve):
        axes.annotate("not run", (0.5, 0.5), xycoords="axes fraction", ha="center", size=9)
    axes.legend(frameon=False, fontsize=9)


def _number(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
