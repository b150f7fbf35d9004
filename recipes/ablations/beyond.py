"""What the paper does not try, at the same cost of inference: another law of the ratio, a further loss, more data."""

from __future__ import annotations

from ablations.sweep import RATIOS, Sweep, Variant, alone, whole

from restorekv.train.config import TrainConfig

VARIANTS = {
    "log": ("r drawn evenly in its logarithm", {"ratio_law": "log-uniform"}),
    "hidden": ("hidden states matched too", {"hidden_weight": 1.0}),
}


def sweep(settings: TrainConfig) -> Sweep:
    """Every variant changes one setting; the paper has no figures for them. What else was tried: docs/LOG.md."""
    own = {key: Variant(label, train) for key, (label, train) in VARIANTS.items()}
    return Sweep(
        title="Beyond the paper",
        table="",
        ratios=RATIOS,
        variants={"base": alone(settings, {}), "full": whole(settings, {}), **own},
        reference="full",
        claims=(),
    )
