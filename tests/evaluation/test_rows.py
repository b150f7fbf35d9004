"""Rows of finished cells: pairs and bytes really held, gains over the right base, tables that show
all of them.
"""

import json
import shutil
from dataclasses import replace
from math import floor

import pytest

from restorekv import tasks
from restorekv.evaluation.frame import ALL, GridResults, load_grid
from restorekv.evaluation.grid import SHIPPED, Cell, Grid, find_unrestored
from restorekv.evaluation.grid_tables import make_scores_table, make_tables
from restorekv.evaluation.pools import SeedPool
from restorekv.evaluation.results import SUMMARY, open_result
from restorekv.evaluation.rows import make_payload, make_rows, summarize_cell
from restorekv.evaluation.run import run_grid
from restorekv.files import write_json
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.documents import DOCUMENTS
from tests.helpers.grid_results import facts
from tests.helpers.grid_world import Plain
from tests.helpers.models import build_model
from tests.helpers.report_world import write_cell

LAYERS, HEADS, DIM = 3, 2, 16


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer):
    """A folder with a tiny model and an adapter for it."""
    root = tmp_path_factory.mktemp("rows")
    model = build_model("qwen3")
    model.save_pretrained(root / "model")
    tiny_tokenizer.save_pretrained(root / "model")
    adapter = RestoreAdapter.create(model, 2, rank=2)
    adapter.record_training(evictor="kvzip")
    adapter.save_pretrained(root / "adapter")
    return root


@pytest.fixture(autouse=True)
def made(monkeypatch):
    monkeypatch.setattr("restorekv.tiny.suite.draw_documents", lambda *_: DOCUMENTS)


def measured(world, folder, methods, ratios=("0.4", "0.2"), **common):
    results = run_grid(
        Grid([str(world / "model")], methods, ["tiny"], ratios=ratios, common=common).list_cells(),
        folder,
    )
    return results, {
        (row["evictor"], row["restored"], row["ratio"]): row for row in make_rows(results)
    }


@pytest.mark.parametrize(
    ("recovered", "low", "is_said"), [(0.4, 1.0, True), (0.4, None, False), (None, 1.0, False)]
)
def test_the_share_that_came_back_is_explained_where_it_is_printed(recovered, low, is_said):
    """Few texts have no interval, and no share of the loss either."""
    row: dict[str, object] = dict.fromkeys(("part", "name", "condition", "method"), "x")
    row |= {"kind": ALL, "ratio": 0.2, "done": True, "contexts": 20}
    row |= {"score": 50.0, "low": None, "high": None, "recovered": recovered}
    row |= {"gain": 4.0, "gain_low": low, "gain_high": low and 7.0}
    table = make_scores_table([row])
    assert ("40 % back" in table.to_markdown()) == is_said
    assert ("share of its loss that came back" in table.note) == is_said
    assert "paired (▲ restored scores higher" in table.note


@pytest.mark.parametrize("policy", ["free", "counted"])
def test_rows_report_what_the_caches_held(world, tmp_path, policy):
    methods = [("kvzip", str(world / "adapter")), ("kvzip+", None)]
    results, found = measured(world, tmp_path, methods, prefix_policy=policy)
    full = found["full", False, 1.0]
    assert len(found) == 1 + 4 + 2 and next(iter(found.values())) == full
    assert (
        full["kept"] == full["kept_with_prefix"] == 1
        and floor(full["pairs"]) // (LAYERS * HEADS) > 0
    )
    for (evictor, restored, ratio), row in found.items():
        assert (
            row["questions"] == 4
            and row["samples"] == 2
            and (row["low"], row["high"]) == (None, None)  # two contexts are too few
        )
        if evictor != "full":
            whole = full["pairs"] if policy == "free" else full["pairs_with_prefix"]
            assert row["pairs"] == pytest.approx(found[evictor, False, ratio]["pairs"])
            assert ratio * whole - 1 < row["pairs"] <= ratio * whole and row["kept"] <= ratio
            assert row["bytes"] < full["bytes"]
            assert (row["kept_with_prefix"] > row["kept"]) == (policy == "free")
        if restored:
            assert {"gain", "gain_low", "gain_high", "recovered"} <= row.keys()
            assert row["gain"] == pytest.approx(
                row["score"] - found[evictor, False, ratio]["score"]
            )
            assert set(row["groups"]) == {"questions", "retrieval and tracing"}
            assert all({"gain", "recovered"} <= group.keys() for group in row["groups"].values())
        else:
            assert "gain" not in row
    scores, held = make_tables(GridResults(results))
    assert len(scores.rows) == 7 and len(held.rows) == 7
    told = json.loads(json.dumps(make_payload(results)))
    assert {
        cell["prefix_policy"] for name, cell in told["facts"].items() if "_full_" not in name
    } == {policy}


def test_attention_matching_stands_beside_an_evictor(world, tmp_path):
    _, found = measured(
        world, tmp_path, [("am-fast", None), ("snapkv", None)], ("0.3",), prefix_policy="free"
    )
    matched, evicted, full = (
        found[key] for key in (("am-fast", False, 0.3), ("snapkv", False, 0.3), ("full", False, 1))
    )
    assert matched["pairs"] == evicted["pairs"]
    # One number more for every pair.
    assert matched["bytes"] - evicted["bytes"] == 4 * matched["pairs_with_prefix"]
    pair = 2 * DIM * 4 + 4  # key, value, position
    assert full["bytes"] == full["pairs_with_prefix"] * pair + LAYERS * (HEADS + 1) * 4


def test_the_full_cache_is_asked_without_the_offset(world, tmp_path):
    plain, moved = (
        measured(world, tmp_path / str(offset), [("knorm", None)], ("0.5",), offset=offset)[0][0]
        for offset in (0, 200)
    )
    assert plain.lines == moved.lines and plain.cell == moved.cell


def test_adapters_of_one_evictor_are_told_apart(world, tmp_path):
    (world / "other").mkdir(exist_ok=True)
    shutil.copytree(world / "adapter", world / "other" / "adapter", dirs_exist_ok=True)
    methods = [("kvzip", str(world / name)) for name in ("adapter", "other/adapter")]
    results, _ = measured(world, tmp_path, methods, ("0.4",))
    assert len(results) == 4 and [row["restored"] for row in make_rows(results)] == [
        False,
        False,
        True,
        True,
    ]
    table = make_tables(GridResults(results))[0]
    assert len(table.rows) == 4 and len({row[0] for row in table.rows}) == 4
    few, _ = measured(world, tmp_path, methods[:1], ("0.4",), restore_tokens=1)
    assert load_grid(tmp_path), "cut adapters are other ones, and one folder may hold them"
    assert "n = 1" in make_tables(GridResults(few))[0].rows[-1][0]


def test_contexts_that_two_seeds_drew_count_once(world, tmp_path):
    results, _ = measured(world, tmp_path, [("knorm", None)], ("0.4",))
    pool = SeedPool([results[1], results[1]])
    assert pool.progress == (len(results[1].lines),) * 2


def test_a_cell_that_runs_is_no_figure(world, tmp_path):
    results, _ = measured(world, tmp_path, [("kvzip", str(world / "adapter"))], ("0.4", "0.2"))
    (results[1].folder / "summary.json").unlink()
    left = [type(result)(result.folder, result.cell, result.identity) for result in results]
    assert len(make_rows(left)) == 4 and sum("gain" in row for row in make_rows(left)) == 1
    table = make_tables(GridResults(left))[0]
    assert any(text.startswith("running") for row in table.rows for text in row)


def test_bytes_are_a_share_of_the_full_cache_s_for_the_same_contexts(tmp_path):
    """A cell that runs has answered some of them, whose lengths are not the mean of all."""
    full = write_cell(tmp_path, Cell.full_cache(model="tiny", benchmark="qasper"))
    small = write_cell(tmp_path, Cell("tiny", "qasper", "kvzip", "0.2"), answered=2)
    share = sum(line["bytes"] for line in small.lines)
    share /= sum(line["bytes"] for line in full.lines[:2])
    (row,) = [row for row in GridResults([full, small]).list_rows() if row["method"] == "KVzip"]
    assert row["of_full"] == pytest.approx(share) and (row["answered"], row["of"]) == (2, 6)
    # Of contexts that the full cache has not answered, nothing is known.
    full.__dict__["lines"] = full.lines[1:]
    (full.folder / SUMMARY).unlink()
    (row,) = [row for row in GridResults([full, small]).list_rows() if row["method"] == "KVzip"]
    assert "of_full" not in row


def by_hand(folder, cell, means):
    """A finished cell whose tasks have these scores: three contexts with a question of each
    task.
    """
    result = open_result(
        folder,
        cell,
        facts(cell, {"spec": cell.benchmark, "title": "Plain", "samples": 3, "digest": "d"})
        | {"fingerprint": "f"},
    )
    for name in range(3):
        answers = [
            {
                "id": f"{name}-{task}",
                "task": task,
                "question": task,
                "answer_prefix": "",
                "max_new_tokens": 8,
                "references": [],
                "prediction": "",
                "score": mean,
                "metrics": {"half": mean / 2},
                "kl": 0.3,
                "answer_tokens": 2,
                "same": False,
            }
            for task, mean in means.items()
        ]
        held = {
            "context": f"text {name}",
            "cut": 0,
            "tokens": 100,
            "prefix": 3,
            "pairs": 60,
            "pairs_with_prefix": 78,
            "bytes": 1000,
            "restore_tokens": 0,
        }
        result.append({"sample": str(name), **held, "answers": answers}, {})
    write_json(result.folder / SUMMARY, summarize_cell(result))
    return result


def test_a_task_with_nothing_to_lose_is_shown_and_left_out_of_means(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    by_method = {
        "full": {"a": 0.8, "b": 0.05, "c": 0.4},
        "base": {"a": 0.2, "b": 0.9, "c": 0.2},
        "restored": {"a": 0.6, "b": 0.0, "c": 0.3},
    }
    found = {}
    for method, means in by_method.items():
        cell = Cell(
            "m",
            "plain",
            "kvzip" if method != "full" else "full",
            "0.5" if method != "full" else "1",
        )
        cell = replace(cell, adapter="auto" if method == "restored" else None)
        found[method] = by_hand(tmp_path / "some", cell, means)
    full, base, restored = make_rows(list(found.values()))
    assert full["left_out"] == base["left_out"] == ["b"] and base["tasks"]["b"] == pytest.approx(90)
    assert (full["score"], base["score"], restored["score"]) == pytest.approx((60, 20, 45))
    assert restored["gain"] == pytest.approx(25) and restored["recovered"] == pytest.approx(25 / 40)
    assert restored["questions"] == 9 and base["metrics"] == {"half": pytest.approx(10)}
    assert base["kl"] == pytest.approx(0.3), "fidelity keeps every task"
    assert found["base"].summary["score"] == pytest.approx(100 * 1.3 / 3), (
        "a cell alone does not know the full cache"
    )
    alone = make_rows([found["base"]])[0]
    assert alone["score"] == pytest.approx(100 * 1.3 / 3) and alone["left_out"] == []
    scores, _ = make_tables(GridResults(list(found.values())))
    halves = [row["metric half"] for row in scores.figures]
    assert "below 10: b." in scores.note and halves == pytest.approx([30, 10, 22.5])
    assert scores.columns[-1] == "half" and [row[-1] for row in scores.rows] == [
        "30.0",
        "10.0",
        "22.5",
    ]
    assert scores.figures[2]["recovered"] == pytest.approx(25 / 40)
    hopeless = [
        by_hand(tmp_path / "none", result.cell, {"a": 0.09, "b": 0.0}) for result in found.values()
    ]
    below = make_rows(hopeless)
    assert below[0]["score"] == pytest.approx(4.5) and below[0]["left_out"] == ["a", "b"]
    assert "scores say little" in make_tables(GridResults(hopeless))[0].note


def test_a_further_metric_is_the_mean_of_its_tasks_however_much_each_is_asked(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    result = by_hand(tmp_path, Cell("m", "plain", "kvzip", "0.5"), {"a": 0.8, "b": 0.2})
    assert SeedPool((result,)).average_metrics() == {"half": pytest.approx(25)}
    for line in result.lines[1:]:
        del line["answers"][1]
    pool = SeedPool((result,))
    assert pool.average_metrics() == {"half": pytest.approx(25)}
    assert pool.average_metrics(["b"]) == {"half": pytest.approx(10)}


@pytest.mark.parametrize(("alone", "recovered"), [(0.78, 0.5), (0.795, None)])
def test_of_a_loss_below_a_point_no_share_comes_back(tmp_path, monkeypatch, alone, recovered):
    monkeypatch.setitem(tasks.BENCHMARKS, "plain", Plain)
    cell = Cell("m", "plain", "kvzip", "0.5")
    cells = {Cell.full_cache(model="m", benchmark="plain"): 0.8, cell: alone}
    cells[replace(cell, adapter="auto")] = 0.79
    results = [by_hand(tmp_path, cell, {"a": mean}) for cell, mean in cells.items()]
    assert make_rows(results)[-1]["recovered"] == pytest.approx(recovered)


def test_pairs_that_hold_other_numbers_are_counted(tmp_path):
    cell = Cell("tiny", "qasper", "kvzip", "0.2")
    cells = [cell, replace(cell, adapter="auto")]
    cells += [replace(each, ratio="0.05") for each in cells]
    results = [write_cell(tmp_path, each) for each in cells]
    note = make_tables(GridResults(results))[0].note
    assert "Both rows of a pair hold the same number of KV pairs, context by context." in note
    # The same sum, but not context by context.
    results[1].lines[0]["pairs"] += 1
    results[1].lines[1]["pairs"] -= 1
    note = make_tables(GridResults(results))[0].note
    assert "In 1 of 2 pairs the two rows hold different numbers of KV pairs." in note


def test_evictors_without_a_shipped_adapter_are_named_for_each_model():
    methods = [("knorm", SHIPPED), ("kvzip", SHIPPED), ("random", None)]
    cells = Grid(["smollm2", "other"], methods, ["tiny"], ratios=["0.2"]).list_cells()
    expected = [("smollm2", "knorm"), ("other", "knorm"), ("other", "kvzip")]
    assert find_unrestored(cells, methods) == expected
    with_offset = Grid(["other"], methods, ["tiny"], ratios=["0.2"], common={"offset": 4})
    assert find_unrestored(with_offset.list_cells(), methods) == []
