"""Restoring from the evicted cache instead of the full one."""

from __future__ import annotations

from paper.experiment import THREE, Comparison, Row, above, at, keeps, places, ruler
from paper.experiments.common import BASE, FULL, base, whole, with_more
from paper.setting import Setting

WHERE = places("ruler", THREE)


def experiment(setting: Setting) -> Comparison:
    """The restore pass before and after eviction, each trained for it."""
    evictor = setting.settings.evictor
    tight = ruler(0.05)
    evicted = Row(
        "generated from the evicted cache",
        evictor,
        {"restore_from": "evicted"},
        paper=at(WHERE, 93.7, 87.6, 64.4),
    )
    return Comparison(
        name="prune-first",
        number="Table 3",
        label="tab:abl_prunefirst",
        title="Effect of full-context conditioning",
        backbone="Qwen3-4B",
        rows={
            "base": base(setting, at(WHERE, *BASE)),
            "evicted": evicted,
            "full": whole(setting, at(WHERE, *FULL), "RestoreKV: generated from the full cache"),
        },
        places=with_more(setting, WHERE),
        claims=(
            above("evicted", "base", tight, "restoring from the evicted cache helps"),
            keeps(
                "evicted",
                0.5,
                "full",
                "base",
                tight,
                "the evicted cache gives more than half of the gain",
            ),
            above("full", "evicted", tight, "the full cache gives more than the evicted one"),
            above("full", "evicted", ruler(0.1), "the full cache gives more than the evicted one"),
            above("evicted", "full", ruler(0.2), "the evicted cache gives more than the full one"),
        ),
        against={"base": "full", "evicted": "full"},
        orders=True,
    )
