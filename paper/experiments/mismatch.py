"""Table C: an adapter trained with one evictor and used with another."""

from __future__ import annotations

from paper.experiment import (
    THREE,
    Comparison,
    Row,
    claim_above,
    list_places,
    make_points,
    make_ruler_place,
)
from paper.experiments.common import BASE, FULL, add_columns, make_base, make_restored
from paper.setting import Setting
from restorekv.evaluation.tables import name_method

WHERE = list_places("ruler", THREE)


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of a matched and a mismatched adapter, used with the settings' evictor.

    The mismatched adapter was trained with SnapKV or, if that is the settings' evictor, with KVzip.
    """
    used = setting.settings.evictor
    tight = make_ruler_place(0.05)
    own = name_method(used, False)
    other = "kvzip" if used == "snapkv" else "snapkv"
    label = f"trained on {name_method(other, False)}, used with {own}"
    return Comparison(
        name="mismatch",
        number="Table C",
        label="tab:cross_evictor_transfer",
        title="Effect of training-inference evictor mismatch",
        backbone="Qwen3-4B",
        rows={
            "base": make_base(setting, make_points(WHERE, *BASE)),
            "mismatched": Row(
                label, used, {"evictor": other}, paper=make_points(WHERE, 93.5, 81.6, 42.0)
            ),
            "matched": make_restored(
                setting, make_points(WHERE, *FULL), f"trained on and used with {own}"
            ),
        },
        places=add_columns(setting, WHERE),
        claims=(
            claim_above(
                "mismatched", "base", make_ruler_place(0.2), "a mismatched adapter still helps"
            ),
            claim_above("mismatched", "base", tight, "a mismatched adapter still helps"),
            claim_above(
                "matched",
                "mismatched",
                make_ruler_place(0.1),
                "a matched adapter is above a mismatched one",
            ),
            claim_above(
                "matched", "mismatched", tight, "a matched adapter is above a mismatched one"
            ),
        ),
        against={"base": "matched", "mismatched": "matched"},
        orders=True,
    )
