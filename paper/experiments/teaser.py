"""Figure 1: RULER against the compression rate, as the KVPress Benchmark counts it."""

from __future__ import annotations

from paper.experiment import (
    Claim,
    Comparison,
    claim_above,
    list_places,
    make_full_row,
    make_restored_row,
    make_ruler_place,
)
from paper.experiments.methods import make_pair, name_restored_row
from paper.setting import Setting

RATIOS = (0.5, 0.25, 0.125, 0.0625)  # 2x, 4x, 8x, 16x
WHERE = list_places("ruler", RATIOS)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of both evictors that the paper builds its own method on.

    The paper's source states only one point of the figure.
    """
    mild = make_ruler_place(0.5)
    tight = make_ruler_place(0.0625)
    better = name_restored_row("kvzip+")
    rows = {"full": make_full_row(), **make_pair("kvzip"), **make_pair("kvzip+")}
    rows[better] = make_restored_row("kvzip+", {tight: 86.4})
    near = {("kvzip+", mild): 1, ("full", mild): -1}
    away = {("full", tight): 1, ("kvzip+", tight): -1, ("full", mild): -1, ("kvzip+", mild): 1}
    half = {(better, tight): 1, ("kvzip+", tight): -0.5, ("full", tight): -0.5}
    return Comparison(
        name="teaser",
        number="Figure 1",
        label="fig:teaser",
        title="RULER against compression",
        backbone="a backbone that the paper does not name, in kvpress",
        rows=rows,
        places=WHERE,
        claims=(
            Claim("KVzip+ is within 5 points of the full cache at 2x", near, 5),
            Claim("KVzip+ loses more at 16x than at 2x", away),
            claim_above(better, "kvzip+", tight, "restoring KVzip+ helps"),
            Claim("restoring KVzip+ brings back more than half of what it loses at 16x", half),
        ),
        against={name_restored_row(evictor): evictor for evictor in ("kvzip", "kvzip+")},
        note="Compression of 2x, 4x, 8x and 16x is r = 0.5, 0.25, 0.125 and 0.0625.",
        chart=True,
    )
