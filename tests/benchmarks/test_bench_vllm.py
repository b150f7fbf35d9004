"""The benchmark of documents in vLLM: its stored result is what the page says."""

import json
import re
from statistics import median

import pytest

from benchmarks import vllm
from benchmarks.vllm import Options, make_tables
from restorekv.model.load import load_model
from restorekv.storage.portable import MARK, make_mark
from tests.helpers.pages import ROOT

RESULT = json.loads((ROOT / "benchmarks" / "results" / "2026-11-22-vllm-cpu.json").read_text())


@pytest.mark.parametrize("result", [RESULT], ids=["smollm2"])
def test_the_page_shows_the_stored_result(result):
    page = (ROOT / "docs" / "vllm.md").read_text()
    command, table = page[page.index(result["command"]) :], re.compile(r"(?<![\w.])[\d,.]+")
    for row in result["rows"]:
        side = row["side"]
        line = re.search(rf"^\| {re.escape(side)} \|.*$", command, re.MULTILINE)[0]
        shown = [
            float(number) for number in table.findall(line.partition(side)[2].replace(",", ""))
        ]
        rates = row["throughput"]
        figures = [
            row["positions"],
            result["options"]["fitting"] * result["options"]["tokens"] // row["positions"],
            median(row["cold"]),
            median(row["warm"]),
            rates["do not fit, 8 together"],
            rates["do not fit, 32 together"],
            rates["fit, 32 together"],
        ]
        assert len(shown) == len(figures)
        assert all(
            abs(a - b) <= max(0.01, 0.02 * b) for a, b in zip(shown, figures, strict=True)
        ), (shown, figures)


def test_its_table_names_every_side():
    table, machine = make_tables(RESULT)
    assert [row[0] for row in table.rows] == [row["side"] for row in RESULT["rows"]]
    assert "smollm2" in machine


def test_random_weights_give_the_prompts_of_every_side(monkeypatch, tmp_path):
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(
        vllm,
        "SHAPE",
        vllm.SHAPE | small | {"head_dim": 8, "intermediate_size": 48, "vocab_size": 512},
    )
    facts = vllm.save_side_model(tmp_path / "model", vllm.RANDOM)
    assert facts["model"]["num_hidden_layers"] == 2 and facts["model"]["parameters"] > 0
    model, tokenizer = load_model(str(tmp_path / "model"))
    options = Options(vllm.RANDOM, 64, 2, 1, ("0.5",), (1,), 4)
    documents = vllm.cut_texts(tokenizer, options.tokens, options.documents)
    whole, compressed = (
        side
        for _, side in vllm.iterate_sides(
            model, tokenizer, documents, tmp_path, options, lambda words: None
        )
    )
    assert len(whole[0]) == len(compressed[0]) == 2 and whole[2] == 64
    assert compressed[2] < 64 < len(whole[0][0][0])
    assert compressed[0][0][0][:MARK] == make_mark(512) != whole[0][0][0][:MARK]
    assert sorted(path.name for path in (tmp_path / "store-0.5").iterdir()) == [
        "0.safetensors",
        "1.safetensors",
    ]
