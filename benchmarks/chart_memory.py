"""The chart of the memory benchmark: seconds of every phase and peak memory against T."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from benchmarks.chart_bars import MEBI, format_layers, group_bars, stack_bars
from benchmarks.chart_texts import label_ends
from benchmarks.efficiency_page import PHASES
from benchmarks.memory_table import compute_bound
from benchmarks.panels import Panel, draw_lines, make_chart
from restorekv.evaluation.charts import (
    BLUE,
    GREEN,
    INK,
    NARROW,
    ORANGE,
    PURPLE,
    VERMILION,
    WIDE,
    Chart,
    Mark,
    set_ticks,
)
from restorekv.evaluation.tables import format_ratio, name_evictor

LINES = {
    "fill": Mark("fill", INK, "o"),
    "prefill": Mark("prefill", INK, "o"),
    "score": Mark("scoring", BLUE, "s"),
    "restore": Mark("restore pass", VERMILION, "^"),
    "evict": Mark("eviction", GREEN, "D"),
    "part": Mark("all phases", INK, "v"),
}
STACKED = {
    "fill": Mark("fill", INK),
    **PHASES,
    "part": Mark("streamed, all phases", PURPLE, hatch="\\\\"),
}
MODES = {
    "plain": Mark("plain", BLUE, "o"),
    "offload": Mark("offload", ORANGE, "s"),
    "streaming": Mark("streaming", GREEN, "^"),
}
BOUND = "bound without workspace"


def draw_memory(result: Mapping) -> Chart:
    """Return a chart of lines against T, or of bars if only one T was measured."""
    modes = {mode: [row for row in result["rows"] if row["mode"] == mode] for mode in MODES}
    modes = {
        mode: sorted(rows, key=lambda row: row["tokens"]) for mode, rows in modes.items() if rows
    }
    lengths = sorted({row["tokens"] for row in result["rows"]})
    panels = _make_panels(modes) if len(lengths) > 1 else _draw_one_length(modes)
    span = f"T = {lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
    layers = format_layers(result["model"]["num_hidden_layers"])
    title = f"Compressing with {name_evictor(result['evictor'])}, {layers}, {span}"
    filled = ", a cache filled with random numbers instead of a prefill" if result["filled"] else ""
    note = (
        f"{format_ratio(result['ratio'])}{filled}. Peak: resident memory above the weights, MB are "
        "2^20 bytes; the "
        f"{BOUND} is what a mode may hold besides its workspace."
    )
    if len(lengths) > 1:
        note += (
            " It is dashed. Slopes: log of the ratio of seconds over that of T, from first to "
            "last; 1 is linear, 2 "
            "quadratic."
        )
    return make_chart("memory", title, panels, note)


def _make_panels(modes: Mapping[str, Sequence[Mapping]]) -> list[Panel]:
    """Return a panel of seconds for every mode, then one of peaks, wide enough to fill its row."""
    panels = [_draw_seconds(rows, f"Seconds, {mode}") for mode, rows in modes.items()]
    return [*panels, _draw_peaks(modes, NARROW if len(panels) % 2 else WIDE)]


def _draw_one_length(modes: Mapping[str, Sequence[Mapping]]) -> list[Panel]:
    """Return panels of one T as bars: seconds by phase, and peaks."""
    rows = {mode: rows[0] for mode, rows in modes.items()}
    took = [
        {name: phase["seconds"] for name, phase in row["phases"].items()} for row in rows.values()
    ]
    phases = {name: mark for name, mark in STACKED.items() if any(name in each for each in took)}
    peak = Mark("peak memory", BLUE)
    least = Mark(BOUND, ORANGE, hatch="\\\\")
    sizes = {
        peak: [row["peak"] / MEBI for row in rows.values()],
        least: [compute_bound(row) / MEBI for row in rows.values()],
    }
    return [
        stack_bars("Seconds", list(rows), took, phases),
        group_bars("Peak memory", "MB above the weights", list(rows), sizes, width=WIDE),
    ]


def _draw_seconds(rows: Sequence[Mapping], title: str) -> Panel:
    """Return a panel of seconds against T, both axes logarithmic; each line ends with the name and
    slope of its phase.
    """
    lines: dict[Mark, list[tuple[float, float]]] = {}
    ends = []
    for name, mark in LINES.items():
        points = [
            (row["tokens"], row["phases"][name]["seconds"]) for row in rows if name in row["phases"]
        ]
        if points and min(took for _, took in points) > 0:
            lines[replace(mark, label="")] = points
            ends.append((points[-1][1], mark.label + compute_slope(points), mark.color))

    def draw(axes: Axes) -> None:
        draw_lines(axes, lines, "seconds (log)")
        _set_lengths_axis(axes, rows)
        label_ends(axes, ends)

    return Panel(title, draw, height=2.7)


def compute_slope(points: Sequence[tuple[float, float]]) -> str:
    """Return the label "slope N" of a log-log line from its first to its last point, "" if they
    coincide.
    """
    (short, early), (long, late) = points[0], points[-1]
    return f"\nslope {math.log(late / early) / math.log(long / short):.2f}" if long > short else ""


def _draw_peaks(modes: Mapping[str, Sequence[Mapping]], width: float) -> Panel:
    """Return a panel of peak memory: a line for every mode, its bound dashed in the same color."""
    lines: dict[Mark, list[tuple[float, float]]] = {}
    for mode, rows in modes.items():
        least = Mark("", MODES[mode].color, dashed=True)
        lines[least] = [(row["tokens"], compute_bound(row) / MEBI) for row in rows]
        lines[MODES[mode]] = [(row["tokens"], row["peak"] / MEBI) for row in rows]

    def draw(axes: Axes) -> None:
        draw_lines(axes, lines, "MB above the weights (log)")
        _set_lengths_axis(axes, [row for rows in modes.values() for row in rows])

    return Panel("Peak memory", draw, width, 2.7)


def _set_lengths_axis(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Make x logarithmic, with a number at each measured length."""
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log")
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    axes.set_xlabel("tokens T (log)")
    set_ticks(axes, lengths)
