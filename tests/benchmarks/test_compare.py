"""The benchmark on a tiny model: that every figure is there, never how large it is."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import compare as bench
from benchmarks import operations
from benchmarks.compare import Options, compute_medians, compute_ratios, run_comparison
from benchmarks.compare_table import make_tables
from benchmarks.compress_cost import make_text
from benchmarks.measure import STATUS, Peak
from benchmarks.timing import TokenTimer
from benchmarks.workload import SHAPE, save_tokenizer
from restorekv.errors import RestoreKVError

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 320,
}
DECODING = {"question": 0.3, "token": 0.2, "least": 0.1, "most": 0.3}


def side(total: float, **more: float) -> dict:
    seconds = {"prefill": 1.0, "score": total - 1.5, "evict": 0.5, "total": total, **more}
    held = {"pairs": 7, "pairs_full": 140, "bytes": 100, "bytes_full": 2000}
    return {"seconds": seconds, "peak": 10, "held": held, "small": DECODING, "full": DECODING}


def shown(result: dict) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for item in make_tables(result):
        console.print(item)
    return console.export_text()


@pytest.mark.slow
def test_our_side_alone():
    result = run_comparison(Options(tokens=[bench.WARM_UP], decode=4, threads=1, shape=TINY))
    (row,) = result["rows"]
    assert set(row["seconds"]) == {"prefill", "score", "restore", "evict", "total"}
    assert sum(row["seconds"].values()) - row["seconds"]["total"] <= row["seconds"]["total"] + 1e-3
    held = row["held"]
    assert (
        held["pairs"] == int(0.05 * held["pairs_full"]) and 0 < held["bytes"] < held["bytes_full"]
    )
    assert all(row[ratio][figure] > 0 for ratio in ("small", "full") for figure in DECODING)
    assert (row["peak"] is not None) == STATUS.exists()
    assert result["ratios"] == {} and "make bench" in result["note"]
    text = shown(json.loads(json.dumps(result)))
    assert result["note"] in text and "restore pass" in text and "T = 64" in text


def test_both_sides_are_compared():
    ours, kvpress = (
        {**side(5.0), "seconds": {**side(4.0)["seconds"], "restore": 1.0, "total": 5.0}},
        side(8.0),
    )
    found = compute_ratios(ours, kvpress)
    assert (
        found["compress"] == 0.5
        and found["compress and restore"] == 0.625
        and found["token"] == 1.0
    )
    kvpress["small"] = {"refused": "Could not find fake keys"}
    assert compute_ratios(ours, kvpress)["token"] is None
    rows = [
        {"tokens": 64, "side": name, **each}
        for name, each in [("ours", ours), ("kvpress", kvpress)]
    ]
    machine = {"processor": "any", "threads": 1}
    text = shown(
        {
            "rows": rows,
            "ratios": {"64": compute_ratios(ours, kvpress)},
            "ratio": 0.05,
            "kvpress": "0.5.5",
            "note": None,
            "model": {"parameters": 1, "dtype": "bfloat16", **TINY},
            "machine": machine,
        }
    )
    assert (
        "refused: Could not find fake keys" in text
        and "kvpress 0.5.5" in text
        and "compress 0.50" in text
    )


def test_operations_are_those_that_pytorch_counts():
    """PyTorch counts every pair of a block where a causal pass needs half of them."""
    shape = {**SHAPE, **TINY}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, attn_implementation="eager")).model
    ids = torch.zeros(1, 50, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(ids)
    assert operations.count_pass(shape, 50, 50) == pytest.approx(
        counted.get_total_flops(), rel=1e-3
    )
    pairs = sum(range(1, 51)) / 50
    assert operations.count_prefill(shape, 50) == operations.count_pass(shape, 50, pairs)
    passes = operations.count_pass(shape, 4 + 38, 8 + 43 / 2) + operations.count_pass(
        shape, 4 + 72, 8 + 77 / 2
    )
    assert operations.count_kvzip(shape, 8, chunk=4) == passes


def test_medians_over_repetitions():
    one, two = (
        {"a": 1, "b": {"c": 4.0}, "v": "x", "p": None},
        {"a": 3, "b": {"c": 8.0}, "v": "x", "p": None},
    )
    assert compute_medians([one, two]) == {"a": 2, "b": {"c": 6.0}, "v": "x", "p": None}


def test_texts_have_as_many_tokens_as_asked(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    for tokens in (64, 1000):
        assert len(tokenizer.encode(make_text(tokens, 0))) == tokens
    assert make_text(64, 0) == make_text(64, 0) != make_text(64, 1)


def test_the_first_tokens_only_warm():
    clock = TokenTimer()
    clock.times = [0.0, 9.0, 14.0, 15.0, 18.0, 20.0]
    assert clock.figures() == {"question": 9.0, "token": 2.0, "least": 1.0, "most": 3.0}


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_peaks_see_what_is_freed_again():
    with Peak() as peak:
        held = bytearray(b"1") * (64 << 20)
        del held
    assert 60 << 20 < peak.bytes < 90 << 20


BAD = [
    ({"tokens": []}, "at least 64"),
    ({"tokens": [63]}, "at least 64"),
    ({"ratio": "1.5"}, "above 0"),
    ({"decode": 3}, "at least 4"),
    ({"shape": {"num_hidden_layers": 0}}, "layer"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_options_are_refused(change, message):
    with pytest.raises(RestoreKVError, match=message):
        Options(**change)


@pytest.mark.parametrize("python", ["/no/such/python", sys.executable])
def test_an_environment_without_kvpress_is_refused(python):
    try:
        import kvpress  # noqa: F401
    except ImportError:
        with pytest.raises(RestoreKVError, match="make bench"):
            run_comparison(Options(tokens=[64], kvpress_python=Path(python), shape=TINY))
    else:
        pytest.skip("kvpress is installed here")
