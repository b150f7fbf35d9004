"""A chart as one picture that a document shows: 7.4 inches wide, which is 710 pixels on a screen, on white.

Above the panels title and legend, below them the note. A panel that is NARROW here shares a row with another.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import WIDE, Chart, Panel

NARROW = WIDE / 2
FONTS = ("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # the second where the first is not installed
DPI = 200
MARGIN = 0.1  # inches
TITLE, NOTE = 0.2, 0.145  # inches that a line takes
LETTERS = {"title": 78, "note": 112}  # that a line holds
LETTER, HANDLE = 0.07, 0.53  # inches: a letter of the legend, and what stands before and behind a label


def svg(chart: Chart) -> str:
    """A file that stands alone: the same bytes for the same chart."""
    file = io.StringIO()
    with rc_context({**draw.STYLE, "svg.hashsalt": chart.name}):
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure(chart).savefig(file, format="svg", facecolor="white", metadata=empty)
    return file.getvalue().replace(*FONTS)


def png(chart: Chart) -> bytes:
    """The same picture in pixels."""
    file = io.BytesIO()
    with rc_context(draw.STYLE):
        figure(chart).savefig(file, format="png", facecolor="white", dpi=DPI)
    return file.getvalue()


def figure(chart: Chart) -> Figure:
    """Title, legend, panels row by row, note, from the top down."""
    title, note = (textwrap.wrap(text, LETTERS[key]) for key, text in (("title", chart.title), ("note", chart.note)))
    columns = legend_columns(chart)
    legend = -(-len(chart.legend) // columns) * draw.LINE + MARGIN if chart.legend else 0
    head, foot = len(title) * TITLE + legend + 2 * MARGIN, len(note) * NOTE + 2 * MARGIN
    rows = in_rows(chart.panels)
    heights = [max(panel.height for panel in row) for row in rows]
    height = head + sum(heights) + foot
    made = Figure(figsize=(WIDE, height), layout="constrained")
    FigureCanvasAgg(made)
    made.get_layout_engine().set(rect=(0.01, foot / height, 0.98, 1 - (head + foot) / height), h_pad=0.09)
    grid = made.add_gridspec(len(rows), 1, height_ratios=heights)
    for place, row in zip(grid, rows, strict=True):
        parts = place.subgridspec(1, len(row), width_ratios=[panel.width for panel in row])
        for part, panel in zip(parts, row, strict=True):
            draw.fill(made.add_subplot(part), panel)
    left = MARGIN / WIDE
    made.text(left, 1 - MARGIN / height, "\n".join(title), fontsize=11, fontweight="bold", va="top")
    if chart.legend:
        top = 1 - (len(title) * TITLE + MARGIN) / height
        made.legend(handles=[draw.handle(mark) for mark in chart.legend], loc="upper left", frameon=False,
                    bbox_to_anchor=(0, top), ncols=columns, columnspacing=1.4).set_in_layout(False)  # fmt: skip
    shown = made.text(left, MARGIN / height, "\n".join(note), fontsize=8, color=draw.MUTED, va="bottom")
    shown.set_linespacing(1.15)
    return made


def legend_columns(chart: Chart) -> int:
    """As many as the width takes; a legend is filled column by column."""
    letters = [len(mark.label) for mark in chart.legend]
    for lines in range(1, len(letters)):
        columns = [max(letters[start : start + lines]) for start in range(0, len(letters), lines)]
        if sum(HANDLE + LETTER * longest for longest in columns) <= WIDE - 2 * MARGIN:
            return len(columns)
    return 1


def in_rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """From left to right, as long as the width holds them."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if not rows or sum(each.width for each in rows[-1]) + panel.width > WIDE:
            rows.append([])
        rows[-1].append(panel)
    return rows
