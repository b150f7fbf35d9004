"""A model that is cast after a text was compressed answers no questions about it."""

import pytest

from restorekv import ask_many, compress
from restorekv.cache.states import HAS_STATES
from restorekv.errors import ModelError
from tests.helpers.hybrids import build_hybrid
from tests.helpers.models import build_model

TEXT = "the code of the red house is seven; who lives in the blue house? " * 4
QUESTION = "is the code seven?"
CAST = r"made with the model in float32, and the model was cast to bfloat16 since; compress"


@pytest.mark.parametrize("kind", ["llama", *(["lfm2"] if HAS_STATES else [])])
def test_a_model_that_was_cast_since_is_refused(tiny_tokenizer, kind):
    """A short convolution ended in a stack trace; other models mixed the dtypes without a word."""
    model = build_hybrid(kind) if kind == "lfm2" else build_model(kind)
    small = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    chat = small.chat()
    chat.ask(QUESTION, 3)
    other = compress(model, tiny_tokenizer, TEXT, ratio=0.4, adapter=None)
    model.bfloat16()
    ways = (
        lambda: small.ask(QUESTION, 3),
        lambda: small.ask(QUESTION, 3, stream=True),
        lambda: small.inputs(QUESTION),
        lambda: small.generate(QUESTION, max_new_tokens=3),
        lambda: ask_many([(other, QUESTION), (small, QUESTION)], 3),
        lambda: chat.ask(QUESTION, 3),
    )
    for ask in ways:
        with pytest.raises(ModelError, match=CAST):
            ask()
    assert len(chat.turns) == 1
    again = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    assert again.manifest.dtype == "bfloat16"
    assert isinstance(again.ask(QUESTION, 3), str)
