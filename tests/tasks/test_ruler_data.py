"""RULER from files: kvpress's data set, essays, SQuAD and HotpotQA, each in its true form, small
and made by hand.
"""

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import make_benchmark
from restorekv.tasks.ruler import documents

CONTEXT = (
    "A special magic number is hidden within the following text.\nOne of the special magic numbers "
    "for a is: 1.\n"
)
ROWS = [
    {
        "context": CONTEXT,
        "question": "What is the special magic number for a mentioned in the provided text? ",
        "answer_prefix": "The special magic number for a mentioned in the provided text is",
        "answer": ["1"],
        "task": "niah_single_1",
        "max_new_tokens": 128,
    },
    {
        "context": "Some documents.\n\n",
        "question": "Answer the question based on the given documents. Who? ",
        "answer_prefix": "Answer:",
        "answer": ["she", "her"],
        "task": "qa_1",
        "max_new_tokens": 32,
    },
    {
        "context": CONTEXT,
        "question": "What is the special magic number for b mentioned in the provided text? ",
        "answer_prefix": "The special magic number for b mentioned in the provided text is",
        "answer": ["2"],
        "task": "niah_single_1",
        "max_new_tokens": 128,
    },
]
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Normans",
            "paragraphs": [
                {
                    "context": "The Normans gave their name to Normandy.",
                    "qas": [
                        {
                            "question": "What did they name?",
                            "id": "1",
                            "answers": [
                                {"text": "Normandy", "answer_start": 31},
                                {"text": "Normandy, a region"},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "question": "Who?",
                            "id": "2",
                            "answers": [],
                            "is_impossible": True,
                            "plausible_answers": [],
                        },
                    ],
                },
                {"context": "Rollo led them.", "qas": []},
            ],
        },
        {
            "title": "Oxygen",
            "paragraphs": [
                {
                    "context": "Oxygen is number 8.",
                    "qas": [
                        {
                            "question": "Which?",
                            "id": "3",
                            "answers": [{"text": "8"}],
                            "is_impossible": False,
                        },
                    ],
                },
                {"context": "It burns." + " Much was said of it." * 9, "qas": []},
            ],
        },
    ],
}
HOTPOT = [
    {
        "_id": "5a",
        "question": "Where is the maker of Ax?",
        "answer": "Bonn",
        "supporting_facts": [["Ax", 0], ["Maker", 1]],
        "context": [
            ["Other", ["No.", " Nothing here."]],
            ["Ax", ["Ax is by Maker."]],
            ["Maker", ["Maker makes.", " It is in Bonn."]],
        ],
        "type": "bridge",
        "level": "hard",
    },
    {
        "_id": "5b",
        "question": "Who?",
        "answer": "Eve",
        "supporting_facts": [["Eve", 0]],
        "context": [["Eve", ["Eve did."]], ["Ax", ["Ax is by Maker."]]],
        "type": "comparison",
        "level": "easy",
    },
]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def stored(folder, kind, rows):
    """The rows as a file of kvpress's data set."""
    if kind == "jsonl":
        return write(folder / "ruler.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "4096" / "test-00000-of-00001.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_with_one_context_are_one_sample(tmp_path, kind):
    source = stored(tmp_path, kind, ROWS)
    write(
        tmp_path / "8192" / "test.jsonl", json.dumps({**ROWS[0], "context": "longer"})
    ) if kind == "parquet" else None
    first, second = make_benchmark(f"ruler:source={source},tasks=qa_1+niah_single_1").load_samples(
        None, "kvpress"
    )
    assert (first.id, first.context) == ("niah_single_1-0", CONTEXT)
    assert [asked.id for asked in first.questions] == ["niah_single_1-0", "niah_single_1-1"]
    assert [asked.answers for asked in first.questions] == [("1",), ("2",)]
    (asked,) = second.questions
    assert (asked.task, asked.text, asked.answer_prefix) == ("qa_1", ROWS[1]["question"], "Answer:")
    assert (asked.answers, asked.max_new_tokens) == (("she", "her"), 32)


def test_a_length_that_a_folder_lacks_is_refused(tmp_path):
    """All files below the folder would be those of other lengths."""
    source = stored(tmp_path, "parquet", ROWS)
    with pytest.raises(RestoreKVError, match="has RULER of 4096 tokens, not of 8192"):
        make_benchmark(f"ruler:source={source},length=8192").load_samples(None, "kvpress")


def test_only_the_tasks_wanted_are_read_and_none_is_missed(tmp_path):
    source = stored(tmp_path, "jsonl", ROWS)
    assert (
        len(list(make_benchmark(f"ruler:source={source},tasks=qa_1").load_samples(None, "kvpress")))
        == 1
    )
    with pytest.raises(RestoreKVError, match="no rows of the task niah_single_2"):
        make_benchmark(f"ruler:source={source}").load_samples(None, "kvpress")


def test_the_hub_is_asked_for_the_length_as_config(monkeypatch):
    asked = []

    class Library:
        logging = type("", (), {"set_verbosity": staticmethod(lambda level: None), "CRITICAL": 50})
        disable_progress_bars = staticmethod(lambda: None)

        @staticmethod
        def load_dataset(*args, **kwargs):
            asked.append((args, kwargs["split"]))
            return ROWS

    monkeypatch.setitem(sys.modules, "datasets", Library)
    found = make_benchmark("ruler:source=hub,length=8192,tasks=qa_1").load_samples(None, "kvpress")
    assert asked == [(("simonjegou/ruler", "8192"), "test")] and found[0].questions[0].answers == (
        "she",
        "her",
    )


def test_a_hub_out_of_reach_is_told_with_what_to_do(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route to the hub")

    import datasets

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(RestoreKVError, match=r"no route to the hub.*source=FOLDER"):
        make_benchmark("ruler:source=hub").load_samples(None, "kvpress")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer": "1"}, "line 1 is not a row of .*its field answer"),
        ({"answer": []}, "its field answer"),
        ({"answer": [1]}, "its field answer"),
        ({"max_new_tokens": None}, "is not a row"),
        ({"context": None}, "its field context"),
    ],
)
def test_a_row_of_another_form_is_refused(tmp_path, change, told):
    source = stored(tmp_path, "jsonl", [{**ROWS[0], **change}])
    with pytest.raises(RestoreKVError, match=told):
        make_benchmark(f"ruler:source={source},tasks=niah_single_1").load_samples(None, "kvpress")


def test_squad_is_read_with_its_articles(tmp_path):
    found = documents.load_questions("squad", str(write(tmp_path / "dev-v2.0.json", SQUAD)))
    assert list(found.documents) == sorted(
        paragraph["context"] for article in SQUAD["data"] for paragraph in article["paragraphs"]
    )
    normans, oxygen = found.questions
    assert (normans.query, normans.answers) == (
        "What did they name?",
        ("Normandy", "Normandy, a region"),
    )
    assert [found.documents[index] for index in (*normans.own, *normans.near)] == [
        "The Normans gave their name to Normandy.",
        "Rollo led them.",
    ]
    assert [found.documents[index] for index in oxygen.own] == ["Oxygen is number 8."]


def test_hotpot_is_read_with_titles_and_distractors(tmp_path):
    found = documents.load_questions(
        "hotpot", str(write(tmp_path / "hotpot_dev_distractor_v1.json", HOTPOT))
    )
    assert len(found.documents) == 4 and "Maker\nMaker makes. It is in Bonn." in found.documents
    first, second = found.questions
    assert [found.documents[index].split("\n")[0] for index in first.own] == ["Ax", "Maker"]
    assert [found.documents[index].split("\n")[0] for index in (*first.near, *second.near)] == [
        "Other",
        "Ax",
    ]
    assert (first.query, first.answers) == ("Where is the maker of Ax?", ("Bonn",))


def test_questions_of_files_are_asked_in_their_order_over_as_many_documents_as_fit(
    tmp_path, tiny_tokenizer
):
    squad = write(tmp_path / "dev-v2.0.json", SQUAD)

    def samples(length):
        return list(
            make_benchmark(
                f"ruler:tasks=qa_1,per_task=2,squad={squad},length={length}"
            ).load_samples(tiny_tokenizer, "")
        )

    first, second = samples(4000)
    assert first.questions[0].answers == ("Normandy", "Normandy, a region") and second.questions[
        0
    ].answers == ("8",)
    assert first.questions[0].text.endswith("Question: What did they name? ")
    shown = first.context.split("given documents.\n\n")[1]
    assert (
        all(f"Document {number}:\n" in shown for number in (1, 2, 3, 4))
        and "Document 5" not in shown
    )
    told = tiny_tokenizer(
        first.context + first.questions[0].text + "Answer:", add_special_tokens=False
    ).input_ids
    fewer = samples(len(told) + 32 - 1)[0].context
    assert "Document 3:\n" in fewer and "Document 4:\n" not in fewer
    # Its own article first.
    assert "Rollo led them." in fewer and "The Normans gave their name to Normandy." in fewer


def test_too_few_questions_are_told(tmp_path, tiny_tokenizer):
    squad = write(tmp_path / "dev-v2.0.json", SQUAD)
    with pytest.raises(RestoreKVError, match="has 2 questions; per_task must be at most 2"):
        list(
            make_benchmark(f"ruler:tasks=qa_1,per_task=3,squad={squad}").load_samples(
                tiny_tokenizer, "kvpress"
            )
        )


@pytest.mark.parametrize(
    ("kind", "content"), [("squad", HOTPOT), ("hotpot", SQUAD), ("squad", [1]), ("hotpot", {})]
)
def test_a_file_of_another_form_is_refused(tmp_path, kind, content):
    file = write(tmp_path / "file.json", content)
    with pytest.raises(RestoreKVError, match=r"is not in the form of .*\.json; give that file"):
        documents.load_questions(kind, str(file))


@pytest.mark.parametrize("form", ["json", "folder"])
def test_essays_are_read_and_begin_again_where_they_end(tmp_path, tiny_tokenizer, form):
    text = (
        'What I Worked On\n\nBefore college I wrote. "Why?" I asked. '
        "It was 3.5 miles,  e.g. far! So I went."
    )
    if form == "json":
        where = write(tmp_path / "PaulGrahamEssays.json", {"text": text})
    else:
        where = tmp_path
        for name, part in zip("ab", text.split("\n\n"), strict=True):
            write(tmp_path / f"{name}.txt", part)
    (sample,) = make_benchmark(
        f"ruler:tasks=niah_single_2,per_task=1,essays={where},length=1500"
    ).load_samples(tiny_tokenizer, "")
    sentences = [
        "What I Worked On Before college I wrote.",
        '"Why?"',
        "I asked.",
        "It was 3.5 miles, e.g. far!",
        "So I went.",
    ]
    hidden = sample.context.split("afterwards.\n")[1].strip()
    before, after = hidden.split(f"is: {sample.questions[0].answers[0]}.")
    before = before[: before.index("One of the special")].strip()
    assert " ".join(sentences * 30).startswith(f"{before} {after.strip()}".strip())
    assert not before or before.endswith(tuple(sentences))
    told = make_benchmark(f"ruler:tasks=niah_single_2,essays={where}").to_json()
    assert told["stand_ins"] == {} and told["files"]["essays"]["files"][0]["sha256"]


def test_essays_begin_at_their_first_word_whatever_the_source(tmp_path, tiny_tokenizer):
    """As in RULER, where every sample reads the same text; a file may be longer than a sample."""
    opening = "What I Worked On before college was writing."
    rest = " ".join(f"Then came sentence {number} of it." for number in range(400))
    file = write(tmp_path / "PaulGrahamEssays.json", {"text": f"{opening} {rest}"})
    spec = f"ruler:tasks=niah_single_2,per_task=3,essays={file},length=1024"
    contexts = []
    for settings in (spec, f"{spec},source=generated"):
        samples = make_benchmark(settings).load_samples(tiny_tokenizer, "")
        contexts.append([sample.context for sample in samples])
    assert all(opening in context for context in contexts[0])
    assert contexts[0] == contexts[1]


def test_what_is_no_essay_is_refused(tmp_path, tiny_tokenizer):
    for name, content, told in (
        ("a.json", {"body": "x"}, "field text"),
        ("b.json", {"text": " \n"}, "no words"),
    ):
        where = write(tmp_path / name, content)
        with pytest.raises(RestoreKVError, match=told):
            list(
                make_benchmark(f"ruler:tasks=niah_single_2,essays={where}").load_samples(
                    tiny_tokenizer, "kvpress"
                )
            )


def test_results_name_the_subsets_that_were_used_and_no_others(tmp_path):
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": []}))
    both = make_benchmark("ruler:tasks=qa_1+qa_2").to_json()
    assert both["subsets"].startswith("qa_1 and qa_2 on subsets (XQuAD")
    given = make_benchmark(f"ruler:tasks=qa_1+qa_2,squad={squad}").to_json()
    assert given["subsets"] == "qa_2 on a subset (75 of HotpotQA's 100 dev examples)"
    assert given["license"].endswith("that of the files given")
    assert not both["license"].endswith("that of the files given")
    alone = make_benchmark(f"ruler:tasks=qa_1,squad={squad}").to_json()
    assert "subsets" not in alone
