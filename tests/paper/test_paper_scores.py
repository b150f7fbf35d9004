"""The arithmetic of scores over seeds and of claims, on answers made up here."""

import numpy as np
import pytest

from paper.experiment import Claim, Comparison, Most, Place, Row, claim_above, claim_kept_share
from paper.scores import Scores, compare_orders, compute_margin, compute_spread, judge_claim
from restorekv.errors import RestoreKVError
from restorekv.evaluation.stats import ScoredAnswer, bootstrap_score, draw_resamples

FAMILIES = ("single", "qa")
HERE = Place("ruler", 0.1)


def made_runs(seeds, offset=0.0, documents=6):
    """Answers with random scores; two questions a document, one family each."""
    rng = np.random.default_rng(len(seeds))
    return {
        seed: [
            ScoredAnswer(str(document), family, f"{family}?", "", float(rng.random() + offset))
            for document in range(documents)
            for family in FAMILIES
        ]
        for seed in seeds
    }


def scores_of(tasks=None, **runs):
    """Rows at HERE."""
    return Scores(
        {(row, "ruler", 0.1): found for row, found in runs.items()}, tasks or {("ruler", ""): ()}
    )


def table(runs):
    """(seeds, documents, families) of the scores."""
    return np.array([[answer.score for answer in run] for run in runs.values()]).reshape(
        len(runs), -1, 2
    )


def by_hand(scores: np.ndarray, stream: int) -> np.ndarray:
    """Scores (seeds, documents, 2 families) in points, resampled: documents first, then seeds."""
    drawn = draw_resamples(6, 0)
    each = np.stack([100 * ((drawn @ own) / drawn.sum(1, keepdims=True)).mean(1) for own in scores])
    chosen = np.random.default_rng(stream).integers(len(each), size=each.shape)
    return np.array([each[chosen[:, draw], draw].mean() for draw in range(each.shape[1])])


def test_a_score_is_the_mean_over_seeds_of_each_question():
    runs = made_runs([0, 1, 2])
    scores, points = scores_of(one=runs), 100 * table(runs).mean((1, 2))
    mean, low, high = compute_margin(scores, {("one", HERE): 1})
    assert mean == pytest.approx(100 * table(runs).mean())
    assert (low, high) == pytest.approx(tuple(np.percentile(by_hand(table(runs), 0), (2.5, 97.5))))
    assert list(scores.seeds("one", HERE).values()) == pytest.approx(points)
    assert scores.std("one", HERE) == pytest.approx(points.std(ddof=1))
    assert scores_of(one=made_runs([None])).std("one", HERE) is None


def test_a_margin_is_paired():
    one, other = made_runs([0, 1, 2]), made_runs([0])
    scores = scores_of(one=one, other=other, single={1: made_runs([1])[1]})
    mean, low, high = compute_margin(scores, {("one", HERE): 1, ("other", HERE): -0.4})
    assert mean == pytest.approx(100 * (table(one).mean() - 0.4 * table(other).mean()))
    draws = by_hand(table(one), 0) - 0.4 * by_hand(table(other), 1)
    assert (low, high) == pytest.approx(tuple(np.percentile(draws, (2.5, 97.5))))
    apart = compute_margin(scores, {("single", HERE): 1, ("other", HERE): -1})
    assert apart == pytest.approx(bootstrap_score(made_runs([1])[1], other[0]))


def test_the_seeds_of_a_row_are_drawn_alike_at_all_its_places():
    """At two places that hold the same answers a row of unlike seeds does not differ from
    itself.
    """
    runs, there = made_runs([0, 1, 2]), Place("ruler", 0.2)
    scores = Scores({("one", "ruler", 0.1): runs, ("one", "ruler", 0.2): runs}, {("ruler", ""): ()})
    assert compute_margin(scores, {("one", HERE): 1, ("one", there): -1}) == (0, 0, 0)


def test_seeds_that_differ_widen_the_interval():
    """Two rows that are the same but for their seeds, which lie 6 points apart: nothing may be
    concluded.
    """

    def shifted(points):
        base = made_runs([0])[0]
        return {
            seed: [
                ScoredAnswer(a.context, a.task, a.question, "", a.score + by / 100) for a in base
            ]
            for seed, by in enumerate(points)
        }

    scores = scores_of(one=shifted((3, 3, -3)), other=shifted((-3, -3, 3)))
    value, low, high = compute_margin(scores, {("one", HERE): 1, ("other", HERE): -1})
    assert value == pytest.approx(2) and low < -1 and high > 5


def test_three_seeds_say_little_of_a_deviation():
    std, low, high = compute_spread(scores_of(one=made_runs([0, 1, 2])), ("one", HERE))
    assert low / std == pytest.approx(0.52, abs=0.01) and high / std == pytest.approx(
        6.28, rel=0.03
    )


def test_other_questions_are_refused():
    runs = made_runs([0, 1])
    runs[1][3] = ScoredAnswer("1", "qa", "another", "", 0.0)
    with pytest.raises(RestoreKVError, match="different questions"):
        scores_of(one=runs).check()


def test_parts_means_and_shares():
    """Two parts of one benchmark, a third without counterpart: 80 and 60 of a full cache that has
    100 and 50.
    """

    def run(first, second):
        return {
            None: [
                ScoredAnswer(str(n), task, task, "", score)
                for n in range(6)
                for task, score in (("a", first), ("b", second))
            ]
        }

    parts = ("x", "y", "z")
    scores = scores_of(
        {("ruler", "x"): ("a",), ("ruler", "y"): ("b",)}, one=run(0.8, 0.6), full=run(1.0, 0.5)
    )
    mean, share = Place("ruler", 0.1, parts=parts), Place("ruler", 0.1, parts=parts, relative=True)
    assert scores.points("one", Place("ruler", 0.1, "x")) == pytest.approx(80)
    assert not scores.has(("one", Place("ruler", 0.1, "z")))
    assert compute_margin(scores, {("one", mean): 1}) == pytest.approx((70, 70, 70))
    assert compute_margin(scores, {("one", share): 1}) == pytest.approx((100 * 70 / 75,) * 3)
    assert compute_margin(scores, {("full", share): 1}) == pytest.approx((100,) * 3)


def raised(base, by, seeds=(0, 1)):
    return {
        seed: [ScoredAnswer(a.context, a.task, a.question, "", a.score + by) for a in base[None]]
        for seed in seeds
    }


def comparison(paper, claims, rows=None):
    made = {
        name: Row(name, "kvzip", paper={HERE: score}, paper_std={HERE: 0.5})
        for name, score in paper.items()
    }
    return Comparison(
        "x", "Table 0", "tab:x", "t", "m", {**made, **(rows or {})}, (HERE,), tuple(claims)
    )


def test_claims_are_judged():
    claims = (
        claim_above("full", "base", HERE, "more"),
        claim_above("base", "full", HERE, "less"),
        claim_above("full", "again", HERE, "same"),
        claim_kept_share("part", 0.5, "full", "base", HERE, "half"),
        claim_kept_share("part", 0.9, "full", "base", HERE, "nearly all"),
        Claim("steady", {}, plus=1, spread=("full", HERE)),
        claim_above("missing", "base", HERE, "unknown"),
    )
    experiment = comparison(
        {"base": 40, "part": 62, "full": 70, "again": 70, "missing": 70}, claims
    )
    base = made_runs([None])
    scores = scores_of(
        base=base, full=raised(base, 0.5), part=raised(base, 0.4), again=raised(base, 0.5)
    )
    told = [judge_claim(claim, experiment, scores) for claim in claims]
    assert [each.verdict for each in told] == [
        "holds",
        "does not hold",
        "within noise",
        "holds",
        "does not hold",
        "holds",
        "not measured",
    ]
    assert told[0].value == pytest.approx(50) and told[0].paper == (30,)
    assert told[3].value == pytest.approx(40 - 25) and told[3].paper[0] == pytest.approx(22 - 15)
    assert told[4].value == pytest.approx(40 - 45) and told[5].value == pytest.approx(1)
    assert told[5].paper == (0.5,) and told[6].value is None
    order = compare_orders(experiment, scores, HERE)
    assert len(order["as in the paper"]) == 5 and not order["the other way"]
    turned = compare_orders(experiment, scores_of(base=raised(base, 0.5), part=base), HERE)
    assert turned["the other way"] == [["part", "base"]]


def test_a_count_is_judged_by_the_resampled_sets():
    gain = [{(name, HERE): 1, ("base", HERE): -1} for name in ("up", "also", "down")]
    experiment = comparison({"base": 40, "up": 50, "also": 41, "down": 30}, ())
    base = made_runs([None])
    scores = scores_of(
        base=base, up=raised(base, 0.2), also=raised(base, 0.1), down=raised(base, -0.2)
    )
    told = {
        least: judge_claim(Most("most", tuple(gain), least), experiment, scores)
        for least in (1, 2, 3)
    }
    assert [told[least].verdict for least in (1, 2, 3)] == ["holds", "holds", "does not hold"]
    assert (told[2].value, told[2].low, told[2].high, told[2].of, told[2].paper) == (
        2,
        2,
        2,
        3,
        (2,),
    )
    base[None][0] = ScoredAnswer("0", "single", "single?", "", 1.0)
    other = {
        None: [ScoredAnswer(a.context, a.task, a.question, "", 1 - a.score) for a in base[None]]
    }
    mixed = scores_of(base=base, up=other, also=raised(base, 0.1), down=raised(base, -0.2))
    assert judge_claim(Most("most", tuple(gain), 2), experiment, mixed).verdict == "within noise"
    assert (
        judge_claim(Most("most", tuple(gain), 2), experiment, scores_of(base=base)).verdict
        == "not measured"
    )


def test_a_figure_that_the_paper_does_not_give_is_none():
    experiment = comparison({"base": 40}, (), {"other": Row("other", "kvzip")})
    base = made_runs([None])
    told = judge_claim(
        claim_above("other", "base", HERE, ""),
        experiment,
        scores_of(base=base, other=raised(base, 0.1)),
    )
    assert told.paper == (None,) and told.verdict == "holds"
