"""No command writes over a file that it reads, or two outputs into one file."""

import os

import pytest

from tests.helpers.bad_input import files_below
from tests.helpers.cli_world import QUESTION, World, build_world, cli

CASES = {  # words of {world} and {tmp}, the case's folder
    "figures over the text": "compress {world}/text -o {tmp}/a.rkv --json {world}/text",
    "figures over the new cache": "compress {world}/text -o {tmp}/a.rkv --json {tmp}/a.rkv",
    "figures over the new cache, by another name": (
        "compress {world}/text -o {tmp}/a.rkv --json {tmp}/./a.rkv"
    ),
    "cache over the model": "compress {world}/text -o {tmp}/model.gguf --model {tmp}/model.gguf",
    "cache over a link to the text": "compress {world}/text -o {tmp}/link",
    "figures over a document of a folder": (
        "compress {tmp}/folder -o {tmp}/made --json {tmp}/folder/a.txt"
    ),
    "answers over the cache": "ask {world}/cache who? --json {world}/cache",
    "answers over the schema": (
        "ask {world}/cache who? --json-schema {tmp}/s.json --json {tmp}/s.json"
    ),
    "figures over the inspected cache": "inspect {world}/cache --json {world}/cache",
    "picture over the figures": "inspect {world}/cache --plot {tmp}/x.png --json {tmp}/x.png",
    "longer cache over the cache": "append {world}/cache {world}/text -o {world}/cache",
    "longer cache over the text": "append {world}/cache {world}/text -o {world}/text",
    "composed over a part": "compose {world}/cache -o {world}/cache",
    "prefix over the cache": "export {world}/cache -o {world}/cache",
    "figures over a benchmark's questions": (
        "eval --evictor kvzip --benchmark lines:path={tmp}/s.json --out {tmp}/o --json {tmp}/s.json"
    ),
    "figures over questions in a file of an odd name": (
        "eval --evictor kvzip --benchmark lines:path={tmp}/s@1:2.json --out {tmp}/o "
        "--json {tmp}/s@1:2.json"
    ),
    "gate over its data": "train-gate --data {world}/data --out {world}/data",
    "gate over the published one": "convert-gate {world}/text -o {world}/text",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


@pytest.mark.parametrize("name", CASES)
def test_no_file_is_written_over_another(world, tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(QUESTION)
    for file in ("s.json", "s@1:2.json"):
        (tmp_path / file).write_text("{}")
    os.symlink(world.text, tmp_path / "link")
    before = files_below(tmp_path), files_below(world.root)
    words = [word.format(world=world.root, tmp=tmp_path) for word in CASES[name].split()]
    result = cli(*words)
    assert result.code == 1 and not result.out
    assert (
        "is also another file of this command; choose another name for the output.\n" in result.err
    )
    assert (files_below(tmp_path), files_below(world.root)) == before
