"""Figure 3: scores against the ratio on four benchmarks. The paper has four backbones; a run here
has one.
"""

from __future__ import annotations

from paper.experiment import FOUR, Claim, Comparison, Place, claim_above, list_places, make_full_row
from paper.experiments.methods import BENCHMARKS, claim_gain, make_pair, name_restored_row
from paper.setting import Setting

WHERE = tuple(place for benchmark in BENCHMARKS for place in list_places(benchmark, FOUR))
TITLES = {"ruler": "RULER-4K", "qasper": "QASPER", "quality": "QuALITY", "longhealth": "LongHealth"}


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of KVzip and KVzip+, with and without restoring, and the full cache."""
    mild = {Place("ruler", 0.4): (93.5, 94.3)}
    claims = [
        claim_above(
            name_restored_row(evictor),
            evictor,
            Place(benchmark, 0.05),
            f"{title}: {name} is above its base",
        )
        for evictor, name in (("kvzip", "RestoreKV"), ("kvzip+", "RestoreKV+"))
        for benchmark, title in TITLES.items()
    ]
    for evictor, name in (("kvzip", "RestoreKV"), ("kvzip+", "RestoreKV+")):
        tight = claim_gain(evictor, Place("ruler", 0.05))
        wide = claim_gain(evictor, Place("ruler", 0.2))
        weights = {**tight, **{spot: -weight for spot, weight in wide.items()}}
        claims.append(Claim(f"RULER-4K: {name} gains more at r = 0.05 than at r = 0.2", weights))
    return Comparison(
        name="main",
        number="Figure 3",
        label="fig:main",
        title="Scores against the KV budget ratio",
        backbone="Qwen3-4B",
        rows={
            "full": make_full_row(),
            **make_pair("kvzip", mild),
            **make_pair("kvzip+"),
        },
        places=WHERE,
        claims=tuple(claims),
        against={name_restored_row(evictor): evictor for evictor in ("kvzip", "kvzip+")},
        note="The paper's figure has Qwen3-0.6B, 4B, 8B and Llama-3.1-8B-Instruct; beside ours "
        "stand its figures for "
        "Qwen3-4B that are in its tables. A folder holds one backbone; give --model and another "
        "OUT for the others.",
        chart=True,
    )
