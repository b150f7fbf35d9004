"""What stands beside the paper's scores: tasks with nothing to lose, several benchmarks as one,
fidelity.
"""

from dataclasses import replace

import numpy as np
import pytest

from paper import comparison_tables, fidelity, plan, record
from paper.experiment import Place
from paper.experiments import choose_experiments
from paper.markdown import render_blocks
from paper.setting import Bench, make_tiny_setting
from restorekv.evaluation.stats import draw_resamples
from tests.helpers.paper_results import finished

TIGHT = Place("ruler", 0.0625)


@pytest.fixture
def setting(tmp_path):
    """The tiny one with two tasks for RULER; for LongBench two benchmarks of two categories
    each.
    """
    ruler = Bench(
        "RULER-4K",
        "tiny:count=6",
        {"": ("single", "cwe")},
        "Something stands in.",
        name="The suite",
    )
    parts = {"S-QA": ("qa", "freeform"), "M-QA": ("vt",), "Synth": ("single", "cwe")}
    both = Bench(
        "LongBench", "tiny:count=6", parts, "Something.", more=("tiny:count=6,split=long",)
    )
    made = make_tiny_setting(tmp_path / "out", 6)
    return replace(made, benches={**made.benches, "ruler": ruler, "longbench": both})


@pytest.fixture
def measure(setting, tmp_path):
    """Make results of an experiment: (evictor, restored, spec) -> what is said of each task."""

    def made(experiment, said):
        found = {}
        for cell in plan.list_cells([experiment], setting):
            key = (cell.evictor, cell.restored, cell.benchmark)
            if key in said:
                found[cell] = finished(tmp_path / "cells", cell, said[key])
        return found

    return made


SUITE, LONG = "tiny:count=6", "tiny:count=6,split=long"
FAST, SINGLE_PROCESS, FULL, KVZIP = (
    ("fastkvzip", True),
    ("fastkvzip", False),
    ("full", False),
    ("kvzip", False),
)


def said(points, kl=0.5, tokens=2, same=True):
    """Every document alike."""
    return {task: [(score, kl, tokens, same)] * 6 for task, score in points.items()}


def answers(full):
    """A cell for each row; the full cache's scores are given."""
    points = {
        FULL: full,
        KVZIP: {"single": 0.6, "cwe": 0.4},
        SINGLE_PROCESS: {"single": 0.5, "cwe": 0.0},
        FAST: {"single": 0.7, "cwe": 0.1},
    }
    return {(*row, SUITE): said(of) for row, of in points.items()}


def texts(blocks):
    return "\n".join(render_blocks(list(blocks)))


# ---- tasks with nothing to lose


def test_a_task_below_ten_is_left_out_of_means(setting, measure):
    (fast,) = choose_experiments("fast-kvzip", setting)
    results = measure(fast, answers({"single": 0.8, "cwe": 0.09}))
    scores = plan.collect_scores(fast, setting, results)
    assert scores.left_out == {"ruler": ["cwe"]} and scores.points("kvzip", TIGHT) == pytest.approx(
        60
    )
    text = texts(comparison_tables.make_tables(fast, setting, scores, "ruler"))
    assert "Left out of means, because the full cache scores below 10: cwe." in text
    assert "| KVzip | 60.0 (60.0 to 60.0) | *59.0* |" in text and "The suite (for RULER-4K)" in text


def test_at_ten_it_counts(setting, measure):
    (fast,) = choose_experiments("fast-kvzip", setting)
    scores = plan.collect_scores(fast, setting, measure(fast, answers({"single": 0.8, "cwe": 0.1})))
    assert scores.left_out == {"ruler": []} and scores.points("kvzip", TIGHT) == pytest.approx(50)
    assert "below 10" not in texts(comparison_tables.make_tables(fast, setting, scores, "ruler"))


def test_where_every_task_is_below_the_mean_is_over_all(setting, measure):
    (fast,) = choose_experiments("fast-kvzip", setting)
    scores = plan.collect_scores(
        fast, setting, measure(fast, answers({"single": 0.01, "cwe": 0.09}))
    )
    assert scores.points("kvzip", TIGHT) == pytest.approx(50)
    text = texts(comparison_tables.make_tables(fast, setting, scores, "ruler"))
    assert "below 10 on every task: nothing to lose" in text and "Left out" not in text


def test_a_task_of_another_part_is_not_named(setting, measure):
    """The suite has more families than those that stand for RULER."""
    (fast,) = choose_experiments("fast-kvzip", setting)
    every = {
        key: told | said({"choice4": 0.05})
        for key, told in answers({"single": 0.8, "cwe": 0.5}).items()
    }
    assert plan.collect_scores(fast, setting, measure(fast, every)).left_out == {"ruler": []}


def test_without_the_full_cache_everything_counts(setting, measure):
    (fast,) = choose_experiments("fast-kvzip", setting)
    told = {key: value for key, value in answers({}).items() if key[0] != "full"}
    scores = plan.collect_scores(fast, setting, measure(fast, told))
    assert scores.points("kvzip", TIGHT) == pytest.approx(50)


# ---- several benchmarks as one


def several(full):
    first = {"single": 0.8, "cwe": 0.6}
    return {
        (*FULL, SUITE): said(first),
        (*FULL, LONG): said(full),
        (*KVZIP, SUITE): said({"single": 0.4, "cwe": 0.2}),
        (*KVZIP, LONG): said({"qa": 0.5, "freeform": 0.1, "vt": 0.7}),
    }


def test_parts_of_several_benchmarks(setting, measure):
    """Documents have the same names in both; Avg leaves out M-QA, on which the full cache scores
    too little.
    """
    (longbench,) = choose_experiments("longbench", setting)
    results = measure(longbench, several({"qa": 0.5, "freeform": 0.02, "vt": 0.05}))
    scores = plan.collect_scores(longbench, setting, results)
    assert scores.left_out == {"longbench": ["freeform", "vt"]}
    points = {
        part: scores.points("kvzip", Place("longbench", 0.125, part))
        for part in ("S-QA", "M-QA", "Synth")
    }
    assert points == pytest.approx({"S-QA": 50, "M-QA": 70, "Synth": 30})
    mean = next(place for place in longbench.places if place.parts and not place.relative)
    share = next(place for place in longbench.places if place.relative)
    assert scores.points("kvzip", mean) == pytest.approx((50 + 30) / 2)
    assert scores.points("kvzip", share) == pytest.approx(100 * 40 / 60)
    assert len({answer.context for answer in scores.runs["kvzip", "longbench", 0.125][None]}) == 12
    text = texts(comparison_tables.make_tables(longbench, setting, scores, "longbench"))
    assert "below 10: freeform." in text and "every task of M-QA, which averages leave out" in text
    assert "LongBench (stand-in), r = 0.125" in text


def test_a_row_needs_all_its_benchmarks(setting, measure):
    (longbench,) = choose_experiments("longbench", setting)
    told = several({"qa": 0.5, "freeform": 0.5, "vt": 0.5})
    del told[(*KVZIP, LONG)]
    results = measure(longbench, told)
    assert not any(row == "kvzip" for row, *_ in plan.find_measured(longbench, setting, results))
    assert plan.collect_scores(longbench, setting, results).has(
        ("full", Place("longbench", 0.125, "S-QA"))
    )


def test_what_fails_on_any_of_them_is_told(setting):
    (longbench,) = choose_experiments("longbench", setting)
    told = plan.list_unreachable(longbench, setting, {(LONG, "kvzip"): "no data"})
    assert told == ["LongBench: no data"]


# ---- fidelity


def by_hand(kls, tokens):
    """The mean over tokens of every resampled set of documents."""
    drawn = draw_resamples(len(kls), 0)
    return (drawn * (kls * tokens)).sum(1) / (drawn * tokens).sum(1)


def test_fidelity_weighs_tokens_and_pairs_rows(setting, measure):
    """Also of the task that means leave out."""
    (fast,) = choose_experiments("fast-kvzip", setting)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (6, 2))
    kls = {
        row: rng.random((6, 2)) * scale
        for row, scale in ((SINGLE_PROCESS, 1.0), (FAST, 0.2), (KVZIP, 0.5))
    }
    told = answers({"single": 0.8, "cwe": 0.0})
    for row, values in kls.items():
        told[(*row, SUITE)] = {
            task: [
                (0.5, float(values[turn, at]), int(tokens[turn, at]), turn == 0)
                for turn in range(6)
            ]
            for at, task in enumerate(("single", "cwe"))
        }
    results = measure(fast, told)
    known = fidelity.collect_fidelity(fast, setting, plan.find_measured(fast, setting, results))
    rows = {row["row"]: row for row in fidelity.list_figures(fast, known)}
    assert set(rows) == {"kvzip", "fastkvzip", "fastkvzip restored"}, (
        "the full cache is what they are compared with"
    )
    per = {row: (values * tokens).sum(1) / tokens.sum(1) for row, values in kls.items()}
    draws = {row: by_hand(value, tokens.sum(1)) for row, value in per.items()}
    own, mine = rows["fastkvzip"], rows["fastkvzip restored"]
    assert own["kl"] == pytest.approx((kls[SINGLE_PROCESS] * tokens).sum() / tokens.sum())
    assert (own["kl_low"], own["kl_high"]) == pytest.approx(
        tuple(np.percentile(draws[SINGLE_PROCESS], (2.5, 97.5)))
    )
    assert (
        own["same"] == pytest.approx(100 / 6)
        and own["answer_tokens"] == tokens.sum()
        and "kl_change" not in own
    )
    assert (
        mine["kl_change"] == pytest.approx(mine["kl"] - own["kl"])
        and mine["against"] == "fastkvzip"
    )
    apart = np.percentile(draws[FAST] - draws[SINGLE_PROCESS], (2.5, 97.5))
    assert (mine["change_low"], mine["change_high"]) == pytest.approx(tuple(apart))
    text = texts(fidelity.make_tables(fast, setting, known, "ruler"))
    assert f"| KVzip | {rows['kvzip']['kl']:.3f} (" in text and "fidelity to the full cache" in text
    (summed,) = fidelity.count_lowered(fast, known)
    assert (
        summed
        == "Restoring lowers KL(full || cache) in 1 of 1 pairs; the interval is below zero in 1 "
        "and above zero in 0."
    )


def test_seeds_are_alike_in_fidelity():
    """Two seeds with other caches: the mean of both."""
    results = [
        type(
            "R",
            (),
            {"lines": [{"answers": [{"task": "a", "kl": kl, "answer_tokens": 3, "same": same}]}]},
        )
        for kl, same in ((0.2, True), (0.4, False))
    ]
    told = fidelity.load_fidelity({0: results[:1], 1: results[1:]}, ())
    assert told.kl == pytest.approx(0.3) and told.same == 50


def test_without_answers_there_is_no_fidelity(setting):
    (fast,) = choose_experiments("fast-kvzip", setting)
    assert (
        list(fidelity.make_tables(fast, setting, {}, "ruler"))
        == []
        == list(fidelity.count_lowered(fast, {}))
    )


# ---- what stands behind


def test_the_full_cache_by_task_and_what_caches_held(setting, measure):
    (fast,) = choose_experiments("fast-kvzip", setting)
    results = measure(fast, answers({"single": 0.8, "cwe": 0.09}))
    text = texts(record.make_section(results).blocks)
    assert "| Tiny suite | tiny:count=6 | single | 6 | 80.0 (80.0 to 80.0) | counts |" in text
    assert "| Tiny suite | tiny:count=6 | cwe | 6 | 9.0 (9.0 to 9.0) | below 10 |" in text
    assert "| 0.0625 | KVzip, Fast KVzip, Fast KVzip + RestoreKV | 60 | 78 | 9 |" in text
    held = record.collect_sizes(list(results.values()))
    assert len(held) == 4 and all(
        each["bytes"] == 9 and each["samples"] == 6 for each in held.values()
    )
    assert record.make_section({}) is None
