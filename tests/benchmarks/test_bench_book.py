"""The benchmark of a book: where its facts stand, and that every way answers about them."""

import json
from dataclasses import replace

import pytest

from benchmarks import book, book_side
from benchmarks.book import PLACES, WAYS, Options, count_right, make_book, make_table, run_book
from restorekv.errors import RestoreKVError
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


def test_a_kept_row_is_not_measured_again(tiny, tmp_path, monkeypatch):
    _, tokenizer = tiny
    monkeypatch.setattr(book, "load_model", lambda name: (None, tokenizer))
    measured = []

    def measure(command, job, folder, what):
        measured.append((job["way"], job["ratio"]))
        if len(measured) == 2 and job["answer"] == 14:
            raise RestoreKVError("out of memory")
        return {"ratio": job["ratio"], "texts": [""] * len(PLACES)}

    monkeypatch.setattr(book, "measure_apart", measure)
    options = Options("tiny", 1500, "knorm", ("0.5",), 512, 14)
    with pytest.raises(RestoreKVError):
        run_book(options, print, 1, tmp_path)
    result = run_book(options, print, 1, tmp_path)
    assert measured == [(WAYS[0], "1"), (WAYS[1], "0.5"), (WAYS[1], "0.5"), (WAYS[2], "0.5")]
    assert [row["way"] for row in result["rows"]] == list(WAYS)
    run_book(replace(options, answer=7), print, 1, tmp_path)
    assert len(measured) == 7
