"""Writes OUT/report: a page with every experiment, the same as Markdown, and all figures as
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from paper import comparison_tables, fidelity, plan, record
from paper.carry_out import Outcome
from paper.experiment import Comparison
from paper.markdown import render_markdown
from paper.plan import Experiment
from paper.scores import FAILS, HOLDS, NOISE, TOO_FEW, JudgedClaim, decide_verdict, judge_claim
from paper.setting import Setting
from paper.study import Study
from restorekv.evaluation.charts import Chart
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.report import Block, Section, write_page
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import bootstrap_ratio
from restorekv.evaluation.tables import Table, name_method
from restorekv.files import replace_file, write_json

SUBTITLE = "arXiv 2608.01247, table by table, beside the paper's own figures"
DRAWING = "Figure 2 of the paper is a drawing of the method; nothing is measured for it."


def write_page_of_paper(
    experiments: Sequence[Experiment], setting: Setting, done: Outcome, out: Path, command: str = ""
) -> Path:
    """Write the page and its files, and return the page's path.

    `command` is the command line that made it, for the record.
    """
    framed_experiments = []
    kept = {}
    results = done.results
    for experiment in experiments:
        study = isinstance(experiment, Study)
        blocks, claims, data = (
            _show_study(experiment, setting, out)
            if study
            else _compare(experiment, setting, results)
        )
        framed_experiments.append(
            (_frame_section(experiment, setting, claims, blocks, done.failed), claims)
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
    sections += [last] if (last := record.make_section(results)) else []
    with_what = record.describe_run(command)
    intro = [
        *write_introduction(setting, results, claims),
        *record.describe_texts(results),
        *record.describe_adapters(results),
        *record.format_run(with_what),
    ]
    title = f"The paper's tables and figures on {_name_model(setting)}"
    index = write_page(out / "report", title, sections, intro, SUBTITLE)
    with replace_file(index.parent / "paper.md") as path:
        path.write_text(render_markdown(title, intro, sections), encoding="utf-8")
    finished = [result for result in results.values() if result.done]
    facts = {result.cell.name: result.identity for result in finished}
    figures = {
        "made_with": with_what,
        "experiments": kept,
        "conventions": facts,
        "held": record.collect_sizes(finished),
    }
    write_json(index.parent / "paper.json", figures)
    return index


def _name_model(setting: Setting) -> str:
    return setting.name or setting.model


def _compare(
    experiment: Comparison, setting: Setting, results: Mapping[Cell, Result]
) -> tuple[list[Block], list[JudgedClaim], dict[str, object]]:
    """Return a comparison's blocks, claims and figures."""
    scores = plan.collect_scores(experiment, setting, results)
    measured = plan.find_measured(experiment, setting, results)
    claims = [judge_claim(claim, experiment, scores) for claim in experiment.claims]
    blocks: list[Block] = (
        [comparison_tables.plot_curves(experiment, setting, scores)]
        if experiment.chart and scores.runs
        else []
    )
    faithful = fidelity.collect_fidelity(experiment, setting, measured)
    for benchmark in plan.list_benchmarks(experiment):
        blocks += comparison_tables.make_tables(experiment, setting, scores, benchmark)
        blocks += fidelity.make_tables(experiment, setting, faithful, benchmark)
    blocks += fidelity.count_lowered(experiment, faithful)
    took = plan.collect_seconds(experiment, setting, results)
    if len(took) == len(experiment.seconds) == 2:
        claims.append(_judge_faster(experiment, took))
        blocks.append(_make_seconds_table(experiment, took))
    blocks += [comparison_tables.make_claims_table(experiment.name, claims)] if claims else []
    blocks += comparison_tables.describe_orders(experiment, scores) if experiment.orders else []
    rows = {
        "rows": list(comparison_tables.list_figures(experiment, scores, experiment.places)),
        "left_out": dict(scores.left_out),
    }
    return blocks, claims, {**rows, "fidelity": list(fidelity.list_figures(experiment, faithful))}


def _frame_section(
    experiment: Experiment,
    setting: Setting,
    claims: Sequence[JudgedClaim],
    blocks: Sequence[Block],
    failed: Mapping[tuple[str, str], str],
) -> Section:
    """Return the section with what a reader must know before the figures, and what could not be
    measured.
    """
    standing = []
    seeds = ""
    if isinstance(experiment, Comparison):
        standing = [setting.benches[key].standing for key in plan.list_benchmarks(experiment)]
        seeds = plan.describe_seeds(experiment, setting)
    place = f"{experiment.label} in the paper's source." if experiment.label else ""
    intro = " ".join(filter(None, (place, experiment.note, *standing, seeds)))
    lacking = [
        *plan.list_missing(experiment, setting),
        *plan.list_unreachable(experiment, setting, failed),
    ]
    blocks = [*blocks, *(["Not measured:", lacking] if lacking else [])]
    title = f"{experiment.number}: {experiment.title}" if experiment.number else experiment.title
    return Section(title, intro, blocks, comparison_tables.summarize_claims(claims))


def _show_study(
    experiment: Study, setting: Setting, out: Path
) -> tuple[list[Block], list[JudgedClaim], dict[str, object]]:
    """Return the blocks, claims and figures of an analysis or of facts."""
    blocks, claims = experiment.show(setting, out)
    blocks = [
        *blocks,
        *([comparison_tables.make_claims_table(experiment.name, claims)] if claims else []),
    ]
    data = [
        dict(row) for block in blocks if isinstance(block, (Table, Chart)) for row in block.figures
    ]
    return blocks, list(claims), {"rows": data}


def _judge_faster(experiment: Comparison, took: Mapping[str, Mapping[str, float]]) -> JudgedClaim:
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
    value, low, high = bootstrap_ratio(both[:, 1], both[:, 0])
    text = (
        f"{experiment.rows[quick].label} makes a cache faster than {experiment.rows[slow].label} "
        "(times less 1)"
    )
    in_paper = (slow_paper / quick_paper - 1,)
    if low is None or high is None:
        return JudgedClaim(text, TOO_FEW, in_paper, value - 1)
    verdict = decide_verdict(low - 1, high - 1)
    return JudgedClaim(text, verdict, in_paper, value - 1, low - 1, high - 1)


def _make_seconds_table(experiment: Comparison, took: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of the seconds to make a context's cache, here and in the paper."""
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


def write_introduction(
    setting: Setting, results: Mapping[Cell, Result], claims: Sequence[JudgedClaim]
) -> list[str]:
    """Return the page's first paragraphs: how many claims hold, and under what conventions."""
    kinds = (HOLDS, NOISE, FAILS, TOO_FEW)
    counts = [sum(claim.verdict == kind for claim in claims) for kind in kinds]
    few = f"{counts[3]} on too few contexts, " if counts[3] else ""
    parts = [
        f"{len(claims)} claims of the paper: {counts[0]} hold here, {counts[1]} within noise, "
        f"{counts[2]} not holding, {few}"
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
            f"{_name_model(setting)[0].upper()}{_name_model(setting)[1:]} "
            f"({facts['fingerprint']}), "
            f"{facts['dtype']} on "
            f"{facts['device']}, {_describe_protocols(compressed)}, {facts['allocation']} "
            f"allocation, budget "
            f"{facts['budget']}, "
            f"greedy answers. Scores are the {means}; intervals {facts['interval']}."
        )
    parts += [setting.about] if setting.about else []
    return [*parts, DRAWING]


def _describe_protocols(compressed: Mapping[Cell, Mapping]) -> str:
    """Return protocol and prefix policy; if there are several, also what was asked under each."""
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
