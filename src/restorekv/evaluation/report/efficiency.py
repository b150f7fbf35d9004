"""What compressing costs with and without the restore pass, and what a compressed cache saves when it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.analyses import explained, read
from restorekv.evaluation.report.blocks import Block, Chart, Mark, Panel, Section, Table, number, percent, table
from restorekv.evaluation.report.names import evictor, slug

FOLDER = "efficiency"
PHASES = {
    "prefill": Mark("prefill", draw.MUTED, hatch=""),
    "score": Mark("scoring", draw.SKY, hatch="//"),
    "restore": Mark("restore pass", draw.VERMILION, hatch="xx"),
    "evict": Mark("eviction", draw.GREEN, hatch=".."),
}
BASE = Mark("base alone", draw.VERMILION, "o", dashed=True, hollow=True)
RESTORED = Mark("restored", draw.BLUE, "o")
RING, DOT = 9, 4.5  # where two lines lie on each other both markers show
INTRO = (
    "Compressing happens once a context: prefill, scoring, the restore pass, eviction. Afterwards every step of an "
    "answer attends to what is left, and a restored cache holds as many pairs as the base's."
)


def sections(folder: Path) -> list[Section]:
    """One for all machines that were measured."""
    blocks: list[Block] = []
    for told in read(folder / FOLDER):
        blocks += [compression(told), costs(told), latency(told), explained(told)]
    return [Section("Efficiency", INTRO, blocks)] if blocks else []


def machine(told: Mapping) -> str:
    made = told["conventions"]
    threads = f"{made['threads']} thread{'s' if made['threads'] != 1 else ''}"
    return f"{made['model']} on {made['machine']}, {threads}, T = {made['tokens']:,} tokens"


def compression(told: Mapping) -> Chart:
    """Two bars an evictor."""
    rows = told["compression"]
    title = f"Time to compress a context: {told['label']}"
    data = [
        {"evictor": row["evictor"], "restored": row["restored"], **row["seconds"], "peak": row["peak"]} for row in rows
    ]
    note = f"Seconds, median of {told['conventions']['repeat']} runs, by phase; {machine(told)}."
    panel = Panel(partial(draw_phases, rows), height=1.1 + 0.32 * len(rows))
    return Chart(slug("efficiency", told["name"], "time"), title, [panel], title, data, note, list(PHASES.values()))


def draw_phases(rows: Sequence[Mapping], axes: Axes) -> None:
    """Stacked phases, the total behind them."""
    left = draw.bars(axes, {mark: [row["seconds"][phase] for row in rows] for phase, mark in PHASES.items()})
    for place, (row, end) in enumerate(zip(rows, left, strict=True)):
        axes.text(
            end + 0.01 * left.max(), place, f"{row['seconds']['total']:.3g} s", va="center", fontsize=8, color=draw.INK
        )
    labels = [evictor(row["evictor"]) + (" + RestoreKV" if row["restored"] else "") for row in rows]
    axes.set_yticks(np.arange(len(rows)), labels)
    axes.set_xlim(0, 1.2 * left.max())
    axes.set_xlabel("seconds")


def costs(told: Mapping) -> Table:
    """What the restore pass adds."""
    rows, data = [], []
    peaks = {(row["evictor"], row["restored"]): row for row in told["compression"]}
    for name, more in told["overhead"].items():
        base, restored = peaks[name, False], peaks[name, True]
        rows.append([
            evictor(name), restored["adapter"] or "–", f"{number(1000 * more['seconds'])} ms",
            percent(more["share"], 2), megabytes(base["peak"]), megabytes(restored["peak"]), megabytes(more["peak"]),
            percent(more["peak_share"], 2),
        ])  # fmt: skip
        data.append({"evictor": name, **more, "base_peak": base["peak"], "restored_peak": restored["peak"]})
    head = [
        "method", "adapter", "restore pass", "of the base's time", "peak memory, base", "peak memory, restored",
        "difference", "of the base's peak",
    ]  # fmt: skip
    note = (
        "Peak memory is what comes on top of the loaded model; – where the system does not tell. A random adapter "
        "costs what a trained one does."
    )
    title = f"What the restore pass adds: {told['label']}"
    return table(slug("efficiency", told["name"], "cost"), title, head, rows, note, data, left=(0, 1))


def megabytes(value: float | None) -> str:
    return "–" if value is None else f"{number(value / 1e6)} MB"


def latency(told: Mapping) -> Chart:
    """Milliseconds and bytes against r."""
    rows = told["latency"]
    title = f"Attention latency and cache memory against ratio: {told['label']}"
    keys = ("ratio", "restored", "milliseconds", "least", "most", "bytes", "pairs", "restore_tokens")
    data = [{key: row[key] for key in keys} for row in rows]
    shares = ", ".join(f"r = {ratio}: {value:.3f}" for ratio, value in told["latency_ratio"].items())
    note = (
        "Latency: one decoding step's attention in one layer, median and range. Memory: bytes of the whole cache. "
        f"Latency restored over base: {shares}; {machine(told)}."
    )
    if told["conventions"]["latency_context"] == "random":
        note += " Random keys and values stand in for a prefilled context."
    panels = [
        Panel(partial(draw_latency, rows), "Attention latency"),
        Panel(partial(draw_memory, rows), "Cache memory"),
    ]
    return Chart(slug("efficiency", told["name"], "latency"), title, panels, title, data, note, [BASE, RESTORED])


def lines(rows: Sequence[Mapping], key: str) -> Iterator[tuple[Mark, list[float], list[float]]]:
    for mark, restored in ((BASE, False), (RESTORED, True)):
        mine = [row for row in rows if row["restored"] == restored]
        if mine:
            yield mark, [row["ratio"] for row in mine], [row[key] for row in mine]


def draw_latency(rows: Sequence[Mapping], axes: Axes) -> None:
    ranges = {mark: band for (mark, _, low), (_, _, high) in zip(lines(rows, "least"), lines(rows, "most"), strict=True)
              for band in [(low, high)]}  # fmt: skip
    for mark, ratios, values in lines(rows, "milliseconds"):
        draw.line(axes, mark, ratios, values, ranges[mark], RING if mark.hollow else DOT)
    draw.ratio_axis(axes, {row["ratio"] for row in rows})
    axes.set_ylim(bottom=0)
    axes.set_ylabel("milliseconds a layer and step")


def draw_memory(rows: Sequence[Mapping], axes: Axes) -> None:
    most = max(row["bytes"] for row in rows)
    unit, name = next(
        (size, name) for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= size or size == 1e3
    )
    for mark, ratios, values in lines(rows, "bytes"):
        draw.line(axes, mark, ratios, [value / unit for value in values], size=RING if mark.hollow else DOT)
    draw.ratio_axis(axes, {row["ratio"] for row in rows})
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"cache ({name})")
