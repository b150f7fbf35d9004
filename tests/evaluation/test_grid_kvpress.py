"""Results in kvpress's layout, read back by the rules of its leaderboard."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from restorekv.errors import RestoreKVError
from restorekv.evaluation import kvpress_layout
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.kvpress_layout import export_kvpress
from restorekv.evaluation.results import SUMMARY
from restorekv.tasks import Question
from tests.helpers import leaderboard
from tests.helpers.grid_results import finished

QWEN, HUB = "Qwen/Qwen3-8B", "ruler:source=hub"
OFFICIAL = {"data": "simonjegou/ruler"}
SAID = ' It says "one,\ntwo"; ünïcode\r 42.'
ASKED = [
    (
        Question("niah_single_1-0", "niah_single_1", "What is 1?", ("42",), 128, "The number is"),
        SAID,
    ),
    (Question("niah_single_1-1", "niah_single_1", "What is 2?", ("42",), 128, "The number is"), ""),
    (Question("vt-0", "vt", "Which, then?", ("ONE", "two", "three"), 30, "Answer:"), SAID),
    (Question("qa_1-0", "qa_1", "Who?", ("nobody", "one"), 32, "Answer:"), SAID),
]


def cell(evictor="kvzip", ratio="0.05", benchmark=HUB, **common):
    return Cell(QWEN, benchmark, evictor, ratio, **common)


def names(folder):
    return sorted(str(path.relative_to(folder / "kvpress")) for path in export_kvpress(folder))


def rows(place):
    with (place / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_leaderboard_reads_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(kvpress_layout, "OFFICIAL_RULER", len(ASKED))
    cells = [
        Cell.full_cache(model=QWEN, benchmark=HUB),
        cell(),
        cell("kvzip+", "0.125"),
        cell(adapter="a"),
    ]
    for each in cells:
        finished(tmp_path, each, ASKED, **OFFICIAL)
    export_kvpress(tmp_path)
    shown = leaderboard.read(tmp_path / "kvpress")
    entries = {(line["method"], line["compression_ratio"]) for line in shown.values()}
    assert entries == {
        ("no_press", 0.0),
        ("kvzip", 0.95),
        ("kvzip_plus", 0.88),
        ("RestoreKV", 0.95),
    }
    for line in shown.values():
        assert (line["dataset"], line["data_dir"], line["model"]) == ("ruler", "4096", QWEN)
        assert line["score"] == pytest.approx((50 + 66.67 + 100) / 3, abs=0.01)
    assert "ruler__4096__Qwen--Qwen3-8B__kvzip_plus__0.88" in shown


def test_the_files_are_kvpresss(tmp_path):
    finished(tmp_path, cell(), ASKED, **OFFICIAL)
    (place,) = export_kvpress(tmp_path)
    assert place.name == "ruler__4096__Qwen--Qwen3-8B__kvzip__0.95__fraction0.001"
    assert {file.name for file in place.iterdir()} == {
        "predictions.csv",
        "metrics.json",
        "config.yaml",
        "restorekv.json",
    }
    wanted = {"niah_single_1": 50.0, "qa_1": 100.0, "vt": 66.67}
    metrics = json.loads((place / "metrics.json").read_text())
    assert metrics == {task: {"string_match": score} for task, score in wanted.items()}
    table = rows(place)
    assert table[0].keys() == {
        "question",
        "answer_prefix",
        "answer",
        "task",
        "max_new_tokens",
        "predicted_answer",
        "compression_ratio",
    }
    assert [row["predicted_answer"] for row in table] == [SAID, "", SAID, SAID]
    assert table[2]["answer"] == "['ONE', 'two', 'three']" and table[2]["max_new_tokens"] == "30"
    assert {row["compression_ratio"] for row in table} == {"0.95"}
    config = yaml.safe_load((place / "config.yaml").read_text())
    assert config["compression_ratio"] == 0.95 and config["fraction"] == 4 / 6500
    assert "prefix_policy=counted" in config["press_init_command"]


@pytest.mark.parametrize("order", [("0.12", "0.125"), ("0.125", "0.12")])
def test_ratios_that_print_alike_do_not_overwrite_one_another(tmp_path, order):
    for ratio in order:
        finished(tmp_path, cell(ratio=ratio), ASKED, **OFFICIAL)
        places = export_kvpress(tmp_path)
    base = "ruler__4096__Qwen--Qwen3-8B__kvzip__0.88__fraction0.001"
    assert names(tmp_path) == [base, f"{base}/1"]
    ratios = [
        yaml.safe_load((place / "config.yaml").read_text())["compression_ratio"] for place in places
    ]
    assert ratios == [0.875, 0.88], "in the order of the cells, whenever they were done"


def test_what_kvpress_itself_wrote_stays(tmp_path):
    own = tmp_path / "kvpress" / "ruler__4096__Qwen--Qwen3-8B__kvzip__0.95__fraction0.001"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("dataset: ruler\n")
    finished(tmp_path, cell(), ASKED, **OFFICIAL)
    assert export_kvpress(tmp_path) == [own / "1"] == export_kvpress(tmp_path)
    assert (own / "config.yaml").read_text() == "dataset: ruler\n"


def test_writing_again_mends_what_is_unfinished(tmp_path):
    finished(tmp_path, cell(), ASKED, **OFFICIAL)
    (place,) = export_kvpress(tmp_path)
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    (place / "config.yaml").unlink()
    (place / "predictions.csv").write_text("half")
    assert export_kvpress(tmp_path) == [place]
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before


def test_only_finished_cells_of_kvpresss_protocol(tmp_path):
    finished(tmp_path, cell(protocol="kvzip"), ASKED, **OFFICIAL)
    (finished(tmp_path, cell(), ASKED, **OFFICIAL).folder / SUMMARY).unlink()
    assert export_kvpress(tmp_path) == [] and not (tmp_path / "kvpress").exists()
    with pytest.raises(RestoreKVError, match="holds no results"):
        export_kvpress(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "kvzip"),
        ({"adapter": "a"}, "RestoreKV"),
        ({"evictor": "kvzip+", "adapter": "a"}, "RestoreKV_plus"),
        ({"evictor": "snapkv"}, "restorekv_snapkv"),
        ({"evictor": "kvzip:chunk=512"}, "restorekv_kvzip-chunk=512"),
        ({"allocation": "per-head"}, "restorekv_kvzip_allocation=per-head"),
        ({"prefix_policy": "free", "adapter": "a"}, "restorekv_kvzip_restored_prefix_policy=free"),
        ({"offset": 8}, "restorekv_kvzip_offset=8"),
        (
            {"restore_from": "evicted", "adapter": "a"},
            "restorekv_kvzip_restored_restore_from=evicted",
        ),
    ],
)
def test_kvpresss_names_are_for_what_kvpress_does(tmp_path, changed, name):
    finished(tmp_path, replace(cell(), **changed), ASKED, **OFFICIAL)
    assert names(tmp_path) == [f"ruler__4096__Qwen--Qwen3-8B__{name}__0.95__fraction0.001"]


def test_generated_rows_are_not_taken_for_official_ones(tmp_path):
    benchmark = "ruler:length=8192,per_task=1,tasks=niah_single_1+vt+qa_1"
    finished(tmp_path, cell(benchmark=benchmark, max_context=900), ASKED[1:], data="generated")
    assert names(tmp_path) == ["ruler__8192-generated__Qwen--Qwen3-8B__kvzip__0.95__max_context900"]


def test_longbench_has_a_folder_for_each_task_and_bare_numbers(tmp_path):
    asked = [
        (
            Question(
                "qasper-0", "qasper", "Question: who?\n\n", ("the red house", "no"), 148, "Answer:"
            ),
            " Red house!",
        ),
        (Question("lcc-0", "lcc", "", ("x = 1",), 84, "Next line of code:\n"), "x = 2"),
    ]
    finished(tmp_path, cell(benchmark="longbench"), asked)
    lcc, qasper = sorted(export_kvpress(tmp_path))
    assert qasper.name == "longbench__qasper__Qwen--Qwen3-8B__kvzip__0.95__fraction0.005"
    assert lcc.name == "longbench__lcc__Qwen--Qwen3-8B__kvzip__0.95__fraction0.002"
    assert json.loads((qasper / "metrics.json").read_text()) == 100.0
    assert json.loads((lcc / "metrics.json").read_text()) == 80.0
    assert rows(qasper)[0]["answers"] == "['the red house', 'no']" and len(rows(qasper)) == 1


def test_other_benchmarks_name_their_settings_and_are_passed_over_by_the_leaderboard(tmp_path):
    asked = [(Question("0-0", "needle_500", "Where?", ("Dolores Park",), 32), "In Dolores Park.")]
    finished(tmp_path, cell(benchmark="needle:depths=5,lengths=500"), asked)
    (place,) = export_kvpress(tmp_path)
    assert place.name == "needle__lengths=500-depths=5__Qwen--Qwen3-8B__kvzip__0.95"
    assert json.loads((place / "metrics.json").read_text()) == {"needle_500": {"score": 100.0}}
    assert leaderboard.read(Path(tmp_path / "kvpress")) == {}
