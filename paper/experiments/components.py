"""Which part of the restore pass brings the gain: embeddings or LoRA, and LoRA where."""

from __future__ import annotations

from paper.experiment import THREE, Claim, Comparison, Row, above, at, keeps, places, ruler
from paper.experiments.common import BASE, FULL, base, whole, with_more
from paper.setting import Setting

QKV = ("q_proj", "k_proj", "v_proj")
WHERE = places("ruler", THREE)


def experiment(setting: Setting) -> Comparison:
    """Rows as in the paper; the last is the method."""
    evictor = setting.settings.evictor
    tight = ruler(0.05)
    few = {("embeddings", tight): -1, ("base", tight): 0.8, ("full", tight): 0.2}
    return Comparison(
        name="components",
        number="Table 2",
        label="tab:abl_restore_components",
        title="Component and LoRA-target ablations",
        backbone="Qwen3-4B",
        rows={
            "base": base(setting, at(WHERE, *BASE)),
            "embeddings": Row(
                "learned embeddings, no LoRA",
                evictor,
                {"targets": ()},
                paper=at(WHERE, 92.7, 82.6, 42.1),
            ),
            "qkv": Row(
                "learned, LoRA on q, k, v",
                evictor,
                {"targets": QKV},
                paper=at(WHERE, 93.4, 88.2, 72.4),
            ),
            "qkvo": Row(
                "learned, LoRA on q, k, v, o",
                evictor,
                {"targets": (*QKV, "o_proj")},
                paper=at(WHERE, 93.5, 88.4, 72.0),
            ),
            "fixed": Row(
                "fixed (line breaks), LoRA everywhere",
                evictor,
                {"embeddings": "fixed"},
                paper=at(WHERE, 93.5, 88.0, 71.9),
            ),
            "full": whole(setting, at(WHERE, *FULL), "RestoreKV: learned, LoRA everywhere"),
        },
        places=with_more(setting, WHERE),
        claims=(
            above("embeddings", "base", tight, "embeddings alone bring something"),
            above("full", "embeddings", tight, "LoRA brings more than embeddings alone"),
            Claim("embeddings alone bring less than a fifth of the gain at r = 0.05", few),
            keeps(
                "fixed",
                0.9,
                "full",
                "base",
                tight,
                "fixed embeddings keep at least 90 % of the gain",
            ),
            keeps(
                "qkv", 0.9, "full", "base", tight, "LoRA on q, k, v keeps at least 90 % of the gain"
            ),
            above("full", "qkv", tight, "LoRA everywhere is above q, k, v"),
            above("full", "qkvo", tight, "LoRA everywhere is above q, k, v, o"),
            above("full", "fixed", tight, "learned embeddings are above fixed ones"),
        ),
        against=dict.fromkeys(("base", "embeddings", "qkv", "qkvo", "fixed"), "full"),
        orders=True,
    )
