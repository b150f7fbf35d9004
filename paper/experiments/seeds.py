"""How far training seeds move the scores."""

from __future__ import annotations

from paper.experiment import FOUR, Claim, Comparison, above, at, places, ruler
from paper.experiments.common import base, whole, with_more
from paper.setting import Setting

WHERE = places("ruler", FOUR)


def experiment(setting: Setting) -> Comparison:
    """The method under several seeds."""
    tight = ruler(0.05)
    std = at(WHERE, 0.04, 0.11, 0.51, 0.57)
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
            "base": base(setting, at(WHERE, 93.46, 91.38, 80.08, 38.23)),
            "full": whole(setting, at(WHERE, 94.25, 93.37, 88.21, 72.81), paper_std=std),
        },
        places=with_more(setting, WHERE),
        claims=(
            *(above("full", "base", place, "restoring helps") for place in WHERE),
            Claim(
                "the seeds' deviation is below a sixtieth of the gain at r = 0.05",
                sixtieth,
                spread=("full", tight),
            ),
            *steady,
        ),
        against={"full": "base"},
    )
