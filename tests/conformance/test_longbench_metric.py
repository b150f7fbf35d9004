"""LongBench against kvpress 0.5.5's own prompts and scorer, run by `make conformance`.

Predictions are references spoilt in many ways by a fixed seed; scores are compared with kvpress's
rounding and without.
"""

import ast
import random
from pathlib import Path

import pytest

from restorekv.tasks import Question, make_benchmark
from restorekv.tasks.longbench import EXTRA_TOKENS, PROMPTS, TASKS
from tests.conformance.reference import scorer

pytestmark = pytest.mark.kvpress
pandas = pytest.importorskip("pandas")
for package in ("fuzzywuzzy", "jieba"):
    pytest.importorskip(
        package, reason=f"kvpress's scorer imports {package}; `make conformance` installs it"
    )
theirs = scorer("longbench")

PAIRS = 400
WORDS = (
    "the a an The lamp lamps mill Mill river theatre u.s. it's don't co-operate 3 17 3.5 1,000 "
    "007 café naïve ŒUVRE "
    "“quoted” “the” — … 中文 灯。 мельница ١٢ ＡＢＣ #tag a/b // `x` x=1 return self.value {} () "
    "foo(bar) \t : ; ! ? "
    ". , \r and of Paragraph Question: Answer: yes no Unanswerable"
).split(" ")
CLASSES = [
    "Number",
    "Number of something",
    "Other number",
    "Date",
    "Food",
    "Order, rank",
    "Disease and medicine",
    "Animal",
    "Other location",
    "Other entity",
    "City",
    "Abbreviation",
    "Lasting time of something",
    "Individual",
    "Sport",
    "Colour",
    "Group or organization of person",
    "Number of Date",
    "umber",
    "ate",
    "Speed",
    "Currency name",
]


def sentence(rng, words=12):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, words)))


def paragraphs(rng, words=12):
    return rng.choice([". ", ".", "\n", " ", ".\n\n"]).join(
        sentence(rng, words) for _ in range(rng.randint(1, 5))
    )


def line_of_code(rng):
    called = rng.sample(
        ["self.value", "x", "foo(bar)", "{}", "'a b'", "名", "1000"], rng.randint(1, 4)
    )
    return (
        " " * rng.choice([0, 4, 8])
        + rng.choice(["return ", "x = ", "if ", ""])
        + " + ".join(called) * rng.choice([1, 1, 9])
    )


def reference(task, rng):
    """A plausible reference of the task."""
    if task == "trec":
        return rng.choice(CLASSES)
    if task == "passage_count":
        return str(rng.randint(0, 30))
    if task == "passage_retrieval_en":
        return f"Paragraph {rng.randint(1, 30)}"
    if task in ("lcc", "repobench-p"):
        return line_of_code(rng)
    return (
        paragraphs(rng)
        if task in ("gov_report", "qmsum", "multi_news", "samsum")
        else sentence(rng, 6)
    )


def spoilt(text, task, rng):
    """A prediction that is the reference, nearly it, part of it, more than it or nothing
    like it.
    """
    words = text.split(" ")
    place = rng.randrange(len(words))
    other = reference(task, rng)
    return rng.choice(
        [
            text,
            text.upper(),
            "",
            rng.choice([" ", "\n", "...", "\n\n \t", ". .", "`", "#"]),
            " ".join(words[:place] + words[place + 1 :]),
            " ".join([*words[:place], rng.choice(WORDS), *words[place:]]),
            " ".join(rng.sample(words, len(words))),
            text[: rng.randint(0, len(text))],
            f"{text}, {other}",
            f"{other}\n{text}",
            f"\n  {text}\n{other}",
            f"# {other}\n```python\n{text}\n```",
            f"The answer is {text}. {rng.randint(0, 30)}!",
            paragraphs(rng),
            other,
            f"{text} " * rng.randint(2, 30),
        ]
    )


def pairs(task):
    """(Prediction, references); several references for some."""
    rng = random.Random(f"conformance {task}")
    for _ in range(PAIRS):
        answers = [reference(task, rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        yield spoilt(rng.choice(answers), task, rng), answers


@pytest.fixture
def unrounded(monkeypatch):
    """kvpress's scorer with a `round` that does not."""
    monkeypatch.setattr(theirs, "round", lambda value, digits: value, raising=False)
    return theirs


def ours(task, prediction, answers):
    facts = {"classes": CLASSES} if task == "trec" else {}
    return make_benchmark("longbench").score(
        Question("0", task, "", tuple(answers), 1, facts=facts), prediction
    )


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_equal(task, unrounded):
    assert "difflib" in theirs.fuzz.SequenceMatcher.__module__, (
        "kvpress does not ask for python-Levenshtein"
    )
    found = []
    for prediction, answers in pairs(task):
        found.append(ours(task, prediction, answers))
        assert 100 * found[-1] == unrounded.scorer(task, [prediction], [answers], CLASSES), (
            prediction,
            answers,
        )
    assert len(set(found)) > 3 and 0 in found and max(found) > 0.99, "the pairs tell little"


@pytest.mark.parametrize("task", TASKS)
def test_means_are_equal(task):
    made = list(pairs(task))
    rows = [
        {"predicted_answer": p, "answers": a, "task": task, "all_classes": CLASSES} for p, a in made
    ]
    assert round(
        100 * sum(ours(task, *pair) for pair in made) / len(made), 2
    ) == theirs.calculate_metrics(pandas.DataFrame(rows))


def test_long_sentences_fail_in_theirs_and_are_scored_here(unrounded):
    """The library's recursion ends at about 950 words; kvpress then counts 0."""
    sentence = "word " * 1200
    assert unrounded.scorer("gov_report", [sentence], [[sentence]], None) == 0
    assert ours("gov_report", sentence, [sentence]) == pytest.approx(1)


def test_prompts_are_equal():
    source = Path(theirs.__file__).with_name("create_huggingface_dataset.py").read_text()
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    names = ("context_prefix", "question_template", "answer_prefix", "DATA_NAME_TO_MAX_NEW_TOKENS")
    for task in TASKS:
        assert tuple(PROMPTS[task]) == tuple(tables[name][task] for name in names)
    assert f"DATA_NAME_TO_MAX_NEW_TOKENS[task] + {EXTRA_TOKENS}" in source
