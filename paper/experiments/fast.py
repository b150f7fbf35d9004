"""A learned scorer at 16x."""

from __future__ import annotations

from paper.experiment import Comparison, above, alone, own, ruler
from paper.experiments.methods import restored
from paper.setting import Setting

TIGHT = ruler(0.0625)


def experiment(setting: Setting) -> Comparison:
    """Fast KVzip alone and restored, and KVzip."""
    fast = "fastkvzip"
    better = restored("fastkvzip")
    return Comparison(
        name="fast-kvzip",
        number="Figure A",
        label="fig:a",
        title="RestoreKV with Fast KVzip at 16x",
        backbone="Qwen3-8B",
        rows={
            "kvzip": alone("kvzip", {TIGHT: 59.0}),
            fast: alone(fast, {TIGHT: 46.7}),
            better: own(fast, {TIGHT: 79.3}),
        },
        places=(TIGHT,),
        claims=(
            above("kvzip", fast, TIGHT, "KVzip is above Fast KVzip"),
            above(better, fast, TIGHT, "restoring Fast KVzip helps"),
            above(better, "kvzip", TIGHT, "Fast KVzip restored is above KVzip"),
        ),
        against={better: fast},
        orders=True,
    )
