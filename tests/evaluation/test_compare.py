"""Two evictors compared with each other, context by context."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from restorekv import tasks
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation.compare import compare_results, select_result
from restorekv.evaluation.fidelity import tally_divergence
from restorekv.evaluation.frame import make_frame
from restorekv.evaluation.run import run_grid
from restorekv.evaluation.stats import compute_mean_score, draw_resamples
from tests.helpers.grid_world import Plain, grid, save_world


@pytest.fixture(scope="module")
def cells(tmp_path_factory, tiny_tokenizer):
    """The full cache, and three evictors at one ratio, on twelve contexts; other questions too."""
    folder = tmp_path_factory.mktemp("compare")
    model = str(save_world(folder, tiny_tokenizer) / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.BENCHMARKS, "plain", Plain)
        evictors = ("kvzip", "random", "knorm")
        done = run_grid(grid(model, "plain:contexts=12", evictors, ratios=("0.3",)), folder / "run")
        other = run_grid(
            grid(model, "plain:contexts=12,questions=2", ("kvzip",), ("0.3",)), folder / "other"
        )
        yield done, other[1]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)


def test_scores_and_divergences_are_paired(cells):
    (full, kvzip, random, _), _ = cells
    found = compare_results(kvzip, random)
    assert found["contexts"] == 12 and found["questions"] == 36
    first, second = (compute_mean_score(result.answers) for result in (kvzip, random))
    assert (found["score_first"], found["score_second"]) == (first, second)
    assert found["score_gain"] == pytest.approx(second - first)
    assert found["score_low"] <= found["score_gain"] <= found["score_high"]
    # By hand: all divergence of the answers over all their tokens.
    totals = []
    for result in (kvzip, random):
        answers = [answer for line in result.lines for answer in line["answers"]]
        weighted = sum(answer["kl"] * answer["answer_tokens"] for answer in answers)
        totals.append(weighted / sum(answer["answer_tokens"] for answer in answers))
    assert found["kl_gain"] == pytest.approx(np.diff(totals)[0], abs=1e-9)
    assert found["kl_low"] <= found["kl_gain"] <= found["kl_high"]
    assert compare_results(full, kvzip)["kl_first"] == 0


def test_divergences_of_answers_of_other_lengths_are_those_of_each_cell(cells):
    """Where rounding let one full cache end an answer sooner, such as that of a streamed text."""
    (_, kvzip, random, _), _ = cells
    other = replace(random)
    other.__dict__["lines"] = copy.deepcopy(random.lines)
    for line in other.lines[::3]:
        line["answers"][0]["answer_tokens"] += 5
    found = compare_results(kvzip, other)
    assert found["kl_gain"] == pytest.approx(found["kl_second"] - found["kl_first"], abs=1e-12)
    sides = []
    for result in (kvzip, other):
        sums, tokens = tally_divergence([line["answers"] for line in result.lines])
        drawn = _draw_contexts(12)
        sides.append(sums[drawn].sum(1) / tokens[drawn].sum(1))
    low, high = np.percentile(sides[1] - sides[0], (2.5, 97.5))
    assert (found["kl_low"], found["kl_high"]) == pytest.approx((low, high))


def _draw_contexts(contexts: int) -> np.ndarray:
    """Return the contexts of every resample, one by one."""
    counts = draw_resamples(contexts, 0)
    return np.stack([np.repeat(np.arange(contexts), row) for row in counts])


def test_one_result_is_selected_or_none(cells):
    """A folder that was extended holds the smaller run, too, which must not be taken unseen."""
    (full, kvzip, random, knorm), other = cells
    every = [full, kvzip, random, knorm, other]
    assert select_result(every, evictor="random", ratio="0.3", adapter=None) is random
    assert select_result(every, evictor="random", ratio=0.3, adapter=None) is random
    assert select_result(every, evictor="full") is full
    assert select_result(every, evictor="kvzip", benchmark=kvzip.cell.benchmark) is kvzip
    said = (
        r"2 cells have evictor='kvzip', ratio='0\.3'; name one by benchmark \(plain:contexts=12, "
    )
    with pytest.raises(RestoreKVError, match=said):
        select_result(every, evictor="kvzip", ratio="0.3")
    with pytest.raises(RestoreKVError, match="No cell has evictor='snapkv'"):
        select_result(every, evictor="snapkv")
    with pytest.raises(RestoreKVError, match="no field 'evicter'; it has model, benchmark"):
        select_result(every, evicter="kvzip")


def test_a_cell_does_not_differ_from_itself(cells):
    (_, kvzip, *_), _ = cells
    found = compare_results(kvzip, kvzip)
    assert found["score_gain"] == found["score_low"] == found["score_high"] == 0
    assert found["kl_gain"] == found["kl_low"] == found["kl_high"] == 0


def test_the_other_way_round_is_the_other_sign(cells):
    (_, kvzip, random, _), _ = cells
    one, other = compare_results(kvzip, random), compare_results(random, kvzip)
    assert one["kl_gain"] == pytest.approx(-other["kl_gain"])
    assert one["score_gain"] == pytest.approx(-other["score_gain"])


def test_contexts_count_alike_where_the_protocol_averages_them(cells, monkeypatch):
    (_, kvzip, random, _), _ = cells
    first, second = replace(kvzip), replace(random)
    for step, other, result in ((3, first, kvzip), (5, second, random)):
        other.__dict__["lines"] = copy.deepcopy(result.lines)
        for number, line in enumerate(other.lines):
            for turn, answer in enumerate(line["answers"]):
                answer["score"] = (number * step + turn) % 4 / 3
        # Half of the contexts have one question of the first task, the others two.
        for line in other.lines[::2]:
            del line["answers"][2]
    found = []
    for by_context in (False, True):
        monkeypatch.setattr(Plain, "averages_contexts", lambda *_, told=by_context: told)
        figures = compare_results(first, second)
        one, two = (compute_mean_score(each.answers, by_context) for each in (first, second))
        assert (figures["score_first"], figures["score_second"]) == (one, two)
        assert figures["score_gain"] == pytest.approx(two - one, abs=1e-9)
        found.append((one, two))
    assert found[0] != found[1]


def test_tasks_on_which_the_full_cache_fails_are_left_out(cells, monkeypatch):
    (full, kvzip, random, _), _ = cells
    monkeypatch.setattr(
        "restorekv.evaluation.compare.find_tasks_without_loss", lambda answers, _: ["task_0"]
    )
    found = compare_results(kvzip, random, full)
    assert found["left_out"] == ["task_0"]
    kept = [answer for answer in kvzip.answers if answer.task == "task_1"]
    assert found["score_first"] == compute_mean_score(kept)


def test_what_says_which_tasks_are_left_out_is_the_full_cache_of_the_same(cells):
    """Another cell's scores would leave out other tasks without a word."""
    (full, kvzip, random, _), _ = cells
    with pytest.raises(RestoreKVError, match="is not of the full cache"):
        compare_results(kvzip, random, kvzip)
    other_protocol = replace(full, cell=replace(full.cell, protocol="kvzip"))
    with pytest.raises(RestoreKVError, match="not made with the same protocol"):
        compare_results(kvzip, random, other_protocol)
    other_model = replace(full, identity={**full.identity, "fingerprint": "0" * 16})
    with pytest.raises(RestoreKVError, match="are of two models"):
        compare_results(kvzip, random, other_model)
    running = replace(full)
    running.__dict__["lines"] = full.lines[:5]
    with pytest.raises(RestoreKVError, match="has not answered all questions that are compared"):
        compare_results(kvzip, random, running)


def test_other_models_and_texts_are_refused(cells):
    (_, kvzip, random, _), _ = cells
    other_model = replace(random, identity={**random.identity, "fingerprint": "0" * 16})
    with pytest.raises(RestoreKVError, match="are of two models"):
        compare_results(kvzip, other_model)
    for name, value in (("dtype", "bfloat16"), ("prefix_policy", "free")):
        otherwise = replace(random, identity={**random.identity, name: value})
        with pytest.raises(RestoreKVError, match=f"not made with the same {name}"):
            compare_results(kvzip, otherwise)
    protocol = {**random.identity["protocol"], "before": "<|user|>"}
    yarn = {**random.identity["rope"], "factor": 4.0}
    for name, change in (("chat template", {"protocol": protocol}), ("RoPE", {"rope": yarn})):
        otherwise = replace(random, identity={**random.identity, **change})
        with pytest.raises(RestoreKVError, match=f"not made with the same {name}"):
            compare_results(kvzip, otherwise)
    other_protocol = replace(random, cell=replace(random.cell, protocol="kvzip"))
    with pytest.raises(RestoreKVError, match="not made with the same protocol"):
        compare_results(kvzip, other_protocol)
    edited = replace(random)
    edited.lines[3]["context"] = "0" * 12
    with pytest.raises(RestoreKVError, match="about different texts"):
        compare_results(kvzip, edited)


def test_other_questions_are_refused(cells):
    (_, kvzip, *_), other = cells
    with pytest.raises(RestoreKVError, match="asked different questions"):
        compare_results(kvzip, other)


def test_contexts_that_one_cell_lacks_are_counted(cells):
    (_, kvzip, random, _), _ = cells
    first, second = replace(kvzip), replace(random)
    first.__dict__["lines"] = kvzip.lines[:9]
    second.__dict__["lines"] = random.lines[2:]
    said = r"answered 9 contexts and .* 10; only the 7 that both have answered are compared"
    with pytest.warns(RestoreKVWarning, match=said):
        assert compare_results(first, second)["contexts"] == 7
    # One that has answered all of the other's, and more.
    with pytest.warns(RestoreKVWarning, match=r"answered 9 contexts and .* 12; only the 9 that"):
        assert compare_results(first, random)["contexts"] == 9
    second.__dict__["lines"] = random.lines[9:]
    with pytest.raises(RestoreKVError, match="share no context"):
        compare_results(first, second)


def test_cells_of_the_same_contexts_are_compared_without_a_word(cells, recwarn):
    (_, kvzip, random, _), _ = cells
    compare_results(kvzip, random)
    assert not [each for each in recwarn if issubclass(each.category, RestoreKVWarning)]


def test_what_is_no_cell_is_refused(cells):
    (full, kvzip, *_), _ = cells
    for wrong in ("kvzip", None, kvzip.cell):
        with pytest.raises(RestoreKVError, match=r"A cell must be a Result, as load_results"):
            compare_results(kvzip, wrong)
    with pytest.raises(RestoreKVError, match=r"A cell must be a Result"):
        compare_results(kvzip, kvzip, full="full")
    for results in (None, "runs/own", [full, "kvzip"]):
        with pytest.raises(RestoreKVError, match=r"load_results"):
            make_frame(results)
