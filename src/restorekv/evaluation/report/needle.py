"""Needle in a haystack: what is found at every length and depth, a map for every cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import Chart, Details, Panel, Section
from restorekv.evaluation.report.names import Names, slug
from restorekv.evaluation.report.runs import Place, Pool, Run

NAME = "needle"
INTRO = (
    "One sentence is hidden at a depth of a text and asked for: 100 is found every time, 0 never. Down: how deep it "
    "lies (0 % is the beginning); across: how long the text is, in tokens."
)
Found = dict[tuple[int, float], float]  # points by length and depth in percent


def section(run: Run, names: Names) -> list[Section]:
    """The tightest ratio open, the others behind a click."""
    blocks = []
    for place, grid in run.places.items():
        if place.benchmark.partition(":")[0] != NAME:
            continue
        charts = [made for ratio in reversed(grid.ratios) if (made := chart(run, names, place, ratio))]
        blocks += charts[:1]
        if charts[1:]:
            blocks.append(Details(f"{names.place(place)} at the other ratios", charts[1:]))
    return [Section("Needle in a haystack", INTRO, blocks)] if blocks else []


def chart(run: Run, names: Names, place: Place, ratio: float) -> Chart | None:
    """A map for the full cache and every finished method."""
    grid = run.places[place]
    told = [(names.label(method), grid.at(method, ratio)) for method in names.of(place)]
    told = [(label, pool) for label, pool in told if pool and pool.done]
    if not told:
        return None
    if grid.full and grid.full.done:
        told.insert(0, ("full cache", grid.full))
    maps = [(label, found_in(pool)) for label, pool in told]
    height = 1.3 + 0.2 * max(len({depth for _, depth in found}) for _, found in maps)
    panels = [Panel(lambda axes, found=found: fill(axes, found), label, height=height) for label, found in maps]
    title = f"{names.place(place)}: needles found at r = {ratio:g}"
    note = "Points: 100 times the share of needles found, the number in the cell; yellow is found, dark blue is not."
    rows = [row for label, found in maps for row in rows_of(label, ratio, found)]
    name = slug("needle", names.key(place), f"{ratio:g}")
    return Chart(name, title, panels, f"{title}, a map by length and depth for each cache", rows, note)


def found_in(pool: Pool) -> Found:
    """Mean over the seeds; questions are called LENGTH-DEPTH."""
    scores: dict[tuple[int, float], list[float]] = defaultdict(list)
    for answer in pool.answers:
        length, _, depth = answer.question.partition("-")
        scores[int(length), float(depth)].append(answer.score)
    return {place: 100 * float(np.mean(values)) for place, values in sorted(scores.items())}


def fill(axes: Axes, found: Found) -> None:
    """Depth down, length across."""
    lengths, depths = (sorted({place[axis] for place in found}) for axis in (0, 1))
    values = np.array([[found.get((length, depth), np.nan) for length in lengths] for depth in depths])
    axes.grid(visible=False)
    axes.pcolormesh(values, cmap=draw.SEQUENTIAL, vmin=0, vmax=100, edgecolors="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        ink = "black" if value > 50 else "white"
        if not np.isnan(value):
            axes.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length:,}" for length in lengths])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:g}" for depth in depths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="length of the text (tokens)", ylabel="depth of the needle (%)")


def rows_of(label: str, ratio: float, found: Found) -> Iterator[dict[str, object]]:
    for (length, depth), value in found.items():
        yield {"method": label, "ratio": ratio, "length": length, "depth": depth, "score": value}
