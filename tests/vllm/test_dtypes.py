"""Documents in an engine with a different dtype of the model or of the cache than in the file."""

from statistics import fmean

import pytest
import torch

from tests.helpers.engine import ask, engine

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


@torch.no_grad()
def own_logprobs(world, document, question):
    """Return the log-probabilities of the first answer token, from the cache as the file has it."""
    ids = torch.tensor([world.prompt(document, question)])
    m = world.documents[document].tokens
    out = world.model(ids[:, m:], past_key_values=world.documents[document].make_cache())
    return out.logits[0, -1].float().log_softmax(-1)


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({}, 0.001),
        ({"dtype": "bfloat16"}, 0.1),
        ({"kv_cache_dtype": "fp8"}, 0.2),
        ({"kv_cache_dtype": "fp8_e5m2"}, 0.3),
    ],
    ids=str,
)
def test_first_tokens_are_near_those_of_the_file(world, options, near):
    """In mean distance of log-probabilities, they are nearer than those of a document that differs
    in a name and two numbers.
    """
    with engine(world, **options) as llm:
        rows = [(number, place) for place in (0, 1, 2) for number in range(len(world.documents))]
        outputs = ask(llm, [world.prompt(*row) for row in rows], max_tokens=1, logprobs=5)
    own, others = [], []
    for (number, place), output in zip(rows, outputs, strict=True):
        found = {token: entry.logprob for token, entry in output.logprobs[0].items()}
        for document, gaps in ((number, own), ((number + 1) % len(world.documents), others)):
            logprobs = own_logprobs(world, document, place)
            gaps += [abs(logprobs[token].item() - value) for token, value in found.items()]
    assert fmean(own) < near
    assert 2 * fmean(own) < fmean(others)
