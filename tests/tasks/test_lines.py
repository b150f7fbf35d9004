"""Texts and questions of the user's own, and the benchmark that the documentation shows."""

import json
from dataclasses import replace

import pytest

from restorekv import tasks
from restorekv.errors import RestoreKVError
from restorekv.tasks import Question
from tests.helpers.cli_world import cli
from tests.helpers.models import build_tokenizer
from tests.helpers.pages import ROOT, blocks

PAGE = ROOT / "docs" / "evaluation.md"
ROW = {"context": "The mill was built in 1871.", "questions": ["When?"], "answers": ["1871"]}


def load(path, *rows, settings=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = tasks.make_benchmark(f"lines:path={path}{settings}")
    return benchmark, benchmark.choose_samples(build_tokenizer(), "kvpress")


def test_rows_are_asked_in_their_order(tmp_path):
    several = ROW | {"questions": ["Who?", "When?"], "answers": [["Ann", "Ann Lee"], "1871"]}
    benchmark, samples = load(tmp_path / "a.jsonl", ROW, several | {"id": "mill", "task": "dates"})
    assert [sample.id for sample in samples] == ["1", "mill"]
    assert [question.id for question in samples[1].questions] == ["mill/1", "mill/2"]
    assert [question.task for question in samples[1].questions] == ["dates", "dates"]
    assert samples[1].questions[0].answers == ("Ann", "Ann Lee")
    assert benchmark.score(samples[1].questions[0], "Ann Lee") == 1
    assert benchmark.compute_metrics(samples[0].questions[0], "It was 1871.") == {"contained": 1}
    assert benchmark.to_json()["files"]
    _, fewer = load(tmp_path / "a.jsonl", several, settings=",questions=1")
    assert len(fewer[0].questions) == 1


@pytest.mark.parametrize(
    "row, said",
    [
        ({"context": "a"}, "row 1.* is not a text .*its field questions is missing"),
        (ROW | {"answers": []}, "its field answers"),
        (ROW | {"answers": ["1", "2"]}, "its field answers has 2, and questions has 1"),
        (ROW | {"answers": [["1", 2]]}, "its field answers"),
        (ROW | {"answers": [" "]}, "its field answers"),
        (ROW | {"questions": [" "]}, "its field questions"),
        (ROW | {"context": " "}, "its field context"),
        (ROW | {"task": 3}, "its field task"),
        ([ROW], "is not a text with questions and answers"),
    ],
)
def test_other_rows_are_refused(tmp_path, row, said):
    with pytest.raises(RestoreKVError, match=said.replace("row 1", "a.jsonl")):
        load(tmp_path / "a.jsonl", row)


def test_a_letter_or_a_sign_can_be_the_answer(tmp_path):
    """Words like "a" count for nothing in a sentence, and here they are all there is."""
    benchmark, samples = load(tmp_path / "a.jsonl", ROW | {"answers": ["A"]})
    (question,) = samples[0].questions
    scores = [benchmark.score(question, said) for said in ("A", " a.\nB", "B", "A mill")]
    assert scores == [1, 1, 0, 0]


def test_two_rows_have_two_ids(tmp_path):
    with pytest.raises(RestoreKVError, match="has 2 texts with the id '7'"):
        load(tmp_path / "a.jsonl", ROW | {"id": "7"}, ROW | {"id": "7"})
    with pytest.raises(RestoreKVError, match=r"as in lines:path=mine\.jsonl"):
        tasks.make_benchmark("lines").choose_samples(build_tokenizer(), "kvpress")


def test_the_page_shows_a_row_and_a_benchmark_that_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = [text for _, text in blocks(PAGE, "json")]
    _, samples = load(tmp_path / "mine.jsonl", json.loads(row))
    assert samples[0].questions[0].answers == ("1871",)
    (source,) = [text for _, text in blocks(PAGE, "py") if "class Invoices" in text]
    world = {"__name__": "page"}
    exec(compile(source, PAGE.name, "exec"), world)
    (tmp_path / "invoices.jsonl").write_text(json.dumps({"text": "Pay 12.", "amount": "12"}))
    own = world["Invoices"]()
    (sample,) = own.choose_samples(build_tokenizer(), "kvpress")
    assert isinstance(sample.questions[0], Question)
    assert (own.score(sample.questions[0], "It is 12."), own.score(sample.questions[0], "13")) == (
        1,
        0,
    )


@pytest.mark.slow
def test_the_page_compares_evictors_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "eval --model tiny --benchmark tiny --evictor kvzip --evictor snapkv --ratio 0.1"
    assert cli(*line.split(), "--count", "2", "--out", "runs/own").code == 0
    (source,) = [text for _, text in blocks(PAGE, "py") if "compare_results" in text]
    world = {"__name__": "page"}
    exec(compile(source, PAGE.name, "exec"), world)
    assert not any(world[name].cell.restored for name in ("snapkv", "kvzip"))
    assert world["found"]["score_low"] is None, "two contexts have no interval"
    (source,) = [text for _, text in blocks(PAGE, "py") if "make_frame" in text]
    exec(compile(source, PAGE.name, "exec"), world)
    assert len((tmp_path / "own.csv").read_text().splitlines()) == 1 + 5  # full, and two restored
    # As the table does, which leaves out what the full cache cannot do.
    assert world["full"].cell.evictor == "full"


def test_rows_with_one_id_and_rows_asked_nothing(tmp_path):
    """Elsewhere too: the later row would take the earlier one's place without a word."""
    rows = tasks.make_benchmark("genres").load_samples(build_tokenizer(), "kvpress")
    assert len({row.id for row in rows}) == len(rows)

    class Twice(type(tasks.make_benchmark("genres"))):
        def load_samples(self, tokenizer, protocol):
            return [rows[0], rows[1], rows[0]]

    with pytest.raises(RestoreKVError, match="has 2 texts with the id"):
        Twice().choose_samples(build_tokenizer(), "kvpress")

    class Alike(type(tasks.make_benchmark("genres"))):
        def load_samples(self, tokenizer, protocol):
            first, second = rows[0].questions[:2]
            return [replace(rows[0], questions=(first, replace(second, id=first.id)))]

    # The answers kept would be counted with another question's.
    with pytest.raises(RestoreKVError, match="two questions with one id"):
        Alike().choose_samples(build_tokenizer(), "kvpress")

    class Silent(type(tasks.make_benchmark("genres"))):
        def load_samples(self, tokenizer, protocol):
            return [rows[0], replace(rows[1], questions=())]

    assert Silent(count=1).choose_samples(build_tokenizer(), "kvpress") == [rows[0]]
