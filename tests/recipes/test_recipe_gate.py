"""The recipe of SmolLM2's gate: what it trains on, and that it goes on where it was."""

import json
import random
from dataclasses import replace

import pytest

from recipes.smollm2 import gate

WORDS = "river stone market letter king forest paper winter road silver garden boat".split()


def write_prose(seed):
    """Sentences that share no 13 words with those of another seed."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(60):
        words = [f"{rng.choice(WORDS)}{rng.randrange(100)}" for _ in range(8)]
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@pytest.fixture
def corpus(tmp_path):
    held_out = write_prose("held out")
    rows = [("development", held_out), ("train", held_out)]
    rows += [("train", write_prose(number)) for number in range(6)]
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for number, (split, text) in enumerate(rows):
            row = {"id": f"prose/{number}/p1of1", "genre": "prose", "license": "CC0 1.0"}
            file.write(json.dumps({**row, "split": split, "text": text}) + "\n")
    return path


@pytest.fixture
def tiny_recipe(monkeypatch):
    monkeypatch.setattr(gate, "SMOLLM2", "tiny")
    config = replace(gate.CONFIG, tokens=16, held_out=0.3, steps=3, batch=20)
    monkeypatch.setattr(gate, "CONFIG", config)


def test_passages_are_neither_held_out_nor_their_words(corpus, tiny_recipe, tmp_path):
    path = gate.write_passages(tmp_path, corpus, 5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5
    assert all(row["license"] == "cc0-1.0" and row["questions"] for row in rows)
    # Passage 0 is of another split, and passage 1 has its words.
    sources = {row["source"] for row in rows}
    assert not sources & {"prose/0/p1of1", "prose/1/p1of1"}
    assert sources & {f"prose/{number}/p1of1" for number in range(2, 8)}
    corpus.unlink()
    assert gate.write_passages(tmp_path, corpus, 5) == path, "written once"


def test_the_gate_is_trained_and_compared_on_what_it_has_not_seen(corpus, tiny_recipe, tmp_path):
    passages = gate.write_passages(tmp_path, corpus, 5)
    path = gate.train(tmp_path, passages, 5)
    before = path.stat().st_mtime_ns
    assert gate.train(tmp_path, passages, 5).stat().st_mtime_ns == before, "trained once"
    figures = gate.measure(tmp_path, passages, {"new": path})
    found = gate.read_gate(path).card.figures
    # The command measured the same gate on the same passages.
    assert figures["new"] == pytest.approx(found, rel=1e-4)
