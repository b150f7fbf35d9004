"""Adapters are compared on development passages: the divergences are right, and made once."""

import json

import pytest
import torch

from recipes.smollm2 import development, search
from restorekv import CompressionConfig, compress
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question
from restorekv.restore.adapter import RestoreAdapter

TEXT = "Register of codes: lantern 48. basket 17. ladder 92. " * 12
QUESTIONS = ("What is the code of the basket?", "What is the code of the ladder?")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A folder with one passage, asked of the tiny model."""
    monkeypatch.setattr(search, "load_model", lambda name, dtype: load_model("tiny", dtype))
    case = {"name": "codes", "text": TEXT, "questions": QUESTIONS, "answer_ids": [[5, 6, 7], [8]]}
    (tmp_path / "development.jsonl").write_text(json.dumps(case) + "\n")
    return search.Bench(tmp_path)


@torch.no_grad()
def read_answer(small, question: str, answer: list[int]) -> torch.Tensor:
    """Return the log probabilities at an answer's ids, from a plain call of the model."""
    asked = encode_question(small.tokenizer, small.context, question, empty=True)[0]
    ids = torch.cat([asked, torch.tensor(answer)])[None]
    logits = small.model(ids, past_key_values=small.cache.fork(), use_cache=True).logits[0]
    return logits[len(asked) - 1 : -1].log_softmax(-1)


def test_a_divergence_is_the_mean_over_all_answers_tokens(bench):
    adapter = RestoreAdapter.from_pretrained(bench.model, "tiny:kvzip")
    (case,) = bench.load_cases("development")
    adapters = {development.ALONE: None, "ours": adapter}
    measured = development.measure_case(bench, case, "kvzip", adapters)
    config = CompressionConfig(on_small_budget="fewer")

    def compress_case(ratio, adapter):
        return compress(
            bench.model, bench.tokenizer, TEXT, ratio=ratio, adapter=adapter, config=config
        )

    full = compress_case(1, None)
    for name, given in adapters.items():
        for ratio in search.RATIOS:
            small = compress_case(ratio, given)
            divergences = []
            for question, answer in zip(case.questions, case.answer_ids, strict=True):
                expected = read_answer(full, question, list(answer))
                own = read_answer(small, question, list(answer))
                divergences.append((expected.exp() * (expected - own)).sum(-1))
            mean = float(torch.cat(divergences).mean())
            assert measured[name][f"{ratio:g}"] == pytest.approx(mean, rel=1e-3, abs=1e-6)


def test_what_is_measured_is_not_measured_again(bench, monkeypatch, capsys):
    monkeypatch.setattr(development, "Bench", lambda folder, dtype: bench)
    command = [str(bench.folder), "--corpus", "nowhere", "--adapter"]
    development.main([*command, "first=tiny:kvzip"])
    monkeypatch.setattr(search.Eviction, "make", None)
    development.main([*command, "same=tiny:kvzip"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[-1].removeprefix("| same") == table[3].removeprefix("| first")
    assert table[2].startswith("| alone | ") and table[3].count("|  |") == len(search.RATIOS)


def test_a_name_without_an_adapter_is_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(development, "Bench", lambda folder, dtype: bench)
    with pytest.raises(SystemExit):
        development.main([str(bench.folder), "--corpus", "nowhere", "--adapter", "tiny:kvzip"])
    assert "--adapter takes NAME=PLACE" in capsys.readouterr().err
