"""No command opens a model, or anything else, because a file names it; whoever made the file may be
a stranger.
"""

import io
import json
import sys

import pytest

from restorekv.cli import execute, loading
from restorekv.model import load
from restorekv.model.names import tiny_path
from restorekv.storage import cache_file
from tests.hostile.damage import EVIL, RAN, File, evil_model

TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 6
QUESTION = "Who owns the red house?"
COMMANDS = {
    "inspect": ["inspect", "x.rkv"],
    "verify": ["verify", "x.rkv"],
    "ask": ["ask", "x.rkv", QUESTION, "--max-new-tokens", "2"],
    "chat": ["chat", "x.rkv"],
    "append": ["append", "x.rkv", "more.txt", "-o", "o.rkv"],
    "compose": ["compose", "x.rkv", "x.rkv", "-o", "o.rkv"],
    "export": ["export", "x.rkv", "-o", "o.safetensors"],
}
ONLY_LOOK = ("inspect", "verify")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    (folder / "text.txt").write_text(TEXT)
    made = [
        "--evictor",
        "snapkv",
        "--adapter",
        "none",
        "--model",
        "tiny",
        "--allocation",
        "per-head",
        "--ratio",
        "0.5",
    ]
    assert execute(["compress", str(folder / "text.txt"), "-o", str(folder / "x.rkv"), *made]) == 0
    return (folder / "x.rkv").read_bytes()


@pytest.fixture
def place(good, tmp_path, monkeypatch):
    """A folder with a text and a model that asks for its code to be run, where every question is
    answered yes.
    """
    monkeypatch.chdir(tmp_path)
    evil_model(tmp_path, tiny_path("model"))
    (tmp_path / "more.txt").write_text(TEXT)
    (tmp_path / "x.rkv").write_bytes(good)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 50)))
    return tmp_path


def name_model(place, name: str) -> None:
    file = File.of((place / "x.rkv").read_bytes())
    file.manifest["model"] = name
    (place / "x.rkv").write_bytes(file.sealed())


@pytest.mark.parametrize("name", [EVIL, f"./{EVIL}", "someone/else"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_a_file_names_is_compared_and_never_opened(
    place, command, name, monkeypatch, capsys
):
    name_model(place, name)
    sources, find = [], load.find_source
    monkeypatch.setattr(
        load, "find_source", lambda name, *how: sources.append(name) or find(name, *how)
    )
    code = execute(COMMANDS[command])
    said = capsys.readouterr()
    assert not (place / RAN).exists() and set(sources) <= {"tiny"}
    if command in ONLY_LOOK:
        assert code == 0
    else:
        assert (
            code == 1
            and f"'{name}'" in said.err
            and "--model" in said.err
            and said.err.count("\n") == 1
        )
        assert not sources and not list(place.glob("o.*"))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ONLY_LOOK])
def test_a_model_that_the_user_names_runs_no_code_either(place, command, capsys):
    assert execute([*COMMANDS[command], "--model", EVIL]) == 1
    assert not (place / RAN).exists()
    assert "Cannot load the model" in capsys.readouterr().err


def test_inspect_with_a_model_that_the_user_names_runs_no_code(place):
    execute(["inspect", "x.rkv", "--model", EVIL])
    assert not (place / RAN).exists()


@pytest.mark.parametrize(
    "command",
    [
        ["compress", "more.txt", "-o", "o.rkv"],
        ["train", "--data", "tiny", "--out", "run", "--steps", "1"],
        ["train-gate", "--data", "tiny", "--out", "gate.safetensors"],
        ["data", "build", "--out", "data"],
        ["serve", "--port", "0"],
        ["eval", "--benchmark", "tiny", "--out", "results"],
        ["demo"],
        ["convert-gate", "x", "-o", "gate"],
    ],
    ids=lambda command: command[0],
)
def test_other_commands_run_no_code_of_a_model(place, command):
    assert execute([*command, "--model", EVIL]) != 0
    assert not (place / RAN).exists()


def test_names_of_models_that_ship_need_no_option(place, capsys):
    assert cache_file.open_cache_file(place / "x.rkv").manifest.model == "tiny"
    assert execute(COMMANDS["ask"]) == 0
    name_model(place, "tiny")
    assert execute(COMMANDS["append"]) == 0


def test_what_a_file_calls_its_model_is_shown_as_text(place, capsys):
    name = "a[/b]c\\[d [red]x[/] \\"
    name_model(place, name)
    (place / "x.rkv").rename(place / "n[bold]\\[x.rkv")
    assert execute(["inspect", "n[bold]\\[x.rkv"]) == 0
    said = capsys.readouterr().out
    assert f"{name} (float32" in said and said.startswith("n[bold]\\[x.rkv")
    assert execute(["ask", "n[bold]\\[x.rkv", QUESTION]) == 1
    assert f"'{name}'" in capsys.readouterr().err


def test_the_yarn_of_a_hybrid_model_is_found():
    """There it stretches the layers that see the whole text; those with a window have another."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    window = {"rope_type": "default", "rope_theta": 10_000.0}
    hybrid = {"full_attention": {**yarn, "rope_theta": 1e6}, "sliding_attention": window}
    assert loading._extract_yarn(hybrid) == loading._extract_yarn(yarn) == yarn
    assert loading._extract_yarn(window) is None


def test_a_long_name_is_cut(place, capsys):
    name_model(place, "m" * 4000)
    assert execute(COMMANDS["ask"]) == 1
    assert len(capsys.readouterr().err) < 400


def test_a_schema_within_bounds_is_read_from_a_regular_file_alone(place, capsys):
    import os

    os.mkfifo(place / "schema.json")
    assert execute([*COMMANDS["ask"], "--json-schema", "schema.json"]) == 1
    assert "not a regular file" in capsys.readouterr().err
    (place / "big.json").write_text(json.dumps([[]] * 1_100_000))
    assert execute([*COMMANDS["ask"], "--json-schema", "big.json"]) == 1
    assert "elements" in capsys.readouterr().err
