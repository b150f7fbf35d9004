"""The benchmark of a device beside the CPU, with the CPU in the device's place."""

import json
from pathlib import Path

import pytest

from benchmarks import agreement, device, device_families
from benchmarks.device import Options, format_tables, run_device
from restorekv.errors import RestoreKVError

STORED = Path(__file__).parents[2] / "benchmarks/results/device/2026-11-26-h200.json"
SMALL = Options(
    device="cpu", texts=1, tokens=64, layers=1, answer=4, batches=(1, 2), training_steps=1
)


def test_the_cpu_agrees_with_itself_in_everything(monkeypatch):
    monkeypatch.setattr(device, "METHODS", ("kvzip", "random"))
    monkeypatch.setattr(agreement, "ANSWER_TOKENS", 8)
    families = {"gemma3_text", "gpt_oss"}
    monkeypatch.setattr(
        device_families,
        "FAMILIES",
        {kind: device_families.FAMILIES[kind] for kind in families},
    )
    told = []
    result = json.loads(json.dumps(run_device(SMALL, told.append)))
    *compared, runs = result["agreement"]
    assert len(compared) == 2 + len(device.SETTINGS) + 1 and runs["caches"] == 1
    assert len(result["families"]) == len(families) * len(device_families.SETTINGS)
    for row in [*compared, *result["families"]]:
        assert row["pairs equal"] == row["pairs"] > 0
        assert row["answers equal"] == row["answers"] > 0
    assert [row["mode"] for row in result["modes"]] == ["plain", "offload", "streaming"]
    assert result["modes"][1]["keeps what plain keeps"] is True
    assert all(row["seconds"] > 0 and row["peak"] >= 0 for row in result["modes"])
    assert [row["same tokens"] for row in result["steps"][1::2]] == [True, True]
    on_cpu, on_device, in_bfloat16 = (row["losses"] for row in result["training"])
    assert on_cpu == on_device != in_bfloat16
    assert len(told) > 10


def test_what_differs_is_counted(monkeypatch):
    """A device whose answers and pairs are others shows in the counts."""
    monkeypatch.setattr(device, "METHODS", ("random:seed=1",))
    monkeypatch.setattr(device, "SETTINGS", {})
    right = device.compress
    seeds = iter(range(100))

    def compress(*args, evictor="random", **more):
        return right(*args, evictor=f"random:seed={next(seeds)}", **more)

    monkeypatch.setattr(device, "compress", compress)
    row, _, runs = device.compare_with_cpu(SMALL, lambda what: None)
    assert row["pairs equal"] < row["pairs"]
    assert runs["caches"] == 3


def test_models_with_windows_have_a_table_of_their_own():
    result = json.loads(STORED.read_text("utf-8"))
    row = {"what": "gpt_oss", "pairs equal": 9, "pairs": 10, "answers equal": 3, "answers": 4}
    table = format_tables({**result, "families": [row]})
    assert "| gpt_oss | 9 of 10 | 3 of 4 |" in table


def test_the_table_of_the_stored_result():
    table = format_tables(json.loads(STORED.read_text("utf-8")))
    assert "NVIDIA H200" in table and "| offload | 4.4 | 733 MiB |" in table
    assert "| 1 | 50.0 ms | 4.6 ms | yes |" in table


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RestoreKVError, match="no device 'cuda:99'"):
        run_device(Options(device="cuda:99"))
    with pytest.raises(RestoreKVError, match="at least 1"):
        Options(texts=0)
