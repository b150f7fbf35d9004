"""The paper's main figure: score against ratio, a panel for every benchmark, with the full cache's line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from restorekv.evaluation.charts import Axis, Chart, Level, Line, Panel, ratio_axis
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.report.names import FULL_CACHE, Names, model_name, slug
from restorekv.evaluation.report.page import Section
from restorekv.evaluation.report.runs import Condition, RatioGrid, SortedResults

CROWDED = 3  # more evictors than this have a panel each
SPAN = 20  # points that y shows at least
INTRO = (
    "How many points are left when the cache shrinks. Dashed lines with hollow markers are a base method alone, solid "
    "lines with filled markers are the same method with its restore cache at the same budget; one hue and one marker "
    "are one method. The dashed black line is the full cache."
)


def section(run: SortedResults, names: Names) -> list[Section]:
    """Returns a chart for every protocol, or for every benchmark where there are too many methods for one panel."""
    groups: dict[tuple, list[Condition]] = {}
    for condition, grid in run.conditions.items():
        methods = names.of(condition)
        if any(grid.done(method) for method in methods):
            key = (condition.protocol, condition.prefix_policy, condition.dtype, condition.max_context)
            crowded = len({method.evictor for method in methods}) > CROWDED
            groups.setdefault((*key, names.key(condition) if crowded else ""), []).append(condition)
    charts = [chart(run, names, conditions, bool(key[-1])) for key, conditions in groups.items()]
    return [Section("Accuracy against ratio", INTRO, charts)] if charts else []


def chart(run: SortedResults, names: Names, conditions: Sequence[Condition], crowded: bool) -> Chart:
    """Returns panels of the conditions, or of one condition's evictors."""
    first = conditions[0]
    title, name = names.condition(first), f"accuracy-{names.key(first)}"
    if crowded:
        grid, methods = run.conditions[first], names.of(first)
        groups = [[method for method in methods if method.evictor == evictor] for evictor in names.evictors]
        panels = [panel(names, grid, some, names.label(some[0]), methods) for some in groups if some]
    else:
        panels = [
            panel(names, run.conditions[each], names.of(each), panel_title(names, each), names.of(each))
            for each in conditions
        ]
        controls = [words for words in names.controls(first) if not words.startswith(first.protocol)]
        title, name = ", ".join(["Score", *names.controls(first)]), slug("accuracy", first.protocol, *controls)
    alt = f"Score in points against the ratio of pairs kept: {', '.join(map(names.condition, conditions))}"
    rows = [row for condition in conditions for row in figures(names, condition)]
    title += ": score against ratio" if crowded else " against ratio"
    return Chart(name, title, panels, alt, rows, note(run, names, conditions))


def panel_title(names: Names, condition: Condition) -> str:
    several = len({other.model for other in names.run.conditions}) > 1
    return f"{model_name(condition.model)} · " * several + names.benchmark(condition)


def panel(names: Names, grid: RatioGrid, methods: Sequence[Cell], title: str, shown: Sequence[Cell]) -> Panel:
    """Returns lines of `methods` and of the full cache; y has room for all methods that are `shown`."""
    content: list[Line | Level] = []
    for method in methods:
        pools = grid.done(method)
        score, low, high = ([pool.score()[key] for pool in pools.values()] for key in ("score", "low", "high"))
        if pools:
            content.append(Line(names.mark(method), list(pools), score, (low, high)))
    ratios = [ratio for line in content for ratio in line.x] or grid.ratios
    if grid.full and grid.full.done:
        content.append(Level(FULL_CACHE, grid.full.score()["score"]))
    low, high = limits(grid, shown)
    return Panel(content, ratio_axis(ratios), Axis("score (points)", low=low, high=high), title)


def limits(grid: RatioGrid, methods: Sequence[Cell]) -> tuple[float, float]:
    """Returns the limits of y: the scores rounded out to tens, within 0 to 100, and a little air."""
    pools = [pool for method in methods for pool in grid.done(method).values()]
    scores = [pool.score() for pool in [*pools, *([grid.full] if grid.full and grid.full.done else [])]]
    low = max(10 * math.floor(min(score["low"] for score in scores) / 10), 0)
    high = min(10 * math.ceil(max(score["high"] for score in scores) / 10), 100)
    if high - low < SPAN:
        low, high = max(low - SPAN, 0), min(low + SPAN, 100)
    return low - 0.02 * (high - low), high + 0.03 * (high - low)


def note(run: SortedResults, names: Names, conditions: Sequence[Condition]) -> str:
    """Says how scores are averaged, over what, and what is left out, stands in or is not finished."""
    means = "; ".join(dict.fromkeys(run.facts(condition)["score"] for condition in conditions))
    sentences = [
        f"x: the share r of KV pairs kept, as asked for; y: points, 0 to 100, {means}. Bands and bars: 95 % bootstrap "
        "intervals over contexts."
    ]
    waiting = 0
    for condition in conditions:
        grid, title = run.conditions[condition], panel_title(names, condition)
        pool = next(pool for method in names.of(condition) for pool in grid.done(method).values())
        seeds = f" of {len(pool.results)} seeds" if len(pool.results) > 1 else ""
        sentences.append(f"{title}: {len(pool.answers):,} questions on {len(pool.lines):,} contexts{seeds}.")
        stand_ins = run.facts(condition)["benchmark"].get("stand_ins")
        sentences += [f"{title}: not the official data for {', '.join(sorted(stand_ins))}."] if stand_ins else []
        sentences += [f"{title}: {grid.left_out}"] if grid.left_out else []
        waiting += sum(not pool.done for by_ratio in grid.cells.values() for pool in by_ratio.values())
    sentences += [f"Still running and not drawn: {waiting} cell{'s' * (waiting > 1)}."] if waiting else []
    return " ".join(sentences)


def figures(names: Names, condition: Condition) -> Iterator[dict[str, object]]:
    """Yields what is drawn, for the CSV file: the full cache has ratio 1."""
    for label, ratio, pool in names.pools(condition):
        if not pool.done:
            continue
        yield {
            "model": condition.model, "benchmark": condition.benchmark, "protocol": condition.protocol,
            "prefix_policy": condition.prefix_policy, "method": label, "ratio": ratio, **pool.score(),
            "contexts": len(pool.lines), "seeds": len(pool.results), "kept": pool.kept(),
            "kept_with_prefix": pool.kept(prefix=True),
        }  # fmt: skip
