"""Charts with matplotlib: panels, lines with intervals, maps, and the files that show them.

Colors are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which work without color
vision; every series has its own marker or hatch in addition.
"""

import io
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

STYLE = Path(__file__).with_name("chart.mplstyle")
INK = "#1d2530"
MUTED = "#5b6673"
PAPER = "#fefefe"
BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
HUES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
DPI = 200
# Inches: the width of a figure, of half a figure, and of what is above and below the panels.
WIDE = 7.4
NARROW = WIDE / 2
TITLE_LINE = 0.2
LEGEND_LINE = 0.19
NOTE_LINE = 0.145

# A decorator for functions that make figures: text keeps the font size set at its creation.
with_style = style.context(STYLE)


@dataclass(frozen=True)
class Mark:
    """How a series looks; `marker` and `hatch` are matplotlib's. Without a label, a series is not
    in the legend.
    """

    label: str
    color: str
    marker: str = ""
    dashed: bool = False
    hollow: bool = False
    hatch: str = ""

    @property
    def line_style(self) -> dict[str, Any]:
        """Keywords for `Axes.plot`; a hollow marker is larger, to show around a filled one."""
        return {
            "label": self.label,
            "color": self.color,
            "linestyle": (0, (4, 2)) if self.dashed else "-",
            "marker": self.marker or None,
            "markersize": 7 if self.hollow else 5,
            "markerfacecolor": PAPER if self.hollow else self.color,
            "markeredgewidth": 1.3,
        }


@dataclass(frozen=True)
class Chart:
    """A figure from `make_figure`, with the texts and data that its files and pages add.

    `name` is the name of its files and its id on a page, `alt` says in words what there is to see,
    and `figures` are the rows of the CSV file.
    """

    name: str
    title: str
    figure: Figure
    alt: str = ""
    note: str = ""
    figures: Sequence[Mapping[str, object]] = ()

    @cached_property
    def composed(self) -> Figure:
        """The figure with the title and a legend of all panels above and the note below."""
        entries: dict[str, Artist] = {}
        for axes in self.figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        # An entry of the legend takes its marker and 0.07 inches a character.
        longest = max(map(len, entries), default=0)
        columns = max(1, int(WIDE / (0.6 + 0.07 * longest)))
        title = textwrap.wrap(self.title, 78)
        note = textwrap.wrap(self.note, 112)
        # The figure grows by what is added, so that the panels keep their size.
        width, height = self.figure.get_size_inches()
        height += TITLE_LINE * len(title) + NOTE_LINE * len(note) + 0.3
        height += LEGEND_LINE * math.ceil(len(entries) / columns)
        self.figure.set_size_inches(width, height)
        self.figure.legend(
            entries.values(),
            entries,
            loc="outside upper left",
            ncols=columns,
            title="\n".join(title),
            title_fontproperties={"weight": "bold"},
            alignment="left",
        )
        self.figure.supxlabel("\n".join(note), x=0.01, ha="left", fontsize=8, color=MUTED)
        return self.figure

    def render(self, ending: str) -> bytes:
        """Return the file for an ending (svg, png or pdf).

        The same chart gives the same bytes, except that a PDF holds the time at which it was made.
        """
        file = io.BytesIO()
        # An SVG has random ids and a date, unless they are switched off.
        metadata = None
        if ending == "svg":
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with style.context(STYLE), rc_context({"svg.hashsalt": self.name}):
            self.composed.savefig(file, format=ending, dpi=DPI, metadata=metadata)
        return file.getvalue()


@with_style
def make_figure(panels: Sequence[tuple[str, float, float]]) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes for panels (title, width, height) in inches.

    Two consecutive panels share a line if both fit; a panel alone on its line fills it.
    """
    # Each line names its two panels by number; a panel that is alone is named twice.
    lines: list[list[int]] = []
    for number, (_, width, _) in enumerate(panels):
        alone = lines and lines[-1][0] == lines[-1][1]
        if alone and width + panels[lines[-1][0]][1] <= WIDE:
            lines[-1][1] = number
        else:
            lines.append([number, number])
    heights = [max(panels[number][2] for number in line) for line in lines]
    figure = Figure(figsize=(WIDE, sum(heights)), layout="constrained")
    mosaic: Any = lines  # matplotlib's annotation of nested lists leaves out lists of numbers
    axes = figure.subplot_mosaic(mosaic, height_ratios=heights)
    for number, (title, width, _) in enumerate(panels):
        axes[number].set_title(textwrap.fill(title, int(width * 10)))
    return figure, [axes[number] for number in range(len(panels))]


def plot_line(
    axes: Axes,
    mark: Mark,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    interval: tuple[Sequence[float], Sequence[float]] | None = None,
) -> None:
    """Plot a line and bars for its interval (lows, highs)."""
    if interval:
        axes.vlines(x, *interval, color=mark.color, linewidth=1.1, alpha=0.75)
    axes.plot(x, y, **mark.line_style)


def plot_level(axes: Axes, mark: Mark, y: float) -> None:
    """Draw a horizontal line across the panel."""
    line = mark.line_style["linestyle"]
    axes.axhline(y, label=mark.label, color=mark.color, linestyle=line, linewidth=1.3, zorder=1)


def plot_map(axes: Axes, numbers: DataFrame, high: float) -> None:
    """Draw a map of numbers, dark blue to yellow from 0 to `high`; NaN is not known."""
    colors = axes.pcolormesh(numbers, cmap="cividis", vmin=0, vmax=high)
    axes.figure.colorbar(colors, ax=axes)
    for axis, names in ((axes.xaxis, numbers.columns), (axes.yaxis, numbers.index)):
        step = math.ceil(len(names) / 12)
        middles = np.arange(0, len(names), step) + 0.5
        axis.set_ticks(middles, [f"{name:,g}" for name in names[::step]])
    axes.grid(visible=False)
    axes.invert_yaxis()


def set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Put plain numbers at these values of x and nowhere else."""
    axes.set_xticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def set_ratio_axis(axes: Axes, ratios: Collection[float], air: float = 1.15) -> None:
    """Make x logarithmic, with a number at each measured ratio that has room; `air` is the factor
    of space to the left and right of the ratios.
    """
    ticks: list[float] = []
    for ratio in sorted(ratios, reverse=True):
        if not ticks or ticks[-1] / ratio >= 1.25:
            ticks.append(ratio)
    axes.set_xscale("log")
    axes.set_xlim(min(ratios) / air, max(ratios) * air)
    axes.set_xlabel("ratio r of pairs kept (log)")
    set_ticks(axes, ticks)
