"""The benchmark of documents in vLLM: its stored result is what the page says."""

import json
import re
from statistics import median

import pytest

from benchmarks import vllm_memory
from benchmarks.vllm_memory import Options, make_tables
from restorekv.errors import RestoreKVError
from restorekv.model.load import load_model
from restorekv.storage.cache_file import open_cache_file
from restorekv.vllm.ragged_documents import identify
from tests.helpers.pages import ROOT

RESULT = json.loads((ROOT / "benchmarks" / "results" / "2026-11-28-vllm-cpu.json").read_text())


@pytest.mark.parametrize("result", [RESULT], ids=["smollm2"])
def test_the_page_shows_the_stored_result(result):
    page = (ROOT / "docs" / "vllm.md").read_text()
    section, table = (
        page[page.index("2026-11-28-vllm-cpu.json") :],
        re.compile(r"(?<![\w.])[\d,.]+"),
    )
    for row in result["rows"]:
        side = row["side"]
        line = re.search(rf"^\| {re.escape(side)} \|.*$", section, re.MULTILINE)[0]
        shown = [
            float(number) for number in table.findall(line.partition(side)[2].replace(",", ""))
        ]
        rates = row["throughput"]
        figures = [
            row["bytes"] / 1e6,
            row["resident"],
            median(row["cold"]),
            median(row["warm"]),
            rates["do not fit, 32 together"],
            rates["fit, 32 together"],
        ]
        assert len(shown) == len(figures)
        assert all(
            abs(a - b) <= max(0.01, 0.02 * b) for a, b in zip(shown, figures, strict=True)
        ), (shown, figures)


def test_the_first_page_shows_it_too():
    page = (ROOT / "docs" / "index.md").read_text()
    rates = {row["side"]: row["throughput"] for row in RESULT["rows"]}
    for side, name in (("whole", "whole, with vLLM's prefix cache"), ("r = 0.1", "compressed to")):
        line = re.search(rf"^\| {name}.*$", page, re.MULTILINE)[0]
        shown = [float(each) for each in re.findall(r"([\d.]+) tokens a second", line)]
        expected = [rates[side][f"{load}, 32 together"] for load in ("do not fit", "fit")]
        assert shown == pytest.approx(expected, rel=0.02)


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
        vllm_memory,
        "SHAPE",
        vllm_memory.SHAPE | small | {"head_dim": 8, "intermediate_size": 48, "vocab_size": 512},
    )
    facts = vllm_memory.save_side_model(tmp_path / "model", vllm_memory.RANDOM)
    assert facts["model"]["num_hidden_layers"] == 2 and facts["model"]["parameters"] > 0
    model, tokenizer = load_model(str(tmp_path / "model"))
    options = Options(vllm_memory.RANDOM, 64, 2, 1, ("0.5",), (1,), 4)
    documents = vllm_memory.cut_texts(tokenizer, options.tokens, options.documents)
    told = []
    arguments = (model, tokenizer, documents, tmp_path, options, told.append)
    whole, compressed = vllm_memory.iterate_sides(*arguments)
    assert whole.transfer is None and whole.resident == 1
    assert whole.blocks == (64 + 2 * vllm_memory.SPARE) // vllm_memory.BLOCK
    # A token has a pair of keys and values, bfloat16, in two heads of eight of two layers.
    assert whole.document_bytes == 64 * 2 * 2 * 2 * 8 * 2
    assert len(whole.prompts) == len(compressed.prompts) == 2
    path, other = sorted(tmp_path.glob("store-*/*"))
    assert (path.name, other.name) == ("0.rkv", "1.rkv")
    ids = identify(open_cache_file(path)).ids
    assert tuple(compressed.prompts[0][0][: len(ids)]) == ids
    assert len(told) == 2
    # The pool and the blocks share what the whole documents had.
    pool = compressed.transfer["kv_connector_extra_config"]["documents_memory"]
    block_bytes = vllm_memory.BLOCK * whole.document_bytes // 64
    assert pool + compressed.blocks * block_bytes <= whole.blocks * block_bytes
    assert compressed.resident * compressed.document_bytes <= pool
    list(vllm_memory.iterate_sides(*arguments))
    assert len(told) == 2, "nothing is compressed twice"


def test_more_questions_at_once_than_there_are_are_refused():
    def make(documents, fitting, together):
        return Options(vllm_memory.RANDOM, 64, documents, fitting, ("0.5",), together, 4)

    make(8, 4, (1, 124))
    with pytest.raises(RestoreKVError, match="at most 124"):
        make(8, 4, (1, 125))
    with pytest.raises(RestoreKVError, match="at most 124, not 0"):
        make(8, 4, (0,))
    with pytest.raises(RestoreKVError, match="fitting"):
        make(2, 4, (1,))
