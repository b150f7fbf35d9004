"""Resumed runs equal uninterrupted ones, settings never mix, and costs are measured side by side."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from restorekv.cli.analyze import WHAT, choose
from restorekv.compression.eviction import Eviction
from restorekv.compression.prepared import CompressionConfig
from restorekv.errors import RestoreKVError
from restorekv.evaluation.analysis import compress_cost, cost
from restorekv.evaluation.analysis.run import ANALYSES, analyze, label_of
from restorekv.evaluation.protocols import PROTOCOLS
from restorekv.evaluation.report.analyses import sections
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Benchmark, Question, Sample
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model

KVPRESS = PROTOCOLS["kvpress"]
TEXT = "the code of the red house is seven; who lives in the blue house? the code of the house is who. " * 2


@dataclass(frozen=True)
class Three(Benchmark):
    """Three contexts with one, two and three questions."""

    name: ClassVar[str] = "three"

    def samples(self, tokenizer, protocol):
        for index in range(3):
            asked = [Question(f"{index}-{turn}", "qa", f"who{'?' * turn}", ("red",), 2) for turn in range(index + 1)]
            yield Sample(str(index), TEXT + "the house. " * index, tuple(asked))

    def score(self, question, prediction):
        return 0.0

    def described(self):
        return {}


@pytest.fixture(scope="module")
def world(tiny_tokenizer):
    model = build_model("qwen3")
    return model, tiny_tokenizer, Eviction.make("knorm", RestoreAdapter.create(model, 2, rank=2))


def figures(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "analysis").glob("*.json"))}


def test_an_interrupted_run_goes_on(world, tmp_path, monkeypatch):
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "whole")
    prepared, prepare = [], Eviction.prepare

    def counted(self, *args):
        prepared.append(args[2].tokens)
        return prepare(self, *args)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Eviction, "prepare", counted)
    with pytest.raises(KeyboardInterrupt):
        analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut", progress=stop)
    assert not figures(tmp_path / "cut")
    journal = next((tmp_path / "cut" / "analysis").glob("restore_attention-*.jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2])  # killed while it wrote a line
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut")
    assert len(prepared) == 2 + 2  # the second document again, for the torn line alone
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut")
    assert len(prepared) == 4
    written = next((tmp_path / "cut" / "analysis").glob("attention-*.jsonl")).read_text().splitlines()
    assert [json.loads(line).get("document") for line in written] == [None, "0", "1", "2"]


def test_files_say_what_they_were_made_with(world, tmp_path):
    paths = analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, label="mine")
    assert [path.name for path in paths] == [f"{name}-mine.json" for name in ANALYSES]
    for path, stored in figures(tmp_path).items():
        assert {"fingerprint", "dtype", "rope", "prefix_policy", "versions", "benchmark", "data"} <= stored[
            "conventions"
        ].keys()
        assert stored["conventions"]["method"] == "knorm" and stored["conventions"]["adapter"]["hash"]
        assert (stored["documents"], stored["questions"], list(stored["figures"])) == (3, 6, ["0.2"])
        assert stored["analysis"] == path.partition("-")[0] and stored["definitions"]
        assert "NaN" not in json.dumps(stored) and "Infinity" not in json.dumps(stored)


def test_files_of_the_earlier_name_are_continued_and_reported(world, tmp_path, monkeypatch):
    """restore_attention was called gaze."""
    [new] = analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, ["restore_attention"], "mine")
    before, titles = json.loads(new.read_text()), [section.title for section in sections(tmp_path)]
    old = new.with_name("gaze-mine.json")
    new.with_suffix(".jsonl").rename(old.with_suffix(".jsonl"))
    new.unlink()
    monkeypatch.setattr(Eviction, "prepare", None)  # nothing is measured again
    assert analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, ["restore_attention"], "mine") == [old]
    assert json.loads(old.read_text()) == before
    old.write_text(json.dumps(before | {"analysis": "gaze"}))
    assert [section.title for section in sections(tmp_path)] == titles and len(titles) == 1


@pytest.mark.parametrize("change", ["ratio", "evictor", "benchmark"])
def test_other_settings_do_not_mix(world, tmp_path, change):
    model, tokenizer, eviction = world
    analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, ["survivors"], "mine")
    other = Eviction.make("streaming", eviction.adapter) if change == "evictor" else eviction
    benchmark, ratio = Three(count=2) if change == "benchmark" else Three(), "0.3" if change == "ratio" else "0.2"
    with pytest.raises(RestoreKVError, match=r"was made with .* give another --out or --label"):
        analyze(model, tokenizer, other, KVPRESS, benchmark, [ratio], tmp_path, ["survivors"], "mine")


def test_without_an_adapter_there_is_no_restored_cache(world, tmp_path):
    model, tokenizer, eviction = world
    analyze(model, tokenizer, replace(eviction, adapter=None), KVPRESS, Three(), ["0.2"], tmp_path)
    stored = figures(tmp_path)
    assert sorted(each["analysis"] for each in stored.values()) == ["attention", "divergence", "survivors"]
    by_analysis = {each["analysis"]: each["figures"]["0.2"] for each in stored.values()}
    assert list(by_analysis["attention"]["caches"]) == ["full", "base"]
    assert list(by_analysis["divergence"]["caches"]) == ["base"]
    assert list(by_analysis["survivors"]) == ["caches"]


def test_the_protocol_decides_settings_and_questions(world, tmp_path):
    model, tokenizer, _ = world
    eviction = Eviction.make("kvzip")
    for name in PROTOCOLS:
        analyze(model, tokenizer, eviction, PROTOCOLS[name], Three(), ["0.2"], tmp_path / name, ["attention"])
    by_protocol = {name: next(iter(figures(tmp_path / name).values())) for name in PROTOCOLS}
    assert by_protocol["kvpress"]["conventions"]["method"] == "kvzip"
    assert by_protocol["kvzip"]["conventions"]["protocol"] == "kvzip"
    assert "chunk=2000" in by_protocol["kvzip"]["conventions"]["method"]
    asked = [by_protocol[name]["figures"]["0.2"]["caches"]["full"]["question"] for name in PROTOCOLS]
    assert asked[0] != asked[1]  # "Q: " and another tokenisation


def test_labels_are_names_of_files():
    assert label_of("bundled", "kvzip") == "bundled-kvzip"
    assert label_of("/models/Qwen3-4B/", "snapkv:window=64,kernel=5") == "Qwen3-4B-snapkv-window=64-kernel=5"


@pytest.mark.parametrize("what", ["best", "", "restore_attention,best"])
def test_unknown_analyses_are_refused(what):
    with pytest.raises(RestoreKVError, match="give some of"):
        choose(what)
    assert choose("restore_attention, attention") == choose("attention,gaze") == ["attention", "restore_attention"]
    assert choose(",".join(WHAT)) == list(WHAT)


@pytest.fixture(scope="module")
def saved(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_model("qwen3").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def in_process(model, options, conventions, scorer, restored):
    """A measurement here; a process of its own costs seconds."""
    job = {
        "model": str(model.config.name_or_path), "dtype": "float32", "device": "cpu", "evictor": scorer,
        "restored": restored, "tokens": options.tokens, "ratio": options.ratio, "repeat": options.repeat,
        "conventions": conventions.described(), "folder": str(model.config.name_or_path),
    }  # fmt: skip
    with torch.no_grad():
        return compress_cost.measure(job)


def test_efficiency_compares_base_and_restored(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "compression_apart", in_process)
    model, tokenizer = load_model(str(saved))
    options = cost.CostOptions(("knorm", "kvzap"), 128, "0.2", ("1", "0.2"), repeat=2, steps=3)
    heard = []
    path = cost.measure(
        model, tokenizer, tmp_path, options, CompressionConfig(), "mine", lambda *update: heard.append(update)
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
    assert stored["latency_ratio"].keys() == {"1", "0.2"} and stored["conventions"]["latency_context"] == "prefill"
    assert cost.measure(model, tokenizer, tmp_path, options, CompressionConfig(), "mine") == path
    with pytest.raises(RestoreKVError, match="was made with tokens 128"):
        cost.measure(model, tokenizer, tmp_path, replace(options, tokens=256), CompressionConfig(), "mine")


def test_base_and_restored_caches_hold_the_same(tiny_model, tiny_tokenizer):
    prepared = cost.random_prepared(tiny_model, tiny_tokenizer, 100, 3, CompressionConfig())
    rows = cost.latencies(prepared, ["1", "0.1"], 2)
    layers, heads, tokens = prepared.scores.shape
    for base, restored, ratio in zip(rows[::2], rows[1::2], (1, 0.1), strict=True):
        assert base["pairs"] == restored["pairs"] == round(ratio * tokens + prepared.context.prefix) * layers * heads
        assert base["restore_tokens"] == 0 and restored["restore_tokens"] == 3
        assert 0 < base["least"] <= base["milliseconds"] <= base["most"] and restored["to_base"] > 0
        # Equal keys and values; the restored cache has no position for each of its restore pairs.
        assert base["bytes"] - restored["bytes"] == 4 * 3 * heads * layers


def test_memory_of_a_gpu_is_the_allocators(monkeypatch):
    fakes = {"memory_allocated": 100, "max_memory_allocated": 350, "synchronize": None, "reset_peak_memory_stats": None}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    figures = {}
    with compress_cost.memory(torch.device("cuda"), figures):
        pass
    assert figures == {"peak": 250}


def test_memory_of_a_process_counts_what_is_held():
    figures = {}
    with compress_cost.memory(torch.device("cpu"), figures):
        block = torch.ones(1 << 22)
        del block
    if figures["peak"] is not None:
        assert 15 << 20 <= figures["peak"] < 20 << 20


@pytest.mark.parametrize("wrong", [{"tokens": 3}, {"repeat": 0}, {"ratio": "0"}, {"latency_context": "none"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(RestoreKVError):
        cost.CostOptions(**wrong)


def test_the_command_writes_every_file(saved, tmp_path):
    command = ["analyze", "--out", str(tmp_path), "--model", str(saved), "--evictor", "knorm@none",
               "--benchmark", "bundled:count=1,low=200,high=210", "--what", "survivors,gaze,attention"]  # fmt: skip
    done = cli(*command)
    assert done.code == 0 and "restore_attention is left out" in done.err, done
    label = label_of(str(saved), "knorm")
    assert sorted(figures(tmp_path)) == [f"attention-{label}.json", f"survivors-{label}.json"]
    refused = cli(*command, "--evictor", "am-fast")
    assert refused.code == 1 and "not an evictor" in refused.err and refused.err.count("\n") == 1


def test_the_command_measures_cost_without_the_controls(saved, tmp_path, monkeypatch):
    """restore_from and offset are about answers: what compressing costs is measured without them."""
    monkeypatch.setattr(cost, "compression_apart", in_process)
    command = ("analyze", "--out", tmp_path, "--model", saved, "--what", "efficiency", "--scorer", "knorm",
               "--tokens", 96, "--ratio", "0.3", "--repeat", 1, "--offset", 7, "--allocation", "per-head")  # fmt: skip
    done = cli(*command)
    assert done.code == 0, done.err
    (path,) = (tmp_path / "efficiency").iterdir()
    conventions = json.loads(path.read_text())["conventions"]
    assert (conventions["offset"], conventions["allocation"], conventions["prefix_policy"]) == (
        0,
        "per-head",
        "counted",
    )


@pytest.mark.slow
def test_a_measurement_runs_in_a_process_of_its_own(saved):
    model, _ = load_model(str(saved))
    options = cost.CostOptions(("knorm",), 128, "0.2", repeat=1)
    row = cost.compression_apart(model, options, CompressionConfig(), "knorm", True)
    assert row["adapter"] == "random" and row["seconds"]["total"] > 0
    with pytest.raises(RestoreKVError, match="restore tokens do not fit"):
        cost.compression_apart(model, replace(options, ratio="0.01"), CompressionConfig(), "knorm", True)
