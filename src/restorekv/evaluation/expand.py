"""From what a user names to cells: models x protocols x benchmarks x seeds x methods x ratios, and the full cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from restorekv import tasks
from restorekv.compression.budget import exact_ratio
from restorekv.compression.compressor import make_compressor, shipped_adapter
from restorekv.errors import RestoreKVError
from restorekv.evaluation.cell import Cell
from restorekv.model.load import BUNDLED, bundled_path, canonical

SHIPPED = ""


@dataclass(frozen=True)
class Grid:
    """`methods` are (evictor's spec, adapter): every evictor is asked alone, and restored where an adapter is named.

    SHIPPED is the adapter that ships for the evictor and model, if one does and no offset is asked for. `seeds` and
    `count` replace those of every benchmark's spec. `common` are further fields of `Cell`.
    """

    models: Sequence[str]
    methods: Sequence[tuple[str, str | None]]
    benchmarks: Sequence[str] = ("bundled",)
    protocols: Sequence[str] = ("kvpress",)
    ratios: Sequence[str] = ("0.4", "0.2", "0.1", "0.05")
    seeds: Sequence[int] = ()
    count: int | None = None
    storages: Sequence[str] = ("model",)
    common: dict[str, object] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """Without doubles; specs and ratios in their shortest form, so that equal cells have equal names."""
        return list(dict.fromkeys(self.every()))

    def every(self) -> Iterator[Cell]:
        ratios = sorted({shortest(ratio) for ratio in self.ratios}, key=float, reverse=True)
        bare = (
            "on_small_budget", "allocation", "restore_from", "offset", "prefix_policy", "restore_tokens", "streaming",
        )  # fmt: skip
        plain = {key: value for key, value in self.common.items() if key not in bare}
        for model, protocol, benchmark in product(map(canonical, self.models), self.protocols, self.asked()):
            place = {"model": model, "protocol": protocol, "benchmark": benchmark}
            yield Cell.full(**place, **plain)
            for storage, (text, source), ratio in product(self.storages, self.methods, ratios):
                evictor = known(text)
                common = {**place, **self.common, "evictor": evictor, "ratio": ratio, "storage": storage}
                yield Cell(**{**common, "restore_tokens": None, "restore_from": "full"})
                adapter = self.shipped(model, evictor) if source == SHIPPED else source
                if adapter is not None:
                    yield Cell(**common, adapter=adapter)

    def shipped(self, model: str, evictor: str) -> str | None:
        """ "auto" where that names an adapter."""
        name = BUNDLED if Path(model).resolve() == bundled_path("model").resolve() else model
        return "auto" if not self.common.get("offset") and shipped_adapter(name, evictor) else None

    def asked(self) -> Iterator[str]:
        """The benchmarks' specs with every seed."""
        for text, seed in product(self.benchmarks, self.seeds or (None,)):
            made = tasks.make(text)
            changed = {"seed": seed, "count": self.count}
            yield replace(made, **{key: value for key, value in changed.items() if value is not None}).spec


def shortest(ratio: str) -> str:
    """ "0.050" -> "0.05"; "1/16" -> "0.0625"."""
    return f"{float(exact_ratio(ratio)):.12g}"


def known(evictor: str) -> str:
    """A method's shortest spec."""
    return make_compressor(evictor).spec


def named(text: str) -> tuple[str, str | None]:
    """`kvzip` -> with the adapter that ships, if one does; `kvzip@FOLDER`; `kvzip@none` -> the base alone."""
    evictor, found, source = text.partition("@")
    if found and not source:
        raise RestoreKVError(
            f"{text!r} names no adapter; give a folder, a hub id, published, auto or none behind the @."
        )
    return evictor, None if source == "none" else source or SHIPPED
