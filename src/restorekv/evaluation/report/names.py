"""What a report calls models, conditions and methods, and how it draws the methods."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from restorekv.evaluation import protocols
from restorekv.evaluation.charts import HUES, INK, MARKERS, Mark
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.report.runs import Condition, SeedPool, SortedResults, base_of
from restorekv.evaluation.tables import NAMES

AUTO = "auto"  # the shipped adapter
TIGHT = {"error": "all restore tokens", "fewer": "fewer restore tokens where tight", "clip": "over budget where tight"}
FULL_CACHE = Mark("full cache", INK, dashed=True)


def slug(*words: str) -> str:
    """Joins words to a name for files and ids."""
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower().replace("+", "-plus")).strip("-.")


def ending(name: str, others: Collection[str | None]) -> str:
    """Returns the last parts of a path or hub id, as many as tell it from the others."""
    parts = [tuple(str(other).rstrip("/").split("/")) for other in others]
    mine = tuple(name.rstrip("/").split("/"))
    for count in range(1, len(mine)):
        if sum(other[-count:] == mine[-count:] for other in parts) <= 1:
            return "/".join(mine[-count:])
    return name


def model_name(name: str) -> str:
    return "Bundled model" if name == "bundled" else ending(name, ())


def evictor_name(spec: str) -> str:
    """Returns the paper's name, with the evictor's settings."""
    name, _, settings = spec.partition(":")
    return NAMES.get(name, name) + (f" ({settings})" if settings else "")


class Names:
    """Labels and marks that are the same in every chart and table of a run.

    `methods` are in the report's order: for each evictor the base alone, its controls, then restored, plain first.
    """

    def __init__(self, run: SortedResults) -> None:
        self.run = run
        order = {name: place for place, name in enumerate(NAMES)}

        def rank(method: Cell) -> tuple:
            plain = (method.storage != "model", method.streaming, method != base_of(method), method.adapter != AUTO)
            kind = (method.restored, *plain, str(method.adapter), method.restore_tokens or 0, repr(method))
            return (order.get(method.evictor.partition(":")[0], len(order)), method.evictor, kind)

        self.methods = sorted({method for grid in run.conditions.values() for method in grid.cells}, key=rank)
        self.evictors = list(dict.fromkeys(method.evictor for method in self.methods))

    def label(self, method: Cell) -> str:
        """Returns KVzip or KVzip + RestoreKV, with whatever else tells the method from others."""
        base = evictor_name(method.evictor)
        return ", ".join([f"{base} + RestoreKV" if method.restored else base, *self._settings(method)])

    def _settings(self, method: Cell) -> list[str]:
        """Returns the controls that are not at their defaults."""
        adapters = {other.adapter for other in self.methods if other.evictor == method.evictor and other.restored}
        named = method.adapter not in (None, AUTO) and len(adapters) > 1
        handled = any(
            method == replace(other, on_small_budget=method.on_small_budget)
            for other in self.methods
            if other != method
        )
        settings = {
            f"adapter {ending(str(method.adapter), adapters)}": named,
            f"n = {method.restore_tokens}": method.restore_tokens is not None,
            f"restored from the {method.restore_from} cache": method.restore_from != "full",
            f"offset {method.offset}": method.offset,
            f"{method.allocation} allocation": method.allocation != "global",
            f"streamed {method.streaming} tokens at a time": method.streaming,
            f"held in {method.storage}": method.storage != "model",
            TIGHT.get(method.on_small_budget, ""): handled,
        }
        return [words for words, shown in settings.items() if shown]

    def mark(self, method: Cell) -> Mark:
        """Returns one hue and marker for each evictor: dashed and hollow alone, solid and filled restored."""
        turn = self.evictors.index(method.evictor)
        kin = [other for other in self.methods if (other.evictor, other.restored) == (method.evictor, method.restored)]
        marker, place = MARKERS[turn % len(MARKERS)], kin.index(method)
        if place:
            spare = MARKERS[len(self.evictors) :] or MARKERS
            marker = spare[(place - 1) % len(spare)]
        return Mark(self.label(method), HUES[turn % len(HUES)], marker, not method.restored, not method.restored)

    def of(self, condition: Condition) -> list[Cell]:
        """Returns the condition's methods in the report's order."""
        return [method for method in self.methods if method in self.run.conditions[condition].cells]

    def pools(self, condition: Condition) -> list[tuple[str, float, SeedPool]]:
        """Returns the condition's caches that answered anything, as label, ratio and pool, the full one first."""
        grid = self.run.conditions[condition]
        pools = [(FULL_CACHE.label, 1.0, grid.full)] if grid.full else []
        pools += [(self.label(method), *item) for method in self.of(condition) for item in grid.cells[method].items()]
        return [each for each in pools if each[2].lines]

    def benchmark(self, condition: Condition) -> str:
        """Returns its title, with its settings where another benchmark has the same title."""
        titles = {other.benchmark: self.run.facts(other)["benchmark"]["title"] for other in self.run.conditions}
        title, settings = titles[condition.benchmark], condition.benchmark.partition(":")[2]
        several = list(titles.values()).count(title) > 1
        return f"{title} ({settings.replace(',', ', ')})" if several and settings else title

    def condition(self, condition: Condition) -> str:
        """Returns the benchmark, and what else tells the condition from the others of the run."""
        several = self._differ("model")
        return ", ".join(
            [model_name(condition.model)] * several + [self.benchmark(condition), *self.controls(condition)]
        )

    def controls(self, condition: Condition) -> list[str]:
        """Returns protocol, policy, dtype and length, as far as the run's conditions differ in them."""
        cut = f"contexts cut at {condition.max_context:,}" if condition.max_context else "contexts whole"
        own = condition.prefix_policy == protocols.make(condition.protocol).prefix_policy
        settings = {
            f"{condition.protocol} protocol": self._differ("protocol"),
            f"prefix {condition.prefix_policy}": not own,
            condition.dtype: self._differ("dtype"),
            cut: self._differ("max_context"),
        }
        return [words for words, shown in settings.items() if shown]

    def _differ(self, key: str) -> bool:
        return len({getattr(condition, key) for condition in self.run.conditions}) > 1

    def key(self, condition: Condition) -> str:
        """Returns a name for files and ids, unique in the run."""

        def key(one: Condition) -> str:
            return slug(ending(one.model, ()), one.benchmark.partition(":")[0], one.protocol)

        same = [other for other in self.run.conditions if key(other) == key(condition)]
        return key(condition) + (f"-{same.index(condition) + 1}" if len(same) > 1 else "")
