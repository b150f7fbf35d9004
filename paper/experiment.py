"""What a table or figure of the paper is: rows measured at places, the paper's figures for them,
and what they show.
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

    With `parts` it is the mean over those; `relative` makes it the share of the full cache's, in
    percent.
    """

    benchmark: str
    ratio: float
    part: str = ""
    parts: tuple[str, ...] = ()
    relative: bool = False

    @property
    def each(self) -> tuple[Place, ...]:
        """The places that it is the mean of."""
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

    The adapter is None for the evictor alone, OWN for the one that belongs to the evictor, or what
    is changed of the training settings in an ablation. `also` are points of further backbones that
    the paper's table has, by backbone.
    """

    label: str
    evictor: str
    adapter: Mapping[str, object] | Own | None = None
    conventions: Mapping[str, object] = field(default_factory=dict)
    paper: Points = field(default_factory=dict)
    paper_std: Points = field(default_factory=dict)
    also: Mapping[str, Points] = field(default_factory=dict)

    def points(self, backbone: str = "") -> Points:
        """The paper's, of the experiment's own backbone unless one of `also` is named."""
        return self.also[backbone] if backbone else self.paper


@dataclass(frozen=True)
class Claim:
    """The weighted sum of scores, and `plus`, is above zero; less a deviation over seeds if a spot
    for it is named.

    The sum is in points: how far the scores are on the claim's side of its border.
    """

    text: str
    weights: Weights
    plus: float = 0.0
    spread: Spot | None = None


@dataclass(frozen=True)
class Most:
    """At least `least` of the margins, weighted sums each, are above zero."""

    text: str
    margins: tuple[Weights, ...]
    least: int


@dataclass(frozen=True)
class Comparison:
    """A table or figure of scores. `against` names the row that another one is compared with,
    question by question.

    `orders` asks how many pairs of rows stand as in the paper; `chart` draws scores over ratios.
    `seconds` are the paper's for making a cache, of the fast row and then the slow one.
    """

    name: str
    number: str  # as the paper counts: "Table 1", in its appendix letters
    label: str  # in its source; "" for what the paper does not have
    title: str
    backbone: str  # that the paper's figures are of
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
        """Further ones, besides the main."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for name in row.also))


THREE = (0.2, 0.1, 0.05)
FOUR = (0.4, 0.2, 0.1, 0.05)


def list_places(benchmark: str, ratios: Sequence[float]) -> tuple[Place, ...]:
    """One a ratio."""
    return tuple(Place(benchmark, ratio) for ratio in ratios)


def make_points(where: Sequence[Place], *scores: float) -> dict[Place, float]:
    """A row of a table."""
    return dict(zip(where, scores, strict=True))


def make_ruler_place(ratio: float) -> Place:
    """Most tables are measured there."""
    return Place("ruler", ratio)


def claim_above(better: str, worse: str, place: Place, text: str) -> Claim:
    """One row scores more than another."""
    return Claim(f"{text} at r = {place.ratio:g}", {(better, place): 1, (worse, place): -1})


def claim_kept_share(part: str, share: float, of: str, base: str, place: Place, text: str) -> Claim:
    """A row's gain over `base` is more than `share` of the gain of `of`."""
    weights = {(part, place): 1, (of, place): -share, (base, place): share - 1}
    return Claim(f"{text} at r = {place.ratio:g}", weights)


def make_full_row(paper: Points | None = None, also: Mapping[str, Points] | None = None) -> Row:
    """The reference of figures."""
    return Row("full cache", FULL, paper=paper or {}, also=also or {})


def make_base_row(
    evictor: str, paper: Points | None = None, also: Mapping[str, Points] | None = None
) -> Row:
    """The base evictor without restoring."""
    return Row(name_method(evictor, False), evictor, None, paper=paper or {}, also=also or {})


def make_restored_row(
    evictor: str, paper: Points | None = None, also: Mapping[str, Points] | None = None
) -> Row:
    """It with the adapter that belongs to it."""
    return Row(name_method(evictor, True), evictor, OWN, paper=paper or {}, also=also or {})
