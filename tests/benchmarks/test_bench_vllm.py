"""The benchmark of documents in vLLM: its stored result is what the page says."""

import json
import re
from statistics import median

import pytest

from benchmarks.vllm import tables
from tests.helpers.pages import ROOT

RESULT = json.loads((ROOT / "benchmarks" / "results" / "2026-11-22-vllm-cpu.json").read_text())


@pytest.mark.parametrize("result", [RESULT], ids=["smollm2"])
def test_the_page_shows_the_stored_result(result):
    page = (ROOT / "docs" / "vllm.md").read_text()
    command, table = page[page.index(result["command"]) :], re.compile(r"(?<![\w.])[\d,.]+")
    for row in result["rows"]:
        side = row["side"]
        line = re.search(rf"^\| {re.escape(side)} \|.*$", command, re.MULTILINE)[0]
        shown = [float(number) for number in table.findall(line.partition(side)[2].replace(",", ""))]
        rates = row["throughput"]
        figures = [
            row["positions"], result["options"]["fitting"] * result["options"]["tokens"] // row["positions"],
            median(row["cold"]), median(row["warm"]), rates["do not fit, 8 together"],
            rates["do not fit, 32 together"], rates["fit, 32 together"],
        ]  # fmt: skip
        assert len(shown) == len(figures)
        assert all(abs(a - b) <= max(0.01, 0.02 * b) for a, b in zip(shown, figures, strict=True)), (shown, figures)


def test_its_table_names_every_side():
    table, machine = tables(RESULT)
    assert [row.cells[0] if hasattr(row, "cells") else row[0] for row in table.rows] == [
        row["side"] for row in RESULT["rows"]
    ]
    assert "smollm2" in machine
