"""Table A: the range that the ratio is drawn from in training."""

from __future__ import annotations

from paper.experiment import (
    FOUR,
    Claim,
    Comparison,
    Row,
    claim_above,
    list_places,
    make_points,
    make_ruler_place,
)
from paper.experiments.common import add_columns, make_base
from paper.setting import Setting

WHERE = list_places("ruler", FOUR)
RANGES = {
    (0.025, 0.25): make_points(WHERE, 94.3, 93.5, 88.8, 73.2),
    (0.025, 0.5): make_points(WHERE, 94.1, 93.1, 86.1, 63.5),
    (0.05, 0.25): make_points(WHERE, 94.3, 93.2, 86.5, 65.6),
    (0.05, 0.5): make_points(WHERE, 94.0, 92.8, 84.5, 51.5),
}
DEFAULT = "0.025 to 0.25"


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of four ranges, and of the evictor without restoring."""
    evictor = setting.settings.evictor
    tight = make_ruler_place(0.05)
    mild = make_ruler_place(0.4)
    rows = {}
    for (low, high), paper in RANGES.items():
        name = f"{low:g} to {high:g}"
        changed = {"ratio_min": low, "ratio_max": high}
        rows[name] = Row(f"r from {name}", evictor, changed, paper=paper)
    others = [name for name in rows if name != DEFAULT]
    near = [
        Claim(
            f"r from {other} is within a point of {DEFAULT} at r = 0.4",
            {(other, mild): 1, (DEFAULT, mild): -1},
            1,
        )
        for other in others
    ]
    return Comparison(
        name="ratio-range",
        number="Table A",
        label="tab:training_ratio_range",
        title="Training ratio range",
        backbone="Qwen3-4B",
        rows={"base": make_base(setting, make_points(WHERE, 93.5, 91.4, 80.1, 38.2)), **rows},
        places=add_columns(setting, WHERE),
        claims=(
            *(
                claim_above(
                    DEFAULT, other, make_ruler_place(ratio), f"r from {DEFAULT} is above {other}"
                )
                for ratio in (0.1, 0.05)
                for other in others
            ),
            *near,
            claim_above(
                "0.025 to 0.5",
                "0.05 to 0.5",
                tight,
                "with r up to 0.5, starting at 0.025 is above 0.05",
            ),
            claim_above(
                "0.05 to 0.25",
                "0.05 to 0.5",
                tight,
                "with r from 0.05, ending at 0.25 is above 0.5",
            ),
        ),
        against=dict.fromkeys(("base", *others), DEFAULT),
        orders=True,
    )
