"""The cells of a run folder as a report needs them: by condition, method and ratio, a benchmark's seeds pooled.

A condition is what has one full cache and one set of questions. `read` refuses cells of one condition that were made
with different models or questions. A method is a Cell that says only how its caches are made (see `method_of`). `Run`
also holds the labels and marks that are the same in every chart and table.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.charts import HUES, INK, MARKERS, Mark
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import CELLS, Result, load
from restorekv.evaluation.rows import SeedPool
from restorekv.evaluation.tables import NAMES, evictor_name, slug

AUTO = "auto"  # the shipped adapter
TIGHT = {"error": "all restore tokens", "fewer": "fewer restore tokens where tight", "clip": "over budget where tight"}
FULL_CACHE = Mark("full cache", INK, dashed=True)


@dataclass(frozen=True, order=True)
class Condition:
    """Where scores can be compared; `benchmark` is a spec without its seed."""

    model: str
    dtype: str
    protocol: str
    benchmark: str
    max_context: int
    prefix_policy: str

    @classmethod
    def of(cls, result: Result) -> "Condition":
        cell = result.cell
        policy = cell.prefix_policy or protocols.make(cell.protocol).prefix_policy
        benchmark = unseeded(result.facts["benchmark"]["spec"])
        return cls(cell.model, cell.dtype, cell.protocol, benchmark, cell.max_context, policy)

    def has_full(self, result: Result) -> bool:
        """Tells whether the cell is the condition's full cache, which has no prefix policy."""
        return result.cell.evictor == FULL and replace(Condition.of(result), prefix_policy=self.prefix_policy) == self


@dataclass(frozen=True)
class RatioGrid:
    """A condition's caches: the full one, and the others by method and ratio, ratios from mild to tight."""

    full: SeedPool | None
    cells: dict[Cell, dict[float, SeedPool]]

    @property
    def ratios(self) -> list[float]:
        return sorted({ratio for by_ratio in self.cells.values() for ratio in by_ratio}, reverse=True)

    @property
    def pools(self) -> list[SeedPool]:
        """All of them, the full cache's first."""
        return [*([self.full] if self.full else []), *(pool for by in self.cells.values() for pool in by.values())]

    @property
    def done_full(self) -> SeedPool | None:
        return self.full if self.full and self.full.done else None

    @property
    def left_out(self) -> str:
        """A sentence on the tasks that means leave out."""
        if not self.full or not self.full.left_out:
            return ""
        if set(self.full.left_out) == set(self.full.tasks):
            return "The full cache is below 10 on every task: there is nothing to lose."
        return f"Left out of means, because the full cache is below 10: {', '.join(self.full.left_out)}."

    def at(self, method: Cell, ratio: float) -> SeedPool | None:
        return self.cells.get(method, {}).get(ratio)

    def done(self, method: Cell) -> dict[float, SeedPool]:
        """Returns the finished pools of a method by ratio."""
        return {ratio: pool for ratio, pool in self.cells.get(method, {}).items() if pool.done}

    def base_of(self, method: Cell, ratio: float) -> SeedPool | None:
        """Returns the base that a restored pool is paired with, if it is done and was asked the same seeds."""
        mine, base = self.at(method, ratio), self.at(base_of(method), ratio)
        same = mine and base and method != base_of(method) and base.done and seeds(mine) == seeds(base)
        return base if same else None


class Run:
    """The cells of a folder, sorted by condition, with the names of conditions and methods.

    `methods` are in the report's order: for each evictor the base alone, its controls, then restored, plain first.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        """Sorts the cells; a full cache alone is a condition of its own."""
        conditions = sorted({Condition.of(result) for result in results if result.cell.evictor != FULL})
        for result in results:
            if result.cell.evictor == FULL and not any(each.has_full(result) for each in conditions):
                conditions.append(Condition.of(result))
        self.results, self.conditions = results, {each: grid(results, each) for each in conditions}

    @cached_property
    def methods(self) -> list[Cell]:
        order = {name: place for place, name in enumerate(NAMES)}

        def rank(method: Cell) -> tuple:
            plain = (method.storage != "model", method.streaming, method != base_of(method), method.adapter != AUTO)
            kind = (method.restored, *plain, str(method.adapter), method.restore_tokens or 0, repr(method))
            return (order.get(method.evictor.partition(":")[0], len(order)), method.evictor, kind)

        return sorted({method for grid in self.conditions.values() for method in grid.cells}, key=rank)

    @cached_property
    def evictors(self) -> list[str]:
        return list(dict.fromkeys(method.evictor for method in self.methods))

    def facts(self, condition: Condition) -> dict:
        """Returns the facts of one of the condition's cells."""
        return self.conditions[condition].pools[0].facts

    def of(self, condition: Condition) -> list[Cell]:
        """Returns the condition's methods in the report's order."""
        return [method for method in self.methods if method in self.conditions[condition].cells]

    def pools(self, condition: Condition) -> list[tuple[str, float, SeedPool]]:
        """Returns the condition's caches that answered anything, as label, ratio and pool, the full one first."""
        grid = self.conditions[condition]
        pools = [(FULL_CACHE.label, 1.0, grid.full)] if grid.full else []
        pools += [(self.label(method), *item) for method in self.of(condition) for item in grid.cells[method].items()]
        return [each for each in pools if each[2].lines]

    def label(self, method: Cell) -> str:
        """Returns KVzip or KVzip + RestoreKV, with the controls that are not at their defaults."""
        others = [other for other in self.methods if other != method]
        adapters = {other.adapter for other in self.methods if other.evictor == method.evictor and other.restored}
        settings = {
            evictor_name(method.evictor) + " + RestoreKV" * method.restored: True,
            f"adapter {ending(str(method.adapter), adapters)}": method.adapter not in (None, AUTO)
            and len(adapters) > 1,
            f"n = {method.restore_tokens}": method.restore_tokens is not None,
            f"restored from the {method.restore_from} cache": method.restore_from != "full",
            f"offset {method.offset}": method.offset,
            f"{method.allocation} allocation": method.allocation != "global",
            f"streamed {method.streaming} tokens at a time": method.streaming,
            f"held in {method.storage}": method.storage != "model",
            TIGHT.get(method.on_small_budget, ""): any(
                method == replace(other, on_small_budget=method.on_small_budget) for other in others
            ),
        }
        return ", ".join(words for words, shown in settings.items() if shown)

    def mark(self, method: Cell) -> Mark:
        """Returns one hue and marker for each evictor: dashed and hollow alone, solid and filled restored."""
        turn = self.evictors.index(method.evictor)
        kin = [other for other in self.methods if (other.evictor, other.restored) == (method.evictor, method.restored)]
        marker, place = MARKERS[turn % len(MARKERS)], kin.index(method)
        if place:
            spare = MARKERS[len(self.evictors) :] or MARKERS
            marker = spare[(place - 1) % len(spare)]
        return Mark(self.label(method), HUES[turn % len(HUES)], marker, not method.restored, not method.restored)

    def benchmark(self, condition: Condition) -> str:
        """Returns its title, with its settings where another benchmark has the same title."""
        titles = {other.benchmark: self.facts(other)["benchmark"]["title"] for other in self.conditions}
        title, settings = titles[condition.benchmark], condition.benchmark.partition(":")[2]
        several = list(titles.values()).count(title) > 1
        return f"{title} ({settings.replace(',', ', ')})" if several and settings else title

    def condition(self, condition: Condition) -> str:
        """Returns the benchmark, and what else tells the condition from the others of the run."""
        model = [model_name(condition.model)] * self.differ("model")
        return ", ".join([*model, self.benchmark(condition), *self.controls(condition)])

    def controls(self, condition: Condition) -> list[str]:
        """Returns protocol, policy, dtype and length, as far as the run's conditions differ in them."""
        cut = f"contexts cut at {condition.max_context:,}" if condition.max_context else "contexts whole"
        own = condition.prefix_policy == protocols.make(condition.protocol).prefix_policy
        settings = {
            f"{condition.protocol} protocol": self.differ("protocol"),
            f"prefix {condition.prefix_policy}": not own,
            condition.dtype: self.differ("dtype"),
            cut: self.differ("max_context"),
        }
        return [words for words, shown in settings.items() if shown]

    def differ(self, key: str) -> bool:
        return len({getattr(condition, key) for condition in self.conditions}) > 1

    def key(self, condition: Condition) -> str:
        """Returns a name for files and ids, unique in the run."""

        def key(one: Condition) -> str:
            return slug(ending(one.model, ()), one.benchmark.partition(":")[0], one.protocol)

        same = [other for other in self.conditions if key(other) == key(condition)]
        return key(condition) + (f"-{same.index(condition) + 1}" if len(same) > 1 else "")


def read(folder: Path) -> Run:
    """Reads every cell of the folder, which may hold none. Raises RestoreKVError for a mix-up."""
    results = load(folder) if (folder / CELLS).is_dir() else []
    refuse(results, "models", "fingerprint", lambda result: (result.cell.model, result.cell.protocol))
    refuse(results, "benchmark data", "digest", lambda result: result.cell.question_set)
    return Run(results)


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


def grid(results: Sequence[Result], condition: Condition) -> RatioGrid:
    """Sorts the cells of one condition."""
    full: dict[str, Result] = {}
    cells: dict[Cell, dict[float, dict[str, Result]]] = {}
    for result in results:
        spec = result.facts["benchmark"]["spec"]
        if condition.has_full(result):
            full.setdefault(spec, result)
        elif result.cell.evictor != FULL and Condition.of(result) == condition:
            by_ratio = cells.setdefault(method_of(result.cell), {})
            by_ratio.setdefault(result.cell.value, {}).setdefault(spec, result)

    def pooled(by_spec: dict[str, Result], left_out: tuple[str, ...] = ()) -> SeedPool:
        return SeedPool(tuple(by_spec[spec] for spec in sorted(by_spec)), left_out)

    whole = pooled(full) if full else None
    out = whole.without_loss() if whole and whole.done else ()
    pools = {
        method: {ratio: pooled(by_ratio[ratio], out) for ratio in sorted(by_ratio, reverse=True)}
        for method, by_ratio in cells.items()
    }
    return RatioGrid(whole and replace(whole, left_out=out), pools)


def method_of(cell: Cell) -> Cell:
    """Returns the cell without model, benchmark, protocol and ratio, and a base without what only restoring uses."""
    plain = Cell(model="", benchmark="", evictor="", ratio="")
    asked = ("model", "benchmark", "ratio", "protocol", "prefix_policy", "max_context", "dtype")
    method = replace(cell, **{key: getattr(plain, key) for key in asked})
    return method if method.restored else replace(base_of(method), offset=cell.offset)


def base_of(method: Cell) -> Cell:
    """Returns the same eviction with nothing restored."""
    return replace(method.base, on_small_budget="", offset=0)


def seeds(pool: SeedPool) -> list[str]:
    return [result.facts["benchmark"]["spec"] for result in pool.results]


def unseeded(spec: str) -> str:
    """Returns a benchmark's spec without its seed."""
    name, _, rest = spec.partition(":")
    settings = ",".join(item for item in rest.split(",") if item and not item.startswith("seed="))
    return f"{name}:{settings}" if settings else name


def ending(name: str, others: Collection[str | None]) -> str:
    """Returns the last parts of a path or hub id, as many as tell it from the others."""
    parts = [tuple(str(other).rstrip("/").split("/")) for other in others]
    mine = tuple(name.rstrip("/").split("/"))
    for count in range(1, len(mine)):
        if sum(other[-count:] == mine[-count:] for other in parts) <= 1:
            return "/".join(mine[-count:])
    return name


def model_name(name: str) -> str:
    return "Tiny model" if name == "tiny" else ending(name, ())
