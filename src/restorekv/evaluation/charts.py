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

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pandas import DataFrame

INK = "#1d2530"
MUTED = "#5b6673"
GRID = "#d5dae1"
PAPER = "#fefefe"
BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
HUES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "axes.facecolor": "none",
    "svg.fonttype": "none",
}
FONTS = (b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")  # with fonts for other machines
# Left out, so that the same chart has the same bytes.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
DPI = 200
WIDE = 7.4  # inches, 710 pixels on a screen: the width of a figure
NARROW = WIDE / 2
# inches
MARGIN = 0.1
LEGEND_LINE = 0.19
TITLE_LINE = 0.2
NOTE_LINE = 0.145
# in a line; of a panel's title in an inch
TITLE_LETTERS = 78
NOTE_LETTERS = 112
PANEL_LETTERS = 10
# inches: a letter of the legend, and the sign next to a label
LETTER = 0.07
HANDLE = 0.53
NUMBERED_CELLS = 96  # a map of at most this many cells has room for their numbers

styled = rc_context(STYLE)  # a decorator: text keeps the font size that is set when it is made


@dataclass(frozen=True)
class Mark:
    """The look of a series, with matplotlib's `marker` and `hatch`; no label: not in the legend."""

    label: str
    color: str
    marker: str = ""
    dashed: bool = False
    hollow: bool = False
    hatch: str = ""

    @property
    def line_style(self) -> dict[str, object]:
        """Keywords for `Axes.plot`; a hollow marker is larger, to show around a filled one."""
        return {
            "label": self.label,
            "color": self.color,
            "linestyle": (0, (4, 2)) if self.dashed else "-",
            "marker": self.marker or None,
            "markersize": 7 if self.hollow else 5,
            "markerfacecolor": PAPER if self.hollow else self.color,
            "markeredgecolor": self.color,
            "markeredgewidth": 1.3,
        }


@dataclass(frozen=True)
class Chart:
    """A figure, as `make_figure` made it, with what files and pages add to it.

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
        entries: dict[str, object] = {}
        for axes in self.figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        title = textwrap.wrap(self.title, TITLE_LETTERS)
        note = textwrap.wrap(self.note, NOTE_LETTERS)
        width, panels = self.figure.get_size_inches()
        longest = max(map(len, entries), default=0)
        columns = max(1, min(len(entries), int((width - 2 * MARGIN) / (HANDLE + LETTER * longest))))
        above = MARGIN + len(title) * TITLE_LINE
        head = above + math.ceil(len(entries) / columns) * LEGEND_LINE + MARGIN
        foot = 2 * MARGIN + len(note) * NOTE_LINE
        height = head + panels + foot
        self.figure.set_size_inches(width, height)
        room = (0.01, foot / height, 0.98, panels / height)
        self.figure.get_layout_engine().set(rect=room, h_pad=0.09)
        left = MARGIN / width
        look = {"fontsize": 11, "weight": "bold", "va": "top"}
        self.figure.text(left, 1 - MARGIN / height, "\n".join(title), **look)
        look = {"fontsize": 8, "color": MUTED, "va": "bottom"}
        self.figure.text(left, MARGIN / height, "\n".join(note), **look)
        if entries:
            top = (0, 1 - above / height)
            look = {"loc": "upper left", "bbox_to_anchor": top, "frameon": False}
            legend = self.figure.legend(entries.values(), entries, ncols=columns, **look)
            legend.set_in_layout(False)
        return self.figure

    def render(self, ending: str) -> bytes:
        """Return the file for an ending (svg, png or pdf), the same bytes for the same chart."""
        file = io.BytesIO()
        options = {"metadata": NO_METADATA} if ending == "svg" else {"dpi": DPI}
        with rc_context({**STYLE, "svg.hashsalt": self.name}):
            self.composed.savefig(file, format=ending, facecolor="white", **options)
        return file.getvalue().replace(*FONTS) if ending == "svg" else file.getvalue()


@styled
def make_figure(panels: Sequence[tuple[str, float, float]]) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes for panels (title, width, height) in inches, in rows that fit."""
    rows: list[list[tuple[str, float, float]]] = []
    for panel in panels:
        if not rows or sum(width for _, width, _ in rows[-1]) + panel[1] > WIDE:
            rows.append([])
        rows[-1].append(panel)
    heights = [max(height for _, _, height in row) for row in rows]
    figure = Figure(figsize=(WIDE, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    made = []
    for place, row in zip(grid, rows, strict=True):
        parts = place.subgridspec(1, len(row), width_ratios=[width for _, width, _ in row])
        for part, (title, width, _) in zip(parts, row, strict=True):
            axes = figure.add_subplot(part)
            axes.set_title(textwrap.fill(title, int(width * PANEL_LETTERS)))
            made.append(axes)
    return figure, made


def plot_line(
    axes: Axes,
    mark: Mark,
    x: Sequence[float],
    y: Sequence[float],
    interval: tuple[Sequence[float], Sequence[float]] | None = None,
    bars: bool = False,
) -> None:
    """Plot a line and its interval (lows, highs), a band, or bars where bands hide each other."""
    if interval and (bars or len(x) == 1):
        axes.vlines(x, *interval, color=mark.color, linewidth=1.1, alpha=0.75)
    elif interval:
        axes.fill_between(x, *interval, color=mark.color, alpha=0.16, linewidth=0)
    axes.plot(x, y, **mark.line_style)


def plot_level(axes: Axes, mark: Mark, y: float) -> None:
    """Draw a horizontal line across the panel."""
    line = mark.line_style["linestyle"]
    axes.axhline(y, label=mark.label, color=mark.color, linestyle=line, linewidth=1.3, zorder=1)


def plot_map(axes: Axes, numbers: DataFrame, high: float) -> None:
    """Draw a map of numbers, dark blue to yellow from 0 to `high`; NaN is not known."""
    cells = numbers.to_numpy(dtype=float)
    numbered = cells.size <= NUMBERED_CELLS
    lines = {"edgecolors": "white", "linewidth": 0.6} if numbered else {}
    colors = axes.pcolormesh(cells, cmap="cividis", vmin=0, vmax=high, **lines)
    if not numbered:
        axes.figure.colorbar(colors, ax=axes)
    for (row, column), value in np.ndenumerate(cells) if numbered else ():
        ink = "black" if value > high / 2 else "white"
        text = "" if np.isnan(value) else f"{value:.3g}"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=8)
    for axis, names in ((axes.xaxis, numbers.columns), (axes.yaxis, numbers.index)):
        step = math.ceil(len(names) / 12)
        middles = np.arange(0, len(names), step) + 0.5
        axis.set_ticks(middles, [f"{name:,g}" for name in names[::step]])
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def set_ticks(axes: Axes, ticks: Sequence[float], axis: str = "x") -> None:
    """Put plain numbers at these places of an axis and nowhere else."""
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    chosen.set_ticks([], minor=True)


def set_ratio_axis(axes: Axes, ratios: Collection[float], air: float = 1.15) -> None:
    """Make x logarithmic, with a number at each measured ratio that has room."""
    ticks: list[float] = []
    for ratio in sorted(ratios, reverse=True):
        if not ticks or ticks[-1] / ratio >= 1.25:
            ticks.append(ratio)
    axes.set_xscale("log")
    axes.set_xlim(min(ratios) / air, max(ratios) * air)
    axes.set_xlabel("ratio r of pairs kept (log)")
    set_ticks(axes, ticks)
