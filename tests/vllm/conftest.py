"""Ten documents of SmolLM2 for the tests of the real engine."""

import pytest

from restorekv import load_model
from tests.helpers.engine import World, make_world

NAMES = ("Ada", "Bob", "Eve", "Dan", "Ida", "Kim", "Leo", "Max", "Ned", "Uma")
QUESTIONS = [
    "Who owns the red house?",
    "What is the code of the red house?",
    "How many trees are in the garden?",
    "Is there a well?",
    "What does the owner of the red house do?",
    "Who owns the blue house?",
    "What is in the garden?",
    "What color is the house?",
    "Which number is the code?",
    "What is the text about?",
]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Documents of one length, which differ in a name and two numbers."""
    model, tokenizer = load_model("smollm2")
    texts = {}
    for number, name in enumerate(NAMES):
        facts = (
            f"The red house belongs to {name}. Its code is {number * 37 + 112}. The garden "
            f"has {number + 3} trees. "
        )
        texts[name] = facts * 5
    place = tmp_path_factory.mktemp("world")
    made = make_world(
        place, model, tokenizer, texts, QUESTIONS, evictor="snapkv", tokens_per_head=60
    )
    assert len({document.tokens for document in made.documents}) == 1
    return made
