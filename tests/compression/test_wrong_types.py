"""Arguments that are not a compressed context, a question or a key are refused with a sentence."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from restorekv import CompressedContext, ask_many, compose, compress
from restorekv.errors import RestoreKVError, RestoreKVWarning
from tests.helpers.compressing import QUESTIONS, make_small


@pytest.fixture(scope="module")
def small(tiny_tokenizer):
    return make_small(tiny_tokenizer)


PAIRS = "ask_many takes a list of pairs"
CASES = {
    "a number for a context": (lambda small: ask_many([(1, "Who?")]), PAIRS),
    "no question": (
        lambda small: ask_many([(small, None)]),
        "A question must be text, or a list of texts, not None; pass a string",
    ),
    "a number in a list of questions": (
        lambda small: ask_many([(small, ["Who?", 1])]),
        "A question must be text, not int; pass a string",
    ),
    "a list in a list of questions": (
        lambda small: small.ask([["Who?"]]),
        "A question must be text, not a list of str; pass each text by itself",
    ),
    "a message for a question": (
        lambda small: small.ask({"role": "user", "content": "Who?"}),
        "not a message with a role; pass the message's text",
    ),
    "bytes for a question": (lambda small: small.ask(b"Who?"), r"not bytes; decode .*decode\(\)"),
    "a path for a question": (
        lambda small: small.chat().ask(Path("who.txt")),
        r"A question must be text, not PosixPath; .*Path\('who.txt'\).read_text\(\)",
    ),
    "a generator of questions": (
        lambda small: small.ask(each for each in QUESTIONS),
        r"not generator; pass a list of them: list\(questions\)",
    ),
    "a list for a turn": (
        lambda small: small.chat().ask(list(QUESTIONS)),
        "takes one question a turn, not a list; call ask once for each, or ask the compressed",
    ),
    "an empty list for a turn": (lambda small: small.chat().ask([]), "one question a turn"),
    "nothing for a turn": (lambda small: small.chat().ask(None), "not None; pass a string"),
    "texts to append": (lambda small: small.append(["a", "b"]), "is one text, not a list of 2"),
    "bytes to append": (lambda small: small.append(b"abc"), r"not bytes; decode the bytes"),
    "one pair without a list": (lambda small: ask_many((small, "Who?")), PAIRS),
    "a context without a question": (lambda small: ask_many([small]), PAIRS),
    "a context alone": (lambda small: ask_many(small), PAIRS),
    "a text": (lambda small: ask_many("ab"), PAIRS),
    "one context to compose": (
        lambda small: compose(small),
        "compose needs a list of compressed contexts",
    ),
    "a text to compose": (
        lambda small: compose("ab"),
        "A compressed context, as compress returns it, is needed, not str",
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


CONTEXTS = {
    "texts": (["One.", "Two."], "The context is one text, not a list of 2; pass each by itself"),
    "messages of no text": ([{"role": "user"}], "Message 1 has no text"),
    "a message": ({"content": "x"}, 'not dict; of a message pass the text: message["content"].'),
    "encoded text": ({"input_ids": [[1, 2]]}, 'not dict; pass its ids of one text: ["input_ids"]'),
    "a batch of one": (
        torch.ones(1, 3).long(),
        "not a tensor of shape (1, 3) and torch.int64; of a batch of one pass the row: ids[0].",
    ),
    "a tensor of fractions": (
        torch.ones(3),
        "not a tensor of shape (3,) and torch.float32; pass one row of whole numbers.",
    ),
    "bytes": (b"abc", "not bytes; decode the bytes: value.decode()."),
    "nothing": (None, "not None; pass a string."),
    "a number": (5, "not int; pass a string."),
    "fractions": ([1.5], "not a list of float; pass a string."),
    "a folder": (Path(__file__).parent, "is a folder; compress its files one by one, or"),
    "an empty text": ("", "The context is empty; give a text with at least one word."),
    "no ids": ([], "The context has no tokens besides the chat template"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_wrong_contexts_are_refused_with_what_to_pass(small, name):
    context, said = CONTEXTS[name]
    with pytest.raises(RestoreKVError, match=re.escape(said)):
        compress(small.model, small.tokenizer, context, adapter=None)


def test_an_open_file_is_told_to_be_read(small):
    with Path(__file__).open() as file, pytest.raises(RestoreKVError, match=r"file.read\(\)"):
        compress(small.model, small.tokenizer, file, adapter=None)


class Wrapper(torch.nn.Module):
    """A module around a model that passes on only the model's config."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config


ORDER = {
    "a wrapper of a model": lambda small: (Wrapper(small.model), small.tokenizer),
    "swapped": lambda small: (small.tokenizer, small.model),
    "a name for a model": lambda small: ("tiny", small.tokenizer),
    "a name for a tokenizer": lambda small: (small.model, "tiny"),
    "no tokenizer": lambda small: (small.model, None),
}


@pytest.mark.parametrize("name", ORDER)
def test_model_and_tokenizer_are_told_apart(small, tmp_path, name):
    model, tokenizer = ORDER[name](small)
    told = r"first a model of transformers, then its tokenizer, not .* and .*; load both with"
    with pytest.raises(RestoreKVError, match=told):
        compress(model, tokenizer, "A text.")
    small.save(tmp_path / "small.rkv")
    with pytest.raises(RestoreKVError, match=told):
        CompressedContext.load(tmp_path / "small.rkv", model, tokenizer)


def test_a_text_that_looks_like_a_file_is_pointed_out(small):
    """Without the warning, the name of a file would silently be compressed as a text."""

    def told_for(text):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RestoreKVWarning)
            compress(small.model, small.tokenizer, text, ratio=1, adapter=None, evictor="knorm")
        return [str(each.message) for each in caught]

    for name in "examples/register.txt", "Report.PDF", "C:\\texts\\notes.md":
        (message,) = told_for(name)
        assert repr(name) in message and "pass Path(...) to read that file" in message
    assert told_for("Read the file notes.txt") == told_for("Dr. Who?") == []
    assert told_for("one line\nnotes.txt") == []
