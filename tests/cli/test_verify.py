"""`restorekv verify`: a sentence for every kind of file, and a non-zero exit for what would not
load.
"""

import json
import os

import pytest

from restorekv import CompressedContext, CompressionConfig, compress, load_model
from restorekv.cli import execute
from restorekv.errors import RestoreKVError
from restorekv.generation.chat import Chat
from restorekv.model.names import TINY, shipped_path

TEXT = "The red house belongs to Ada. The code of the red house is 482. " * 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a cache, a portable cache and strangers' files."""
    folder = tmp_path_factory.mktemp("verify")
    model, tokenizer = load_model("tiny")
    small = compress(
        model,
        tokenizer,
        TEXT,
        ratio=0.3,
        adapter=None,
        evictor="snapkv",
        config=CompressionConfig(allocation="per-head"),
    )
    small.save(folder / "doc.rkv")
    small.portable().save(folder / "doc.safetensors")
    raw = (folder / "doc.rkv").read_bytes()
    (folder / "cut.rkv").write_bytes(raw[:-4])
    (folder / "text.rkv").write_text(TEXT)
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


def said(capsys, *words):
    code = execute(["verify", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_intact_files_are_named(place, capsys):
    adapter, gate = (
        shipped_path(TINY, "adapters", "kvzip"),
        next(shipped_path(TINY, "gates").glob("*.safetensors")),
    )
    code, out, _ = said(capsys, place / "doc.rkv", place / "doc.safetensors", adapter, gate)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["intact"] * 4
    for line, what in zip(
        lines,
        ("a cache of", "a portable cache", "a restore adapter", "a gate of kind"),
        strict=True,
    ):
        assert what in line


def test_strangers_are_refused_and_the_others_still_named(place, capsys):
    files = ["cut.rkv", "text.rkv", "pipe", "empty", "nowhere", "doc.rkv"]
    code, out, err = said(capsys, *(place / name for name in files))
    assert code == 1 and "5 of 6 cannot be loaded" in err
    assert [line.split()[0] for line in out.splitlines()] == ["refused"] * 5 + ["intact"]
    for name, line in zip(files, out.splitlines(), strict=True):
        assert name in line


def test_each_cache_file_of_a_folder_is_verified(place, capsys, tmp_path):
    caches = tmp_path / "caches"
    (caches / "part").mkdir(parents=True)
    for name in ("a.txt.rkv", "part/b.txt.rkv"):
        (caches / name).write_bytes((place / "doc.rkv").read_bytes())
    code, out, _ = said(capsys, caches)
    assert code == 0
    for name, line in zip(("a.txt.rkv", "part/b.txt.rkv"), out.splitlines(), strict=True):
        assert line.startswith(f"intact   {caches / name}: a cache of")

    (caches / "a.txt.rkv").write_bytes((place / "cut.rkv").read_bytes())
    code, out, err = said(capsys, caches)
    assert code == 1 and "1 of 2 cannot be loaded" in err
    assert [line.split()[0] for line in out.splitlines()] == ["refused", "intact"]


def test_conversations_are_told_from_caches(place, capsys):
    small = CompressedContext.load(place / "doc.rkv", *load_model("tiny"))
    chat = small.chat()
    chat.ask("Which code?", 4)
    chat.save(place / "talk.json")
    code, out, _ = said(capsys, place / "talk.json")
    assert code == 0 and "a conversation of 1 turn" in out
    with pytest.raises(RestoreKVError, match="the cache of a document, not a conversation"):
        Chat.load(place / "doc.rkv", small)
    (place / "other.json").write_text("{}")
    assert "not a conversation of restorekv" in said(capsys, place / "other.json")[1]


def test_folders_of_data_and_results(capsys, tmp_path):
    words = ["--evictor", "knorm@none", "--ratio", "0.3", "--count", "1", "--out", str(tmp_path)]
    assert execute(["eval", "--model", "tiny", "--benchmark", "tiny", *words]) == 0
    capsys.readouterr()
    code, out, _ = said(capsys, tmp_path)
    assert code == 0 and "results of" in out
    answers = next(tmp_path.glob("cells/*/answers.jsonl"))
    line = json.loads(answers.read_text().splitlines()[0])
    line["answers"] = 7
    answers.write_text(json.dumps(line) + "\n")
    assert said(capsys, tmp_path)[0] == 1
