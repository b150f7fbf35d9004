"""The chart of `bench-memory`: seconds of every phase and peak memory against T."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from benchmarks.chart_bars import MEBI, grouped, layers, stacked
from benchmarks.chart_lines import log_ticks
from benchmarks.memory_table import bound
from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import WIDE, Chart, Mark, Panel, at
from restorekv.evaluation.report.efficiency import PHASES
from restorekv.evaluation.report.names import evictor
from restorekv.evaluation.report.picture import NARROW

LINES = {
    "fill": Mark("fill", draw.INK, "o"),
    "prefill": Mark("prefill", draw.INK, "o"),
    "score": Mark("scoring", draw.BLUE, "s"),
    "restore": Mark("restore pass", draw.VERMILION, "^"),
    "evict": Mark("eviction", draw.GREEN, "D"),
    "part": Mark("all phases", draw.INK, "v"),
}
STACKED = {
    "fill": Mark("fill", draw.INK, hatch=""),
    **PHASES,
    "part": Mark("streamed, all phases", draw.PURPLE, hatch="\\\\"),
}
MODES = {
    "plain": Mark("plain", draw.BLUE, "o"),
    "offload": Mark("offload", draw.ORANGE, "s"),
    "streaming": Mark("streaming", draw.GREEN, "^"),
}
BOUND = "bound without workspace"
GAP = 0.085  # between labels, of the height of the axes


def memory(result: Mapping) -> Chart:
    """Lines against T, or bars where there is one T."""
    modes = {mode: [row for row in result["rows"] if row["mode"] == mode] for mode in MODES}
    modes = {mode: sorted(rows, key=lambda row: row["tokens"]) for mode, rows in modes.items() if rows}
    lengths = sorted({row["tokens"] for row in result["rows"]})
    panels, legend = lines(modes) if len(lengths) > 1 else bars(modes)
    span = f"T = {lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
    title = f"Compressing with {evictor(result['evictor'])}, {layers(result['model']['num_hidden_layers'])}, {span}"
    note = (
        f"{at(result['ratio'])}"
        f"{', a cache filled with random numbers instead of a prefill' if result['filled'] else ''}. Peak: resident "
        "memory above the weights, MB are 2^20 bytes; the bound is what a mode may hold besides its workspace."
    )
    if len(lengths) > 1:
        note += " Slopes: log of the ratio of seconds over that of T, from first to last; 1 is linear, 2 quadratic."
    return Chart("memory", title, panels, title, (), note, legend)


def lines(modes: Mapping[str, Sequence[Mapping]]) -> tuple[list[Panel], list[Mark]]:
    """A panel of seconds for every mode, then one of peaks, that fills its row."""
    panels = [Panel(partial(draw_seconds, rows), f"Seconds, {mode}", NARROW, 2.7) for mode, rows in modes.items()]
    width = NARROW if len(panels) % 2 else WIDE
    panels.append(Panel(partial(draw_peaks, modes), "Peak memory", width, 2.7))
    return panels, [*(MODES[mode] for mode in modes), Mark(BOUND, draw.MUTED, dashed=True)]


def bars(modes: Mapping[str, Sequence[Mapping]]) -> tuple[list[Panel], list[Mark]]:
    """Seconds by phase and peaks of one T."""
    rows = {mode: rows[0] for mode, rows in modes.items()}
    seconds = [{name: phase["seconds"] for name, phase in row["phases"].items()} for row in rows.values()]
    phases = {name: mark for name, mark in STACKED.items() if any(name in each for each in seconds)}
    peak, least = Mark("peak memory", draw.BLUE, hatch=""), Mark(BOUND, draw.ORANGE, hatch="\\\\")
    sizes = {peak: [row["peak"] / MEBI for row in rows.values()], least: [bound(row) / MEBI for row in rows.values()]}
    panels = [
        stacked("Seconds", list(rows), seconds, phases),
        grouped("Peak memory", "MB above the weights", list(rows), sizes, width=WIDE),
    ]
    return panels, [*phases.values(), *sizes]


def draw_seconds(rows: Sequence[Mapping], axes: Axes) -> None:
    """Logarithms of seconds against those of T; name and slope of every phase at the end of its line."""
    found = {}
    for name, mark in LINES.items():
        points = [(row["tokens"], row["phases"][name]["seconds"]) for row in rows if name in row["phases"]]
        if points and min(seconds for _, seconds in points) > 0:
            draw.line(axes, mark, *zip(*points, strict=True))
            found[mark] = points
    values = [seconds for points in found.values() for _, seconds in points]
    axes.set_yscale("log")
    low, high = min(values) / 1.6, max(values) * 1.6
    axes.set_ylim(low, high)
    log_ticks(axes.yaxis)
    axes.set_ylabel("seconds (log)")
    length_axis(axes, rows)
    heights = {mark: math.log(points[-1][1] / low) / math.log(high / low) for mark, points in found.items()}
    for mark, height in apart(heights).items():
        told = f"{mark.label}{slope(found[mark])}"
        axes.text(1.02, height, told, transform=axes.transAxes, va="center", fontsize=8, color=mark.colour)


def slope(points: Sequence[tuple[float, float]]) -> str:
    """Of a line in logarithms, from its first to its last point."""
    (short, early), (long, late) = points[0], points[-1]
    return f"\nslope {math.log(late / early) / math.log(long / short):.2f}" if long > short else ""


def apart(heights: Mapping[Mark, float]) -> dict[Mark, float]:
    """The same heights, moved as little as keeps labels of two lines from lying on each other."""
    found: dict[Mark, float] = {}
    floor = 0.0
    for mark, height in sorted(heights.items(), key=lambda item: item[1]):
        found[mark] = floor = max(height, floor)
        floor += 2 * GAP
    ceiling = 0.96
    for mark in reversed(found):
        found[mark] = min(found[mark], ceiling)
        ceiling = found[mark] - 2 * GAP
    return found


def draw_peaks(modes: Mapping[str, Sequence[Mapping]], axes: Axes) -> None:
    """A line for every mode, its bound dashed in the same colour."""
    every = [row for rows in modes.values() for row in rows]
    for mode, rows in modes.items():
        tokens = [row["tokens"] for row in rows]
        draw.line(axes, Mark(mode, MODES[mode].colour, dashed=True), tokens, [bound(row) / MEBI for row in rows])
        draw.line(axes, MODES[mode], tokens, [row["peak"] / MEBI for row in rows])
    axes.set_yscale("log")
    log_ticks(axes.yaxis)
    axes.set_ylabel("MB above the weights (log)")
    length_axis(axes, every)


def length_axis(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Ticks at the lengths that were measured."""
    tokens = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.set_xticks([], minor=True)
    axes.set_xlim(tokens[0] / 1.15, tokens[-1] * 1.15)
    axes.set_xlabel("tokens T (log)")
