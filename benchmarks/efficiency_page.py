"""Charts and a table of what `python -m benchmarks efficiency` measured, and their page."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.efficiency import FOLDER
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts
from restorekv.evaluation.charts import Axis, Chart, Line, Mark, Panel
from restorekv.evaluation.report import page
from restorekv.evaluation.report.analyses import BASE, RESTORED, explained, read
from restorekv.evaluation.report.page import Block, Section
from restorekv.evaluation.tables import UNKNOWN, Table, evictor_name, number, percent, slug

PHASES = {
    "prefill": Mark("prefill", charts.MUTED),
    "score": Mark("scoring", charts.SKY, hatch="//"),
    "restore": Mark("restore pass", charts.VERMILION, hatch="xx"),
    "evict": Mark("eviction", charts.GREEN, hatch=".."),
}
INTRO = (
    "Compressing happens once a context: prefill, scoring, the restore pass, eviction. Afterwards every step of an "
    "answer attends to what is left, and a restored cache holds as many pairs as the base's."
)


def write(folder: Path) -> Path:
    """Writes a page of all machines that were measured, to DIR/efficiency/page, and returns it."""
    blocks: list[Block] = []
    for found in read(folder / FOLDER):
        blocks += [compression(found), costs(found), latency(found), explained(found)]
    if not blocks:
        raise RestoreKVError(f"{folder / FOLDER} holds no figures; measure some, without --page.")
    return page.write(folder / FOLDER / "page", "Cost of compressing", [Section("Efficiency", INTRO, blocks)])


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
    panel = charts.bars(charts.Bars(labels, parts, [[f"{row['seconds']['total']:.3g} s" for row in rows]]), "seconds")
    data = [
        {"evictor": row["evictor"], "restored": row["restored"], **row["seconds"], "peak": row["peak"]} for row in rows
    ]
    note = f"Seconds, median of {found['conventions']['repeat']} runs, by phase; {machine(found)}."
    return Chart(slug("efficiency", found["name"], "time"), title, [panel], title, data, note)


def costs(found: Mapping) -> Table:
    rows = {(row["evictor"], row["restored"]): row for row in found["compression"]}
    data = [
        {
            "evictor": evictor, **more, "base_peak": rows[evictor, False]["peak"],
            "restored_peak": rows[evictor, True]["peak"],
        }
        for evictor, more in found["overhead"].items()
    ]  # fmt: skip
    columns = {
        "method": lambda row: evictor_name(row["evictor"]),
        "adapter": lambda row: rows[row["evictor"], True]["adapter"] or UNKNOWN,
        "restore pass": lambda row: f"{number(1000 * row['seconds'])} ms",
        "of the base's time": lambda row: percent(row["share"], 2),
        "peak memory, base": lambda row: megabytes(row["base_peak"]),
        "peak memory, restored": lambda row: megabytes(row["restored_peak"]),
        "difference": lambda row: megabytes(row["peak"]),
        "of the base's peak": lambda row: percent(row["peak_share"], 2),
    }
    note = (
        "Peak memory is what comes on top of the loaded model; – where the system does not tell. A random adapter "
        "costs what a trained one does."
    )
    title = f"What the restore pass adds: {found['label']}"
    return Table.of(slug("efficiency", found["name"], "cost"), title, data, columns, note, left=(0, 1))


def megabytes(size: float | None) -> str:
    return UNKNOWN if size is None else f"{number(size / 1e6)} MB"


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
    x = charts.ratio_axis({row["ratio"] for row in rows})
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
