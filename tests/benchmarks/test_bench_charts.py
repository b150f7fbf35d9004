"""Charts of stored results: what each shows, what is refused, and that nothing is written by
halves.
"""

import json
import os
import re
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
from matplotlib import style
from matplotlib.image import imread
from matplotlib.text import Text

from benchmarks import charts as measured
from benchmarks.__main__ import execute
from benchmarks.chart_memory import compute_slope
from benchmarks.chart_texts import spread_labels
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts
from restorekv.evaluation.charts import NARROW, STYLE, WIDE, make_figure
from tests.helpers.pages import ROOT

MODEL = {"parameters": 596e6, "dtype": "bfloat16", "num_hidden_layers": 28}
MACHINE = {"processor": "AMD EPYC, 2 cores", "threads": 1}
FACTS = {"model": MODEL, "machine": MACHINE}
MEBI = 1 << 20


def bench_side(side, seconds, peak, small, full):
    return {
        "tokens": 2048,
        "side": side,
        "versions": {"restorekv" if side == "ours" else "kvpress": "9.9"},
        "peak": peak,
        "seconds": seconds | {"total": sum(seconds.values())},
        "small": small,
        "full": full,
    }


def bench(refused=False, peak=500 * MEBI):
    ours = bench_side(
        "ours",
        {"prefill": 9.0, "score": 16.0, "restore": 0.5, "evict": 0.1},
        peak,
        {"token": 0.117},
        {"token": 0.13},
    )
    small = {"refused": "no such key"} if refused else {"token": 0.252}
    theirs = bench_side(
        "kvpress", {"prefill": 9.5, "score": 38.0, "evict": 0.1}, peak, small, {"token": 0.207}
    )
    ratios = {"2048": {"compress": 0.53, "compress and restore": 0.54}}
    return FACTS | {
        "ratio": 0.05,
        "repeat": 1,
        "kvpress": "0.5.5",
        "rows": [theirs, ours],
        "ratios": ratios,
    }


def alone():
    result = bench() | {"kvpress": None, "ratios": {}}
    return result | {"rows": [result["rows"][1] | {"tokens": tokens} for tokens in (2048, 4096)]}


def decode(answers=True):
    rows = [
        {
            "ratio": 1.0,
            "roofline": 0.004,
            "attention": {"ours": 0.014, "full": 0.064, "as rows": 0.0133},
            "step": {"ours": 0.497, "full": 3.052},
        },
        {
            "ratio": 0.05,
            "roofline": 0.0002,
            "attention": {"ours": 0.00128, "full": 0.064, "as rows": 0.0133, "rectangle": 0.003},
            "step": {"ours": 0.1525, "full": 3.05, "rectangle": 0.2},
        },
    ]
    found = {
        "asked": 16,
        "read": 4096,
        "answer": 24,
        "ratio": 0.05,
        "ours": {"rate": 82.25},
        "kvpress": {"rate": 2.0},
    }
    machine = MACHINE | {"date": "2026-12-24", "versions": {"torch": "2.13.0"}}
    told = {
        "tokens": 32768,
        "tail": 32,
        "bandwidth": 29.8e9,
        "rows": rows,
        "answers": found if answers else None,
    }
    return {"model": MODEL, "machine": machine} | told


def memory_row(tokens, mode, seconds):
    phases = {name: {"seconds": each, "peak": 1} for name, each in seconds.items()}
    sizes = {
        "full": 40 * MEBI,
        "layer": 10 * MEBI,
        "part": 5 * MEBI,
        "scores": MEBI,
        "kept": 2 * MEBI,
    }
    return {"tokens": tokens, "mode": mode, "phases": phases, "peak": 123 * MEBI} | sizes


def memory(lengths=(2048, 8192), modes=("plain", "streaming"), filled=False):
    seconds = {"fill" if filled else "prefill": 1.0, "score": 2.0, "restore": 0.1, "evict": 0.01}
    rows = [
        memory_row(tokens, mode, {name: each * tokens / 2048 for name, each in phases.items()})
        for tokens in lengths
        for mode, phases in (("plain", seconds), ("offload", seconds), ("streaming", {"part": 1.0}))
        if mode in modes
    ]
    return FACTS | {"evictor": "kvzip", "ratio": 0.05, "filled": filled, "rows": rows, "growth": {}}


def scorers():
    rows = [
        {"method": "kvzip", "prefill": 25.0, "multiple": 2.6},
        {"method": "kvzap", "prefill": 24, "multiple": -0.1},
    ]
    return FACTS | {"tokens": 4096, "ratio": 0.05, "rows": rows}


def train(peak=3000 * MEBI):
    seconds = {
        "prefill": 9,
        "score": 28,
        "teacher": 7,
        "restore": 0.4,
        "student": 5,
        "backward": 7,
        "optimizer": 0.02,
    }
    rows = [
        {"variant": name, "seconds": seconds, "step": 56.42, "peak": peak, "graph": peak}
        for name in ("anew", "x")
    ]
    return FACTS | {"tokens": 2048, "questions": 4, "answer": 128, "ratio": 0.1, "rows": rows}


def kernel(rehearsal=False, tokens=32768):
    rows = [
        {
            "ratio": ratio,
            "roofline": 3e-5 * ratio,
            "ours": {"seconds": took},
            "sdpa": {"seconds": 2 * took},
        }
        for ratio, took in ((1.0, 41.3e-6), (0.05, 9.25e-6))
    ]
    options = {
        "tokens": tokens,
        "questions": 1,
        "tail": 64,
        "layers": 32,
        "heads": 8,
        "groups": 4,
        "width": 128,
    }
    machine = MACHINE | {
        "date": "2026-01-02",
        "device": "a made-up GPU",
        "versions": {"triton": "3.9"},
        "cuda": "13.0",
    }
    return {
        "machine": machine,
        "rehearsal": rehearsal,
        "bandwidth": 4.2e12,
        "options": options,
        "rows": rows,
    }


def serving():
    def side(name, size, cold, warm, fit, more):
        rates = {"fit, 1 together": 9.0, "fit, 8 together": fit, "do not fit, 1 together": 5.0}
        return {
            "side": name,
            "bytes": size * 1_000_000,
            "resident": 4,
            "cold": [cold],
            "warm": [warm],
            "throughput": rates | {"do not fit, 8 together": more},
        }

    options = {
        "model": "smollm2",
        "tokens": 1024,
        "documents": 8,
        "fitting": 4,
        "together": [1, 8],
        "answer": 16,
    }
    rows = [
        side("whole", 1024, 2.32, 0.16, 41.3, 6.0),
        side("r = 0.1", 126, 0.14, 0.09, 159.2, 160.4),
    ]
    return {"options": options, "machine": MACHINE | {"date": "2026-12-24"}, "rows": rows}


def words(path) -> str:
    """What an SVG says, and that it is one."""
    ElementTree.parse(path)
    said = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(encoding="utf-8"), re.DOTALL)
    return " | ".join(re.sub("<[^>]*>", " ", text).strip() for text in said).replace("\u00a0", " ")


def drawn(tmp_path, result, name="result") -> str:
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(result))
    assert measured.write_charts([file], tmp_path / "charts") == [
        tmp_path / "charts" / f"{name}.svg"
    ]
    return words(tmp_path / "charts" / f"{name}.svg")


SHOWN = {
    "bench": (
        bench(),
        [
            "Compressing with KVzip to r = 0.05",
            "prefill",
            "scoring",
            "restore pass",
            "eviction",
            "kvpress 0.5.5",
            "25.6 s, 0.54 of kvpress",
            "47.6 s",
            "500",
            "117",
            "252",
            "130",
            "207",
            "milliseconds",
            "restorekv 9.9",
        ],
    ),
    "bench, refused": (bench(refused=True), ["refused", "117"]),
    "decode": (
        decode(),
        [
            "T = 32,768",
            "roofline at copy bandwidth",
            "1.28",
            "DynamicCache of as many pairs",
            "1/50",
            "1/20",
            "all pairs, one call of SDPA",
            "Whole decode step",
            "82.2",
            "2.0",
            "times as many tokens",
            "2026-12-24",
            "torch 2.13.0",
            "tokens a second",
            "milliseconds (log)",
        ],
    ),
    "memory": (
        memory(),
        [
            "Seconds, plain",
            "Seconds, streaming",
            "Peak memory",
            "slope 1.00",
            "scoring",
            "restore pass",
            "all phases",
            "bound without workspace",
            "2,048",
            "8,192",
            "KVzip",
            "28 layers",
            "MB above the weights (log)",
        ],
    ),
    "memory, filled": (memory(filled=True), ["fill", "filled with random numbers"]),
    "memory, one length": (
        memory((2048,), ("plain", "offload", "streaming")),
        ["3.11 s", "123", "51", "23", "8", "streamed, all phases", "T = 2,048"],
    ),
    "scorers": (
        scorers(),
        ["KVzip", "KVzap", "2.60", "\u22120.10", "prefills of 4,096 tokens", "24.0 to 25.0 s"],
    ),
    "train": (
        train(),
        ["anew", "teacher", "backward", "optimizer", "56.4 s", "3,000", "Graph before backward"],
    ),
    "kernel": (
        kernel(),
        [
            "41.3",
            "9.25",
            "target at",
            "r = 0.05: 12",
            "r = 1: 45",
            "roofline",
            "dense SDPA of as many pairs",
            "a made-up GPU",
            "CUDA 13.0; triton 3.9; 2026-01-02",
            "microseconds a layer (log)",
        ],
    ),
    "vllm": (
        serving(),
        [
            "Documents of 1,024 tokens in vLLM, in memory for 4 whole ones",
            "whole, 1024 MB",
            "2.32",
            "0.09",
            "41",
            "160",
            "8 questions at once",
            "4 documents, which fit whole",
            "8 documents, which do not",
            "tokens a second",
            "smollm2; answers of 16 tokens",
            "2026-12-24",
        ],
    ),
    "kernel, rehearsed": (kernel(rehearsal=True), ["these figures mean nothing"]),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_chart_tells_the_figures(kind, tmp_path):
    result, wanted = SHOWN[kind]
    said = drawn(tmp_path, result)
    assert [each for each in wanted if each not in said] == []


@pytest.mark.parametrize("kind", [*SHOWN, "bench, ours alone"])
def test_no_text_lies_on_another_or_is_cut(kind, monkeypatch):
    texts, draw_text = [], Text.draw
    monkeypatch.setattr(
        Text, "draw", lambda self, *given: texts.append(self) or draw_text(self, *given)
    )
    result = SHOWN[kind][0] if kind in SHOWN else alone()
    with style.context(STYLE):
        figure = measured.make_chart_with_note(Path("2026-11-21-name.json"), result).composed
        figure.draw_without_rendering()
        boxes = [
            (text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()
        ]
    assert len(boxes) > 8
    for (said, box), (other, more) in combinations(boxes, 2):
        width = min(box.x1, more.x1) - max(box.x0, more.x0)
        height = min(box.y1, more.y1) - max(box.y0, more.y0)
        assert width < 1 or height < 2, f"{said!r} lies on {other!r}"
    for said, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, f"{said!r} is cut"
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, f"{said!r} is cut"


def test_what_was_not_measured_is_not_drawn(tmp_path):
    assert "tokens a second" not in drawn(tmp_path, decode(answers=False))
    assert "Peak" not in drawn(tmp_path, bench(peak=None))
    assert "Graph" not in drawn(tmp_path, train(peak=None))
    assert "target" not in drawn(tmp_path, kernel(tokens=1024)), "targets are for one shape"
    assert "kvpress" not in drawn(tmp_path, alone())


def test_the_day_may_be_in_the_name(tmp_path):
    assert "2026-11-21" in drawn(tmp_path, scorers(), "2026-11-21-scorers-cpu")
    dated = scorers() | {"machine": MACHINE | {"date": "2027-01-01"}}
    assert "2026-11-21" not in drawn(tmp_path, dated, "2026-11-21-scorers-cpu")


def test_a_second_call_overwrites_and_is_the_same(tmp_path):
    drawn(tmp_path, scorers())
    chart = tmp_path / "charts" / "result.svg"
    first = chart.read_bytes()
    chart.write_text("old")
    drawn(tmp_path, scorers())
    assert chart.read_bytes() == first


BAD = {
    "missing": (None, "There is no file"),
    "damaged": ('{"rows": [', "not JSON, or damaged"),
    "binary": (b"\xff\xfe\x00", "not JSON, or damaged"),
    "a list": ("[1, 2]", "not a result of bench"),
    "no rows": ('{"rows": []}', "not a result of bench"),
    "other rows": ('{"rows": [{"a": 1}]}', "not a result of bench"),
    "mixed rows": (json.dumps({"rows": [scorers()["rows"][0], {"a": 1}]}), "not a result of bench"),
    "a part": (json.dumps({"rows": scorers()["rows"]}), "does not hold what its chart shows"),
    "words": (
        json.dumps(scorers() | {"rows": [{"method": "a", "multiple": "b", "prefill": 1}]}),
        "does not hold",
    ),
    "zero": (
        json.dumps(memory() | {"rows": [memory_row(t, "plain", {"score": 0}) for t in (1, 2)]}),
        "does not hold",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_result_is_refused_and_nothing_is_written(kind, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(scorers()))
    payload, told = BAD[kind]
    if payload is not None:
        bad.write_bytes(payload if isinstance(payload, bytes) else payload.encode())
    with pytest.raises(RestoreKVError, match=told) as error:
        measured.write_charts([good, bad], tmp_path / "charts")
    assert "bad.json" in str(error.value) and not (tmp_path / "charts").exists()


def test_places_that_cannot_hold_charts(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(scorers()))
    with pytest.raises(RestoreKVError, match="is not a folder"):
        measured.write_charts([file], file)
    with pytest.raises(RestoreKVError, match="Several files are called a"):
        measured.write_charts([file, tmp_path / "other" / "a.json"], tmp_path / "charts")


def test_a_failed_write_leaves_the_old_chart(tmp_path, monkeypatch):
    drawn(tmp_path, scorers())
    chart = tmp_path / "charts" / "result.svg"
    before = chart.read_bytes()
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError):
        drawn(tmp_path, train())
    assert chart.read_bytes() == before and list(chart.parent.iterdir()) == [chart]


def test_the_command_reads_the_stored_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        execute(["charts"]) == 1 and "no results in benchmarks/results" in capsys.readouterr().err
    )
    stored = tmp_path / "benchmarks" / "results"
    stored.mkdir(parents=True)
    (stored / "2026-11-21-scorers.json").write_text(json.dumps(scorers()))
    assert execute(["charts", "--png"]) == 0
    made = sorted(path.name for path in (tmp_path / "docs" / "charts").iterdir())
    assert made == ["2026-11-21-scorers.png", "2026-11-21-scorers.svg"]
    height, width, _ = imread(tmp_path / "docs" / "charts" / made[0]).shape
    assert width == round(7.4 * charts.DPI) and height > 200
    assert "Wrote docs/charts/2026-11-21-scorers.svg" in capsys.readouterr().out
    assert execute(["charts", "nowhere.json"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_labels_of_lines_stand_apart():
    heights = spread_labels((0.9, 0.89, 0.1, 0.95), (2, 2, 2, 2))
    ordered = sorted(heights)
    assert min(late - early for early, late in pairwise(ordered)) > 0.15
    assert ordered[0] == 0.1 and ordered[-1] < 1 and heights[1] < heights[0] < heights[3]


def test_the_slope_is_the_exponent():
    assert (
        compute_slope([(1000, 2.0), (3000, 1.0), (4000, 32.0)]) == "\nslope 2.00"
        and compute_slope([(5, 1.0)]) == ""
    )


def test_panels_fill_rows():
    _, axes = make_figure([("", width, 3.0) for width in (WIDE, NARROW, NARROW, NARROW)])
    heights = [round(each.get_position().y0, 3) for each in axes]
    assert heights[0] > heights[1] == heights[2] > heights[3]


STORED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_result_has_a_chart(path):
    """`make bench-charts` draws all of them, and one without a drawer would stop it."""
    chart = measured.make_chart_with_note(path, measured._read_result(path))
    assert chart.render("svg")


def test_steps_of_vllm_are_bars_of_their_medians():
    path = ROOT / "benchmarks" / "results" / "2026-11-27-vllm-steps-cpu.json"
    result = json.loads(path.read_text())
    chart = measured.make_chart_with_note(path, result)
    (axes,) = chart.figure.axes
    lengths = [bar.get_width() for bar in axes.patches]
    expected = [
        1000 * median(each[side] for each in result["rounds"])
        for side in ("alone", "plain", "documents")
    ]
    assert lengths == pytest.approx(expected)
    assert "8 requests" in chart.title and "smollm2" in chart.note and "SnapKV" in chart.note
