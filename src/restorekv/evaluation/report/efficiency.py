"""What compressing costs with and without the restore pass, and what a compressed cache saves when it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from restorekv.evaluation.charts import (
    GREEN,
    MUTED,
    SKY,
    VERMILION,
    Axis,
    Bars,
    Chart,
    Line,
    Mark,
    Panel,
    bars,
    ratio_axis,
)
from restorekv.evaluation.report.analyses import BASE, RESTORED, explained, read
from restorekv.evaluation.report.names import evictor_name, slug
from restorekv.evaluation.report.page import Block, Section
from restorekv.evaluation.tables import UNKNOWN, Table, number, percent, table

FOLDER = "efficiency"
PHASES = {
    "prefill": Mark("prefill", MUTED),
    "score": Mark("scoring", SKY, hatch="//"),
    "restore": Mark("restore pass", VERMILION, hatch="xx"),
    "evict": Mark("eviction", GREEN, hatch=".."),
}
INTRO = (
    "Compressing happens once a context: prefill, scoring, the restore pass, eviction. Afterwards every step of an "
    "answer attends to what is left, and a restored cache holds as many pairs as the base's."
)


def sections(folder: Path) -> list[Section]:
    """Returns one section for all machines that were measured."""
    blocks: list[Block] = []
    for found in read(folder / FOLDER):
        blocks += [compression(found), costs(found), latency(found), explained(found)]
    return [Section("Efficiency", INTRO, blocks)] if blocks else []


def machine(found: Mapping) -> str:
    made = found["conventions"]
    threads = f"{made['threads']} thread{'s' if made['threads'] != 1 else ''}"
    return f"{made['model']} on {made['machine']}, {threads}, T = {made['tokens']:,} tokens"


def compression(found: Mapping) -> Chart:
    """Returns two bars for each evictor, alone and restored, stacked of the phases."""
    rows = found["compression"]
    title = f"Time to compress a context: {found['label']}"
    labels = [evictor_name(row["evictor"]) + " + RestoreKV" * row["restored"] for row in rows]
    parts = {mark: [row["seconds"][phase] for row in rows] for phase, mark in PHASES.items()}
    panel = bars(Bars(labels, parts, [[f"{row['seconds']['total']:.3g} s" for row in rows]]), "seconds")
    data = [
        {"evictor": row["evictor"], "restored": row["restored"], **row["seconds"], "peak": row["peak"]} for row in rows
    ]
    note = f"Seconds, median of {found['conventions']['repeat']} runs, by phase; {machine(found)}."
    return Chart(slug("efficiency", found["name"], "time"), title, [panel], title, data, note)


def costs(found: Mapping) -> Table:
    """Returns what the restore pass adds."""
    rows, data = [], []
    peaks = {(row["evictor"], row["restored"]): row for row in found["compression"]}
    for evictor, more in found["overhead"].items():
        base, restored = peaks[evictor, False], peaks[evictor, True]
        sizes = [UNKNOWN if size is None else f"{number(size / 1e6)} MB"
                 for size in (base["peak"], restored["peak"], more["peak"])]  # fmt: skip
        rows.append([
            evictor_name(evictor), restored["adapter"] or UNKNOWN, f"{number(1000 * more['seconds'])} ms",
            percent(more["share"], 2), *sizes, percent(more["peak_share"], 2),
        ])  # fmt: skip
        data.append({"evictor": evictor, **more, "base_peak": base["peak"], "restored_peak": restored["peak"]})
    head = [
        "method", "adapter", "restore pass", "of the base's time", "peak memory, base", "peak memory, restored",
        "difference", "of the base's peak",
    ]  # fmt: skip
    note = (
        "Peak memory is what comes on top of the loaded model; – where the system does not tell. A random adapter "
        "costs what a trained one does."
    )
    title = f"What the restore pass adds: {found['label']}"
    return table(slug("efficiency", found["name"], "cost"), title, head, rows, note, data, left=(0, 1))


def latency(found: Mapping) -> Chart:
    """Returns milliseconds and bytes against r, base and restored."""
    rows = found["latency"]
    most = max(row["bytes"] for row in rows)
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= size or size == 1e3
    )
    times, sizes = [], []
    for mark, restored in ((BASE, False), (RESTORED, True)):
        mine = [row for row in rows if row["restored"] == restored]
        ratios, low, high = ([row[key] for row in mine] for key in ("ratio", "least", "most"))
        if mine:
            times.append(Line(mark, ratios, [row["milliseconds"] for row in mine], (low, high)))
            sizes.append(Line(mark, ratios, [row["bytes"] / size for row in mine]))
    x = ratio_axis({row["ratio"] for row in rows})
    panels = [
        Panel(times, x, Axis("milliseconds a layer and step", low=0), "Attention latency"),
        Panel(sizes, x, Axis(f"cache ({unit})", low=0), "Cache memory"),
    ]
    keys = ("ratio", "restored", "milliseconds", "least", "most", "bytes", "pairs", "restore_tokens")
    shares = ", ".join(f"r = {ratio}: {value:.3f}" for ratio, value in found["latency_ratio"].items())
    note = (
        "Latency: one decoding step's attention in one layer, median and range. Memory: bytes of the whole cache. "
        f"Latency restored over base: {shares}; {machine(found)}."
    )
    if found["conventions"]["latency_context"] == "random":
        note += " Random keys and values stand in for a prefilled context."
    title = f"Attention latency and cache memory against ratio: {found['label']}"
    data = [{key: row[key] for key in keys} for row in rows]
    return Chart(slug("efficiency", found["name"], "latency"), title, panels, title, data, note)
