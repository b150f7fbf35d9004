"""The range the training ratio is drawn from."""

from __future__ import annotations

from paper.experiment import FOUR, Claim, Comparison, Row, above, at, places, ruler
from paper.experiments.common import base, with_more
from paper.setting import Setting

WHERE = places("ruler", FOUR)
RANGES = {
    (0.025, 0.25): at(WHERE, 94.3, 93.5, 88.8, 73.2),
    (0.025, 0.5): at(WHERE, 94.1, 93.1, 86.1, 63.5),
    (0.05, 0.25): at(WHERE, 94.3, 93.2, 86.5, 65.6),
    (0.05, 0.5): at(WHERE, 94.0, 92.8, 84.5, 51.5),
}
DEFAULT = "0.025 to 0.25"


def experiment(setting: Setting) -> Comparison:
    """Four ranges and none."""
    evictor = setting.settings.evictor
    tight = ruler(0.05)
    mild = ruler(0.4)
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
        rows={"base": base(setting, at(WHERE, 93.5, 91.4, 80.1, 38.2)), **rows},
        places=with_more(setting, WHERE),
        claims=(
            *(
                above(DEFAULT, other, ruler(ratio), f"r from {DEFAULT} is above {other}")
                for ratio in (0.1, 0.05)
                for other in others
            ),
            *near,
            above(
                "0.025 to 0.5",
                "0.05 to 0.5",
                tight,
                "with r up to 0.5, starting at 0.025 is above 0.05",
            ),
            above(
                "0.05 to 0.25",
                "0.05 to 0.5",
                tight,
                "with r from 0.05, ending at 0.25 is above 0.5",
            ),
        ),
        against=dict.fromkeys(("base", *others), DEFAULT),
        orders=True,
    )
