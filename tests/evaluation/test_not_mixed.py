"""What was asked in two ways, of two seeds or with two adapters, is never added up in silence."""

import json
from dataclasses import replace

import pytest

from restorekv.errors import RestoreKVError
from restorekv.evaluation.answers_kept import EVERY, collect_answers, list_kept_rows
from restorekv.evaluation.frame import GridResults, load_grid, make_frame
from restorekv.evaluation.grid import Cell, Grid
from restorekv.evaluation.grid_tables import describe_cut_texts
from restorekv.evaluation.kvpress_layout import LONGEST_NAME, export_kvpress
from restorekv.evaluation.pools import SeedPool
from restorekv.evaluation.results import CELL, load_results
from restorekv.evaluation.stats import ScoredAnswer
from restorekv.tasks import make_benchmark
from restorekv.tasks.longbench import CATEGORIES
from tests.helpers.report_world import write_scores

FULL = Cell.full_cache(model="tiny", benchmark="tiny:count=6")
SMALL = Cell("tiny", "tiny:count=6", "kvzip", "0.1")


def seed_of(cell: Cell, seed: int) -> Cell:
    return replace(cell, benchmark=f"tiny:count=6,seed={seed}" if seed else "tiny:count=6")


def find_entry(folder, evictor: str):
    return next(entry for entry in load_grid(folder).entries if entry.columns["evictor"] == evictor)


def test_a_method_is_compared_with_the_full_cache_of_its_own_seeds(tmp_path):
    """Another method's further seeds change nothing of what restoring brings back."""
    write_scores(tmp_path, FULL, [[1, 1, 1]] * 6)
    write_scores(tmp_path, SMALL, [[1, 0, 0]] * 6)
    write_scores(tmp_path, replace(SMALL, adapter="auto"), [[1, 1, 0]] * 6)

    def recover():
        entries = load_grid(tmp_path).entries
        (row,) = [
            row
            for entry in entries
            if entry.columns["restored"]
            for row in entry.list_rows()
            if row["kind"] == "all"
        ]
        return row["recovered"]

    assert recover() == pytest.approx(0.5)
    write_scores(tmp_path, seed_of(FULL, 1), [[0.5, 0.5, 0.5]] * 6)
    write_scores(tmp_path, seed_of(replace(SMALL, evictor="snapkv"), 1), [[0, 0, 0]] * 6)
    assert recover() == pytest.approx(0.5)
    # One whose seed the full cache was not asked has nothing to be compared with.
    write_scores(tmp_path, seed_of(replace(SMALL, evictor="h2o"), 2), [[0, 0, 0]] * 6)
    assert find_entry(tmp_path, "h2o").pool.full is None


def test_a_gain_is_over_the_evictor_alone_on_the_same_seeds(tmp_path):
    restored = replace(SMALL, adapter="auto")
    for cell in (SMALL, restored, seed_of(restored, 1)):
        write_scores(tmp_path, cell, [[1, 0, 0]] * 6)
    pools = {entry.columns["restored"]: entry.pool for entry in load_grid(tmp_path).entries}
    assert pools[True].evictor_alone is None and len(pools[True].lines) == 12
    write_scores(tmp_path, seed_of(SMALL, 1), [[0, 0, 0]] * 6)
    pools = {entry.columns["restored"]: entry.pool for entry in load_grid(tmp_path).entries}
    gain = pools[True].score_tasks()["gain"]
    assert gain == pytest.approx(100 / 6), "a third of the answers to half of the contexts"


def test_seeds_of_two_adapters_are_not_pooled(tmp_path):
    restored = replace(SMALL, adapter="mine")
    first = write_scores(tmp_path, restored, [[1, 1, 1]] * 6)
    second = write_scores(tmp_path, seed_of(restored, 1), [[0, 0, 0]] * 6)
    for result, digest in ((first, "a" * 16), (second, "b" * 16)):
        record = json.loads((result.folder / CELL).read_text())
        record["facts"]["adapter"] = {"hash": digest}
        (result.folder / CELL).write_text(json.dumps(record))
    with pytest.raises(RestoreKVError, match="different adapters"):
        load_grid(tmp_path)


def test_a_frame_of_two_folders_is_of_one_model_and_one_text(tmp_path):
    """One name may mean something else in each: what restoring gains would be of two models."""
    write_scores(tmp_path / "one", SMALL, [[1, 0, 0]] * 6)
    restored = write_scores(tmp_path / "two", replace(SMALL, adapter="auto"), [[1, 1, 0]] * 6)
    both = load_results(tmp_path / "one") + load_results(tmp_path / "two")
    assert len(make_frame(both)) > 0
    record = json.loads((restored.folder / CELL).read_text())
    record["facts"]["fingerprint"] = "0" * 16
    (restored.folder / CELL).write_text(json.dumps(record))
    both = load_results(tmp_path / "one") + load_results(tmp_path / "two")
    with pytest.raises(RestoreKVError, match="share a name but were made with different models"):
        make_frame(both)


def kept_of(folder) -> dict:
    return {row["part"]: row for row in list_kept_rows(collect_answers(load_grid(folder)))}


def test_a_text_that_was_asked_twice_counts_once(tmp_path):
    for count in (3, 4):
        full = replace(FULL, benchmark=f"tiny:count={count}")
        write_scores(tmp_path, full, [[1, 1, 0]] * count)
        write_scores(tmp_path, replace(SMALL, benchmark=full.benchmark), [[1, 0, 0]] * count)
    # The made-up lines name their benchmark; real ones say the text and the whole question.
    for path in tmp_path.glob("cells/*/answers.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["context"] = f"text {line['sample']}"
            for answer in line["answers"]:
                answer |= {"answer_prefix": "", "max_new_tokens": 4}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = kept_of(tmp_path)[EVERY]
    assert (found["contexts"], found["right"], found["low"]) == (4, 8, None)


def test_two_protocols_are_not_added_up(tmp_path):
    for protocol in ("kvpress", "kvzip"):
        write_scores(tmp_path, replace(FULL, protocol=protocol), [[1, 1, 0]] * 6)
        write_scores(tmp_path, replace(SMALL, protocol=protocol), [[1, 0, 0]] * 6)
    found = kept_of(tmp_path)
    assert EVERY not in found and len(found) == 2
    assert {row["contexts"] for row in found.values()} == {6}


def test_a_category_of_longbench_is_whole():
    asked = ["hotpotqa", "2wikimqa", "musique", "qasper"]
    pool = SeedPool(())
    pool.__dict__["benchmark"] = make_benchmark("longbench")
    pool.__dict__["answers"] = [ScoredAnswer("0", task, "q", "", 1.0) for task in asked]
    whole = [name for name, own in CATEGORIES.items() if set(own) <= set(asked)]
    assert list(pool.task_groups) == whole
    assert len(pool.task_groups) == 1


def test_texts_that_lost_their_ends_are_told(tmp_path):
    result = write_scores(tmp_path, SMALL, [[1, 1, 1]] * 6)
    assert describe_cut_texts([result]) == []
    result.lines[2]["cut"] = 40
    (note,) = describe_cut_texts([result])
    assert "1 of 6 texts were longer" in note
    # A tokenizer that was saved with a model often states no limit: then nothing is cut.
    result.lines[2]["cut"] = 0
    read = sorted(line["prefix"] + line["tokens"] for line in result.lines)
    result.identity["positions"] = read[-2]
    (note,) = describe_cut_texts([result])
    assert "1 of 6 texts reach beyond the positions that the model was made for" in note


def test_a_ratio_stays_what_it_is():
    cells = Grid(["tiny"], [("kvzip", None)], ["tiny"], ratios=("1/3", "0.10", "0.1")).list_cells()
    assert [cell.ratio for cell in cells if cell.evictor == "kvzip"] == ["1/3", "0.1"]
    assert all("/" not in cell.name for cell in cells)


def test_names_fit_a_file_system():
    long = replace(SMALL, benchmark=f"lines:path={'漢' * 200}.jsonl")
    assert len(long.name.encode()) < 200


def test_another_runs_damaged_cell_does_not_stop_the_export(tmp_path):
    write_scores(tmp_path, SMALL, [[1, 1, 1]] * 6)
    damaged = write_scores(tmp_path, replace(SMALL, evictor="snapkv"), [[1, 1, 1]] * 6)
    (damaged.folder / "summary.json").write_text("{}")
    (path,) = export_kvpress(tmp_path)
    assert path.is_dir() and len(path.name.encode()) <= LONGEST_NAME


def test_the_grid_of_results_is_that_of_the_folder(tmp_path):
    result = write_scores(tmp_path, SMALL, [[1, 1, 1]] * 6)
    assert len(GridResults([result]).entries) == len(load_grid(tmp_path).entries) == 1
