"""Table E: what the adapters are trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paper.recipe import CONTEXTS, LONGEST, SHORTEST
from paper.scores import JudgedClaim
from paper.setting import Setting
from paper.study import Study
from restorekv.data.mixture import read_mixture
from restorekv.data.table import compute_figures
from restorekv.evaluation.report import Block
from restorekv.evaluation.tables import Table

MIXTURE = Path(__file__).parents[1] / "mixture.json"  # written by recipes/tiny/mixture.py
COLUMNS = ("samples", "mean", "shortest", "longest")


def make_experiment(setting: Setting) -> Study:
    note = "Tokens of the context. "
    if setting.tiny:
        note += (
            "Here: the mixture that `restorekv data build` makes for the tiny model of made-up "
            "texts in the formats "
            "of the sources (paper/results/data-table.md). The tiny adapters are trained on "
            "something else: "
            f"{CONTEXTS} documents of the tiny world of {SHORTEST} to {LONGEST:,} tokens with all "
            "their questions."
        )
    else:
        note += "Here: the mixture given as --data."
    return Study(
        "training-data",
        "Table E",
        "tab:traindata",
        "Training data",
        "Qwen3's tokenizer",
        _show,
        note=note,
    )


def _show(setting: Setting, out: Path) -> tuple[Sequence[Block], Sequence[JudgedClaim]]:
    """Return a table with a row for each source and one for the total."""
    rows = _count_rows(setting)
    if not rows:
        return [
            "There is no mixture; make one with `restorekv data build` and give its folder as "
            "--data."
        ], []
    lines = [
        [
            row["title"],
            *(text for key in COLUMNS for text in (f"{row[key]:,.0f}", f"{row['paper'][key]:,}")),
        ]
        for row in rows
    ]
    head = ["source", *(f"{key}, {whose}" for key in COLUMNS for whose in ("here", "paper"))]
    return [Table("training-data-sources", "Samples and tokens of their contexts", head, lines)], []


def _count_rows(setting: Setting) -> list[dict]:
    """Return the rows of the table as `restorekv.data.table` computes them; none without
    a mixture.
    """
    data = setting.setup.data
    if data is not None and data.is_dir():
        return compute_figures(*read_mixture(data))
    return (
        json.loads(MIXTURE.read_text(encoding="utf-8"))["rows"]
        if setting.tiny and MIXTURE.exists()
        else []
    )
