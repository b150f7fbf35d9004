"""From answers to scores over seeds, paired differences, and which of the paper's claims hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from ablations.sweep import Claim, Sweep

from restorekv.errors import RestoreKVError
from restorekv.evaluate import Answer, interval, mean_score

Runs = Mapping[int | None, Mapping[float, Sequence[Answer]]]  # answers by seed and ratio


@dataclass(frozen=True)
class Score:
    """A variant at a ratio: the mean over seeds of every question's score, and every seed's own score."""

    answers: list[Answer]
    seeds: dict[int | None, float]

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds, in points."""
        return float(np.std(list(self.seeds.values()), ddof=1)) if len(self.seeds) > 1 else None


def scored(runs: Runs, ratio: float) -> Score:
    """Question by question the mean over seeds."""
    return Score(
        pooled([answers[ratio] for answers in runs.values()]),
        {seed: mean_score(answers[ratio]) for seed, answers in runs.items()},
    )


def pooled(runs: Sequence[Sequence[Answer]]) -> list[Answer]:
    """Each question once, with the mean of its scores. Raises RestoreKVError if the runs asked different questions."""
    same_questions(runs)
    return [replace(asked[0], score=float(np.mean([a.score for a in asked]))) for asked in zip(*runs, strict=True)]


def same_questions(runs: Sequence[Sequence[Answer]]) -> None:
    asked = [[(answer.document, answer.family, answer.question) for answer in run] for run in runs]
    if any(other != asked[0] for other in asked[1:]):
        raise RestoreKVError("The runs were asked different questions; measure them again in another folder.")


def margin(weights: Mapping[str, float], scores: Mapping[str, Score]) -> tuple[float, float, float]:
    """A weighted sum of scores in points with its 95 % interval: every resampled document counts for all variants.

    Scores are means, so the sum of the scores is the score of the summed answers.
    """
    runs = [scores[name].answers for name in weights]
    same_questions(runs)
    summed = [
        replace(asked[0], score=sum(w * a.score for w, a in zip(weights.values(), asked, strict=True)))
        for asked in zip(*runs, strict=True)
    ]
    return interval(summed)


def verdict(value: float, low: float, high: float) -> str:
    """Of something that should be above zero."""
    if low > 0:
        return "holds"
    if high < 0:
        return "does not hold"
    return "within noise"


def of_paper(claim: Claim, sweep: Sweep) -> float:
    """The claim's margin in the paper's own figures."""
    value = claim.plus + sum(w * sweep.variants[name].paper[claim.ratio] for name, w in claim.weights.items())
    return value - (sweep.variants[claim.spread].paper_std[claim.ratio] if claim.spread else 0)


def judged(claim: Claim, sweep: Sweep, found: Mapping[str, Runs]) -> dict:
    """A claim beside the paper's margin and ours; without a verdict while a run is missing."""
    told = {"claim": claim.text, "paper": of_paper(claim, sweep)}
    needed = {*claim.weights, *([claim.spread] if claim.spread else [])}
    if not needed <= set(found):
        return {**told, "verdict": "not run"}
    scores = {name: scored(found[name], claim.ratio) for name in needed}
    if claim.spread and scores[claim.spread].std is None:
        return {**told, "verdict": "not run"}
    value, low, high = margin(claim.weights, scores) if claim.weights else (0.0, 0.0, 0.0)
    shift = claim.plus - (scores[claim.spread].std if claim.spread else 0)
    value, low, high = value + shift, low + shift, high + shift
    return {**told, "margin": value, "low": low, "high": high, "verdict": verdict(value, low, high)}


def orders(sweep: Sweep, found: Mapping[str, Runs], ratio: float) -> dict:
    """All pairs of variants that differ in the paper at `ratio`: ordered so here, within noise, or the other way."""
    known = [name for name in found if ratio in sweep.variants[name].paper]
    scores = {name: scored(found[name], ratio) for name in known}
    counted = {"ratio": ratio, "as in the paper": [], "within noise": [], "the other way": []}
    for one, other in combinations(known, 2):
        gap = sweep.variants[one].paper[ratio] - sweep.variants[other].paper[ratio]
        if gap == 0:
            continue
        better, worse = (one, other) if gap > 0 else (other, one)
        kind = verdict(*margin({better: 1, worse: -1}, scores))
        place = {"holds": "as in the paper", "does not hold": "the other way"}.get(kind, kind)
        counted[place].append([better, worse])
    return counted


def rows(sweep: Sweep, found: Mapping[str, Runs], ratios: Sequence[float]) -> dict[str, dict]:
    """What stands in the table: by variant and ratio the score, its interval, its seeds, and what parts it from the
    reference."""
    made = {}
    for name, runs in found.items():
        cells = {}
        for ratio in ratios:
            score = scored(runs, ratio)
            cell = dict(zip(("score", "low", "high"), interval(score.answers), strict=True))
            cell |= {"std": score.std, "seeds": {str(seed): points for seed, points in score.seeds.items()}}
            if name != sweep.reference and sweep.reference in found:
                scores = {name: score, sweep.reference: scored(found[sweep.reference], ratio)}
                gap = margin({name: 1, sweep.reference: -1}, scores)
                cell |= zip(("difference", "difference_low", "difference_high"), gap, strict=True)
            cells[f"{ratio:g}"] = cell
        made[name] = {"label": sweep.variants[name].label, "ratios": cells}
    return made
