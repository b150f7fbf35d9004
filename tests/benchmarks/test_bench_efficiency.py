"""Costs are measured side by side; their page shows what was measured, also by an earlier
version.
"""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import compress_cost
from benchmarks import efficiency as cost
from benchmarks.efficiency_page import write_efficiency_page
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers import report_world
from tests.helpers.cli_world import cli


def in_process(model, options, conventions, scorer, restored):
    """A measurement here; a process of its own costs seconds."""
    job = {
        "model": str(model.config.name_or_path),
        "dtype": "float32",
        "device": "cpu",
        "evictor": scorer,
        "restored": restored,
        "tokens": options.tokens,
        "ratio": options.ratio,
        "repeat": options.repeat,
        "conventions": conventions.to_json(),
        "folder": str(model.config.name_or_path),
    }
    with torch.no_grad():
        return compress_cost.measure(job)


def test_seconds_of_the_restore_pass_are_its_own_whenever_it_runs(tiny_model, tiny_tokenizer):
    """With an adapter that knows the ratio it runs after the scores are known."""
    adapter = RestoreAdapter.create(tiny_model, 2, rank=2, alpha=4)
    adapter.add_ratio_vectors()
    eviction = Eviction.make("knorm", adapter)
    context = compress_cost.make_context_of(tiny_tokenizer, 64)
    seconds = compress_cost._compress(eviction, tiny_model, tiny_tokenizer, context, "0.2")
    assert seconds["restore"] > 0 and seconds["evict"] > 0


def test_efficiency_compares_base_and_restored(saved_model, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "measure_compression_apart", in_process)
    model, tokenizer = load_model(str(saved_model))
    options = cost.CostOptions(("knorm", "kvzap"), 128, "0.2", ("1", "0.2"), repeat=2, steps=3)
    heard = []
    path = cost.measure_efficiency(
        model,
        tokenizer,
        tmp_path,
        options,
        CompressionConfig(),
        "mine",
        lambda *update: heard.append(update),
    )
    stored = json.loads(path.read_text())
    assert path == tmp_path / "efficiency" / "mine.json" and heard[-1][:2] == (5, 5)
    rows = stored["compression"]
    assert [(row["evictor"], row["restored"]) for row in rows] == [
        (name, restored) for name in ("knorm", "kvzap") for restored in (False, True)
    ]
    for row in rows:
        assert (row["seconds"]["restore"] > 0) == row["restored"]
        assert row["peak"] is None or row["peak"] > 0
        assert row["adapter"] == ("random" if row["restored"] else None)
        assert row["gate"] == ("random" if row["evictor"] == "kvzap" else None)
    seconds = rows[1]["seconds"]
    expected = seconds["restore"] / (seconds["total"] - seconds["restore"])
    assert stored["overhead"]["knorm"]["share"] == pytest.approx(expected)
    assert stored["overhead"]["knorm"]["peak"] == rows[1]["peak"] - rows[0]["peak"]
    assert (
        stored["latency_ratio"].keys() == {"1", "0.2"}
        and stored["conventions"]["latency_context"] == "prefill"
    )
    assert (
        cost.measure_efficiency(model, tokenizer, tmp_path, options, CompressionConfig(), "mine")
        == path
    )
    with pytest.raises(RestoreKVError, match="was made with tokens 128"):
        cost.measure_efficiency(
            model, tokenizer, tmp_path, replace(options, tokens=256), CompressionConfig(), "mine"
        )


def test_base_and_restored_caches_hold_the_same(tiny_model, tiny_tokenizer):
    prepared = cost.make_random_context(tiny_model, tiny_tokenizer, 100, 3, CompressionConfig())
    rows = cost.measure_latencies(prepared, ["1", "0.1"], 2)
    layers, heads, tokens = prepared.scores.shape
    for base, restored, ratio in zip(rows[::2], rows[1::2], (1, 0.1), strict=True):
        assert (
            base["pairs"]
            == restored["pairs"]
            == round(ratio * tokens + prepared.context.prefix_length) * layers * heads
        )
        assert base["restore_tokens"] == 0 and restored["restore_tokens"] == 3
        assert 0 < base["least"] <= base["milliseconds"] <= base["most"] and restored["to_base"] > 0
        # Equal keys and values; the restored cache has no position for each of its restore pairs.
        assert base["bytes"] - restored["bytes"] == 4 * 3 * heads * layers


def test_memory_of_a_gpu_is_the_allocators(monkeypatch):
    fakes = {
        "memory_allocated": 100,
        "max_memory_allocated": 350,
        "synchronize": None,
        "reset_peak_memory_stats": None,
    }
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    figures = {}
    with compress_cost.measure_peak(torch.device("cuda"), figures):
        pass
    assert figures == {"peak": 250}


def test_memory_of_a_process_counts_what_is_held():
    figures = {}
    with compress_cost.measure_peak(torch.device("cpu"), figures):
        block = torch.ones(1 << 22)
        del block
    if figures["peak"] is not None:
        assert 15 << 20 <= figures["peak"] < 20 << 20


@pytest.mark.parametrize(
    "wrong", [{"tokens": 3}, {"repeat": 0}, {"ratio": "0"}, {"latency_context": "none"}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(RestoreKVError):
        cost.CostOptions(**wrong)


@pytest.mark.slow
def test_the_command_measures_and_shows_cost(saved_model, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "measure_compression_apart", in_process)
    command = (
        "benchmarks",
        "efficiency",
        "--out",
        tmp_path,
        "--model",
        saved_model,
        "--scorer",
        "knorm",
        "--tokens",
        96,
        "--ratio",
        "0.3",
        "--repeat",
        1,
        "--allocation",
        "per-head",
    )
    done = cli(*command)
    assert done.code == 0, done.err
    (path,) = (tmp_path / "efficiency").glob("*.json")
    conventions = json.loads(path.read_text())["conventions"]
    assert (conventions["offset"], conventions["allocation"], conventions["prefix_policy"]) == (
        0,
        "per-head",
        "counted",
    )
    assert (tmp_path / "efficiency" / "page" / "index.html").exists()
    refused = cli(*command, "--scorer", "am-fast")
    assert refused.code == 1 and "not an evictor" in refused.err and refused.err.count("\n") == 1


def test_figures_of_an_earlier_version_have_a_page(tmp_path):
    refused = cli("benchmarks", "efficiency", "--page", "--out", tmp_path)
    assert refused.code == 1 and "holds no figures" in refused.err and not list(tmp_path.iterdir())
    page = write_efficiency_page(report_world.write_costs(tmp_path)).read_text()
    assert "Time to compress a context: tiny-cpu" in page
    assert {path.stem for path in (tmp_path / "efficiency" / "page" / "csv").iterdir()} == {
        "efficiency-tiny-cpu-time",
        "efficiency-tiny-cpu-cost",
        "efficiency-tiny-cpu-latency",
    }


@pytest.mark.slow
def test_a_measurement_runs_in_a_process_of_its_own(saved_model):
    model, _ = load_model(str(saved_model))
    options = cost.CostOptions(("knorm",), 128, "0.2", repeat=1)
    row = cost.measure_compression_apart(model, options, CompressionConfig(), "knorm", True)
    assert row["adapter"] == "random" and row["seconds"]["total"] > 0
    with pytest.raises(RestoreKVError, match="restore tokens do not fit"):
        cost.measure_compression_apart(
            model,
            replace(options, ratio="0.01"),
            CompressionConfig(on_small_budget="error"),
            "knorm",
            True,
        )
