"""Scores over seeds, their paired differences, and verdicts on the paper's claims, computed from
answers.

A score is the mean over seeds of the mean over tasks, in points. Intervals are 95 % bootstraps over
contexts and, within each row, over its seeds. All rows are resampled with the same contexts, so
that differences are paired. With fewer than MIN_FOR_INTERVAL contexts there are no intervals and no
verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from paper.experiment import Claim, Comparison, Most, Place, Spot, Weights
from restorekv.evaluation.stats import (
    MIN_FOR_INTERVAL,
    RESAMPLES,
    Estimate,
    ScoredAnswer,
    _resample_scores,
    check_same_questions,
    compute_mean_score,
    tally_scores,
)

Runs = Mapping[int | None, Sequence[ScoredAnswer]]  # answers by seed
HOLDS = "holds"
NOISE = "within noise"
FAILS = "does not hold"
TOO_FEW = "too few contexts"
MISSING = "not measured"


@dataclass(frozen=True)
class Scores:
    """The answers of an experiment's rows, and the scores computed from them.

    Args:
        runs: The answers by row, benchmark and ratio.
        tasks: The tasks that count, by benchmark and part. An empty tuple means all tasks; a part
            that is absent has no counterpart here.
        by_context: The benchmarks whose task scores are means of the contexts' means.
        sets: The number of each benchmark's set of contexts. Benchmarks that share a set are
            resampled with the same contexts.
        left_out: A benchmark's tasks on which the full cache scores so low that there is nothing to
            lose. `tasks` has none of them, except in a part that has no others.
        full: The name of the row of the full cache.
        drawn: Resampled scores that were computed already.
    """

    runs: Mapping[tuple[str, str, float], Runs]
    tasks: Mapping[tuple[str, str], tuple[str, ...]]
    by_context: frozenset[str] = frozenset()
    sets: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    full: str = "full"
    drawn: dict = field(default_factory=dict, compare=False, repr=False)

    def list_measured(self, row: str, place: Place) -> list[Place]:
        """Return the places that `place` averages and that have answers and a counterpart here.

        Parts on which there is nothing to lose are left out, unless that leaves none.
        """
        if not self.runs.get((row, place.benchmark, place.ratio)):
            return []
        if place.relative and not self.list_measured(
            self.full, Place(place.benchmark, place.ratio, parts=place.parts)
        ):
            return []
        found = [
            each
            for each in place.each
            if (each.benchmark, each.part) in self.tasks and all(self.answers(row, each).values())
        ]
        return [each for each in found if not self.leaves_out(each)] or found

    def leaves_out(self, place: Place) -> bool:
        """Return whether all tasks of a part are left out of means."""
        out = self.left_out.get(place.benchmark, ())
        tasks = self.tasks[place.benchmark, place.part]
        return bool(out) and set(tasks or out) <= set(out)

    def has(self, spot: Spot) -> bool:
        return bool(self.list_measured(*spot))

    def answers(self, row: str, place: Place) -> Runs:
        """Return a row's answers to the tasks of one part, by seed."""
        wanted = self.tasks[place.benchmark, place.part]
        found = self.runs[row, place.benchmark, place.ratio]
        return {
            seed: [a for a in run if not wanted or a.task in wanted] for seed, run in found.items()
        }

    def seeds(self, row: str, place: Place) -> dict[int | None, float]:
        """Return each seed's score, in points."""
        by_context = place.benchmark in self.by_context
        made = []
        for each in self.list_measured(row, place):
            made.append(
                {
                    seed: compute_mean_score(run, by_context)
                    for seed, run in self.answers(row, each).items()
                }
            )
        means = {seed: float(np.mean([scores[seed] for scores in made])) for seed in made[0]}
        return (
            {seed: 100 * mean / self.full_points(place) for seed, mean in means.items()}
            if place.relative
            else means
        )

    def points(self, row: str, place: Place) -> float:
        """Return the mean score over the seeds, in points."""
        return float(np.mean(list(self.seeds(row, place).values())))

    def full_points(self, place: Place) -> float:
        """Return the full cache's score at a place."""
        return self.points(self.full, Place(place.benchmark, place.ratio, parts=place.parts))

    def std(self, row: str, place: Place) -> float | None:
        """Return the sample standard deviation over seeds in points, or None for a single seed."""
        found = list(self.seeds(row, place).values())
        return float(np.std(found, ddof=1)) if len(found) > 1 else None

    def draws(self, row: str, place: Place, stream: int) -> np.ndarray:
        """Return the scores (RESAMPLES,) over resampled contexts and seeds.

        `stream` is the number of the row in a margin. A row's seeds are resampled alike at all
        places, and independently of other rows' seeds.
        """
        key = (row, place, stream)
        if key not in self.drawn:
            made = np.mean(
                [self.draw_part(row, each, stream) for each in self.list_measured(row, place)],
                axis=0,
            )
            if place.relative:
                absolute = Place(place.benchmark, place.ratio, parts=place.parts)
                made = 100 * made / self.draws(self.full, absolute, 0)
            self.drawn[key] = made
        return self.drawn[key]

    def draw_part(self, row: str, place: Place, stream: int) -> np.ndarray:
        """Return the scores (RESAMPLES,) of one part over resampled contexts and seeds.

        All contexts of the set are resampled, even those without questions of this part, so that
        parts that share a set are paired.
        """
        wanted = self.tasks[place.benchmark, place.part]
        by_seed = []
        for run in self.runs[row, place.benchmark, place.ratio].values():
            sums, counts = tally_scores(run, place.benchmark in self.by_context)
            families = list(dict.fromkeys(answer.task for answer in run))
            columns = [
                index for index, family in enumerate(families) if not wanted or family in wanted
            ]
            by_seed.append(
                _resample_scores(
                    sums[:, columns], counts[:, columns], self.sets.get(place.benchmark, 0)
                )
            )
        chosen = np.random.default_rng(stream).integers(
            len(by_seed), size=(len(by_seed), RESAMPLES)
        )
        return np.stack(by_seed)[chosen, np.arange(RESAMPLES)].mean(0)

    def count_contexts(self, row: str, place: Place) -> int:
        """Return how many contexts a row's score at a place is computed from, over all
        its parts.
        """
        contexts = set()
        for each in self.list_measured(row, place):
            for run in self.answers(row, each).values():
                contexts |= {answer.context for answer in run}
        return len(contexts)

    def check(self) -> None:
        """Refuse rows that were asked different questions of one benchmark."""
        asked: dict[str, list[Sequence[ScoredAnswer]]] = {}
        for (_, benchmark, _), found in self.runs.items():
            asked.setdefault(benchmark, []).extend(found.values())
        for found in asked.values():
            check_same_questions(found)


def has_few_contexts(scores: Scores, spots: Iterable[Spot]) -> bool:
    """Return whether any of the scores is computed from fewer than MIN_FOR_INTERVAL contexts."""
    return any(scores.count_contexts(*spot) < MIN_FOR_INTERVAL for spot in spots)


def compute_margin(scores: Scores, weights: Weights) -> Estimate:
    """Return a weighted sum of scores with its interval; no interval (None) over fewer than
    MIN_FOR_INTERVAL contexts.
    """
    rows = list(dict.fromkeys(row for row, _ in weights))
    value = sum(weight * scores.points(*spot) for spot, weight in weights.items())
    if has_few_contexts(scores, weights):
        return float(value), None, None
    drawn = sum(
        weight * scores.draws(*spot, rows.index(spot[0])) for spot, weight in weights.items()
    )
    # NaN is the score of a resampled set without any context that has questions of a part.
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return float(value), float(low), float(high)


def compute_spread(scores: Scores, spot: Spot) -> tuple[float, float, float]:
    """Return the standard deviation over seeds with its 95 % interval.

    The interval is computed from the chi-square distribution, as if scores of seeds were normal.
    """
    seeds = len(scores.seeds(*spot))
    std = scores.std(*spot)
    assert std is not None, "one seed has no deviation"
    drawn = np.random.default_rng(0).chisquare(seeds - 1, 200_000) / (seeds - 1)
    least, most = np.percentile(drawn, (2.5, 97.5))
    return std, std / most**0.5, std / least**0.5


def decide_verdict(low: float | None, high: float | None) -> str:
    """Return the verdict on a margin that should be above zero, from its interval."""
    if low is None or high is None:
        return TOO_FEW
    if low > 0:
        return HOLDS
    if high < 0:
        return FAILS
    return NOISE


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict, its margins in the paper, and our margin with its interval.

    Margins that are not known are None. For a `Most`, margins count how many are above zero, and
    `of` is how many there are; otherwise `of` is 0.
    """

    text: str
    verdict: str
    paper: tuple[float | None, ...] = ()
    value: float | None = None
    low: float | None = None
    high: float | None = None
    of: int = 0


def judge_claim(claim: Claim | Most, experiment: Comparison, scores: Scores) -> JudgedClaim:
    """Judge a claim; the verdict is MISSING if something that it needs is not measured."""
    paper = tuple(
        get_paper_margin(claim, experiment, backbone) for backbone in ("", *experiment.backbones)
    )
    if isinstance(claim, Most):
        return _judge_most(claim, paper, scores)
    needed = {*claim.weights, *([claim.spread] if claim.spread else [])}
    if not all(map(scores.has, needed)) or (claim.spread and scores.std(*claim.spread) is None):
        return JudgedClaim(claim.text, MISSING, paper)
    value, low, high = compute_margin(scores, claim.weights) if claim.weights else (0.0, 0.0, 0.0)
    std, least, greatest = compute_spread(scores, claim.spread) if claim.spread else (0.0, 0.0, 0.0)
    value = value + claim.plus - std
    if low is None or high is None or has_few_contexts(scores, needed):
        return JudgedClaim(claim.text, TOO_FEW, paper, value)
    low = low + claim.plus - greatest
    high = high + claim.plus - least
    return JudgedClaim(claim.text, decide_verdict(low, high), paper, value, low, high)


def _judge_most(claim: Most, paper: tuple[float | None, ...], scores: Scores) -> JudgedClaim:
    """Judge a claim on how many margins are above zero, with an interval over resampled sets."""
    if not all(scores.has(spot) for weights in claim.margins for spot in weights):
        return JudgedClaim(claim.text, MISSING, paper, of=len(claim.margins))
    value = 0
    drawn = np.zeros(RESAMPLES)
    for weights in claim.margins:
        rows = list(dict.fromkeys(row for row, _ in weights))
        value += sum(weight * scores.points(*spot) for spot, weight in weights.items()) > 0
        drawn += (
            sum(
                weight * scores.draws(*spot, rows.index(spot[0]))
                for spot, weight in weights.items()
            )
            > 0
        )
    spots = [spot for weights in claim.margins for spot in weights]
    if has_few_contexts(scores, spots):
        return JudgedClaim(claim.text, TOO_FEW, paper, float(value), of=len(claim.margins))
    low, high = np.percentile(drawn, (2.5, 97.5))
    told = HOLDS if low >= claim.least else FAILS if high < claim.least else NOISE
    return JudgedClaim(
        claim.text, told, paper, float(value), float(low), float(high), len(claim.margins)
    )


def get_paper_margin(
    claim: Claim | Most, experiment: Comparison, backbone: str = ""
) -> float | None:
    """Return the claim's margin in the paper's own figures, or for a `Most` how many are above
    zero; None if the paper does not give the figures.
    """

    def summed(weights: Weights) -> float | None:
        points = []
        for row, place in weights:
            point = experiment.rows[row].points(backbone).get(place)
            if point is None:
                return None
            points.append(point)
        return sum(w * p for w, p in zip(weights.values(), points, strict=True))

    if isinstance(claim, Most):
        above = 0
        for weights in claim.margins:
            margin = summed(weights)
            if margin is None:
                return None
            above += round(margin, 6) > 0
        return float(above)
    value = summed(claim.weights)
    if value is None:
        return None
    value += claim.plus
    if claim.spread is None:
        return value
    row, place = claim.spread
    return value - experiment.rows[row].paper_std[place]


def compare_orders(experiment: Comparison, scores: Scores, place: Place) -> dict:
    """Return the pairs of rows that differ in the paper at a place, grouped by their order here.

    The groups are "as in the paper", within noise and "the other way"; pairs over too few contexts
    have a separate group. A pair is [better, worse] by the paper's figures.
    """
    measured = [
        row
        for row in experiment.rows
        if place in experiment.rows[row].paper and scores.has((row, place))
    ]
    counted = {"as in the paper": [], NOISE: [], "the other way": []}
    for one, other in combinations(measured, 2):
        gap = experiment.rows[one].paper[place] - experiment.rows[other].paper[place]
        if gap == 0:
            continue
        better, worse = (one, other) if gap > 0 else (other, one)
        _, low, high = compute_margin(scores, {(better, place): 1, (worse, place): -1})
        kind = decide_verdict(low, high)
        name = {HOLDS: "as in the paper", FAILS: "the other way"}.get(kind, kind)
        counted.setdefault(name, []).append([better, worse])
    return counted
