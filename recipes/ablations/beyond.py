"""What the paper does not try, at the same cost of inference: another law of the ratio, a further loss, more data."""

from __future__ import annotations

from ablations.sweep import RATIOS, Sweep, Variant, alone, whole

from restorekv.train.config import TrainConfig


def sweep(settings: TrainConfig) -> Sweep:
    """The paper has no figures for them. What else was tried: docs/LOG.md."""
    more = {"restore_tokens": 8, "steps": 2 * settings.steps, "contexts": 2 * settings.contexts}
    variants = {
        "base": alone(settings, {}),
        "full": whole(settings, {}),
        "log": Variant("r drawn evenly in its logarithm", {"ratio_law": "log-uniform"}),
        "hidden": Variant("hidden states matched too", {"hidden_weight": 1.0}),
        "eight": Variant("n = 8, as in the paper", {"restore_tokens": 8}),
        "long": Variant("n = 8, twice the steps of twice the contexts", more),
    }
    if settings.restore_tokens == 8:
        del variants["eight"]
    return Sweep("Beyond the paper", "", RATIOS, variants, "full", ())
