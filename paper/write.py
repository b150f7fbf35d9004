"""Writes OUT/report: a page with every experiment, the same as Markdown, and all figures as
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from paper import fidelity, plan, record, shown
from paper.carry_out import Done
from paper.experiment import Comparison
from paper.markdown import markdown
from paper.plan import Experiment
from paper.scores import FAILS, HOLDS, NOISE, Judged, judged, verdict
from paper.setting import Setting
from paper.study import Study
from restorekv.evaluation.charts import Chart
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.report import Block, Section, write_page
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import draw_resamples
from restorekv.evaluation.tables import Table, name_method
from restorekv.files import replace_file, write_json

SUBTITLE = "arXiv 2608.01247, table by table, beside the paper's own figures"
DRAWING = "Figure 2 of the paper is a drawing of the method; nothing is measured for it."


def write(
    experiments: Sequence[Experiment], setting: Setting, done: Done, out: Path, command: str = ""
) -> Path:
    """Write the page and its files; returns the page. `command` is what made it, for the record."""
    framed_experiments = []
    kept = {}
    results = done.results
    for experiment in experiments:
        study = isinstance(experiment, Study)
        blocks, claims, data = (
            shown_study(experiment, setting, out)
            if study
            else compared(experiment, setting, results)
        )
        framed_experiments.append(
            (framed(experiment, setting, claims, blocks, done.failed), claims)
        )
        kept[experiment.name] = {
            "number": experiment.number,
            "label": experiment.label,
            "title": experiment.title,
            "backbone": experiment.backbone,
            **data,
            "claims": [asdict(claim) for claim in claims],
        }
    sections = [section for section, _ in framed_experiments]
    claims = [claim for _, part in framed_experiments for claim in part]
    sections += [last] if (last := record.section(results)) else []
    with_what = record.made_with(command)
    intro = [*introduction(setting, results, claims), *record.sentence(with_what)]
    title = f"The paper's tables and figures on {the_model(setting)}"
    index = write_page(out / "report", title, sections, intro, SUBTITLE)
    with replace_file(index.parent / "paper.md") as path:
        path.write_text(markdown(title, intro, sections), encoding="utf-8")
    finished = [result for result in results.values() if result.done]
    facts = {result.cell.name: result.identity for result in finished}
    figures = {
        "made_with": with_what,
        "experiments": kept,
        "conventions": facts,
        "held": record.of_cells(finished),
    }
    write_json(index.parent / "paper.json", figures)
    return index


def the_model(setting: Setting) -> str:
    return setting.name or setting.model


def compared(
    experiment: Comparison, setting: Setting, results: Mapping[Cell, Result]
) -> tuple[list[Block], list[Judged], dict[str, object]]:
    """Return a comparison's blocks, claims and figures."""
    scores = plan.scores(experiment, setting, results)
    measured = plan.measured(experiment, setting, results)
    claims = [judged(claim, experiment, scores) for claim in experiment.claims]
    blocks: list[Block] = (
        [shown.curves(experiment, setting, scores)] if experiment.chart and scores.runs else []
    )
    faithful = fidelity.known(experiment, setting, measured)
    for benchmark in plan.asked(experiment):
        blocks += shown.tables(experiment, setting, scores, benchmark)
        blocks += fidelity.tables(experiment, setting, faithful, benchmark)
    blocks += fidelity.lowered(experiment, faithful)
    took = plan.seconds(experiment, setting, results)
    if len(took) == len(experiment.seconds) == 2:
        claims.append(faster(experiment, took))
        blocks.append(timed(experiment, took))
    blocks += [shown.claims(experiment.name, claims)] if claims else []
    blocks += shown.orders(experiment, scores) if experiment.orders else []
    rows = {
        "rows": list(shown.figures(experiment, scores, experiment.places)),
        "left_out": dict(scores.left_out),
    }
    return blocks, claims, {**rows, "fidelity": list(fidelity.figures(experiment, faithful))}


def framed(
    experiment: Experiment,
    setting: Setting,
    claims: Sequence[Judged],
    blocks: Sequence[Block],
    failed: Mapping[tuple[str, str], str],
) -> Section:
    """Return the section with what a reader must know before the figures, and what could not be
    measured.
    """
    standing = []
    seeds = ""
    if isinstance(experiment, Comparison):
        standing = [setting.benches[key].standing for key in plan.asked(experiment)]
        seeds = plan.seeds_told(experiment, setting)
    place = f"{experiment.label} in the paper's source." if experiment.label else ""
    intro = " ".join(filter(None, (place, experiment.note, *standing, seeds)))
    lacking = [*plan.missing(experiment, setting), *plan.unreachable(experiment, setting, failed)]
    blocks = [*blocks, *(["Not measured:", lacking] if lacking else [])]
    title = f"{experiment.number}: {experiment.title}" if experiment.number else experiment.title
    return Section(title, intro, blocks, shown.summed(claims))


def shown_study(
    experiment: Study, setting: Setting, out: Path
) -> tuple[list[Block], list[Judged], dict[str, object]]:
    """Return the blocks, claims and figures of an analysis or of facts."""
    blocks, claims = experiment.show(setting, out)
    blocks = [*blocks, *([shown.claims(experiment.name, claims)] if claims else [])]
    data = [
        dict(row) for block in blocks if isinstance(block, (Table, Chart)) for row in block.figures
    ]
    return blocks, list(claims), {"rows": data}


def faster(experiment: Comparison, took: Mapping[str, Mapping[str, float]]) -> Judged:
    """Judge whether the first of the timed rows is faster than the second, bootstrapped over
    contexts.
    """
    (quick, quick_paper), (slow, slow_paper) = experiment.seconds.items()
    both = np.array(
        [
            [took[quick][sample], took[slow][sample]]
            for sample in took[quick]
            if sample in took[slow]
        ]
    )
    drawn = draw_resamples(len(both), 0) @ both
    low, high = np.percentile(drawn[:, 1] / drawn[:, 0], (2.5, 97.5))
    value = float(both[:, 1].sum() / both[:, 0].sum())
    text = (
        f"{experiment.rows[quick].label} makes a cache faster than {experiment.rows[slow].label} "
        "(times less 1)"
    )
    holds = verdict(value - 1, low - 1, high - 1)
    return Judged(
        text, holds, (slow_paper / quick_paper - 1,), value - 1, float(low) - 1, float(high) - 1
    )


def timed(experiment: Comparison, took: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the seconds that a context takes."""
    lines = [
        [
            experiment.rows[row].label,
            f"{np.mean(list(took[row].values())):.2f}",
            f"{experiment.seconds[row]:g}",
        ]
        for row in experiment.seconds
    ]
    note = (
        "Prefill, scoring, restore pass or fitting, and eviction at the tightest ratio; the paper "
        "at 4,096 tokens. "
        "Taken while the grid ran, so other work on the machine counts."
    )
    head = ["method", "seconds a context, here", "seconds, paper"]
    return Table(f"{experiment.name}-seconds", "Seconds to make a cache", head, lines, note)


def introduction(
    setting: Setting, results: Mapping[Cell, Result], claims: Sequence[Judged]
) -> list[str]:
    """Return the page's first paragraphs: how many claims hold, and under what conventions."""
    counts = [sum(claim.verdict == kind for claim in claims) for kind in (HOLDS, NOISE, FAILS)]
    parts = [
        f"{len(claims)} claims of the paper: {counts[0]} hold here, {counts[1]} within noise, "
        f"{counts[2]} not holding, "
        f"{len(claims) - sum(counts)} not measured."
    ]
    compressed = {
        cell: result.identity
        for cell, result in results.items()
        if result.done and cell.evictor != FULL
    }
    if compressed:
        facts = next(iter(compressed.values()))
        means = " or ".join(dict.fromkeys(each["score"] for each in compressed.values()))
        parts.append(
            f"{the_model(setting)[0].upper()}{the_model(setting)[1:]} ({facts['fingerprint']}), "
            f"{facts['dtype']} on "
            f"{facts['device']}, {ways(compressed)}, {facts['allocation']} allocation, budget "
            f"{facts['budget']}, "
            f"greedy answers. Scores are the {means}; intervals {facts['interval']}."
        )
    parts += [setting.about] if setting.about else []
    return [*parts, DRAWING]


def ways(compressed: Mapping[Cell, Mapping]) -> str:
    """Return protocol and prefix policy; where there are several, what was asked under each."""
    asked_under: dict[str, dict[str, None]] = {}
    for cell, facts in compressed.items():
        policy = (
            "kept beside the budget"
            if facts["prefix_policy"] == "free"
            else "counted in the budget"
        )
        asked = facts["benchmark"]["title"]
        if cell.prefix_policy:
            asked += f" with {name_method(cell.evictor, cell.restored)}"
        asked_under.setdefault(f"{facts['protocol']['name']} protocol, chat prefix {policy}", {})[
            asked
        ] = None
    if len(asked_under) == 1:
        return next(iter(asked_under))
    return "; ".join(f"{way} ({', '.join(asked)})" for way, asked in asked_under.items())
