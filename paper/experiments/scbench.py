"""Contexts longer than those trained on."""

from __future__ import annotations

from paper.experiment import FOUR, Comparison, above, alone, at, full_cache, own, places
from paper.experiments.methods import restored
from paper.setting import Setting

WHERE = places("scbench", FOUR)


def experiment(setting: Setting) -> Comparison:
    """The average over the tasks; of single tasks the paper's source has no figures."""
    better = restored("kvzip")
    return Comparison(
        name="scbench",
        number="Figure B",
        label="fig:scbench",
        title="SCBench: contexts longer than those trained on",
        backbone="Qwen3-4B",
        rows={
            "full": full_cache(),
            "kvzip": alone("kvzip", at(WHERE, 29.4, 31.6, 30.0, 24.1)),
            better: own("kvzip", at(WHERE, 29.7, 33.1, 32.4, 25.6)),
        },
        places=WHERE,
        claims=tuple(
            above(better, "kvzip", place, "restoring raises the average") for place in WHERE
        ),
        against={better: "kvzip"},
        chart=True,
    )
