"""Panels of the benchmarks' charts: horizontal bars, and lines on logarithmic axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from restorekv.evaluation.charts import (
    NARROW,
    PAPER,
    Chart,
    Mark,
    make_figure,
    plot_line,
    with_style,
)

BAR_HEIGHT = 0.3  # inches
# An axis whose end is less than this many times its start has three numbers a decade, else one.
MANY_DECADES = 2000
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A pair of axes with a title, its size in inches and the function that draws on it."""

    title: str
    draw: Callable[[Axes], None]
    width: float = NARROW
    height: float = 3.0


@with_style
def make_chart(
    name: str, title: str, panels: Sequence[Panel], note: str = "", figures: Sequence[Mapping] = ()
) -> Chart:
    """Draw panels next to each other and return them as one chart."""
    figure, made = make_figure([(panel.title, panel.width, panel.height) for panel in panels])
    for axes, panel in zip(made, panels, strict=True):
        panel.draw(axes)
    return Chart(name, title, figure, title, note, figures)


def make_bars(
    title: str,
    unit: str,
    names: Sequence[str],
    parts: Mapping[Mark, Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    stacked: bool,
    width: float = NARROW,
) -> Panel:
    """Return a panel of horizontal bars, as high as the bars need.

    Args:
        title: The panel's title.
        unit: The label of the axis of lengths.
        names: One for every bar or group of bars, from the top down.
        parts: The lengths of every series; None leaves out the bar.
        texts: What is written next to the bars: one row for whole stacks, or one row for each
            series.
        stacked: Whether the series are parts of one bar; otherwise they are separate bars.
        width: The panel's width in inches.
    """
    lines = sum(name.count("\n") + 1 for name in names)
    bars = len(names) * (1 if stacked else 0.75 * len(parts))

    def draw(axes: Axes) -> None:
        draw_bars(axes, names, parts, texts, stacked)
        axes.set_xlabel(unit)

    return Panel(title, draw, width, 0.8 + BAR_HEIGHT * max(bars, 0.65 * lines, 2.0))


def draw_bars(
    axes: Axes,
    names: Sequence[str],
    parts: Mapping[Mark, Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    stacked: bool,
) -> None:
    """Draw what `make_bars` describes."""
    thickness = 0.8 if stacked else 0.8 / len(parts)
    places = np.arange(len(names))
    ends = np.zeros(len(names))
    for turn, (mark, values) in enumerate(parts.items()):
        middles = places if stacked else places - 0.4 + thickness * (turn + 0.5)
        lengths = np.array([value or 0 for value in values], dtype=float)
        starts = ends if stacked else np.zeros(len(names))
        look = {
            "color": mark.color,
            "hatch": mark.hatch,
            "edgecolor": PAPER,
            "linewidth": 0.6,
            "label": mark.label,
        }
        axes.barh(middles, lengths, thickness if stacked else 0.9 * thickness, left=starts, **look)
        ends = starts + lengths
        last = turn == len(parts) - 1
        row = (texts[0] if last else []) if stacked else texts[turn]
        for end, place, text in zip(np.maximum(ends, 0), middles, row, strict=bool(row)):
            axes.annotate(
                text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5
            )
    axes.set_yticks(places, names)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def draw_lines(axes: Axes, lines: Mapping[Mark, Points], unit: str) -> None:
    """Draw lines of points (x, y) with a logarithmic y axis.

    The axis has plain numbers at 1, 2, 5, 10 and so on, or at powers of ten only if it spans many
    decades.
    """
    for mark, points in lines.items():
        ordered = sorted(points)
        plot_line(axes, mark, [x for x, _ in ordered], [y for _, y in ordered])
    values = [y for points in lines.values() for _, y in points]
    low = min(values) / 1.6
    high = max(values) * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_ylabel(unit)
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < MANY_DECADES else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
