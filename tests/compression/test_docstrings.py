"""The examples in docstrings run, with the tiny model and a compressed register as `small`."""

import doctest
from pathlib import Path

import pytest

from restorekv import compress, context, load_model, many_contexts, pipeline

REGISTER = Path(__file__).parents[2] / "examples" / "register.txt"


@pytest.mark.parametrize(
    "module", [pipeline, context, many_contexts], ids=lambda module: module.__name__
)
def test_examples_run(module):
    model, tokenizer = load_model("tiny")
    text = REGISTER.read_text()
    names = {
        "model": model,
        "tokenizer": tokenizer,
        "text": text,
        "small": compress(model, tokenizer, text),
    }
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed
