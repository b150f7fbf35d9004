"""Find the ratio above which restoring does harm on each benchmark, from runs of `restorekv eval`.

    python -m recipes.smollm2.scores runs/scores --benchmark ruler:length=1024,per_task=5
    python -m recipes.smollm2.border runs/scores --json paper/results/smollm2-border.json

A run of `restorekv eval --evictor kvzip@none --evictor kvzip@FOLDER --prefix-policy free --out`
with other ratios and benchmarks can be used as well.

For every ratio, the evictor's divergence from the full cache is compared with and without
restoring, context by context. Restoring does harm if the 95 % interval of the difference is above
zero, and helps if it is below. The script writes the JSON file, and the table between two marks of
docs/evaluation.md. Without runs, it makes the table again from the JSON file.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.pages import fill_page
from recipes.run import make_parser, run_recipe
from restorekv.compression.budget import parse_ratio
from restorekv.evaluation.compare import compare_results
from restorekv.evaluation.results import Result, load_results
from restorekv.files import read_json, write_json

ROOT = Path(__file__).parents[2]
STORED = ROOT / "paper" / "results" / "smollm2-border.json"
PAGE = ROOT / "docs" / "evaluation.md"
BEGIN = "<!-- made by recipes/smollm2/border.py -->"
END = "<!-- end of the border -->"


def compare_cells(alone: Result, restored: Result) -> dict[str, Any]:
    """Return the divergences of two cells with the same contexts, and their paired difference.

    Contexts that only one of them has answered so far are left out, with a warning.
    """
    found = compare_results(alone, restored)
    return {
        "benchmark": alone.cell.benchmark,
        "title": alone.identity["benchmark"]["title"],
        "evictor": alone.cell.evictor,
        "ratio": float(parse_ratio(alone.cell.ratio)),
        "contexts": found["contexts"],
        "questions": found["questions"],
        "kl_alone": found["kl_first"],
        "kl_restored": found["kl_second"],
        "difference": found["kl_gain"],
        "difference_low": found["kl_low"],
        "difference_high": found["kl_high"],
    }


def compare_all(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for every pair of cells that differ only in restoring."""
    cells: dict[tuple[str, str, str], dict[bool, Result]] = {}
    for result in results:
        if result.cell.evictor == "full":
            continue
        key = (result.cell.benchmark, result.cell.evictor, result.cell.ratio)
        pair = cells.setdefault(key, {})
        is_restored = result.cell.adapter is not None
        if is_restored in pair:
            # They differ in dtype, prefix policy or restore tokens, so pairs would be ambiguous.
            raise SystemExit(
                f"{pair[is_restored].folder.name} and {result.folder.name} differ in more than "
                "restoring; measure each in a folder of its own."
            )
        pair[is_restored] = result
    rows = [compare_cells(pair[False], pair[True]) for pair in cells.values() if len(pair) == 2]
    return sorted(rows, key=lambda row: (row["title"], -row["ratio"]))


def describe_effect(row: Mapping) -> str:
    """Return what restoring does at a row's ratio."""
    if row["difference_low"] is None:
        return "too few texts"
    if row["difference_low"] > 0:
        return "harms"
    if row["difference_high"] < 0:
        return "helps"
    return "within noise"


def make_table(rows: Sequence[Mapping]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| texts | r | KL alone | restored | difference, 95 % interval | restoring |",
        "|---|---|---|---|---|---|",
    ]
    previous = None
    for row in rows:
        name = f"{row['title']}, {row['contexts']} texts"
        interval = "not known"
        if row["difference_low"] is not None:
            interval = f"{row['difference_low']:+.3f} to {row['difference_high']:+.3f}"
        cells = [
            name if name != previous else "",
            f"{row['ratio']:g}",
            f"{row['kl_alone']:.3f}",
            f"{row['kl_restored']:.3f}",
            f"{row['difference']:+.3f} ({interval})",
            describe_effect(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        previous = name
    return "\n".join(lines)


def write_comparison(results: Sequence[Result], path: Path) -> None:
    """Write the comparison; `path` keeps its rows of other benchmarks if the conditions
    are the same.
    """
    made_with = next(result.identity for result in results if result.cell.adapter is not None)
    conventions = {
        name: made_with[name]
        for name in ("model", "fingerprint", "prefix_policy", "dtype", "versions")
    }
    adapter = made_with["adapter"]["hash"]
    rows = compare_all(results)
    if path.exists():
        former = read_json(path, str(path))
        # Versions of libraries may differ, because rows can come from several days.
        same = ("fingerprint", "prefix_policy", "dtype")
        if former["adapter"] == adapter and all(former[each] == made_with[each] for each in same):
            # A benchmark with other settings replaces the former one.
            here = {row["title"] for row in rows}
            rows += [row for row in former["rows"] if row["title"] not in here]
    rows.sort(key=lambda row: (str(row["title"]), -float(str(row["ratio"]))))
    write_json(path, {**conventions, "adapter": adapter, "rows": rows})


def main(args: Sequence[str] | None = None) -> None:
    """Compare runs, store the comparison and fill the page's table."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="*", help="Folders that `restorekv eval --out` wrote."
    )
    parser.add_argument("--json", type=Path, default=STORED)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(args)
    if given.runs:
        results = [result for folder in given.runs for result in load_results(folder)]
        write_comparison([result for result in results if result.done], given.json)
    rows = read_json(given.json, str(given.json))["rows"]
    fill_page(given.page, BEGIN, END, make_table(rows))
    print(json.dumps({"rows": len(rows), "page": str(given.page)}))


if __name__ == "__main__":
    run_recipe(main)
