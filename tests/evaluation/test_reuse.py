"""Answers that another cell of a folder has already are taken over, and only those."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from restorekv.evaluation.grid import Cell, Grid
from restorekv.evaluation.results import ANSWERS, CELL, CELLS
from restorekv.evaluation.reuse import strip_draw
from restorekv.evaluation.run import LocalPool, run_grid
from restorekv.tasks import BENCHMARKS, make_benchmark
from tests.helpers.grid_world import Plain, contents, save_world


class CountingPool(LocalPool):
    """Counts how often each context was asked of a cell."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def answer_contexts(self, job, missing):
        for sample, cells in missing:
            self.asked[sample] += len(cells)
        return super().answer_contexts(job, missing)


@pytest.fixture(scope="module")
def make_cells(tmp_path_factory, tiny_tokenizer):
    root = save_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)

    def make(count, evictors=("knorm",), **settings):
        spec = replace(Plain(), contexts=6, **settings).spec
        common = {"prefix_policy": "counted"}
        methods = [(evictor, None) for evictor in evictors]
        model = str(root / "model")
        grid = Grid([model], methods, [spec], ratios=["0.5"], count=count, common=common)
        return grid.list_cells()

    return make


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "plain", Plain)


def run(cells, folder):
    pool = CountingPool()
    run_grid(cells, folder, pool)
    return pool.asked


def read_answers(folder, cells):
    """Return the files of these cells alone, whatever else the folder has."""
    return {cell: (folder / CELLS / cell.name / ANSWERS).read_bytes() for cell in cells}


def test_a_larger_count_asks_only_what_is_new(make_cells, tmp_path):
    run(make_cells(2), tmp_path / "grown")
    asked = run(make_cells(5), tmp_path / "grown")
    assert len(asked) == 3
    assert set(asked.values()) == {2}
    run(make_cells(5), tmp_path / "whole")
    whole = read_answers(tmp_path / "whole", make_cells(5))
    assert read_answers(tmp_path / "grown", make_cells(5)) == whole
    # A smaller one, and all of them, go on from it too.
    assert not run(make_cells(3), tmp_path / "grown")
    assert len(run(make_cells(0), tmp_path / "grown")) == 1


def test_a_further_evictor_is_asked_everything_and_the_full_cache_is_not(make_cells, tmp_path):
    run(make_cells(2), tmp_path)
    asked = run(make_cells(3, ("knorm", "streaming")), tmp_path)
    # The new evictor of all three, the other two cells of the third context.
    assert sorted(asked.values()) == [1, 1, 3]


def test_other_texts_and_other_questions_are_not_taken_over(make_cells, tmp_path):
    run(make_cells(2), tmp_path)
    assert len(run(make_cells(3, text="Other words. "), tmp_path)) == 3
    assert len(run(make_cells(3, questions=2), tmp_path)) == 3


def test_a_changed_question_is_asked_again(make_cells, tmp_path):
    """Lines are compared by what they asked, not by their ids."""
    cells = make_cells(2)
    run(cells, tmp_path)
    for cell in cells:
        path = tmp_path / CELLS / cell.name / ANSWERS
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["answers"][0]["question"] = "something else?"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(run(make_cells(3), tmp_path)) == 2


def test_a_damaged_cell_beside_it_is_asked_again(make_cells, tmp_path):
    cells = make_cells(2)
    run(cells, tmp_path)
    for cell in cells:
        (tmp_path / CELLS / cell.name / ANSWERS).write_text("{}\n")
    assert len(run(make_cells(3), tmp_path)) == 3
    assert contents(tmp_path)


def test_a_cell_without_its_benchmarks_facts_is_asked_again(make_cells, tmp_path):
    cells = make_cells(2)
    run(cells, tmp_path)
    for cell in cells:
        path = tmp_path / CELLS / cell.name / CELL
        stored = json.loads(path.read_text())
        del stored["facts"]["benchmark"]
        path.write_text(json.dumps(stored))
    assert len(run(make_cells(3), tmp_path)) == 3


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_form_without_its_count(name):
    cell = Cell.full_cache(model="tiny", benchmark=make_benchmark(f"{name}:count=7").spec)
    other = Cell.full_cache(model="tiny", benchmark=make_benchmark(f"{name}:count=9").spec)
    assert cell != other
    assert strip_draw(cell) == strip_draw(other)
