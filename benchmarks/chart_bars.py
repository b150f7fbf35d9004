"""Charts of benchmarks that are bars: compressing beside kvpress, every method's scoring, a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import MINUS, WIDE, Chart, Mark, Panel, at
from restorekv.evaluation.report.efficiency import PHASES
from restorekv.evaluation.report.names import evictor
from restorekv.evaluation.report.picture import NARROW

OURS, KVPRESS = "ours", "kvpress"
SIDES = {OURS: Mark(OURS, draw.BLUE, hatch=""), KVPRESS: Mark(KVPRESS, draw.ORANGE, hatch="\\\\")}
STEP = {
    "prefill": PHASES["prefill"],
    "score": PHASES["score"],
    "teacher": Mark("teacher", draw.PURPLE, hatch="\\\\"),
    "restore": PHASES["restore"],
    "student": Mark("student", draw.BLUE, hatch=""),
    "backward": Mark("backward", draw.ORANGE, hatch="//"),
    "optimizer": Mark("optimizer", draw.GREEN, hatch=".."),
}
MEBI = 1 << 20
BAR = 0.3  # inches


def compressing(result: Mapping) -> Chart:
    """`bench`: seconds by phase, peak memory, milliseconds a token."""
    rows = sorted(result["rows"], key=lambda row: (row["tokens"], row["side"] != OURS))
    names = [f"T = {row['tokens']:,}, {row['side']}" for row in rows]
    panels = [stacked("Seconds to compress", names, [row["seconds"] for row in rows], PHASES, ratios(result, rows))]
    whole = [f"T = {tokens:,}" for tokens in sorted({row["tokens"] for row in rows})]
    if any(row["peak"] is not None for row in rows):
        peaks = by_side(rows, lambda row: row["peak"] and row["peak"] / MEBI)
        panels.append(grouped("Peak memory above the weights", "MB", whole, peaks))
    ratio = at(result["ratio"])
    cases = [f"{each}\n{which}" for each in whole for which in (ratio, "r = 1")]
    tokens = by_side(rows, *(partial(milliseconds, which) for which in ("small", "full")))
    panels.append(grouped("A token of an answer", "milliseconds", cases, tokens))
    repeat = f"median of {result['repeat']} measurements" if result["repeat"] > 1 else "one measurement each"
    title = f"Compressing with KVzip to {ratio} and answering"
    title += f", beside kvpress {result['kvpress']}" if result["kvpress"] else ""
    note = f"{repeat.capitalize()}; MB are 2^20 bytes."
    if result["kvpress"]:
        note += " Ratios are ours over kvpress, with the restore pass, which kvpress does not have."
    return Chart("bench", title, panels, title, (), note, [*PHASES.values(), *tokens])


def layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def milliseconds(which: str, row: Mapping) -> float | None:
    """Of a token; None where kvpress refused."""
    return row[which]["token"] * 1000 if "token" in row[which] else None


def by_side(rows: Sequence[Mapping], *figures: Callable[[Mapping], float | None]) -> dict[Mark, list[float | None]]:
    """Of either side that was measured, every figure of its rows in turn."""
    found = {mark: [each(row) for row in rows if row["side"] == side for each in figures]
             for side, mark in SIDES.items()}  # fmt: skip
    return {mark: values for mark, values in found.items() if values}


def ratios(result: Mapping, rows: Sequence[Mapping]) -> list[str]:
    """Behind our bars: how much of kvpress's time that is."""
    told = result["ratios"]
    return [
        f", {told[str(row['tokens'])]['compress and restore']:.2f} of kvpress"
        if row["side"] == OURS and str(row["tokens"]) in told
        else ""
        for row in rows
    ]


def scoring(result: Mapping) -> Chart:
    """`bench-scorers`: what every method adds to a prefill, cheapest first."""
    rows = sorted(result["rows"], key=lambda row: row["multiple"])
    names = [evictor(row["method"]) for row in rows]
    values = {Mark("adds", draw.BLUE, hatch=""): [row["multiple"] for row in rows]}
    panel = grouped("", f"prefills of {result['tokens']:,} tokens", names, values, digits=2, width=WIDE)
    title = f"What scoring adds to a prefill of {result['tokens']:,} tokens, in prefills"
    plain = [row["prefill"] for row in rows]
    note = (
        "A method's own prefill and scoring without the plain prefill, over the plain prefill that was measured before "
        f"each method and took {min(plain):.1f} to {max(plain):.1f} s. AM-fast: its reference pass and a fit at "
        f"{at(result['ratio'])}."
    )
    return Chart("scorers", title, [panel], title, (), note)


def training(result: Mapping) -> Chart:
    """`bench-train`: seconds by phase, memory."""
    rows = result["rows"]
    names = [row["variant"] for row in rows]
    panels = [stacked("Seconds of a step", names, [row["seconds"] for row in rows], STEP)]
    if all(row["peak"] is not None for row in rows):
        for key, told in (("peak", "Peak memory"), ("graph", "Graph before backward")):
            values = {Mark(told, draw.BLUE, hatch=""): [row[key] / MEBI for row in rows]}
            panels.append(grouped(told, "MB", names, values))
    title = f"One training step on a context of {result['tokens']:,} tokens"
    note = (
        f"KVzip, {at(result['ratio'])}, {result['questions']} questions with answers of {result['answer']} ids; memory "
        "above what was resident before, MB are 2^20 bytes. Copied: attention copies the context for the backward "
        "pass; anew: it refers to it; then scores and teacher, then the full cache too, are read from a store."
    )
    return Chart("train", title, panels, title, (), note, list(STEP.values()))


def stacked(
    title: str,
    names: Sequence[str],
    seconds: Sequence[Mapping[str, float]],
    phases: Mapping[str, Mark],
    behind: Sequence[str] = (),
) -> Panel:
    """A bar of phases for every name, its sum and perhaps more behind it."""

    def fill(axes: Axes) -> None:
        parts = {mark: [each.get(phase, 0) for each in seconds] for phase, mark in phases.items()}
        ends = draw.bars(axes, parts)
        for place, end in enumerate(ends):
            told = f"{seconds[place].get('total', end):.3g} s{behind[place] if behind else ''}"
            label(axes, end, place, told)
        axes.set_yticks(np.arange(len(names)), names)
        axes.set_xlim(0, (1.32 if any(behind) else 1.12) * ends.max())
        axes.set_xlabel("seconds")

    return Panel(fill, title, WIDE, 0.75 + BAR * len(names))


def grouped(
    title: str,
    unit: str,
    names: Sequence[str],
    values: Mapping[Mark, Sequence[float | None]],
    digits: int = 0,
    width: float = NARROW,
) -> Panel:
    """Bars of every mark side by side for every name, each with its figure; None was refused."""

    def fill(axes: Axes) -> None:
        thick = 0.8 / len(values)
        most = max(value for row in values.values() for value in row if value is not None)
        for turn, (mark, row) in enumerate(values.items()):
            places = np.arange(len(names)) - 0.4 + thick * (turn + 0.5)
            lengths = [value or 0 for value in row]
            axes.barh(places, lengths, 0.9 * thick, color=mark.colour, hatch=mark.hatch, edgecolor=draw.PAPER,
                      linewidth=0.6)  # fmt: skip
            for place, value in zip(places, row, strict=True):
                told = "refused" if value is None else f"{value:,.{digits}f}".replace("-", MINUS)
                label(axes, max(value or 0, 0), place, told)
        axes.set_yticks(np.arange(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.set_xlim(min(0, *(value for row in values.values() for value in row if value is not None)), 1.2 * most)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_xlabel(unit)

    lines = len("\n".join(names).split("\n"))
    return Panel(fill, title, width, 0.8 + BAR * max(0.75 * len(names) * len(values), 0.65 * lines, 2.5))


def label(axes: Axes, end: float, place: float, told: str) -> None:
    """Behind a bar."""
    axes.annotate(told, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
