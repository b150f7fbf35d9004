"""Score against ratio, maps of the needles that were found, and what a cache file kept."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from restorekv.evaluation.charts import (
    BLUE,
    HUES,
    INK,
    MARKERS,
    MUTED,
    NARROW,
    WIDE,
    Chart,
    Mark,
    make_figure,
    plot_level,
    plot_line,
    plot_map,
    set_ratio_axis,
    set_ticks,
    styled,
)
from restorekv.evaluation.frame import ALL, FULL_CACHE, GridResults, Row
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.stats import FEW, ScoredAnswer
from restorekv.evaluation.survivors import Survivors
from restorekv.evaluation.tables import format_ratio, make_slug, name_evictor

POSITIONS = 256  # that a line along the context shows at most
CROWDED = 3  # more evictors than this have a panel each
SCORES = (
    "How many points are left when the cache shrinks. Dashed lines with hollow markers are a base "
    "method alone, solid lines with filled markers are the same method with its restore cache at "
    "the same budget; one hue and one marker are one method. The dashed black line is the full "
    "cache."
)
NEEDLES = (
    "One sentence is hidden at a depth of a text and asked for: 100 is found every time, 0 never. "
    "Down: how deep it lies (0 % is the beginning); across: how long the text is, in tokens."
)


@styled
def plot_scores(rows: Sequence[Row]) -> Chart | None:
    """Return the scores of one condition against ratio, None where no method is finished yet."""
    whole = [row for row in rows if row["kind"] == ALL]
    done = [row for row in whole if row["done"]]
    full = next((row for row in done if row["method"] == FULL_CACHE), None)
    by_evictor = group_by([row for row in done if row is not full], lambda row: row["evictor"])
    if not by_evictor:
        return None
    crowded = len(by_evictor) > CROWDED
    several = len(by_evictor) > 1
    sizes = [(name_evictor(evictor), NARROW, 3.0) for evictor in by_evictor]
    figure, panels = make_figure(sizes if crowded else [("", WIDE, 3.4)])
    for turn, own in enumerate(by_evictor.values()):
        axes = panels[turn] if crowded else panels[0]
        drawn = {False: 0, True: 0}  # how many methods alone, and restored: each has its own marker
        for method, points in group_by(own, lambda row: row["method"]).items():
            restored = points[0]["restored"]
            marker = MARKERS[(turn + len(by_evictor) * drawn[restored]) % len(MARKERS)]
            alone = not restored
            mark = Mark(method, HUES[turn % len(HUES)], marker, dashed=alone, hollow=alone)
            drawn[restored] += 1
            # Bars of several methods stand next to each other, not on each other.
            aside = 1.01 ** (len(axes.lines) - 2) if several else 1
            ratios = [row["ratio"] * aside for row in points]
            scores = [row["score"] for row in points]
            interval = None
            if min(row["contexts"] for row in points) >= FEW:
                interval = [row["low"] for row in points], [row["high"] for row in points]
            plot_line(axes, mark, ratios, scores, interval, bars=several)
    for axes in panels:
        if full:
            plot_level(axes, Mark(FULL_CACHE, INK, dashed=True), full["score"])
        set_ratio_axis(axes, {row["ratio"] for row in done if row is not full})
        axes.set_ylabel("score (points)")
    for axes in panels[1:]:
        axes.sharey(panels[0])
    where = rows[0]["condition"]
    first = done[-1]
    waiting = len(whole) - len(done)
    note = "Bands and bars: 95 % bootstrap intervals over contexts. "
    note += f"{first['questions']:,} questions on {first['contexts']:,} contexts, "
    note += f"{first['seeds']} seed{'s' * (first['seeds'] > 1)}."
    note += f" Not the official data for {first['stand_ins']}." if first["stand_ins"] else ""
    note += f" Left out of means: {first['left_out']}." if first["left_out"] else ""
    note += f" Still running and not drawn: {waiting}." if waiting else ""
    title = f"{where}: score against ratio"
    name = make_slug("accuracy", first["name"])
    return Chart(name, title, figure, f"{title}. {note}", note, done)


@styled
def plot_needles(grid: GridResults) -> list[Chart]:
    """Return a map of the finished caches, for every benchmark of needles and every ratio."""
    charts = []
    for condition, pools in grid.pools.items():
        if condition.benchmark.partition(":")[0] != "needle":
            continue
        where = grid.label_condition(condition)
        methods = {method: grid.label_method(method) for method in grid.methods if method in pools}
        full = pools.get(None, {}).get(1.0)
        for ratio in sorted({ratio for method in methods for ratio in pools[method]}):
            caches = {name: pools[method].get(ratio) for method, name in methods.items()}
            done = {name: pool for name, pool in caches.items() if pool and pool.done}
            if not done:
                continue
            if full and full.done:
                done = {FULL_CACHE: full, **done}
            found = DataFrame(
                [
                    {"method": name, "ratio": ratio, **point}
                    for name, pool in done.items()
                    for point in find_needles(pool.answers)
                ]
            )
            height = 1.4 + 0.25 * found.depth.nunique()
            figure, panels = make_figure([(name, NARROW, height) for name in done])
            for axes, name in zip(panels, done, strict=True):
                own = found[found.method == name]
                plot_map(axes, own.pivot_table("score", "depth", "length"), 100)
                axes.set(xlabel="length of the text (tokens)", ylabel="depth of the needle (%)")
            title = f"{where}: needles found at {format_ratio(ratio)}"
            note = "100 times the share of needles found, the mean over seeds."
            name = make_slug("needle", grid.name_condition(condition), f"{ratio:g}")
            charts.append(Chart(name, title, figure, title, note, found.to_dict("records")))
    return charts


def find_needles(answers: Sequence[ScoredAnswer]) -> Iterator[dict[str, float]]:
    """Yield points by length and depth, means over seeds; questions are called LENGTH-DEPTH."""
    for question, own in group_by(answers, lambda answer: answer.question).items():
        length, _, depth = question.partition("-")
        score = 100 * sum(answer.score for answer in own) / len(own)
        yield {"length": int(length), "depth": float(depth), "score": score}


@styled
def plot_survivors(survivors: Survivors, title: str) -> Chart:
    """Return what each head, each layer and each stretch of the context keeps."""
    manifest = survivors.manifest
    share = survivors.per_position[survivors.context.prefix :]
    stretches = [float(part.mean()) for part in share.tensor_split(min(POSITIONS, len(share)))]
    kept = np.array(survivors.per_head.tolist()) / max(manifest.tokens, 1)
    sizes = [("Context tokens kept by each head", NARROW, heads_height(len(kept)))]
    sizes += [("By layer", NARROW, 3.0), ("By position", WIDE, 3.0)]
    figure, (heads, layers, positions) = make_figure(sizes)
    plot_heads(heads, kept)
    plot_layers(layers, {Mark("", BLUE, "o"): survivors.per_layer.tolist()})
    plot_positions(positions, {Mark("", BLUE): stretches})
    tokens = f" + {manifest.restore_tokens} restore tokens" if manifest.restore_tokens else ""
    made = f"{manifest.evictor}{tokens}, {format_ratio(float(Fraction(manifest.ratio)))}"
    held = f"T = {manifest.tokens:,} tokens, {manifest.pairs_held:,} KV pairs held"
    title = f"{title}: {made}, {held}"
    return Chart("survivors", title, figure)


def heads_height(layers: int) -> float:
    """Return the height of a map of so many layers, in inches."""
    return 1.3 + 0.2 * max(layers, 4)


def plot_heads(axes: Axes, kept: np.ndarray) -> None:
    """Draw a map of the share of the context's tokens that each head keeps: (layers, heads)."""
    plot_map(axes, DataFrame(100 * kept), max(100 * kept.max(), 1e-9))
    axes.set(xlabel="KV head (percent of tokens)", ylabel="layer")


def plot_layers(axes: Axes, shares: Mapping[Mark, Sequence[float]]) -> None:
    """Draw each layer's share of all held context pairs, next to an even split."""
    for mark, share in shares.items():
        plot_line(axes, mark, range(len(share)), [100 * each for each in share])
    layers = len(next(iter(shares.values())))
    plot_level(axes, Mark("even split", MUTED, dashed=True), 100 / layers)
    axes.set(xlabel="layer", ylabel="share of held pairs (%)", ylim=(0, None))
    set_ticks(axes, range(0, layers, -(-layers // 9)))


def plot_positions(axes: Axes, shares: Mapping[Mark, Sequence[float]]) -> None:
    """Draw the share of pairs kept in every stretch of the context."""
    for mark, share in shares.items():
        middles = 100 * (np.arange(len(share)) + 0.5) / len(share)
        plot_line(axes, mark, middles, [100 * each for each in share])
    axes.set(xlabel="position in the context (%)", ylabel="pairs kept (%)")
    axes.set(xlim=(0, 100), ylim=(0, None))
