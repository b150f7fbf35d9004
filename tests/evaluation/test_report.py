"""The page of a run folder: what it says, what it refuses, and the files beside it."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from restorekv.cli import execute
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts, plots
from restorekv.evaluation.conditions import Condition, Method, label_conditions
from restorekv.evaluation.frame import load_grid, make_frame
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.report import write_report
from restorekv.evaluation.results import ANSWERS, load_results
from restorekv.evaluation.stats import ScoredAnswer, summarize_scores
from tests.helpers import report_world

VOID = {"meta", "link", "br", "img", "path", "use", "rect", "circle", "image"}


class Page(HTMLParser):
    """Tags that were opened, text by the class of what it stands in, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open_job, self.links, self.ids, self.headings, self.words = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.pictures = []
        self.feed(text)
        assert not self.open_job, f"left open: {self.open_job}"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        told = dict(attrs)
        self.links += [told[key] for key in ("href", "src", "xlink:href", "action") if key in told]
        self.ids += [told["id"]] if "id" in told else []
        self.pictures += [told["alt"]] if tag == "img" else []
        if tag not in VOID:
            self.open_job.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_job.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open_job.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open_job and self.open_job[-1] == "h2" and data.strip():
            self.headings.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


@pytest.fixture(scope="module", autouse=True)
def coarse():
    """Small pictures, in less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "DPI", 40)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = report_world.write_run(tmp_path_factory.mktemp("run"))
    write_report(made)
    return made


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page((folder / "report" / "index.html").read_text())


def rows(folder: Path, name: str) -> list[dict]:
    with (folder / "report" / "csv" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def answers(cell: Cell, folder: Path) -> list[ScoredAnswer]:
    return next(result for result in load_results(folder) if result.cell == cell).answers


def test_every_section_is_there(page):
    assert page.headings == [
        "Accuracy against ratio",
        "Restored next to the evictor alone",
        "Answers kept",
        "Needle in a haystack",
        "What the caches held",
        "Conventions and versions",
    ]


def test_the_page_stands_alone(folder, page):
    text = (folder / "report" / "index.html").read_text()
    assert "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"@import|url\(", text)
    beside = [link for link in page.links if not link.startswith(("#", "data:image/svg+xml"))]
    assert not [link for link in beside if not link.startswith(("csv/", "svg/", "png/"))]
    assert beside and all((folder / "report" / link).is_file() for link in beside)


def test_ids_are_unique_and_references_are_met(page):
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_pngs_are_pictures_and_as_many_as_charts(folder, page):
    pictures = sorted((folder / "report" / "png").glob("*.png"))
    assert len(pictures) == sum(link.startswith("png/") for link in page.links) > 5
    for picture in pictures:
        pixels = imread(picture)
        assert pixels.shape[1] > 150 and pixels[..., :3].std() > 0.01, picture.name


def test_paired_table_has_the_gains_of_stats(folder, page):
    """Two seeds are one benchmark of twice the contexts; an oracle pools them by hand."""
    cell = Cell("tiny", "tiny:count=6", "kvzip", "0.05", adapter="auto")
    sides = {True: [], False: []}
    for seed, spec in enumerate(("tiny:count=6", "tiny:count=6,seed=1")):
        for restored, side in sides.items():
            asked = replace(cell, benchmark=spec, adapter="auto" if restored else None)
            side += [
                replace(answer, context=f"{seed} {answer.context}")
                for answer in answers(asked, folder)
            ]
    expected = summarize_scores(sides[True], sides[False])
    told = next(
        row
        for row in rows(folder, "scores-tiny-suite-4")
        if (row["benchmark"], row["method"], row["ratio"])
        == ("tiny:count=6", "KVzip + RestoreKV", "0.05")
    )
    for key, value in expected.items():
        assert float(told[key]) == pytest.approx(value), key
    assert f"{expected['score']:.1f}" in page.text and f" +{expected['gain']:.1f} (" in page.text
    frame = make_frame(load_results(folder))
    same = frame[
        (frame.kind == "all")
        & (frame.condition == told["condition"])
        & (frame.method == told["method"])
    ]
    assert list(same.ratio) == [0.2, 0.05] and same.gain.iloc[1] == expected["gain"]


def test_chart_data_are_the_summaries(folder):
    """QASPER has one seed, so that its rows are what the cells' summaries say."""
    told = {(row["method"], row["ratio"]): row for row in rows(folder, "accuracy-qasper-3")}
    assert len(told) == 9
    for result in load_results(folder):
        cell = result.cell
        if cell.benchmark == "qasper" and cell.protocol == "kvzip":
            label = {"full": "full cache", "kvzip": "KVzip", "snapkv": "SnapKV"}[cell.evictor]
            row = told[label + " + RestoreKV" * cell.restored, str(cell.ratio_value)]
            for key in ("score", "low", "high", "kept", "kept_with_prefix"):
                assert float(row[key]) == pytest.approx(result.summary[key]), (cell, key)


def test_counts_of_gains(folder, page):
    found = [row for row in load_grid(folder).list_rows() if row["kind"] == "all" and "gain" in row]
    assert len(found) == 2 * 2 * 2 * 2 + 2
    more = sum(pair["gain"] > 0 for pair in found)
    sure = sum(pair["gain_low"] > 0 for pair in found)
    assert (
        f"{more} of {len(found)} paired cells improve, {sure} of them with a 95 % interval above "
        "zero" in page.text
    )


def test_what_protocols_hold_is_told_in_the_run_s_own_pairs(folder):
    """By hand: at r, kvpress holds floor(r (S + T) L H), kvzip S L H + floor(r T L H), with their
    own S.
    """
    heads = report_world.LAYERS * report_world.HEADS
    tokens = [
        line["tokens"]
        for result in load_results(folder)
        if result.cell == Cell.full_cache(model="tiny", benchmark="qasper")
        for line in result.lines
    ]
    counted = np.mean([int((t + 3) * heads * 5 // 100) for t in tokens])
    free = np.mean([28 * heads + t * heads * 5 // 100 for t in tokens])
    for place, held, prefix in ((2, counted, 3), (3, free, 28)):
        table = {(row["method"], row["ratio"]): row for row in rows(folder, f"held-qasper-{place}")}
        assert float(table["KVzip", "0.05"]["pairs_with_prefix"]) == pytest.approx(held)
        assert float(table["KVzip", "0.05"]["prefix"]) == prefix


def test_needles_by_length_and_depth(folder):
    cell = Cell("tiny", "needle", "kvzip", "0.05", adapter="auto")
    found = {answer.context: 100 * answer.score for answer in answers(cell, folder)}
    told = [
        row
        for row in rows(folder, "needle-needle-in-a-haystack-1-0.05")
        if row["method"] == "KVzip + RestoreKV"
    ]
    assert {
        f"{row['length']}-{float(row['depth']):g}": float(row["score"]) for row in told
    } == found
    assert len(found) == 6


def test_what_was_kept_stands_beside_the_ratio(folder):
    result = next(
        found
        for found in load_results(folder)
        if found.cell == Cell("tiny", "qasper", "snapkv", "0.2", protocol="kvzip")
    )
    table = rows(folder, "held-qasper-3")
    told = next(row for row in table if (row["method"], row["ratio"]) == ("SnapKV", "0.2"))
    for key in ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix"):
        assert float(told[key]) == pytest.approx(result.summary[key])


def test_fidelity_is_that_of_the_summaries(folder, page):
    found = {(row["method"], row["ratio"]): row for row in rows(folder, "scores-qasper-3")}
    for result in load_results(folder):
        if (
            result.cell.benchmark == "qasper"
            and result.cell.protocol == "kvzip"
            and result.cell.evictor == "kvzip"
        ):
            row = found[
                "KVzip + RestoreKV" if result.cell.restored else "KVzip",
                str(result.cell.ratio_value),
            ]
            for key in ("kl", "kl_low", "kl_high", "same"):
                assert float(row[key]) == pytest.approx(result.summary[key])
            assert f"{result.summary['kl']:.3f}" in page.text


def test_text_is_escaped(folder, page):
    text = (folder / "report" / "index.html").read_text()
    assert "&lt;system&gt; &amp; &lt;user&gt;" in text and "<system>" not in text


def test_conventions_of_every_cell(folder, page):
    told = rows(folder, "conventions")
    assert {row["cell"] for row in told} == {result.folder.name for result in load_results(folder)}
    assert {row["protocol.before"] for row in told} == {"<user>", "<system> & <user>"}
    assert "decoding greedy" in page.text and "stops of kvpress; stops of kvzip" in page.text


def test_unfinished_cells_are_said_to_run(tmp_path):
    base = Cell("tiny", "qasper", "kvzip", "0.1")
    report_world.write_cell(tmp_path, base)
    report_world.write_cell(tmp_path, replace(base, adapter="auto"), answered=2)
    report_world.write_cell(tmp_path, Cell.full_cache(model="tiny", benchmark="qasper"), answered=0)
    write_report(tmp_path)
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert "running (2 of 6 contexts)" in page.text and "running (0 of 6 contexts)" in page.text
    assert "No pair of an evictor alone and restored is finished yet." in page.text
    assert "Still running and not drawn: 2." in page.pictures[0]
    assert {row["method"] for row in rows(tmp_path, "accuracy-qasper-1")} == {"KVzip"}


def test_sections_need_data(tmp_path):
    report_world.write_cell(tmp_path, Cell("tiny", "qasper", "kvzip", "0.1"))
    write_report(tmp_path)
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert page.headings == [
        "Accuracy against ratio",
        "Restored next to the evictor alone",
        "What the caches held",
        "Conventions and versions",
    ]


def test_many_methods_have_a_panel_each(tmp_path):
    for cell in report_world.cells_of(
        "qasper", ("kvzip", "kvzip+", "snapkv", "h2o"), ("0.1", "0.05")
    ):
        report_world.write_cell(tmp_path, cell)
    write_report(tmp_path)
    drawn = (tmp_path / "report" / "svg" / "accuracy-qasper-1.svg").read_text()
    assert drawn.count("ratio r of pairs kept (log)") == 4


def test_a_control_is_no_other_method(tmp_path):
    """Fewer restore tokens, an offset and a prefix policy of its own have labels or places of their
    own.
    """
    base = Cell("tiny", "qasper", "kvzip", "0.1")
    for cell in (
        base,
        replace(base, adapter="auto"),
        replace(base, adapter="auto", restore_tokens=1),
    ):
        report_world.write_cell(tmp_path, cell)
    report_world.write_cell(tmp_path, replace(base, offset=8))
    report_world.write_cell(tmp_path, replace(base, prefix_policy="free"))
    found = [
        (row["condition"], row["method"])
        for row in load_grid(tmp_path).list_rows()
        if row["kind"] == "all"
    ]
    labels = ["KVzip", "KVzip, offset 8", "KVzip + RestoreKV", "KVzip + RestoreKV, n = 1"]
    assert found == [
        *(("QASPER", label) for label in labels),
        ("QASPER, prefix policy free", "KVzip"),
    ]


def test_each_allocation_may_have_an_adapter_that_ships(tmp_path):
    """As SmolLM2 has one for the ranking in each head."""
    base = Cell("smollm2", "qasper", "kvzip", "0.1", adapter="auto")
    for cell, weights in ((base, "1f"), (replace(base, allocation="per-head"), "2e")):
        adapter = report_world.facts_of(cell, 6)["adapter"] | {"hash": weights}
        report_world.write_cell(tmp_path, cell, adapter=adapter)
    methods = [entry.columns["method"] for entry in load_grid(tmp_path).entries]
    assert methods == ["KVzip + RestoreKV", "KVzip + RestoreKV, per-head"]


@pytest.mark.parametrize("change", [{"fingerprint": "0" * 16}, {"benchmark": {"digest": "0" * 16}}])
def test_mixed_up_cells_are_refused(tmp_path, change):
    base = Cell("tiny", "qasper", "kvzip", "0.1")
    report_world.write_cell(tmp_path, base)
    facts = report_world.facts_of(base, 6)
    other = {
        key: {**facts[key], **value} if isinstance(value, dict) else value
        for key, value in change.items()
    }
    report_world.write_cell(tmp_path, replace(base, ratio="0.2"), **other)
    with pytest.raises(RestoreKVError, match="share a name"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_the_same_context_in_two_seeds_counts_once(tmp_path):
    """Where a seed draws from a fixed set, both may have drawn one context."""
    base = Cell("tiny", "qasper:count=6", "kvzip", "0.1")
    first = report_world.write_cell(tmp_path, base)
    second = report_world.write_cell(tmp_path, replace(base, benchmark="qasper:count=6,seed=1"))
    lines = [json.loads(line) for line in (first.folder / "answers.jsonl").read_text().splitlines()]
    (second.folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [entry] = load_grid(tmp_path).entries
    pool = entry.pool
    assert len(pool.results) == 2 and len(pool.lines) == len(lines) == 6


def test_needles_in_two_haystacks_count_twice(tmp_path):
    """Their questions are the same; the texts around them are drawn by the seed."""
    for spec in ("needle:lengths=500+2000", "needle:lengths=500+2000,seed=1"):
        report_world.write_cell(tmp_path, Cell("m", spec, "kvzip", "0.1"))
    [entry] = load_grid(tmp_path).entries
    assert len(entry.pool.lines) == 12
    # The scale beside its map has the look of all charts.
    [chart] = plots.plot_needles(load_grid(tmp_path))
    [*_, last] = chart.figure.axes[-1].yaxis.get_ticklabels()
    assert last.get_color() == "#1d2530" and last.get_fontsize() == 9


def test_what_stands_in_for_official_data_is_told_beside_the_chart(tmp_path):
    cell = Cell("m", "tiny:count=6", "kvzip", "0.1")
    made = report_world.facts_of(cell, 6)["benchmark"] | {
        "stand_ins": {"qa_1": "generated documents"}
    }
    report_world.write_cell(tmp_path, cell, benchmark=made)
    write_report(tmp_path)
    [picture] = Page((tmp_path / "report" / "index.html").read_text()).pictures
    assert "Not the official data for qa_1" in picture


def test_texts_that_lost_their_ends_are_told_at_the_top(tmp_path, monkeypatch):
    report_world.write_cell(tmp_path, Cell("m", "tiny:count=6", "kvzip", "0.1"))
    write_report(tmp_path)
    page = tmp_path / "report" / "index.html"
    assert "their ends were not read" not in page.read_text()
    lines = next(tmp_path.glob("cells/*/answers.jsonl"))
    lines.write_text(re.sub('"cut": [0-9]+', '"cut": 40', lines.read_text()))
    assert '"cut": 40' in lines.read_text()
    write_report(tmp_path)
    assert "6 of 6 texts were longer than" in page.read_text()


def test_seeds_of_one_benchmark_are_one_condition(tmp_path):
    for spec in ("tiny:count=6", "tiny:count=6,seed=1", "tiny:count=6,seed=2"):
        report_world.write_cell(tmp_path, Cell("m", spec, "kvzip", "0.1"))
    [condition] = {Condition.of_result(result) for result in load_results(tmp_path)}
    assert condition.benchmark == "tiny:count=6"


def test_rows_of_fewer_seeds_than_others_are_said_to_rest_on_other_texts(tmp_path):
    note = "Rows of fewer seeds than others were asked fewer texts"
    for spec in ("tiny:count=6", "tiny:count=6,seed=1"):
        for cell in report_world.cells_of(spec, ("kvzip",), ("0.1",)):
            report_world.write_cell(tmp_path, cell)
    write_report(tmp_path)
    assert note not in Page((tmp_path / "report" / "index.html").read_text()).text
    report_world.write_cell(tmp_path, Cell("tiny", "tiny:count=6", "snapkv", "0.1"))
    write_report(tmp_path)
    assert note in Page((tmp_path / "report" / "index.html").read_text()).text


def write_extended_run(folder: Path, evictors=("kvzip", "snapkv")) -> None:
    """A run of six contexts, and one of its first three, which it was extended from."""
    for cell in report_world.cells_of("qasper:count=6", ("kvzip", "snapkv"), ("0.1",)):
        report_world.write_cell(folder, cell)
    for cell in report_world.cells_of("qasper:count=3", evictors, ("0.1",)):
        small = report_world.write_cell(folder, cell, samples=3)
        large = folder / "cells" / replace(cell, benchmark="qasper:count=6").name
        if large.is_dir():
            lines = (large / ANSWERS).read_text().splitlines(keepends=True)
            (small.folder / ANSWERS).write_text("".join(lines[:3]))


def test_a_run_that_was_extended_is_counted_once(tmp_path):
    write_extended_run(tmp_path)
    write_report(tmp_path)
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert " of 2 paired cells improve" in page.text
    assert "5 of 5 cells done" in page.text
    assert "Not shown: 5 cells of smaller runs" in page.text
    assert "count=3" not in page.text
    assert {row["benchmark"] for row in rows(tmp_path, "scores-qasper-1")} == {"qasper:count=6"}


def test_a_smaller_run_with_something_of_its_own_is_shown(tmp_path):
    """Without its cells of SnapKV, H2O's would have nothing next to them."""
    write_extended_run(tmp_path, ("snapkv", "h2o"))
    write_report(tmp_path)
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert " of 4 paired cells improve" in page.text and "Not shown" not in page.text
    assert "QASPER (count=3)" in page.text and "QASPER (count=6)" in page.text


def test_conditions_with_one_title_have_labels_of_their_own():
    """Two benchmarks of a user may have the same title."""
    specs = ("mine", "yours", "lines:path=a", "rows:path=a", "rows:path=b,count=2")
    conditions = {
        Condition("tiny", spec, "kvzip", "free", 0, "float32"): "My texts" for spec in specs
    }
    labels = list(label_conditions(conditions).values())
    assert labels == [
        "My texts (mine)",
        "My texts (yours)",
        "My texts (lines:path=a)",
        "My texts (rows:path=a)",
        "My texts (path=b, count=2)",
    ]


def test_command_line(folder, tmp_path, capsys):
    assert execute(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert execute(["report", str(tmp_path / "none")]) == 1
    assert "There is no folder" in capsys.readouterr().err
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    assert execute(["report", str(folder), "--out", str(precious)]) == 1
    assert "holds files that are not a report" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"] and (
        precious / "thesis.txt"
    ).exists()


def test_a_page_with_more_beside_it_stays(tmp_path):
    """`python -m paper` writes OUT/report too, with paper.json beside the page."""
    report_world.write_cell(tmp_path, Cell("tiny", "qasper", "kvzip", "0.1"))
    write_report(tmp_path)
    (tmp_path / "report" / "paper.json").write_text("{}")
    with pytest.raises(RestoreKVError, match=r"holds paper\.json"):
        write_report(tmp_path)
    assert (tmp_path / "report" / "index.html").exists()
    assert write_report(tmp_path, tmp_path / "page").exists()


def test_adapters_in_folders_of_one_name_are_told_apart(tmp_path):
    base = Cell("tiny", "qasper", "kvzip", "0.1")
    for adapter in (None, "runs/mine/adapter", "runs/other/adapter"):
        report_world.write_cell(tmp_path, replace(base, adapter=adapter))
    labels = [entry.columns["method"] for entry in load_grid(tmp_path).entries]
    restored = ["KVzip + RestoreKV, runs/mine/adapter", "KVzip + RestoreKV, runs/other/adapter"]
    assert labels == ["KVzip", *restored]


def test_kv_dtype_and_streaming_chunk_stand_behind_the_plain_method(tmp_path):
    """The plain one keeps the evictor's look and title; a restored cell is paired with a base that
    is held as it is.
    """
    base = Cell("tiny", "tiny:count=6", "kvzip", "0.05")
    for changed in ({"kv_dtype": "fp8"}, {"kv_dtype": "int8"}, {"streaming_chunk": 512}, {}):
        for adapter in (None, "auto"):
            report_world.write_cell(tmp_path, replace(base, adapter=adapter, **changed), answered=2)
    run = load_grid(tmp_path)
    alone = ["KVzip", "KVzip, fp8", "KVzip, int8", "KVzip, streamed 512 tokens at a time"]
    assert [entry.columns["method"] for entry in run.entries][:4] == alone
    assert len(run.entries) == 8
    methods = [Method.of_cell(entry.pool.results[0].cell) for entry in run.entries]
    for method in methods[4:]:
        alone = method.evictor_alone
        assert alone in methods[:4]
        assert (alone.kv_dtype, alone.streaming_chunk) == (method.kv_dtype, method.streaming_chunk)


def test_a_task_below_ten_on_the_full_cache_is_left_out_of_means_and_shown(tmp_path, monkeypatch):
    monkeypatch.setitem(report_world.SKILL, "full", 0.0)
    cells = report_world.cells_of("tiny:count=6", ("kvzip",), ("0.2",))
    for cell in cells:
        result = report_world.write_cell(tmp_path, cell)
        lines = [json.loads(json.dumps(line)) for line in result.lines]
        for line in lines:
            for told in line["answers"]:
                told["score"] = (
                    float(told["task"] != "qa") if cell.evictor == "full" else told["score"]
                )
        (result.folder / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert "because the full cache is below 10: qa." in page.text
    full, base, _ = (entry.pool for entry in load_grid(tmp_path).entries)
    kept = [answer for answer in base.answers if answer.task != "qa"]
    assert base.score_tasks() == summarize_scores(kept) and full.score_tasks()["score"] == 100
    assert base.score_tasks(["qa"])["questions"] == 6, "shown by itself"
