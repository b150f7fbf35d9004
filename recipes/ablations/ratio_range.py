"""The range the training ratio is drawn from (tab:training_ratio_range)."""

from __future__ import annotations

from ablations.sweep import Claim, Sweep, Variant, above, alone, at

from restorekv.train.config import TrainConfig

FOUR = (0.4, 0.2, 0.1, 0.05)
RANGES = {
    (0.025, 0.25): at(FOUR, 94.3, 93.5, 88.8, 73.2),
    (0.025, 0.5): at(FOUR, 94.1, 93.1, 86.1, 63.5),
    (0.05, 0.25): at(FOUR, 94.3, 93.2, 86.5, 65.6),
    (0.05, 0.5): at(FOUR, 94.0, 92.8, 84.5, 51.5),
}
DEFAULT = "0.025 to 0.25"


def sweep(settings: TrainConfig) -> Sweep:
    """Four ranges and none."""
    rows = {
        (name := f"{low:g} to {high:g}"): Variant(f"r from {name}", {"ratio_min": low, "ratio_max": high}, paper=paper)
        for (low, high), paper in RANGES.items()
    }
    others = [name for name in rows if name != DEFAULT]
    return Sweep(
        title="Training ratio range",
        table="Ablation on the training ratio range (tab:training_ratio_range)",
        ratios=FOUR,
        variants={"base": alone(settings, at(FOUR, 93.5, 91.4, 80.1, 38.2)), **rows},
        reference=DEFAULT,
        claims=(
            *(
                above(DEFAULT, other, ratio, f"r from {DEFAULT} is above {other}")
                for ratio in (0.1, 0.05)
                for other in others
            ),
            *(
                Claim(
                    f"r from {other} is within a point of {DEFAULT} at r = 0.4",
                    0.4,
                    {other: 1, DEFAULT: -1},
                    plus=1,
                )
                for other in others
            ),
            above("0.025 to 0.5", "0.05 to 0.5", 0.05, "with r up to 0.5, starting at 0.025 is above 0.05"),
            above("0.05 to 0.25", "0.05 to 0.5", 0.05, "with r from 0.05, ending at 0.25 is above 0.5"),
        ),
    )
