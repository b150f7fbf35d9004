"""The paper's Table 1: every base method alone and restored, with paired gains, and how many of them are gains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from restorekv import tasks
from restorekv.evaluation.report.blocks import (
    Cell,
    Details,
    Row,
    Section,
    Table,
    at,
    gain,
    number,
    running,
    score,
    table,
)
from restorekv.evaluation.report.names import Names, slug, spoken
from restorekv.evaluation.report.runs import Method, Place, Pool, Run

COLUMNS = 12  # of figures side by side
NOTE = (
    "Points, 0 to 100; below each score its 95 % interval, below each gain the 95 % interval of the paired gain "
    "(bootstrap over contexts, the same draws for both sides). ▲ green: restored scores higher, ▼ orange: lower; bold: "
    "the interval excludes zero."
)


@dataclass(frozen=True)
class Pair:
    """A restored cell and what it gains over its base."""

    place: Place
    method: Method
    ratio: float
    figures: Mapping[str, float]


def pairs(run: Run, names: Names) -> list[Pair]:
    """Every finished pair of the run, methods in the report's order, ratios from mild to tight."""
    return [
        Pair(place, method, ratio, pool.score(base=base))
        for place, grid in run.places.items()
        for method in names.of(place)
        if method.restored
        for ratio, pool in grid.cells[method].items()
        if pool.done and (base := grid.base_of(method, ratio))
    ]


def count(found: Sequence[Pair]) -> str:
    """In words: how many cells improve, and how surely."""
    more = sum(pair.figures["gain"] > 0 for pair in found)
    sure = sum(pair.figures["gain_low"] > 0 for pair in found)
    less = sum(pair.figures["gain_high"] < 0 for pair in found)
    below = f"; {less} with one below zero" if less else "; none with one below zero"
    return f"{more} of {len(found)} paired cells improve, {sure} of them with a 95 % interval above zero{below}."


def section(run: Run, names: Names) -> list[Section]:
    """A table for every model and protocol, and behind a click the groups of tasks."""
    groups: dict[tuple, list[Place]] = {}
    for place in run.places:
        if names.of(place):
            one = (place.model, place.dtype, place.protocol, place.prefix_policy, place.max_context)
            groups.setdefault(one, []).append(place)
    if not groups:
        return []
    found = pairs(run, names)
    blocks = [block for places in groups.values() for block in tables(run, names, places)]
    intro = count(found) if found else "No pair of a base and its restored cell is finished yet."
    return [Section("Restored beside its base", intro, blocks)]


@dataclass(frozen=True)
class Column:
    """Scores of a place at a ratio: of all its tasks, or of a group's `members`."""

    title: str
    place: Place
    ratio: float
    members: tuple[str, ...] = ()


def tables(run: Run, names: Names, places: Sequence[Place]) -> Iterator[Table | Details]:
    """The headline scores, then for every benchmark that has groups of tasks those."""
    first = places[0]
    told = ", ".join([spoken(first.model), *names.conditions(first)])
    columns = [Column(names.benchmark(place), place, ratio) for place in places for ratio in run.places[place].ratios]
    yield from split(run, names, columns, f"{told}: base and restored", slug("paired", names.key(first)))
    for place in places:
        groups = tasks.make(place.benchmark).groups()
        columns = [
            Column(group, place, ratio, tuple(members))
            for group, members in groups.items()
            if any(present(pool, members) for pool in every_pool(run, place) if pool.done)
            for ratio in run.places[place].ratios
        ]
        if columns:
            title = f"{names.place(place)}: base and restored, by group of tasks"
            inner = list(split(run, names, columns, title, slug("groups", names.key(place))))
            yield Details(title, inner)


def split(run: Run, names: Names, columns: Sequence[Column], title: str, name: str) -> Iterator[Table]:
    """One table, or several where there are too many columns; columns of one title stay together."""
    titles: dict[str, list[Column]] = {}
    for column in columns:
        titles.setdefault(column.title, []).append(column)
    parts: list[list[Column]] = [[]]
    for together in titles.values():
        if parts[-1] and len(parts[-1]) + len(together) > COLUMNS:
            parts.append([])
        parts[-1] += together
    for turn, part in enumerate(parts, 1):
        which = f", part {turn} of {len(parts)}" if len(parts) > 1 else ""
        yield one(run, names, part, title + which, f"{name}-{turn}" if which else name)


def one(run: Run, names: Names, columns: Sequence[Column], title: str, name: str) -> Table:
    places = dict.fromkeys(column.place for column in columns)
    methods = [method for method in names.methods if any(method in run.places[place].cells for place in places)]
    heads = [Cell("")]
    for text in dict.fromkeys(column.title for column in columns):
        heads.append(Cell(text, columns=sum(column.title == text for column in columns)))
    ratios = ["method", *(at(column.ratio) for column in columns)]
    rows, before = [], None
    full = [full_cell(run, column) for column in columns]
    if any(cell.text != "–" for cell in full):
        rows.append(Row([Cell("full cache", tone="full"), *full]))
    for method in methods:
        cells = [cell(run, method, column) for column in columns]
        rows.append(Row([names.label(method), *cells], strong=method.restored, rule=method.evictor != before))
        before = method.evictor
    data = [row for method in methods for column in columns for row in data_of(run, names, method, column)]
    return table(name, title, [heads, ratios], rows, f"{NOTE} {budgets(run, methods, columns)}", data)


def budgets(run: Run, methods: Sequence[Method], columns: Sequence[Column]) -> str:
    """Whether restored and base held the same number of pairs, context by context."""
    same = []
    for column in columns:
        grid = run.places[column.place]
        for method in methods:
            pool, base = grid.at(method, column.ratio), grid.base_of(method, column.ratio)
            if pool and pool.done and base:
                same.append([line["pairs"] for line in pool.lines] == [line["pairs"] for line in base.lines])
    if all(same):
        return "Both rows of a pair hold the same number of KV pairs, context by context." if same else ""
    return f"In {len(same) - sum(same)} of {len(same)} pairs restored and base do not hold the same number of KV pairs."


def every_pool(run: Run, place: Place) -> list[Pool]:
    """The full cache's, then the others."""
    grid = run.places[place]
    return [*([grid.full] if grid.full else []), *(pool for by in grid.cells.values() for pool in by.values())]


def full_cell(run: Run, column: Column) -> Cell:
    """The full cache's score, the same at every ratio."""
    full = run.places[column.place].full
    if full is None:
        return Cell("–", tone="muted")
    return scored(full, column.members) if full.done else running(full.asked, full.contexts)


def cell(run: Run, method: Method, column: Column) -> Cell:
    """A base's score, or a restored one's with its gain."""
    grid = run.places[column.place]
    pool = grid.at(method, column.ratio)
    if pool is None:
        return Cell("–", tone="muted")
    if not pool.done:
        return running(pool.asked, pool.contexts)
    base = grid.base_of(method, column.ratio)
    if base is None or not present(pool, column.members):
        return scored(pool, column.members)
    told = pool.score(column.members, base)
    return gain(told["gain"], told["gain_low"], told["gain_high"], of=number(told["score"]))


def scored(pool: Pool, members: Iterable[str]) -> Cell:
    if not present(pool, members):
        return Cell("–", tone="muted")
    told = pool.score(members)
    return score(told["score"], told["low"], told["high"])


def present(pool: Pool, members: Iterable[str]) -> bool:
    """Whether any of the tasks was asked; no members are all."""
    members = set(members)
    return not members or not members.isdisjoint(pool.tasks)


def data_of(run: Run, names: Names, method: Method, column: Column) -> Iterator[dict[str, object]]:
    """A cell's figures for the CSV, if there are any."""
    grid = run.places[column.place]
    pool = grid.at(method, column.ratio)
    if pool and pool.done and present(pool, column.members):
        base = grid.base_of(method, column.ratio)
        yield {
            "model": column.place.model, "protocol": column.place.protocol, "benchmark": column.place.benchmark,
            "part": column.title, "method": names.label(method), "ratio": column.ratio,
            **pool.score(column.members, base),
        }  # fmt: skip
