"""The charts of a grid: score against ratio, and maps of the needles that were found."""

from collections.abc import Iterator, Sequence

from pandas import DataFrame

from restorekv.evaluation.charts import (
    HUES,
    INK,
    MARKERS,
    NARROW,
    Chart,
    Mark,
    make_figure,
    plot_level,
    plot_line,
    plot_map,
    set_ratio_axis,
    with_style,
)
from restorekv.evaluation.conditions import FULL_CACHE
from restorekv.evaluation.frame import ALL, GridResults, Row
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, ScoredAnswer
from restorekv.evaluation.tables import format_ratio, make_slug, name_evictor

SCORES = (
    "How many points are left when the cache shrinks. Every evictor has a panel and a hue: a "
    "dashed "
    "line with hollow markers is the evictor alone, a solid line with filled markers the same with "
    "its restore cache at the same budget. The dashed black line is the full cache."
)
NEEDLES = (
    "One sentence is hidden at a depth of a text and asked for: 100 is found every time, 0 never. "
    "Down: how deep it lies (0 % is the beginning); across: how long the text is, in tokens."
)


@with_style
def plot_scores(rows: Sequence[Row]) -> Chart | None:
    """Return a chart of one condition's scores against ratio; None if no method is finished yet."""
    whole = [row for row in rows if row["kind"] == ALL]
    done = [row for row in whole if row["done"]]
    compressed = [row for row in done if row["method"] != FULL_CACHE]
    if not compressed:
        return None
    by_evictor = group_by(compressed, lambda row: row["evictor"])
    figure, panels = make_figure([(name_evictor(each), NARROW, 3.0) for each in by_evictor])
    for axes in panels[1:]:
        axes.sharey(panels[0])
    for index, (axes, own) in enumerate(zip(panels, by_evictor.values(), strict=True)):
        for turn, (method, points) in enumerate(group_by(own, lambda row: row["method"]).items()):
            alone = not points[0]["restored"]
            color = HUES[index % len(HUES)]
            mark = Mark(method, color, MARKERS[turn % len(MARKERS)], dashed=alone, hollow=alone)
            interval = None
            if min(row["contexts"] for row in points) >= MIN_FOR_INTERVAL:
                interval = [row["low"] for row in points], [row["high"] for row in points]
            # Bars of several methods stand next to each other, not on each other.
            ratios = [row["ratio"] * 1.02**turn for row in points]
            plot_line(axes, mark, ratios, [row["score"] for row in points], interval)
        if done[0] not in compressed:
            plot_level(axes, Mark(FULL_CACHE, INK, dashed=True), done[0]["score"])
        set_ratio_axis(axes, {row["ratio"] for row in compressed})
        axes.set_ylabel("score (points)")
    first = compressed[0]
    title = f"{first['condition']}: score against ratio"
    seeds = "1 seed" if first["seeds"] == 1 else f"{first['seeds']} seeds"
    note = (
        "Bars: 95 % bootstrap intervals over contexts. "
        f"{first['questions']:,} questions on {first['contexts']:,} contexts, {seeds}."
    )
    if first["stand_ins"]:
        note += f" Not the official data for {first['stand_ins']}."
    if first["left_out"]:
        note += f" Left out of means: {first['left_out']}."
    if len(done) < len(whole):
        note += f" Still running and not drawn: {len(whole) - len(done)}."
    name = make_slug("accuracy", first["name"])
    return Chart(name, title, figure, alt=f"{title}. {note}", note=note, figures=done)


@with_style
def plot_needles(grid: GridResults) -> list[Chart]:
    """Return a chart for every needle benchmark and ratio, with a map for each finished method."""
    # A list, because a generator's body would run outside the style.
    charts: list[Chart] = []
    needles = [entry for entry in grid.entries if entry.pool.benchmark.name == "needle"]
    done = [entry for entry in needles if entry.pool.done]
    compressed = [entry for entry in done if entry.columns["method"] != FULL_CACHE]
    groups = group_by(compressed, lambda each: (each.columns["name"], each.columns["ratio"]))
    for (name, ratio), own in groups.items():
        pools = {entry.columns["method"]: entry.pool for entry in own}
        full = own[0].pool.full
        if full and full.done:
            pools = {FULL_CACHE: full, **pools}
        found = DataFrame(
            {"method": method, "ratio": ratio, **point}
            for method, pool in pools.items()
            for point in _find_needles(pool.answers)
        )
        height = 1.4 + 0.25 * found.depth.nunique()
        figure, panels = make_figure([(method, NARROW, height) for method in pools])
        for axes, method in zip(panels, pools, strict=True):
            scores = found[found.method == method].pivot_table("score", "depth", "length")
            plot_map(axes, scores, 100)
            axes.set(xlabel="length of the text (tokens)", ylabel="depth of the needle (%)")
        title = f"{own[0].columns['condition']}: needles found at {format_ratio(ratio)}"
        chart = Chart(
            make_slug("needle", name, f"{ratio:g}"),
            title,
            figure,
            alt=title,
            note="100 times the share of needles found, the mean over seeds.",
            figures=found.to_dict("records"),
        )
        charts.append(chart)
    return charts


def _find_needles(answers: Sequence[ScoredAnswer]) -> Iterator[dict[str, float]]:
    """Yield the points scored at every length and depth, means over seeds; question ids are
    LENGTH-DEPTH.
    """
    for question, own in group_by(answers, lambda answer: answer.question).items():
        length, _, depth = question.partition("-")
        score = 100 * sum(answer.score for answer in own) / len(own)
        yield {"length": int(length), "depth": float(depth), "score": score}
