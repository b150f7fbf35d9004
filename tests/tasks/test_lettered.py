"""QuALITY and LongHealth: hand-made files in their true formats; how letters are asked for and
read.
"""

import json
import random
import string

import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import make_benchmark
from restorekv.tasks.lettered import Quality, add_options
from restorekv.tasks.metrics import find_letter

READ = {
    "B": "B",
    " b\n": "B",
    "(B)": "B",
    "(b)": "",
    "C.": "C",
    "The answer is C.": "C",
    "**D**": "D",
    "It is (E), not A.": "E",
    "Option A or (C)": "C",
    "A dog is shown, so B": "A",
    "Because of the rain, C": "B",
    "Letter: **C**": "C",
    "the letter d": "",
    "I think BC": "",
    "": "",
    "  ": "",
    "F": "",
    "no idea": "",
    "1. D": "D",
}


@pytest.mark.parametrize("answer", READ)
def test_letters_are_read(answer):
    assert find_letter(answer) == READ[answer]


def test_letters_equal_a_character_by_character_reading():
    """The definition again, without expressions: two hundred generated answers."""
    rng = random.Random(5)
    pieces = [
        *"ABCDEFabcde",
        "(A)",
        "(C)",
        "(b)",
        "[B]",
        "**D**",
        "answer",
        "Because",
        " ",
        "\n",
        ".",
        "is",
        "7",
        "_E_",
    ]
    met = set()
    for _ in range(300):
        answer = "".join(
            rng.choice(pieces) + rng.choice(["", " "]) for _ in range(rng.randint(0, 6))
        )
        assert find_letter(answer) == by_characters(answer)
        met.add(by_characters(answer))
    assert met == set("ABCDE") | {""}


def by_characters(answer):
    text = answer.strip()
    if text and text[0] in "ABCDEabcde":
        return text[0].upper()
    for place in range(len(text) - 2):
        if text[place] == "(" and text[place + 1] in "ABCDE" and text[place + 2] == ")":
            return text[place + 1]
    word = set(string.ascii_letters + string.digits + "_")
    for place, character in enumerate(f" {text} "[1:-1], 1):
        around = f" {text} "[place - 1] + f" {text} "[place + 1]
        if character in "ABCDE" and not word & set(around):
            return character
    return ""


def test_questions_end_with_the_request_for_a_letter():
    assert add_options("Who came?", ["Ida", "Bo", "Al", "Cy"]) == (
        "Who came?\n\nA. Ida\nB. Bo\nC. Al\nD. Cy\n\nPlease think very briefly and then respond "
        "with **only** "
        "the letter (A, B, C, or D) of the correct option. If you are not sure, still make a guess."
    )
    assert "E. five\n\nPlease" in add_options("?", ["one", "two", "three", "four", "five"])
    assert "(A, B, C, D, or E)" in add_options("?", ["one", "two", "three", "four", "five"])


def quality_row(article, text, questions):
    """A line of QuALITY with the fields of version 1.0.1."""
    return {
        "article_id": article,
        "set_unique_id": f"{article}_X",
        "batch_num": "23",
        "writer_id": "1",
        "source": "Gutenberg",
        "title": "T",
        "year": 1950,
        "author": "A",
        "topic": "Fiction",
        "article": text,
        "url": "",
        "license": "",
        "questions": questions,
    }


def quality_question(text, gold, difficult=0):
    return {
        "question": text,
        "question_unique_id": f"{text}_1",
        "options": ["red", "blue", "green", "grey"],
        "writer_label": gold,
        "gold_label": gold,
        "validation": [],
        "speed_validation": [],
        "difficult": difficult,
    }


@pytest.fixture
def quality(tmp_path):
    """Three articles, the first and third in two lines."""
    rows = [
        quality_row(
            "10",
            " The wall was blue. ",
            [quality_question("Colour? ", 2), quality_question("Why?", 4, 1)],
        ),
        quality_row("20", "The sea was grey.", [quality_question("Sea?", 4)]),
        quality_row("10", "The wall was blue.", [quality_question("Again?", 1)]),
        quality_row("30", "The leaf was green.", [quality_question("Leaf?", 3, 1)]),
        quality_row("30", "The leaf was green.", [quality_question("Twig?", 1, 0)]),
    ]
    (tmp_path / "QuALITY.v1.0.1.htmlstripped.dev").write_text(
        "\n".join(map(json.dumps, rows)) + "\n"
    )
    return tmp_path


def test_quality_merges_the_lines_of_an_article(quality):
    first, second, third = make_benchmark(f"quality:path={quality}").choose_samples(None, "kvzip")
    assert [len(sample.questions) for sample in (first, second, third)] == [3, 1, 2]
    assert first.context == "The wall was blue."
    assert [question.answers for question in first.questions] == [("B",), ("D",), ("A",)]
    question = first.questions[0]
    assert question.text.startswith(
        "Colour?\n\nA. red\nB. blue\nC. green\nD. grey\n\nPlease think very briefly"
    )
    assert question.max_new_tokens == 128 and question.task == "quality" and question.facts["bare"]
    apart = (
        make_benchmark(f"quality:path={quality}").choose_samples(None, "kvpress")[0].questions[0]
    )
    assert apart.text == "\n\n" + question.text, "kvpress puts nothing between context and question"
    ids = [question.id for sample in (first, second, third) for question in sample.questions]
    assert len(set(ids)) == 6


def test_quality_scores_by_letter(quality):
    benchmark = make_benchmark(f"quality:path={quality / 'QuALITY.v1.0.1.htmlstripped.dev'}")
    question = benchmark.choose_samples(None, "kvzip")[0].questions[0]
    assert [benchmark.score(question, said) for said in ("B", "the answer is (B).", "C", "")] == [
        1,
        1,
        0,
        0,
    ]
    assert benchmark.averages_contexts("kvzip") and not benchmark.averages_contexts("kvpress")


def test_quality_takes_the_first_articles_and_the_hard_questions(quality):
    assert [
        sample.id
        for sample in make_benchmark(f"quality:path={quality},articles=2").choose_samples(
            None, "kvzip"
        )
    ] == ["0", "1"]
    hard = make_benchmark(f"quality:path={quality},subset=hard").choose_samples(None, "kvzip")
    assert [
        (sample.id, [question.answers[0] for question in sample.questions]) for sample in hard
    ] == [
        ("0", ["D"]),
        ("2", ["C"]),
    ]
    with pytest.raises(RestoreKVError, match="all or hard"):
        make_benchmark("quality:subset=easy")


def test_a_negative_number_of_articles_is_refused(quality):
    with pytest.raises(RestoreKVError, match=r"articles must be 0 \(all\) or more, not -1"):
        Quality(str(quality), articles=-1)


def test_counts_are_drawn_from_all_articles(quality):
    rows = [quality_row(str(n), f"Story {n}.", [quality_question("?", 1)]) for n in range(40)]
    (quality / "QuALITY.v1.0.1.htmlstripped.dev").write_text("\n".join(map(json.dumps, rows)))
    picked = [
        int(sample.id)
        for sample in make_benchmark(f"quality:path={quality},count=8").choose_samples(
            None, "kvzip"
        )
    ]
    assert len(picked) == 8 and picked == sorted(picked) and max(picked) > 20
    assert picked != [
        int(sample.id)
        for sample in make_benchmark(f"quality:path={quality},count=8,seed=1").choose_samples(
            None, "kvzip"
        )
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 is not an article"),
        ([json.dumps(quality_row("1", " ", []))], "is not an article"),
        ([json.dumps(quality_row("1", "Text.", "none"))], "is not an article"),
        (
            [json.dumps(quality_row("1", "Text.", [quality_question("?", 5)]))],
            "questions of four options",
        ),
        (
            [
                json.dumps(
                    quality_row("1", "Text.", [{**quality_question("?", 1), "options": ["a"]}])
                )
            ],
            "four options",
        ),
        (
            [json.dumps(quality_row("1", "Text.", [{"question": "?", "options": list("abcd")}]))],
            "give the dev set",
        ),
        ([], "give the dev set"),
    ],
)
def test_quality_refuses_what_is_malformed(tmp_path, lines, told):
    path = tmp_path / "dev.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(RestoreKVError, match=told) as caught:
        make_benchmark(f"quality:path={path}").choose_samples(None, "kvzip")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("name", "file"), [("quality", "htmlstripped.dev"), ("longhealth", "benchmark_v5.json")]
)
def test_what_to_fetch_is_told(tmp_path, name, file):
    for spec in (name, f"{name}:path={tmp_path}", f"{name}:path={tmp_path / 'no.json'}"):
        with pytest.raises(RestoreKVError, match=rf"{file} from github.com.*give {name}:path=FILE"):
            make_benchmark(spec).choose_samples(None, "kvpress")


def health_question(number, correct, **options):
    options = {f"answer_{letter}": f"option {letter}" for letter in "abcde"} | options
    location = {"text_0": {"start": [0.1], "end": [0.2]}}
    return {
        "No": number,
        "question": f"Question {number}? ",
        **options,
        "correct": correct,
        "answer_location": location,
    }


@pytest.fixture
def health():
    return {
        "patient_02": {
            "texts": {"text_0": "A letter.", "text_1": "Another."},
            "name": "Bo Lind",
            "birthday": "1.1.1960",
            "diagnosis": "Gout",
            "questions": [health_question(0, "option c"), health_question(1, " option e ")],
        },
        "patient_01": {
            "texts": {"text_0": "A report."},
            "name": "Ida Berg",
            "birthday": "2.2.1950",
            "diagnosis": "Flu",
            "questions": [health_question(0, "option b", answer_a="")],
        },
    }


def written(tmp_path, content, indent=None):
    path = tmp_path / "benchmark_v5.json"
    path.write_text(json.dumps(content, indent=indent))
    return path


@pytest.mark.parametrize("indent", [None, 4])
def test_longhealth_is_a_patient_a_context(tmp_path, health, indent):
    first, second = make_benchmark(
        f"longhealth:path={written(tmp_path, health, indent)}"
    ).choose_samples(None, "kvzip")
    assert (first.id, second.id) == ("patient_01", "patient_02")
    assert second.context == "<text_0>\nA letter.\n</text_0>\n\n<text_1>\nAnother.\n</text_1>"
    assert [question.answers for question in second.questions] == [("C",), ("E",)]
    assert first.questions[0].answers == ("A",), (
        "an empty option is left out, and those behind it move up"
    )
    assert second.questions[1].text.startswith("Question 1?\n\nA. option a\n")
    assert "(A, B, C, D, or E)" in second.questions[1].text
    assert second.questions[1].id == "patient_02-1" and second.questions[1].max_new_tokens == 128


def test_longhealth_of_several_patients_names_them(tmp_path, health):
    (sample,) = make_benchmark(
        f"longhealth:path={written(tmp_path, health)},patients=2"
    ).choose_samples(None, "kvzip")
    assert sample.context.startswith("<text_0>\nA report.\n</text_0>\n\n<text_0>\nA letter.")
    assert sample.questions[0].text.startswith(
        "About patient ID patient_01, Name: Ida Berg, Birthday: 2.2.1950, Diagnosis: Flu: Question "
        "0?\n\nA. option b\n"
    )
    assert (
        make_benchmark(f"longhealth:path={tmp_path},patients=3").choose_samples(None, "kvpress")
        == []
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda patient: patient.pop("texts"), "patient_01 lacks texts or questions"),
        (lambda patient: patient.update(texts={"text_0": 3}), "lacks texts"),
        (lambda patient: patient.update(questions={}), "lacks texts or questions"),
        (lambda patient: patient["questions"][0].pop("correct"), "lacks texts or questions"),
        (
            lambda patient: patient["questions"][0].update(correct="another"),
            "question 0 of patient_01 has no right option",
        ),
    ],
)
def test_longhealth_refuses_what_is_malformed(tmp_path, health, change, told):
    change(health["patient_01"])
    with pytest.raises(RestoreKVError, match=told):
        make_benchmark(f"longhealth:path={written(tmp_path, health)}").choose_samples(
            None, "kvpress"
        )


def test_longhealth_refuses_other_json(tmp_path):
    for content in ([], {}, [{"a": 1}, {"b": 2}], 5):
        with pytest.raises(RestoreKVError, match=r"is not one JSON object of patients|lacks texts"):
            make_benchmark(f"longhealth:path={written(tmp_path, content)}").choose_samples(
                None, "kvpress"
            )
    with pytest.raises(RestoreKVError, match="patients must be at least 1"):
        make_benchmark("longhealth:patients=0")
