"""The decode benchmark on a tiny shape: that every figure is there and means what it says, never
how large it is.
"""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from benchmarks import decode, ours
from benchmarks.decode import (
    QUESTION,
    RESTORE,
    Options,
    compress_cache,
    copy_columns,
    make_random_cache,
    run_decode,
)
from benchmarks.decode_table import describe_answers, make_tables
from benchmarks.measure import STATUS
from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError
from restorekv.model.shape import CacheShape

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 320,
}
SHAPE = CacheShape(layers=2, heads=2, groups=2, head_dim=16, hidden=32)


def shown(result: dict) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for item in make_tables(result):
        console.print(item)
    return console.export_text()


def test_every_side_takes_its_turn_at_every_ratio(monkeypatch):
    jobs = []
    monkeypatch.setattr(decode, "measure_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(
        decode,
        "measure_side",
        lambda side, job, *_: jobs.append(job) or {"answers": {"seconds": 0.5}},
    )
    threads, heard = torch.get_num_threads(), []
    options = Options(
        200, (1, 0.25), repeat=1, asked=3, read=64, answer=4, threads=threads, shape=TINY
    )
    result = json.loads(json.dumps(run_decode(options, heard.append)))
    assert heard == ["making the model", "memory held", "r = 1", "r = 0.25", "3 questions: ours"]
    for row, ratio in zip(result["rows"], (1, 0.25), strict=True):
        assert row["pairs"] == 200 * 4 * ratio  # the restore cache is one of them
        assert row["bytes"] == (row["pairs"] // 2 + 2 * QUESTION) * 2 * 16 * 2
        assert row["roofline"] == row["bytes"] / 1e9
        rectangle = {"rectangle"} if ratio < 1 else set()  # of all pairs it is the full cache
        assert set(row["attention"]) == {"ours", "full", "as rows"} | rectangle
        assert set(row["step"]) == {"ours", "full"} | rectangle
        assert min(*row["attention"].values(), *row["step"].values()) > 0
    assert (result["held"] is not None) == STATUS.exists()
    found = result["answers"]
    assert found["ours"]["rate"] == 3 * 4 / 0.5 and "kvpress" not in found
    assert len(jobs[0]["questions"]) == 3 and jobs[0]["questions"][0] != jobs[0]["questions"][1]
    text = shown(result)
    assert (
        "make bench" in text
        and "3 questions to 64 tokens at r = 0.05, 4 tokens each" in text
        and "0.25" in text
    )


def test_our_side_answers_all_questions_in_one_batch(tiny_model):
    sizes, tokens = [], torch.arange(3, 40)[None]
    with torch.no_grad():
        full = DynamicCache()
        tiny_model(tokens, past_key_values=full, use_cache=True)
    cache = RaggedCache.from_kept_pairs(full, torch.ones(3, 2, 37, dtype=torch.bool))
    job = {"questions": [[5, 6], [7, 8], [9]], "answer": 4}
    hook = tiny_model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        seconds = ours.time_answers(tiny_model, cache, job)
    # 3 rows, end to end.
    assert seconds["seconds"] > 0 and sizes == [(1, 6), (1, 3), (1, 6), (1, 3), (1, 3), (1, 3)]


@torch.no_grad()
def test_caches_hold_what_they_say():
    full = make_random_cache(SHAPE, 100, seed=1)
    before = [layer.keys.clone() for layer in full.layers]
    made = compress_cache(full, 0.3, seed=1)
    assert (
        made.pairs_held == 120 and made.restore_length == RESTORE and len(made.lengths.unique()) > 1
    )
    assert all(layer.keys.equal(keys) for layer, keys in zip(full.layers, before, strict=True))
    short = copy_columns(full, 30)
    assert [layer.keys.shape for layer in short.layers] == [(1, 2, 30, 16)] * 2
    assert short.layers[0].keys.untyped_storage().nbytes() == 2 * 30 * 16 * 2


@torch.no_grad()
def test_a_round_leaves_the_full_cache_as_it_was(monkeypatch):
    full = make_random_cache(SHAPE, 50, seed=1)
    before = [layer.keys.clone() for layer in full.layers]

    def grow(model, ids, mask, positions, cache):
        assert positions.tolist() == [[50]] and mask is None
        for layer in cache.layers:
            layer.update(*(torch.zeros(1, 2, 1, 16).bfloat16() for _ in range(2)))
        return torch.zeros(1, 8)

    monkeypatch.setattr(decode, "compute_next_logits", grow)
    monkeypatch.setattr(decode.CacheShape, "from_model", lambda model: SHAPE)
    monkeypatch.setattr(decode, "time_attention", lambda *_: {})
    decode.measure_ratio(None, full, Options(50, repeat=2), 0.5, 1.0)
    assert all(layer.keys.equal(keys) for layer, keys in zip(full.layers, before, strict=True))


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
@torch.no_grad()
def test_memory_is_that_of_the_process():
    """Here 12 MB of pairs; what allocators round up is a small part."""
    wide = CacheShape(layers=2, heads=2, groups=2, head_dim=64, hidden=32)
    held = decode.measure_memory(wide, Options(20000), 0.6)
    # N are among the pairs.
    assert held["pairs"] == 48000 * 256 and held["tail"] == 4 * QUESTION * 256
    assert 0.9 < held["share"] < 1.3 and held["share"] == held["bytes"] / (
        held["pairs"] + held["tail"]
    )


def test_kvpress_beside_ours_in_words():
    found = {"asked": 16, "read": 4096, "answer": 24, "ratio": 0.05, "ours": {"rate": 50.0}}
    assert "kvpress 2.0, 25.0 times as many" in describe_answers(found | {"kvpress": {"rate": 2.0}})
    assert "refused: no key" in describe_answers(found | {"kvpress": {"refused": "no key"}})


@pytest.mark.parametrize(
    "bad",
    [
        {"ratios": ()},
        {"ratios": (0,)},
        {"tokens": 0},
        {"repeat": 0},
        {"answer": 3},
        {"asked": -1},
        {"read": 63},
    ],
)
def test_wrong_options_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Options(**bad)
