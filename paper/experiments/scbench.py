"""Figure B: contexts longer than those that adapters are trained on."""

from __future__ import annotations

from paper.experiment import (
    FOUR,
    Comparison,
    claim_above,
    list_places,
    make_base_row,
    make_full_row,
    make_points,
    make_restored_row,
)
from paper.experiments.methods import name_restored_row
from paper.setting import Setting

WHERE = list_places("scbench", FOUR)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of averages over tasks; the paper's source has no figures for single
    tasks.
    """
    better = name_restored_row("kvzip")
    return Comparison(
        name="scbench",
        number="Figure B",
        label="fig:scbench",
        title="SCBench: contexts longer than those trained on",
        backbone="Qwen3-4B",
        rows={
            "full": make_full_row(),
            "kvzip": make_base_row("kvzip", make_points(WHERE, 29.4, 31.6, 30.0, 24.1)),
            better: make_restored_row("kvzip", make_points(WHERE, 29.7, 33.1, 32.4, 25.6)),
        },
        places=WHERE,
        claims=tuple(
            claim_above(better, "kvzip", place, "restoring raises the average") for place in WHERE
        ),
        against={better: "kvzip"},
        chart=True,
    )
