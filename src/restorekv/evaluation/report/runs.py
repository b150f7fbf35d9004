"""The cells of a run folder as a report needs them: by condition, method and ratio, a benchmark's seeds pooled.

A condition is what has one full cache and one set of questions. `read` refuses cells of one condition that were made
with different models or questions. A method is a Cell that says only how its caches are made (see `method_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from restorekv import tasks
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import CELLS, Result, load
from restorekv.evaluation.stats import Answer, compared, counted, without_loss


@dataclass(frozen=True, order=True)
class Condition:
    """Where scores can be compared; `benchmark` is a spec without its seed."""

    model: str
    dtype: str
    protocol: str
    benchmark: str
    max_context: int
    prefix_policy: str


@dataclass(frozen=True)
class SeedPool:
    """One cell, or the cells that differ only in the benchmark's seed; means leave the tasks `left_out` out."""

    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()

    @property
    def facts(self) -> dict:
        return self.results[0].facts

    @cached_property
    def done(self) -> bool:
        return all(result.done for result in self.results)

    @property
    def progress(self) -> tuple[int, int]:
        """Contexts answered so far, and contexts there are."""
        samples = sum(result.facts["benchmark"]["samples"] for result in self.results)
        return sum(len(result.lines) for result in self.results), samples

    @cached_property
    def lines(self) -> list[dict]:
        """A line for every context, each context once: two seeds may have drawn the same one."""
        if len(self.results) == 1:
            return [{**line, "document": line["sample"]} for line in self.results[0].lines]
        lines: dict[Hashable, dict] = {}
        for result in self.results:
            for line in result.lines:
                asked = repr([(answer["question"], answer["references"]) for answer in line["answers"]])
                name = f"{line['sample']} {line['context']} {hashlib.sha256(asked.encode()).hexdigest()[:12]}"
                lines.setdefault(name, {**line, "document": name})
        return list(lines.values())

    @cached_property
    def answers(self) -> list[Answer]:
        return [
            Answer(line["document"], answer["task"], answer["id"], answer["prediction"], answer["score"])
            for line in self.lines
            for answer in line["answers"]
        ]

    @cached_property
    def by_context(self) -> bool:
        """Whether scores are means over contexts instead of questions."""
        cell = self.results[0].cell
        return tasks.make(cell.benchmark).by_context(cell.protocol)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(answer.family for answer in self.answers))

    def has(self, members: Iterable[str]) -> bool:
        """Returns whether the cells are done and asked one of the tasks; no members are all tasks."""
        return self.done and (not members or not set(members).isdisjoint(self.tasks))

    def score(self, members: Iterable[str] = (), base: SeedPool | None = None) -> dict[str, float]:
        """Returns `stats.compared` over all tasks or over `members`, with the paired gain over `base` if given.

        A task by itself is scored even if means leave it out.
        """
        wanted = set(members or self.tasks)
        mine, theirs = (
            counted([answer for answer in pool.answers if answer.family in wanted], self.left_out) if pool else []
            for pool in (self, base)
        )
        return compared(mine, theirs, self.by_context)

    def each(self, key: str) -> list[float]:
        """Returns a figure of every context: pairs, pairs_with_prefix, bytes, tokens, prefix or restore_tokens."""
        return [line[key] for line in self.lines]

    def mean(self, key: str) -> float:
        """Returns the mean over contexts of such a figure."""
        return sum(self.each(key)) / len(self.lines)

    def kept(self, prefix: bool = False) -> float:
        """Returns the share of pairs held, mean over contexts: of those in the budget, or of all with the prefix."""
        pairs = self.facts["shape"]["layers"] * self.facts["shape"]["heads"]
        counts = prefix or self.facts["prefix_policy"] == "counted"
        key = "pairs_with_prefix" if prefix else "pairs"
        shares = [line[key] / (pairs * (line["tokens"] + (line["prefix"] if counts else 0))) for line in self.lines]
        return sum(shares) / len(shares)


@dataclass(frozen=True)
class RatioGrid:
    """A condition's caches: the full one, and the others by method and ratio."""

    full: SeedPool | None
    cells: dict[Cell, dict[float, SeedPool]]

    @property
    def ratios(self) -> list[float]:
        """The ratios from mild to tight."""
        return sorted({ratio for by_ratio in self.cells.values() for ratio in by_ratio}, reverse=True)

    @property
    def pools(self) -> list[SeedPool]:
        """All of them, the full cache's first."""
        return [*([self.full] if self.full else []), *(pool for by in self.cells.values() for pool in by.values())]

    def at(self, method: Cell, ratio: float) -> SeedPool | None:
        return self.cells.get(method, {}).get(ratio)

    @property
    def left_out(self) -> str:
        """A sentence on the tasks that means leave out."""
        if not self.full or not self.full.left_out:
            return ""
        if set(self.full.left_out) == set(self.full.tasks):
            return "The full cache is below 10 on every task: there is nothing to lose."
        return f"Left out of means, because the full cache is below 10: {', '.join(self.full.left_out)}."

    def done(self, method: Cell) -> dict[float, SeedPool]:
        """Returns the finished pools of a method by ratio."""
        return {ratio: pool for ratio, pool in self.cells.get(method, {}).items() if pool.done}

    def base_of(self, method: Cell, ratio: float) -> SeedPool | None:
        """Returns the base that a restored pool is paired with, if it is done and was asked the same seeds."""
        mine, base = self.at(method, ratio), self.at(base_of(method), ratio)
        same = mine and base and method != base_of(method) and base.done and seeds(mine) == seeds(base)
        return base if same else None


@dataclass(frozen=True)
class SortedResults:
    """Cells, sorted by condition."""

    results: Sequence[Result]
    conditions: dict[Condition, RatioGrid]

    def facts(self, condition: Condition) -> dict:
        """Returns the facts of one of the condition's cells."""
        return self.conditions[condition].pools[0].facts


def seeds(pool: SeedPool) -> list[str]:
    return [result.facts["benchmark"]["spec"] for result in pool.results]


def read(folder: Path) -> SortedResults:
    """Reads every cell of the folder, which may hold none. Raises RestoreKVError for a mix-up."""
    results = load(folder) if (folder / CELLS).is_dir() else []
    refuse(results, "models", "fingerprint", lambda result: (result.cell.model, result.cell.protocol))
    refuse(results, "benchmark data", "digest", lambda result: result.cell.question_set)
    return sort(results)


def sort(results: Sequence[Result]) -> SortedResults:
    """Sorts cells by condition; a full cache alone is a condition of its own."""
    conditions = sorted({condition_of(result) for result in results if result.cell.evictor != FULL})
    for result in results:
        if result.cell.evictor == FULL and not any(covers(result, condition) for condition in conditions):
            conditions.append(condition_of(result))
    return SortedResults(results, {condition: grid(results, condition) for condition in conditions})


def condition_of(result: Result) -> Condition:
    cell = result.cell
    policy = cell.prefix_policy or protocols.make(cell.protocol).prefix_policy
    benchmark = unseeded(result.facts["benchmark"]["spec"])
    return Condition(cell.model, cell.dtype, cell.protocol, benchmark, cell.max_context, policy)


def covers(full: Result, condition: Condition) -> bool:
    """Returns whether the full cache, which has no prefix policy, is that of the condition."""
    return replace(condition_of(full), prefix_policy=condition.prefix_policy) == condition


def unseeded(spec: str) -> str:
    """Returns a benchmark's spec without its seed."""
    name, _, rest = spec.partition(":")
    settings = ",".join(item for item in rest.split(",") if item and not item.startswith("seed="))
    return f"{name}:{settings}" if settings else name


def method_of(cell: Cell) -> Cell:
    """Returns the cell without model, benchmark, protocol and ratio, and a base without what only restoring uses."""
    plain = Cell(model="", benchmark="", evictor="", ratio="")
    asked = ("model", "benchmark", "ratio", "protocol", "prefix_policy", "max_context", "dtype")
    method = replace(cell, **{key: getattr(plain, key) for key in asked})
    return method if method.restored else replace(base_of(method), offset=cell.offset)


def base_of(method: Cell) -> Cell:
    """Returns the same eviction with nothing restored."""
    return replace(method, adapter=None, restore_tokens=None, on_small_budget="", restore_from="full", offset=0)


def grid(results: Sequence[Result], condition: Condition) -> RatioGrid:
    """Sorts the cells of one condition; ratios run from mild to tight."""
    full: dict[str, Result] = {}
    cells: dict[Cell, dict[float, dict[str, Result]]] = {}
    for result in results:
        spec = result.facts["benchmark"]["spec"]
        if result.cell.evictor == FULL:
            if covers(result, condition):
                full.setdefault(spec, result)
        elif condition_of(result) == condition:
            by_ratio = cells.setdefault(method_of(result.cell), {})
            by_ratio.setdefault(result.cell.value, {}).setdefault(spec, result)
    whole = pooled(full) if full else None
    out = tuple(without_loss(whole.answers, whole.by_context)) if whole and whole.done else ()
    return RatioGrid(
        whole and replace(whole, left_out=out),
        {
            method: {ratio: pooled(by_ratio[ratio], out) for ratio in sorted(by_ratio, reverse=True)}
            for method, by_ratio in cells.items()
        },
    )


def pooled(by_spec: dict[str, Result], left_out: tuple[str, ...] = ()) -> SeedPool:
    return SeedPool(tuple(by_spec[spec] for spec in sorted(by_spec)), left_out)


def refuse(results: Sequence[Result], what: str, key: str, name: Callable[[Result], Hashable]) -> None:
    """Raises RestoreKVError where cells of one name have different values of a fact."""
    first: dict[Hashable, Result] = {}
    for result in results:
        other = first.setdefault(name(result), result)
        mine, theirs = ({**each.facts, **each.facts["benchmark"]}[key] for each in (result, other))
        if mine != theirs:
            raise RestoreKVError(
                f"{other.folder.name} and {result.folder.name} share a name but were made with different {what} "
                f"({key} {theirs} and {mine}); report them from separate folders."
            )
