"""Table 3: restoring from the evicted cache instead of the full one."""

from __future__ import annotations

from paper.experiment import (
    THREE,
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

WHERE = list_places("ruler", THREE)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of restore passes before and after eviction, each with an adapter
    trained for it.
    """
    evictor = setting.settings.evictor
    tight = make_ruler_place(0.05)
    evicted = Row(
        "generated from the evicted cache",
        evictor,
        {"restore_from": "evicted"},
        paper=make_points(WHERE, 93.7, 87.6, 64.4),
    )
    return Comparison(
        name="prune-first",
        number="Table 3",
        label="tab:abl_prunefirst",
        title="Effect of full-context conditioning",
        backbone="Qwen3-4B",
        rows={
            "base": make_base(setting, make_points(WHERE, *BASE)),
            "evicted": evicted,
            "full": make_restored(
                setting, make_points(WHERE, *FULL), "RestoreKV: generated from the full cache"
            ),
        },
        places=add_columns(setting, WHERE),
        claims=(
            claim_above("evicted", "base", tight, "restoring from the evicted cache helps"),
            claim_kept_share(
                "evicted",
                0.5,
                "full",
                "base",
                tight,
                "the evicted cache gives more than half of the gain",
            ),
            claim_above("full", "evicted", tight, "the full cache gives more than the evicted one"),
            claim_above(
                "full",
                "evicted",
                make_ruler_place(0.1),
                "the full cache gives more than the evicted one",
            ),
            claim_above(
                "evicted",
                "full",
                make_ruler_place(0.2),
                "the evicted cache gives more than the full one",
            ),
        ),
        against={"base": "full", "evicted": "full"},
        orders=True,
    )
