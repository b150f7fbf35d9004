"""Fewer than six contexts have no interval in the paper's tables, and no claim is judged on
them.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from paper import comparison_tables, fidelity, write
from paper.analysis.case import DocumentFigures
from paper.experiment import Claim, Comparison, Most, Place, Row
from paper.experiments import mechanism
from paper.fidelity import Fidelity
from paper.scores import (
    HOLDS,
    TOO_FEW,
    JudgedClaim,
    Scores,
    compare_orders,
    compute_margin,
    judge_claim,
)
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, ScoredAnswer

HERE = Place("ruler", 0.1)
TASKS = ("a", "b")


def answer_all(score, contexts, own=False):
    """Answers to both tasks about every context; with `own` to one of them, in turn."""
    answers = []
    for number in range(contexts):
        for index, task in enumerate(TASKS):
            if not own or number % 2 == index:
                answers.append(ScoredAnswer(str(number), task, task, "", score))
    return {None: answers}


def make_scores(contexts, own=False):
    runs = {
        ("one", "ruler", 0.1): answer_all(0.8, contexts, own),
        ("other", "ruler", 0.1): answer_all(0.3, contexts, own),
    }
    tasks = {("ruler", ""): (), ("ruler", "a"): ("a",), ("ruler", "b"): ("b",)}
    return Scores(runs, tasks)


def make_comparison(*claims):
    rows = {
        "one": Row("one", "kvzip", paper={HERE: 8}),
        "other": Row("other", "h2o", paper={HERE: 3}),
    }
    return Comparison("n", "1", "", "t", "", rows, (HERE,), claims)


MARGIN = {("one", HERE): 1, ("other", HERE): -1}


def test_a_margin_over_few_contexts_has_no_interval():
    assert compute_margin(make_scores(MIN_FOR_INTERVAL - 1), MARGIN) == (
        pytest.approx(50),
        None,
        None,
    )
    assert compute_margin(make_scores(MIN_FOR_INTERVAL), MARGIN) == pytest.approx((50, 50, 50))


def test_the_contexts_of_a_mean_are_those_of_all_its_parts():
    scores = make_scores(MIN_FOR_INTERVAL, own=True)
    part = Place("ruler", 0.1, "a")
    assert compute_margin(scores, {("one", part): 1})[1:] == (None, None)
    mean = Place("ruler", 0.1, parts=TASKS)
    assert None not in compute_margin(scores, {("one", mean): 1})


def test_claims_are_not_judged_on_few_contexts():
    claim, most = Claim("c", MARGIN), Most("m", (MARGIN,), 1)
    experiment = make_comparison(claim, most)
    for each in (claim, most):
        judged = judge_claim(each, experiment, make_scores(MIN_FOR_INTERVAL - 1))
        assert judged.verdict == TOO_FEW and judged.low is None and judged.high is None
        assert judge_claim(each, experiment, make_scores(MIN_FOR_INTERVAL)).verdict == HOLDS
    found = [
        judge_claim(each, experiment, make_scores(MIN_FOR_INTERVAL - 1)) for each in (claim, most)
    ]
    table = comparison_tables.make_claims_table("n", found)
    assert [row[2] for row in table.rows] == ["+50.0", "1 of 1"]
    assert all("too few contexts" in row[3] for row in table.rows)
    assert "0 of 2 claims hold, 2 too few contexts" in comparison_tables.summarize_claims(found)
    assert compare_orders(experiment, make_scores(MIN_FOR_INTERVAL - 1), HERE)[TOO_FEW] == [
        ["one", "other"]
    ]
    setting = SimpleNamespace(name="", model="tiny", about="")
    intro = write.write_introduction(setting, {}, found)
    assert "2 on too few contexts, 0 not measured" in intro[0]


def test_figures_of_few_contexts_are_shown_without_an_interval():
    experiment = make_comparison()
    shown = comparison_tables._format_measured(experiment, make_scores(1), "one", HERE)
    assert shown == "80.0"
    marks = {"one": comparison_tables._make_mark(experiment.rows["one"], 0)}
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    comparison_tables._draw_curves(axes, experiment, make_scores(1), marks, "ruler")
    axes.figure.canvas.draw()


def make_fidelity(contexts, kl):
    return Fidelity(np.full(contexts, kl * 10), np.full(contexts, 10.0), 50.0)


def test_fidelity_to_the_full_cache_has_none_either():
    few = make_fidelity(1, 0.2), make_fidelity(1, 0.5)
    assert fidelity._bootstrap(*few) == (pytest.approx(-0.3), None, None)
    assert None not in fidelity._bootstrap(
        make_fidelity(MIN_FOR_INTERVAL, 0.2), make_fidelity(MIN_FOR_INTERVAL, 0.5)
    )
    rows = {"one": Row("one", "kvzip", "own"), "other": Row("other", "kvzip")}
    experiment = SimpleNamespace(rows=rows, against={"one": "other"})
    known = dict(zip((("one", "ruler", 0.1), ("other", "ruler", 0.1)), few, strict=True))
    (sentence,) = fidelity.count_lowered(experiment, known)
    assert "in 1 of 1 pairs" in sentence and "below zero" not in sentence
    assert fidelity._format_cells(experiment, known, ("other", "ruler", 0.1))[0] == "0.500"
    assert "–" not in fidelity._format_cells(experiment, known, ("one", "ruler", 0.1))[0][:8]


def test_seconds_of_few_contexts_are_not_judged():
    rows = {"one": Row("one", "kvzip"), "other": Row("other", "h2o")}
    experiment = SimpleNamespace(rows=rows, seconds={"one": 1.0, "other": 2.0})

    def judge(contexts):
        took = {
            "one": dict.fromkeys(range(contexts), 1.0),
            "other": dict.fromkeys(range(contexts), 2.0),
        }
        return write._judge_faster(experiment, took)

    few = judge(MIN_FOR_INTERVAL - 1)
    assert (few.verdict, few.value, few.low, few.high) == (TOO_FEW, 1.0, None, None)
    assert judge(MIN_FOR_INTERVAL).verdict == HOLDS


def test_an_analysis_of_few_documents_has_no_interval():
    def make(count):
        return DocumentFigures([{"base": {"masses": [1.0]}}] * count, [1] * count)

    assert make(MIN_FOR_INTERVAL - 1).interval(lambda x: x[:, 0], "base", "masses") == [None, None]
    assert make(MIN_FOR_INTERVAL).interval(lambda x: x[:, 0], "base", "masses") == [1.0, 1.0]
    judged = mechanism._judge_claim("c", 1.0, make(1), ("base",), lambda x: x[:, 0, 0])
    assert isinstance(judged, JudgedClaim)
    assert (judged.verdict, judged.value, judged.low) == (TOO_FEW, 1.0, None)
