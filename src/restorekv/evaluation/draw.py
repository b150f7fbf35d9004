"""Draws charts with matplotlib: a whole chart as an SVG or PNG file, a panel as an SVG for a page.

A file is 7.4 inches wide on white: title and legend, panels row by row, the note. A panel on a page has its own legend,
and its colors are CSS variables, which the page sets for light and dark.
"""

import io
import re
import textwrap
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from restorekv.evaluation import charts
from restorekv.evaluation.charts import Area, Axis, Bars, Chart, Heat, Level, Line, Mark, Panel

DPI = 200
FONTS = (b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")  # the second where the first is not installed
FACTS = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # left out, so that the same chart has the same bytes
NAMELESS = re.compile(r'<g id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|[xy]tick|legend)_[^"]*"')
MARGIN, LINE = 0.1, 0.19  # inches: around the texts, and a line of the legend
TITLE, NOTE = 0.2, 0.145  # inches that a line takes
LETTERS = {"title": 78, "note": 112}  # that a line holds
LETTER, HANDLE = 0.07, 0.53  # inches: a letter of the legend, and what stands before and behind a label
CHARACTERS = 10  # of a panel's title, an inch
DASHES = (0, (4, 2))
BANDED, ASIDE = 2, 0.025  # more lines than this have bars for intervals, moved apart by this share
NUMBERED = 96  # cells of a map that have room for their numbers
SPAN = 2000  # an axis may span so many times its start and still have three ticks a decade


def image(chart: Chart, ending: str, width: float = charts.WIDE, transparent: bool = False) -> bytes:
    """Returns a file that stands alone, the same bytes for the same chart; `ending` is svg, png or pdf."""
    file, svg = io.BytesIO(), ending == "svg"
    look = {"transparent": True} if transparent else {"facecolor": "white"}
    look |= {"metadata": FACTS} if svg else {"dpi": DPI}
    with rc_context({**charts.STYLE, "svg.hashsalt": chart.name}):
        figure(chart, width).savefig(file, format=ending, **look)
    return file.getvalue().replace(*FONTS) if svg and not transparent else file.getvalue()


def inline(panel: Panel, name: str, alt: str) -> Markup:
    """Returns a panel as text for a page: no prolog, ids that begin with `name`, which is unique in the page."""
    text = NAMELESS.sub("<g", image(Chart(name, "", [panel]), "svg", panel.width, transparent=True).decode())
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    for color in charts.DARK:
        text = text.replace(color, f"var(--{color[1:]})")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1))


def figure(chart: Chart, width: float = charts.WIDE) -> Figure:
    """Draws title, legend, panels row by row and note, from the top down."""
    with rc_context(charts.STYLE):
        title, note = (
            textwrap.wrap(text, LETTERS[key]) for key, text in (("title", chart.title), ("note", chart.note))
        )
        drawn, rows = Figure(layout="constrained"), in_rows(chart.panels)
        FigureCanvasAgg(drawn)
        heights = [max(panel.height for panel in row) for row in rows]
        grid = drawn.add_gridspec(len(rows), 1, height_ratios=heights)
        for place, row in zip(grid, rows, strict=True):
            parts = place.subgridspec(1, len(row), width_ratios=[panel.width for panel in row])
            for part, panel in zip(parts, row, strict=True):
                draw(drawn.add_subplot(part), panel)
        entries = {
            label: handle
            for axes in drawn.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        columns = legend_columns(list(entries), width)
        lines = -(-len(entries) // columns) * LINE + MARGIN if entries else 0
        head, foot = (MARGIN * 2 * bool(texts) for texts in (title, note))
        head, foot = head + len(title) * TITLE + lines, foot + len(note) * NOTE
        height = head + sum(heights) + foot
        drawn.set_size_inches(width, height)
        drawn.get_layout_engine().set(rect=(0.01, foot / height, 0.98, 1 - (head + foot) / height), h_pad=0.09)
        left = MARGIN / width
        drawn.text(left, 1 - MARGIN / height, "\n".join(title), fontsize=11, fontweight="bold", va="top")
        if entries:
            top = 1 - (len(title) * TITLE + MARGIN * bool(title)) / height
            drawn.legend(entries.values(), entries, loc="upper left", frameon=False, bbox_to_anchor=(0, top),
                         ncols=columns, columnspacing=1.4).set_in_layout(False)  # fmt: skip
        below = drawn.text(left, MARGIN / height, "\n".join(note), fontsize=8, color=charts.MUTED, va="bottom")
        below.set_linespacing(1.15)
    return drawn


def in_rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Puts panels side by side from left to right, as long as the width holds them."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if not rows or sum(each.width for each in rows[-1]) + panel.width > charts.WIDE:
            rows.append([])
        rows[-1].append(panel)
    return rows


def legend_columns(labels: Sequence[str], width: float = charts.WIDE) -> int:
    """Returns how many columns the width takes; a legend is filled column by column."""
    for lines in range(1, len(labels)):
        columns = [max(map(len, labels[start : start + lines])) for start in range(0, len(labels), lines)]
        if sum(HANDLE + LETTER * longest for longest in columns) <= width - 2 * MARGIN:
            return len(columns)
    return 1


def look(mark: Mark) -> dict[str, object]:
    """Returns keywords for matplotlib's lines; a hollow marker is larger, so that it shows behind a filled one."""
    return {
        "color": mark.color, "marker": mark.marker or None, "linestyle": DASHES if mark.dashed else "-",
        "markersize": 7 if mark.hollow else 5, "markerfacecolor": charts.PAPER if mark.hollow else mark.color,
        "markeredgecolor": mark.color, "markeredgewidth": 1.3,
    }  # fmt: skip


def draw(axes: Axes, panel: Panel) -> None:
    {Bars: _bars, Heat: _heat}.get(type(panel.content), _lines)(axes, panel)
    axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
    if panel.title:
        axes.set_title(textwrap.fill(panel.title, int(panel.width * CHARACTERS)))
    if panel.finish:
        panel.finish(axes)


def _lines(axes: Axes, panel: Panel) -> None:
    lines = [part for part in panel.content if isinstance(part, Line)]
    several = sum(line.interval is not None for line in lines) > BANDED
    for turn, part in enumerate(panel.content):
        color, label = part.mark.color, part.mark.label
        if isinstance(part, Level):
            style = {"linestyle": look(part.mark)["linestyle"], "linewidth": 1.3, "zorder": 1}
            axes.axhline(part.y, label=label, color=color, **style)
        elif isinstance(part, Area):
            low, high = np.asarray(part.low), np.asarray(part.high)
            shade = {"color": color, "alpha": 0.2, "linewidth": 0, "label": label}
            axes.fill_between(part.x, low, high, where=high >= low, interpolate=True, **shade)
        else:
            x = np.asarray(part.x, dtype=float)
            x = x * (1 + ASIDE * (turn - (len(panel.content) - 1) / 2)) if several and panel.x.log else x
            if part.interval and (several or len(x) == 1):
                axes.vlines(x, *part.interval, color=color, linewidth=1.1, alpha=0.75)
            elif part.interval:
                axes.fill_between(x, *part.interval, color=color, alpha=0.16, linewidth=0)
            axes.plot(x, part.y, label=label, **look(part.mark))
    _scale(axes, "x", panel.x, [value for line in lines for value in line.x])
    levels = [part.y for part in panel.content if isinstance(part, Level)]
    _scale(axes, "y", panel.y, [*levels, *(value for line in lines for value in line.y)])


def _scale(axes: Axes, which: str, asked: Axis, values: Sequence[float]) -> None:
    axis, limit = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}lim")
    low, high = asked.low, asked.high
    if asked.log:
        getattr(axes, f"set_{which}scale")("log")
        pad = 1.6 if asked.ticks is None else 1.15
        low, high = (min(values) / pad if low is None else low), (max(values) * pad if high is None else high)
    limit(low, high)
    if asked.ticks is not None:
        axis.set_ticks(asked.ticks, [f"{tick:,.10g}" for tick in asked.ticks])
        axis.set_ticks([], minor=True)
    elif asked.log:  # 1, 2, 5, 10 ... in plain figures, powers of ten alone where there are many
        axis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < SPAN else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def _bars(axes: Axes, panel: Panel) -> None:
    bars = panel.content
    thick = 0.8 if bars.stacked else 0.8 / len(bars.parts)
    places, ends = np.arange(len(bars.names)), np.zeros(len(bars.names))
    for turn, (mark, values) in enumerate(bars.parts.items()):
        at = places if bars.stacked else places - 0.4 + thick * (turn + 0.5)
        lengths = np.array([value or 0 for value in values], dtype=float)
        look = {"color": mark.color, "hatch": mark.hatch, "edgecolor": charts.PAPER, "linewidth": 0.6}
        start, height = (ends, thick) if bars.stacked else (0, 0.9 * thick)
        axes.barh(at, lengths, height, left=start, label=mark.label, **look)
        ends = ends + lengths if bars.stacked else lengths
        if bars.texts and (not bars.stacked or turn == len(bars.parts) - 1):
            texts = bars.texts[0 if bars.stacked else turn]
            for end, place, text in zip(np.maximum(ends, 0), at, texts, strict=True):
                axes.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(places, bars.names)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _heat(axes: Axes, panel: Panel) -> None:
    heat = panel.content
    values = np.array(heat.values, dtype=float)  # None becomes NaN
    axes.grid(visible=False)
    lines = {"edgecolors": "white", "linewidth": 0.6} if values.size <= NUMBERED else {}
    colors = axes.pcolormesh(values, cmap="cividis", vmin=0, vmax=heat.high, **lines)
    if values.size > NUMBERED:
        axes.figure.colorbar(colors, ax=axes)
    else:
        for (row, column), value in np.ndenumerate(values):
            ink = "black" if value > heat.high / 2 else "white"
            text = "" if np.isnan(value) else f"{value:.3g}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=8)
    axes.invert_yaxis()
    for axis, names in ((axes.xaxis, heat.columns), (axes.yaxis, heat.rows)):
        step = -(-len(names) // 12)
        axis.set_ticks(np.arange(0, len(names), step) + 0.5, names[::step])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
