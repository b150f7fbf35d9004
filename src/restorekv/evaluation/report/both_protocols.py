"""One model under both protocols: the rows side by side, and in real kept pairs why they differ.

The words are made of the run's own figures: how many pairs each protocol holds at one nominal ratio, and which of its
conventions (templates, budget, scoring settings, stops, RoPE) are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from restorekv.compression.prepared import SINKS
from restorekv.evaluation import protocols
from restorekv.evaluation.report import convention
from restorekv.evaluation.report.blocks import Block, Cell, Points, Row, Section, Table, at, number, percent, table
from restorekv.evaluation.report.names import Names, slug, spoken
from restorekv.evaluation.report.paired import Column, cell, data_of, full_cell
from restorekv.evaluation.report.runs import Method, Place, Pool, Run

TITLES = {
    "protocol.before": "text before the context", "protocol.after": "text after a question",
    "protocol.stops": "an answer ends", "protocol.rope": "RoPE of the protocol", "rope": "RoPE as loaded",
    "prefix_policy": "chat prefix", "method": "method as run", "benchmark.digest": "digest of the data",
}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """One benchmark of one model under two protocols, and what both were asked of."""

    places: tuple[Place, Place]
    methods: tuple[Method, ...]
    ratios: tuple[float, ...]

    def pools(self, run: Run, ratio: float) -> list[tuple[Pool, ...]]:
        """Pairs of finished cells."""
        found = [tuple(run.places[place].at(method, ratio) for place in self.places) for method in self.methods]
        return [pair for pair in found if all(pool and pool.done for pool in pair)]


def section(run: Run, names: Names) -> list[Section]:
    """For every model and benchmark that ran under both."""
    blocks: list[Block] = []
    for twin in twins(run, names):
        found = held(run, twin)
        blocks += [scores(run, names, twin), Points(list(words(run, twin, found)))]
        blocks += [pairs_table(names, twin, found)] if found else []
        blocks.append(differences(run, names, twin))
    intro = (
        "The same model, methods and ratios under the conventions of two projects. A ratio does not mean the same "
        "number of pairs in both: compare scores within a protocol, and across them by the pairs really held."
    )
    return [Section("Both protocols", intro, blocks)] if blocks else []


def twins(run: Run, names: Names) -> Iterator[Twin]:
    first, second = protocols.PROTOCOLS
    for place in run.places:
        if place.protocol != first:
            continue
        for other in run.places:
            same = replace(other, protocol=first, prefix_policy=place.prefix_policy) == place
            if other.protocol == second and same and own(place) and own(other):
                grids = [run.places[one] for one in (place, other)]
                methods = [method for method in names.of(place) if method in grids[1].cells]
                ratios = [ratio for ratio in grids[0].ratios if ratio in grids[1].ratios]
                if methods and ratios:
                    yield Twin((place, other), tuple(methods), tuple(ratios))


def own(place: Place) -> bool:
    """Whether the prefix policy is the protocol's."""
    return place.prefix_policy == protocols.make(place.protocol).prefix_policy


def title(names: Names, twin: Twin) -> str:
    place = twin.places[0]
    return f"{spoken(place.model)}, {names.benchmark(place)}"


def scores(run: Run, names: Names, twin: Twin) -> Table:
    """Two rows a method."""
    rows, data = [], []
    full = [[full_cell(run, Column("", place, 1.0)) for _ in twin.ratios] for place in twin.places]
    for place, cells in zip(twin.places, full, strict=True):
        rows.append(Row([Cell("full cache", place.protocol, tone="full"), *cells]))
    for method in twin.methods:
        for place in twin.places:
            columns = [Column("all tasks", place, ratio) for ratio in twin.ratios]
            cells = [cell(run, method, column) for column in columns]
            rows.append(Row([Cell(names.label(method), place.protocol), *cells], rule=place == twin.places[0]))
            data += [row for column in columns for row in data_of(run, names, method, column)]
    head = [Cell("method", "protocol"), *(at(ratio) for ratio in twin.ratios)]
    note = "Points, 0 to 100, with 95 % intervals; restored: the paired gain over the base of the same protocol."
    name = slug("protocols", names.key(twin.places[0]))
    return table(name, f"{title(names, twin)}: scores under both protocols", head, rows, note, data)


def held(run: Run, twin: Twin) -> list[list[Held]]:
    """For every ratio that is finished under both protocols a row of each; means over contexts and methods."""
    found = {ratio: twin.pools(run, ratio) for ratio in twin.ratios}
    return [
        [Held.of(place, ratio, pools) for place, pools in zip(twin.places, zip(*pairs, strict=True), strict=True)]
        for ratio, pairs in found.items()
        if pairs
    ]


@dataclass(frozen=True)
class Held:
    """What caches of a protocol held at a ratio.

    `context` are the pairs of context and restore cache, `pinned` the prefix columns that the budget pays for.
    """

    protocol: str
    ratio: float
    budget: float
    held: float
    context: float
    pinned: float
    prefix: float
    tokens: float
    real_ratio: float

    @classmethod
    def of(cls, place: Place, ratio: float, pools: Sequence[Pool]) -> Held:
        shape = pools[0].facts["shape"]
        heads = shape["layers"] * shape["heads"]

        def mean(key: str) -> float:
            return sum(pool.mean(key) for pool in pools) / len(pools)

        # Counted, prefix columns behind the pinned ones are the first to be evicted (PreparedContext.competing).
        pinned = min(SINKS, mean("prefix")) if place.prefix_policy == "counted" else 0
        real = sum(pool.kept(prefix=True) for pool in pools) / len(pools)
        return cls(
            place.protocol, ratio, mean("pairs"), mean("pairs_with_prefix"), mean("pairs") - heads * pinned, pinned,
            mean("prefix"), mean("tokens"), real,
        )  # fmt: skip


def pairs_table(names: Names, twin: Twin, found: Sequence[Sequence[Held]]) -> Table:
    """What was held at each ratio, two rows each."""
    rows = [
        Row(
            [
                Cell(at(row.ratio), row.protocol),
                f"{row.budget:,.0f}", f"{row.held:,.0f}", f"{row.context:,.0f}",
                f"{row.prefix:,.1f}", f"{row.tokens:,.0f}", percent(row.real_ratio, 2),
            ],
            rule=row is both[0],
        )
        for both in found
        for row in both
    ]  # fmt: skip
    head = [
        Cell("asked for", "protocol"), "pairs in the budget", "pairs held, prefix included",
        "of them context and restore cache", "prefix S (tokens)", "context T (tokens)", "real ratio",
    ]  # fmt: skip
    note = "Means over contexts. The real ratio is pairs held over all pairs of prefix and context, L H (S + T)."
    name, data = slug("protocol-pairs", names.key(twin.places[0])), [asdict(row) for both in found for row in both]
    return table(name, f"{title(names, twin)}: pairs really held", head, rows, note, data)


def words(run: Run, twin: Twin, found: Sequence[Sequence[Held]]) -> Iterator[str]:
    """Why the rows differ, in sentences made of the figures."""
    if not found:
        yield "No pair of cells is finished under both protocols yet."
        return
    first, second = found[0]
    yield from map(prefix_rule, twin.places, found[0])
    yield from map(compared, found)
    if abs(first.tokens - second.tokens) < 0.5:
        yield f"Contexts have {first.tokens:,.0f} tokens on average under both: the prefix alone makes the difference."
    else:
        yield (
            f"The contexts are not the same in tokens, {first.tokens:,.1f} on average under {first.protocol} and "
            f"{second.tokens:,.1f} under {second.protocol}: this moves the number of pairs as well."
        )
    full = [run.places[place].full for place in twin.places]
    if all(pool and pool.done for pool in full):
        one, two = (pool.score()["score"] for pool in full)
        yield (
            f"With nothing evicted the full cache scores {number(one)} under {first.protocol} and {number(two)} under "
            f"{second.protocol}: {number(two - one, sign=True)} points are due to what surrounds context and question "
            "and to when an answer ends."
        )


def prefix_rule(place: Place, row: Held) -> str:
    """What a protocol does with the chat prefix, in pairs."""
    if place.prefix_policy == "counted":
        return (
            f"{place.protocol} counts the chat prefix of S = {row.prefix:.4g} tokens: B = floor(r (S + T) L H). Of its "
            f"columns the first {row.pinned:.3g} are sure of their place and take {row.budget - row.context:,.0f} "
            f"pairs of the budget{'; the others are the first to go' * (row.prefix > row.pinned)}."
        )
    return (
        f"{place.protocol} keeps its chat prefix of S = {row.prefix:.4g} tokens whole and beside the budget: "
        f"B = floor(r T L H), and {row.held - row.budget:,.0f} pairs more."
    )


def compared(both: Sequence[Held]) -> str:
    """Two protocols at one ratio."""
    less, more = sorted(both, key=lambda row: row.held)
    extra = more.held - less.held
    text = (
        f"At {at(less.ratio)}, {more.protocol} really holds {more.held:,.0f} pairs and {less.protocol} "
        f"{less.held:,.0f}: {extra:,.0f} more ({percent(extra / less.held)}), a real ratio of "
        f"{percent(more.real_ratio, 2)} against {percent(less.real_ratio, 2)}."
    )
    if round(more.context) == round(less.context):
        return text + f" Context and restore cache have {more.context:,.0f} of them under both."
    ahead, behind = sorted(both, key=lambda row: -row.context)
    return text + (
        f" For context and restore cache that leaves {ahead.context:,.0f} under {ahead.protocol} and "
        f"{behind.context:,.0f} under {behind.protocol} ({percent(ahead.context / behind.context - 1, sign=True)})."
    )


def differences(run: Run, names: Names, twin: Twin) -> Table:
    """Conventions that are not the same, side by side."""
    facts = [convention.flat(run.of_place(place)) for place in twin.places]
    made = [
        convention.flat(next(iter(run.places[place].cells[twin.methods[0]].values())).facts) for place in twin.places
    ]
    for mine, of_method in zip(facts, made, strict=True):
        mine |= {key: of_method[key] for key in ("method", "prefix_policy")}
    differing = [key for key in {**facts[0], **facts[1]} if facts[0].get(key) != facts[1].get(key)]
    rows = [
        [TITLES.get(key, key), *(convention.shown(mine.get(key)) for mine in facts)]
        for key in differing
        if key not in ("protocol.name", "fingerprint")
    ]
    head = ["convention", *(place.protocol for place in twin.places)]
    name = slug("protocol-conventions", names.key(twin.places[0]))
    note = "Whatever is not in this table is the same under both protocols."
    return table(name, f"{title(names, twin)}: what else differs", head, rows, note, left=(0, 1, 2))
