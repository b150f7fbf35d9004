"""The cells of an evaluation: what one cell measures, how a grid expands to cells, and which cells
share their work.
"""

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_type_hints

from restorekv import tasks
from restorekv.compression.budget import OnSmallBudget, PrefixPolicy, parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.compression.presets import resolve_preset
from restorekv.errors import RestoreKVError
from restorekv.files import cut_name, find_wrong_entry
from restorekv.model.names import TINY, tiny_path, to_canonical_name
from restorekv.restore.choices import RestoreFrom
from restorekv.restore.shipped import find_shipped_adapter

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
FULL = "full"
# Scores compare caches of one size, so a budget too small for the restore tokens is an error.
DEFAULT_ON_SMALL_BUDGET: OnSmallBudget = "error"
SHIPPED = ""  # means the adapter that ships for an evictor and a model
IGNORED_BY_FULL = (
    "on_small_budget",
    "allocation",
    "restore_from",
    "offset",
    "prefix_policy",
    "restore_tokens",
    "streaming_chunk",
)
# Fields of a cell that a grid sets by its own arguments.
SET_BY_GRID = ("model", "protocol", "benchmark", "evictor", "ratio", "adapter", "kv_dtype")


@dataclass(frozen=True)
class Cell:
    """One measurement: a model is asked one benchmark under one protocol, from caches that one
    method makes at one ratio.

    `evictor` is a spec, or "full" for the full cache; `adapter` is what `load_adapter` takes, None
    for the evictor alone; `prefix_policy` None is the protocol's. `max_context` cuts
    longer contexts at their end (0: at the tokenizer's limit). `streaming_chunk` is the number of
    tokens compressed at a time (0: all at once); see compression/streaming.py.
    """

    model: str
    benchmark: str
    evictor: str
    ratio: str
    adapter: str | None = None
    restore_tokens: int | None = None
    protocol: str = "kvpress"
    prefix_policy: str | None = None
    on_small_budget: str = DEFAULT_ON_SMALL_BUDGET
    allocation: str = "global"
    restore_from: str = "full"
    offset: int = 0
    max_context: int = 0
    dtype: str = "auto"
    kv_dtype: str = "model"
    streaming_chunk: int = 0

    def __post_init__(self) -> None:
        if self.on_small_budget == "whole":
            raise RestoreKVError(
                "Scores compare caches of one size, and on_small_budget='whole' makes others; use "
                "error, fewer or clip."
            )
        if self.evictor == FULL and not (
            self.ratio_value == 1 and not self.restored and self.kv_dtype == "model"
        ):
            raise RestoreKVError(
                "The full cache keeps every pair as the model computes it; leave out ratio, "
                "adapter and kv_dtype, or name an evictor."
            )

    @classmethod
    def full_cache(cls, **common: Any) -> Self:
        """Return the cell of the full cache, which every method of a grid is measured against."""
        return cls(evictor=FULL, ratio="1", **common)

    @property
    def restored(self) -> bool:
        return self.adapter is not None

    @property
    def evictor_alone(self) -> Self:
        """The same cell, at the same ratio, without restoring."""
        return replace(self, adapter=None, restore_tokens=None, restore_from="full")

    @property
    def ratio_value(self) -> float:
        return float(parse_ratio(self.ratio))

    @property
    def preparation(self) -> tuple[str, ...]:
        """Cells with an equal preparation share the prefill and the scores of a context."""
        return (*self.question_set, str(self.streaming_chunk), self.evictor)

    @property
    def question_set(self) -> tuple[str, ...]:
        """Cells with an equal question set ask the same questions of the same model."""
        return (self.model, self.dtype, self.protocol, self.benchmark, str(self.max_context))

    def to_dict(self) -> dict:
        """Return the fields as files store them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict) -> Self:
        """Read what `to_dict` wrote."""
        cell = cls(**stored)
        wrong = find_wrong_entry(cell.to_dict(), get_type_hints(cls))
        if wrong:
            raise TypeError(f"{wrong} has the wrong type")
        return cell

    @property
    def name(self) -> str:
        """The readable name of the cell's folder; only equal cells have equal names."""
        words = [
            self.model.rstrip("/").rsplit("/", 1)[-1],
            self.benchmark,
            self.protocol,
            self.evictor,
        ]
        words += ["alone" if self.adapter is None else "restored", self.ratio]
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        readable = "_".join(re.sub(r"[^\w.+=-]+", "-", word) for word in words)
        return f"{cut_name(readable, 120)}_{digest}"

    def config(self, prefix_policy: str) -> CompressionConfig:
        """Return how the cell compresses; `prefix_policy` applies if the cell names none."""
        # The strings may come from a cell's file; `CompressionConfig` refuses unknown ones.
        policy = cast("PrefixPolicy", self.prefix_policy or prefix_policy)
        return CompressionConfig(
            prefix_policy=policy,
            on_small_budget=cast("OnSmallBudget", self.on_small_budget),
            allocation=self.allocation,
            restore_from=cast("RestoreFrom", self.restore_from),
            offset=self.offset,
            streaming_chunk=self.streaming_chunk or None,
        )


@dataclass(frozen=True)
class Grid:
    """Expands to a cell for every model, protocol, benchmark, seed, `kv_dtype`, method and ratio.

    `methods` are pairs of an evictor's spec and an adapter: every evictor is evaluated without
    restoring, and also restored if an adapter is named. SHIPPED names the adapter that ships for
    the evictor and model, if one does and `common` asks for no offset. `seeds` and `count` replace
    those of each benchmark's spec; `common` sets other cell fields.
    """

    models: Sequence[str]
    methods: Sequence[tuple[str, str | None]]
    benchmarks: Sequence[str]
    protocols: Sequence[str] = ("kvpress",)
    ratios: Sequence[str] = ("0.4", "0.2", "0.1", "0.05")
    seeds: Sequence[int] = ()
    count: int | None = None
    kv_dtypes: Sequence[str] = ("model",)
    common: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SET_BY_GRID:
            if name in self.common:
                raise RestoreKVError(
                    f"common sets other fields of cells, not {name}; a Grid has an argument for it."
                )

    def list_cells(self) -> list[Cell]:
        """Return every cell once; specs and ratios take their shortest form, so that equal cells
        have equal names.
        """
        return list(dict.fromkeys(self._expand()))

    def _expand(self) -> Iterator[Cell]:
        ratios = sorted(
            {_shorten_ratio(each) for each in self.ratios}, key=parse_ratio, reverse=True
        )
        # The full cache has no evictor, so its cell keeps only what can change it.
        of_full = {key: value for key, value in self.common.items() if key not in IGNORED_BY_FULL}
        for model, protocol, benchmark in product(
            map(to_canonical_name, self.models), self.protocols, self._list_specs()
        ):
            where = {"model": model, "protocol": protocol, "benchmark": benchmark}
            yield Cell.full_cache(**where, **of_full)
            # The ratio varies fastest, so that the cells of one method follow each other.
            for kv_dtype, (spec, source), ratio in product(self.kv_dtypes, self.methods, ratios):
                evictor = make_compressor(spec).spec
                fields = {
                    **where,
                    **self.common,
                    "evictor": evictor,
                    "ratio": ratio,
                    "kv_dtype": kv_dtype,
                }
                # First without restoring, so that every method has its evictor alone next to it.
                yield Cell(**fields).evictor_alone
                adapter = source
                if source == SHIPPED:
                    adapter = self._find_shipped(model, evictor)
                if adapter is not None:
                    yield Cell(**fields, adapter=adapter)

    def _find_shipped(self, model: str, evictor: str) -> str | None:
        """Return "auto" if an adapter ships for the model and evictor and applies, else None."""
        name = model
        if Path(model).resolve() == tiny_path("model").resolve():
            name = TINY
        if not self.common.get("offset") and find_shipped_adapter(name, evictor):
            return "auto"
        return None

    def _list_specs(self) -> Iterator[str]:
        """Yield the spec of every benchmark with every seed."""
        for spec, seed in product(self.benchmarks, self.seeds or (None,)):
            changes = {"seed": seed, "count": self.count}
            yield replace(
                tasks.make_benchmark(spec),
                **{key: value for key, value in changes.items() if value is not None},
            ).spec


def find_unrestored(
    cells: Sequence[Cell], methods: Sequence[tuple[str, str | None]]
) -> list[tuple[str, str]]:
    """Return the pairs of model and evictor for which a shipped adapter was looked for in vain."""
    looked_for = {make_compressor(spec).spec for spec, source in methods if source == SHIPPED}
    restored = {(cell.model, cell.evictor) for cell in cells if cell.restored}
    found = []
    for cell in cells:
        pair = (cell.model, cell.evictor)
        # With an offset, shipped adapters are not used, so none was looked for.
        if cell.evictor in looked_for and pair not in restored and not cell.offset:
            found.append(pair)
    return list(dict.fromkeys(found))


def _shorten_ratio(ratio: str) -> str:
    """Return the shortest text of exactly this ratio: "0.1" for "0.10"; "1/3" stays "1/3"."""
    exact = parse_ratio(ratio)
    decimal = f"{float(exact):.12g}"
    return decimal if parse_ratio(decimal) == exact else str(exact)


def parse_method(text: str) -> tuple[str, str | None]:
    """Split SPEC@ADAPTER: "kvzip" -> ("kvzip", SHIPPED), "kvzip@none" -> ("kvzip", None),
    "kvzip@FOLDER". A preset is replaced by its evictor.
    """
    # "kvzip" means the shipped adapter, "kvzip@none" no adapter at all.
    evictor, at, source = text.partition("@")
    if at and not source:
        raise RestoreKVError(
            f"{text!r} names no adapter; write a folder, a hub id, published, auto or none after @."
        )
    return resolve_preset(evictor), None if source == "none" else source or SHIPPED


@dataclass(frozen=True)
class Job:
    """Cells with one preparation: one prefill and one scoring pass of a context serve all
    of them.
    """

    cells: tuple[Cell, ...]

    @property
    def representative(self) -> Cell:
        """A cell from which to read what all cells share; the full cache's only if there is no
        other.
        """
        return next((cell for cell in self.cells if cell.evictor != FULL), self.cells[0])

    @property
    def title(self) -> str:
        return f"{self.representative.benchmark}: {self.representative.evictor}"


def group_jobs(cells: Iterable[Cell]) -> list[Job]:
    """Group the cells by preparation, in order of appearance; the full cache joins the first
    evictor's job.
    """
    groups = group_by(dict.fromkeys(cells), lambda cell: cell.preparation)
    for key in [key for key in groups if key[-1] == FULL]:
        # The first job with the same questions reads the context anyway.
        host = next((other for other in groups if other[:-1] == key[:-1] and other != key), None)
        if host:
            # Appended last, so that prefill and scoring time is charged to an evictor's cell.
            groups[host] += groups.pop(key)
    return [Job(tuple(members)) for members in groups.values()]


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items of every key, both in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
