"""The recipe behind docs/table1.md: run small on the bundled model, and again from files."""

import json
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent.parent / "recipes" / "bundled"
sys.path.insert(0, str(RECIPE))

import table1  # noqa: E402

from restorekv.errors import RestoreKVError  # noqa: E402


@pytest.fixture
def docs(tmp_path, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(table1, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def call(recipe, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["recipe", *map(str, arguments)])
    recipe.main()


def test_table1(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "METHODS", ("kvzip", "kvzip+"))
    monkeypatch.setattr(table1, "FURTHER", {"fastkvzip": "Fast KVzip"})
    call(table1, monkeypatch, tmp_path / "runs", "--count", 2)
    text = (docs / "table1.md").read_text()
    assert "paired cells improve" in text and "r = 0.0625" in text and "| AM-fast |" in text
    kept = json.loads((docs / "results" / "table1.json").read_text())
    assert {row["evictor"] for row in kept["rows"]} == {"full", "kvzip", "kvzip+", "fastkvzip", "am-fast"}
    call(table1, monkeypatch, tmp_path / "runs", "--count", 2)
    assert (docs / "table1.md").read_text() == text
    with pytest.raises(RestoreKVError, match="other documents"):
        call(table1, monkeypatch, tmp_path / "runs", "--count", 3)
