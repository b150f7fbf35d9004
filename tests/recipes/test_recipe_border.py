"""The border of harm: paired differences of two cells, and a page that says what the stored result
holds.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.pages import fill_page
from recipes.smollm2 import border
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import Result
from tests.helpers.report_world import facts_of

ROOT = Path(__file__).parents[2]


def make_result(
    divergences: dict[str, float],
    adapter: str | None = None,
    ratio: str = "0.2",
    evictor: str = "kvzip",
) -> Result:
    """A cell whose contexts have one answer of ten tokens each."""
    cell = Cell("tiny", "tiny", evictor, ratio, adapter)
    result = Result(Path("cell"), cell, facts_of(cell, len(divergences)))
    asked = {"task": "a", "question": "q?", "answer_prefix": "", "max_new_tokens": 8}
    asked |= {"id": "q", "references": ["r"], "prediction": "p", "score": 0.5}
    result.__dict__["lines"] = [
        {
            "sample": sample,
            "context": f"text {sample}",
            "answers": [{**asked, "kl": kl, "answer_tokens": 10, "same": False}],
        }
        for sample, kl in divergences.items()
    ]
    return result


def test_differences_are_paired_by_context():
    """Contexts differ much and the two cells little: the pairs show it, their means would not."""
    alone = make_result({str(number): float(number) for number in range(40)})
    restored = make_result(
        {str(number): number + 0.1 + 0.01 * (number % 3) for number in range(40)}, "kvzip"
    )
    [row] = border.compare_all([restored, alone])
    assert row["contexts"] == row["questions"] == 40 and row["ratio"] == 0.2
    assert row["kl_alone"] == pytest.approx(19.5) and row["difference"] == pytest.approx(
        0.11, abs=0.005
    )
    assert 0.1 < row["difference_low"] < row["difference"] < row["difference_high"] < 0.12
    assert border.describe_effect(row) == "harms"


def test_cells_of_two_conditions_are_no_pair():
    alone = make_result({"a": 1.0})
    with pytest.raises(SystemExit, match="differ in more than restoring"):
        border.compare_all([alone, make_result({"a": 0.5}, "kvzip"), make_result({"a": 2.0})])


def test_only_shared_contexts_count():
    shared = {name: 1.0 + number % 2 for number, name in enumerate("abcdef")}
    alone = make_result({**shared, "g": 9.0})
    restored = make_result({name: kl - 0.5 for name, kl in shared.items()}, "kvzip")
    with pytest.warns(RestoreKVWarning, match="only the 6 that both have answered"):
        [row] = border.compare_all([alone, restored])
    assert (
        row["contexts"] == 6 and row["kl_alone"] == 1.5 and border.describe_effect(row) == "helps"
    )
    few = border.compare_cells(make_result({"a": 1.0}), make_result({"a": 0.5}, "kvzip"))
    assert border.describe_effect(few) == "too few texts"
    with pytest.raises(RestoreKVError, match="share no context"):
        border.compare_cells(alone, make_result({"x": 1.0}, "kvzip"))


def test_cells_of_two_models_or_texts_are_no_pair():
    """Two folders may hold the same names of something else."""
    alone = make_result({"a": 1.0})
    restored = make_result({"a": 0.5}, "kvzip")
    other_model = replace(restored, identity={**restored.identity, "fingerprint": "0" * 16})
    other_model.__dict__["lines"] = restored.lines
    with pytest.raises(RestoreKVError, match="are of two models"):
        border.compare_all([alone, other_model])
    restored.lines[0]["context"] = "something else"
    with pytest.raises(RestoreKVError, match="about different texts"):
        border.compare_all([alone, restored])


def test_cells_without_a_partner_and_full_caches_have_no_row():
    results = [
        make_result({"a": 1.0}),
        make_result({"a": 1.0}, "kvzip", "0.1"),
        make_result({"a": 0.0}, None, "1", "full"),
    ]
    assert border.compare_all(results) == []


def test_rows_of_other_benchmarks_stay_with_the_same_adapter(tmp_path):
    path = tmp_path / "border.json"
    pair = [make_result({"a": 1.0}), make_result({"a": 0.5}, "auto")]
    for result in pair:
        result.identity.update(prefix_policy="free")
        result.identity["adapter"] = {"hash": "h"} if result.cell.adapter else None
    border.write_comparison(pair, path)
    stored = json.loads(path.read_text())
    other = {**stored["rows"][0], "benchmark": "other", "title": "A"}
    path.write_text(json.dumps({**stored, "rows": [other, *stored["rows"]]}))
    border.write_comparison(pair, path)
    assert [row["title"] for row in json.loads(path.read_text())["rows"]] == [
        "A",
        stored["rows"][0]["title"],
    ]
    for changed in ({"adapter": "another"}, {"prefix_policy": "counted"}, {"dtype": "bfloat16"}):
        path.write_text(json.dumps({**stored, **changed, "rows": [other]}))
        border.write_comparison(pair, path)
        assert json.loads(path.read_text())["rows"] == stored["rows"]


def test_the_page_says_what_the_stored_result_holds(tmp_path):
    page = tmp_path / "page.md"
    page.write_bytes(border.PAGE.read_bytes())
    border.main(["--page", str(page)])
    assert page.read_text() == border.PAGE.read_text()
    with pytest.raises(RestoreKVError, match="lacks the marks"):
        fill_page(border.STORED, border.BEGIN, border.END, "table")
