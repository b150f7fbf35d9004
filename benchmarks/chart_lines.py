"""Line charts of benchmarks against r: decode steps on a CPU, and the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from benchmarks.chart_bars import KVPRESS, OURS, group_bars
from benchmarks.chart_texts import label_ends, write_below
from benchmarks.panels import Panel, Points, draw_lines, make_chart
from restorekv.evaluation.charts import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NARROW,
    PURPLE,
    VERMILION,
    WIDE,
    Chart,
    Mark,
    plot_level,
    set_ratio_axis,
)
from restorekv.evaluation.tables import format_ratio

ROOFLINE = Mark("roofline at copy bandwidth", MUTED, dashed=True)
DECODING = {
    "ours": Mark("ours", BLUE, "o"),
    "rectangle": Mark("DynamicCache of as many pairs", VERMILION, "s"),
    "full": Mark("DynamicCache of all pairs", INK, "D", hollow=True),
    "as rows": Mark("all pairs, one call of SDPA", PURPLE, "^", hollow=True),
}
KERNEL = {
    "ours": Mark("ours", BLUE, "o"),
    "sdpa": Mark("dense SDPA of as many pairs", VERMILION, "s"),
    "sdpa, as rows": Mark("dense SDPA, query heads as rows", PURPLE, "^", hollow=True),
    "flash-attn": Mark("flash-attn of as many pairs", GREEN, "D"),
}
TARGET = Mark("", GREEN, dashed=True)
TARGETS = {0.05: 12, 1: 45}  # microseconds by r, for the shape below on an H200
TARGETED = {"tokens": 32768, "questions": 1, "heads": 8, "groups": 4, "width": 128}


def draw_decode(result: Mapping) -> Chart:
    """Draw a result of `decode`: attention and whole steps against r, tokens a second of
    answers.
    """
    rows = result["rows"]
    unit = "milliseconds (log)"

    def collect_lines(what: str) -> dict[Mark, list[tuple[float, float]]]:
        lines = {}
        for side, mark in DECODING.items():
            measured = [row for row in rows if side in row[what]]
            lines[mark] = [(row["ratio"], row[what][side] * 1000) for row in measured]
        return lines

    attention = collect_lines("attention")
    step = collect_lines("step")
    attention[ROOFLINE] = [(row["ratio"], row["roofline"] * 1000) for row in rows]
    panels = [
        _draw_against_ratio(attention, unit, "Attention of a decode step, one layer"),
        _draw_against_ratio(step, unit, "Whole decode step"),
    ]
    answers = result["answers"]
    if answers:
        panels.append(_draw_throughput(answers))
    title = f"Decoding over a cache of T = {result['tokens']:,} tokens"
    row = min(rows, key=lambda row: row["ratio"])
    faster = {what: row[what]["full"] / row[what]["ours"] for what in ("attention", "step")}
    note = (
        f"At {format_ratio(row['ratio'])} attention takes 1/{faster['attention']:.3g} of the full "
        "cache's time, a "
        f"whole step 1/{faster['step']:.3g}. Random states, tail of {result['tail']} columns; "
        "copies at "
        f"{result['bandwidth'] / 1e9:.1f} GB/s."
    )
    return make_chart("decode", title, panels, note)


def _draw_throughput(answers: Mapping) -> Panel:
    """Return a panel of the tokens a second of each side; its title says the ratio of ours to
    kvpress's.
    """
    rates = {side: answers[side].get("rate") for side in (OURS, KVPRESS) if side in answers}
    title = f"{answers['asked']} questions to one document of {answers['read']:,} tokens, "
    title += f"{format_ratio(answers['ratio'])}, "
    title += f"{answers['answer']} tokens each"
    if rates.get(KVPRESS):
        title += f": {rates[OURS] / rates[KVPRESS]:.1f} times as many tokens"
    return group_bars(
        title, "tokens a second", list(rates), {Mark("", BLUE): list(rates.values())}, 1, WIDE
    )


def draw_kernel(result: Mapping) -> Chart:
    """Draw a result of `kernel`: microseconds a layer against r, with the targets if the shape is
    the one they are set for.
    """
    rows = result["rows"]
    options = result["options"]
    lines = {}
    for side, mark in KERNEL.items():
        if side in rows[0]:
            lines[mark] = [(row["ratio"], row[side]["seconds"] * 1e6) for row in rows]
    lines[ROOFLINE] = [(row["ratio"], row["roofline"] * 1e6) for row in rows]
    on_target = all(options[key] == value for key, value in TARGETED.items())
    targets = TARGETS if on_target else {}
    panel = _draw_against_ratio(lines, "microseconds a layer (log)", "", WIDE, 3.6, targets)
    title = f"Attention of a decode step on a GPU, T = {options['tokens']:,}"
    note = "A rehearsal on a CPU: these figures mean nothing. " if result["rehearsal"] else ""
    note += (
        f"{options['layers']} layers of {options['heads']} KV heads of {options['width']}, "
        f"{options['groups']} query "
        f"heads each, {options['questions']} question{'s' * (options['questions'] != 1)}, tail "
        f"{options['tail']}; "
        f"copies at {result['bandwidth'] / 1e9:,.0f} GB/s. Random states."
    )
    return make_chart("kernel", title, [panel], note)


def _draw_against_ratio(
    lines: Mapping[Mark, Points],
    unit: str,
    title: str,
    width: float = NARROW,
    height: float = 3.0,
    targets: Mapping[float, float] | None = None,
) -> Panel:
    """Return a panel of lines against r, both axes logarithmic; the first line has its values
    written below its points.

    Args:
        lines: The points (r, value) of every series, ours first; a series without points is not
            drawn.
        unit: The label of y.
        title: The panel's title.
        width: The panel's width in inches.
        height: The panel's height in inches.
        targets: Levels to reach, by the ratio that each is set for.
    """
    measured = {mark: points for mark, points in lines.items() if points}

    def draw(axes: Axes) -> None:
        draw_lines(axes, measured, unit)
        set_ratio_axis(
            axes, {ratio for points in measured.values() for ratio, _ in points}, air=1.25
        )
        mark, points = next(iter(measured.items()))
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for _, value in sorted(points)]
        write_below(axes, sorted(points), texts, mark.color)
        ends = []
        for ratio, value in (targets or {}).items():
            plot_level(axes, TARGET, value)
            ends.append((value, f"target at\n{format_ratio(ratio)}: {value}", TARGET.color))
        label_ends(axes, ends)

    return Panel(title, draw, width, height)
