"""`restorekv compress FOLDER`: every document once, whatever happens to one, and the same bytes
however spread.
"""

import json
import os
from pathlib import Path

import pytest

from restorekv import CompressedContext, compress, load_model, spec
from restorekv.cli import document_compressor, folder
from restorekv.cli.ray_folder import RayDocumentCompressor
from restorekv.errors import RestoreKVError
from tests.helpers.cli_world import TEXT, build_world, cli
from tests.helpers.pdf import make_pdf_with_a_damaged_page

FLAGS = ("--ratio", "0.3", "--adapter", "none")
TEXTS = {
    "a.txt": TEXT,
    "below/b.md": f"# Houses\n\n{TEXT}",
    "c.html": f"<p>{TEXT}</p><script>no()</script>",
    "D.TXT": TEXT.upper(),
}


@pytest.fixture(scope="module")
def world(tiny_tokenizer, tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


@pytest.fixture
def given(tmp_path) -> Path:
    """A folder with four documents, and files that are none."""
    for name, text in {**TEXTS, "image.png": "x", ".hidden.txt": TEXT, ".git/c.txt": TEXT}.items():
        (path := tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "given"


def written(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.rkv"))}


def run(world, given, *more, flags=FLAGS):
    return cli("compress", given, "--model", world.model, "-o", given.parent / "out", *flags, *more)


def test_every_document_is_compressed(world, given, tmp_path):
    result = run(world, given, "--json", tmp_path / "made.json")
    assert result.code == 0 and ": 4 written" in result.out, result
    # What the ending leaves out is named; hidden files are not.
    assert "Left out, because of the ending: image.png. Endings" in result.err
    assert "hidden" not in result.err
    assert set(written(tmp_path / "out")) == {f"{name}.rkv" for name in TEXTS}
    model, tokenizer = load_model(world.model)
    for name, text in {"c.html": TEXT.strip(), "a.txt": TEXT}.items():
        loaded = CompressedContext.load(tmp_path / "out" / f"{name}.rkv", model, tokenizer)
        own = compress(model, tokenizer, text, ratio="0.3", adapter=None)
        assert (
            loaded.ask("who?", 8) == own.ask("who?", 8)
            and loaded.manifest.pairs == own.manifest.pairs
        )
    figures = json.loads((tmp_path / "made.json").read_text())
    assert (
        figures["wrote"] == 4 and figures["documents"]["a.txt"]["held"] == own.manifest.bytes_held
    )
    assert "4 of 4" in result.err and "100%" in result.err, "how far it is"


def test_documents_in_a_linked_folder_count(given, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "e.txt").write_text(TEXT)
    (given / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "back").symlink_to(given)
    names = {str(name) for name in folder._list_documents(given)}
    assert names == {*TEXTS, "linked/e.txt"}


def test_tables_count_and_links_that_lead_nowhere_are_named(given, tmp_path, capsys):
    (given / "table.CSV").write_text(TEXT)
    (given / "moved.txt").symlink_to(tmp_path / "nowhere.txt")
    names = {str(name) for name in folder._list_documents(given)}
    assert names == {*TEXTS, "table.CSV"}
    assert "the link leads nowhere: moved.txt." in capsys.readouterr().err


def test_what_is_there_is_kept(world, given, tmp_path):
    """Unless the text changed or the file itself is damaged."""
    run(world, given)
    first = written(out := tmp_path / "out")
    stamps = {name: (out / name).stat().st_mtime_ns for name in first}
    assert "0 written, 4 already there" in run(world, given).out
    same = ("--ratio", "0.30", "--adapter", "none")
    assert "0 written, 4 already there" in run(world, given, flags=same).out
    assert {name: (out / name).stat().st_mtime_ns for name in first} == stamps
    (given / "a.txt").write_text(f"{TEXT} And more.")
    (out / "c.html.rkv").write_bytes(first["c.html.rkv"][:-9])
    (out / "D.TXT.rkv").unlink()
    (out / ".made" / "D.TXT.rkv.json").write_text("[]")
    assert ": 3 written" in run(world, given).out
    assert {name for name, content in written(out).items() if content != first[name]} == {
        "a.txt.rkv"
    }


def test_files_of_other_settings_are_replaced_only_where_that_is_asked(world, given, tmp_path):
    run(world, given)
    out = tmp_path / "out"
    first = written(out)
    (given / "new.txt").write_text(TEXT)
    other = ("--ratio", "0.4", "--adapter", "none")
    refused = run(world, given, flags=other)
    assert refused.code == 1 and "written" not in refused.out, refused
    assert refused.err.splitlines()[-1] == (
        f"error: The folder {out} has cache files that these settings did not make: D.TXT.rkv, "
        "a.txt.rkv, below/b.md.rkv, c.html.rkv. Name a different folder, or pass --replace to "
        "make them again."
    )
    # Not even the new document is compressed, so that a folder has files of one kind.
    assert written(out) == first

    assert ": 5 written" in run(world, given, "--replace", flags=other).out
    assert "0 written, 5 already there" in run(world, given, flags=other).out
    with_adapter = ("--ratio", "0.4", "--adapter", world.adapter)
    assert ": 5 written" in run(world, given, "--replace", flags=with_adapter).out
    of_other_model = ("compress", given, "--model", world.other, "-o", out, *other)
    assert "--replace" in cli(*of_other_model).err
    assert ": 5 written" in cli(*of_other_model, "--replace").out


def test_a_file_that_no_run_made_is_replaced_only_where_that_is_asked(world, given, tmp_path):
    run(world, given)
    out = tmp_path / "out"
    first = written(out)
    own = out / "a.txt.rkv"
    # Another cache in the place of one that was made, and one that has no record.
    for content in (first["D.TXT.rkv"], Path(world.cache).read_bytes()):
        own.write_bytes(content)
        refused = run(world, given)
        assert refused.code == 1 and "did not make: a.txt.rkv. Name" in refused.err, refused
        assert own.read_bytes() == content
        (out / ".made" / "a.txt.rkv.json").unlink(missing_ok=True)
    assert ": 1 written" in run(world, given, "--replace").out and written(out) == first
    # What is not a cache is never replaced, as with a single text.
    own.write_text("notes")
    for flags in ((), ("--replace",)):
        refused = run(world, given, *flags)
        assert refused.code == 1 and "is not a restorekv cache" in refused.err, refused
    assert own.read_text() == "notes"


def test_files_of_another_version_of_the_evictor_are_made_anew(world, given, tmp_path, monkeypatch):
    """Its name and the package's version stay while it is worked on."""
    run(world, given)
    read = spec._read_source
    monkeypatch.setattr(spec, "_read_source", lambda cls: read(cls) + "# changed")
    assert ": 4 written" in run(world, given).out


def test_a_record_is_of_the_file_beside_it(world, given, tmp_path, monkeypatch):
    """Also where a run was killed between the two; old records do not name the file."""
    run(world, given)
    first, record = written(out := tmp_path / "out"), out / ".made" / "a.txt.rkv.json"
    entries = json.loads(record.read_text())
    (given / "a.txt").write_text(f"{TEXT} And more.")

    write_json = document_compressor.write_json

    def killed(path: Path, entries: dict, **options: object) -> None:
        if "of" in entries:  # the file is written
            raise KeyboardInterrupt
        write_json(path, entries, **options)

    for named in (entries, {name: value for name, value in entries.items() if name != "file"}):
        record.write_text(json.dumps(named))
        with monkeypatch.context() as broken:
            broken.setattr(document_compressor, "write_json", killed)
            assert run(world, given).code == 130 and written(out)["a.txt.rkv"] != first["a.txt.rkv"]
        (given / "a.txt").write_text(TEXT)
        assert ": 1 written" in run(world, given).out and written(out) == first
        (given / "a.txt").write_text(f"{TEXT} And more.")
    (given / "a.txt").write_text(TEXT)
    del entries["file"], entries["warning"]
    record.write_text(json.dumps(entries))
    assert ": 0 written" in run(world, given).out


def test_cache_files_of_documents_that_are_gone_are_named(world, given, tmp_path):
    run(world, given)
    out = tmp_path / "out"
    (out / "own.rkv").write_bytes((out / "a.txt.rkv").read_bytes())  # not made by a run
    assert "without a document" not in run(world, given).out
    (given / "a.txt").unlink()
    (given / "below" / "b.md").rename(given / "below" / "new.md")
    before = written(out)
    result = run(world, given, "--json", tmp_path / "made.json")
    assert result.code == 0 and ": 1 written, 2 already there" in result.out
    assert result.out.endswith(
        f"Cache files in {out} without a document in {given}: a.txt.rkv, below/b.md.rkv; delete "
        "those that you no longer need.\n"
    )
    assert json.loads((tmp_path / "made.json").read_text())["without_document"] == [
        "a.txt.rkv",
        "below/b.md.rkv",
    ]
    after = written(out)
    assert {name: after[name] for name in before} == before


def test_one_failure_does_not_stop_the_others(world, given, tmp_path):
    (given / "bad.pdf").write_bytes(b"%PDF-1.7 nothing")
    (given / "empty.txt").write_text(" \n")
    (given / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    result = run(world, given)
    assert result.code == 1 and ": 4 written" in result.out
    assert result.err.splitlines()[-1] == (
        "error: 3 of 7 documents could not be compressed; fix what is named above and run it again."
    )
    for name, words in {
        "bad.pdf": "can be read",
        "empty.txt": "has no text",
        "latin.txt": "not UTF-8",
    }.items():
        (line,) = [line for line in result.err.splitlines() if line.startswith(f"{name}: ")]
        assert words in line
    assert len(written(tmp_path / "out")) == 4
    (given / "empty.txt").write_text(TEXT)
    assert ": 1 written" in run(world, given).out


def test_what_is_kept_whole_or_not_restored_is_said_each_time(world, given):
    """No adapter ships for this model."""
    whole = "Kept whole, because they are too short: short.txt."
    unrestored = "Nothing is restored: no adapter ships that helps this model"
    (given / "short.txt").write_text("house")
    for _ in range(2):
        told = run(world, given, flags=("--ratio", "0.1")).out
        assert whole in told and unrestored in told
    alone = run(world, given, "--replace", flags=("--ratio", "0.1", "--adapter", "none")).out
    assert whole in alone and unrestored not in alone
    full = run(world, given, "--replace", flags=("--ratio", "1")).out
    assert whole not in full and unrestored not in full


def test_what_is_cut_is_said_each_time(world, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "short.txt").write_text(TEXT)
    (given / "long.txt").write_text("house " * 5000)  # the model has 4,096 positions
    figures = tmp_path / "made.json"
    flags = (*FLAGS, "--evictor", "knorm", "--on-long-text", "cut", "--json", figures)
    for _ in range(2):
        told = run(world, given, flags=flags).out
        cut = json.loads(figures.read_text())["documents"]["long.txt"]["cut"]
        assert cut and f"The end was cut, {cut:,} tokens in all, of: long.txt." in told


def test_what_could_not_be_read_is_said_each_time(world, tmp_path):
    pytest.importorskip("pypdf")
    given = tmp_path / "given"
    given.mkdir()
    (given / "a.pdf").write_bytes(make_pdf_with_a_damaged_page(TEXT))
    warning = "warning: Not all of a.pdf could be read: page 2 is damaged."
    figures = tmp_path / "made.json"
    for outcome in ("1 written", "1 already there"):
        result = run(world, given, "--json", figures)
        assert result.code == 0 and outcome in result.out, result
        assert result.err.count(warning) == 1
        row = json.loads(figures.read_text())["documents"]["a.pdf"]
        assert f"warning: {row['warning']}".startswith(warning)
    single = cli(
        "compress", given / "a.pdf", "--model", world.model, "-o", tmp_path / "a.rkv", *FLAGS
    )
    assert single.code == 0
    assert f"{given / 'a.pdf'} could be read: page 2 is damaged." in single.err


def test_a_folder_stopped_in_the_middle_goes_on(world, given, tmp_path, monkeypatch):
    made, count = document_compressor.compress, []

    def stopping(*given, **options):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return made(*given, **options)

    monkeypatch.setattr(document_compressor, "compress", stopping)
    assert run(world, given).code == 130 and len(written(tmp_path / "out")) == 2
    assert ": 2 written" in run(world, given).out and len(count) == 5
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".tmp"]


def test_mistakes_are_one_sentence(world, given, tmp_path):
    (tmp_path / "file").write_text("x")
    assert (
        "is not a folder"
        in cli("compress", given, "--model", world.model, "-o", tmp_path / "file").err
    )
    assert (
        "Cannot load the model"
        in cli("compress", given, "--model", "no/such-model", "-o", tmp_path / "out").err
    )


def test_a_node_with_another_model_under_the_same_name_is_refused(world, given, monkeypatch):
    """Else some of the folder's cache files would be another model's."""
    made = []
    make = document_compressor.DocumentCompressor.__init__

    def note(self, recipe):
        make(self, recipe)
        made.append(recipe)

    monkeypatch.setattr(document_compressor.DocumentCompressor, "__init__", note)
    assert run(world, given).code == 0
    worker = RayDocumentCompressor(made[0], "cpu", 1, os.getcwd())
    out = given.parent / "elsewhere.rkv"
    document = (str(given / "a.txt"), "a.txt", str(out))
    with pytest.raises(RestoreKVError, match=r"has another model.*give every node"):
        worker.call_alike("other", "compress_document", document)
    assert not out.exists()
    assert worker.call_alike(worker.identify(), "compress_document", document).outcome == "wrote"
    assert out.read_bytes() == (given.parent / "out" / "a.txt.rkv").read_bytes()


@pytest.mark.parametrize(
    ("flags", "says"), [(("--ray", "local"), "--ray"), (("--replace",), "--replace")]
)
def test_what_is_for_folders_is_refused_for_one_text(tmp_path, flags, says):
    text = tmp_path / "one.txt"
    text.write_text("A lighthouse.")
    refused = cli("compress", text, "--model", "tiny", "-o", tmp_path / "one.rkv", *flags)
    assert refused.code == 1 and f"{says} " in refused.err and "folder of documents" in refused.err
    assert not (tmp_path / "one.rkv").exists()


@pytest.mark.slow
def test_spread_over_ray_gives_the_same_bytes(world, given, tmp_path):
    """And a run here goes on where one on a cluster stopped."""
    pytest.importorskip("ray", reason="ray is not installed; the extra 'ray' is part of 'dev'")
    (given / "empty.txt").write_text("")
    assert run(world, given).code == 1
    here = written(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / "here")
    result = run(world, given, "--ray", "local")
    assert result.code == 1 and "empty.txt: " in result.err and "1 of 5 documents" in result.err
    assert written(tmp_path / "out") == here and len(here) == 4
    assert ": 0 written" in run(world, given).out
    wrong = cli(
        "compress", given, "--model", "no/such-model", "-o", tmp_path / "out", "--ray", "local"
    )
    assert wrong.code == 1 and "Cannot load the model" in wrong.err and "Traceback" not in wrong.err
