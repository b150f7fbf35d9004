"""`python -m paper` on the tiny model in small: from nothing, again, and what it tells
meanwhile.
"""

import json
import os
from dataclasses import replace

import pytest

from paper import carry_out, plan, write
from paper import setting as setting_module
from paper.carry_out import Clock, format_seconds
from paper.experiments import choose_experiments
from paper.setting import make_tiny_setting
from restorekv.evaluation.results import CELLS, load_results
from restorekv.evaluation.stats import bootstrap_score, summarize_scores
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model

ONLY = "fast-kvzip,metrics"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three cells and the full cache on two documents."""
    out = tmp_path_factory.mktemp("paper") / "runs" / "paper"
    return out, cli("paper", out, "--only", ONLY, "--count", 2)


def test_from_nothing(made):
    out, result = made
    assert result.code == 0, result.err
    assert str(out / "report" / "index.html") in result.out.replace("\n", "")
    assert "Figure A (kvzip)" in result.err and "Figure A (fastkvzip)" in result.err
    found = {(one.cell.evictor, one.cell.restored): one for one in load_results(out)}
    assert set(found) == {
        ("kvzip", False),
        ("fastkvzip", False),
        ("fastkvzip", True),
        ("full", False),
    }
    assert all(one.done and one.identity["prefix_policy"] == "free" for one in found.values())
    told = json.loads((out / "report" / "paper.json").read_text())["experiments"]
    assert list(told) == ["fast-kvzip", "metrics"]
    rows = {row["row"]: row for row in told["fast-kvzip"]["rows"]}
    retrieval = make_tiny_setting(out).benches["ruler"].parts[""]
    answers = {
        key: [answer for answer in one.answers if answer.task in retrieval]
        for key, one in found.items()
    }
    best, base = answers["fastkvzip", True], answers["fastkvzip", False]
    row = rows["fastkvzip restored"]
    assert row["score"] == pytest.approx(bootstrap_score(best)[0]) and row["paper"] == 79.3
    assert row["gain"] == pytest.approx(summarize_scores(best, base)["gain"])
    page, text = (
        (out / "report" / "index.html").read_text(),
        (out / "report" / "paper.md").read_text(),
    )
    for shown in (page, text):
        assert (
            "79.3" in shown
            and "Figure A: RestoreKV with Fast KVzip" in shown
            and "Table H" in shown
        )
        assert "stand for RULER-4K" in shown and f"{row['score']:.1f}" in shown
    assert (out / "report" / "csv" / "fast-kvzip-claims.csv").exists()


def test_a_second_start_measures_nothing(made):
    out, _ = made
    before = {
        path: os.stat(path).st_mtime_ns for path in (out / CELLS).rglob("*") if path.is_file()
    }
    again = cli("paper", out, "--only", ONLY, "--count", 2)
    assert again.code == 0
    assert before == {
        path: os.stat(path).st_mtime_ns for path in (out / CELLS).rglob("*") if path.is_file()
    }


def test_a_killed_start_goes_on(made, tmp_path):
    """Without its last line and its summary a cell is finished, and the others are left alone."""
    out, _ = made
    setting = make_tiny_setting(out, 2)
    experiments = choose_experiments("fast-kvzip", setting)
    cell = plan.list_needs(experiments[0], setting)[0].cell
    place = out / CELLS / cell.name
    whole = (place / "answers.jsonl").read_bytes()
    (place / "answers.jsonl").write_bytes(
        whole.splitlines(keepends=True)[0] + b'{"sample": "1", "tok'
    )
    (place / "summary.json").unlink()
    told = []
    results = carry_out.carry_out(
        experiments, setting, out, lambda what, share: told.append((what, share))
    ).results
    assert (place / "answers.jsonl").read_bytes() == whole and results[cell].done
    assert told[-1][1] == pytest.approx(1.0)


def test_other_documents_have_cells_of_their_own(made):
    out, _ = made
    names = [
        {
            need.cell.name
            for need in plan.list_needs(
                choose_experiments("offset", make_tiny_setting(out, n))[0],
                make_tiny_setting(out, n),
            )
        }
        for n in (2, 3)
    ]
    assert names[0].isdisjoint(names[1])


def test_another_model_goes_on_where_data_is_not_at_hand(tmp_path, tiny_tokenizer, monkeypatch):
    """Tables whose benchmark cannot be fetched say so; the others are measured."""
    build_model("qwen3").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    real = setting_module.make_backbone_setting

    def nearby(out, model, *more, **settings):
        made = real(out, model, *more, **settings)
        suite = {
            key: replace(bench, spec="tiny:count=1,low=64,high=64")
            for key, bench in made.benches.items()
        }
        away = replace(made.benches["longbench"], spec=f"longbench:path={tmp_path / 'away'}")
        return replace(made, benches={**suite, "longbench": away})

    monkeypatch.setattr(setting_module, "make_backbone_setting", nearby)
    result = cli(
        "paper",
        tmp_path / "out",
        "--model",
        tmp_path / "model",
        "--only",
        "fast-kvzip,longbench,scbench",
    )
    assert result.code == 0, result.err
    assert "Table D: not measured, LongBench: " in result.err.replace("\n", " ")
    assert "Figure A: not measured, Fast KVzip + RestoreKV: no adapter" in result.err.replace(
        "\n", " "
    )
    text = (tmp_path / "out" / "report" / "paper.md").read_text()
    assert "- LongBench: " in text and "- RULER-4K: No fastkvzip gate ships" in text
    found = load_results(tmp_path / "out")
    assert {one.cell.evictor for one in found} == {"kvzip", "full"} and all(
        one.done for one in found
    )


def test_a_list_measures_nothing(tmp_path):
    result = cli("paper", tmp_path / "new", "--list", "--only", "methods,offset")
    assert result.code == 0 and not (tmp_path / "new").exists()
    assert "Table 1" in result.out and "Table B" in result.out and "48 cells in all" in result.out


def test_missing_adapters_are_told(tmp_path):
    result = cli("paper", tmp_path / "new", "--list", "--only", "beyond,offset", "--seeds", "5")
    assert result.code == 0
    assert "missing: RestoreKV (n = 3): no adapter (restorekv,seed=5)" in result.out
    assert (
        "would train 5 adapters" in result.out
        and "not trained  restorekv,hidden_weight=1,seed=5" in result.out
    )
    setting = make_tiny_setting(tmp_path, 2, seeds=(5,))
    (offset,) = choose_experiments("offset", setting)
    page = write.write_page_of_paper([offset], setting, carry_out.Outcome(), tmp_path).read_text()
    assert "no adapter (restorekv,seed=5)" in page and "not measured" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "tabel"], "no table or figure 'tabel'"),
        (["--adapters", "here"], "another --model"),
        (["--seeds", "0,x"], "--seeds takes whole numbers"),
        (["--model", "elsewhere", "--retrain", "--only", "metrics"], "needs --data"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, arguments, words):
    result = cli("paper", tmp_path / "new", *arguments)
    assert result.code == 1 and words in result.err and "Traceback" not in result.err


def test_the_clock_tells_what_is_left():
    told, now = [], [0.0]
    clock = Clock(
        [("Table 1 (kvzip)", 30.0), ("Figure 6: Efficiency", 10.0)],
        lambda *x: told.append(x),
        lambda: now[0],
    )
    clock.report_at(0, 0.0)
    now[0] = 60.0
    clock.report_at(0, 0.5)
    now[0] = 150.0
    clock.report_at(1, 0.75)
    assert told == [
        ("Table 1 (kvzip)", 0.0),
        ("Table 1 (kvzip), about 2 min to go", 0.375),
        ("Figure 6: Efficiency, about 10 s to go", 0.9375),
    ]
    assert [format_seconds(seconds) for seconds in (5, 59, 61, 5400)] == [
        "5 s",
        "59 s",
        "1 min",
        "1 h 30 min",
    ]


def test_what_is_done_costs_nothing(made, tmp_path):
    out, _ = made
    setting = make_tiny_setting(out, 2)
    cells = plan.list_cells(choose_experiments("fast-kvzip", setting), setting)
    (kvzip, fast) = carry_out.group_jobs(cells)
    assert carry_out.estimate_cost(kvzip, out) == carry_out.estimate_cost(fast, out) == 0
    assert carry_out.estimate_cost(fast, tmp_path) == 2 * (10 + 2)


def test_seconds_of_a_cache_count_what_other_cells_bear(made):
    """Prefill and scores stand with the first cell of a preparation, whichever that is."""
    out, _ = made
    setting = make_tiny_setting(out, 2)
    (fast,) = choose_experiments("fast-kvzip", setting)
    results = {result.cell: result for result in load_results(out)}
    base, best = (
        next(one for one in results.values() if (one.cell.evictor, one.cell.restored) == key)
        for key in (("fastkvzip", False), ("fastkvzip", True))
    )
    lines = [
        {
            json.loads(line)["sample"]: json.loads(line)
            for line in (one.folder / "seconds.jsonl").read_text().splitlines()
        }
        for one in (base, best)
    ]
    told = plan.collect_seconds(
        replace(fast, seconds={"fastkvzip restored": 1.0}), setting, results
    )["fastkvzip restored"]
    for sample, took in told.items():
        first, second = lines[0][sample], lines[1][sample]
        phases = [max(first.get(name, 0), second.get(name, 0)) for name in ("prefill", "score")]
        assert took == pytest.approx(sum(phases) + second["restore"] + second["evict"])


def test_the_full_cache_bears_no_time_of_others(made):
    """It rides with KVzip, whose prefill and scores count for KVzip."""
    found = {one.cell.evictor: one for one in load_results(made[0]) if not one.cell.restored}
    phases = {
        evictor: set(
            json.loads(found[evictor].folder.joinpath("seconds.jsonl").read_text().splitlines()[0])
        )
        for evictor in ("full", "kvzip")
    }
    assert {"prefill", "score"} <= phases["kvzip"] and phases["full"].isdisjoint(
        {"prefill", "score"}
    )
