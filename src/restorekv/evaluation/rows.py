"""From the answers of cells to figures: scores with intervals and sizes of caches, pooled over
seeds, as a cell's summary and as rows for programs.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from restorekv import tasks
from restorekv.evaluation.fidelity import FIGURES, summarize_fidelity
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import Result, list_answers
from restorekv.evaluation.stats import (
    LEAST_LOSS,
    ScoredAnswer,
    compute_mean_score,
    drop_tasks,
    find_tasks_without_loss,
    score_answers,
)

# What a row takes over from the record of how its cell was made.
IDENTITY_COLUMNS = (
    "prefix_policy",
    "on_small_budget",
    "allocation",
    "restore_from",
    "offset",
    "fingerprint",
    "dtype",
    "device",
)
# What a row takes over from the summary of its cell.
SUMMARY_COLUMNS = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


@dataclass(frozen=True)
class SeedPool:
    """Results of one cell, pooled over the benchmark's seeds.

    Means skip the tasks in `left_out`, unless nothing else is asked for. Methods take `members`,
    the tasks to use; empty means all.
    """

    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()

    @property
    def identity(self) -> dict:
        return self.results[0].identity

    @property
    def specs(self) -> list[str]:
        """The specs of the benchmark, one for each seed."""
        return [result.identity["benchmark"]["spec"] for result in self.results]

    def restrict(self, specs: Sequence[str]) -> Self | None:
        """Return the pool of these seeds alone; None where one is missing."""
        chosen = tuple(
            result for result in self.results if result.identity["benchmark"]["spec"] in specs
        )
        return replace(self, results=chosen) if len(chosen) == len(specs) else None

    @cached_property
    def benchmark(self) -> tasks.Benchmark:
        return tasks.make_benchmark(self.results[0].cell.benchmark)

    @cached_property
    def averages_contexts(self) -> bool:
        """Whether scores are means over contexts instead of questions."""
        return self.benchmark.averages_contexts(self.results[0].cell.protocol)

    @cached_property
    def done(self) -> bool:
        return all(result.done for result in self.results)

    @property
    def progress(self) -> tuple[int, int]:
        """Contexts answered so far, and contexts there are; in the end those that figures are of,
        each once.
        """
        if self.done:
            return len(self.lines), len(self.lines)
        samples = sum(result.identity["benchmark"]["samples"] for result in self.results)
        return sum(len(result.lines) for result in self.results), samples

    @cached_property
    def lines_by_context(self) -> dict[int | str, dict]:
        """The line of every context, each context once: two seeds may have drawn the same one."""
        # Samples of one cell have unique names already.
        if len(self.results) == 1:
            return {line["sample"]: line for line in self.results[0].lines}
        lines: dict[int | str, dict] = {}
        for result in self.results:
            for line in result.lines:
                # Every seed numbers its contexts from 0, so the name includes a hash of what was
                # asked.
                asked = [(answer["question"], answer["references"]) for answer in line["answers"]]
                digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:12]
                lines.setdefault(f"{line['sample']} {line['context']} {digest}", line)
        return lines

    @property
    def lines(self) -> list[dict]:
        return list(self.lines_by_context.values())

    @cached_property
    def answers(self) -> list[ScoredAnswer]:
        return list_answers(self.lines_by_context.items())

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(answer.task for answer in self.answers))

    @property
    def task_groups(self) -> dict[str, Sequence[str]]:
        """The benchmark's groups of tasks of which any was asked, or all where it needs all."""
        groups = {}
        for name, members in self.benchmark.group_tasks().items():
            asked = set(self.tasks).intersection(members)
            needed = len(members) if self.benchmark.needs_whole_groups else 1
            if len(asked) >= needed:
                groups[name] = members
        return groups

    def find_tasks_without_loss(self) -> tuple[str, ...]:
        """Return the tasks on which this full cache has nothing to lose."""
        return tuple(find_tasks_without_loss(self.answers, self.averages_contexts))

    def list_counted_answers(self, members: Iterable[str] = ()) -> list[ScoredAnswer]:
        """Return the answers that means are taken over."""
        # No members: all tasks.
        wanted = set(members or self.tasks)
        return drop_tasks(
            [answer for answer in self.answers if answer.task in wanted], self.left_out
        )

    def score_tasks(
        self, members: Iterable[str] = (), base: Self | None = None, full: Self | None = None
    ) -> dict[str, Any]:
        """Return score, interval and counts (see `stats.score_answers`).

        With `base` they include the paired gain over it. With `full` too, they include `recovered`:
        the gain as a share of what the base loses to the full cache, None if it loses less than
        LEAST_LOSS.
        """
        figures: dict[str, Any] = score_answers(
            self.list_counted_answers(members),
            base.list_counted_answers(members) if base else (),
            self.averages_contexts,
        )
        if base and full:
            # The loss is what the base lacks to the full cache, over the same tasks.
            averages_contexts = self.averages_contexts
            full_score = compute_mean_score(full.list_counted_answers(members), averages_contexts)
            base_score = compute_mean_score(base.list_counted_answers(members), averages_contexts)
            figures["recovered"] = None
            if full_score - base_score >= LEAST_LOSS:
                figures["recovered"] = figures["gain"] / (full_score - base_score)
        return figures

    def average_metrics(self, members: Iterable[str] = ()) -> dict[str, float]:
        """Return every further metric in points: the mean over tasks of the mean over questions."""
        chosen = {answer.task for answer in self.list_counted_answers(members)}
        points = {}
        for name, by_task in self._collect_metric_values(chosen).items():
            # A task counts once, however many questions it has.
            means = [np.mean(values) for values in by_task.values()]
            points[name] = 100 * float(np.mean(means))
        return points

    def _collect_metric_values(self, chosen: set[str]) -> dict[str, dict[str, list[float]]]:
        """Return the values of each metric by task, over the chosen tasks."""
        by_metric: dict[str, dict[str, list[float]]] = {}
        for line in self.lines:
            for answer in line["answers"]:
                if answer["task"] not in chosen:
                    continue
                for name, value in answer.get("metrics", {}).items():
                    by_task = by_metric.setdefault(name, {})
                    by_task.setdefault(answer["task"], []).append(value)
        return by_metric

    def summarize_fidelity(self, members: Iterable[str] = ()) -> dict[str, float]:
        """Return how far the answers are from the full cache's, {} where that was not recorded; see
        fidelity.py.
        """
        return summarize_fidelity(self.lines, set(members or self.tasks))

    def get_values(self, key: str) -> np.ndarray:
        """Return a figure of every context: pairs, pairs_with_prefix, bytes, tokens, prefix or
        restore_tokens.
        """
        return np.array([line[key] for line in self.lines], dtype=float)

    def average(self, key: str) -> float:
        return float(self.get_values(key).mean())

    def compute_kept_share(self, with_prefix: bool = False) -> float:
        """Return the share of pairs held, mean over contexts: of those in the budget, or of all
        with the prefix.
        """
        # L * H pairs for each column that competes: T, or S + T with the prefix counted.
        heads = self.identity["shape"]["layers"] * self.identity["shape"]["heads"]
        columns = self.get_values("tokens")
        if with_prefix or self.identity["prefix_policy"] == "counted":
            columns = columns + self.get_values("prefix")
        pairs = self.get_values("pairs_with_prefix" if with_prefix else "pairs")
        return float(np.mean(pairs / columns / heads))


def summarize_cell(result: Result) -> dict:
    """Return a finished cell's figures: means over contexts of what its caches held, scores in
    points.
    """
    pool = SeedPool((result,))

    def summarize_extras(members: Sequence[str] = ()) -> dict[str, object]:
        """Return fidelity and further metrics, if they were recorded."""
        figures: dict[str, object] = dict(pool.summarize_fidelity(members))
        if metrics := pool.average_metrics(members):
            figures["metrics"] = metrics
        return figures

    by_task = {task: pool.score_tasks([task]) | summarize_extras([task]) for task in pool.tasks}

    return {
        **pool.score_tasks(),
        "samples": len(pool.lines),
        **{key: pool.average(key) for key in ("pairs", "pairs_with_prefix", "bytes")},
        "kept": pool.compute_kept_share(),
        "kept_with_prefix": pool.compute_kept_share(with_prefix=True),
        **summarize_extras(),
        "tasks": by_task,
        "groups": {name: pool.score_tasks(members) for name, members in pool.task_groups.items()},
    }


def make_rows(results: Sequence[Result]) -> list[dict]:
    """Return a row for every finished cell, in their order. Scores are in points; pairs and bytes
    are means.
    """
    # A cell that still runs has no figures, and cannot be the base or the full cache of another.
    done_by_cell = {result.cell: result for result in results if result.done}
    # Reversed, so that the first full cache of a question set is the one that stays.
    full_by_questions = {
        cell.question_set: result
        for cell, result in reversed(done_by_cell.items())
        if cell.evictor == FULL
    }
    return [
        _make_row(result, done_by_cell.get(cell.base), full_by_questions.get(cell.question_set))
        for cell, result in done_by_cell.items()
    ]


def _make_row(result: Result, base: Result | None, full: Result | None) -> dict:
    """Return a cell's figures. `gain` is over the base; `recovered` is the gain as a share of what
    the base loses to the full cache.

    Means leave out the tasks on which the full cache scores below 10 (`left_out`); `tasks` holds
    every task, and fidelity is over all tasks. Figures of fidelity are None for a cell that was
    answered before they were recorded.
    """
    cell = result.cell
    identity = result.identity
    figures = result.summary
    left_out = ()
    if full:
        left_out = SeedPool((full,)).find_tasks_without_loss()
    # The same tasks are left out of all three, so that their means compare.
    pool = SeedPool((result,), left_out)
    base_pool = None
    # A cell that restores nothing is its own base, over which there is no gain.
    if base and cell.restored:
        base_pool = SeedPool((base,), left_out)
    full_pool = None
    if full:
        full_pool = SeedPool((full,), left_out)
    score = pool.score_tasks(base=base_pool, full=full_pool)
    # The questions are those of all tasks, also of those that means leave out.
    score["questions"] = figures["questions"]
    row = {
        "model": cell.model,
        "benchmark": cell.benchmark,
        "protocol": cell.protocol,
        "evictor": cell.evictor,
        "method": identity["method"],
        "restored": cell.restored,
        "adapter": identity["adapter"] and identity["adapter"]["hash"],
        "label": describe_controls(cell),
        "ratio": cell.value,
        "kv_dtype": cell.kv_dtype,
        "streaming_chunk": cell.streaming_chunk,
        "max_context": cell.max_context,
        **{key: identity[key] for key in IDENTITY_COLUMNS},
        **{key: figures[key] for key in SUMMARY_COLUMNS},
        **{key: value for key, value in score.items() if key != "recovered"},
        "metrics": pool.average_metrics(),
        **{key: figures.get(key) for key in FIGURES},
        "tasks": {task: each["score"] for task, each in figures["tasks"].items()},
        "left_out": list(left_out),
        "groups": {
            name: pool.score_tasks(members, base_pool) for name, members in pool.task_groups.items()
        },
    }
    if "recovered" in score:
        row["recovered"] = score["recovered"]
    return row


def describe_controls(cell: Cell) -> str:
    """Say how a cell differs from others of its evictor: its adapter, the tokens it uses and its
    controls.
    """
    parts = []
    if cell.adapter and cell.adapter != "auto":
        parts.append(cell.adapter)
    if cell.restore_tokens:
        parts.append(f"n = {cell.restore_tokens}")
    if cell.allocation != "global":
        parts.append(cell.allocation)
    if cell.restore_from != "full":
        parts.append("from the evicted cache")
    if cell.streaming_chunk:
        parts.append(f"streamed {cell.streaming_chunk} tokens at a time")
    if cell.kv_dtype != "model":
        parts.append(cell.kv_dtype)
    if cell.offset:
        parts.append(f"offset {cell.offset}")
    return ", ".join(parts)


def make_payload(results: Sequence[Result]) -> dict:
    """Return rows, what every cell was made with, and every answer, for programs."""
    done = {result.cell.name: result for result in results if result.done}
    return {
        "rows": make_rows(results),
        # The file format's name for identities.
        "facts": {name: result.identity for name, result in done.items()},
        "answers": {name: result.lines for name, result in done.items()},
    }
