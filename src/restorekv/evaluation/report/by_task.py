"""Every task's score, a table for each method, and what the caches really held beside the ratio that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restorekv.evaluation.report.blocks import Cell, Details, Row, Section, Table, at, number, percent, table
from restorekv.evaluation.report.names import Names, evictor, slug
from restorekv.evaluation.report.paired import Column, cell, data_of, every_pool, full_cell
from restorekv.evaluation.report.runs import Method, Place, Pool, Run

INTRO = (
    "Scores of single tasks are means of fewer questions; their intervals are wider. Below them what every cache held: "
    "the share of pairs is of those that compete for the budget, and with the chat prefix of all pairs of prefix and "
    "context."
)
NOTE = "Points, 0 to 100, with 95 % intervals; under restored: score, paired gain and its interval."


def section(run: Run, names: Names) -> list[Section]:
    """Behind a click, place by place."""
    shown = [place for place in run.places if names.of(place) or run.places[place].full]
    blocks = [Details(names.place(place), list(tables(run, names, place))) for place in shown]
    return [Section("Tasks and what was kept", INTRO, blocks)] if blocks else []


def tables(run: Run, names: Names, place: Place) -> Iterator[Table]:
    asked = tasks_of(run, place)
    for spec in dict.fromkeys(method.evictor for method in names.of(place)):
        if asked:
            yield of_evictor(run, names, place, spec, asked)
    yield kept(run, names, place)


def tasks_of(run: Run, place: Place) -> list[str]:
    """Those that any finished cell was asked, in their order."""
    return list(dict.fromkeys(task for pool in every_pool(run, place) if pool.done for task in pool.tasks))


def of_evictor(run: Run, names: Names, place: Place, spec: str, asked: Sequence[str]) -> Table:
    """Tasks by ratios, alone and restored side by side."""
    grid = run.places[place]
    methods = [method for method in names.of(place) if method.evictor == spec]
    ratios = [ratio for ratio in grid.ratios if any(grid.at(method, ratio) for method in methods)]
    heads = [[Cell(""), Cell("")], ["task", "full cache"]]
    heads[0] += [Cell(at(ratio), columns=len(methods)) for ratio in ratios]
    heads[1] += [short(names, method) for _ in ratios for method in methods]
    rows, data = [], []
    for task in asked:
        columns = [Column(task, place, ratio, (task,)) for ratio in ratios]
        figures = [cell(run, method, column) for column in columns for method in methods]
        rows.append(Row([task, full_cell(run, Column(task, place, 1.0, (task,))), *figures]))
        data += [row for column in columns for method in methods for row in data_of(run, names, method, column)]
    title = f"{names.place(place)}: {evictor(spec)}, task by task"
    return table(slug("tasks", names.key(place), spec), title, heads, rows, NOTE, data)


def short(names: Names, method: Method) -> str:
    """Alone or restored, with what sets it apart."""
    return ", ".join(["restored" if method.restored else "alone", *names.settings(method)])


def kept(run: Run, names: Names, place: Place) -> Table:
    """Means over the contexts answered so far."""
    grid = run.places[place]
    full = grid.full if grid.full and grid.full.asked else None
    cells = [
        (names.label(method), ratio, pool) for method in names.of(place) for ratio, pool in grid.cells[method].items()
    ]
    told = [("full cache", 1.0, full)] if full else []
    told += [(label, ratio, pool) for label, ratio, pool in cells if pool.asked]
    head = [
        "method", "r asked for", "pairs kept", "share of pairs", "pairs with prefix", "share with prefix", "bytes",
        "of full", "restore tokens", "contexts",
    ]  # fmt: skip
    data = [held(label, ratio, pool, full) for label, ratio, pool in told]
    rows = [
        [
            row["method"], f"{row['ratio']:g}", f"{row['pairs']:,.0f}", percent(row["kept"], 2),
            f"{row['pairs_with_prefix']:,.0f}", percent(row["kept_with_prefix"], 2),
            f"{row['bytes']:,.0f}", percent(row.get("of_full"), 2),
            number(row["restore_tokens"]), f"{pool.asked:,}" if pool.done else f"{pool.asked} of {pool.contexts}",
        ]
        for row, (_, _, pool) in zip(data, told, strict=True)
    ]  # fmt: skip
    note = "Means over contexts; bytes of keys, values and what is held with them."
    return table(slug("kept", names.key(place)), f"{names.place(place)}: what the caches held", head, rows, note, data)


def held(label: str, ratio: float, pool: Pool, full: Pool | None) -> dict[str, object]:
    means = {key: pool.mean(key) for key in ("pairs", "pairs_with_prefix", "bytes", "restore_tokens")}
    of_full = {"of_full": means["bytes"] / full.mean("bytes")} if full else {}
    shares = {"kept": pool.kept(), "kept_with_prefix": pool.kept(prefix=True)}
    return {"method": label, "ratio": ratio, **means, **shares, **of_full, "contexts": pool.asked}
