"""Table G: how much the training seed changes the scores."""

from __future__ import annotations

from paper.experiment import (
    FOUR,
    Claim,
    Comparison,
    claim_above,
    list_places,
    make_points,
    make_ruler_place,
)
from paper.experiments.common import add_columns, make_base, make_restored
from paper.setting import Setting

WHERE = list_places("ruler", FOUR)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of the method, trained with several seeds, with its evictor alone."""
    tight = make_ruler_place(0.05)
    std = make_points(WHERE, 0.04, 0.11, 0.51, 0.57)
    sixtieth = {("full", tight): 1 / 60, ("base", tight): -1 / 60}
    steady = [
        Claim(
            f"the seeds' deviation is below 0.6 points at r = {place.ratio:g}",
            {},
            0.6,
            ("full", place),
        )
        for place in WHERE
    ]
    return Comparison(
        name="seeds",
        number="Table G",
        label="tab:reproducibility",
        title="Sensitivity to training seeds",
        backbone="Qwen3-4B",
        rows={
            "base": make_base(setting, make_points(WHERE, 93.46, 91.38, 80.08, 38.23)),
            "full": make_restored(
                setting, make_points(WHERE, 94.25, 93.37, 88.21, 72.81), paper_std=std
            ),
        },
        places=add_columns(setting, WHERE),
        claims=(
            *(claim_above("full", "base", place, "restoring helps") for place in WHERE),
            Claim(
                "the seeds' deviation is below a sixtieth of the gain at r = 0.05",
                sixtieth,
                spread=("full", tight),
            ),
            *steady,
        ),
        against={"full": "base"},
    )
