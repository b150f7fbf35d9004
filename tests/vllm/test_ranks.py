"""Tensor parallel ranks of the real engine: each writes the heads of a document that it holds."""

import pytest

from tests.helpers.engine import answers, engine, make_world, without_halves
from tests.helpers.models import build_model, build_tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
TEXTS = {
    color: f"The code of the {color} house is seven; nobody lives there. " * 3
    for color in ("red", "blue")
}
QUESTIONS = ["Which code?", "who lives in the red house?"]


@pytest.mark.parametrize("heads", [4, 1])
def test_two_ranks_answer_as_one(tmp_path, heads):
    """Each rank holds two of four heads; a single head is on both ranks."""
    model = build_model("llama", hidden_size=256, num_attention_heads=8, num_key_value_heads=heads)
    world = make_world(
        tmp_path, model, build_tokenizer(), TEXTS, QUESTIONS, evictor="knorm", tokens_per_head=40
    )
    with engine(world, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        found = answers(
            llm, [world.prompt(number, place) for number in range(2) for place in range(2)]
        )
    assert without_halves(found) == without_halves([text for row in world.expected for text in row])
    assert len(set(found)) > 1
