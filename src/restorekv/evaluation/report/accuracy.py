"""The paper's main figure: score against ratio, a panel for every model and benchmark, with the full cache's line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import Chart, Panel, Section
from restorekv.evaluation.report.names import FULL_CACHE, Names, slug, spoken
from restorekv.evaluation.report.runs import Grid, Method, Place, Pool, Run

CROWDED = 3  # more evictors than this have a panel each
SPAN = 20  # points that y shows at least
BANDED = 2  # more lines than this have bars, not bands
INTERVALS = "Bands and bars: 95 % bootstrap intervals over contexts."
INTRO = (
    "How many points are left when the cache shrinks. Dashed lines with hollow markers are a base method alone, solid "
    "lines with filled markers are the same method with its restore cache at the same budget; one hue and one marker "
    "are one method. The dashed black line is the full cache."
)


def section(run: Run, names: Names) -> list[Section]:
    """One chart for every protocol, or one for every benchmark where there are too many methods for one panel."""
    shown = {place: grid for place, grid in run.places.items() if any(done(grid, names.of(place)))}
    groups: dict[tuple[str, ...], list[Place]] = {}
    for place in shown:
        crowded = len({method.evictor for method in names.of(place)}) > CROWDED
        one = (place.protocol, place.prefix_policy, place.dtype, str(place.max_context))
        groups.setdefault((*one, names.key(place)) if crowded else one, []).append(place)
    charts = [chart(run, names, places) for places in groups.values()]
    return [Section("Accuracy against ratio", INTRO, charts)] if charts else []


def chart(run: Run, names: Names, places: Sequence[Place]) -> Chart:
    """Panels of places, or of one place's evictors."""
    first = places[0]
    crowded = len(names.of(first)) and len({method.evictor for method in names.of(first)}) > CROWDED
    if crowded:
        panels = list(by_evictor(run, names, first))
        title, name = f"{names.place(first)}: score against ratio, by method", f"accuracy-{names.key(first)}"
    else:
        panels = [panel(run, names, place, names.of(place), panel_title(names, place)) for place in places]
        title = ", ".join(["Score against ratio", *names.conditions(first)])
        name = slug("accuracy", first.protocol, *names.conditions(first, protocol=False))
    methods = [method for method in names.methods if any(method in run.places[place].cells for place in places)]
    rows = [row for place in places for row in rows_of(run, names, place)]
    legend = [*map(names.mark, methods), FULL_CACHE]
    waiting = sum(not pool.done for place in places for by in run.places[place].cells.values() for pool in by.values())
    note = f"x: the share r of KV pairs kept, as asked for; y: points, 0 to 100, {scored(run, places)}. {INTERVALS} "
    note += asked(run, names, places)
    note += standing(run, places) + left_out(run, names, places)
    if waiting:
        note += f" Still running and not drawn: {waiting} cell{'s' * (waiting > 1)}."
    alt = f"Score in points against the ratio of pairs kept: {', '.join(names.place(place) for place in places)}"
    return Chart(name, title, panels, alt, rows, note, legend)


def standing(run: Run, places: Sequence[Place]) -> str:
    """A sentence for every benchmark in which something stands in for official data."""
    told = {}
    for place in places:
        grid = run.places[place]
        pools = [pool for by_ratio in grid.cells.values() for pool in by_ratio.values()]
        made = pools[0].facts["benchmark"]
        if made.get("stand_ins"):
            told[made["title"]] = ", ".join(sorted(made["stand_ins"]))
    return "".join(f" {title}: not the official data for {tasks}." for title, tasks in told.items())


def left_out(run: Run, names: Names, places: Sequence[Place]) -> str:
    """A sentence for every panel whose means leave tasks out."""
    told = ""
    for place in places:
        full = run.places[place].full
        if full and full.left_out:
            which = "every task" if set(full.left_out) == set(full.tasks) else ", ".join(full.left_out)
            verdict = "nothing to lose" if which == "every task" else "left out of means"
            told += f" {panel_title(names, place)}: the full cache is below 10 on {which}, {verdict}."
    return told


def panel_title(names: Names, place: Place) -> str:
    several = len({other.model for other in names.run.places}) > 1
    return f"{spoken(place.model)} · {names.benchmark(place)}" if several else names.benchmark(place)


def by_evictor(run: Run, names: Names, place: Place) -> Iterator[Panel]:
    """All with the same y-axis."""
    low, high = limits(run.places[place], names.of(place))
    for evictor in names.evictors:
        methods = [method for method in names.of(place) if method.evictor == evictor]
        if methods:
            yield panel(run, names, place, methods, names.label(methods[0].base), (low, high))


def panel(
    run: Run, names: Names, place: Place, methods: Sequence[Method], title: str, within: tuple | None = None
) -> Panel:
    """Lines of the methods and of the full cache."""
    grid = run.places[place]
    low, high = within or limits(grid, methods)

    def fill(axes: Axes) -> None:
        lines = [(method, done_cells(grid, method)) for method in methods]
        lines = [(method, cells) for method, cells in lines if cells]
        for turn, (method, cells) in enumerate(lines):
            series(axes, names, method, cells, turn, len(lines))
        if grid.full and grid.full.done:
            axes.axhline(grid.full.score()["score"], color=draw.INK, linestyle=draw.DASHES, linewidth=1.3, zorder=1)
        draw.ratio_axis(axes, [ratio for _, cells in lines for ratio in cells] or grid.ratios)
        axes.set_ylim(low, high)
        axes.set_ylabel("score (points)")

    return Panel(fill, title)


def series(axes: Axes, names: Names, method: Method, cells: dict[float, Pool], turn: int, lines: int) -> None:
    """A line with its intervals: a band, or bars beside each other where there are many lines."""
    mark, figures = names.mark(method), [pool.score() for pool in cells.values()]
    score, low, high = ([figure[key] for figure in figures] for key in ("score", "low", "high"))
    if lines <= BANDED:
        draw.line(axes, mark, list(cells), score, (low, high))
        return
    aside = 1 + 0.025 * (turn - (lines - 1) / 2)
    x = [ratio * aside for ratio in cells]
    axes.vlines(x, low, high, color=mark.colour, linewidth=1.1, alpha=0.75)
    draw.line(axes, mark, x, score)


def limits(grid: Grid, methods: Sequence[Method]) -> tuple[float, float]:
    """Of y: what is drawn, rounded out to tens, within 0 to 100 and a little air."""
    pools = [pool for method in methods for pool in done_cells(grid, method).values()]
    pools += [grid.full] if grid.full and grid.full.done else []
    figures = [pool.score() for pool in pools]
    low = max(10 * math.floor(min(figure["low"] for figure in figures) / 10), 0) if figures else 0
    high = min(10 * math.ceil(max(figure["high"] for figure in figures) / 10), 100) if figures else 100
    if high - low < SPAN:
        low, high = max(low - SPAN, 0), min(low + SPAN, 100)
    return low - 0.02 * (high - low), high + 0.03 * (high - low)


def done(grid: Grid, methods: Sequence[Method]) -> list[Pool]:
    return [pool for method in methods for pool in done_cells(grid, method).values()]


def done_cells(grid: Grid, method: Method) -> dict[float, Pool]:
    return {ratio: pool for ratio, pool in grid.cells.get(method, {}).items() if pool.done}


def scored(run: Run, places: Sequence[Place]) -> str:
    """How scores are averaged, as the cells tell."""
    return "; ".join(dict.fromkeys(run.of_place(place)["score"] for place in places))


def asked(run: Run, names: Names, places: Sequence[Place]) -> str:
    """How many questions stand behind a panel."""
    told = []
    for place in places:
        pool = next(iter(done(run.places[place], names.of(place))))
        seeds = f" of {len(pool.results)} seeds" if len(pool.results) > 1 else ""
        words = f"{len(pool.answers):,} questions on {len(pool.lines):,} contexts{seeds}"
        told.append(f"{panel_title(names, place)}: {words}")
    return "; ".join(told) + "."


def rows_of(run: Run, names: Names, place: Place) -> Iterator[dict[str, object]]:
    """What is drawn, for the CSV: the full cache has ratio 1."""
    grid = run.places[place]
    pools = [(FULL_CACHE.label, 1.0, grid.full)] if grid.full and grid.full.done else []
    pools += [
        (names.label(method), ratio, pool)
        for method in names.of(place)
        for ratio, pool in done_cells(grid, method).items()
    ]
    for label, ratio, pool in pools:
        figures = pool.score()
        yield {
            "model": place.model, "benchmark": place.benchmark, "protocol": place.protocol,
            "prefix_policy": place.prefix_policy, "method": label, "ratio": ratio, "score": figures["score"],
            "low": figures["low"], "high": figures["high"], "questions": figures["questions"],
            "contexts": len(pool.lines), "seeds": len(pool.results), "kept": pool.kept(),
            "kept_with_prefix": pool.kept(prefix=True),
        }  # fmt: skip
