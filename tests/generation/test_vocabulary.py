"""Ids without an embedding in the model are refused, whichever way they come in."""

import pytest

from restorekv import compress
from restorekv.errors import RestoreKVError
from tests.helpers.models import build_model, build_tokenizer

TEXT = "the code of the red house is seven; who lives in the blue house? " * 10
UNKNOWN = "zzz350"


@pytest.fixture(scope="module")
def small():
    """A context with a tokenizer that was given more tokens than the model has embeddings."""
    tokenizer = build_tokenizer()
    context = compress(
        build_model("llama"), tokenizer, TEXT, evictor="snapkv", ratio=0.5, adapter=None
    )
    tokenizer.add_tokens([f"zzz{number}" for number in range(400)])
    return context


@pytest.mark.parametrize(
    "use",
    [
        lambda small: small.ask(f"what is {UNKNOWN}?", 4),
        lambda small: small.ask(["who?", UNKNOWN], 4),
        lambda small: next(small.ask(f"{UNKNOWN}?", 4, stream=True)),
        lambda small: small.generate(f"{UNKNOWN}?"),
        lambda small: small.append(f" {UNKNOWN} lives in the blue house " * 8),
        lambda small: small.append([3, small.model.config.vocab_size] * 20),
        lambda small: small.chat().ask(f"{UNKNOWN}?"),
    ],
    ids=["ask", "batch", "stream", "generate", "append", "append ids", "chat"],
)
def test_tokens_that_the_model_does_not_have_are_refused(small, use):
    with pytest.raises(RestoreKVError, match="pass the tokenizer that belongs to the model"):
        use(small)
