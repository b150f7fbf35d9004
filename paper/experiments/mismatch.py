"""An adapter trained with one evictor and used with another."""

from __future__ import annotations

from paper.experiment import THREE, Comparison, Row, above, at, places, ruler
from paper.experiments.common import BASE, FULL, base, whole, with_more
from paper.setting import Setting
from restorekv.evaluation.tables import name_method

WHERE = places("ruler", THREE)


def experiment(setting: Setting) -> Comparison:
    """The inference evictor is the settings'; the training evictor is the same or another: SnapKV,
    or KVzip for it.
    """
    used = setting.settings.evictor
    tight = ruler(0.05)
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
            "base": base(setting, at(WHERE, *BASE)),
            "mismatched": Row(label, used, {"evictor": other}, paper=at(WHERE, 93.5, 81.6, 42.0)),
            "matched": whole(setting, at(WHERE, *FULL), f"trained on and used with {own}"),
        },
        places=with_more(setting, WHERE),
        claims=(
            above("mismatched", "base", ruler(0.2), "a mismatched adapter still helps"),
            above("mismatched", "base", tight, "a mismatched adapter still helps"),
            above(
                "matched", "mismatched", ruler(0.1), "a matched adapter is above a mismatched one"
            ),
            above("matched", "mismatched", tight, "a matched adapter is above a mismatched one"),
        ),
        against={"base": "matched", "mismatched": "matched"},
        orders=True,
    )
