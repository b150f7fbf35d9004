"""Table B: whether moving the question by n positions already explains the gain."""

from __future__ import annotations

from paper.experiment import (
    THREE,
    Claim,
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
    """Return the comparison; the offset equals the settings' number of restore tokens (the paper's
    8).
    """
    n = setting.settings.restore_tokens
    evictor = setting.settings.evictor
    tight = make_ruler_place(0.05)
    label = f"{name_method(evictor, False)}, questions {n} positions later, no restore states"
    few = {("offset", tight): -1, ("base", tight): 0.9, ("full", tight): 0.1}
    return Comparison(
        name="offset",
        number="Table B",
        label="tab:posshift",
        title="Effect of the query-position offset",
        backbone="Qwen3-4B",
        rows={
            "base": make_base(setting, make_points(WHERE, *BASE)),
            "offset": Row(
                label, evictor, None, {"offset": n}, paper=make_points(WHERE, 90.5, 80.8, 36.9)
            ),
            "full": make_restored(setting, make_points(WHERE, *FULL)),
        },
        places=add_columns(setting, WHERE),
        claims=(
            claim_above("base", "offset", tight, "the offset alone brings nothing"),
            Claim("the offset alone brings less than a tenth of the gain at r = 0.05", few),
            *(
                claim_above("full", "offset", place, "restore states are above the offset alone")
                for place in WHERE
            ),
        ),
        against={"offset": "base", "full": "base"},
        orders=True,
    )
