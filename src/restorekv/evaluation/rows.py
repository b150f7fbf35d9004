"""From the answers of cells to figures: scores with intervals and sizes of caches, pooled over
seeds, as a cell's summary and as rows for programs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from restorekv import tasks
from restorekv.evaluation.conditions import Method
from restorekv.evaluation.earlier import digest_line
from restorekv.evaluation.fidelity import FIGURES, summarize_fidelity
from restorekv.evaluation.grid import FULL
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
# What a context's line says of its cache.
SIZES = ("tokens", "prefix", "pairs", "pairs_with_prefix", "bytes", "restore_tokens")
# What a row takes over from the summary of its cell.
SUMMARY_COLUMNS = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


@dataclass(frozen=True)
class SeedPool:
    """Results of one cell, pooled over the benchmark's seeds, and what they are compared with.

    Methods take `members`, the tasks to use; empty means all.

    Attributes:
        results: The cells, one for each seed.
        left_out: Tasks that means skip, unless nothing else is asked for.
        evictor_alone: The same without restoring, done and asked the same seeds, if there is one.
        full: The full cache, asked the same seeds, if there is one.
    """

    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()
    evictor_alone: Self | None = None
    full: Self | None = None

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
                # Every seed numbers its contexts from 0, so a hash of what was asked names them.
                name = digest_line(line) or f"{result.folder.name} {line['sample']}"
                lines.setdefault(name, line)
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

    def score_tasks(self, members: Iterable[str] = ()) -> dict[str, Any]:
        """Return score, interval and counts (see `stats.score_answers`).

        Next to the evictor alone they include the paired gain over it; with the full cache too,
        `recovered`: the gain as a share of what the evictor alone loses to the full cache, None if
        it loses less than LEAST_LOSS.
        """
        by_context = self.averages_contexts
        alone = []
        if self.evictor_alone:
            alone = self.evictor_alone.list_counted_answers(members)
        figures = score_answers(self.list_counted_answers(members), alone, by_context)
        # An unfinished full cache is not a reference: its mean is over fewer contexts.
        if alone and self.full and self.full.done:
            full = self.full.list_counted_answers(members)
            loss = compute_mean_score(full, by_context) - compute_mean_score(alone, by_context)
            figures["recovered"] = figures["gain"] / loss if loss >= LEAST_LOSS else None
        return figures

    def average_metrics(self, members: Iterable[str] = ()) -> dict[str, float]:
        """Return every further metric in points: the mean over tasks of the mean over questions."""
        chosen = {answer.task for answer in self.list_counted_answers(members)}
        values: dict[str, dict[str, list[float]]] = {}  # by metric and task
        for line in self.lines:
            for answer in line["answers"]:
                if answer["task"] in chosen:
                    for name, value in answer.get("metrics", {}).items():
                        by_task = values.setdefault(name, {})
                        by_task.setdefault(answer["task"], []).append(value)
        # A task counts once, however many questions it has.
        return {
            name: 100 * float(np.mean([np.mean(own) for own in by_task.values()]))
            for name, by_task in values.items()
        }

    def summarize_fidelity(self, members: Iterable[str] = ()) -> dict[str, float]:
        """Return how far the answers are from the full cache's, {} where that was not recorded; see
        fidelity.py.
        """
        return summarize_fidelity(self.lines, set(members or self.tasks))

    def summarize(self, members: Iterable[str] = ()) -> dict[str, Any]:
        """Return scores, and fidelity and further metrics as far as they were recorded."""
        figures = self.score_tasks(members) | self.summarize_fidelity(members)
        if metrics := self.average_metrics(members):
            figures["metrics"] = metrics
        return figures

    def get_values(self, key: str) -> np.ndarray:
        """Return a figure of every context, one of SIZES."""
        return np.array([line[key] for line in self.lines], dtype=float)

    def average_sizes(self, keys: Sequence[str] = SIZES) -> dict[str, float]:
        """Return what caches held: means over contexts of these figures, and shares of pairs."""
        figures = {key: float(self.get_values(key).mean()) for key in keys}
        figures["kept"] = self.compute_kept_share()
        figures["kept_with_prefix"] = self.compute_kept_share(with_prefix=True)
        return figures

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
    return {
        **pool.summarize(),
        "samples": len(pool.lines),
        **pool.average_sizes(("pairs", "pairs_with_prefix", "bytes")),
        "tasks": {task: pool.summarize([task]) for task in pool.tasks},
        "groups": {name: pool.score_tasks(members) for name, members in pool.task_groups.items()},
    }


def make_rows(results: Sequence[Result]) -> list[dict]:
    """Return a row for every finished cell, in their order. Scores are in points; pairs and bytes
    are means.
    """
    # A cell that still runs has no figures, and nothing is compared with it.
    done_by_cell = {result.cell: result for result in results if result.done}
    # Reversed, so that the first full cache of a question set is the one that stays.
    full_by_questions = {
        cell.question_set: SeedPool((result,))
        for cell, result in reversed(done_by_cell.items())
        if cell.evictor == FULL
    }
    rows = []
    for cell, result in done_by_cell.items():
        left_out = ()
        full = full_by_questions.get(cell.question_set)
        if full:
            left_out = full.find_tasks_without_loss()
            full = replace(full, left_out=left_out)
        alone = None
        # Over itself, a cell that restores nothing has no gain.
        if cell.restored and cell.evictor_alone in done_by_cell:
            alone = SeedPool((done_by_cell[cell.evictor_alone],), left_out)
        rows.append(_make_row(SeedPool((result,), left_out, alone, full)))
    return rows


def _make_row(pool: SeedPool) -> dict:
    """Return a cell's figures, with its `gain` over the evictor alone.

    Means leave out the tasks on which the full cache scores below 10 (`left_out`); `tasks` holds
    every task, and fidelity is over all tasks. Figures of fidelity are None for a cell that was
    answered before they were recorded.
    """
    (result,) = pool.results
    cell = result.cell
    identity = result.identity
    figures = result.summary
    score = pool.score_tasks()
    # The questions are those of all tasks, also of those that means leave out.
    score["questions"] = figures["questions"]
    return {
        "model": cell.model,
        "benchmark": cell.benchmark,
        "protocol": cell.protocol,
        "evictor": cell.evictor,
        "method": identity["method"],
        "restored": cell.restored,
        "adapter": identity["adapter"] and identity["adapter"]["hash"],
        "label": Method.of_cell(cell).describe_controls(),
        "ratio": cell.value,
        "kv_dtype": cell.kv_dtype,
        "streaming_chunk": cell.streaming_chunk,
        "max_context": cell.max_context,
        **{key: identity[key] for key in IDENTITY_COLUMNS},
        **{key: figures[key] for key in SUMMARY_COLUMNS},
        **score,
        "metrics": pool.average_metrics(),
        **{key: figures.get(key) for key in FIGURES},
        "tasks": {task: each["score"] for task, each in figures["tasks"].items()},
        "left_out": list(pool.left_out),
        "groups": {name: pool.score_tasks(members) for name, members in pool.task_groups.items()},
    }


def make_payload(results: Sequence[Result]) -> dict:
    """Return rows, what every cell was made with, and every answer, for programs."""
    done = {result.cell.name: result for result in results if result.done}
    return {
        "rows": make_rows(results),
        # The file format's name for identities.
        "facts": {name: result.identity for name, result in done.items()},
        "answers": {name: result.lines for name, result in done.items()},
    }
