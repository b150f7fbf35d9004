"""`make charts`: the README's chart and the table of docs/evaluation.md say what the stored result
holds.
"""

import json
from pathlib import Path

from recipes.smollm2 import chart

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "paper" / "results" / "smollm2-scores.json"


def test_the_chart_is_drawn_and_the_page_is_up_to_date(tmp_path):
    page = tmp_path / "page.md"
    drawn = tmp_path / "chart.svg"
    page.write_bytes(chart.PAGE.read_bytes())
    chart.main([str(RESULT), "--page", str(page), "--chart", str(drawn)])
    assert page.read_text() == chart.PAGE.read_text()
    text = drawn.read_text()
    assert "<svg" in text and all(
        f">{word}<" in text for word in ("RULER", "FairytaleQA", "KVzip restored")
    )


def test_the_table_has_every_row_of_the_result():
    result = json.loads(RESULT.read_text())
    lines = chart.make_table(result).splitlines()[2:]
    small = [row for row in result["rows"] if row["method"] != "full" and not row["restored"]]
    assert len(lines) == len(small) + len({row["benchmark"] for row in result["rows"]})
    for row in result["rows"]:
        assert any(
            f"| {row['score']:.1f} |" in line and f" {row['bytes'] / 1e6:.1f} " in line
            for line in lines
        ), row


def test_an_evictor_without_an_adapter_has_empty_cells(tmp_path):
    result = json.loads(RESULT.read_text())
    result["rows"] = [row for row in result["rows"] if not row["restored"]]
    assert "|  |" in chart.make_table(result).splitlines()[3]
    chart.draw_chart(result, "kvzip", tmp_path / "chart.svg")
