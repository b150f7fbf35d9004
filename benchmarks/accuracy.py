"""How much 8-bit caches and streaming cost in the quality of answers: python -m benchmarks.accuracy
[DOCUMENTS [FOLDER]].

KVzip compresses documents of the tiny suite with the tiny model in float32 and its restore adapter.
Each cache is held in float32, int8 and fp8, all from one preparation; a last variant streams the
document in parts of PART tokens. Documents of at most PART tokens are not streamed. The variants
are cells of an ordinary grid: `restorekv report` reads FOLDER, and a run that was stopped continues
there. Scores are means over families x 100. Differences are to the float32 cache, paired by
question, with a 95 % bootstrap interval over documents.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from restorekv.cache.quantized import KV_DTYPES
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import Result
from restorekv.evaluation.run import GridProgress, LocalPool, run_grid
from restorekv.evaluation.stats import summarize_scores
from restorekv.model.names import TINY

RATIOS = ("0.2", "0.05")
PART = 512


class Changes(TypedDict, total=False):
    """Fields of a cell that a variant sets."""

    kv_dtype: str
    streaming_chunk: int


VARIANTS: dict[str, Changes] = {kv_dtype: {"kv_dtype": kv_dtype} for kv_dtype in KV_DTYPES}
VARIANTS[f"streaming {PART}"] = {"streaming_chunk": PART}
Key = tuple[str, str]  # variant, ratio


def list_cells(documents: int) -> dict[Key, Cell]:
    """Return the cell of every variant at every ratio, the unquantized ones first."""
    cells = {}
    for name, changed in VARIANTS.items():
        for ratio in RATIOS:
            cells[name, ratio] = Cell(
                model=TINY,
                benchmark=f"tiny:count={documents}",
                evictor="kvzip",
                ratio=ratio,
                adapter="auto",
                dtype="float32",
                prefix_policy="free",
                **changed,
            )
    return cells


def measure_accuracy(
    documents: int, folder: Path, progress: Callable[[str], None] = lambda text: None
) -> dict[Key, Result]:
    """Run the cells that the folder does not hold yet, and return all results."""
    wanted = list_cells(documents)

    def tell(told: GridProgress) -> None:
        progress(f"{told.what}: {told.share:.0%}")

    done = {
        result.cell: result for result in run_grid(list(wanted.values()), folder, LocalPool(), tell)
    }
    return {key: done[cell] for key, cell in wanted.items()}


def format_table(results: dict[Key, Result]) -> str:
    """Return a table with a row for every variant and ratio."""
    text = "| variant | r | score | difference | bytes held of plain |\n|---|---|---|---|---|\n"
    for (name, ratio), result in results.items():
        plain = results[KV_DTYPES[0], ratio]
        found = summarize_scores(result.answers, plain.answers)
        share = result.summary["bytes"] / plain.summary["bytes"]
        gain = "" if result is plain else f"{found['gain']:+.1f}"
        # There is no interval if there are too few contexts.
        if gain and found["gain_low"] is not None:
            gain += f" [{found['gain_low']:+.1f}, {found['gain_high']:+.1f}]"
        text += f"| {name} | {ratio} | {found['score']:.1f} | {gain} | {share:.3f} |\n"
    return text


def main(documents: str = "52", folder: str = "runs/accuracy") -> None:
    """Print the table; exit with a one-sentence message if something is wrong."""
    warnings.simplefilter("ignore", RestoreKVWarning)
    try:
        if not documents.isdecimal():
            raise RestoreKVError(f"DOCUMENTS is a number, not {documents!r}.")
        found = measure_accuracy(
            int(documents), Path(folder), lambda told: print(told, file=sys.stderr, flush=True)
        )
    except RestoreKVError as error:
        sys.exit(f"error: {error}")
    print(format_table(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
