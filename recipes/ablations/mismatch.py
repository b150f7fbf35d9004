"""An adapter trained with one evictor and used with another (tab:cross_evictor_transfer)."""

from __future__ import annotations

from ablations.sweep import THREE, Sweep, Variant, above, alone, at, whole

from restorekv.tables import name
from restorekv.train.config import TrainConfig


def sweep(settings: TrainConfig) -> Sweep:
    """The inference evictor is the settings'; the training evictor is the same or another: SnapKV, or KVzip for it."""
    own, other = name(settings.evictor, False), "kvzip" if settings.evictor == "snapkv" else "snapkv"
    return Sweep(
        title="Training and inference evictor",
        table="Effect of training-inference evictor mismatch (tab:cross_evictor_transfer)",
        ratios=THREE,
        variants={
            "base": alone(settings),
            "mismatched": Variant(
                f"trained on {name(other, False)}, used with {own}",
                {"evictor": other},
                evictor=settings.evictor,
                paper=at(THREE, 93.5, 81.6, 42.0),
            ),
            "matched": whole(settings, label=f"trained on and used with {own}"),
        },
        reference="matched",
        claims=(
            above("mismatched", "base", 0.2, "a mismatched adapter still helps"),
            above("mismatched", "base", 0.05, "a mismatched adapter still helps"),
            above("matched", "mismatched", 0.1, "a matched adapter is above a mismatched one"),
            above("matched", "mismatched", 0.05, "a matched adapter is above a mismatched one"),
        ),
    )
