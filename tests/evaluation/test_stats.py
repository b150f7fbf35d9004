"""Scores worked out by hand, and intervals that are bootstraps over contexts."""

import numpy as np
import pytest

from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid_tables import count_gains
from restorekv.evaluation.stats import (
    MIN_FOR_INTERVAL,
    ScoredAnswer,
    bootstrap_ratio,
    bootstrap_score,
    check_same_questions,
    compute_mean_score,
    compute_task_means,
    draw_resamples,
    drop_tasks,
    find_tasks_without_loss,
    summarize_scores,
)


def answers(scores: dict[tuple[int, str], float]) -> list[ScoredAnswer]:
    return [
        ScoredAnswer(document, family, "", "", score)
        for (document, family), score in scores.items()
    ]


def test_the_score_is_the_mean_over_families():
    right = {(0, "qa"): 1.0, (1, "qa"): 0.0, (2, "qa"): 0.0, (0, "vt"): 1.0}
    twice = {(context + 3, task): score for (context, task), score in right.items()}
    mean, low, high = bootstrap_score(answers(right | twice))
    assert mean == pytest.approx(100 * (1 / 3 + 1) / 2)
    assert low <= mean <= high


def test_the_interval_agrees_with_the_normal_one_for_one_family():
    rng = np.random.default_rng(1)
    values = rng.random(400)
    mean, low, high = bootstrap_score(
        answers({(index, "qa"): float(value) for index, value in enumerate(values)})
    )
    half = 1.96 * 100 * values.std(ddof=1) / np.sqrt(len(values))
    assert (low, high) == (pytest.approx(mean - half, abs=0.4), pytest.approx(mean + half, abs=0.4))


def test_a_resample_averages_over_the_tasks_that_it_drew():
    """Task by task and resample by resample, of a task that most resamples do not draw."""
    rng = np.random.default_rng(2)
    scores = {(n, "common"): float(rng.random()) for n in range(8)}
    scores |= {(7, "rare"): 1.0, (6, "rare"): 0.25}
    base = {key: score * float(rng.random()) for key, score in scores.items()}
    found = []
    for drawn in draw_resamples(8, 0):
        means = []
        for task in ("common", "rare"):
            own = [key for key in scores if key[1] == task]
            total = sum(drawn[key[0]] for key in own)
            if total:
                gain = sum(drawn[key[0]] * (scores[key] - base[key]) for key in own)
                means.append(100 * gain / total)
        found.append(np.mean(means))
    assert any(drawn[6] == drawn[7] == 0 for drawn in draw_resamples(8, 0))
    exact = np.percentile(found, (2.5, 97.5))
    assert bootstrap_score(answers(scores), answers(base))[1:] == pytest.approx(tuple(exact))


def test_a_ratio_is_of_totals_and_leaves_out_resamples_without_weight():
    sums, weights = np.array([3.0, 1.0] + [0.0] * 5), np.array([4.0, 2.0] + [0.0] * 5)
    other_sums, other_weights = np.array([1.0, 1.0] + [0.0] * 5), np.array([5.0, 1.0] + [0.0] * 5)
    ratios = []
    for drawn in draw_resamples(7, 0):
        if drawn[0] or drawn[1]:
            own = (drawn @ sums) / (drawn @ weights)
            ratios.append(own - (drawn @ other_sums) / (drawn @ other_weights))
    assert len(ratios) < len(draw_resamples(7, 0))
    exact = 4 / 6 - 2 / 6, *np.percentile(ratios, (2.5, 97.5))
    found = bootstrap_ratio(sums, weights, (other_sums, other_weights))
    assert found == pytest.approx(exact)


def test_a_ratio_has_the_percentiles_of_its_resamples():
    """One text has all the weight: where it is drawn, once or often, the ratio is its own."""
    rng = np.random.default_rng(3)
    sums, weights = rng.random(40), rng.random(40)
    drawn = draw_resamples(40, 0)
    exact = np.percentile((drawn @ sums) / (drawn @ weights), (2.5, 97.5))
    assert bootstrap_ratio(sums, weights)[1:] == pytest.approx(tuple(exact), abs=1e-12)
    alone = np.eye(1, 9)[0]
    with np.errstate(all="raise"):
        assert bootstrap_ratio(0.25 * alone, alone) == (0.25, 0.25, 0.25)
    once = draw_resamples(9, 0)[:, 0]
    ramp = np.arange(9.0)
    ratios = (draw_resamples(9, 0) @ ramp)[once > 0] / once[once > 0]
    exact = np.percentile(ratios, (2.5, 97.5))
    assert bootstrap_ratio(ramp, alone)[1:] == pytest.approx(tuple(exact))


def test_a_paired_gain_of_one_everywhere_has_no_width():
    base = answers({(index, "qa"): 0.0 for index in range(30)})
    better = answers({(index, "qa"): 1.0 for index in range(30)})
    assert bootstrap_score(better, base) == (100.0, 100.0, 100.0)


def test_a_context_may_count_once_however_much_it_is_asked():
    """KVzip's rule: context 0 has three questions, context 1 has one."""
    told = [ScoredAnswer(0, "qa", str(turn), "", 1.0) for turn in range(3)] + [
        ScoredAnswer(1, "qa", "0", "", 0.0)
    ]
    assert compute_mean_score(told) == 75 and compute_mean_score(told, by_context=True) == 50
    assert (
        bootstrap_score(told, by_context=True)[0] == 50
        and summarize_scores(told, told, by_context=True)["gain"] == 0
    )
    other = [*told, ScoredAnswer("two", "vt", "0", "", 1.0)]
    assert (
        compute_task_means(other) == {"qa": 75, "vt": 100}
        and compute_task_means(other, by_context=True)["qa"] == 50
    )
    # Of two tasks the mean, whatever the number of their questions.
    assert compute_mean_score(other) == 87.5
    assert compute_mean_score(other, by_context=True) == 75


def test_ten_points_are_something_to_lose():
    told = answers({(0, "ten"): 0.1, (0, "less"): 0.0999})
    assert find_tasks_without_loss(told) == ["less"]
    assert drop_tasks(told, ["less"]) == told[:1]
    assert drop_tasks(told, ["less", "ten"]) == told
    # The mean over contexts decides where scores are that.
    told = [ScoredAnswer(0, "qa", f"{turn}", "", 0.0) for turn in range(9)]
    told.append(ScoredAnswer(1, "qa", "0", "", 0.9))
    assert find_tasks_without_loss(told) == ["qa"]
    assert find_tasks_without_loss(told, by_context=True) == []


def test_runs_that_were_asked_other_questions_are_not_compared():
    told = answers({(0, "qa"): 1.0, (1, "qa"): 0.0})
    for other in (answers({(0, "qa"): 1.0, (2, "qa"): 0.0}), told[::-1], told[:1]):
        with pytest.raises(RestoreKVError, match="different questions"):
            bootstrap_score(told, other)
        # One of several runs is enough.
        with pytest.raises(RestoreKVError, match="different questions"):
            check_same_questions([told, told, other])


def test_few_contexts_have_no_interval_to_show():
    """Over one context a bootstrap has no width, over two it excludes zero by chance as often as
    not.
    """
    for contexts in (1, MIN_FOR_INTERVAL - 1, MIN_FOR_INTERVAL):
        mine, base = (
            [ScoredAnswer(f"{n}", "f", "q", "", score) for n in range(contexts)]
            for score in (0.6, 0.5)
        )
        found = summarize_scores(mine, base)
        assert found["contexts"] == contexts
        # What others make of the figures shows none either.
        for figure in ("low", "high", "gain_low", "gain_high"):
            assert (found[figure] is None) == (contexts < MIN_FOR_INTERVAL)
        ratio = bootstrap_ratio(np.arange(contexts, dtype=float), np.ones(contexts))
        assert (ratio[1:] == (None, None)) == (contexts < MIN_FOR_INTERVAL)
        assert count_gains([{**found, "kind": "all"}]).startswith(
            f"1 of 1 paired cells improve, {int(contexts == MIN_FOR_INTERVAL)} of them with"
        )
