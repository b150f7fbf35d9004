"""Charts as SVG for the page and as PNG: one look, colours that work without colour vision and in the dark.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/). In an SVG each is a CSS variable, which the page
sets for light and dark; whatever is drawn in another colour stays as it is.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Patch

from restorekv.evaluation.report.blocks import Chart, Mark, Panel

INK, MUTED, GRID, PAPER = "#1d2530", "#5b6673", "#d5dae1", "#fefefe"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
HUES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
DARK = {
    INK: "#e8ebef", MUTED: "#a3adb9", GRID: "#3a434f", PAPER: "#14181e", BLUE: "#4aa8e0",
    VERMILION: "#f2854a", GREEN: "#2fc79c", PURPLE: "#dd9bbf", ORANGE: "#f0b73a", SKY: "#8accf2",
}  # fmt: skip
SEQUENTIAL = "cividis"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 9,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "text.color": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "lines.linewidth": 1.8, "lines.markersize": 5.5, "axes.facecolor": "none", "svg.fonttype": "none",
}  # fmt: skip
HATCHES = {"": "", "//": "M4 11L12 1M12 11L20 1M20 11L28 1", "\\\\": "M4 1L12 11M12 1L20 11M20 1L28 11"}
HATCHES |= {"xx": HATCHES["//"] + HATCHES["\\\\"], "..": "M6 4h2M14 4h2M22 4h2M10 8h2M18 8h2M26 8h2"}
DPI = 300
CHARACTERS = 10  # of a title, an inch
LINE = 0.19  # inches a line of the legend takes
DASHES = (0, (4, 2))
NAMELESS = re.compile(r'<g id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|[xy]tick|legend)_[^"]*"')


def line(
    axes: Axes, mark: Mark, x: Sequence[float], y: Sequence[float], band: tuple | None = None, size: float = 5.5
) -> None:
    """A series in its look; `band` is (lows, highs) of its interval, `size` that of the markers."""
    if band and len(x) == 1:
        axes.vlines(x, *band, color=mark.colour, linewidth=1.1)
    elif band:
        axes.fill_between(x, *band, color=mark.colour, alpha=0.16, linewidth=0)
    axes.plot(x, y, markersize=size, **look(mark))


def bars(axes: Axes, parts: Mapping[Mark, Sequence[float]]) -> np.ndarray:
    """Horizontal bars, each stacked of the parts, from the top down; returns where they end."""
    left = np.zeros(len(next(iter(parts.values()))))
    for mark, widths in parts.items():
        look_of = {"color": mark.colour, "hatch": mark.hatch, "edgecolor": PAPER, "linewidth": 0.6}
        axes.barh(np.arange(len(left)), widths, left=left, **look_of)
        left = left + np.asarray(widths)
    axes.invert_yaxis()
    axes.grid(visible=False)
    return left


def look(mark: Mark) -> dict[str, object]:
    """Keywords of matplotlib's lines."""
    return {
        "color": mark.colour, "marker": mark.marker or None, "linestyle": DASHES if mark.dashed else "-",
        "markerfacecolor": PAPER if mark.hollow else mark.colour, "markeredgecolor": mark.colour,
        "markeredgewidth": 1.3,
    }  # fmt: skip


def svg(panel: Panel, name: str, alt: str) -> Markup:
    """Text for a page: no prolog, ids that begin with `name`, colours of the page. `name` is unique in the page."""
    file = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        fill(figure.add_subplot(), panel)
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=empty)
    text = NAMELESS.sub("<g", file.getvalue())
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    for colour in DARK:
        text = text.replace(colour, f"var(--{colour[1:]})")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1))


def png(chart: Chart, path: Path) -> None:
    """All panels in one picture, the legend below them."""
    widest = max(panel.width for panel in chart.panels)
    columns = min(max(int(13 // widest), 1), len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    entries = max(min(columns, 2), 1)
    lines = -(-len(chart.legend) // entries)
    height = rows * max(panel.height for panel in chart.panels) + LINE * (3 + lines)
    with rc_context(STYLE):
        figure = Figure(figsize=(columns * widest, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in places[len(chart.panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(places, chart.panels, strict=False):
            fill(axes, panel)
        figure.suptitle(chart.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        if chart.legend:
            handles = [handle(mark) for mark in chart.legend]
            figure.legend(handles=handles, loc="outside lower left", ncols=entries, frameon=False)
        figure.savefig(path, format="png", dpi=DPI)


def fill(axes: Axes, panel: Panel) -> None:
    panel.draw(axes)
    if panel.title:
        axes.set_title(textwrap.fill(panel.title, int(panel.width * CHARACTERS)))


def handle(mark: Mark) -> Line2D | Patch:
    """For matplotlib's legend."""
    if mark.hatch is not None:
        return Patch(facecolor=mark.colour, hatch=mark.hatch, edgecolor=PAPER, label=mark.label)
    if mark.band:
        return Patch(facecolor=mark.colour, alpha=0.3, label=mark.label)
    return Line2D([], [], label=mark.label, **look(mark))


def swatch(mark: Mark) -> Markup:
    """For the page's legend: the line and its marker as a small SVG."""
    colour = f"var(--{mark.colour[1:]})" if mark.colour in DARK else mark.colour
    if mark.hatch is not None:
        inner = f'<rect x="2" y="1" width="28" height="10" fill="{colour}"/>'
        inner += f'<path d="{HATCHES[mark.hatch]}" stroke="var(--{PAPER[1:]})" stroke-width="1.2" fill="none"/>'
    elif mark.band:
        inner = f'<rect x="2" y="1" width="28" height="10" fill="{colour}" fill-opacity="0.3"/>'
    else:
        dash = ' stroke-dasharray="5 2.5"' if mark.dashed else ""
        inner = f'<path d="M1 6H31" stroke="{colour}" stroke-width="2"{dash}/>'
        if mark.marker:
            face = f"var(--{PAPER[1:]})" if mark.hollow else colour
            inner += f'<path d="{outline(mark.marker)}" fill="{face}" stroke="{colour}" stroke-width="1.4"/>'
    return Markup(f'<svg class="swatch" viewBox="0 0 32 12" width="32" height="12" aria-hidden="true">{inner}</svg>')


def outline(marker: str) -> str:
    """A marker of matplotlib as the path of an SVG, 8 high around (16, 6)."""
    style = MarkerStyle(marker)
    path = style.get_path().transformed(style.get_transform().scale(8, -8)).interpolated(1)
    return "".join(
        "M" + "L".join(f"{x + 16:.2f} {y + 6:.2f}" for x, y in polygon) + "Z" for polygon in path.to_polygons()
    )


def ratio_axis(axes: Axes, ratios: Collection[float], label: str = "ratio r of pairs kept (log)") -> None:
    """Ticks at the ratios that were measured, tight budgets to the left."""
    axes.set_xscale("log")
    shown: list[float] = []
    for ratio in sorted(ratios, reverse=True):
        if not shown or shown[-1] / ratio >= 1.25:
            shown.append(ratio)
    axes.set_xticks(shown, [f"{ratio:g}" for ratio in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(ratios) / 1.12, max(ratios) * 1.12)
    axes.set_xlabel(label)
