"""How many restore tokens (tab:abl_ntok)."""

from __future__ import annotations

from ablations.sweep import BASE, FULL, THREE, Sweep, Variant, above, alone, at, keeps

from restorekv.train.config import TrainConfig

PAPER = {
    1: at(THREE, 93.0, 85.3, 65.3),
    2: at(THREE, 93.4, 87.6, 70.4),
    4: at(THREE, 93.4, 87.0, 68.5),
    8: FULL,
    16: at(THREE, 93.3, 87.8, 69.1),
}


def sweep(settings: TrainConfig) -> Sweep:
    """The paper's numbers of restore tokens, and the settings' own; contexts too short for n get fewer."""
    default = settings.restore_tokens
    counts = sorted({*PAPER, default})
    rows = {
        f"n{n}": Variant(
            f"n = {n}" + (" (default)" if n == default else ""), {"restore_tokens": n}, paper=PAPER.get(n, {})
        )
        for n in counts
    }
    return Sweep(
        title="Number of restore tokens",
        table="Ablation on the number of restore tokens (tab:abl_ntok)",
        ratios=THREE,
        variants={"base": alone(settings, BASE), **rows},
        reference=f"n{default}",
        claims=(
            *(above(f"n{n}", "base", 0.05, f"n = {n} helps") for n in PAPER),
            keeps("n1", 0.5, "n8", "base", 0.05, "n = 1 brings more than half of the gain of n = 8"),
            *(above("n8", f"n{n}", 0.05, f"n = 8 is above n = {n}") for n in (1, 2, 4)),
            above("n8", "n16", 0.05, "n = 16 is below n = 8"),
        ),
    )
