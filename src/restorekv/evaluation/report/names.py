"""What a report calls models, places and methods, and how it draws them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from restorekv.evaluation import protocols
from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import Mark
from restorekv.evaluation.report.runs import Method, Place, Run
from restorekv.evaluation.tables import NAMES

AUTO = "auto"  # the shipped adapter
TIGHT = {"error": "all restore tokens", "fewer": "fewer restore tokens where tight", "clip": "over budget where tight"}
FULL_CACHE = Mark("full cache", draw.INK, dashed=True)


def slug(*words: str) -> str:
    """For names of files and ids."""
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower().replace("+", "-plus")).strip("-.")


def model(name: str) -> str:
    """The last part of a path or hub id."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def ending(name: str, others: Collection[str | None]) -> str:
    """The last parts of a path or hub id, as many as tell it from the others."""
    parts = [tuple(str(other).rstrip("/").split("/")) for other in others]
    mine = tuple(name.rstrip("/").split("/"))
    for count in range(1, len(mine)):
        if sum(other[-count:] == mine[-count:] for other in parts) <= 1:
            return "/".join(mine[-count:])
    return name


def spoken(name: str) -> str:
    """For readers."""
    return "Bundled model" if name == "bundled" else model(name)


def evictor(spec: str) -> str:
    """The paper's name, its settings behind it."""
    name, _, settings = spec.partition(":")
    return NAMES.get(name, name) + (f" ({settings})" if settings else "")


def key(place: Place) -> str:
    return slug(model(place.model), place.benchmark.partition(":")[0], place.protocol)


def rank(method: Method) -> tuple:
    """The base alone, its controls, then restored, plain before controlled."""
    return (
        method.restored,
        method.storage != "model",
        method.streaming,
        method != method.base,
        method.adapter != AUTO,
        str(method.adapter),
        method.restore_tokens or 0,
        repr(method),
    )


class Names:
    """Labels and marks that are the same in every chart and table of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        found = dict.fromkeys(method for grid in run.places.values() for method in grid.cells)
        order = {name: place for place, name in enumerate(NAMES)}
        last = len(order)
        self.methods: list[Method] = sorted(
            found, key=lambda method: (order.get(method.evictor.partition(":")[0], last), method.evictor, rank(method))
        )
        self.evictors = list(dict.fromkeys(method.evictor for method in self.methods))

    def label(self, method: Method) -> str:
        """KVzip, KVzip + RestoreKV, and whatever else a reader must know to tell them apart."""
        base = evictor(method.evictor)
        return ", ".join([f"{base} + RestoreKV" if method.restored else base, *self.settings(method)])

    def settings(self, method: Method) -> list[str]:
        """Controls that are not at their defaults."""
        told = []
        adapters = {other.adapter for other in self.methods if other.evictor == method.evictor and other.restored}
        if method.adapter not in (None, AUTO) and len(adapters) > 1:
            told.append(f"adapter {ending(str(method.adapter), adapters)}")
        if method.restore_tokens is not None:
            told.append(f"n = {method.restore_tokens}")
        if method.restore_from != "full":
            told.append(f"restored from the {method.restore_from} cache")
        if method.offset:
            told.append(f"offset {method.offset}")
        if method.allocation != "global":
            told.append(f"{method.allocation} allocation")
        if method.streaming:
            told.append(f"streamed {method.streaming} tokens at a time")
        if method.storage != "model":
            told.append(f"held in {method.storage}")
        if any(
            method == replace(other, on_small_budget=method.on_small_budget)
            for other in self.methods
            if other != method
        ):
            told.append(TIGHT[method.on_small_budget])
        return told

    def mark(self, method: Method) -> Mark:
        """One hue and marker an evictor: dashed and hollow alone, solid and filled restored."""
        turn = self.evictors.index(method.evictor)
        kin = [other for other in self.methods if other.evictor == method.evictor and other.restored == method.restored]
        marker, place = draw.MARKERS[turn % len(draw.MARKERS)], kin.index(method)
        if place:
            spare = draw.MARKERS[len(self.evictors) :] or draw.MARKERS
            marker = spare[(place - 1) % len(spare)]
        colour = draw.HUES[turn % len(draw.HUES)]
        return Mark(self.label(method), colour, marker, dashed=not method.restored, hollow=not method.restored)

    def of(self, place: Place) -> list[Method]:
        """The place's methods in the report's order."""
        return [method for method in self.methods if method in self.run.places[place].cells]

    def benchmark(self, place: Place) -> str:
        """Its title; with the settings where another benchmark has the same title."""
        title = self.run.of_place(place)["benchmark"]["title"]
        same = {other.benchmark for other in self.run.places if self.run.of_place(other)["benchmark"]["title"] == title}
        settings = place.benchmark.partition(":")[2]
        return f"{title} ({settings.replace(',', ', ')})" if len(same) > 1 and settings else title

    def place(self, place: Place, protocol: bool = True) -> str:
        """Benchmark, and what else sets the place apart from the others."""
        told = [self.benchmark(place)]
        if len({other.model for other in self.run.places}) > 1:
            told.insert(0, spoken(place.model))
        told += self.conditions(place, protocol)
        return ", ".join(told)

    def conditions(self, place: Place, protocol: bool = True) -> list[str]:
        """Of protocol, policy, dtype and length, those in which the run's places differ."""
        places = self.run.places
        told = []
        if protocol and len({other.protocol for other in places}) > 1:
            told.append(f"{place.protocol} protocol")
        if place.prefix_policy != protocols.make(place.protocol).prefix_policy:
            told.append(f"prefix {place.prefix_policy}")
        if len({other.dtype for other in places}) > 1:
            told.append(place.dtype)
        if len({other.max_context for other in places}) > 1:
            told.append(f"contexts cut at {place.max_context:,}" if place.max_context else "contexts whole")
        return told

    def key(self, place: Place) -> str:
        """For files and ids: unique in the run."""
        mine = key(place)
        same = [other for other in self.run.places if key(other) == mine]
        return mine if len(same) == 1 else f"{mine}-{same.index(place) + 1}"
