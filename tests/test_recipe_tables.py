"""The recipes behind docs/table1.md and docs/controls.md: run small on the bundled model, and again from files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent.parent / "recipes" / "bundled"
sys.path.insert(0, str(RECIPE))

import controls  # noqa: E402
import table1  # noqa: E402

from restorekv.errors import RestoreKVError  # noqa: E402


@pytest.fixture
def docs(tmp_path, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for recipe in (controls, table1):
        monkeypatch.setattr(recipe, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def call(recipe, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["recipe", *map(str, arguments)])
    recipe.main()


def test_controls(docs, tmp_path, monkeypatch):
    small = replace(controls.SETTINGS, steps=1, contexts=1, questions=1, keep=1, max_new_tokens=8)
    monkeypatch.setattr(controls, "SETTINGS", small)
    monkeypatch.setattr(controls, "CONTEXTS", 1)
    monkeypatch.setattr(controls, "COUNT", 2)
    chosen = ("base", "offset", "evicted", "fixed", "embeddings", "qkv", "n16")
    monkeypatch.setattr(controls, "CONTROLS", {name: controls.CONTROLS[name] for name in chosen})
    call(controls, monkeypatch, tmp_path / "runs", "base", "offset")
    assert "n = 16" not in (docs / "controls.md").read_text(), "not run yet"
    call(controls, monkeypatch, tmp_path / "runs", *chosen[2:])
    first = (docs / "controls.md").read_text()
    kept = json.loads((docs / "results" / "controls.json").read_text())
    assert kept["conventions"]["offset"]["offset"] == 3
    assert kept["conventions"]["evicted"]["restore_from"] == "evicted"
    assert kept["conventions"]["n16"]["adapters"]["kvzip"]["restore_tokens"] == 16
    for rows in kept["rows"].values():
        assert [row["ratio"] for row in rows] == list(controls.RATIOS)
        assert [row["pairs"] for row in rows] == [row["pairs"] for row in kept["rows"]["base"]]
    call(controls, monkeypatch, tmp_path / "runs", "base")
    assert (docs / "controls.md").read_text() == first
    assert first.count("| ") > 4 * len(chosen)


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
