"""The demo: what is shown of a document, by a random model without adapters and by hand."""

import io

from rich.console import Console

from restorekv.evaluation.demo import (
    STORIES,
    STORY,
    WORLD,
    Answered,
    answers_table,
    document,
    seconds_table,
    show_for,
    side_by_side,
)
from restorekv.model.load import load_tokenizer
from restorekv.tasks import Question, Sample
from tests.helpers.models import build_model

SAMPLE = Sample(
    "one", "the red house is big. " * 12,
    (Question("1", "a", "\n\nQuestion: who is it?\nAnswer:", ("he", "she"), 3), Question("2", "a", " what?", (), 4)),
)  # fmt: skip


def printed(table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_every_cache_answers_the_same_questions(tiny_tokenizer):
    tokens, found = side_by_side(build_model("qwen3"), tiny_tokenizer, SAMPLE, {"knorm": None}, (0.5, 0.25))
    assert [each.title for each in found] == ["full cache", "Knorm, r = 0.5", "Knorm, r = 0.25"]
    assert all(len(each.answers) == 2 for each in found) and tokens > 20
    assert found[0].nbytes > found[1].nbytes > found[2].nbytes
    assert set(found[0].seconds) == {"prefill", "ask"} and set(found[1].seconds) == {"prefill", "score", "evict", "ask"}


def test_the_tables_show_questions_answers_bytes_and_seconds():
    found = [Answered("full cache", 1000, ["he", "x"], {"ask": 0.5, "prefill": 2.0})]
    shown = printed(answers_table(SAMPLE, 60, found))
    assert "who is it?" in shown and "Question:" not in shown and "he / she" in shown and "1,000" in shown
    assert printed(seconds_table(found)).index("prefill") < printed(seconds_table(found)).index("ask")


def test_each_model_is_shown_what_it_can_read():
    assert show_for("bundled") is WORLD and show_for("smollm2") is STORIES
    tokenizer = load_tokenizer("bundled")
    assert len(document("bundled", tokenizer).questions) == 3
    story = document("smollm2", tokenizer)
    assert story.id.startswith(STORY) and story.questions
