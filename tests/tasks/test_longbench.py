"""LongBench from small files in both true formats: what is compressed, what is asked, what is
scored.
"""

import json
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import Question, make_benchmark
from restorekv.tasks.longbench import CATEGORIES, METRICS, PROMPTS, TASKS
from tests.helpers.longbench_world import OFFICIAL, TYPES, official_rows

KVPRESS = [
    {
        "question": "Question: How many lamps?\n\n",
        "context": "Instruction. We lit {nine} lamps. ",
        "answers": ["nine", "9 lamps"],
        "length": 4,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "0",
        "answer_prefix": "Answer:",
        "task": "qasper",
        "max_new_tokens": 148,
    }
]


@pytest.fixture
def unpacked(tmp_path):
    """What data.zip unpacks to."""
    folder = tmp_path / "data"
    folder.mkdir()
    for task in OFFICIAL:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in official_rows(task))
        (folder / f"{task}.jsonl").write_text("".join(lines))
    (folder / "qasper_e.jsonl").write_text("{}\n")  # LongBench-E lies beside it and is not read
    return tmp_path


def samples(path, tasks):
    return make_benchmark(f"longbench:path={path},tasks={tasks}").choose_samples(None, "kvpress")


def test_official_rows_get_kvpress_prompts(unpacked):
    lamps, costs = samples(unpacked, "qasper")
    told = (
        "Answer the question as concisely as you can, using a single phrase or sentence if "
        "possible. If the question"
    )
    assert lamps.context.startswith(f"You are given a scientific article and a question. {told}")
    assert (
        "\n\nArticle: Lamps\nWe lit {nine} lamps.\n\n Answer the question based on the above"
        in lamps.context
    )
    assert lamps.context.endswith(
        'answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
    )
    assert [asked.text for asked in lamps.questions] == [
        "Question: How many lamps?\n\n",
        "Question: Were they lit?\n\n",
    ]
    assert [sample.id for sample in (lamps, costs)] == ["qasper-0", "qasper-1"]
    assert [asked.id for asked in lamps.questions] == ["qasper-0", "qasper-2"]
    first = lamps.questions[0]
    assert (first.task, first.answers, first.max_new_tokens, first.answer_prefix) == (
        "qasper",
        ("nine", "9 lamps"),
        148,
        "Answer:",
    )


def test_labels_move_from_the_question_to_the_answers_prefix(unpacked):
    (sample,) = samples(unpacked, "trec")
    (asked,) = sample.questions
    assert (asked.text, asked.answer_prefix) == ("Question: Where is the mill?\n", "Type:")
    assert asked.facts == {"classes": TYPES}


def test_code_and_paragraphs(unpacked):
    code, paragraphs = samples(unpacked, "passage_retrieval_en+lcc")[::-1]
    assert code.context == "Please complete the code given below. \ndef f():\n    x = 1\n"
    assert (code.questions[0].text, code.questions[0].answer_prefix) == ("", "Next line of code:\n")
    assert paragraphs.questions[0].text.startswith(
        "Of mills.\n\nPlease enter the number of the paragraph"
    )
    assert paragraphs.context.endswith("\n\nThe following is an abstract.\n\n")


@pytest.mark.parametrize(
    "layout", ["qasper/test-00000-of-00001.parquet", "qasper.parquet", "qasper.jsonl"]
)
def test_kvpress_rows_are_taken_as_they_are(tmp_path, layout):
    file = tmp_path / layout
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(KVPRESS), file)
    else:
        file.write_text(json.dumps(KVPRESS[0]))
    check_kvpress(samples(tmp_path, "qasper"))


def check_kvpress(read):
    (sample,) = read
    (asked,) = sample.questions
    row = KVPRESS[0]
    assert (sample.context, asked.text) == (row["context"], row["question"])
    assert (asked.answers, asked.max_new_tokens, asked.answer_prefix) == (
        ("nine", "9 lamps"),
        148,
        "Answer:",
    )


def test_the_hub_is_asked_for_a_task(monkeypatch):
    import datasets

    def load(name, subset, split, revision):
        assert (name, subset, split, revision) == ("Xnhyacinth/LongBench", "qasper", "test", None)
        return KVPRESS

    monkeypatch.setattr(datasets, "load_dataset", load)
    check_kvpress(make_benchmark("longbench:tasks=qasper").choose_samples(None, "kvpress"))


def test_without_the_hub_it_tells_what_to_fetch(monkeypatch):
    def load(*args, **kwargs):
        raise ConnectionError("no route to host\nmore")

    logging = SimpleNamespace(set_verbosity=lambda level: None, CRITICAL=50)
    fake = SimpleNamespace(load_dataset=load, disable_progress_bars=lambda: None, logging=logging)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(
        RestoreKVError,
        match=r"LongBench from the hub \(no route to host\); fetch .* give path=FOLDER",
    ):
        make_benchmark("longbench").choose_samples(None, "kvpress")


def test_a_count_is_spread_over_the_tasks(unpacked):
    asked = make_benchmark(
        f"longbench:path={unpacked},tasks=qasper+trec+lcc,count=3,seed=1"
    ).choose_samples(None, "kvpress")
    assert [sample.questions[0].task for sample in asked] == ["qasper", "trec", "lcc"]


@pytest.mark.parametrize(
    "change",
    [
        {"context": None},
        {"answers": []},
        {"answers": "nine"},
        {"answers": [9]},
        {"all_classes": 7},
        {"max_new_tokens": ""},
    ],
)
def test_broken_rows_are_refused(tmp_path, change):
    row = {**(KVPRESS[0] if "max_new_tokens" in change else official_rows("qasper")[0]), **change}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        RestoreKVError,
        match=r"qasper.jsonl, line 1 is not a row of LongBench.*; fetch the file again",
    ):
        samples(tmp_path, "qasper")


def test_mistakes_are_told(unpacked, tmp_path):
    with pytest.raises(
        RestoreKVError, match=r"no task 'qaspar'; use some of narrativeqa, .*, joined by \+"
    ):
        make_benchmark("longbench:tasks=trec+qaspar")
    with pytest.raises(
        RestoreKVError, match=r"has no task samsum; fetch .* or leave it out by tasks=NAME\+NAME"
    ):
        samples(unpacked, "samsum")
    (tmp_path / "trec.json").write_text("[]")
    with pytest.raises(RestoreKVError, match="are both trec"):
        samples(tmp_path, "trec")
    (tmp_path / "lcc.json").write_text("[[1]]")
    with pytest.raises(RestoreKVError, match=r"lcc.json, row 1 is not a row|are both lcc"):
        samples(tmp_path / "lcc.json", "lcc")


def score(task, prediction, *answers, **facts):
    return make_benchmark("longbench").score(
        Question("0", task, "", answers, 1, facts=facts), prediction
    )


def test_the_best_reference_counts():
    assert score("qasper", "nine lamps", "Unanswerable", "nine lamps", "lamps") == 1
    assert score("qasper", "nine", "Unanswerable") == 0


def test_only_the_first_line_of_few_shot_answers_counts():
    assert score("trec", " \n Place\nQuestion: Which?\nType: Colour", "Place", classes=TYPES) == 1
    assert score("triviaqa", "the mill\nPassage: more words", "Mill") == 1
    assert score("samsum", "she left\nDialogue: x", "she left") == pytest.approx(1)
    assert score("qasper", "mill\nmore words", "mill") == 0.5


def test_leading_space_does_not_count():
    """As in kvpress, not as in the official script: of "    return x" the indentation goes, and
    of the reference it does not."""
    assert score("lcc", "    return x", "return x") == 1
    assert score("lcc", "    return x", "    return x") == 0.8  # 2 * 8 / 20


def test_each_task_has_a_prompt_a_metric_and_a_category():
    assert len(TASKS) == 16 and set(TASKS) == set(PROMPTS) == set(METRICS)
    assert make_benchmark("longbench").group_tasks() == CATEGORIES
    assert make_benchmark("longbench:tasks=lcc+repobench-p+qasper").group_tasks() == {
        "Code": ("lcc", "repobench-p")
    }
    assert make_benchmark("longbench:tasks=trec").spec == "longbench:tasks=trec"
    assert "Xnhyacinth/LongBench" in make_benchmark("longbench").to_json()["data"]
