"""The recipe behind paper/results/data-table.md: sources in the true formats, and nothing of the
test split taken.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipes.tiny import mixture
from restorekv.model.load import load_model
from restorekv.tiny import suite

STRETCH = 40  # words in a row, about three sentences


def call(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["mixture", str(folder)])
    mixture.main()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The recipe with two documents, two books of one chunk and three prompts."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "results").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "RESULTS", root / "results")
        patch.setattr(mixture, "MIXTURE", root / "mixture.json")
        patch.setattr(mixture, "TEST", 60)
        patch.setattr(mixture, "COUNTS", {"documents": 2, "books": 2, "examples": 3})
        small = {"chunks": 1, "question_tokens": 4, "answer_tokens": 6, "flan_answer_tokens": 12}
        patch.setattr(
            mixture,
            "BOUNDS",
            {**mixture.BOUNDS, **small, "question_characters": 1, "least_answer": 1},
        )
        call(patch, root / "runs")
        first = (root / "results" / "data-table.md").read_text()
        call(patch, root / "runs")
        assert (root / "results" / "data-table.md").read_text() == first, (
            "the second time from what is there"
        )
    return root


@pytest.mark.slow
def test_sources_have_the_true_formats(run):
    sources = run / "runs" / "sources"
    long = json.loads((sources / "LongAlpaca.json").read_text())
    assert all(set(row) == {"instruction", "input", "output"} for row in long)
    assert sum(" ends. \nQuestion: " in row["instruction"] for row in long) == len(long) - 1
    books = pq.read_table(sources / "pg19.parquet")
    assert books.column_names == ["short_book_title", "publication_date", "url", "text"]
    flan = [json.loads(line) for line in (sources / "tulu-3.jsonl").open()]
    assert all([said["role"] for said in row["messages"]] == ["user", "assistant"] for row in flan)
    assert {"flan_v2" in row["source"] for row in flan} == {True, False}
    papers = [
        json.loads(line)["metadata"]["license"] for line in (sources / "arxiv_papers.jsonl").open()
    ]
    assert (
        "Creative Commons - Attribution - https://creativecommons.org/licenses/by/4.0/" in papers
        and None in papers
    )


def stretches(text: str) -> set[str]:
    """Every STRETCH words in a row."""
    found = text.split()
    return {" ".join(found[start : start + STRETCH]) for start in range(len(found) - STRETCH + 1)}


@pytest.mark.slow
def test_nothing_of_the_test_split_gets_in(run):
    tests = set().union(
        *(stretches(made.text) for made in suite.draw_documents(load_model("tiny")[1], 60))
    )
    assert any(
        tests & stretches(row["instruction"])
        for row in json.loads((run / "runs" / "sources" / "LongAlpaca.json").read_text())
    ), "copies are planted"
    for name in ("paper", "permissive"):
        tables = [pq.read_table(file) for file in (run / "runs" / name).glob("*.parquet")]
        contexts = [text for table in tables for text in table["context"].to_pylist()]
        assert len(contexts) >= 5 and not any(tests & stretches(text) for text in contexts)


@pytest.mark.slow
def test_the_page_and_the_figures_tell_what_is_in_the_files(run):
    kept = json.loads((run / "results" / "data-table.json").read_text())
    page = (run / "results" / "data-table.md").read_text()
    for name, first in (("paper", "longalpaca"), ("permissive", "papers")):
        rows = {row["source"]: row for row in kept[name]["rows"]}
        assert list(rows) == [first, "pg19", "flan", "total"]
        for source in (first, "pg19", "flan"):
            tokens = pq.read_table(run / "runs" / name / f"{source}.parquet")[
                "context_tokens"
            ].to_pylist()
            assert rows[source]["samples"] == len(tokens)
            assert rows[source]["mean"] == pytest.approx(sum(tokens) / len(tokens))
        assert rows[first]["paper"]["samples"] == 2488 and rows["total"]["paper"]["samples"] == 6248
        refused = [
            one
            for source in kept[name]["manifest"]["sources"].values()
            for one in source["refused"]
        ]
        assert refused and all(
            f"{one['document']} | {one['found in']} |" in page for one in refused
        )
    refused = {
        one["document"] for one in kept["paper"]["manifest"]["sources"]["longalpaca"]["refused"]
    }
    assert {"row 2", "row 3", "row 4", "row 5"} <= refused, (
        "a copy, half a copy, one past the first 52, the stories"
    )
    assert "cc-by-nc-4.0" not in kept["permissive"]["manifest"]["licenses"]
