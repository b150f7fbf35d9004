"""Needle in a haystack: what is found at every length and depth, a map for every cache."""

from __future__ import annotations

from collections import defaultdict

from restorekv.evaluation.charts import Chart, Heat, heat
from restorekv.evaluation.report.names import Names, slug
from restorekv.evaluation.report.page import Block, Details, Section
from restorekv.evaluation.report.runs import Condition, SeedPool, SortedResults

INTRO = (
    "One sentence is hidden at a depth of a text and asked for: 100 is found every time, 0 never. Down: how deep it "
    "lies (0 % is the beginning); across: how long the text is, in tokens."
)


def section(run: SortedResults, names: Names) -> list[Section]:
    """Shows the tightest ratio open, the others behind a click."""
    blocks: list[Block] = []
    for condition, grid in run.conditions.items():
        if condition.benchmark.partition(":")[0] == "needle":
            charts = [chart(run, names, condition, ratio) for ratio in reversed(grid.ratios)]
            charts = [each for each in charts if each.data]
            blocks += charts[:1]
            blocks += [Details(f"{names.condition(condition)} at the other ratios", charts[1:])] if charts[1:] else []
    return [Section("Needle in a haystack", INTRO, blocks)] if blocks else []


def chart(run: SortedResults, names: Names, condition: Condition, ratio: float) -> Chart:
    """Returns a map for the full cache and every finished method; without `data` where none is finished."""
    grid, panels, data = run.conditions[condition], [], []
    pools = [(names.label(method), grid.at(method, ratio)) for method in names.of(condition)]
    pools = [(label, pool) for label, pool in pools if pool and pool.done]
    full = [("full cache", grid.full)] if pools and grid.full and grid.full.done else []
    for label, pool in full + pools:
        points = found(pool)
        lengths, depths = (sorted({place[axis] for place in points}) for axis in (0, 1))
        values = [[points.get((length, depth)) for length in lengths] for depth in depths]
        made = Heat(values, [f"{depth:g}" for depth in depths], [f"{length:,}" for length in lengths], 100)
        panels.append(heat(made, "length of the text (tokens)", "depth of the needle (%)", label))
        data += [
            {"method": label, "ratio": ratio, "length": length, "depth": depth, "score": score}
            for (length, depth), score in points.items()
        ]
    title = f"{names.condition(condition)}: needles found at r = {ratio:g}"
    note = "Points: 100 times the share of needles found, the number in the cell; yellow is found, dark blue is not."
    alt = f"{title}, a map by length and depth for each cache"
    return Chart(slug("needle", names.key(condition), f"{ratio:g}"), title, panels, alt, data, note)


def found(pool: SeedPool) -> dict[tuple[int, float], float]:
    """Returns points by length and depth in percent, means over the seeds; questions are called LENGTH-DEPTH."""
    scores: dict[tuple[int, float], list[float]] = defaultdict(list)
    for answer in pool.answers:
        length, _, depth = answer.question.partition("-")
        scores[int(length), float(depth)].append(answer.score)
    return {place: 100 * sum(values) / len(values) for place, values in sorted(scores.items())}
