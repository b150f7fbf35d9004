"""The kernel benchmark: rehearsed on the CPU, and refused where there is nothing to time."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import kernel, passes
from benchmarks.kernel import REHEARSAL, Options, format_table, make_random_layer, run_kernel
from restorekv.errors import RestoreKVError
from restorekv.model.attention import dispatch
from tests.helpers.cli_world import cli

interpreted = pytest.mark.skipif(
    dispatch.triton_attend is None or not dispatch.triton_attend.INTERPRETED,
    reason="no interpreter of Triton here",
)


@interpreted
def test_a_rehearsal_goes_through_everything(monkeypatch):
    heard = []
    result = run_kernel(REHEARSAL, heard.append, rehearse=True)
    assert heard == ["copy bandwidth", "r = 1", "r = 0.25"]
    assert result["rehearsal"] and {"restorekv", "torch", "triton"} <= set(
        result["machine"]["versions"]
    )
    for row, pairs in zip(json.loads(json.dumps(result))["rows"], (192, 48), strict=True):
        assert row["pairs"] == pairs and row["bytes"] == (pairs + 2 * 5) * 2 * 32 * 2
        assert row["roofline"] == pytest.approx(row["bytes"] / result["bandwidth"])
        for side in ("ours", "sdpa", "sdpa, as rows"):
            assert row[side]["seconds"] > 0
            assert row[side]["of roofline"] == pytest.approx(row["roofline"] / row[side]["seconds"])
    shown = format_table(result)
    assert "these figures mean nothing" in shown and "| 0.25 | 48 |" in shown
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    monkeypatch.setattr(
        dispatch.triton_attend, "attend_ragged", lambda query, *_: torch.zeros_like(query)
    )
    with pytest.raises(RestoreKVError, match="off by 100"):
        run_kernel(REHEARSAL, rehearse=True)


def test_heads_keep_unequal_numbers_and_together_the_budget():
    options = Options(tokens=64, heads=4, width=8, tail=3)
    one, same = (
        make_random_layer(options, 0.3, torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert one.bounds == same.bounds and one.bounds[-1] == int(0.3 * 4 * 64)
    assert len(set(one.offsets.diff().tolist())) > 1
    assert set(
        make_random_layer(options, 1, torch.Generator().manual_seed(0)).offsets.diff().tolist()
    ) == {64}


def test_a_pass_is_over_all_layers_and_a_copy_is_read_and_written(monkeypatch):
    seen, timed = [], []
    passes.pass_over([1, 2, 3], seen.append)()
    assert seen == [1, 2, 3]

    def seconds(step):
        timed.append(step().clone())
        return 4.0

    assert passes.measure_bandwidth(10, torch.device("cpu"), seconds) == 5.0
    assert timed[0].tolist() == [1] * 10
    marks = iter([1.0, 3.5])
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: next(marks)))
    assert passes.time_once(lambda: seen.append(4)) == 2.5 and seen[-1] == 4


@interpreted
def test_seconds_are_those_of_one_layer(monkeypatch):
    monkeypatch.setattr(kernel, "_time_step", lambda step, repeat, device: 6.0)
    monkeypatch.setattr(kernel, "check_kernel", lambda query, layer: None)
    options = replace(REHEARSAL, layers=3, ratios=(0.25,))
    row = kernel.measure_ratio(options, 0.25, 1.0, torch.device("cpu"))
    assert {row[side]["seconds"] for side in ("ours", "sdpa", "sdpa, as rows")} == {2.0}


def test_make_has_a_target():
    lines = (Path(__file__).parents[2] / "Makefile").read_text().splitlines()
    assert "bench-kernel" in next(line for line in lines if line.startswith(".PHONY:")).split()
    recipe = lines[lines.index("bench-kernel: venv") + 1]
    assert recipe == "\t$(RUN) benchmarks kernel $(BENCH)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_one_sentence_says_so():
    done = cli("benchmarks", "kernel")
    assert (
        done.code == 1 and "no CUDA device here" in done.err and done.err.strip().count("\n") == 0
    )


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_attend", None)
    with pytest.raises(RestoreKVError, match="need Triton"):
        kernel.check_device(rehearse=True)


COUNTS = ["tokens", "questions", "tail", "layers", "heads", "groups", "width", "repeat", "copied"]


@pytest.mark.parametrize("bad", [{"ratios": ()}, {"ratios": (0,)}, *({name: 0} for name in COUNTS)])
def test_wrong_options_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Options(**bad)
