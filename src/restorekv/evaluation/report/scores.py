"""The paper's Table 1: every base method alone and restored, with paired gains; also by group of tasks and by task.

Every figure of a table is a column's score: that of one condition at one ratio, over all tasks or over some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from restorekv import tasks
from restorekv.evaluation.report.names import FULL_CACHE, Names, model_name, slug
from restorekv.evaluation.report.page import Details, Section
from restorekv.evaluation.report.runs import Condition, SeedPool, SortedResults
from restorekv.evaluation.stats import counted
from restorekv.evaluation.summary import metrics as further_metrics
from restorekv.evaluation.tables import ABSENT, Table, TableCell, TableRow, at, gain, number, percent, score, table

COLUMNS = 12  # of figures side by side
NOTE = (
    "Points, 0 to 100; below each score its 95 % interval, below each gain the 95 % interval of the paired gain "
    "(bootstrap over contexts, the same draws for both sides) and the share of the base's loss that came back. ▲ "
    "green: restored scores higher, ▼ orange: lower; bold: the interval excludes zero."
)


@dataclass(frozen=True)
class Column:
    """Scores of a condition at a ratio: of all its tasks, or of `members`."""

    title: str
    condition: Condition
    ratio: float
    members: tuple[str, ...] = ()


def pairs(run: SortedResults, names: Names) -> list[dict[str, float]]:
    """Returns score and gain of every finished pair of a base and its restored cell."""
    return [
        pool.score(base=base)
        for condition, grid in run.conditions.items()
        for method in names.of(condition)
        for ratio, pool in grid.done(method).items()
        if method.restored and (base := grid.base_of(method, ratio))
    ]


def count(scores: Sequence[Mapping[str, float]]) -> str:
    """Says how many pairs improve, and how surely."""
    more = sum(score["gain"] > 0 for score in scores)
    sure = sum(score["gain_low"] > 0 for score in scores)
    less = sum(score["gain_high"] < 0 for score in scores)
    below = f"; {less} with one below zero" if less else "; none with one below zero"
    return f"{more} of {len(scores)} paired cells improve, {sure} of them with a 95 % interval above zero{below}."


def section(run: SortedResults, names: Names) -> list[Section]:
    """Returns a table for every model and protocol, and behind a click those by group of tasks and by task."""
    together: dict[tuple, list[Condition]] = {}
    for condition in run.conditions:
        key = (condition.model, condition.dtype, condition.protocol, condition.prefix_policy, condition.max_context)
        together.setdefault(key, []).append(condition)
    blocks: list[Table | Details] = []
    for conditions in together.values():
        model, controls = model_name(conditions[0].model), names.controls(conditions[0])
        columns = [column for each in conditions for column in columns_of(run, each, names.benchmark(each))]
        title = f"{', '.join([model, *controls])}: base and restored"
        blocks += split(run, names, columns, title, slug("paired", names.key(conditions[0])))
        for condition in conditions:
            parts = list(by_part(run, names, condition))
            blocks += [Details(f"{names.condition(condition)}: by task", parts)] if parts else []
    found = pairs(run, names)
    intro = count(found) if found else "No pair of a base and its restored cell is finished yet."
    return [Section("Restored beside its base", intro, blocks)] if blocks else []


def columns_of(run: SortedResults, condition: Condition, title: str, members: Sequence[str] = ()) -> list[Column]:
    return [Column(title, condition, ratio, tuple(members)) for ratio in run.conditions[condition].ratios]


def by_part(run: SortedResults, names: Names, condition: Condition) -> Iterator[Table]:
    """Yields the tables by group of tasks, where the benchmark has groups, and by task."""
    asked = {task: (task,) for pool in run.conditions[condition].pools if pool.done for task in pool.tasks}
    groups = tasks.make(condition.benchmark).groups()
    for kind, words, parts in (("groups", "groups of tasks", groups), ("tasks", "single tasks", asked)):
        shown = {title: members for title, members in parts.items() if not asked.keys().isdisjoint(members)}
        columns = [column for part in shown.items() for column in columns_of(run, condition, *part)]
        name = slug(kind, names.key(condition))
        yield from split(run, names, columns, f"{names.condition(condition)}: {words}", name)


def split(run: SortedResults, names: Names, columns: Sequence[Column], title: str, name: str) -> Iterator[Table]:
    """Yields one table, or several where there are too many columns; columns of one title stay together."""
    parts: list[list[Column]] = []
    for text in dict.fromkeys(column.title for column in columns):
        same = [column for column in columns if column.title == text]
        if not parts or len(parts[-1]) + len(same) > COLUMNS:
            parts.append([])
        parts[-1] += same
    for turn, part in enumerate(parts, 1):
        which = f", part {turn} of {len(parts)}" if len(parts) > 1 else ""
        yield of_columns(run, names, part, title + which, f"{name}-{turn}" if which else name)


def of_columns(run: SortedResults, names: Names, columns: Sequence[Column], title: str, name: str) -> Table:
    """Returns the full cache's row, then methods down and columns across."""
    grids = [run.conditions[column.condition] for column in columns]
    titles = [column.title for column in columns]
    heads = [TableCell(""), *(TableCell(text, columns=titles.count(text)) for text in dict.fromkeys(titles))]
    wholes = [figures(grid.full, column.members) for grid, column in zip(grids, columns, strict=True)]
    full = [shown(grid.full, whole) for grid, whole in zip(grids, wholes, strict=True)]
    rows = [TableRow([TableCell(FULL_CACHE.label, tone="full"), *full])] if any(each != ABSENT for each in full) else []
    data, same, before = [], [], None
    for method in (method for method in names.methods if any(method in grid.cells for grid in grids)):
        cells = []
        for grid, column, whole in zip(grids, columns, wholes, strict=True):
            pool, base = grid.at(method, column.ratio), grid.base_of(method, column.ratio)
            points = figures(pool, column.members, base, whole)
            cells.append(shown(pool, points))
            if points:
                what = {key: getattr(column.condition, key) for key in ("model", "protocol", "benchmark")}
                label = names.label(method)
                data.append({**what, "part": column.title, "method": label, "ratio": column.ratio, **points})
                same += [pool.each("pairs") == base.each("pairs")] if base else []
        rows.append(TableRow([names.label(method), *cells], method.restored, method.evictor != before))
        before = method.evictor
    head = [heads, ["method", *(at(column.ratio) for column in columns)]]
    notes = [NOTE, budgets(same), *dict.fromkeys(grid.left_out for grid in grids)]
    return table(name, title, head, rows, " ".join(filter(None, notes)), data)


def figures(
    pool: SeedPool | None, members: Sequence[str], base: SeedPool | None = None, full: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns score and, beside a base, gain and what it is of the base's loss; {} for what is not there yet."""
    if not pool or not pool.has(members):
        return {}
    points = pool.score(members, base)
    lost = full["score"] - (points["score"] - points["gain"]) if base and full else 0
    return points | ({"recovered": points["gain"] / lost} if lost > 0 else {})


def shown(pool: SeedPool | None, points: Mapping[str, float]) -> TableCell:
    """Returns a score with its interval or its gain, or how far the cells have come."""
    if pool and not pool.done:
        done, of = pool.progress
        return TableCell(f"running ({done} of {of} contexts)", tone="muted")
    if not points:
        return ABSENT
    if "gain" not in points:
        return score(points["score"], points["low"], points["high"])
    back = f"{percent(points['recovered'], 0)} back" if "recovered" in points else ""
    return gain(points["gain"], points["gain_low"], points["gain_high"], of=number(points["score"]), more=back)


def budgets(same: Sequence[bool]) -> str:
    """Says whether restored and base held the same number of pairs, context by context."""
    if not all(same):
        return f"In {len(same) - sum(same)} of {len(same)} pairs restored and base hold different numbers of KV pairs."
    return "Both rows of a pair hold the same number of KV pairs, context by context." if same else ""


def metrics(run: SortedResults, names: Names) -> list[Section]:
    """Returns what benchmarks measure beside their score, where they do: a table for every condition."""
    blocks = []
    for condition in run.conditions:
        data = []
        for label, ratio, pool in names.pools(condition):
            means = further_metrics(pool.lines, {answer.family for answer in counted(pool.answers, pool.left_out)})
            data += [{"method": label, "ratio": ratio, **means}] if means and pool.done else []
        if data:
            keys = [key for key in data[0] if key not in ("method", "ratio")]
            rows = [[row["method"], f"{row['ratio']:g}", *(number(row[key]) for key in keys)] for row in data]
            head = ["method", "r", *(key.replace("_", " ") for key in keys)]
            title = f"{names.condition(condition)}: further metrics, in points"
            blocks.append(table(slug("metrics", names.key(condition)), title, head, rows, "", data))
    return [Section("Further metrics", "", blocks)] if blocks else []
