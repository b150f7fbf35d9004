"""How the figures of a grid are told apart: by condition (what was asked) and by method (how caches
were made).

Scores can only be compared within one condition. A cell is one method at one ratio in one
condition, on one seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from restorekv import tasks
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import Result
from restorekv.evaluation.tables import name_evictor

FULL_CACHE = "full cache"


@dataclass(frozen=True, order=True)
class Condition:
    """What cells were asked, whatever the seed, and whether the budget counts the chat prefix."""

    model: str
    benchmark: str
    protocol: str
    prefix_policy: str
    max_context: int
    dtype: str

    @classmethod
    def of_result(cls, result: Result) -> Self:
        """Return the condition of a cell."""
        cell = result.cell
        benchmark = tasks.make_benchmark(result.identity["benchmark"]["spec"])
        default_policy = protocols.make_protocol(cell.protocol).prefix_policy
        return cls(
            model=cell.model,
            benchmark=replace(benchmark, seed=0).spec,
            protocol=cell.protocol,
            prefix_policy=cell.prefix_policy or default_policy,
            max_context=cell.max_context,
            dtype=cell.dtype,
        )


@dataclass(frozen=True)
class Method:
    """How caches were made, at whatever ratio; the fields are those of a `Cell`."""

    evictor: str
    adapter: str | None = None
    restore_tokens: int | None = None
    on_small_budget: str = ""
    allocation: str = "global"
    restore_from: str = "full"
    offset: int = 0
    kv_dtype: str = "model"
    streaming_chunk: int = 0

    @classmethod
    def of_cell(cls, cell: Cell) -> Self:
        """Return the method of a cell, without what makes no difference to its cache."""
        if cell.evictor == FULL:
            return cls(FULL)
        method = cls(**{each.name: getattr(cell, each.name) for each in fields(cls)})
        # Without a restore pass, its settings make no difference.
        return method if method.restored else method.evictor_alone

    @property
    def restored(self) -> bool:
        return self.adapter is not None

    @property
    def evictor_alone(self) -> Self:
        """The same eviction with nothing restored, over which restoring has its gain."""
        return replace(
            self, adapter=None, restore_tokens=None, on_small_budget="", restore_from="full"
        )

    def describe_settings(self) -> str:
        """Describe what sets the method apart from others with its evictor: its adapter, its
        number of restore tokens, and its other settings that are not at their defaults.
        """
        parts = []
        if self.adapter and self.adapter != "auto":
            parts.append(self.adapter)
        if self.restore_tokens:
            parts.append(f"n = {self.restore_tokens}")
        if self.allocation != "global":
            parts.append(self.allocation)
        if self.restore_from != "full":
            parts.append("from the evicted cache")
        if self.streaming_chunk:
            parts.append(f"streamed {self.streaming_chunk} tokens at a time")
        if self.kv_dtype != "model":
            parts.append(self.kv_dtype)
        if self.offset:
            parts.append(f"offset {self.offset}")
        return ", ".join(parts)


FULL_METHOD = Method(FULL)


def label_methods(methods: Sequence[Method]) -> dict[Method, str]:
    """Return labels such as "KVzip + RestoreKV, n = 1", with the settings that are not at their
    defaults.
    """
    labels = {}
    for method in methods:
        # A label names how a method differs from those that restore the same eviction, and nothing
        # that all of them share.
        kin = [
            each for each in methods if each.restored and each.evictor_alone == method.evictor_alone
        ]
        name = name_evictor(method.evictor)
        if method.restored:
            name = f"{name} + RestoreKV"
        shown = method
        if len({each.adapter for each in kin}) <= 1:
            shown = replace(method, adapter="auto")
        parts = [name, shown.describe_settings()]
        if method.restored and len({each.on_small_budget for each in kin}) > 1:
            parts.append(f"{method.on_small_budget} where tight")
        labels[method] = ", ".join(filter(None, parts))
    return labels | {FULL_METHOD: FULL_CACHE}


def label_conditions(titles: Mapping[Condition, str]) -> dict[Condition, str]:
    """Return labels with the benchmark's title and whatever else sets a condition apart from the
    others.
    """
    labels = {}
    for condition, title in titles.items():
        same_title = {other.benchmark for other in titles if titles[other] == title}
        parts = [title]
        if len(same_title) > 1:
            parts = [f"{title} ({_describe_benchmark(condition.benchmark, same_title)})"]
        for name in ("model", "dtype", "protocol", "max_context"):
            value = getattr(condition, name)
            if value and len({getattr(other, name) for other in titles}) > 1:
                parts.append(f"{name.replace('_', ' ')} {value}")
        if condition.prefix_policy != protocols.make_protocol(condition.protocol).prefix_policy:
            parts.append(f"prefix policy {condition.prefix_policy}")
        labels[condition] = ", ".join(parts)
    return labels


def _describe_benchmark(spec: str, others: Collection[str]) -> str:
    """Return a benchmark's settings, or its whole spec if it has none or another of `others`, which
    include it, has the same.
    """
    settings = spec.partition(":")[2]
    if settings and sum(other.partition(":")[2] == settings for other in others) == 1:
        return settings.replace(",", ", ")
    return spec.replace(",", ", ")
