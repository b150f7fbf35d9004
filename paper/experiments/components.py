"""Table 2: which part of the restore pass brings the gain, the embeddings or LoRA, and on which
projections LoRA is needed.
"""

from __future__ import annotations

from paper.experiment import (
    THREE,
    Claim,
    Comparison,
    Row,
    claim_above,
    claim_kept_share,
    list_places,
    make_points,
    make_ruler_place,
)
from paper.experiments.common import BASE, FULL, add_columns, make_base, make_restored
from paper.setting import Setting

QKV = ("q_proj", "k_proj", "v_proj")
WHERE = list_places("ruler", THREE)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison with the paper's rows; the last one is the method."""
    evictor = setting.settings.evictor
    tight = make_ruler_place(0.05)
    few = {("embeddings", tight): -1, ("base", tight): 0.8, ("full", tight): 0.2}
    return Comparison(
        name="components",
        number="Table 2",
        label="tab:abl_restore_components",
        title="Component and LoRA-target ablations",
        backbone="Qwen3-4B",
        rows={
            "base": make_base(setting, make_points(WHERE, *BASE)),
            "embeddings": Row(
                "learned embeddings, no LoRA",
                evictor,
                {"targets": ()},
                paper=make_points(WHERE, 92.7, 82.6, 42.1),
            ),
            "qkv": Row(
                "learned, LoRA on q, k, v",
                evictor,
                {"targets": QKV},
                paper=make_points(WHERE, 93.4, 88.2, 72.4),
            ),
            "qkvo": Row(
                "learned, LoRA on q, k, v, o",
                evictor,
                {"targets": (*QKV, "o_proj")},
                paper=make_points(WHERE, 93.5, 88.4, 72.0),
            ),
            "fixed": Row(
                "fixed (line breaks), LoRA everywhere",
                evictor,
                {"embeddings": "fixed"},
                paper=make_points(WHERE, 93.5, 88.0, 71.9),
            ),
            "full": make_restored(
                setting, make_points(WHERE, *FULL), "RestoreKV: learned, LoRA everywhere"
            ),
        },
        places=add_columns(setting, WHERE),
        claims=(
            claim_above("embeddings", "base", tight, "embeddings alone bring something"),
            claim_above("full", "embeddings", tight, "LoRA brings more than embeddings alone"),
            Claim("embeddings alone bring less than a fifth of the gain at r = 0.05", few),
            claim_kept_share(
                "fixed",
                0.9,
                "full",
                "base",
                tight,
                "fixed embeddings keep at least 90 % of the gain",
            ),
            claim_kept_share(
                "qkv", 0.9, "full", "base", tight, "LoRA on q, k, v keeps at least 90 % of the gain"
            ),
            claim_above("full", "qkv", tight, "LoRA everywhere is above q, k, v"),
            claim_above("full", "qkvo", tight, "LoRA everywhere is above q, k, v, o"),
            claim_above("full", "fixed", tight, "learned embeddings are above fixed ones"),
        ),
        against=dict.fromkeys(("base", "embeddings", "qkv", "qkvo", "fixed"), "full"),
        orders=True,
    )
