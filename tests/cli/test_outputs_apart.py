"""No command writes over a file that it reads, over one of another kind, or two outputs into one
file.
"""

import os

import pytest

from restorekv.context import CompressedContext
from restorekv.errors import AdapterError, CacheFileError, RestoreKVError
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter
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
        "is also another file of this command; choose a different name for the output.\n"
        in result.err
    )
    assert (files_below(tmp_path), files_below(world.root)) == before


FOREIGN = {  # words as above; {other} is a file of another kind
    "cache over a text": "compress {world}/text --model {world}/model -o {other}",
    "longer cache over a text": "append {world}/cache {world}/text -o {other}",
    "composed over a text": "compose {world}/cache -o {other}",
    "prefix over a text": "export {world}/cache -o {other}",
    "gate over a text": "train-gate --data {world}/data --out {other}",
    "converted gate over a text": "convert-gate {world}/text -o {other}",
    "figures over a text": "inspect {world}/cache --json {other}",
    "answers over a text": "ask {world}/cache who? --json {other}",
    "scores over a text": "eval --evictor kvzip --benchmark tiny --json {other}",
    "figures of a folder over a text": "compress {tmp}/folder -o {tmp}/made --json {other}",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_no_file_of_another_kind_is_replaced(world, tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(QUESTION)
    other = tmp_path / "notes.txt"
    other.write_text("notes that nobody has elsewhere")
    before = files_below(tmp_path), files_below(world.root)
    names = {"world": world.root, "tmp": tmp_path, "other": other}
    result = cli(*(word.format(**names) for word in FOREIGN[name].split()))
    assert result.code == 1 and not result.out
    assert f"error: {other} exists and is not " in result.err
    assert result.err.endswith("; give a different name, or delete it first.\n")
    assert (files_below(tmp_path), files_below(world.root)) == before


def test_our_own_files_and_empty_ones_are_replaced(world, tmp_path):
    out, figures = tmp_path / "doc.rkv", tmp_path / "figures.json"
    out.touch()
    command = ("compress", world.text, "--model", world.model, "-o", out, "--json", figures)
    for ratio in (0.3, 0.5):
        made = cli(*command, "--ratio", ratio)
        assert made.code == 0, made.err
    # What is damaged, too.
    out.write_bytes(out.read_bytes()[:3000])
    assert cli(*command).code == 0


def test_saving_in_python_replaces_no_file_of_another_kind(world, tmp_path):
    model, tokenizer = load_model(world.model)
    small = CompressedContext.load(world.cache, model, tokenizer)
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    sentence = "notes.txt exists and is not {}; give a different name, or delete it first"
    with pytest.raises(CacheFileError, match=sentence.format("a restorekv cache")):
        small.save(notes)
    with pytest.raises(RestoreKVError, match=sentence.format("a conversation of restorekv")):
        small.chat().save(notes)
    assert notes.read_text() == "notes"
    # A cache is no conversation, and the other way around.
    talk = tmp_path / "talk.json"
    for _ in range(2):
        small.chat().save(talk)
    with pytest.raises(CacheFileError, match="is not a restorekv cache"):
        small.save(talk)
    small.save(tmp_path / "doc.rkv")
    with pytest.raises(RestoreKVError, match="is not a conversation"):
        small.chat().save(tmp_path / "doc.rkv")


def test_a_conversation_is_not_saved_over_a_file_of_another_kind(world, tmp_path):
    texts = [tmp_path / name for name in ("notes.txt", "notes.rkv")]
    for path in texts:
        path.write_text("notes")
    lines = "\n".join([QUESTION, *(f"/save {path}" for path in texts)])
    options = ("--model", world.model, "--max-new-tokens", 4)
    told = cli("chat", world.cache, *options, stdin=lines.encode())
    assert told.code == 0 and told.err.count("; give a different name, or delete it first.") == 2
    assert all(path.read_text() == "notes" for path in texts)


def test_an_adapter_of_another_kind_is_not_replaced(world, tmp_path):
    adapter = RestoreAdapter.create(load_model(world.model)[0], 2, rank=1)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="holds an adapter that restores nothing"):
        adapter.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]
    (tmp_path / "adapter_config.json").unlink()
    for _ in range(2):
        adapter.save_pretrained(tmp_path)
