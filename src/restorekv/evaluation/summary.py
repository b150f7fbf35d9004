"""Computes the figures of a finished cell: scores, further metrics, fidelity, and what its caches held."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np

from restorekv import tasks
from restorekv.evaluation import fidelity
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import Answer, compared, family_means


def summary(result: Result) -> dict:
    """Returns a finished cell's figures: means over contexts of what its caches held, scores in points."""
    benchmark, facts = tasks.make(result.cell.benchmark), result.facts
    answers, by_context = result.answers, benchmark.by_context(result.cell.protocol)
    pairs = facts["shape"]["layers"] * facts["shape"]["heads"]
    counted = [line["tokens"] + (line["prefix"] if facts["prefix_policy"] == "counted" else 0) for line in result.lines]
    positions = [line["tokens"] + line["prefix"] for line in result.lines]
    held = {key: column(result, key) for key in ("pairs", "pairs_with_prefix", "bytes")}
    named = {task: [answer for answer in answers if answer.family == task] for task in family_means(answers)}
    grouped = {
        group: [answer for answer in answers if answer.family in members]
        for group, members in benchmark.groups().items()
    }
    return {
        **compared(answers, by_context=by_context), "samples": len(result.lines),
        **{key: float(values.mean()) for key, values in held.items()},
        "kept": float(np.mean(held["pairs"] / np.array(counted) / pairs)),
        "kept_with_prefix": float(np.mean(held["pairs_with_prefix"] / np.array(positions) / pairs)),
        **beside(result.lines),
        "tasks": {task: each | beside(result.lines, {task}) for task, each in parts(named, by_context).items()},
        "groups": parts(grouped, by_context),
    }  # fmt: skip


def beside(lines: Sequence[Mapping], chosen: Container[str] | None = None) -> dict[str, object]:
    """Returns what is reported beside the score of all tasks or of the `chosen` ones, as far as it was recorded."""
    further = metrics(lines, chosen)
    return fidelity.summarized(lines, chosen) | ({"metrics": further} if further else {})


def metrics(lines: Sequence[Mapping], chosen: Container[str] | None = None) -> dict[str, float]:
    """Returns every further metric in points: the mean over tasks of the mean over questions."""
    by_metric: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        for answer in line["answers"]:
            if chosen is None or answer["task"] in chosen:
                for name, value in answer.get("metrics", {}).items():
                    by_metric.setdefault(name, {}).setdefault(answer["task"], []).append(value)
    return {
        name: 100 * float(np.mean([np.mean(values) for values in by_task.values()]))
        for name, by_task in by_metric.items()
    }


def column(result: Result, key: str) -> np.ndarray:
    return np.array([line[key] for line in result.lines], dtype=float)


def parts(answers: dict[str, list[Answer]], by_context: bool) -> dict[str, dict]:
    """Returns the scores of the tasks or groups that were asked."""
    return {name: compared(some, by_context=by_context) for name, some in answers.items() if some}
