"""Whether moving the question by n positions explains the gain (tab:posshift)."""

from __future__ import annotations

from ablations.sweep import THREE, Claim, Sweep, Variant, above, alone, at, whole

from restorekv.tables import name
from restorekv.train.config import TrainConfig


def sweep(settings: TrainConfig) -> Sweep:
    """The offset is as many positions as the settings have restore tokens (the paper's 8)."""
    n = settings.restore_tokens
    return Sweep(
        title="Query-position offset",
        table="Effect of the query-position offset (tab:posshift)",
        ratios=THREE,
        variants={
            "base": alone(settings),
            "offset": Variant(
                f"{name(settings.evictor, False)}, questions {n} positions later, no restore states",
                None,
                {"offset": n},
                paper=at(THREE, 90.5, 80.8, 36.9),
            ),
            "full": whole(settings),
        },
        reference="base",
        claims=(
            above("base", "offset", 0.05, "the offset alone brings nothing"),
            Claim(
                "the offset alone brings less than a tenth of the gain at r = 0.05",
                0.05,
                {"offset": -1, "base": 0.9, "full": 0.1},
            ),
            *(above("full", "offset", ratio, "restore states are above the offset alone") for ratio in THREE),
        ),
    )
