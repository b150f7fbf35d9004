"""What 8 bits a number and streaming cost in answers: python -m benchmarks.accuracy [DOCUMENTS
[FOLDER]].

Documents of the tiny suite, compressed by KVzip with the tiny model in float32 and its restore
adapter: held in float32, int8 and fp8 from one preparation, and streamed in parts of PART tokens
(documents of at most PART tokens go the plain way). Cells of a grid like any other: FOLDER is a run
that `restorekv report` reads, and one that was stopped goes on. Scores are means over families x
100; a difference is paired with the same questions of the plain way, its interval a 95 % bootstrap
over documents.
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
    """Return the cell of every variant at every ratio, the plain ones first."""
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
    """Answer what the folder does not hold yet, and return all results."""
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
        # A few contexts have no interval.
        if gain and found["gain_low"] is not None:
            gain += f" [{found['gain_low']:+.1f}, {found['gain_high']:+.1f}]"
        text += f"| {name} | {ratio} | {found['score']:.1f} | {gain} | {share:.3f} |\n"
    return text


def main(documents: str = "52", folder: str = "runs/accuracy") -> None:
    """Print the table, or a mistake in one sentence."""
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
