"""The benchmark of a book: where its facts stand, and that every way answers about them."""

import json

import pytest

from benchmarks import book, book_side
from benchmarks.book import PLACES, WAYS, count_right, make_book, make_table
from restorekv.model.load import load_model


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def test_facts_are_spread_over_the_book(tiny):
    _, tokenizer = tiny
    made = make_book(tokenizer, 3000, seed=1)
    assert len(tokenizer.encode(made.text)) == pytest.approx(3000, abs=60)
    places = [made.text.index(f" is {answer}.") / len(made.text) for answer in made.answers]
    assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.9
    assert len(set(made.answers)) == len(PLACES) == 20
    for question, answer in zip(made.questions, made.answers, strict=True):
        place = question.removesuffix("?").rpartition(" ")[2]
        assert f"The number of the {place} is {answer}." in made.text
    assert make_book(tokenizer, 3000, seed=1) == made != make_book(tokenizer, 3000, seed=2)


def test_only_the_first_line_counts():
    assert count_right([" is 12.\nis 9", "is 9\nis 12"], ["12", "12"]) == 1


def test_every_way_is_measured(tiny, tmp_path):
    _, tokenizer = tiny
    made = make_book(tokenizer, 1000, seed=0)
    path = tmp_path / "book.json"
    path.write_text(json.dumps(vars(made)), "utf-8")
    rows = []
    for way in WAYS:
        job = {"model": "tiny", "book": str(path), "way": way, "ratio": "0.5"}
        job |= {"evictor": "snapkv", "part": 256, "answer": 4}
        rows.append({"way": way, "right": 0, "same": 0, **book_side.measure(job)})
    whole, at_once, in_parts = rows
    assert at_once["held"] < whole["held"] and in_parts["held"] < whole["held"]
    assert all(len(row["texts"]) == len(PLACES) and row["read"] > 0 for row in rows)
    result = {"rows": rows, "questions": made.questions, "model": "tiny", "tokens": 1000}
    table = make_table({**result, "evictor": "snapkv", "part": 256})
    assert [row[0] for row in table.rows] == [book.TRANSFORMERS, book.AT_ONCE, book.IN_PARTS]
