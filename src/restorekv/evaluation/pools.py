"""The cells of a grid, pooled over the seeds of their benchmark, next to what they are compared
with: the evictor alone and the full cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from restorekv.evaluation.conditions import FULL_METHOD, Condition, Method
from restorekv.evaluation.fidelity import summarize_fidelity
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.results import Result, list_answers
from restorekv.evaluation.reuse import digest_line
from restorekv.evaluation.stats import (
    MIN_LOSS,
    ScoredAnswer,
    compute_mean_score,
    drop_tasks,
    find_tasks_without_loss,
    summarize_scores,
)
from restorekv.evaluation.tables import METHOD_NAMES
from restorekv.tasks import Benchmark, make_benchmark

# What a context's line records about its cache.
SIZES = ("tokens", "prefix", "pairs", "pairs_with_prefix", "bytes", "restore_tokens")
PoolKey = tuple[Condition, Method, float]  # and the ratio


@dataclass(frozen=True)
class SeedPool:
    """Results of one cell, pooled over the benchmark's seeds, and what they are compared with.

    Methods take `task_names`, the tasks to use; empty means all.

    Attributes:
        results: The cells, one for each seed.
        left_out: Tasks that means skip, unless nothing else is asked for.
        evictor_alone: The pool of the same method without restoring, if it is done and has the same
            seeds.
        full: The pool of the full cache, if it has the same seeds; it may be unfinished.
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
        """Return the pool of these seeds alone; None if one is missing."""
        chosen = tuple(
            result for result in self.results if result.identity["benchmark"]["spec"] in specs
        )
        return replace(self, results=chosen) if len(chosen) == len(specs) else None

    @cached_property
    def benchmark(self) -> Benchmark:
        return make_benchmark(self.results[0].cell.benchmark)

    @cached_property
    def averages_contexts(self) -> bool:
        """Whether scores are means over contexts instead of questions."""
        return self.benchmark.averages_contexts(self.results[0].cell.protocol)

    @cached_property
    def done(self) -> bool:
        return all(result.done for result in self.results)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of contexts answered so far, and of all contexts. Once all cells are done,
        both are the number of distinct contexts, which figures are computed over.
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
                lines.setdefault(digest_line(line), line)
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
        """The benchmark's groups of tasks that were asked: at least one task of a group, or every
        task if the benchmark needs whole groups.
        """
        groups = {}
        for name, task_names in self.benchmark.group_tasks().items():
            asked = set(self.tasks).intersection(task_names)
            needed = len(task_names) if self.benchmark.needs_whole_groups else 1
            if len(asked) >= needed:
                groups[name] = task_names
        return groups

    def list_counted_answers(self, task_names: Iterable[str] = ()) -> list[ScoredAnswer]:
        """Return the answers that means are taken over."""
        wanted = set(task_names or self.tasks)
        return drop_tasks(
            [answer for answer in self.answers if answer.task in wanted], self.left_out
        )

    def score_tasks(self, task_names: Iterable[str] = ()) -> dict[str, Any]:
        """Return score, interval and counts (see `stats.summarize_scores`).

        With an evictor alone to compare with, they include the paired gain over it; with a finished
        full cache too, "recovered": the gain as a share of what the evictor alone loses to the full
        cache, None if it loses less than MIN_LOSS.
        """
        by_context = self.averages_contexts
        alone = []
        if self.evictor_alone:
            alone = self.evictor_alone.list_counted_answers(task_names)
        figures = summarize_scores(self.list_counted_answers(task_names), alone, by_context)
        # An unfinished full cache is not a reference: its mean is over fewer contexts.
        if alone and self.full and self.full.done:
            full = self.full.list_counted_answers(task_names)
            loss = compute_mean_score(full, by_context) - compute_mean_score(alone, by_context)
            figures["recovered"] = figures["gain"] / loss if loss >= MIN_LOSS else None
        return figures

    def average_metrics(self, task_names: Iterable[str] = ()) -> dict[str, float]:
        """Return every further metric in points: the mean over tasks of the mean over questions."""
        chosen = {answer.task for answer in self.list_counted_answers(task_names)}
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

    def summarize(self, task_names: Iterable[str] = ()) -> dict[str, Any]:
        """Return scores, fidelity to the full cache (see fidelity.py), and further metrics if the
        benchmark has any.
        """
        figures = self.score_tasks(task_names)
        figures |= summarize_fidelity(self.lines, set(task_names or self.tasks))
        if metrics := self.average_metrics(task_names):
            figures["metrics"] = metrics
        return figures

    def get_values(self, key: str) -> np.ndarray:
        """Return a figure of every context, one of SIZES."""
        return np.array([line[key] for line in self.lines], dtype=float)

    def average_sizes(self, keys: Sequence[str] = SIZES) -> dict[str, float]:
        """Return what the caches held: means of `keys` over contexts, and shares of pairs kept."""
        figures = {key: float(self.get_values(key).mean()) for key in keys}
        figures["kept"] = self.compute_kept_share()
        figures["kept_with_prefix"] = self.compute_kept_share(with_prefix=True)
        return figures

    def average_full_bytes(self) -> float | None:
        """Return the full cache's mean bytes over the contexts answered so far; None if it has not
        answered all of them.
        """
        full_lines = self.full.lines_by_context if self.full else {}
        if any(context not in full_lines for context in self.lines_by_context):
            return None
        return float(np.mean([full_lines[context]["bytes"] for context in self.lines_by_context]))

    def compute_kept_share(self, with_prefix: bool = False) -> float:
        """Return the mean over contexts of the share of pairs held: of those that compete for the
        budget, or, if `with_prefix`, of all pairs including the prefix's.
        """
        # L * H pairs for each column that competes: T, or S + T with the prefix counted.
        heads = self.identity["shape"]["layers"] * self.identity["shape"]["heads"]
        columns = self.get_values("tokens")
        if with_prefix or self.identity["prefix_policy"] == "counted":
            columns = columns + self.get_values("prefix")
        pairs = self.get_values("pairs_with_prefix" if with_prefix else "pairs")
        return float(np.mean(pairs / columns / heads))


def pool_seeds(results: Sequence[Result]) -> dict[PoolKey, SeedPool]:
    """Return the cells of every condition, method and ratio, in the order in which tables show
    them, next to what they are compared with; among identical cells the first is used.
    """
    # Conditions that need a full cache to compare with.
    compressed = {Condition.of_result(each) for each in results if each.cell.evictor != FULL}
    seeds: dict[PoolKey, dict[str, Result]] = {}
    for result in results:
        own = Condition.of_result(result)
        conditions = [own]
        if result.cell.evictor == FULL:
            # It holds every pair, so one full cache serves the conditions of all prefix policies.
            policies = {replace(own, prefix_policy=policy) for policy in ("counted", "free")}
            conditions = list(compressed & policies) or [own]
        for condition in conditions:
            key = condition, Method.of_cell(result.cell), result.cell.ratio_value
            seeds.setdefault(key, {}).setdefault(result.identity["benchmark"]["spec"], result)

    pools: dict[PoolKey, SeedPool] = {}
    for key in sorted(seeds, key=_make_sort_key):
        condition, method, ratio = key
        pool = SeedPool(tuple(result for _, result in sorted(seeds[key].items())))
        # In this order the full cache and each evictor alone come before what needs them.
        if method == FULL_METHOD:
            # An unfinished full cache has not shown yet where there is nothing to lose.
            left_out = []
            if pool.done:
                left_out = find_tasks_without_loss(pool.answers, pool.averages_contexts)
            pools[key] = replace(pool, left_out=tuple(left_out), full=pool)
            continue
        if full := pools.get((condition, FULL_METHOD, 1.0)):
            # Other seeds of the full cache were asked other contexts.
            pool = replace(pool, left_out=full.left_out, full=full.restrict(pool.specs))
        if method.restored:
            alone = pools.get((condition, method.evictor_alone, ratio))
            if alone and alone.done and alone.specs == pool.specs:
                pool = replace(pool, evictor_alone=alone)
        pools[key] = pool
    return pools


def _make_sort_key(key: PoolKey) -> tuple:
    """Order a condition's methods: the full cache, then each evictor alone, restored, variants."""
    condition, method, ratio = key
    # The paper's order; an evictor that it does not name comes after them.
    evictors = (FULL, *METHOD_NAMES)
    name = method.evictor.partition(":")[0]
    rank = evictors.index(name) if name in evictors else len(evictors)
    variant = (method.describe_settings(), repr(method))
    return (condition, rank, method.evictor, method.restored, *variant, -ratio)
