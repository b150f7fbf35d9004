"""Answers kept: how many of the questions that the full cache answers right a small cache still
answers right.

A score says how good answers are on average, and mixes what eviction lost with what the model never
knew. Only questions that the full cache answers right count here, because on the others there is
nothing to lose. The benchmark's `is_right` decides from the references whether an answer is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from restorekv.evaluation.conditions import FULL_CACHE
from restorekv.evaluation.frame import ASKED, GridResults, Row
from restorekv.evaluation.pools import SeedPool
from restorekv.evaluation.reuse import digest_line
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, bootstrap_ratio
from restorekv.evaluation.tables import Table, format_percent, make_slug

EVERY = "all texts"
LENGTHS = (0, 512, 1024, 2048, 4096, 8192)  # tokens of a context: ends of the ranges shown
NOTE = (
    "Questions that the full cache answers right by the references, and how many of them the small "
    "cache still does, with the share and its 95 % bootstrap interval over contexts, which fewer "
    f"than {MIN_FOR_INTERVAL} contexts do not have. Restored caches have the very same questions "
    "as the evictor alone."
)


@dataclass(frozen=True)
class ContextAnswers:
    """The questions about one context that the full cache answers right.

    Attributes:
        context: A hash of the context and its questions, so that each context counts once.
        text: The kind of text: the label of the condition, such as the benchmark's title.
        tokens: Length of the context.
        right: How many questions there are, at least one.
        kept: How many of them the small cache answers right too.
        asked: How it was asked, such as the model, dtype, protocol and prefix policy. Answers to
            questions that were asked in different ways are not added up.
    """

    context: Hashable
    text: str
    tokens: int
    right: int
    kept: int
    asked: Hashable = ()


# By method and ratio.
AnswersByMethod = dict[tuple[str, float], list[ContextAnswers]]


def compare_contexts(
    pool: SeedPool, full: SeedPool, title: str, asked: Hashable = ()
) -> Iterator[ContextAnswers]:
    """Compare a small cache's answers with the full cache's, question by question.

    Args:
        pool: The cells of the small cache, all of them done.
        full: The cells of the full cache on the same contexts.
        title: The name of the kind of text.
        asked: How the questions were asked.

    Yields:
        One entry for each context about which the full cache answers a question right.
    """
    is_right = full.benchmark.is_right
    for sample, line in full.lines_by_context.items():
        # By id, because the two caches may have answered in a different order.
        own = {answer["id"]: answer for answer in pool.lines_by_context[sample]["answers"]}
        right = [answer["id"] for answer in line["answers"] if is_right(answer)]
        if right:
            kept = sum(is_right(own[question]) for question in right)
            yield ContextAnswers(digest_line(line), title, line["tokens"], len(right), kept, asked)


def collect_answers(grid: GridResults) -> AnswersByMethod:
    """Return the contexts of every small cache, by its method and ratio.

    Conditions without a finished full cache have no answers to keep and are left out.
    """
    answers: AnswersByMethod = {}
    for entry in grid.entries:
        columns = entry.columns
        full = entry.pool.full
        if columns["method"] == FULL_CACHE or full is None:
            continue
        if full.done and entry.pool.done:
            own = answers.setdefault((columns["method"], columns["ratio"]), [])
            asked = tuple(columns[each] for each in ASKED if each != "benchmark")
            own.extend(compare_contexts(entry.pool, full, columns["condition"], asked))
    return answers


def count_kept(contexts: Sequence[ContextAnswers]) -> dict[str, Any]:
    """Return how many answers the full cache and the small cache have right, and the share kept
    with its interval over contexts.
    """
    right = np.array([each.right for each in contexts], dtype=float)
    kept = np.array([each.kept for each in contexts], dtype=float)
    figures: dict[str, Any] = {
        "right": int(right.sum()),
        "kept": int(kept.sum()),
        "contexts": len(contexts),
    }
    if contexts:
        # Per context, since the questions of one text are dependent draws.
        share, low, high = bootstrap_ratio(kept, right)
        figures |= {"share": share, "low": low, "high": high}
    return figures


def list_kept_rows(answers: AnswersByMethod) -> Iterator[dict[str, Any]]:
    """Yield a row for every method and ratio: over all texts, by kind of text, and by length.

    If the methods were not asked the same texts, there are rows by kind of text only: a row over
    all texts would compare methods on different questions.
    """
    texts = {frozenset(each.context for each in contexts) for contexts in answers.values()}
    # Methods as tables order them, ratios from mild to tight.
    methods = list(dict.fromkeys(method for method, _ in answers))
    for method, ratio in sorted(answers, key=lambda key: (methods.index(key[0]), -key[1])):
        for part, own in _split_contexts(answers[method, ratio], len(texts) == 1).items():
            yield {"method": method, "ratio": ratio, "part": part} | count_kept(own)


def make_kept_table(grid: GridResults) -> Table | None:
    """Return the table of answers kept; None if no full cache answers anything right."""
    rows = [row for row in list_kept_rows(collect_answers(grid)) if row["right"]]
    if not rows:
        return None
    columns: Mapping[str, Callable[[Row], str]] = {
        "texts": lambda row: row["part"],
        "method": lambda row: row["method"],
        "r": lambda row: f"{row['ratio']:g}",
        "right": lambda row: f"{row['right']:,}",
        "kept": _format_kept,
        "contexts": lambda row: f"{row['contexts']:,}",
    }
    order = {part: index for index, part in enumerate(dict.fromkeys(row["part"] for row in rows))}
    rows.sort(key=lambda row: order[row["part"]])
    return Table.from_figures(
        make_slug("answers", "kept"), "Answers kept", rows, columns, NOTE, (0, 1)
    )


def _split_contexts(
    contexts: Sequence[ContextAnswers], with_total: bool
) -> dict[str, list[ContextAnswers]]:
    """Return the contexts by kind of text and, if `with_total`, also those of all texts and by
    length.

    If contexts were asked in several ways, such as under two protocols, they are grouped by kind of
    text only.
    """
    one_way = with_total and len({each.asked for each in contexts}) == 1
    # A context that two conditions share, such as two counts of one benchmark, counts once.
    distinct = list({each.context: each for each in contexts}.values())
    parts = {}
    if one_way:
        parts[EVERY] = distinct
    titles = list(dict.fromkeys(each.text for each in contexts))
    # With one kind of text its row would repeat that of all texts.
    if len(titles) > 1 or not one_way:
        for title in titles:
            parts[title] = [each for each in contexts if each.text == title]
    if not one_way:
        return parts
    ranges: dict[str, tuple[float, float]] = {}
    for low, high in pairwise(LENGTHS):
        ranges[f"{low + 1:,} to {high:,} tokens"] = (low, high)
    ranges[f"over {LENGTHS[-1]:,} tokens"] = (LENGTHS[-1], math.inf)
    for name, (low, high) in ranges.items():
        own = [each for each in distinct if low < each.tokens <= high]
        if own and len(own) < len(distinct):
            parts[name] = own
    return parts


def _format_kept(row: Row) -> str:
    """Return the number kept and, if there are enough contexts, the share with its interval."""
    # A share of a handful of texts says nothing.
    if row["low"] is None:
        return f"{row['kept']:,}"
    text = f"{row['kept']:,} ({format_percent(row['share'], 0)})"
    return f"{text}, {format_percent(row['low'], 0)} to {format_percent(row['high'], 0)}"
