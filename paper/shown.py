"""A comparison as tables, a chart and its claims: ours beside the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes

from paper.exhibit import Comparison, Place, Row
from paper.scores import FAILS, HOLDS, MISSING, NOISE, Judged, Scores, margin, ordered
from paper.setting import Setting
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.report import Cell, Chart, Mark, Panel, Points, Table, draw, gain, number, table
from restorekv.evaluation.report import Row as Line
from restorekv.evaluation.report import score as score_cell
from restorekv.evaluation.report.blocks import Block

HERE, PAPER = "here", "paper"
ABSENT, NOTHING = Cell("not measured", tone="muted"), Cell("no counterpart", tone="muted")
NOTE = (
    "Points, 0 to 100. Here: the score, ± its sample deviation over seeds where there are several, and below it the "
    "95 % interval, or what parts it from {against} with the 95 % interval of that (paired bootstrap over contexts and "
    "seeds)."
)


def tables(exhibit: Comparison, setting: Setting, scores: Scores, benchmark: str) -> Iterator[Table]:
    """One for the benchmark, or for every ratio if it has parts."""
    groups: dict[float | None, list[Place]] = {}
    split = any(each.parts for each in exhibit.places)
    for place in exhibit.places:
        if place.benchmark == benchmark:
            groups.setdefault(place.ratio if split else None, []).append(place)
    for ratio, places in groups.items():
        title = setting.benches[benchmark].shown + (f", r = {ratio:g}" if ratio else "")
        name = f"{exhibit.name}-{benchmark}" + (f"-{ratio:g}" if ratio else "")
        layout = by_place if ratio else by_row
        head, lines = layout(exhibit, scores, places)
        data = list(figures(exhibit, scores, places))
        told = " ".join(filter(None, (note(exhibit), left_out(setting, scores, benchmark))))
        yield table(name, f"{exhibit.title}: {title}", head, lines, told, data)


def note(exhibit: Comparison) -> str:
    others = {exhibit.rows[row].label for row in exhibit.against.values()}
    against = next(iter(others)) if len(others) == 1 else "its base"
    told = NOTE.format(against=against) if others else NOTE.split(", or")[0] + "."
    return f"{told} Paper: {', '.join(filter(None, (exhibit.backbone, *exhibit.backbones)))}."


def left_out(setting: Setting, scores: Scores, benchmark: str) -> str:
    """What the rule on tasks with nothing to lose does to the means of a benchmark, in a sentence or two."""
    below = scores.left_out.get(benchmark, ())
    whole = [part for part in setting.benches[benchmark].parts if scores.lost(Place(benchmark, 1, part))]
    kept = [task for part in whole for task in scores.tasks[benchmark, part] or below]
    single = [task for task in below if task not in kept]
    told = [f"Left out of means, because the full cache scores below 10: {', '.join(single)}."] if single else []
    if whole:
        of = f" of {', '.join(whole)}, which averages leave out" if any(whole) else ""
        told.append(f"The full cache scores below 10 on every task{of}: nothing to lose, and the mean is over all.")
    return " ".join(told)


def by_row(exhibit: Comparison, scores: Scores, places: Sequence[Place]) -> tuple[list, list[Line]]:
    """Methods down, ratios across."""
    sources = {place: columns(exhibit, [place]) for place in places}
    head = [
        [Cell(""), *(Cell(f"r = {place.ratio:g}", columns=len(titles)) for place, titles in sources.items())],
        ["method", *(title for titles in sources.values() for title in titles)],
    ]
    lines = []
    for name, row in exhibit.rows.items():
        made = [row.label]
        for place, titles in sources.items():
            made += cells(exhibit, scores, name, place)[: len(titles)]
        lines.append(Line(made, strong=name in exhibit.against and row.adapter is not None))
    return head, lines


def by_place(exhibit: Comparison, scores: Scores, places: Sequence[Place]) -> tuple[list, list[Line]]:
    """Parts of a benchmark down, methods across."""
    sources = columns(exhibit, places)
    head = [
        [Cell(""), *(Cell(row.label, columns=len(sources)) for row in exhibit.rows.values())],
        ["part", *(title for _ in exhibit.rows for title in sources)],
    ]
    lines = []
    for place in places:
        title = place.part or ("Rel., %" if place.relative else "Avg")
        made = [title, *(cell for name in exhibit.rows for cell in cells(exhibit, scores, name, place))]
        lines.append(Line(made, strong=bool(place.parts), rule=bool(place.parts) and not place.relative))
    return head, lines


def columns(exhibit: Comparison, places: Sequence[Place]) -> list[str]:
    """Of places: ours, the paper's, and the paper's of further backbones; ours alone where the paper has nothing."""
    if not any(place in row.paper for row in exhibit.rows.values() for place in places):
        return [HERE]
    return [HERE, *((exhibit.backbone, *exhibit.backbones) if exhibit.backbones else (PAPER,))]


def cells(exhibit: Comparison, scores: Scores, name: str, place: Place) -> list[Cell]:
    """A row at a place: ours, then the paper's."""
    row, base = exhibit.rows[name], exhibit.against.get(name)
    made = [measured(exhibit, scores, name, place)]
    for backbone in ("", *exhibit.backbones):
        told = row.points(backbone).get(place)
        other = exhibit.rows[base].points(backbone).get(place) if base else None
        small = f"± {row.paper_std[place]:g}" if place in row.paper_std else ""
        if not small and None not in (told, other):
            small = number(told - other, decimals(told), sign=True)
        made.append(Cell("–" if told is None else number(told, decimals(told)), small, "note"))
    return made


def decimals(points: float) -> int:
    """The paper's own: one, or two where it gives two."""
    return 1 if round(points, 1) == points else 2


def measured(exhibit: Comparison, scores: Scores, name: str, place: Place) -> Cell:
    """Ours."""
    if not scores.has((name, place)):
        asked = (name, place.benchmark, place.ratio) in scores.runs
        return NOTHING if asked and (place.benchmark, place.part) not in scores.tasks else ABSENT
    made = score_cell(*margin(scores, {(name, place): 1}))
    std, base = scores.std(name, place), exhibit.against.get(name)
    text = made.text if std is None else f"{made.text} ± {std:.1f}"
    if base is None or not scores.has((base, place)):
        return Cell(text, made.small, "full" if exhibit.rows[name].evictor == FULL else "")
    apart = gain(*margin(scores, {(name, place): 1, (base, place): -1}))
    return Cell(text, f"{apart.text}, {apart.small}", apart.tone, apart.strong)


def figures(exhibit: Comparison, scores: Scores, places: Sequence[Place]) -> Iterator[dict[str, object]]:
    """The same for programs."""
    for name, row in exhibit.rows.items():
        for place in places:
            part = place.part or ("relative" if place.relative else "average" if place.parts else "")
            line = {"row": name, "label": row.label, "benchmark": place.benchmark, "ratio": place.ratio, "part": part}
            if scores.has((name, place)):
                line |= zip(("score", "low", "high"), margin(scores, {(name, place): 1}), strict=True)
                seeds = {seed: value for seed, value in scores.seeds(name, place).items() if seed is not None}
                line |= {"std": scores.std(name, place), "seeds": seeds}
                base = exhibit.against.get(name)
                if base and scores.has((base, place)):
                    apart = margin(scores, {(name, place): 1, (base, place): -1})
                    line |= {"against": base, **dict(zip(("gain", "gain_low", "gain_high"), apart, strict=True))}
            line |= {"paper": row.paper.get(place), "paper_std": row.paper_std.get(place)}
            yield line | {f"paper, {other}": points.get(place) for other, points in row.also.items()}


def claims(name: str, found: Sequence[Judged]) -> Table:
    """Each with its margin in the paper and here."""
    lines = [[claim.text, in_paper(claim), here(claim), judgement(claim)] for claim in found]
    data = [
        {"claim": claim.text, "verdict": claim.verdict, "paper": claim.paper[0] if claim.paper else None,
         "here": claim.value, "low": claim.low, "high": claim.high}
        for claim in found
    ]  # fmt: skip
    head = ["what the paper says", "margin in the paper", "margin here", "verdict"]
    told = (
        "How far the figures are on the claim's side, in points unless it says otherwise, with a 95 % interval; a "
        "claim is within noise where that holds zero."
    )
    return table(f"{name}-claims", "Claims", head, lines, told, data, left=(0, 3))


def in_paper(claim: Judged) -> str:
    told = [f"{value:.0f} of {claim.of}" if claim.of and value is not None else points(value) for value in claim.paper]
    return " / ".join(told) or "–"


def points(value: float | None) -> str:
    """With as many decimals as a small one needs."""
    return number(value, 3 if value and abs(value) < 0.1 else 1, sign=True)


def here(claim: Judged) -> Cell | str:
    if claim.value is None:
        return "–"
    if claim.of:
        return Cell(f"{claim.value:.0f} of {claim.of}", f"{claim.low:.0f} to {claim.high:.0f}")
    alone = claim.low == claim.high  # a single measurement
    return Cell(points(claim.value), "" if alone else f"{points(claim.low)} to {points(claim.high)}")


SIGNS = {HOLDS: ("✓", "holds"), FAILS: ("✗", "fails"), NOISE: ("○", "open"), MISSING: ("–", "muted")}


def judgement(claim: Judged) -> Cell:
    sign, tone = SIGNS[claim.verdict]
    return Cell(f"{sign} {claim.verdict}", tone=tone)


def summed(found: Sequence[Judged]) -> Cell | None:
    """Beside a heading: how many claims hold."""
    if not found:
        return None
    counts = {kind: sum(claim.verdict == kind for claim in found) for kind in SIGNS}
    told = [f"{counts[HOLDS]} of {len(found)} claims hold"]
    words = {NOISE: NOISE, FAILS: "fail" if counts[FAILS] > 1 else "fails", MISSING: MISSING}
    told += [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    worst = next(kind for kind in (FAILS, MISSING, NOISE, HOLDS) if counts[kind])
    return Cell(f"{SIGNS[worst][0]} {', '.join(told)}", tone=SIGNS[worst][1])


def orders(exhibit: Comparison, scores: Scores) -> Iterator[Block]:
    """How many pairs of rows stand as in the paper, and which do not."""
    items = []
    for place in exhibit.places:
        counted = ordered(exhibit, scores, place)
        total = sum(map(len, counted.values()))
        if total:
            told = ", ".join(f"{len(pairs)} {kind}" for kind, pairs in counted.items())
            turned = "; ".join(
                f"{exhibit.rows[worse].label} > {exhibit.rows[better].label}"
                for better, worse in counted["the other way"]
            )
            items.append(f"r = {place.ratio:g}: of {total} pairs of rows {told}" + (f": {turned}." if turned else "."))
    if items:
        yield "Order of the rows, in the paper and here:"
        yield Points(items)


def curves(exhibit: Comparison, setting: Setting, scores: Scores) -> Chart:
    """A panel for every benchmark: lines over ratios with their intervals, the full cache dashed."""
    hues = list(dict.fromkeys(row.evictor for row in exhibit.rows.values() if row.evictor != FULL))
    marks = {name: mark(row, hues.index(row.evictor)) for name, row in exhibit.rows.items() if row.evictor != FULL}
    benchmarks = list(dict.fromkeys(place.benchmark for place in exhibit.places))
    panels = [Panel(panel(exhibit, scores, marks, key), setting.benches[key].shown) for key in benchmarks]
    legend = [*marks.values(), *([Mark("full cache", draw.INK, dashed=True)] if scores.full in exhibit.rows else [])]
    titles = ", ".join(setting.benches[key].shown for key in benchmarks)
    return Chart(
        f"{exhibit.name}-chart", f"{exhibit.title} ({setting.model})", panels,
        f"Scores in points against the ratio of pairs kept: {titles}", list(figures(exhibit, scores, exhibit.places)),
        "Bands: 95 % bootstrap intervals over contexts.", legend,
    )  # fmt: skip


def mark(row: Row, turn: int) -> Mark:
    """One hue an evictor; dashed and hollow alone, solid and filled restored."""
    return Mark(row.label, draw.HUES[turn], draw.MARKERS[turn], dashed=row.adapter is None, hollow=row.adapter is None)


def panel(exhibit: Comparison, scores: Scores, marks: Mapping[str, Mark], benchmark: str):
    places = [place for place in exhibit.places if place.benchmark == benchmark]

    def fill(axes: Axes) -> None:
        for name, look in marks.items():
            known = [place for place in places if scores.has((name, place))]
            if known:
                middle, low, high = zip(*(margin(scores, {(name, place): 1}) for place in known), strict=True)
                draw.line(axes, look, [place.ratio for place in known], middle, (low, high))
        if scores.full in exhibit.rows and scores.has((scores.full, places[0])):
            axes.axhline(scores.points(scores.full, places[0]), color=draw.INK, linestyle=draw.DASHES, linewidth=1.3)
        draw.ratio_axis(axes, [place.ratio for place in places])
        axes.set_ylabel("score (points)")

    return fill
