"""Restoring from the evicted cache instead of the full one (tab:abl_prunefirst)."""

from __future__ import annotations

from ablations.sweep import THREE, Sweep, Variant, above, alone, at, keeps, whole

from restorekv.train.config import TrainConfig


def sweep(settings: TrainConfig) -> Sweep:
    """The restore pass before and after eviction, each trained for it."""
    return Sweep(
        title="Restored from the full or the evicted cache",
        table="Effect of full-context conditioning on RULER-4K (tab:abl_prunefirst)",
        ratios=THREE,
        variants={
            "base": alone(settings),
            "evicted": Variant(
                "generated from the evicted cache", {"restore_from": "evicted"}, paper=at(THREE, 93.7, 87.6, 64.4)
            ),
            "full": whole(settings, label="RestoreKV: generated from the full cache"),
        },
        reference="full",
        claims=(
            above("evicted", "base", 0.05, "restoring from the evicted cache helps"),
            keeps("evicted", 0.5, "full", "base", 0.05, "the evicted cache gives more than half of the gain"),
            above("full", "evicted", 0.05, "the full cache gives more than the evicted one"),
            above("full", "evicted", 0.1, "the full cache gives more than the evicted one"),
            above("evicted", "full", 0.2, "the evicted cache gives more than the full one"),
        ),
    )
