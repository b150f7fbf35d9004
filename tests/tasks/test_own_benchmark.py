"""A benchmark of somebody's own: what its class and its figures are checked for."""

from dataclasses import dataclass

import numpy
import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.tasks import Benchmark, Question, Sample

ASKED = Question("0/q", "codes", "Which code?", ("4711",), max_new_tokens=4)


@dataclass(frozen=True)
class Mine(Benchmark):
    name = "mine"
    title = "Mine"
    license = "ours"
    metric = "whether it is there"
    data = "mine.jsonl"

    def load_samples(self, tokenizer, protocol):
        yield Sample("0", "The code is 4711.", (ASKED,))

    def score(self, question, prediction):
        return float(question.answers[0] in prediction)


def with_score(value):
    return type("Scored", (Mine,), {"score": lambda *_: value})()


@pytest.mark.parametrize(
    "value, figure",
    [
        (1, 1.0),
        (True, 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        (1 + 1e-9, 1.0),
        (-1e-9, 0.0),
    ],
)
def test_a_score_may_be_any_number(value, figure):
    scored = with_score(value).score_answer(ASKED, "")
    assert scored == {"score": figure} and type(scored["score"]) is float


@pytest.mark.parametrize("value", [None, "yes", "1", float("nan"), 100.0, -3, [0.5], torch.ones(2)])
def test_a_score_that_is_none_is_refused_with_the_first_answer(value):
    with pytest.raises(RestoreKVError, match=r"score\(\) of Mine gave .*a number from 0 to 1"):
        with_score(value).score_answer(ASKED, "")


def test_further_metrics_are_checked_too():
    metrics = {"exact": numpy.float64(1), "close": "no"}
    benchmark = type("More", (Mine,), {"compute_metrics": lambda *_: metrics})()
    with pytest.raises(RestoreKVError, match="The metric close of Mine gave 'no'"):
        benchmark.score_answer(ASKED, "4711")
    metrics["close"] = 0
    scored = benchmark.score_answer(ASKED, "4711")
    assert scored == {"score": 1.0, "metrics": {"exact": 1.0, "close": 0.0}}


@pytest.mark.parametrize("answers", ["4711", ("4711", 12), [None]])
def test_answers_are_texts_and_not_the_letters_of_one(answers):
    with pytest.raises(RestoreKVError, match=r"answers of the question '0/q' .* tuple of texts"):
        Question("0/q", "codes", "Which code?", answers, max_new_tokens=4)


@pytest.mark.parametrize("attribute", ["license", "metric", "data"])
def test_a_benchmark_says_what_it_is(attribute):
    words = {"name": "a", "title": "b", "license": "c", "metric": "d", "data": "e"}
    del words[attribute]
    methods = {"load_samples": Mine.load_samples, "score": Mine.score}
    with pytest.raises(RestoreKVError, match=f"Silent does not say its {attribute}"):
        type("Silent", (Benchmark,), {**words, **methods})().to_json()


def test_a_benchmark_without_a_title_is_refused_before_its_texts_are_read(tiny_tokenizer):
    words = {"name": "a", "license": "c", "metric": "d", "data": "e"}
    methods = {"load_samples": lambda *_: pytest.fail("read"), "score": Mine.score}
    silent = type("Silent", (Benchmark,), {**words, **methods})()
    with pytest.raises(RestoreKVError, match="Silent does not say its title"):
        silent.choose_samples(tiny_tokenizer, "kvpress")


def test_rows_in_place_of_samples_are_refused(tiny_tokenizer):
    rows = type("Rows", (Mine,), {"load_samples": lambda *_: [{"text": "The code is 4711."}]})()
    with pytest.raises(RestoreKVError, match=r"load_samples\(\) of Mine gave .* dict; .* Samples"):
        rows.choose_samples(tiny_tokenizer, "kvpress")
