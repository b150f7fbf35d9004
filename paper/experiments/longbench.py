"""Table D: LongBench by category; the paper has figures for two backbones."""

from __future__ import annotations

from paper.experiment import (
    Claim,
    Comparison,
    Place,
    claim_above,
    make_base_row,
    make_full_row,
    make_restored_row,
)
from paper.experiments.methods import claim_gain, name_restored_row
from paper.setting import CATEGORIES, Setting

LLAMA = "Llama-3.1-8B-Instruct"
QWEN = "Qwen3-8B"
RATIOS = (0.125, 0.0625)
# At each ratio: six categories, their mean, and its share of the full cache's mean in percent.
ROWS = {
    LLAMA: {
        "full": (44.6, 47.6, 29.2, 54.0, 55.1, 48.1, 46.4, 100.0) * 2,
        "kvzip": (
            42.7,
            43.9,
            27.7,
            61.9,
            44.0,
            47.7,
            44.7,
            96.3,
            33.3,
            32.4,
            24.0,
            49.1,
            20.6,
            41.6,
            33.5,
            72.1,
        ),
        "own": (
            43.6,
            43.0,
            28.5,
            63.9,
            45.9,
            49.3,
            45.7,
            98.4,
            38.2,
            35.4,
            27.0,
            59.3,
            22.8,
            43.2,
            37.7,
            81.2,
        ),
    },
    QWEN: {
        "full": (42.8, 48.6, 27.6, 57.4, 50.5, 62.6, 48.2, 100.0) * 2,
        "kvzip": (
            38.4,
            44.0,
            26.2,
            63.1,
            42.4,
            56.8,
            45.2,
            93.6,
            23.2,
            15.5,
            20.9,
            50.8,
            14.3,
            46.9,
            28.6,
            59.3,
        ),
        "own": (
            39.2,
            42.6,
            26.9,
            64.1,
            39.9,
            59.9,
            45.4,
            94.2,
            28.1,
            17.7,
            23.8,
            55.0,
            15.0,
            53.0,
            32.1,
            66.5,
        ),
    },
}


def _list_places(ratio: float) -> tuple[Place, ...]:
    """Return the places of a ratio: the categories, their mean, and its share of the full
    cache's.
    """
    categories = [Place("longbench", ratio, category) for category in CATEGORIES]
    return (
        *categories,
        _average(ratio),
        Place("longbench", ratio, parts=CATEGORIES, relative=True),
    )


def _average(ratio: float) -> Place:
    return Place("longbench", ratio, parts=CATEGORIES)


WHERE = tuple(place for ratio in RATIOS for place in _list_places(ratio))


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison with both backbones of the paper.

    Llama's figures come first, or Qwen3-8B's if the setting's model is a Qwen model.
    """
    first, second = (QWEN, LLAMA) if "qwen" in setting.model.lower() else (LLAMA, QWEN)
    own_figures, other = (
        {row: dict(zip(WHERE, figures, strict=True)) for row, figures in ROWS[name].items()}
        for name in (first, second)
    )
    also = {row: {second: points} for row, points in other.items()}
    tight = _average(0.0625)
    mild = _average(0.125)
    more = {
        **claim_gain("kvzip", tight),
        **{spot: -weight for spot, weight in claim_gain("kvzip", mild).items()},
    }
    return Comparison(
        name="longbench",
        number="Table D",
        label="tab:longbench_restorekv",
        title="LongBench",
        backbone=first,
        rows={
            "full": make_full_row(own_figures["full"], also["full"]),
            "kvzip": make_base_row("kvzip", own_figures["kvzip"], also=also["kvzip"]),
            name_restored_row("kvzip"): make_restored_row(
                "kvzip", own_figures["own"], also=also["own"]
            ),
        },
        places=WHERE,
        claims=(
            *(
                claim_above(
                    name_restored_row("kvzip"), "kvzip", place, "restoring raises the average"
                )
                for place in (mild, tight)
            ),
            Claim("the average gains more at r = 0.0625 than at r = 0.125", more),
        ),
        against={name_restored_row("kvzip"): "kvzip"},
        note=(
            "Avg is the mean over categories with a counterpart; Rel. is its share of the full "
            "cache's."
        ),
    )
