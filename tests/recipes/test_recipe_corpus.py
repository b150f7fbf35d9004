"""The corpus of many genres: no passage that is trained on is an evaluation text, and its sources
are named with their licenses.
"""

import json
import random
import re
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from recipes.smollm2 import corpus_table
from recipes.smollm2.build import write_asked
from restorekv.data.build import SHIPPED_TEXTS, TEXTS
from restorekv.data.config import BuildConfig
from restorekv.data.corpus import read_corpus
from restorekv.data.documents import SourceDocument
from restorekv.data.files import identify_source, iterate_rows, iterate_values, read_parquet_rows
from restorekv.data.gather import AttemptFile, SourceBuilder, identify_document
from restorekv.data.overlap import EvaluationIndex, read_evaluation_texts
from restorekv.data.self_study import SelfStudy
from restorekv.data.sources import CORPUS
from restorekv.model.load import load_tokenizer
from restorekv.restore.licenses import PERMISSIVE
from tests.helpers.data_world import settings, text, write_jsonl

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2"
READY = RECIPE / "data"
SHARDS = sorted(path for path in READY.glob("corpus-*") if path.is_dir())
PEOPLE = sorted(READY.glob("people-*"))
TENTH = 0.1
PLACE = next(
    (
        path / "shared/data/corpus"
        for path in RECIPE.parents
        if (path / "shared/data/corpus").is_dir()
    ),
    None,
)
needs_corpus = pytest.mark.skipif(PLACE is None, reason="the corpus is not beside this checkout")


def grams(words: str) -> set[tuple[str, ...]]:
    """Every 13 consecutive words, without hashes: the oracle of `hash_grams`."""
    listed = re.findall(r"\w+", words.lower())
    return {tuple(listed[place : place + 13]) for place in range(len(listed) - 12)}


@pytest.fixture(scope="module")
def index() -> EvaluationIndex:
    """Every text that a benchmark of the package may ask about."""
    return EvaluationIndex(read_evaluation_texts([str(TEXTS)]), TENTH)


@pytest.mark.parametrize("shard", SHARDS, ids=lambda path: path.name)
@needs_corpus
def test_no_answered_passage_shares_a_tenth_with_an_evaluation_text(shard, index):
    """Texts are not in an unfinished shard, so they are drawn again: they must be the same ones."""
    parts = shard / "parts" / "corpus.jsonl"
    if not parts.exists():
        pytest.skip("the shard is complete; see the next test")
    answered = [line["context"] for line in AttemptFile(parts).done]
    record = json.loads((shard / "build.json").read_text())
    config = BuildConfig(**record["config"])
    rows = iterate_rows(str(PLACE), {})
    items = read_corpus(rows, config, load_tokenizer("smollm2"))
    documents = (item for item in items if isinstance(item, SourceDocument))
    drawn = {tuple(identify_document(each)): each for each in islice(documents, len(answered) + 40)}
    passages = [drawn[tuple(mark)].text for mark in answered]
    assert len(passages) > 100
    assert [
        name for name, each in zip(answered, passages, strict=True) if index.find_match(each)
    ] == []


def test_no_passage_that_ships_shares_a_tenth_with_an_evaluation_text(index):
    """Of all complete data; only Factbook's sections share more, the words of the form."""
    files = [path for path in READY.glob("*/*.parquet") if path.name != "sections.parquet"]
    passages = {row["context"] for path in files for row in read_parquet_rows(path)}
    assert len(passages) > 150
    assert [each[:80] for each in passages if index.find_match(each)] == []


def test_the_builder_takes_no_passage_that_shares_a_tenth(tiny_tokenizer, tmp_path, monkeypatch):
    """Passages with no, little, much and nothing but text of an evaluation set, cut as always."""
    held_out = [row["context"] for _, row in iterate_values(TEXTS / "fairytaleqa" / "val.jsonl.gz")]
    rng = random.Random(0)
    rows = []
    for number, share in enumerate([0.0, 0.02, 0.3, 0.6, 1.0] * 8):
        story = rng.choice(held_out).split()
        start = rng.randrange(max(len(story) - 120, 1))
        taken = " ".join(story[start : start + round(120 * share)])
        own = text(f"own {number}", round(120 * (1 - share)) + 1)
        rows.append(
            {
                "id": f"{share}/{number}",
                "genre": "mixed",
                "license": "MIT",
                "text": f"{own} {taken}",
                "questions": [{"question": "Who is named in the text?"}],
            }
        )
    source = write_jsonl(tmp_path / "corpus.jsonl", rows)
    config = settings(
        {},
        mixture="corpus",
        corpus=str(source),
        corpus_passages=100,
        passage_shortest=64,
        passage_longest=1500,
        made=0.0,
        invented=0.0,
    )
    attempt = {"kind": "blank", "question": "a", "answer": "b", "answer_ids": [1]}
    monkeypatch.setattr(SelfStudy, "pads", False)
    monkeypatch.setattr(SelfStudy, "study_contexts", lambda self, asked: [[attempt]] * len(asked))
    evaluations = EvaluationIndex(read_evaluation_texts(SHIPPED_TEXTS), TENTH)
    builder = SourceBuilder(None, tiny_tokenizer, config, evaluations, 4000, lambda *_: None)
    items = CORPUS.read(iterate_rows(str(source), {}), config, tiny_tokenizer)
    attempts = AttemptFile(tmp_path / "attempts.jsonl")
    result = builder.gather_examples(CORPUS, items, attempts)
    tests = set().union(*map(grams, held_out))
    for example in result.examples:
        mine = grams(example["context"])
        assert len(mine & tests) <= TENTH * len(mine), example["document"]
    taken = {example["document"].partition("/")[0] for example in result.examples}
    assert {"0.0", "0.02"} <= taken and "1.0" not in taken
    refused = {each["document"].partition("/")[0] for each in result.overlaps}
    assert {"0.3", "0.6", "1.0"} == refused


def read_table() -> tuple[str, list[list[str]]]:
    """The sentence above the table of sources in paper/results/corpus.md, and its rows' cells."""
    page = corpus_table.PAGE.read_text(encoding="utf-8")
    lines = page.partition(corpus_table.BEGIN)[2].partition(corpus_table.END)[0].splitlines()
    sentence = next(line for line in lines if line)
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return sentence, rows[1:]


def test_the_page_names_every_source_with_a_free_license():
    sentence, rows = read_table()
    used = [row for row in rows if corpus_table.NOT_USED not in row[3]]
    assert {row[3] for row in used} <= PERMISSIVE
    assert len(rows) == 76 == len({row[1] for row in rows}) and all(map(all, rows))
    total = sum(int(row[4]) for row in used)
    genres = {row[0] for row in rows}
    assert sentence.startswith(f"76 sources of {len(genres)} genres; {total:,} passages")


@pytest.mark.parametrize("shard", SHARDS, ids=lambda path: path.name)
def test_the_page_is_about_the_corpus_that_a_shard_is_of(shard):
    """Needs no corpus: a build records the files it reads. A shard of other files needs a new
    table.
    """
    manifest = shard / "manifest.json"
    if manifest.exists():
        files = json.loads(manifest.read_text())["sources"]["corpus"]["from"]["files"]
    else:
        files = json.loads((shard / "build.json").read_text())["sources"]["corpus"]["files"]
    sentence, rows = read_table()
    assert f"`{corpus_table.hash_corpus(files)}`" in sentence
    parts = shard / "parts" / "corpus.jsonl"
    if parts.exists():
        names = [line["context"][0] for line in AttemptFile(parts).done]
        genres = Counter(name.partition("/")[0].replace("_", " ") for name in names if "/" in name)
        assert set(genres) <= {row[0] for row in rows}


@pytest.mark.parametrize("part", PEOPLE, ids=lambda path: path.name)
@needs_corpus
def test_what_people_asked_about_is_of_the_corpus(part, tmp_path):
    """The files that a part was built from hold the corpus' rows, and no others."""
    source = json.loads((part / "manifest.json").read_text())["sources"]["corpus"]
    asked = write_asked(tmp_path, PLACE)
    assert source["from"]["files"] == identify_source(str(asked))["files"]
    assert source["contexts"] > 400 and source["examples"] > 3000


@needs_corpus
def test_the_table_is_that_of_the_corpus(tmp_path):
    page = shutil.copy(corpus_table.PAGE, tmp_path / "page.md")
    corpus_table.main([str(PLACE), "--page", str(page)])
    assert page.read_text() == corpus_table.PAGE.read_text()
