"""Figures of many documents: weighted means, and 95 % bootstrap intervals over documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from restorekv.evaluation.stats import resamples

Statistic = Callable[[np.ndarray], np.ndarray]  # (R, ...) -> (R,)


@dataclass(frozen=True)
class Pool:
    """`documents`: what an analysis found in each at one ratio; `questions`: how many each was asked."""

    documents: list[dict]
    questions: list[int]

    def __contains__(self, name: str) -> bool:
        return name in self.documents[0]

    def stacked(self, *path: str) -> np.ndarray:
        """One figure of all documents: (documents, ...)."""
        found = self.documents
        for name in path:
            found = [each[name] for each in found]
        return np.array(found, dtype=np.float64)

    def mean(self, *path: str, by_question: bool = False) -> np.ndarray:
        """Every document, or every question, weighs the same."""
        return np.average(self.stacked(*path), axis=0, weights=self.weights(by_question))

    def interval(self, of: Statistic, *path: str, by_question: bool = False) -> list[float]:
        """[low, high] of a statistic of the mean: `of` takes the means of all resamples, (R, ...) -> (R,).

        [None, None] where a resample has none.
        """
        values, drawn = self.stacked(*path), resamples(len(self.documents), 0) * self.weights(by_question)
        means = drawn @ values.reshape(len(values), -1) / drawn.sum(1, keepdims=True)
        found = of(means.reshape(-1, *values.shape[1:]))
        return plain(np.percentile(found, (2.5, 97.5)) if np.isfinite(found).all() else np.full(2, np.nan))

    def weights(self, by_question: bool) -> np.ndarray:
        return np.array(self.questions if by_question else [1] * len(self.questions))


def plain(values: np.ndarray | float) -> list | float | None:
    """JSON values of six significant digits; None for what is not defined."""
    if isinstance(values, np.ndarray) and values.ndim:
        return [plain(value) for value in values]
    return float(f"{float(values):.6g}") if np.isfinite(values) else None
