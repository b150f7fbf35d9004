"""How far training seeds move the scores (tab:reproducibility)."""

from __future__ import annotations

from ablations.sweep import Claim, Sweep, above, alone, at, whole

from restorekv.train.config import TrainConfig

FOUR = (0.4, 0.2, 0.1, 0.05)


def sweep(settings: TrainConfig) -> Sweep:
    """The method under several seeds."""
    return Sweep(
        title="Training seeds",
        table="Sensitivity to training seeds, mean and deviation over three (tab:reproducibility)",
        ratios=FOUR,
        variants={
            "base": alone(settings, at(FOUR, 93.46, 91.38, 80.08, 38.23)),
            "full": whole(
                settings, at(FOUR, 94.25, 93.37, 88.21, 72.81), paper_std=at(FOUR, 0.04, 0.11, 0.51, 0.57)
            ),
        },
        reference="base",
        claims=(
            *(above("full", "base", ratio, "restoring helps") for ratio in FOUR),
            Claim("the seeds' deviation is below a sixtieth of the gain at r = 0.05", 0.05,
                  {"full": 1 / 60, "base": -1 / 60}, spread="full"),
            *(Claim(f"the seeds' deviation is below 0.6 points at r = {ratio:g}", ratio, {}, plus=0.6, spread="full")
              for ratio in FOUR),
        ),
    )  # fmt: skip
