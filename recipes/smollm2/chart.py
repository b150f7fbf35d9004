"""Draw what small caches keep of SmolLM2's answers, from stored results of `restorekv eval --json`.

    python recipes/smollm2/chart.py paper/results/smollm2-scores.json     # make charts

Writes docs/charts/smollm2.svg, which the README shows, and the table between two marks of
docs/evaluation.md. The chart has a panel for each benchmark: score against the share of the full
cache's bytes that is held, chat prefix included, for an evictor alone and with its restore adapter.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from restorekv.files import read_json, replace_file

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "charts" / "smollm2.svg"
PAGE = ROOT / "docs" / "evaluation.md"
BEGIN = "<!-- made by `make charts` -->"
END = "<!-- end -->"
NAMES = {
    "kvzip": "KVzip",
    "kvzip+": "KVzip+",
    "fastkvzip": "Fast KVzip",
    "snapkv": "SnapKV",
    "h2o": "H2O",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smollm2",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d5dae1",
    "axes.titlelocation": "left",
}
# Restored, color, marker, side of its intervals.
LOOKS = ((False, "#d55e00", "s", -1), (True, "#0072b2", "o", 1))
Row = Mapping[str, object]


def evictor(row: Row) -> str:
    """Returns the name of the evictor of a row, without settings."""
    return str(row["method"]).partition(":")[0]


def titles(result: Mapping) -> dict[str, str]:
    """Returns what each benchmark of the rows is called."""
    facts = [cell["benchmark"] for cell in result["facts"].values()]
    return {
        row["benchmark"]: next(
            (fact["title"] for fact in facts if fact["title"].lower() == name), name
        )
        for row in result["rows"]
        for name in [row["benchmark"].partition(":")[0]]
    }


def full_cache(result: Mapping, benchmark: str) -> Row:
    """Returns the row of the full cache."""
    return next(
        row for row in result["rows"] if row["benchmark"] == benchmark and row["method"] == "full"
    )


def small_caches(result: Mapping, benchmark: str, name: str, restored: bool) -> list[Row]:
    """Returns an evictor's rows, the smallest cache first."""
    rows = [
        row
        for row in result["rows"]
        if (row["benchmark"], row["restored"]) == (benchmark, restored)
    ]
    return sorted((row for row in rows if evictor(row) == name), key=lambda row: row["ratio"])


def draw(result: Mapping, name: str, path: Path) -> None:
    """Writes the chart of one evictor as an SVG on white, which reads in light and dark themes."""
    benchmarks = titles(result)
    with rc_context(STYLE):
        figure = Figure(
            figsize=(4.6 * len(benchmarks), 3.9), layout="constrained", facecolor="white"
        )
        places = figure.subplots(1, len(benchmarks), squeeze=False)[0]
        for axes, benchmark in zip(places, benchmarks, strict=True):
            full = full_cache(result, benchmark)
            label = f"full cache, {megabytes(full)} MB"
            axes.axhline(full["score"], color="#1d2530", linestyle="--", label=label)
            for restored, color, marker, side in LOOKS:
                rows = small_caches(result, benchmark, name, restored)
                share = [100 * row["kept_with_prefix"] for row in rows]
                label = f"{NAMES.get(name, name)} {'restored' if restored else 'alone'}"
                axes.plot(
                    share, [row["score"] for row in rows], color=color, marker=marker, label=label
                )
                apart = [x + 0.06 * side for x in share]
                axes.vlines(
                    apart,
                    [row["low"] for row in rows],
                    [row["high"] for row in rows],
                    color=color,
                    alpha=0.4,
                )
            axes.set(ylim=(0, None), xlabel="memory held, % of the full cache", ylabel="score")
            axes.set_title(benchmarks[benchmark])
            axes.legend(loc="lower right", frameon=False, fontsize=10)
        with replace_file(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


def table(result: Mapping) -> str:
    """Returns the figures as a Markdown table: for each benchmark, evictor and ratio, alone and
    restored.
    """
    lines = [
        "| benchmark | evictor | r | MB | score alone | restored | KL alone | restored |",
        "|---" * 8 + "|",
    ]
    for benchmark, title in titles(result).items():
        full = full_cache(result, benchmark)
        cells = [
            f"{title}, {full['samples']} texts",
            "full cache",
            1,
            megabytes(full),
            f"{full['score']:.1f}",
            "",
            0,
            "",
        ]
        lines.append(joined(cells))
        for name in dict.fromkeys(
            evictor(row) for row in result["rows"] if row["method"] != "full"
        ):
            restored = {row["ratio"]: row for row in small_caches(result, benchmark, name, True)}
            for row in reversed(small_caches(result, benchmark, name, False)):
                ours = restored.get(row["ratio"])
                scores = [f"{each['score']:.1f}" if each else "" for each in (row, ours)]
                spreads = [divergence(each) if each else "" for each in (row, ours)]
                lines.append(
                    joined(
                        ["", NAMES.get(name, name), row["ratio"], megabytes(row), *scores, *spreads]
                    )
                )
    return "\n".join(lines)


def joined(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.1f}"


def divergence(row: Row) -> str:
    """Returns KL with its 95 % interval."""
    return f"{row['kl']:.3f} ({row['kl_low']:.3f} to {row['kl_high']:.3f})"


def fill(page: Path, text: str) -> None:
    """Puts a text between the two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    with replace_file(page) as temporary:
        temporary.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(args: Sequence[str] | None = None) -> None:
    """Draws the chart and fills the page's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="What `restorekv eval --json` wrote.")
    parser.add_argument(
        "--evictor", default="kvzip", help="The evictor of the chart; the table has all."
    )
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(args)
    result = read_json(given.result, str(given.result))
    draw(result, given.evictor, given.chart)
    fill(given.page, table(result))


if __name__ == "__main__":
    main()
