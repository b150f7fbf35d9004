"""Which part of the restore pass brings the gain: embeddings or LoRA, and LoRA where (tab:abl_restore_components)."""

from __future__ import annotations

from ablations.sweep import THREE, Claim, Sweep, Variant, above, alone, at, keeps, whole

from restorekv.train.config import TrainConfig

QKV = ("q_proj", "k_proj", "v_proj")


def sweep(settings: TrainConfig) -> Sweep:
    """Rows as in the paper; the last is the method."""
    return Sweep(
        title="Components and LoRA targets",
        table="Component and LoRA-target ablations on RULER-4K (tab:abl_restore_components)",
        ratios=THREE,
        variants={
            "base": alone(settings),
            "embeddings": Variant("learned embeddings, no LoRA", {"targets": ()}, paper=at(THREE, 92.7, 82.6, 42.1)),
            "qkv": Variant("learned, LoRA on q, k, v", {"targets": QKV}, paper=at(THREE, 93.4, 88.2, 72.4)),
            "qkvo": Variant(
                "learned, LoRA on q, k, v, o", {"targets": (*QKV, "o_proj")}, paper=at(THREE, 93.5, 88.4, 72.0)
            ),
            "fixed": Variant(
                "fixed (line breaks), LoRA everywhere", {"embeddings": "fixed"}, paper=at(THREE, 93.5, 88.0, 71.9)
            ),
            "full": whole(settings, label="RestoreKV: learned, LoRA everywhere"),
        },
        reference="full",
        claims=(
            above("embeddings", "base", 0.05, "embeddings alone bring something"),
            above("full", "embeddings", 0.05, "LoRA brings more than embeddings alone"),
            Claim(
                "embeddings alone bring less than a fifth of the gain at r = 0.05",
                0.05,
                {"embeddings": -1, "base": 0.8, "full": 0.2},
            ),
            keeps("fixed", 0.9, "full", "base", 0.05, "fixed embeddings keep at least 90 % of the gain"),
            keeps("qkv", 0.9, "full", "base", 0.05, "LoRA on q, k, v keeps at least 90 % of the gain"),
            above("full", "qkv", 0.05, "LoRA everywhere is above q, k, v"),
            above("full", "qkvo", 0.05, "LoRA everywhere is above q, k, v, o"),
            above("full", "fixed", 0.05, "learned embeddings are above fixed ones"),
        ),
    )
