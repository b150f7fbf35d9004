"""The demo: its tables, from a random model without adapters and made by hand, and that it loads a
model once.
"""

import io
from dataclasses import replace

from rich.console import Console

from restorekv.cli import facts_demo, loading
from restorekv.cli import scored_demo as cli_demo
from restorekv.cli.scored_demo import (
    STORIES,
    STORY,
    WORLD,
    CacheAnswers,
    DemoPlan,
    answer_side_by_side,
    choose_document,
    choose_plan,
    make_answers_table,
    make_seconds_table,
)
from restorekv.evaluation import worker
from restorekv.model.load import load_tokenizer
from restorekv.tasks import Question, Sample
from restorekv.tasks.facts import load_facts
from restorekv.tasks.metrics import contains_reference
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model
from tests.helpers.source import ROOT

SAMPLE = Sample(
    "one",
    "the red house is big. " * 12,
    (
        Question("1", "a", "\n\nQuestion: who is it?\nAnswer:", ("he", "she"), 3),
        Question("2", "a", " what?", (), 4),
    ),
)


def printed(table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_every_cache_answers_the_same_questions(tiny_tokenizer):
    tokens, answers = answer_side_by_side(
        build_model("qwen3"), tiny_tokenizer, SAMPLE, {"knorm": None}, (0.5, 0.25)
    )
    assert [each.title for each in answers] == ["full cache", "Knorm, r = 0.5", "Knorm, r = 0.25"]
    assert all(len(each.answers) == 2 for each in answers) and tokens > 20
    assert answers[0].nbytes > answers[1].nbytes > answers[2].nbytes
    assert set(answers[0].seconds) == {"prefill", "ask"}
    assert set(answers[1].seconds) == {"prefill", "score", "evict", "ask"}


def test_the_tables_show_questions_answers_bytes_and_seconds():
    answers = [CacheAnswers("full cache", 1000, ["he", "x"], {"ask": 0.5, "prefill": 2.0})]
    shown = printed(make_answers_table(SAMPLE, 60, answers))
    assert (
        "who is it?" in shown
        and "Question:" not in shown
        and "he / she" in shown
        and "1,000" in shown
    )
    assert printed(make_seconds_table(answers)).index("prefill") < printed(
        make_seconds_table(answers)
    ).index("ask")


def test_each_model_is_shown_what_it_can_read():
    assert choose_plan("tiny") is WORLD and choose_plan("smollm2") is STORIES
    tokenizer = load_tokenizer("tiny")
    assert len(choose_document("tiny", tokenizer).questions) == 3
    story = choose_document("smollm2", tokenizer)
    assert story.id.startswith(STORY) and story.questions


def test_the_help_names_the_numbers_of_documents():
    said = " ".join(cli("demo", "--help").out.replace("│", " ").split())
    assert f"by default {WORLD.count} for tiny, else {STORIES.count}." in said


def test_only_questions_are_shown_that_the_full_cache_answers_right():
    questions = []
    for number, truth in enumerate(("Hall", "94", "oak", "1709", "Hoe", "Leeds", "sun", "tin")):
        questions.append(Question(str(number), "a", f"{truth}?", (truth,), 8))
    sample = Sample("tower", "text", tuple(questions))
    full = ["Henry Hall.\nMore", "he was 49", "of oak", "in 1709", "the Hoe", "Leeds", "sun", "tin"]
    small = ["Hall", "94", "elm", "1709", "Hoe", "Leeds", "sun", "tin"]
    cut = [False] * 8
    cut[5] = True
    caches = [
        CacheAnswers("full cache", 1000, full, {"ask": 1.0}, cut),
        CacheAnswers("KVzip, r = 0.3", 300, small, {"ask": 1.0}, [False] * 8),
    ]
    right = facts_demo.find_right_answers(sample, caches[0])
    assert len(right) == 7
    chosen = right[: facts_demo.SHOWN]
    caches[1] = replace(caches[1], answers=[small[index] for index in chosen])
    questions = facts_demo.compare_answers(sample, chosen, caches)
    shown = facts_demo.ShownText("one", 50, 8, len(right), questions, caches)
    assert [each.truth for each in shown.questions] == [
        "Hall",
        "oak",
        "1709",
        "Hoe",
        "Leeds",
        "sun",
    ]
    assert shown.questions[0].answers["full cache"] == "Henry Hall."
    # An answer without a full stop is whole unless its limit of tokens has ended it.
    assert shown.questions[1].answers["full cache"] == "of oak"
    assert shown.questions[4].answers["full cache"] == "Leeds …"
    assert [each.right["KVzip"] for each in shown.questions] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    table = printed(facts_demo.tabulate_answers(shown))
    assert "✗ elm" in table and "✓ Henry Hall." in table
    costs = printed(facts_demo.tabulate_costs([shown], "0.3"))
    assert "6/6" in costs and "5/6" in costs


def test_every_cache_is_timed_with_the_same_questions(tiny_tokenizer, monkeypatch):
    """More questions in one batch take less time each."""
    asked = []

    def ask_cache(prepared, tokenizer, named, questions):
        title, cache, seconds = named
        asked.append((title, len(questions)))
        seconds["ask"] = 1.0 if len(questions) == 2 else 9.0
        return CacheAnswers(title, cache.nbytes, [""] * len(questions), seconds, [False] * 4)

    monkeypatch.setattr(facts_demo, "ask_cache", ask_cache)
    monkeypatch.setattr(facts_demo, "load_adapter", lambda *_, **__: None)
    monkeypatch.setattr(facts_demo, "find_right_answers", lambda *_: [0, 2])
    questions = tuple(Question(str(number), "a", "Who?", ("he",), 4) for number in range(4))
    sample = Sample("one", "the red house is big. " * 12, questions)
    shown = facts_demo.ask_text(build_model("qwen3"), tiny_tokenizer, sample, "0.5")
    assert asked == [("full cache", 4), ("full cache", 2), ("KVzip, r = 0.5", 2)]
    assert [len(each.answers) for each in shown.caches] == [4, 2]
    table = printed(facts_demo.tabulate_costs([shown], "0.5"))
    seconds = [line.split("│")[-2].strip() for line in table.splitlines() if "/2" in line]
    assert seconds == ["0.50", "0.50"]


def test_the_note_says_that_nothing_is_restored_only_where_that_was_seen():
    def show(caches):
        answered = [CacheAnswers(name, 100, []) for name in caches]
        return facts_demo.ShownText("one", 50, 8, 0, [], answered)

    nothing = "nothing is restored"
    assert nothing in facts_demo.make_note([show(["full cache", "KVzip"])], "0.3", 1.0)
    assert nothing not in facts_demo.make_note([show(facts_demo.CACHES)], "0.3", 1.0)
    # The full cache answered nothing right, so no small cache was made.
    assert nothing not in facts_demo.make_note([], "0.3", 1.0)


def test_the_truth_of_every_fact_is_in_its_text():
    for sample in load_facts():
        for question in sample.questions:
            assert contains_reference(sample.context, question.answers), question.text


def test_the_example_is_the_text_of_the_demo():
    assert (ROOT / "examples" / "lighthouse.txt").read_text() == load_facts()[0].context


def test_a_truth_is_found_as_whole_words():
    assert contains_reference("It was Henry Hall.", ["Henry Hall"])
    assert not contains_reference("in 17090", ["1709"])


def test_the_demo_loads_its_model_once(monkeypatch):
    show = DemoPlan("tiny:low=100,high=160", ("knorm",), ("0.5",), (0.5,), 1)
    monkeypatch.setattr(cli_demo, "choose_plan", lambda model: show)
    monkeypatch.setattr(cli_demo, "choose_document", lambda *_: SAMPLE)
    loads, load_model = [], worker.load_model
    for module in (loading, worker):
        monkeypatch.setattr(
            module, "load_model", lambda *given: loads.append(given) or load_model(*given)
        )
    worker.OPEN_MODELS.clear()
    demo = cli("demo", "--full", "--model", "tiny")
    assert demo.code == 0 and "full cache" in demo.out, demo
    assert len(loads) == 1
