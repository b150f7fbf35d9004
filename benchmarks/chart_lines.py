"""Charts of benchmarks that are lines against r: decode steps on a CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.chart_bars import KVPRESS, OURS, SIDES, grouped
from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import WIDE, Chart, Mark, Panel, at
from restorekv.evaluation.report.picture import NARROW

Lines = Mapping[Mark, Sequence[tuple[float, float]]]  # (r or T, figure)
ROOFLINE = Mark("roofline at copy bandwidth", draw.MUTED, dashed=True)
DECODING = {
    "ours": Mark("ours", draw.BLUE, "o"),
    "rectangle": Mark("DynamicCache of as many pairs", draw.VERMILION, "s"),
    "full": Mark("DynamicCache of all pairs", draw.INK, "D", hollow=True),
    "as rows": Mark("all pairs, one call of SDPA", draw.PURPLE, "^", hollow=True),
}
KERNEL = {
    "ours": Mark("ours", draw.BLUE, "o"),
    "sdpa": Mark("dense SDPA of as many pairs", draw.VERMILION, "s"),
    "sdpa, as rows": Mark("dense SDPA, query heads as rows", draw.PURPLE, "^", hollow=True),
    "flash-attn": Mark("flash-attn of as many pairs", draw.GREEN, "D"),
}
TARGETS = {0.05: 12, 1: 45}  # microseconds by r, for the shape below on an H200
MANY = 2000  # times that an axis may span with three ticks a decade
TARGETED = {"tokens": 32768, "questions": 1, "heads": 8, "groups": 4, "width": 128}


def decoding(result: Mapping) -> Chart:
    """`bench-decode`: attention and whole steps against r, tokens a second of many answers."""
    rows = result["rows"]
    attention = {**series(rows, "attention"), ROOFLINE: [(row["ratio"], row["roofline"] * 1000) for row in rows]}
    panels = [
        Panel(partial(against_ratio, attention, "milliseconds (log)"), "Attention of a decode step, one layer", NARROW),
        Panel(partial(against_ratio, series(rows, "step"), "milliseconds (log)"), "Whole decode step", NARROW),
    ]
    answers = result["answers"]
    if answers:
        panels.append(throughput(answers))
    title = f"Decoding over a cache of T = {result['tokens']:,} tokens"
    row = min(rows, key=lambda row: row["ratio"])
    note = f"At {at(row['ratio'])} attention takes 1/{row['attention']['full'] / row['attention']['ours']:.3g} of the "
    note += (
        f"full cache's time, a whole step 1/{row['step']['full'] / row['step']['ours']:.3g}. Random states, tail of "
    )
    note += f"{result['tail']} columns; copies at {result['bandwidth'] / 1e9:.1f} GB/s."
    return Chart("decode", title, panels, title, (), note, list(attention))


def series(rows: Sequence[Mapping], what: str) -> Lines:
    """Milliseconds against r of every side that was measured."""
    found = {mark: [(row["ratio"], row[what][side] * 1000) for row in rows if side in row[what]]
             for side, mark in DECODING.items()}  # fmt: skip
    return {mark: points for mark, points in found.items() if points}


def throughput(answers: Mapping) -> Panel:
    """Tokens a second of either side, and how many times as many ours are."""
    rates = {side: answers[side].get("rate") for side in (OURS, KVPRESS) if side in answers}
    title = f"{answers['asked']} questions to one document of {answers['read']:,} tokens, {at(answers['ratio'])}, "
    title += f"{answers['answer']} tokens each"
    if rates.get(KVPRESS):
        title += f": {rates[OURS] / rates[KVPRESS]:.1f} times as many tokens"
    names = [SIDES[side].label for side in rates]
    return grouped(title, "tokens a second", names, {SIDES[OURS]: list(rates.values())}, digits=1, width=WIDE)


def kernel(result: Mapping) -> Chart:
    """`bench-kernel`: microseconds a layer against r, with the targets where the shape is the one they are for."""
    rows, options = result["rows"], result["options"]
    lines = {
        mark: [(row["ratio"], row[side]["seconds"] * 1e6) for row in rows]
        for side, mark in KERNEL.items()
        if side in rows[0]
    }
    lines[ROOFLINE] = [(row["ratio"], row["roofline"] * 1e6) for row in rows]
    targets = TARGETS if all(options[key] == value for key, value in TARGETED.items()) else {}
    panel = Panel(partial(against_ratio, lines, "microseconds a layer (log)", targets=targets), "", WIDE, 3.6)
    title = f"Attention of a decode step on a GPU, T = {options['tokens']:,}"
    note = "A rehearsal on a CPU: these figures mean nothing. " if result["rehearsal"] else ""
    note += (
        f"{options['layers']} layers of {options['heads']} KV heads of {options['width']}, {options['groups']} query "
        f"heads each, {options['questions']} question{'s' * (options['questions'] != 1)}, tail {options['tail']}; "
        f"copies at {result['bandwidth'] / 1e9:,.0f} GB/s. Random states."
    )
    return Chart("kernel", title, [panel], title, (), note, list(lines))


def against_ratio(lines: Lines, unit: str, axes: Axes, targets: Mapping[float, float] | None = None) -> None:
    """Logarithms on both axes; figures beside our points."""
    targets = targets or {}
    for mark, points in lines.items():
        draw.line(axes, mark, *zip(*sorted(points), strict=True))
    values = [value for points in lines.values() for _, value in points] + list(targets.values())
    ratios = {ratio for points in lines.values() for ratio, _ in points}
    draw.ratio_axis(axes, ratios)
    axes.set_xlim(min(ratios) / 1.25, max(ratios) * 1.25)
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
    log_ticks(axes.yaxis)
    axes.set_ylabel(unit)
    for ratio, value in next(iter(lines.values())):
        told = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(told, (ratio, value), (0, -13), textcoords="offset points", ha="center", fontsize=8,
                      color=draw.BLUE, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
    for ratio, value in targets.items():
        axes.axhline(value, color=draw.GREEN, linewidth=1.2, linestyle=":")
        axes.text(1.01, value, f"target at\n{at(ratio)}: {value}", transform=axes.get_yaxis_transform(), va="center",
                  fontsize=8, color=draw.GREEN)  # fmt: skip


def log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 ... in plain figures; powers of ten alone where there are many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < MANY else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
