"""The cells of a run folder, in the order a report needs: by place, method and ratio, seeds of a benchmark pooled.

A place is what has one full cache and one set of questions: model, protocol, benchmark. Cells of a place whose model or
questions are not the same would be drawn beside each other for nothing; `check` refuses them.
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
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.results import CELLS, Result, load
from restorekv.evaluation.stats import Answer, compared, counted, without_loss


@dataclass(frozen=True, order=True)
class Place:
    """Where scores can be compared; `benchmark` is a spec without its seed."""

    model: str
    dtype: str
    protocol: str
    benchmark: str
    max_context: int
    prefix_policy: str


@dataclass(frozen=True)
class Method:
    """What made the caches: an evictor, with an adapter or alone, and controls."""

    evictor: str
    adapter: str | None
    restore_tokens: int | None
    allocation: str
    on_small_budget: str
    restore_from: str
    offset: int
    storage: str
    streaming: int

    @property
    def restored(self) -> bool:
        return self.adapter is not None

    @property
    def base(self) -> Method:
        """The same eviction with nothing restored."""
        return replace(self, adapter=None, restore_tokens=None, on_small_budget="", restore_from="full", offset=0)


@dataclass(frozen=True)
class Pool:
    """One cell, or the cells that differ in the benchmark's seed alone; means leave the tasks `left_out` out."""

    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()

    @property
    def facts(self) -> dict:
        return self.results[0].facts

    @cached_property
    def done(self) -> bool:
        return all(result.done for result in self.results)

    @cached_property
    def asked(self) -> int:
        """Contexts answered so far."""
        return sum(len(result.lines) for result in self.results)

    @property
    def contexts(self) -> int:
        """Contexts there are to answer."""
        return sum(result.facts["benchmark"]["samples"] for result in self.results)

    @cached_property
    def lines(self) -> list[dict]:
        """A line for every context, each context once: seeds may have drawn the same one."""
        found: dict[Hashable, dict] = {}
        for result in self.results:
            for line in result.lines:
                told = repr([(answer["question"], answer["references"]) for answer in line["answers"]])
                name = f"{line['sample']} {line['context']} {hashlib.sha256(told.encode()).hexdigest()[:12]}"
                found.setdefault(name, {**line, "document": name if len(self.results) > 1 else line["sample"]})
        return list(found.values())

    @cached_property
    def answers(self) -> list[Answer]:
        return [
            Answer(line["document"], told["task"], told["id"], told["prediction"], told["score"])
            for line in self.lines
            for told in line["answers"]
        ]

    @cached_property
    def by_context(self) -> bool:
        """Whether scores are means over contexts, not over questions."""
        cell = self.results[0].cell
        return tasks.make(cell.benchmark).by_context(cell.protocol)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(answer.family for answer in self.answers))

    def score(self, members: Iterable[str] = (), base: Pool | None = None) -> dict[str, float]:
        """`stats.compared` of all tasks or of `members`, and with `base` the paired gain over it.

        A task by itself, and tasks that would all be left out, are scored all the same.
        """
        wanted = set(members or self.tasks)
        mine, its = (
            counted([answer for answer in pool.answers if answer.family in wanted], self.left_out) if pool else []
            for pool in (self, base)
        )
        return compared(mine, its, self.by_context)

    def mean(self, key: str) -> float:
        """Of what the lines tell: pairs, pairs_with_prefix, bytes, tokens, prefix."""
        return sum(line[key] for line in self.lines) / len(self.lines)

    def kept(self, prefix: bool = False) -> float:
        """The real ratio, mean over contexts: of the pairs that compete for the budget, or of all with the prefix."""
        pairs = self.facts["shape"]["layers"] * self.facts["shape"]["heads"]
        counted = prefix or self.facts["prefix_policy"] == "counted"
        key = "pairs_with_prefix" if prefix else "pairs"
        shares = [line[key] / (pairs * (line["tokens"] + (line["prefix"] if counted else 0))) for line in self.lines]
        return sum(shares) / len(shares)


@dataclass(frozen=True)
class Grid:
    """A place's caches: the full one, and by method and ratio the others."""

    full: Pool | None
    cells: dict[Method, dict[float, Pool]]

    @property
    def ratios(self) -> list[float]:
        """From mild to tight."""
        return sorted({ratio for by_ratio in self.cells.values() for ratio in by_ratio}, reverse=True)

    def at(self, method: Method, ratio: float) -> Pool | None:
        """Done or not; None where there is no such cell."""
        return self.cells.get(method, {}).get(ratio)

    def base_of(self, method: Method, ratio: float) -> Pool | None:
        """What a restored cell is paired with: done, and asked the same seeds."""
        mine, base = self.at(method, ratio), self.at(method.base, ratio)
        same = mine and base and method != method.base and base.done and seeds(mine) == seeds(base)
        return base if same else None


@dataclass(frozen=True)
class Run:
    """A folder, its cells sorted."""

    folder: Path
    results: tuple[Result, ...]
    places: dict[Place, Grid]

    def of_place(self, place: Place) -> dict:
        """The facts of one of its cells."""
        grid = self.places[place]
        pool = grid.full or next(iter(next(iter(grid.cells.values())).values()))
        return pool.facts


def seeds(pool: Pool) -> list[str]:
    """The specs of the benchmarks that were asked."""
    return [result.facts["benchmark"]["spec"] for result in pool.results]


def read(folder: Path) -> Run:
    """Every cell of the folder, of which there may be none. Raises RestoreKVError for a mix-up."""
    results = load(folder) if (folder / CELLS).is_dir() else []
    check(results)
    places = sorted({place_of(result) for result in results if result.cell.evictor != FULL})
    for result in results:
        if result.cell.evictor == FULL and not any(covers(result, place) for place in places):
            places.append(place_of(result))
    return Run(folder, tuple(results), {place: grid(results, place) for place in places})


def place_of(result: Result) -> Place:
    cell = result.cell
    policy = cell.prefix_policy or protocols.make(cell.protocol).prefix_policy
    benchmark = unseeded(result.facts["benchmark"]["spec"])
    return Place(cell.model, cell.dtype, cell.protocol, benchmark, cell.max_context, policy)


def covers(full: Result, place: Place) -> bool:
    """Whether the full cache is that of the place: it has no prefix policy."""
    return replace(place_of(full), prefix_policy=place.prefix_policy) == place


def unseeded(spec: str) -> str:
    """A benchmark's spec without its seed."""
    name, _, rest = spec.partition(":")
    settings = ",".join(item for item in rest.split(",") if item and not item.startswith("seed="))
    return f"{name}:{settings}" if settings else name


def method_of(result: Result) -> Method:
    """Settings that a base alone has no use for are left out, so that it is one method."""
    cell = result.cell
    made = Method(
        cell.evictor, cell.adapter, cell.restore_tokens, cell.allocation, cell.on_small_budget, cell.restore_from,
        cell.offset, cell.storage, cell.streaming,
    )  # fmt: skip
    return made if made.restored else replace(made.base, offset=cell.offset)


def grid(results: Sequence[Result], place: Place) -> Grid:
    """Seeds in the order of their specs, methods and ratios as they come."""
    full: dict[str, Result] = {}
    found: dict[Method, dict[float, dict[str, Result]]] = {}
    for result in results:
        spec = result.facts["benchmark"]["spec"]
        if result.cell.evictor == FULL:
            if covers(result, place):
                full.setdefault(spec, result)
        elif place_of(result) == place:
            by_ratio = found.setdefault(method_of(result), {})
            by_ratio.setdefault(result.cell.value, {}).setdefault(spec, result)
    cells = {
        method: {ratio: pooled(by_ratio[ratio]) for ratio in sorted(by_ratio, reverse=True)}
        for method, by_ratio in found.items()
    }
    whole = pooled(full) if full else None
    if whole is None or not whole.done:
        return Grid(whole, cells)
    out = tuple(without_loss(whole.answers, whole.by_context))
    cells = {
        method: {ratio: replace(pool, left_out=out) for ratio, pool in by_ratio.items()}
        for method, by_ratio in cells.items()
    }
    return Grid(replace(whole, left_out=out), cells)


def pooled(by_spec: dict[str, Result]) -> Pool:
    return Pool(tuple(by_spec[spec] for spec in sorted(by_spec)))


def check(results: Sequence[Result]) -> None:
    """One model under one name, one set of questions in one place."""
    refuse(results, "models", "fingerprint", lambda result: (result.cell.model, result.cell.protocol))
    refuse(results, "benchmark data", "digest", lambda result: result.cell.question_set)


def refuse(results: Sequence[Result], what: str, key: str, name: Callable[[Result], Hashable]) -> None:
    """Raises RestoreKVError where cells of one name have different values."""
    first: dict[Hashable, Result] = {}
    for result in results:
        other = first.setdefault(name(result), result)
        mine, its = ({**found.facts, **found.facts["benchmark"]}[key] for found in (result, other))
        if mine != its:
            raise RestoreKVError(
                f"{other.folder.name} and {result.folder.name} were made with different {what} of one name "
                f"({key} {its} and {mine}); report them in folders of their own."
            )
