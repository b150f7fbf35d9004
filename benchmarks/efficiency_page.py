"""The page of what `python -m benchmarks efficiency` measured, with its charts and table."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.efficiency import FOLDER
from benchmarks.panels import Panel, make_bars, make_chart
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts
from restorekv.evaluation.charts import Chart, Mark, plot_line, set_ratio_axis
from restorekv.evaluation.report import Block, Section, write_page
from restorekv.evaluation.results import flatten_identity
from restorekv.evaluation.tables import (
    UNKNOWN,
    Table,
    format_number,
    format_percent,
    make_slug,
    name_evictor,
)
from restorekv.files import read_json

BASE = Mark("base alone", charts.VERMILION, "o", dashed=True, hollow=True)
RESTORED = Mark("restored", charts.BLUE, "o")
PHASES = {
    "prefill": Mark("prefill", charts.MUTED),
    "score": Mark("scoring", charts.SKY, hatch="//"),
    "restore": Mark("restore pass", charts.VERMILION, hatch="xx"),
    "evict": Mark("eviction", charts.GREEN, hatch=".."),
}
INTRO = (
    "Compressing happens once a context: prefill, scoring, the restore pass, eviction. Afterwards "
    "every step of an "
    "answer attends to what is left, and a restored cache holds as many pairs as the base's."
)


def write_efficiency_page(folder: Path) -> Path:
    """Write a page of everything measured in `folder` to FOLDER/efficiency/page; return
    its path.
    """
    blocks: list[Block] = []
    for found in load_results(folder / FOLDER):
        blocks += [
            draw_compression(found),
            list_costs(found),
            draw_latency(found),
            explain_result(found),
        ]
    if not blocks:
        raise RestoreKVError(f"{folder / FOLDER} holds no figures; measure some, without --page.")
    return write_page(
        folder / FOLDER / "page", "Cost of compressing", [Section("Efficiency", INTRO, blocks)]
    )


def load_results(folder: Path) -> list[dict]:
    """Load all results in a folder, sorted by file name."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = read_json(path, str(path))
            named = {
                "name": make_slug(path.stem),
                "conventions": file["conventions"],
                "label": file["label"],
            }
            results.append({**file, **named})
        except (ValueError, TypeError, KeyError) as error:
            raise RestoreKVError(
                f"{path} is no result of restorekv ({error}); remove it."
            ) from error
    return results


def explain_result(found: Mapping) -> Section:
    """Return a section with the definitions and conventions that the file states."""
    conventions = [
        f"{key} {value}" for key, value in flatten_identity(found["conventions"]).items()
    ]
    definitions = [f"{key}: {words}" for key, words in found["definitions"].items()]
    return Section(
        f"Definitions and conventions: {found['label']}",
        blocks=[definitions, "; ".join(conventions) + "."],
    )


def describe_machine(found: Mapping) -> str:
    made = found["conventions"]
    threads = f"{made['threads']} thread{'s' if made['threads'] != 1 else ''}"
    return f"{made['model']} on {made['machine']}, {threads}, T = {made['tokens']:,} tokens"


def draw_compression(found: Mapping) -> Chart:
    """Return a chart of two bars for each evictor, alone and restored, stacked by phase."""
    rows = found["compression"]
    title = f"Time to compress a context: {found['label']}"
    labels = [name_evictor(row["evictor"]) + " + RestoreKV" * row["restored"] for row in rows]
    parts = {mark: [row["seconds"][phase] for row in rows] for phase, mark in PHASES.items()}
    totals = [f"{row['seconds']['total']:.3g} s" for row in rows]
    panel = make_bars("", "seconds", labels, parts, [totals], stacked=True, width=charts.WIDE)
    data = [
        {
            "evictor": row["evictor"],
            "restored": row["restored"],
            **row["seconds"],
            "peak": row["peak"],
        }
        for row in rows
    ]
    repeat = found["conventions"]["repeat"]
    note = f"Seconds, median of {repeat} runs, by phase; {describe_machine(found)}."
    return make_chart(make_slug("efficiency", found["name"], "time"), title, [panel], note, data)


def list_costs(found: Mapping) -> Table:
    rows = {(row["evictor"], row["restored"]): row for row in found["compression"]}
    data = [
        {
            "evictor": evictor,
            **more,
            "base_peak": rows[evictor, False]["peak"],
            "restored_peak": rows[evictor, True]["peak"],
        }
        for evictor, more in found["overhead"].items()
    ]
    columns = {
        "method": lambda row: name_evictor(row["evictor"]),
        "adapter": lambda row: rows[row["evictor"], True]["adapter"] or UNKNOWN,
        "restore pass": lambda row: f"{format_number(1000 * row['seconds'])} ms",
        "of the base's time": lambda row: format_percent(row["share"], 2),
        "peak memory, base": lambda row: format_megabytes(row["base_peak"]),
        "peak memory, restored": lambda row: format_megabytes(row["restored_peak"]),
        "difference": lambda row: format_megabytes(row["peak"]),
        "of the base's peak": lambda row: format_percent(row["peak_share"], 2),
    }
    note = (
        "Peak memory is what comes on top of the loaded model; – where the system does not tell. A "
        "random adapter "
        "costs what a trained one does."
    )
    title = f"What the restore pass adds: {found['label']}"
    return Table.from_figures(
        make_slug("efficiency", found["name"], "cost"), title, data, columns, note, left=(0, 1)
    )


def format_megabytes(size: float | None) -> str:
    return UNKNOWN if size is None else f"{format_number(size / 1e6)} MB"


def draw_latency(found: Mapping) -> Chart:
    """Return a chart of milliseconds and bytes against r, base and restored."""
    rows = found["latency"]
    most = max(row["bytes"] for row in rows)
    size, unit = next(
        (size, unit)
        for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
        if most >= size or size == 1e3
    )

    def draw(axes: Axes, what: str, label: str, scale: float) -> None:
        for mark, restored in ((BASE, False), (RESTORED, True)):
            mine = [row for row in rows if row["restored"] == restored]
            if mine:
                spread = ([row["least"] for row in mine], [row["most"] for row in mine])
                interval = spread if what == "milliseconds" else None
                plot_line(
                    axes,
                    mark,
                    [row["ratio"] for row in mine],
                    [row[what] / scale for row in mine],
                    interval,
                )
        set_ratio_axis(axes, {row["ratio"] for row in rows})
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)

    panels = [
        Panel(
            "Attention latency",
            lambda axes: draw(axes, "milliseconds", "milliseconds a layer and step", 1),
        ),
        Panel("Cache memory", lambda axes: draw(axes, "bytes", f"cache ({unit})", size)),
    ]
    keys = (
        "ratio",
        "restored",
        "milliseconds",
        "least",
        "most",
        "bytes",
        "pairs",
        "restore_tokens",
    )
    shares = ", ".join(
        f"r = {ratio}: {value:.3f}" for ratio, value in found["latency_ratio"].items()
    )
    note = (
        "Latency: one decoding step's attention in one layer, median and range. Memory: bytes of "
        "the whole cache. "
        f"Latency restored over base: {shares}; {describe_machine(found)}."
    )
    if found["conventions"]["latency_context"] == "random":
        note += " Random keys and values stand in for a prefilled context."
    title = f"Attention latency and cache memory against ratio: {found['label']}"
    data = [{key: row[key] for key in keys} for row in rows]
    return make_chart(make_slug("efficiency", found["name"], "latency"), title, panels, note, data)
