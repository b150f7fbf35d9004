"""Table 1 of the paper in small: every base method alone and with its restore adapter, on four groups of tasks.

    python recipes/bundled/table1.py runs/table1 [--count 156]          (resumes: a finished method is not run again)

Writes FOLDER/<method>.json (rows, conventions and every answer), docs/results/table1.json and docs/table1.md. Fast
KVzip is also asked at r = 1/16, the ratio of the paper's appendix.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from restorekv import compression
from restorekv.atomic import replacing, write_json
from restorekv.bundled.suite import documents
from restorekv.compression import load_adapter
from restorekv.errors import RestoreKVError
from restorekv.evaluate import evaluate
from restorekv.groups import markdown, verdict
from restorekv.models import load_model
from restorekv.tables import payload

DOCS = Path(__file__).parents[2] / "docs"
METHODS = ("kvzip", "kvzip+", "contrastkv", "snapkv", "h2o")
FURTHER = {
    "fastkvzip": "Fast KVzip, a learned scorer",
    "contrastkv-simple": "ContrastKV as RestoreKV's authors simplified it",
}
SYNTHESISED = "am-fast"
RATIOS, SIXTEENTH = (0.2, 0.1, 0.05), 0.0625
INTRO = """# Table 1 in small

`make table1`: the bundled model on {documents} held-out documents of the bundled suite, each base method alone and with
the restore adapter that ships for it, under the same exact budget. A cell is the mean over the group's families of
questions with a 95 % bootstrap over documents; behind a restored cell stands its paired gain. Prefix policy {policy},
allocation {allocation}, {dtype}, greedy. Rows with every convention: [results/table1.json](results/table1.json).

Five methods, four groups, three ratios: {verdict} (The paper: 59 of 60, on Qwen3-4B and real benchmarks.)
"""


def measure(folder: Path, method: str, count: int) -> dict:
    """The method's rows, from the file of an earlier run with the same documents if there is one."""
    path = folder / f"{method}.json"
    model, tokenizer = load_model("bundled")
    adapter = load_adapter(model, "auto", compression.method(method))
    if adapter is None and method != SYNTHESISED:
        raise RestoreKVError(f"No adapter for {method} ships; train it with recipes/bundled/adapters.py.")
    if path.exists():
        found = json.loads(path.read_text())
        told = found["conventions"]
        if (told["documents"], told["adapters"][method]) != (count, adapter and adapter.identity()):
            raise RestoreKVError(f"{path} is of other documents or another adapter; choose another folder.")
        return found
    begun = time.perf_counter()

    def show(done: int, total: int) -> None:
        if done % 13 == 0 or done == total:
            left = (time.perf_counter() - begun) / done * (total - done)
            print(f"{method}: document {done} of {total}, {left:.0f} s to go", flush=True)

    ratios = (*RATIOS, SIXTEENTH) if method == "fastkvzip" else RATIOS
    result = payload(evaluate(model, tokenizer, documents(tokenizer, count), {method: adapter}, ratios, progress=show))
    write_json(path, result)
    return result


def main() -> None:
    """All methods, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=156)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {method: measure(options.folder, method, options.count) for method in (*METHODS, *FURTHER, SYNTHESISED)}
    full, conventions = found["kvzip"]["rows"][0], found["kvzip"]["conventions"]
    rows = {method: [row for row in each["rows"] if row["evictor"] != "full"] for method, each in found.items()}
    five = [row for method in METHODS for row in rows[method]]
    text = INTRO.format(
        documents=options.count, policy=conventions["prefix_policy"], allocation=conventions["allocation"],
        dtype=conventions["dtype"], verdict=verdict(five, RATIOS),
    )  # fmt: skip
    text += f"\n## Five base methods\n\n{markdown([full, *five], RATIOS)}"
    for method, title in FURTHER.items():
        ratios = sorted({row["ratio"] for row in rows[method]}, reverse=True)
        text += f"\n## {title}\n\n{verdict(rows[method], ratios)}\n\n{markdown([full, *rows[method]], ratios)}"
    beside = [row for row in rows["kvzip+"] if row["restored"]] + rows[SYNTHESISED]
    text += f"\n## Attention Matching, a synthesised cache\n\n{markdown([full, *beside], RATIOS)}"
    kept = {"rows": [full, *(row for each in rows.values() for row in each)]}
    kept["conventions"] = {method: each["conventions"] for method, each in found.items()}
    write_json(DOCS / "results" / "table1.json", kept)
    with replacing(DOCS / "table1.md") as path:
        path.write_text(text)


if __name__ == "__main__":
    main()
