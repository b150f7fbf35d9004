"""The mixture of passages: what is cut, what is asked, which facts are put in."""

import random
from dataclasses import replace

import pytest

from restorekv.data.build import TEXTS, build_mixture
from restorekv.data.files import iterate_rows
from restorekv.data.mixture import read_mixture
from restorekv.data.passages import (
    FACT,
    HUMAN,
    LISTED,
    REPEAT,
    STORIES_LICENSE,
    invent_facts,
    make_passage_reader,
)
from restorekv.data.self_study import QUESTION_PROMPTS
from restorekv.data.sources import SECTIONS
from restorekv.data.table import compute_figures, make_data_table
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import DEFAULT_SEPARATOR, encode_text
from restorekv.tasks.ruler.needles import NEEDLES
from tests.helpers.data_world import settings, text, write_jsonl

WORDING = "Question: {question}\nAnswer:"
CONFIG = settings(
    {},
    mixture="passages",
    passage_shortest=40,
    passage_longest=90,
    questions=2,
    wording=WORDING,
    story_passages=2,
    novel_passages=3,
    section_passages=1,
    per_novel=2,
    invented=0.5,
)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    asked = [{"question": f"who is number {number}?"} for number in range(9)]
    stories = [
        {"id": f"story {n}", "context": text(f"story {n}", 60), "questions": asked}
        for n in range(4)
    ]
    (tmp_path / "novels").mkdir()
    for number in range(2):
        (tmp_path / "novels" / f"{number}.txt").write_text(text(f"novel {number}", 300))
    write_jsonl(tmp_path / "stories.jsonl", stories)
    write_jsonl(tmp_path / "sections.jsonl", stories[:1])
    return {
        "stories": str(tmp_path / "stories.jsonl"),
        "novels": str(tmp_path / "novels"),
        "sections": str(tmp_path / "sections.jsonl"),
    }


def test_a_passage_begins_its_text_and_keeps_the_first_questions(tiny_tokenizer):
    asked = [{"question": f"who is number {number}?"} for number in range(40)]
    row = {"id": "one", "context": text("one", 200), "questions": asked}
    config = replace(CONFIG, invented=0.0)
    (found,) = make_passage_reader(STORIES_LICENSE, lambda c: 1)(
        iter([row]), config, tiny_tokenizer
    )
    tokens = encode_text(tiny_tokenizer, found.text).shape[-1]
    assert row["context"].startswith(found.text) and 39 <= tokens <= 91 and not found.studied
    kinds = [kind for kind, _ in found.asked]
    assert kinds[:2] == [HUMAN, HUMAN] and kinds[2] in (REPEAT, LISTED) and len(kinds) == 3
    share = tokens / encode_text(tiny_tokenizer, row["context"]).shape[-1]
    numbers = [int(question.split("number ")[1].split("?")[0]) for _, question in found.asked[:2]]
    assert max(numbers) <= max(share * 40, 2)


def test_no_evaluation_country_enters_through_sections(tiny_tokenizer):
    evaluation = list(iterate_rows(str(TEXTS / "factbook" / "evaluation.jsonl.gz"), {}))[:4]
    unnamed = [{"text": row["context"]} for row in evaluation]
    # Another section of an evaluation country, and some of the same country in a larger text.
    further = {"id": "bc/Energy", "context": "Energy of Botswana\n" + text("energy", 60)}
    within = {"id": "all", "context": f"Chad. Energy\n{evaluation[0]['context']}"}
    free = {"id": "ag/Geography", "context": "Algeria. Geography\n" + text("algeria", 60)}
    rows = [*evaluation, *unnamed, further, within, free]
    found = list(SECTIONS.read(iter(rows), CONFIG, tiny_tokenizer))
    assert [str(each) for each in found[:-1]] == ["evaluation country"] * 10
    assert found[-1].name == "ag/Geography passage 0"


def test_a_text_without_questions_gives_separate_passages(tiny_tokenizer):
    row = {"text": text("book", 900)}
    found = list(
        make_passage_reader(STORIES_LICENSE, lambda c: 3)(
            iter([row]), replace(CONFIG, invented=0.0), tiny_tokenizer
        )
    )
    places = [row["text"].index(each.text) for each in found]
    assert len(found) == 3 and all(each.studied for each in found)
    assert all(
        a + len(each.text) <= b for a, b, each in zip(places, places[1:], found, strict=False)
    )


def test_facts_are_asked_for_and_stand_in_the_passage_once():
    passage = text("facts", 120)
    told, asked = invent_facts(passage, random.Random(3))
    assert asked and all(question.endswith("?") for question in asked)
    assert (
        (told, asked)
        == invent_facts(passage, random.Random(3))
        != invent_facts(passage, random.Random(4))
    )
    words = iter(told.split())
    # The passage is still there, in its order.
    assert all(word in words for word in passage.split())


def test_no_template_of_ruler_is_trained_on():
    made = " ".join(
        part for seed in range(200) for part in invent_facts("A. B. C.", random.Random(seed))[1:][0]
    )
    told = " ".join(invent_facts("A. B. C.", random.Random(seed))[0] for seed in range(200))
    assert NEEDLES and "special magic" not in (made + told).lower() and "VAR" not in told


def test_the_mixture_is_built_and_read(files, tiny_model, tiny_tokenizer, tmp_path, recwarn):
    config = replace(CONFIG, longest=100_000, **files)
    manifest = build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "data")
    warned = [str(warning.message) for warning in recwarn]
    assert not any("--longest" in sentence for sentence in warned), "no passage has that length"
    contexts, _ = read_mixture(tmp_path / "data", tiny_model, tiny_tokenizer)
    by_source = {
        name: [each for each in contexts if each.source == name] for name in manifest["sources"]
    }
    assert {name: len(found) for name, found in by_source.items()} == {
        "stories": 2,
        "novels": 3,
        "sections": 1,
    }
    assert manifest["licenses"].keys() == {"apache-2.0", "public-domain", "cc0-1.0"}
    questions = [question for each in contexts for question in each.questions]
    assert all(question.startswith(DEFAULT_SEPARATOR) for question in questions)
    assert any(question.endswith("?\nAnswer:") for question in questions)
    rows = compute_figures(contexts, manifest)
    assert [row["paper"] for row in rows] == [None] * 4 and make_data_table(
        rows, manifest
    ).row_count == 4


def test_kinds_are_told_apart():
    assert len({HUMAN, FACT, REPEAT, LISTED, *QUESTION_PROMPTS}) == 4 + len(QUESTION_PROMPTS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"invented": 1.5},
        {"wording": "Question"},
        {"passage_shortest": 100},
        {"story_passages": 0, "novel_passages": 0, "section_passages": 0},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(RestoreKVError):
        replace(CONFIG, **wrong)
