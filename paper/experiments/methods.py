"""Table 1: five evictors, alone and restored, on four benchmarks; and ContrastKV in the simplified
version of the paper's authors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paper.experiment import (
    THREE,
    Comparison,
    Most,
    Place,
    Points,
    Row,
    Weights,
    list_places,
    make_base_row,
    make_points,
    make_restored_row,
)
from paper.setting import Setting

BENCHMARKS = ("ruler", "qasper", "quality", "longhealth")
WHERE = tuple(place for benchmark in BENCHMARKS for place in list_places(benchmark, THREE))
SINGLE_PROCESS = {
    "kvzip": (91.4, 80.1, 38.2, 38.2, 33.9, 18.0, 66.0, 58.5, 46.3, 71.5, 70.0, 61.0),
    "kvzip+": (91.3, 84.8, 51.6, 38.1, 32.4, 23.3, 66.5, 60.0, 51.9, 73.2, 67.8, 63.2),
    "contrastkv": (91.6, 80.7, 38.0, 40.1, 31.9, 17.8, 66.2, 62.2, 50.7, 74.2, 69.0, 49.0),
    "snapkv": (33.8, 20.6, 12.7, 22.4, 19.0, 14.3, 53.9, 53.0, 42.5, 41.0, 36.8, 36.2),
    "h2o": (8.0, 3.5, 3.2, 22.0, 13.8, 14.4, 59.2, 50.4, 41.5, 60.2, 48.8, 37.0),
}
RESTORED = {
    "kvzip": (93.5, 88.8, 73.2, 39.0, 37.7, 28.7, 67.0, 63.3, 52.4, 75.8, 73.8, 67.5),
    "kvzip+": (93.3, 89.7, 70.7, 40.9, 38.5, 31.6, 66.8, 62.9, 57.9, 74.2, 73.0, 71.5),
    "contrastkv": (92.3, 84.3, 40.2, 40.9, 36.0, 21.6, 67.6, 63.3, 51.9, 75.2, 70.5, 54.0),
    "snapkv": (37.7, 26.3, 14.3, 29.9, 24.0, 20.7, 59.4, 51.8, 49.9, 51.8, 41.8, 38.5),
    "h2o": (17.3, 11.6, 5.7, 30.4, 24.7, 21.3, 60.9, 54.9, 47.7, 64.8, 59.0, 46.8),
}
METHODS = tuple(SINGLE_PROCESS)
NOTHING: Mapping[Place, tuple[float, float]] = {}


def make_experiment(setting: Setting) -> Comparison:
    """Return the comparison of Table 1: sixty pairs, an evictor alone and restored at
    each place.
    """
    rows = {}
    for evictor in METHODS:
        rows |= {
            evictor: make_base_row(evictor, _list_points(evictor, False)),
            name_restored_row(evictor): make_restored_row(evictor, _list_points(evictor, True)),
        }
    return Comparison(
        name="methods",
        number="Table 1",
        label="tab:method_generalization",
        title="Generalization across eviction methods",
        backbone="Qwen3-4B",
        rows=rows,
        places=WHERE,
        claims=(
            Most(
                "restoring improves 59 of 60 pairs",
                tuple(claim_gain(m, place) for m in METHODS for place in WHERE),
                59,
            ),
            *(
                Most(
                    f"restoring improves {make_base_row(m).label} in all its 12 cells",
                    tuple(claim_gain(m, p) for p in WHERE),
                    12,
                )
                for m in METHODS
                if m != "snapkv"
            ),
            Most(
                "of 4 of 5 methods the mean gain at r = 0.05 is above that at r = 0.2",
                tuple(_claim_widening(method) for method in METHODS),
                4,
            ),
        ),
        against={name_restored_row(evictor): evictor for evictor in METHODS},
    )


def simplified(setting: Setting) -> Comparison:
    """Return the comparison of the simplified ContrastKV, which the paper's Table 1 measures.

    Our Table 1 measures the original ContrastKV.
    """
    evictor = "contrastkv-simple"
    return replace(
        make_experiment(setting),
        name="contrastkv-simple",
        number="",
        title="ContrastKV as RestoreKV's authors simplified it",
        rows={
            evictor: make_base_row(evictor, _list_points("contrastkv", False)),
            name_restored_row(evictor): make_restored_row(
                evictor, _list_points("contrastkv", True)
            ),
        },
        claims=(
            Most(
                "restoring improves all 12 pairs",
                tuple(claim_gain(evictor, place) for place in WHERE),
                12,
            ),
        ),
        against={name_restored_row(evictor): evictor},
        note="The paper's figures are those of Table 1, which come from this version.",
    )


def _list_points(evictor: str, with_restoring: bool) -> Points:
    """Return the paper's points for an evictor, by place."""
    return make_points(WHERE, *(RESTORED if with_restoring else SINGLE_PROCESS)[evictor])


def name_restored_row(evictor: str) -> str:
    """Return the name of the row of an evictor with restoring."""
    return f"{evictor} restored"


def claim_gain(evictor: str, place: Place) -> Weights:
    """Return the weights of a gain: restored minus alone."""
    return {(name_restored_row(evictor), place): 1, (evictor, place): -1}


def _claim_widening(evictor: str) -> Weights:
    """Return the weights of the mean gain over benchmarks at the tightest ratio, minus that at the
    mildest.
    """
    share = 1 / len(BENCHMARKS)
    weights = {}
    for benchmark in BENCHMARKS:
        for ratio, sign in ((THREE[-1], share), (THREE[0], -share)):
            weights |= {
                spot: sign * weight
                for spot, weight in claim_gain(evictor, Place(benchmark, ratio)).items()
            }
    return weights


def make_pair(evictor: str, more: Mapping[Place, tuple[float, float]] = NOTHING) -> dict[str, Row]:
    """Return both rows of an evictor with Table 1's figures; `more` adds (alone,
    restored) by place.
    """
    found = [
        {
            **_list_points(evictor, side),
            **{place: both[side] for place, both in more.items()},
        }
        for side in (False, True)
    ]
    return {
        evictor: make_base_row(evictor, found[0]),
        name_restored_row(evictor): make_restored_row(evictor, found[1]),
    }
