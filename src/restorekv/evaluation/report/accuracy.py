"""Charts of scores: the paper's main figure, score against ratio, and maps of the needles that were found."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from restorekv.evaluation.charts import Axis, Chart, Heat, Level, Line, Panel, heat, ratio_axis
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.report.page import Block, Details, Section
from restorekv.evaluation.report.runs import FULL_CACHE, Condition, RatioGrid, Run, model_name
from restorekv.evaluation.rows import SeedPool
from restorekv.evaluation.tables import slug

CROWDED = 3  # more evictors than this have a panel each
SPAN = 20  # points that y shows at least
INTRO = (
    "How many points are left when the cache shrinks. Dashed lines with hollow markers are a base method alone, solid "
    "lines with filled markers are the same method with its restore cache at the same budget; one hue and one marker "
    "are one method. The dashed black line is the full cache."
)
NEEDLE = (
    "One sentence is hidden at a depth of a text and asked for: 100 is found every time, 0 never. Down: how deep it "
    "lies (0 % is the beginning); across: how long the text is, in tokens."
)


def section(run: Run) -> list[Section]:
    """Returns a chart for every protocol, or for every benchmark where there are too many methods for one panel."""
    groups: dict[tuple, list[Condition]] = {}
    for condition, grid in run.conditions.items():
        methods = run.of(condition)
        if any(grid.done(method) for method in methods):
            key = (condition.protocol, condition.prefix_policy, condition.dtype, condition.max_context)
            crowded = len({method.evictor for method in methods}) > CROWDED
            groups.setdefault((*key, run.key(condition) if crowded else ""), []).append(condition)
    charts = [chart(run, conditions, bool(key[-1])) for key, conditions in groups.items()]
    return [Section("Accuracy against ratio", INTRO, charts)] if charts else []


def chart(run: Run, conditions: Sequence[Condition], crowded: bool) -> Chart:
    """Returns panels of the conditions, or of one condition's evictors."""
    first = conditions[0]
    title, name = f"{run.condition(first)}: score against ratio", f"accuracy-{run.key(first)}"
    if crowded:
        grid, methods = run.conditions[first], run.of(first)
        groups = [[method for method in methods if method.evictor == evictor] for evictor in run.evictors]
        panels = [panel(run, grid, some, run.label(some[0]), methods) for some in groups if some]
    else:
        panels = [
            panel(run, run.conditions[each], run.of(each), panel_title(run, each), run.of(each)) for each in conditions
        ]
        controls = [words for words in run.controls(first) if not words.startswith(first.protocol)]
        title = f"{', '.join(['Score', *run.controls(first)])} against ratio"
        name = slug("accuracy", first.protocol, *controls)
    alt = f"Score in points against the ratio of pairs kept: {', '.join(map(run.condition, conditions))}"
    rows = [row for condition in conditions for row in figures(run, condition)]
    return Chart(name, title, panels, alt, rows, note(run, conditions))


def panel_title(run: Run, condition: Condition) -> str:
    return f"{model_name(condition.model)} · " * run.differ("model") + run.benchmark(condition)


def panel(run: Run, grid: RatioGrid, methods: Sequence[Cell], title: str, shown: Sequence[Cell]) -> Panel:
    """Returns lines of `methods` and of the full cache; y has room for all methods that are `shown`."""
    content: list[Line | Level] = []
    for method in methods:
        if pools := grid.done(method):
            score, low, high = ([pool.score()[key] for pool in pools.values()] for key in ("score", "low", "high"))
            content.append(Line(run.mark(method), list(pools), score, (low, high)))
    ratios = [ratio for line in content for ratio in line.x] or grid.ratios
    if grid.done_full:
        content.append(Level(FULL_CACHE, grid.full.score()["score"]))
    low, high = limits(grid, shown)
    return Panel(content, ratio_axis(ratios), Axis("score (points)", low=low, high=high), title)


def limits(grid: RatioGrid, methods: Sequence[Cell]) -> tuple[float, float]:
    """Returns the limits of y: the scores rounded out to tens, within 0 to 100, and a little air."""
    pools = [pool for method in methods for pool in grid.done(method).values()]
    scores = [pool.score() for pool in [*pools, *filter(None, [grid.done_full])]]
    low = max(10 * math.floor(min(score["low"] for score in scores) / 10), 0)
    high = min(10 * math.ceil(max(score["high"] for score in scores) / 10), 100)
    if high - low < SPAN:
        low, high = max(low - SPAN, 0), min(low + SPAN, 100)
    return low - 0.02 * (high - low), high + 0.03 * (high - low)


def note(run: Run, conditions: Sequence[Condition]) -> str:
    """Says how scores are averaged, over what, and what is left out, stands in or is not finished."""
    means = "; ".join(dict.fromkeys(run.facts(condition)["score"] for condition in conditions))
    sentences = [
        f"x: the share r of KV pairs kept, as asked for; y: points, 0 to 100, {means}. Bands and bars: 95 % bootstrap "
        "intervals over contexts."
    ]
    waiting = 0
    for condition in conditions:
        grid, title = run.conditions[condition], panel_title(run, condition)
        pool = next(pool for method in run.of(condition) for pool in grid.done(method).values())
        seeds = f" of {len(pool.results)} seeds" if len(pool.results) > 1 else ""
        sentences.append(f"{title}: {len(pool.answers):,} questions on {len(pool.lines):,} contexts{seeds}.")
        stand_ins = run.facts(condition)["benchmark"].get("stand_ins")
        sentences += [f"{title}: not the official data for {', '.join(sorted(stand_ins))}."] if stand_ins else []
        sentences += [f"{title}: {grid.left_out}"] if grid.left_out else []
        waiting += sum(not pool.done for by_ratio in grid.cells.values() for pool in by_ratio.values())
    sentences += [f"Still running and not drawn: {waiting} cell{'s' * (waiting > 1)}."] if waiting else []
    return " ".join(sentences)


def figures(run: Run, condition: Condition) -> Iterator[dict[str, object]]:
    """Yields what is drawn, for the CSV file: the full cache has ratio 1."""
    for label, ratio, pool in run.pools(condition):
        if pool.done:
            yield {
                "model": condition.model, "benchmark": condition.benchmark, "protocol": condition.protocol,
                "prefix_policy": condition.prefix_policy, "method": label, "ratio": ratio, **pool.score(),
                "contexts": len(pool.lines), "seeds": len(pool.results), "kept": pool.kept(),
                "kept_with_prefix": pool.kept(prefix=True),
            }  # fmt: skip


def needles(run: Run) -> list[Section]:
    """Shows maps of the needles found: the tightest ratio open, the others behind a click."""
    blocks: list[Block] = []
    for condition, grid in run.conditions.items():
        if condition.benchmark.partition(":")[0] == "needle":
            charts = [needle_chart(run, condition, ratio) for ratio in reversed(grid.ratios)]
            charts = [each for each in charts if each.data]
            blocks += charts[:1]
            blocks += [Details(f"{run.condition(condition)} at the other ratios", charts[1:])] if charts[1:] else []
    return [Section("Needle in a haystack", NEEDLE, blocks)] if blocks else []


def needle_chart(run: Run, condition: Condition, ratio: float) -> Chart:
    """Returns a map for the full cache and every finished method; without `data` where none is finished."""
    grid, panels, data = run.conditions[condition], [], []
    pools = [(run.label(method), grid.at(method, ratio)) for method in run.of(condition)]
    pools = [(label, pool) for label, pool in pools if pool and pool.done]
    full = [("full cache", grid.full)] if pools and grid.done_full else []
    for label, pool in full + pools:
        points = needles_found(pool)
        lengths, depths = (sorted({place[axis] for place in points}) for axis in (0, 1))
        values = [[points.get((length, depth)) for length in lengths] for depth in depths]
        shown = Heat(values, [f"{depth:g}" for depth in depths], [f"{length:,}" for length in lengths], 100)
        panels.append(heat(shown, "length of the text (tokens)", "depth of the needle (%)", label))
        data += [
            {"method": label, "ratio": ratio, "length": length, "depth": depth, "score": score}
            for (length, depth), score in points.items()
        ]
    title = f"{run.condition(condition)}: needles found at r = {ratio:g}"
    note = "Points: 100 times the share of needles found, the number in the cell; yellow is found, dark blue is not."
    alt = f"{title}, a map by length and depth for each cache"
    return Chart(slug("needle", run.key(condition), f"{ratio:g}"), title, panels, alt, data, note)


def needles_found(pool: SeedPool) -> dict[tuple[int, float], float]:
    """Returns points by length and depth in percent, means over the seeds; questions are called LENGTH-DEPTH."""
    scores: dict[tuple[int, float], list[float]] = defaultdict(list)
    for answer in pool.answers:
        length, _, depth = answer.question.partition("-")
        scores[int(length), float(depth)].append(answer.score)
    return {place: 100 * sum(values) / len(values) for place, values in sorted(scores.items())}
