"""`--json -` writes JSON to stdout, and nothing else goes there."""

import json

import pytest

from tests.helpers.cli_world import QUESTION, World, build_world, cli


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("compress {text} --model {model} --ratio 0.5 --adapter none -o {out}", "bytes_held"),
        ("ask {cache} --model {model} --max-new-tokens 4 QUESTION", "answers"),
        ("ask {cache} --model {model} --max-new-tokens 4 QUESTION QUESTION", "answers"),
        ("inspect {cache}", "kept_per_head"),
        (
            "eval --model tiny --benchmark tiny --evictor knorm@none --ratio 0.2 --count 1 "
            "--out {results}",
            "rows",
        ),
    ],
)
def test_stdout_has_the_json_alone(world, tmp_path, command, key):
    paths = {"text": world.text, "model": world.model, "cache": world.cache}
    paths |= {"out": tmp_path / "out.rkv", "results": tmp_path / "results"}
    words = [QUESTION if word == "QUESTION" else word.format_map(paths) for word in command.split()]
    told = cli(*words, "--json", "-")
    assert told.code == 0, told.err
    content = json.loads(told.out)
    assert key in content, list(content)

    # The same figures as in a file, and the next command prints to stdout again.
    if command.startswith("ask"):
        again = cli(*words, "--json", tmp_path / "file.json")
        stored = json.loads((tmp_path / "file.json").read_text())
        assert stored["answers"] == content["answers"] and again.out
