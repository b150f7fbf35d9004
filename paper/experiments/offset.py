"""Whether moving the question by n positions explains the gain."""

from __future__ import annotations

from paper.experiment import THREE, Claim, Comparison, Row, above, at, places, ruler
from paper.experiments.common import BASE, FULL, base, whole, with_more
from paper.setting import Setting
from restorekv.evaluation.tables import name_method

WHERE = places("ruler", THREE)


def experiment(setting: Setting) -> Comparison:
    """The offset is as many positions as the settings have restore tokens (the paper's 8)."""
    n = setting.settings.restore_tokens
    evictor = setting.settings.evictor
    tight = ruler(0.05)
    label = f"{name_method(evictor, False)}, questions {n} positions later, no restore states"
    few = {("offset", tight): -1, ("base", tight): 0.9, ("full", tight): 0.1}
    return Comparison(
        name="offset",
        number="Table B",
        label="tab:posshift",
        title="Effect of the query-position offset",
        backbone="Qwen3-4B",
        rows={
            "base": base(setting, at(WHERE, *BASE)),
            "offset": Row(label, evictor, None, {"offset": n}, paper=at(WHERE, 90.5, 80.8, 36.9)),
            "full": whole(setting, at(WHERE, *FULL)),
        },
        places=with_more(setting, WHERE),
        claims=(
            above("base", "offset", tight, "the offset alone brings nothing"),
            Claim("the offset alone brings less than a tenth of the gain at r = 0.05", few),
            *(
                above("full", "offset", place, "restore states are above the offset alone")
                for place in WHERE
            ),
        ),
        against={"offset": "base", "full": "base"},
        orders=True,
    )
