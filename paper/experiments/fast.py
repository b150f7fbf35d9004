"""Figure A: a learned scorer, Fast KVzip, at a compression of 16x."""

from __future__ import annotations

from paper.experiment import (
    Comparison,
    claim_above,
    make_base_row,
    make_restored_row,
    make_ruler_place,
)
from paper.experiments.methods import name_restored_row
from paper.setting import Setting

TIGHT = make_ruler_place(0.0625)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of Fast KVzip, alone and restored, with KVzip."""
    fast = "fastkvzip"
    better = name_restored_row("fastkvzip")
    return Comparison(
        name="fast-kvzip",
        number="Figure A",
        label="fig:a",
        title="RestoreKV with Fast KVzip at 16x",
        backbone="Qwen3-8B",
        rows={
            "kvzip": make_base_row("kvzip", {TIGHT: 59.0}),
            fast: make_base_row(fast, {TIGHT: 46.7}),
            better: make_restored_row(fast, {TIGHT: 79.3}),
        },
        places=(TIGHT,),
        claims=(
            claim_above("kvzip", fast, TIGHT, "KVzip is above Fast KVzip"),
            claim_above(better, fast, TIGHT, "restoring Fast KVzip helps"),
            claim_above(better, "kvzip", TIGHT, "Fast KVzip restored is above KVzip"),
        ),
        against={better: fast},
        orders=True,
    )
