"""What is no compressed context, no question and no key is refused with a sentence."""

import pytest

from restorekv import ask_many, compose
from restorekv.errors import RestoreKVError
from tests.helpers.compressing import QUESTIONS, make_small


@pytest.fixture(scope="module")
def small(tiny_tokenizer):
    return make_small(tiny_tokenizer)


PAIRS = "ask_many takes a list of pairs"
CASES = {
    "a number for a context": (lambda small: ask_many([(1, "Who?")]), PAIRS),
    "no question": (
        lambda small: ask_many([(small, None)]),
        "A question is text, or a list of texts, not NoneType",
    ),
    "a number in a list of questions": (
        lambda small: ask_many([(small, ["Who?", 1])]),
        "A question is text, not int",
    ),
    "one pair without a list": (lambda small: ask_many((small, "Who?")), PAIRS),
    "a context without a question": (lambda small: ask_many([small]), PAIRS),
    "a context alone": (lambda small: ask_many(small), PAIRS),
    "a text": (lambda small: ask_many("ab"), PAIRS),
    "one context to compose": (
        lambda small: compose(small),
        "compose takes a list of compressed contexts",
    ),
    "a text to compose": (
        lambda small: compose("ab"),
        "A compressed context is what compress returns, not str",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_types_are_refused(small, name):
    act, match = CASES[name]
    with pytest.raises(RestoreKVError, match=match):
        act(small)


def test_pairs_may_be_of_any_kind(small):
    expected = [small.ask(QUESTIONS[0], 4), small.ask(list(QUESTIONS), 4)]
    assert ask_many(iter([[small, QUESTIONS[0]], (small, tuple(QUESTIONS))]), 4) == expected
