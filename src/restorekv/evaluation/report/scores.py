"""The paper's Table 1: every base method alone and restored, with paired gains; also by group of tasks and by task.

Every figure of a table is a column's score: that of one condition at one ratio, over all tasks or over some.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from restorekv.evaluation import tables
from restorekv.evaluation.grid import grouped
from restorekv.evaluation.report.page import Details, Section
from restorekv.evaluation.report.runs import FULL_CACHE, Condition, Run, model_name
from restorekv.evaluation.rows import SeedPool
from restorekv.evaluation.stats import FEW, bounds
from restorekv.evaluation.tables import ABSENT, Table, TableCell, TableRow, at, number, percent, slug

COLUMNS = 12  # of figures side by side
NOTE = (
    "Points, 0 to 100; below each score its 95 % interval, below each gain the 95 % interval of the paired gain "
    "(bootstrap over contexts, the same draws for both sides) and the share of the base's loss that came back. ▲ "
    "green: restored scores higher, ▼ orange: lower; bold: the interval excludes zero. Fewer than "
    f"{FEW} contexts have no interval."
)


@dataclass(frozen=True)
class Column:
    """Scores of a condition at a ratio: of all its tasks, or of `members`."""

    title: str
    condition: Condition
    ratio: float
    members: tuple[str, ...] = ()


def pairs(run: Run) -> list[dict[str, float]]:
    """Returns score and gain of every finished pair of a base and its restored cell."""
    return [
        pool.score(base=base)
        for condition, grid in run.conditions.items()
        for method in run.of(condition)
        for ratio, pool in grid.done(method).items()
        if method.restored and (base := grid.base_of(method, ratio))
    ]


def count(scores: Sequence[Mapping[str, float]]) -> str:
    """Says how many pairs improve, and how surely."""
    more = sum(score["gain"] > 0 for score in scores)
    intervals = [found for score in scores if (found := bounds(score, "gain_"))[0] is not None]
    sure = sum(low > 0 for low, _ in intervals)
    less = sum(high < 0 for _, high in intervals)
    below = f"; {less} with one below zero" if less else "; none with one below zero"
    few = f" {len(scores) - len(intervals)} have fewer than {FEW} contexts, too few for an interval."
    told = f"{more} of {len(scores)} paired cells improve, {sure} of them with a 95 % interval above zero{below}."
    return told + few * (len(intervals) < len(scores))


def section(run: Run) -> list[Section]:
    """Returns a table for every model and protocol, and behind a click those by group of tasks and by task."""
    together = grouped(run.conditions, lambda condition: replace(condition, benchmark=""))
    blocks: list[Table | Details] = []
    for conditions in together.values():
        model, controls = model_name(conditions[0].model), run.controls(conditions[0])
        columns = [column for each in conditions for column in columns_of(run, each, run.benchmark(each))]
        title = f"{', '.join([model, *controls])}: base and restored"
        blocks += split(run, columns, title, slug("paired", run.key(conditions[0])))
        for condition in conditions:
            parts = list(by_part(run, condition))
            blocks += [Details(f"{run.condition(condition)}: by task", parts)] if parts else []
    found = pairs(run)
    intro = count(found) if found else "No pair of a base and its restored cell is finished yet."
    return [Section("Restored beside its base", intro, blocks)] if blocks else []


def columns_of(run: Run, condition: Condition, title: str, members: Sequence[str] = ()) -> list[Column]:
    return [Column(title, condition, ratio, tuple(members)) for ratio in run.conditions[condition].ratios]


def by_part(run: Run, condition: Condition) -> Iterator[Table]:
    """Yields the tables by group of tasks, where the benchmark has groups, and by task."""
    done = [pool for pool in run.conditions[condition].pools if pool.done]
    asked = {task: (task,) for pool in done for task in pool.tasks}
    groups = done[0].groups if done else {}
    for kind, words, parts in (("groups", "groups of tasks", groups), ("tasks", "single tasks", asked)):
        columns = [column for title, members in parts.items() for column in columns_of(run, condition, title, members)]
        yield from split(run, columns, f"{run.condition(condition)}: {words}", slug(kind, run.key(condition)))


def split(run: Run, columns: Sequence[Column], title: str, name: str) -> Iterator[Table]:
    """Yields one table, or several where there are too many columns; columns of one title stay together."""
    parts: list[list[Column]] = []
    for text in dict.fromkeys(column.title for column in columns):
        same = [column for column in columns if column.title == text]
        if not parts or len(parts[-1]) + len(same) > COLUMNS:
            parts.append([])
        parts[-1] += same
    for turn, part in enumerate(parts, 1):
        which = f", part {turn} of {len(parts)}" if len(parts) > 1 else ""
        yield of_columns(run, part, title + which, f"{name}-{turn}" if which else name)


def of_columns(run: Run, columns: Sequence[Column], title: str, name: str) -> Table:
    """Returns the full cache's row, then methods down and columns across."""
    grids = [run.conditions[column.condition] for column in columns]
    titles = [column.title for column in columns]
    heads = [TableCell(""), *(TableCell(text, columns=titles.count(text)) for text in dict.fromkeys(titles))]
    full = [shown(grid.full, figures(grid.full, column.members)) for grid, column in zip(grids, columns, strict=True)]
    rows = [TableRow([TableCell(FULL_CACHE.label, tone="full"), *full])] if any(each != ABSENT for each in full) else []
    data, same, before = [], [], None
    for method in (method for method in run.methods if any(method in grid.cells for grid in grids)):
        cells, label = [], run.label(method)
        for grid, column in zip(grids, columns, strict=True):
            pool, base = grid.at(method, column.ratio), grid.base_of(method, column.ratio)
            points = figures(pool, column.members, base, grid.done_full)
            cells.append(shown(pool, points))
            if points:
                what = {key: getattr(column.condition, key) for key in ("model", "protocol", "benchmark")}
                data.append({**what, "part": column.title, "method": label, "ratio": column.ratio, **points})
                same += [bool((pool.each("pairs") == base.each("pairs")).all())] if base else []
        rows.append(TableRow([label, *cells], method.restored, method.evictor != before))
        before = method.evictor
    head = [heads, ["method", *(at(column.ratio) for column in columns)]]
    notes = [NOTE, budgets(same), *dict.fromkeys(grid.left_out for grid in grids)]
    return Table(name, title, head, rows, " ".join(filter(None, notes)), data)


def figures(
    pool: SeedPool | None, members: Sequence[str], base: SeedPool | None = None, full: SeedPool | None = None
) -> dict[str, float]:
    """Returns score and, beside a base, gain and what it is of the base's loss; {} for what is not there yet."""
    return pool.score(members, base, full) if pool and pool.has(members) else {}


def shown(pool: SeedPool | None, points: Mapping[str, float]) -> TableCell:
    """Returns a score with its interval or its gain, or how far the cells have come."""
    if pool and not pool.done:
        done, of = pool.progress
        return TableCell(f"running ({done} of {of} contexts)", tone="muted")
    if not points:
        return ABSENT
    if "gain" not in points:
        return tables.score(points["score"], *bounds(points))
    recovered = points.get("recovered")
    back = "" if recovered is None else f"{percent(recovered, 0)} back"
    return tables.gain(points["gain"], *bounds(points, "gain_"), of=number(points["score"]), more=back)


def budgets(same: Sequence[bool]) -> str:
    """Says whether restored and base held the same number of pairs, context by context."""
    if not all(same):
        return f"In {len(same) - sum(same)} of {len(same)} pairs restored and base hold different numbers of KV pairs."
    return "Both rows of a pair hold the same number of KV pairs, context by context." if same else ""


def metrics(run: Run) -> list[Section]:
    """Returns what benchmarks measure beside their score, where they do: a table for every condition."""
    blocks = []
    for condition in run.conditions:
        means = [(label, ratio, pool.metrics()) for label, ratio, pool in run.pools(condition) if pool.done]
        data = [{"method": label, "ratio": ratio, **found} for label, ratio, found in means if found]
        if data:
            columns = {"method": "method", "r": lambda row: f"{row['ratio']:g}"}
            keys = [key for key in data[0] if key not in ("method", "ratio")]
            columns |= {key.replace("_", " "): lambda row, key=key: number(row[key]) for key in keys}
            title = f"{run.condition(condition)}: further metrics, in points"
            blocks.append(Table.of(slug("metrics", run.key(condition)), title, data, columns))
    return [Section("Further metrics", "", blocks)] if blocks else []
