"""The tables, chart and claims of a comparison: our figures next to the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from paper.experiment import Comparison, Place, Row
from paper.scores import (
    FAILS,
    HOLDS,
    MISSING,
    NOISE,
    TOO_FEW,
    JudgedClaim,
    Scores,
    compare_orders,
    compute_margin,
)
from paper.setting import Setting
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
    set_ratio_axis,
    with_style,
)
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.report import Block
from restorekv.evaluation.stats import MIN_FOR_INTERVAL
from restorekv.evaluation.tables import (
    UNKNOWN,
    Table,
    format_gain,
    format_number,
    format_range,
)

HERE = "here"
PAPER = "paper"
ABSENT = "not measured"
NOTHING = "no counterpart"
NOTE = (
    "Points, 0 to 100. Here: the score, ± its sample deviation over seeds where there are several, "
    "and below it the "
    "95 % interval, or the difference from {against} with the 95 % interval of that (paired "
    "bootstrap over contexts "
    "and seeds)."
)


def make_tables(
    experiment: Comparison, setting: Setting, scores: Scores, benchmark: str
) -> Iterator[Table]:
    """Yield one table for the benchmark, or one for every ratio if the benchmark has parts."""
    groups: dict[float | None, list[Place]] = {}
    split = any(each.parts for each in experiment.places)
    for place in experiment.places:
        if place.benchmark == benchmark:
            groups.setdefault(place.ratio if split else None, []).append(place)
    for ratio, places in groups.items():
        title = setting.benches[benchmark].shown + (f", r = {ratio:g}" if ratio else "")
        name = f"{experiment.name}-{benchmark}" + (f"-{ratio:g}" if ratio else "")
        head, rows, strong = (_lay_out_by_place if ratio else _lay_out_by_row)(
            experiment, scores, places
        )
        notes = " ".join(
            filter(None, (_make_note(experiment), _describe_left_out(setting, scores, benchmark)))
        )
        data = list(list_figures(experiment, scores, places))
        yield Table(name, f"{experiment.title}: {title}", head, rows, notes, data, strong=strong)


def _make_note(experiment: Comparison) -> str:
    others = {experiment.rows[row].label for row in experiment.against.values()}
    against = next(iter(others)) if len(others) == 1 else "its base"
    words = NOTE.format(against=against) if others else NOTE.split(", or")[0] + "."
    return (
        f"{words} Paper: {', '.join(filter(None, (experiment.backbone, *experiment.backbones)))}."
    )


def _describe_left_out(setting: Setting, scores: Scores, benchmark: str) -> str:
    """Say which tasks of a benchmark are left out of means, because the full cache scores so low
    that there is nothing to lose.
    """
    below = scores.left_out.get(benchmark, ())
    parts = setting.benches[benchmark].parts
    skipped = [part for part in parts if scores.leaves_out(Place(benchmark, 1, part))]
    kept = [task for part in skipped for task in scores.tasks[benchmark, part] or below]
    single = [task for task in below if task not in kept]
    words = (
        [f"Left out of means, because the full cache scores below 10: {', '.join(single)}."]
        if single
        else []
    )
    if skipped:
        of = f" of {', '.join(skipped)}, which averages leave out" if any(skipped) else ""
        words.append(
            f"The full cache scores below 10 on every task{of}: nothing to lose, and the mean is "
            "over all."
        )
    return " ".join(words)


def _lay_out_by_row(
    experiment: Comparison, scores: Scores, places: Sequence[Place]
) -> tuple[list[str], list[list[str]], list[int]]:
    """Lay out a table with a row for each method and columns for each ratio.

    Returns:
        The head, the rows, and the indices of the rows to emphasize.
    """
    sources = {place: _list_columns(experiment, [place]) for place in places}
    head = ["method"]
    for place, titles in sources.items():
        head += [f"r = {place.ratio:g} {title}" for title in titles]
    rows: list[list[str]] = []
    strong: list[int] = []
    for name, row in experiment.rows.items():
        values = [
            each
            for place, titles in sources.items()
            for each in _format_cells(experiment, scores, name, place)[: len(titles)]
        ]
        if name in experiment.against and row.adapter is not None:
            strong.append(len(rows))
        rows.append([row.label, *values])
    return head, rows, strong


def _lay_out_by_place(
    experiment: Comparison, scores: Scores, places: Sequence[Place]
) -> tuple[list[str], list[list[str]], list[int]]:
    """Lay out a table with a row for each part of a benchmark and columns for each method.

    Returns:
        The head, the rows, and the indices of the rows of means, which are emphasized.
    """
    sources = _list_columns(experiment, places)
    head = ["part"]
    for row in experiment.rows.values():
        head += [" ".join(dict.fromkeys((row.label, title))) for title in sources]
    rows: list[list[str]] = []
    strong: list[int] = []
    for place in places:
        title = place.part or ("Rel., %" if place.relative else "Avg")
        values = [
            cell
            for name in experiment.rows
            for cell in _format_cells(experiment, scores, name, place)
        ]
        if place.parts:
            strong.append(len(rows))
        rows.append([title, *values])
    return head, rows, strong


def _list_columns(experiment: Comparison, places: Sequence[Place]) -> list[str]:
    """Return the titles of the columns: ours, then the paper's for each of its backbones; ours
    alone if the paper has no figures.
    """
    if not any(place in row.paper for row in experiment.rows.values() for place in places):
        return [HERE]
    return [
        HERE,
        *((experiment.backbone, *experiment.backbones) if experiment.backbones else (PAPER,)),
    ]


def _format_cells(experiment: Comparison, scores: Scores, name: str, place: Place) -> list[str]:
    """Return a row's figures at a place: ours, then the paper's."""
    row = experiment.rows[name]
    base = experiment.against.get(name)
    values = [_format_measured(experiment, scores, name, place)]
    for backbone in ("", *experiment.backbones):
        mine = row.points(backbone).get(place)
        other = experiment.rows[base].points(backbone).get(place) if base else None
        small = f"± {row.paper_std[place]:g}" if place in row.paper_std else ""
        if not small and mine is not None and other is not None:
            small = format_number(mine - other, _count_decimals(mine), sign=True)
        text = UNKNOWN if mine is None else format_number(mine, _count_decimals(mine))
        values.append(f"*{text}* ({small})" if small else f"*{text}*")
    return values


def _count_decimals(points: float) -> int:
    """Return how many decimals the paper gives for a figure: one or two."""
    return 1 if round(points, 1) == points else 2


def _format_measured(experiment: Comparison, scores: Scores, name: str, place: Place) -> str:
    """Return our figure with its deviation over seeds and its interval or difference, or why there
    is none.
    """
    if not scores.has((name, place)):
        asked = (name, place.benchmark, place.ratio) in scores.runs
        return NOTHING if asked and (place.benchmark, place.part) not in scores.tasks else ABSENT
    score, low, high = compute_margin(scores, {(name, place): 1})
    std = scores.std(name, place)
    base = experiment.against.get(name)
    text = format_number(score) if std is None else f"{format_number(score)} ± {std:.1f}"
    if base is None or not scores.has((base, place)):
        if low is None or high is None:
            return text
        return f"{text} ({format_range(low, high)})"
    gain, low, high = compute_margin(scores, {(name, place): 1, (base, place): -1})
    if low is None or high is None:
        return f"{text} ({format_gain(gain)})"
    return f"{text} ({format_gain(gain)}, {format_range(low, high, sign=True)})"


def list_figures(
    experiment: Comparison, scores: Scores, places: Sequence[Place]
) -> Iterator[dict[str, object]]:
    """Yield the figures of every row at every place, for JSON and CSV files."""
    for name, row in experiment.rows.items():
        for place in places:
            part = place.part or (
                "relative" if place.relative else "average" if place.parts else ""
            )
            line: dict[str, object] = {
                "row": name,
                "label": row.label,
                "benchmark": place.benchmark,
                "ratio": place.ratio,
                "part": part,
            }
            if scores.has((name, place)):
                line |= zip(
                    ("score", "low", "high"),
                    compute_margin(scores, {(name, place): 1}),
                    strict=True,
                )
                seeds = {
                    seed: value
                    for seed, value in scores.seeds(name, place).items()
                    if seed is not None
                }
                line |= {"std": scores.std(name, place), "seeds": seeds}
                base = experiment.against.get(name)
                if base and scores.has((base, place)):
                    apart = compute_margin(scores, {(name, place): 1, (base, place): -1})
                    line |= {
                        "against": base,
                        **dict(zip(("gain", "gain_low", "gain_high"), apart, strict=True)),
                    }
            line |= {"paper": row.paper.get(place), "paper_std": row.paper_std.get(place)}
            yield line | {
                f"paper, {other}": points.get(place) for other, points in row.also.items()
            }


def make_claims_table(name: str, claims: Sequence[JudgedClaim]) -> Table:
    """Return a table of the claims, with their margins in the paper and here."""
    rows = [
        [claim.text, _format_in_paper(claim), _format_here(claim), _format_verdict(claim)]
        for claim in claims
    ]
    data = [
        {
            "claim": claim.text,
            "verdict": claim.verdict,
            "paper": claim.paper[0] if claim.paper else None,
            "here": claim.value,
            "low": claim.low,
            "high": claim.high,
        }
        for claim in claims
    ]
    head = ["what the paper says", "margin in the paper", "margin here", "verdict"]
    note = (
        "How far the figures are on the claim's side, in points unless it says otherwise, with a "
        f"95 % interval, which fewer than {MIN_FOR_INTERVAL} contexts do not have; a claim is "
        "within noise where the interval holds zero."
    )
    return Table(f"{name}-claims", "Claims", head, rows, note, data, left=(0, 3))


def _format_in_paper(claim: JudgedClaim) -> str:
    values = [
        f"{value:.0f} of {claim.of}" if claim.of and value is not None else _format_points(value)
        for value in claim.paper
    ]
    return " / ".join(values) or UNKNOWN


def _count_digits(value: float | None) -> int:
    """Return how many decimals a margin needs."""
    return 3 if value and abs(value) < 0.1 else 1


def _format_points(value: float | None) -> str:
    return format_number(value, _count_digits(value), sign=True)


def _format_here(claim: JudgedClaim) -> str:
    if claim.value is None:
        return UNKNOWN
    if claim.of:
        text = f"{claim.value:.0f} of {claim.of}"
        if claim.low is None or claim.high is None:
            return text
        return f"{text} ({format_range(claim.low, claim.high, 0)})"
    if claim.low == claim.high:  # a single measurement, or too few contexts
        return _format_points(claim.value)
    return (
        f"{_format_points(claim.value)} ({_format_points(claim.low)} to "
        f"{_format_points(claim.high)})"
    )


SIGNS = {HOLDS: "✓", FAILS: "✗", NOISE: "○", TOO_FEW: UNKNOWN, MISSING: UNKNOWN}


def _format_verdict(claim: JudgedClaim) -> str:
    return f"{SIGNS[claim.verdict]} {claim.verdict}"


def summarize_claims(claims: Sequence[JudgedClaim]) -> str:
    """Return how many claims hold, as a text for the section's heading; "" if there are
    no claims.
    """
    if not claims:
        return ""
    counts = {kind: sum(claim.verdict == kind for claim in claims) for kind in SIGNS}
    words = {
        NOISE: NOISE,
        FAILS: "fail" if counts[FAILS] > 1 else "fails",
        TOO_FEW: TOO_FEW,
        MISSING: MISSING,
    }
    parts = [f"{counts[HOLDS]} of {len(claims)} claims hold"]
    parts += [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    worst = next(kind for kind in (FAILS, MISSING, TOO_FEW, NOISE, HOLDS) if counts[kind])
    return f"{SIGNS[worst]} {', '.join(parts)}"


def describe_orders(experiment: Comparison, scores: Scores) -> Iterator[Block]:
    """Say how many pairs of rows have the same order as in the paper, and which have the opposite
    one.
    """
    items = []
    for place in experiment.places:
        counted = compare_orders(experiment, scores, place)
        total = sum(map(len, counted.values()))
        if total:
            kinds = ", ".join(f"{len(pairs)} {kind}" for kind, pairs in counted.items())
            turned = "; ".join(
                f"{experiment.rows[worse].label} > {experiment.rows[better].label}"
                for better, worse in counted["the other way"]
            )
            items.append(
                f"r = {place.ratio:g}: of {total} pairs of rows {kinds}"
                + (f": {turned}." if turned else ".")
            )
    if items:
        yield "Order of the rows, in the paper and here:"
        yield items


@with_style
def plot_curves(experiment: Comparison, setting: Setting, scores: Scores) -> Chart:
    """Return a chart with a panel for every benchmark: lines against the ratio with their
    intervals, and the full cache dashed.
    """
    evictors = list(
        dict.fromkeys(row.evictor for row in experiment.rows.values() if row.evictor != FULL)
    )
    marks = {
        name: _make_mark(row, evictors.index(row.evictor))
        for name, row in experiment.rows.items()
        if row.evictor != FULL
    }
    benchmarks = list(dict.fromkeys(place.benchmark for place in experiment.places))
    titles = [setting.benches[key].shown for key in benchmarks]
    figure, panels = make_figure([(title, NARROW, 3.0) for title in titles])
    for axes, key in zip(panels, benchmarks, strict=True):
        _draw_curves(axes, experiment, scores, marks, key)
    return Chart(
        name=f"{experiment.name}-chart",
        title=f"{experiment.title} ({setting.model})",
        figure=figure,
        alt=f"Scores in points against the ratio of pairs kept: {', '.join(titles)}",
        note="Bars: 95 % bootstrap intervals over contexts.",
        figures=list(list_figures(experiment, scores, experiment.places)),
    )


def _make_mark(row: Row, turn: int) -> Mark:
    """Return a row's mark: one hue for each evictor, dashed and hollow alone, solid and filled if
    restored.
    """
    alone = row.adapter is None
    return Mark(row.label, HUES[turn], MARKERS[turn], dashed=alone, hollow=alone)


def _draw_curves(
    axes: Axes, experiment: Comparison, scores: Scores, marks: Mapping[str, Mark], benchmark: str
) -> None:
    """Draw the scores of one benchmark against ratio."""
    places = [place for place in experiment.places if place.benchmark == benchmark]
    measured = {name: [place for place in places if scores.has((name, place))] for name in marks}
    for name, own in measured.items():
        if own:
            found = [compute_margin(scores, {(name, place): 1}) for place in own]
            # Scores over too few contexts have no interval; NaN is not drawn.
            lows = [np.nan if low is None else low for _, low, _ in found]
            highs = [np.nan if high is None else high for _, _, high in found]
            interval = lows, highs
            ratios = [place.ratio for place in own]
            plot_line(axes, marks[name], ratios, [middle for middle, _, _ in found], interval)
    if scores.full in experiment.rows and scores.has((scores.full, places[0])):
        plot_level(
            axes, Mark("full cache", INK, dashed=True), scores.points(scores.full, places[0])
        )
    set_ratio_axis(axes, {place.ratio for place in places})
    axes.set_ylabel("score (points)")
