"""Table 4: how many restore tokens are needed."""

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
from paper.experiments.common import BASE, FULL, add_columns, make_base
from paper.setting import Setting

WHERE = list_places("ruler", THREE)
PAPER = {
    1: make_points(WHERE, 93.0, 85.3, 65.3),
    2: make_points(WHERE, 93.4, 87.6, 70.4),
    4: make_points(WHERE, 93.4, 87.0, 68.5),
    8: make_points(WHERE, *FULL),
    16: make_points(WHERE, 93.3, 87.8, 69.1),
}


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of the paper's numbers of restore tokens n, and the settings' own.

    Contexts that are too short for n get fewer.
    """
    default = setting.settings.restore_tokens
    evictor = setting.settings.evictor
    tight = make_ruler_place(0.05)
    rows = {}
    for n in sorted({*PAPER, default}):
        label = f"n = {n}" + (" (default)" if n == default else "")
        rows[f"n{n}"] = Row(label, evictor, {"restore_tokens": n}, paper=PAPER.get(n, {}))
    return Comparison(
        name="tokens",
        number="Table 4",
        label="tab:abl_ntok",
        title="Number of restore tokens",
        backbone="Qwen3-4B",
        rows={"base": make_base(setting, make_points(WHERE, *BASE)), **rows},
        places=add_columns(setting, WHERE),
        claims=(
            *(claim_above(f"n{n}", "base", tight, f"n = {n} helps") for n in PAPER),
            claim_kept_share(
                "n1", 0.5, "n8", "base", tight, "n = 1 brings more than half of the gain of n = 8"
            ),
            *(claim_above("n8", f"n{n}", tight, f"n = 8 is above n = {n}") for n in (1, 2, 4)),
            claim_above("n8", "n16", tight, "n = 16 is below n = 8"),
        ),
        against={row: f"n{default}" for row in ("base", *rows) if row != f"n{default}"},
        note="Where n restore tokens exceed the budget of a short document, fewer are used.",
        orders=True,
    )
