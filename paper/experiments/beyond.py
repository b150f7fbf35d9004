"""Ideas that the paper does not try and that do not make inference more expensive: ratios drawn
from another distribution, an additional loss, more data.
"""

from __future__ import annotations

from paper.experiment import FOUR, Comparison, Row, list_places
from paper.experiments.common import add_columns, make_base, make_restored
from paper.setting import Setting


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison, for which the paper has no figures; paper/log.md has what else was
    tried.
    """
    settings = setting.settings
    evictor = setting.settings.evictor
    more = {"restore_tokens": 8, "steps": 2 * settings.steps, "contexts": 2 * settings.contexts}
    rows = {
        "base": make_base(setting, {}),
        "full": make_restored(setting, {}),
        "log": Row("r drawn evenly in its logarithm", evictor, {"ratio_law": "log-uniform"}),
        "hidden": Row("hidden states matched too", evictor, {"hidden_weight": 1.0}),
        "eight": Row("n = 8, as in the paper", evictor, {"restore_tokens": 8}),
        "long": Row("n = 8, twice the steps of twice the contexts", evictor, more),
    }
    if settings.restore_tokens == 8:
        del rows["eight"]
    return Comparison(
        name="beyond",
        number="",
        label="",
        title="Beyond the paper",
        backbone="",
        rows=rows,
        places=add_columns(setting, list_places("ruler", FOUR)),
        claims=(),
        against={row: "full" for row in rows if row != "full"},
        note="Not in the paper.",
    )
