"""Charts as data: lines, bars and heat maps in panels under one title. `draw` makes SVG and PNG of them.

Colors are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which work without color vision; every series has
a marker or a hatch of its own too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INK, MUTED, GRID, PAPER = "#1d2530", "#5b6673", "#d5dae1", "#fefefe"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
HUES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
DARK = {  # the same colors on a dark page
    INK: "#e8ebef", MUTED: "#a3adb9", GRID: "#3a434f", PAPER: "#14181e", BLUE: "#4aa8e0",
    VERMILION: "#f2854a", GREEN: "#2fc79c", PURPLE: "#dd9bbf", ORANGE: "#f0b73a", SKY: "#8accf2",
}  # fmt: skip
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 9,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "text.color": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "lines.linewidth": 1.8, "axes.facecolor": "none", "svg.fonttype": "none",
}  # fmt: skip
WIDE = 7.4  # inches, 710 pixels on a screen: the width of a chart
NARROW = WIDE / 2
BAR = 0.3  # inches: the height of a bar


@dataclass(frozen=True)
class Mark:
    """The look of a series: `marker` and `hatch` as in matplotlib, `hatch` for bars. No label: not in the legend."""

    label: str
    color: str
    marker: str = ""
    dashed: bool = False
    hollow: bool = False
    hatch: str = ""


@dataclass(frozen=True)
class Line:
    """Points that a line joins, with an interval (lows, highs) of each."""

    mark: Mark
    x: Sequence[float]
    y: Sequence[float]
    interval: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Level:
    """A horizontal line across the panel."""

    mark: Mark
    y: float


@dataclass(frozen=True)
class Area:
    """The shaded area between `low` and `high`, where `high` is above `low`."""

    mark: Mark
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars for every name, one below the other: parts of one bar (`stacked`), or a bar of each mark.

    `texts` stand behind the bars: one row for the whole stacks, or one row for each mark. None is a bar left out.
    """

    names: Sequence[str]
    parts: Mapping[Mark, Sequence[float | None]]
    texts: Sequence[Sequence[str]] = ()
    stacked: bool = True


@dataclass(frozen=True)
class Heat:
    """A map of numbers (rows, columns), dark blue to yellow from 0 to `high`; None is a number that is not known."""

    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    high: float


@dataclass(frozen=True)
class Axis:
    """`ticks` are the places that have a number (None: matplotlib's choice); `low` and `high` are limits."""

    label: str = ""
    log: bool = False
    ticks: Sequence[float] | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes, its size in inches; `finish` draws on matplotlib's axes what no other chart has."""

    content: Sequence[Line | Level | Area] | Bars | Heat
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    title: str = ""
    width: float = NARROW
    height: float = 3.0
    finish: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Chart:
    """Panels under one title; `name` becomes the name of its files and its id on a page.

    `alt` says in words what there is to see; `data` are the rows of the CSV file.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    alt: str = ""
    data: Sequence[Mapping[str, object]] = ()
    note: str = ""


def ratio_axis(ratios: Collection[float]) -> Axis:
    """Returns a logarithmic axis with a number at each measured ratio that has room for one, tight budgets left."""
    ticks: list[float] = []
    for ratio in sorted(ratios, reverse=True):
        if not ticks or ticks[-1] / ratio >= 1.25:
            ticks.append(ratio)
    low, high = min(ratios) / 1.15, max(ratios) * 1.15
    return Axis("ratio r of pairs kept (log)", log=True, ticks=ticks, low=low, high=high)


def index_axis(label: str, count: int) -> Axis:
    """Returns an axis of `count` layers or the like, with at most 9 numbers."""
    return Axis(label, ticks=range(0, count, -(-count // 9)))


def bars(bars: Bars, label: str, title: str = "", width: float = NARROW) -> Panel:
    """Returns a panel of bars that is as high as they need; `label` names the axis of their lengths."""
    lines = sum(name.count("\n") + 1 for name in bars.names)
    thick = len(bars.names) * (1 if bars.stacked else 0.75 * len(bars.parts))
    return Panel(bars, Axis(label), title=title, width=width, height=0.8 + BAR * max(thick, 0.65 * lines, 2.0))


def heat(heat: Heat, x: str, y: str, title: str = "") -> Panel:
    """Returns a panel of a map that is as high as its rows need."""
    return Panel(heat, Axis(x), Axis(y), title, height=1.3 + 0.2 * max(len(heat.rows), 4))
