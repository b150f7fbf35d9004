"""Figure 4: RestoreKV+ compared with a cache that is synthesised for each context, by accuracy and
by the time to make a cache.
"""

from __future__ import annotations

from paper.experiment import THREE, Comparison, Place, Row, claim_above, list_places
from paper.experiments.methods import make_pair, name_restored_row
from paper.setting import Setting

WHERE = (*list_places("ruler", THREE), *list_places("longhealth", THREE))


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison with Attention Matching (AM-fast), on the benchmarks that the paper
    uses for it.
    """
    better = name_restored_row("kvzip+")
    tight = Place("ruler", 0.05)
    matching = Row("AM-fast", "am-fast", None, {"prefix_policy": "free"}, paper={tight: 52.8})
    return Comparison(
        name="tradeoff",
        number="Figure 4",
        label="fig:tradeoff",
        title="Comparison with a synthesised cache",
        backbone="Qwen3-4B",
        rows={**make_pair("kvzip+"), "am-fast": matching},
        places=WHERE,
        claims=(
            claim_above(better, "kvzip+", tight, "RULER-4K: RestoreKV+ is above KVzip+"),
            claim_above(better, "am-fast", tight, "RULER-4K: RestoreKV+ is above AM-fast"),
            claim_above(
                better,
                "am-fast",
                Place("longhealth", 0.05),
                "LongHealth: RestoreKV+ is above AM-fast",
            ),
            claim_above(
                "am-fast",
                better,
                Place("longhealth", 0.2),
                "LongHealth: AM-fast is above RestoreKV+",
            ),
        ),
        against={better: "kvzip+"},
        note="AM-fast compresses the context alone; the chat prefix is kept beside the budget.",
        seconds={better: 0.74, "am-fast": 9.68},
        chart=True,
    )
