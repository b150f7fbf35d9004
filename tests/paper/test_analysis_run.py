"""Resumed runs equal uninterrupted ones, and settings never mix."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from benchmarks.workload import make_label
from paper.analysis.cli import choose_analyses
from paper.analysis.page import write_analyses
from paper.analysis.run import ANALYSES, analyze
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evaluation.protocols import PROTOCOLS
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Benchmark, Question, Sample
from tests.helpers import analysis_world
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model

KVPRESS = PROTOCOLS["kvpress"]
TEXT = (
    "the code of the red house is seven; who lives in the blue house? the code of the house is "
    "who. " * 2
)


@dataclass(frozen=True)
class Three(Benchmark):
    """Three contexts with one, two and three questions."""

    name: ClassVar[str] = "three"
    title: ClassVar[str] = "Three contexts"

    def load_samples(self, tokenizer, protocol):
        for index in range(3):
            asked = [
                Question(f"{index}-{turn}", "qa", f"who{'?' * turn}", ("red",), 2)
                for turn in range(index + 1)
            ]
            yield Sample(str(index), TEXT + "the house. " * index, tuple(asked))

    def score(self, question, prediction):
        return 0.0

    def to_json(self):
        return {}


@pytest.fixture(scope="module")
def world(tiny_tokenizer):
    model = build_model("qwen3")
    return model, tiny_tokenizer, Eviction.make("knorm", RestoreAdapter.create(model, 2, rank=2))


def figures(folder):
    return {
        path.name: json.loads(path.read_text())
        for path in sorted((folder / "analysis").glob("*.json"))
    }


def test_an_interrupted_run_goes_on(world, tmp_path, monkeypatch):
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "whole")
    prepared, prepare = [], Eviction.prepare

    def counted(self, *args):
        prepared.append(args[2].text_tokens)
        return prepare(self, *args)

    def stop(done, *_):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Eviction, "prepare", counted)
    with pytest.raises(KeyboardInterrupt):
        analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut", progress=stop)
    assert not figures(tmp_path / "cut")
    journal = next((tmp_path / "cut" / "analysis").glob("restore_attention-*.jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    # Killed while it wrote a line.
    journal.write_bytes(b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut")
    assert len(prepared) == 2 + 2  # the second document again, for the torn line alone
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    analyze(*world, KVPRESS, Three(), [0.2, "0.4"], tmp_path / "cut")
    assert len(prepared) == 4
    written = (
        next((tmp_path / "cut" / "analysis").glob("attention-*.jsonl")).read_text().splitlines()
    )
    assert [json.loads(line).get("document") for line in written] == [None, "0", "1", "2"]


def test_files_say_what_they_were_made_with(world, tmp_path):
    paths = analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, label="mine")
    assert [path.name for path in paths] == [f"{name}-mine.json" for name in ANALYSES]
    for path, stored in figures(tmp_path).items():
        assert {
            "fingerprint",
            "dtype",
            "rope",
            "prefix_policy",
            "versions",
            "benchmark",
            "data",
        } <= stored["conventions"].keys()
        assert (
            stored["conventions"]["method"] == "knorm" and stored["conventions"]["adapter"]["hash"]
        )
        assert (stored["documents"], stored["questions"], list(stored["figures"])) == (
            3,
            6,
            ["0.2"],
        )
        assert stored["analysis"] == path.partition("-")[0] and stored["definitions"]
        assert "NaN" not in json.dumps(stored) and "Infinity" not in json.dumps(stored)


@pytest.mark.parametrize("change", ["ratio", "evictor", "benchmark"])
def test_other_settings_do_not_mix(world, tmp_path, change):
    model, tokenizer, eviction = world
    analyze(*world, KVPRESS, Three(), ["0.2"], tmp_path, ["survivors"], "mine")
    other = Eviction.make("streaming", eviction.adapter) if change == "evictor" else eviction
    benchmark, ratio = (
        Three(count=2) if change == "benchmark" else Three(),
        "0.3" if change == "ratio" else "0.2",
    )
    with pytest.raises(RestoreKVError, match=r"was made with .* give another --out or --label"):
        analyze(
            model, tokenizer, other, KVPRESS, benchmark, [ratio], tmp_path, ["survivors"], "mine"
        )


def test_without_an_adapter_there_is_no_restored_cache(world, tmp_path):
    model, tokenizer, eviction = world
    analyze(model, tokenizer, replace(eviction, adapter=None), KVPRESS, Three(), ["0.2"], tmp_path)
    stored = figures(tmp_path)
    assert sorted(each["analysis"] for each in stored.values()) == [
        "attention",
        "divergence",
        "survivors",
    ]
    by_analysis = {each["analysis"]: each["figures"]["0.2"] for each in stored.values()}
    assert list(by_analysis["attention"]["caches"]) == ["full", "base"]
    assert list(by_analysis["divergence"]["caches"]) == ["base"]
    assert list(by_analysis["survivors"]) == ["caches"]


def test_the_protocol_decides_settings_and_questions(world, tmp_path):
    model, tokenizer, _ = world
    eviction = Eviction.make("kvzip")
    for name in PROTOCOLS:
        analyze(
            model,
            tokenizer,
            eviction,
            PROTOCOLS[name],
            Three(),
            ["0.2"],
            tmp_path / name,
            ["attention"],
        )
    by_protocol = {name: next(iter(figures(tmp_path / name).values())) for name in PROTOCOLS}
    assert by_protocol["kvpress"]["conventions"]["method"] == "kvzip"
    assert by_protocol["kvzip"]["conventions"]["protocol"] == "kvzip"
    assert "chunk=2000" in by_protocol["kvzip"]["conventions"]["method"]
    asked = [
        by_protocol[name]["figures"]["0.2"]["caches"]["full"]["question"] for name in PROTOCOLS
    ]
    assert asked[0] != asked[1]  # "Q: " and another tokenisation


def test_labels_are_names_of_files():
    assert make_label("tiny", "kvzip") == "tiny-kvzip"
    assert (
        make_label("/models/Qwen3-4B/", "snapkv:window=64,kernel=5")
        == "Qwen3-4B-snapkv-window=64-kernel=5"
    )


@pytest.mark.parametrize("what", ["best", "", "restore_attention,best"])
def test_unknown_analyses_are_refused(what):
    with pytest.raises(RestoreKVError, match="give some of"):
        choose_analyses(what)
    assert choose_analyses("restore_attention, attention") == ["attention", "restore_attention"]
    assert choose_analyses(",".join(ANALYSES)) == list(ANALYSES)


def test_the_command_writes_every_file(saved_model, tmp_path):
    command = [
        "paper.analysis",
        "--out",
        str(tmp_path),
        "--model",
        str(saved_model),
        "--evictor",
        "knorm@none",
        "--benchmark",
        "tiny:count=1,low=200,high=210",
        "--what",
        "survivors,restore_attention,attention",
    ]
    done = cli(*command)
    assert done.code == 0 and "restore_attention is left out" in done.err, done
    label = make_label(str(saved_model), "knorm")
    assert sorted(figures(tmp_path)) == [f"attention-{label}.json", f"survivors-{label}.json"]
    refused = cli(*command, "--evictor", "am-fast")
    assert refused.code == 1 and "not an evictor" in refused.err and refused.err.count("\n") == 1


def test_the_page_shows_every_kind_of_analysis(tmp_path):
    index = write_analyses(analysis_world.write_analyses(tmp_path))
    text = index.read_text()
    titles = [
        "Attention on the context",
        "Distance from the full cache",
        "What survives",
        "Where restore tokens look",
    ]
    assert [title for title in titles if f"<h2>{title}</h2>" not in text] == []
    assert (
        "mass on &lt;non-sink&gt; context columns" in text
        and "&#39;&lt;Marta&gt;&#39; 8.0 %" in text
    )
    assert (
        len(list((index.parent / "svg").iterdir())) == 3
        and len(list((index.parent / "csv").iterdir())) == 7
    )
