"""QASPER from LongBench and from its own development file, as released and as the hub stores it."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import Question, make_benchmark
from tests.helpers.longbench_world import official_rows

NOTHING = {"unanswerable": False, "extractive_spans": [], "yes_no": None, "free_form_answer": ""}


def annotation(**said):
    return {
        "answer": {**NOTHING, **said, "evidence": [], "highlighted_evidence": []},
        "annotation_id": "",
        "worker_id": "",
    }


QUESTIONS = {
    "What burns?": (
        [annotation(extractive_spans=["oil", "wood"]), annotation(free_form_answer="Oil burns.")],
        ("oil, wood", "Oil burns."),
    ),
    "Is it bright?": (
        [
            annotation(yes_no=True),
            annotation(yes_no=False),
            annotation(unanswerable=True, extractive_spans=["x"]),
        ],
        ("Yes", "No", "Unanswerable"),
    ),
}
RELEASED = {
    "1234.5678": {
        "title": "On lamps",
        "abstract": "We light lamps.",
        "full_text": [
            {"section_name": "Introduction", "paragraphs": ["Lamps\nburn oil. ", ""]},
            {"section_name": None, "paragraphs": ["Wood burns too."]},
            {"section_name": "Method ::: Oil", "paragraphs": []},
        ],
        "qas": [
            {"question": asked, "question_id": f"q{number}", "answers": answers, "search_query": ""}
            for number, (asked, (answers, _)) in enumerate(QUESTIONS.items())
        ],
    },
    "2345.6789": {"title": "Unasked", "abstract": "", "full_text": [], "qas": []},
}
ARTICLE = (
    "\n\nArticle: Introduction\nLamps burn oil.\nWood burns too.\nMethod ::: Oil\n\n Answer the "
    "question"
)


def columns(records):
    """A list of records as `datasets` stores it: a record of lists."""
    return {key: [record[key] for record in records] for key in records[0]} if records else {}


def stored(paper, name):
    asked = [{**row, "answers": columns(row["answers"])} for row in paper["qas"]]
    return {**paper, "id": name, "full_text": columns(paper["full_text"]), "qas": columns(asked)}


def check(samples):
    (sample,) = samples
    assert ARTICLE in sample.context and "On lamps" not in sample.context
    assert [asked.id for asked in sample.questions] == ["q0", "q1"]
    for asked, (text, (_, answers)) in zip(sample.questions, QUESTIONS.items(), strict=True):
        assert (asked.text, asked.answers) == (f"Question: {text}\n\n", answers)
        assert (asked.answer_prefix, asked.max_new_tokens, asked.task) == ("Answer:", 148, "qasper")


def official(path):
    return make_benchmark(f"qasper:source=official,path={path}").choose_samples(None, "kvpress")


@pytest.mark.parametrize("indent", [None, 1])
def test_the_released_file(tmp_path, indent):
    file = tmp_path / "qasper-dev-v0.3.json"
    file.write_text(json.dumps(RELEASED, indent=indent))
    check(official(file))


def test_the_hubs_rows(tmp_path, monkeypatch):
    import datasets

    row = stored(RELEASED["1234.5678"], "1234.5678")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "0000.parquet")
    check(official(tmp_path))

    def load(name, subset, split, revision):
        assert (name, subset, split, revision) == (
            "allenai/qasper",
            None,
            "validation",
            "refs/convert/parquet",
        )
        return [row]

    monkeypatch.setattr(datasets, "load_dataset", load)
    check(make_benchmark("qasper:source=official").choose_samples(None, "kvpress"))


def test_longbench_has_it_by_default(tmp_path):
    (tmp_path / "qasper.jsonl").write_text("\n".join(map(json.dumps, official_rows("qasper"))))
    made = make_benchmark(f"qasper:path={tmp_path}")
    assert made.choose_samples(None, "kvpress") == make_benchmark(
        f"longbench:tasks=qasper,path={tmp_path}"
    ).choose_samples(None, "kvpress")
    assert "Xnhyacinth/LongBench" in make_benchmark("qasper").to_json()["data"]


def test_the_closest_annotator_counts():
    asked = Question("0", "qasper", "", ("oil, wood", "Oil burns."), 1)
    scored = make_benchmark("qasper").score
    assert scored(asked, "The oil!") == pytest.approx(2 / 3)  # precision 1, recall 1/2 of either
    assert scored(asked, "wood, oil") == 1
    assert scored(asked, "Unanswerable") == scored(asked, "") == 0


def test_mistakes_are_told(tmp_path):
    with pytest.raises(RestoreKVError, match="source must be longbench or official, not 'hub'"):
        make_benchmark("qasper:source=hub")
    broken = {
        "1": {
            **RELEASED["1234.5678"],
            "qas": [{"question": "?", "question_id": "0", "answers": [annotation()]}],
        }
    }
    for content in (
        broken,
        {"1": {**broken["1"], "qas": [{"question": "?", "question_id": "0", "answers": []}]}},
        [3],
    ):
        file = tmp_path / "dev.json"
        file.write_text(json.dumps(content))
        with pytest.raises(
            RestoreKVError,
            match=r"dev.json, .* is not a paper of QASPER; fetch qasper-dev-v0.3.json",
        ):
            official(file)
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(RestoreKVError, match="has 2 files; give path=FILE"):
        official(tmp_path)
