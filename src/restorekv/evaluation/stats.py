"""Computes scores with intervals: the mean over tasks of each task's mean, and a bootstrap over
contexts.

The headline is the unweighted mean over tasks (as RULER's), in points; intervals are 95 %
percentile bootstraps over contexts, so questions of one context count as the dependent draws they
are. Differences are paired: both sides use the same resampled contexts.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from restorekv.errors import RestoreKVError

MIN_FULL_SCORE = 10.0  # points: a task where the full cache scores less has nothing to lose
MIN_LOSS = 1.0  # points: the share of a smaller loss that comes back says nothing
MIN_FOR_INTERVAL = 6  # contexts: a bootstrap over fewer is too narrow, over one it has no width
MIN_FOR_RANKING = 65  # contexts that a comparison of scores needs; fewer cannot rank methods
RESAMPLES = 2000
BLOCK = 500  # resamples drawn at a time: their counts are (BLOCK, contexts)

# A mean with its 95 % interval, which fewer than MIN_FOR_INTERVAL contexts do not have.
Estimate = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class ScoredAnswer:
    """The answer to one question about a context, with its score in [0, 1] and the task to which
    the score counts.
    """

    context: int | str
    task: str
    question: str
    prediction: str
    score: float


def compute_task_means(
    answers: Sequence[ScoredAnswer], by_context: bool = False
) -> dict[str, float]:
    """Return the mean score of each task, in points and in the order of appearance.

    With `by_context`, a task's mean is the mean of its contexts' means (the rule of KVzip's
    evaluation); otherwise it is the mean over all questions.
    """
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    sums, counts = tally_scores(answers, by_context)
    return dict(zip(tasks, (100 * sums.sum(0) / counts.sum(0)).tolist(), strict=True))


def compute_mean_score(answers: Sequence[ScoredAnswer], by_context: bool = False) -> float:
    """Return the unweighted mean over tasks, in points."""
    return float(np.mean(list(compute_task_means(answers, by_context).values())))


def find_tasks_without_loss(full: Sequence[ScoredAnswer], by_context: bool = False) -> list[str]:
    """Return the tasks on which the full cache, which gave the answers `full`, scores below
    MIN_FULL_SCORE.
    """
    return [
        task for task, mean in compute_task_means(full, by_context).items() if mean < MIN_FULL_SCORE
    ]


def drop_tasks(answers: Sequence[ScoredAnswer], left_out: Container[str]) -> list[ScoredAnswer]:
    """Return the answers that means are taken over: those to tasks that are not `left_out`, or all
    of them if none would remain.
    """
    return [answer for answer in answers if answer.task not in left_out] or list(answers)


def summarize_scores(
    answers: Sequence[ScoredAnswer], alone: Sequence[ScoredAnswer] = (), by_context: bool = False
) -> dict[str, Any]:
    """Return a score with its interval and, if `alone` has the answers of the evictor alone, the
    paired gain over it with an interval.
    """
    score, low, high = bootstrap_score(answers, by_context=by_context)
    figures: dict[str, Any] = {
        "score": score,
        "low": low,
        "high": high,
        "questions": len(answers),
        "contexts": len({answer.context for answer in answers}),
    }
    if alone:
        gain, low, high = bootstrap_score(answers, alone, by_context=by_context)
        figures |= {"gain": gain, "gain_low": low, "gain_high": high}
    return figures


def bootstrap_score(
    answers: Sequence[ScoredAnswer],
    reference: Sequence[ScoredAnswer] | None = None,
    by_context: bool = False,
) -> Estimate:
    """Return the mean over tasks, in points, or its paired difference from the mean of `reference`.

    The bounds of the 95 % interval follow; they are None for fewer than MIN_FOR_INTERVAL contexts.
    Raises RestoreKVError if the two were asked different questions.
    """
    sums, counts = tally_scores(answers, by_context)
    if reference is not None:
        check_same_questions([answers, reference])
        # Both were asked the same, so the difference of sums is the sum of differences.
        sums = sums - tally_scores(reference, by_context)[0]
    mean = 100 * float(np.mean(sums.sum(0) / counts.sum(0)))
    if len(counts) < MIN_FOR_INTERVAL:
        return mean, None, None
    low, high = np.percentile(_resample_scores(sums, counts), (2.5, 97.5))
    return mean, float(low), float(high)


def _resample_scores(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the mean over tasks, in points, of every resampled set of contexts: (RESAMPLES,). It
    is NaN if no task was drawn.
    """
    # Per resample: sums and counts of each task, then the mean over the tasks that were drawn at
    # all.
    parts = []
    for drawn in np.array_split(draw_resamples(len(counts), seed), max(RESAMPLES // BLOCK, 1)):
        totals = drawn @ counts
        means = np.where(totals > 0, drawn @ sums / np.where(totals > 0, totals, 1), 0).sum(1)
        tasks = (totals > 0).sum(1)
        parts.append(100 * means / np.where(tasks > 0, tasks, np.nan))
    return np.concatenate(parts)


def bootstrap_ratio(
    sums: np.ndarray,
    weights: np.ndarray,
    reference: tuple[np.ndarray, np.ndarray] | None = None,
) -> Estimate:
    """Return the total of `sums` divided by the total of `weights`, both (contexts,), or its paired
    difference from the same ratio of `reference`.

    The bounds of the 95 % interval follow; they are None for fewer than MIN_FOR_INTERVAL contexts.
    """
    # Without a reference, nothing is subtracted.
    other_sums, other_weights = reference or (np.zeros_like(sums), weights)
    ratio = float(sums.sum() / weights.sum() - other_sums.sum() / other_weights.sum())
    if len(sums) < MIN_FOR_INTERVAL:
        return ratio, None, None
    drawn = draw_resamples(len(sums), 0)
    # A resample without any weight has no ratio.
    drawn = drawn[drawn @ weights > 0]
    means = drawn @ sums / (drawn @ weights) - drawn @ other_sums / (drawn @ other_weights)
    low, high = np.percentile(means, (2.5, 97.5))
    return ratio, float(low), float(high)


@lru_cache(maxsize=8)
def draw_resamples(contexts: int, seed: int) -> np.ndarray:
    """Return how often each context is drawn: (RESAMPLES, contexts), the same for every cell of
    a run.
    """
    # Drawing n contexts with replacement is drawing how often each of them appears.
    return np.random.default_rng(seed).multinomial(
        contexts, np.full(contexts, 1 / contexts), RESAMPLES
    )


def tally_scores(
    answers: Sequence[ScoredAnswer], by_context: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of scores and the counts to divide them by, both (contexts, tasks) in order
    of appearance.
    """
    contexts: dict[int | str, int] = {}
    tasks: dict[str, int] = {}
    for answer in answers:
        contexts.setdefault(answer.context, len(contexts))
        tasks.setdefault(answer.task, len(tasks))
    sums = np.zeros((len(contexts), len(tasks)))
    counts = np.zeros_like(sums)
    for answer in answers:
        index = contexts[answer.context], tasks[answer.task]
        sums[index] += answer.score
        counts[index] += 1
    if by_context:
        # Each context's mean becomes one score of the task.
        sums = sums / np.maximum(counts, 1)
        counts = np.minimum(counts, 1)
    return sums, counts


def check_same_questions(runs: Sequence[Sequence[ScoredAnswer]]) -> None:
    """Refuse to compare runs that were asked different questions, or in a different order."""
    asked = [[(answer.context, answer.task, answer.question) for answer in run] for run in runs]
    if any(other != asked[0] for other in asked[1:]):
        raise RestoreKVError(
            "The runs were asked different questions; measure them again in another folder."
        )
