"""The example script and the notebooks: whole, without outputs, and they run."""

import json
import runpy
from pathlib import Path

import pytest

from restorekv.evictors import EVICTORS

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert notebook["cells"][0]["cell_type"] == "markdown"
    for cell in notebook["cells"]:
        assert isinstance(cell["source"], list) and cell["metadata"] == {}
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == (
            [],
            None,
        )
    assert path.stat().st_size < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "register.txt").symlink_to(EXAMPLES / "register.txt")
    monkeypatch.chdir(tmp_path)
    before, names = dict(EVICTORS), {"__name__": "__main__"}
    try:
        for cell in cells(path):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), path.name, "exec"), names)
    finally:
        EVICTORS.clear()
        EVICTORS.update(before)
    out = capsys.readouterr().out
    assert (
        "market 46." in out if path.name == "ask_a_document.ipynb" else "kvzip        5 of 5" in out
    )
    assert [file.name for file in tmp_path.iterdir()] == ["register.txt"]


@pytest.mark.slow
def test_the_quickstart_runs(capsys):
    runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]("tiny")
    assert "teacher" in capsys.readouterr().out
