"""The form of a table or figure of the paper: rows measured at places, the paper's figures for
them, and the claims that they support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from restorekv.evaluation.grid import FULL
from restorekv.evaluation.tables import name_method


@dataclass(frozen=True)
class Place:
    """Where a score is measured: one of the paper's benchmarks, a ratio, and a part of the
    benchmark's tasks.

    With `parts`, the score is the mean over those parts; `relative` turns it into a share of the
    full cache's, in percent.
    """

    benchmark: str
    ratio: float
    part: str = ""
    parts: tuple[str, ...] = ()
    relative: bool = False

    @property
    def each(self) -> tuple[Place, ...]:
        """The places that this one averages, or the place itself if it has no `parts`."""
        return tuple(replace(self, part=part, parts=(), relative=False) for part in self.parts) or (
            self,
        )


Spot: TypeAlias = tuple[str, Place]  # a row at a place
Weights: TypeAlias = Mapping[Spot, float]
Points: TypeAlias = Mapping[Place, float]
Own = Literal["own"]
OWN: Own = "own"


@dataclass(frozen=True)
class Row:
    """A method: the evictor used, its adapter, its conventions; and the paper's points for it.

    `adapter` is None for the evictor alone, OWN for the adapter that belongs to the evictor, or, in
    an ablation, the training settings that differ. `also` has the points of further backbones in
    the paper's table, by backbone.
    """

    label: str
    evictor: str
    adapter: Mapping[str, object] | Own | None = None
    conventions: Mapping[str, object] = field(default_factory=dict)
    paper: Points = field(default_factory=dict)
    paper_std: Points = field(default_factory=dict)
    also: Mapping[str, Points] = field(default_factory=dict)

    def points(self, backbone: str = "") -> Points:
        """Return the paper's points for a backbone in `also`, or for the experiment's own."""
        return self.also[backbone] if backbone else self.paper


@dataclass(frozen=True)
class Claim:
    """The claim that a weighted sum of scores plus `plus` is above zero.

    If `spread` names a row at a place, its standard deviation over seeds is subtracted from the
    sum. The sum is in points; it says by how much the claim holds, or fails if it is negative.
    """

    text: str
    weights: Weights
    plus: float = 0.0
    spread: Spot | None = None


@dataclass(frozen=True)
class Most:
    """The claim that at least `least` of the margins, which are weighted sums, are above zero."""

    text: str
    margins: tuple[Weights, ...]
    least: int


@dataclass(frozen=True)
class Comparison:
    """A table or figure of scores.

    `against` maps a row to the row that it is compared with, question by question. `orders` adds
    how many pairs of rows have the paper's order; `chart` draws scores against ratios. `seconds`
    are the paper's times to make a cache, of the fast row and then the slow one.
    """

    name: str
    number: str  # the paper's, such as "Table 1"; "Table A" in its appendix
    label: str  # the one in the paper's source; "" if the paper does not have this experiment
    title: str
    backbone: str  # the model that the paper's figures are of
    rows: Mapping[str, Row]
    places: tuple[Place, ...]
    claims: tuple[Claim | Most, ...]
    against: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    orders: bool = False
    chart: bool = False

    @property
    def backbones(self) -> tuple[str, ...]:
        """The backbones that the paper has figures for in addition to `backbone`."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for name in row.also))


THREE = (0.2, 0.1, 0.05)
FOUR = (0.4, 0.2, 0.1, 0.05)


def list_places(benchmark: str, ratios: Sequence[float]) -> tuple[Place, ...]:
    """Return a benchmark's places, one for each ratio."""
    return tuple(Place(benchmark, ratio) for ratio in ratios)


def make_points(where: Sequence[Place], *scores: float) -> dict[Place, float]:
    """Return the paper's scores of a row by place."""
    return dict(zip(where, scores, strict=True))


def make_ruler_place(ratio: float) -> Place:
    """Return the place of RULER at a ratio, where most tables are measured."""
    return Place("ruler", ratio)


def claim_above(better: str, worse: str, place: Place, text: str) -> Claim:
    """Return the claim that one row scores more than another."""
    return Claim(f"{text} at r = {place.ratio:g}", {(better, place): 1, (worse, place): -1})


def claim_kept_share(
    weaker: str, share: float, stronger: str, base: str, place: Place, text: str
) -> Claim:
    """Return the claim that the row `weaker` has more than `share` of the gain of `stronger`
    over `base`.
    """
    weights = {(weaker, place): 1, (stronger, place): -share, (base, place): share - 1}
    return Claim(f"{text} at r = {place.ratio:g}", weights)


def make_full_row(paper: Points | None = None, also: Mapping[str, Points] | None = None) -> Row:
    """Return the row of the full cache, the reference in figures."""
    return Row("full cache", FULL, paper=paper or {}, also=also or {})


def make_base_row(
    evictor: str, paper: Points | None = None, also: Mapping[str, Points] | None = None
) -> Row:
    """Return the row of an evictor without restoring."""
    return Row(name_method(evictor, False), evictor, None, paper=paper or {}, also=also or {})


def make_restored_row(
    evictor: str, paper: Points | None = None, also: Mapping[str, Points] | None = None
) -> Row:
    """Return the row of an evictor with the adapter that belongs to it."""
    return Row(name_method(evictor, True), evictor, OWN, paper=paper or {}, also=also or {})
