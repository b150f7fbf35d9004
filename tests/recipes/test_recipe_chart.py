"""`make charts`: the README's chart and the table of docs/evaluation.md say what the stored result
holds.
"""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "paper" / "results" / "smollm2-scores.json"


@pytest.fixture(scope="module")
def recipe() -> dict:
    return runpy.run_path(str(ROOT / "recipes" / "smollm2" / "chart.py"))


def test_the_chart_is_drawn_and_the_page_is_up_to_date(recipe, tmp_path):
    page, chart = tmp_path / "page.md", tmp_path / "chart.svg"
    page.write_bytes(recipe["PAGE"].read_bytes())
    recipe["main"]([str(RESULT), "--page", str(page), "--chart", str(chart)])
    assert page.read_text() == recipe["PAGE"].read_text()
    text = chart.read_text()
    assert "<svg" in text and all(
        f">{word}<" in text for word in ("RULER", "FairytaleQA", "KVzip restored")
    )


def test_the_table_has_every_row_of_the_result(recipe):
    result = json.loads(RESULT.read_text())
    lines = recipe["table"](result).splitlines()[2:]
    small = [row for row in result["rows"] if row["method"] != "full" and not row["restored"]]
    assert len(lines) == len(small) + len({row["benchmark"] for row in result["rows"]})
    for row in result["rows"]:
        assert any(
            f"| {row['score']:.1f} |" in line and f" {row['bytes'] / 1e6:.1f} " in line
            for line in lines
        ), row


def test_an_evictor_without_an_adapter_has_empty_cells(recipe, tmp_path):
    result = json.loads(RESULT.read_text())
    result["rows"] = [row for row in result["rows"] if not row["restored"]]
    assert "|  |" in recipe["table"](result).splitlines()[3]
    recipe["draw"](result, "kvzip", tmp_path / "chart.svg")
