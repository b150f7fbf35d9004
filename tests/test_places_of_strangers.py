"""Folders of strangers: their names, links and indexes lead to no file elsewhere, which would be
read or removed.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from restorekv import load_model, seal
from restorekv.data.build_folder import PARTS_FOLDER
from restorekv.data.build_folder import begin_build as begin_data
from restorekv.data.gather import AttemptFile
from restorekv.errors import RestoreKVError
from restorekv.evaluation import results
from restorekv.evaluation.grid import Grid
from restorekv.restore import adapter_file
from restorekv.serve.index import Upload
from restorekv.serve.store import Store
from restorekv.train import checkpoint
from tests.hostile.kinds import a_run, make_checkpoint

MUCH, SHA = 1 << 30, "ab" * 32
OWN, KEY = "file-" + "0" * 24, "ef" * 16


@pytest.fixture
def victim(tmp_path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def row(
    name: str,
    sha256: object = SHA,
    size: object = 1,
    expires: object = 5,
    status: str = "processed",
) -> tuple:
    return name, sha256, "a.txt", "user_data", size, 1, expires, status, ""


def index_of(folder: Path, *statements: tuple[str, tuple]) -> None:
    """Makes a store whose index has rows of a stranger's."""
    Store(folder, MUCH).close()
    with sqlite3.connect(folder / "index.sqlite") as disk:
        for sql, values in statements:
            disk.execute(sql, values)
    disk.close()


FILES, CACHES = (
    f"insert into files values ({', '.join('?' * 9)})",
    "insert into caches values (?, ?, ?, ?)",
)
LIES = {
    "an upload elsewhere": (FILES, row("../../victim")),
    "an upload at an absolute path": (FILES, row("/etc/hostname", expires=None)),
    "a status of no upload": (FILES, row(OWN, status="x")),
    "a hash that is a path": (FILES, row(OWN, sha256="../..")),
    "a size that is a text": (FILES, row(OWN, size="many")),
    "a cache elsewhere": (CACHES, ("../../victim", SHA, 1 << 40, 1.0)),
    "a deletion elsewhere": ("insert into pending values (?, ?)", ("../x", "")),
    "a trigger": (
        f"create trigger t after update on reserve begin {FILES.replace('?', '1')}; end",
        (),
    ),
    "a view": ("create view v as select 1", ()),
    "a table of its own": ("create table more (id)", ()),
    "a column more": ("alter table caches add column more default 1", ()),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_no_server_wrote_is_refused(tmp_path, victim, lie):
    index_of(tmp_path / "store", LIES[lie])
    for _ in range(2):
        with pytest.raises(RestoreKVError, match="no server wrote it; move it away") as caught:
            Store(tmp_path / "store", MUCH).close()
    assert str(caught.value).isprintable() and victim.read_text() == "precious"


def test_a_link_among_the_uploads_is_removed_and_never_served(tmp_path, victim):
    folder = tmp_path / "store"
    index_of(folder, (FILES, row(OWN, expires=None)), (CACHES, (KEY, SHA, 1, 1.0)))
    (folder / "files" / OWN).symlink_to(victim)
    (folder / "caches" / f"{KEY}.rkv").symlink_to(victim)
    store = Store(folder, MUCH)
    assert (
        not store.list_uploads() and not store.has_cache(KEY) and victim.read_text() == "precious"
    )
    assert not os.path.lexists(folder / "files" / OWN) and not os.path.lexists(
        folder / "caches" / f"{KEY}.rkv"
    )
    (folder / "files" / OWN).symlink_to(victim)  # one that comes later is not followed either
    with pytest.raises(RestoreKVError, match="cannot be read"):
        store.read_upload(Upload(*row(OWN, expires=None)))
    store.close()


def test_a_fifo_among_the_uploads_is_not_waited_for(tmp_path):
    folder = tmp_path / "store"
    index_of(folder, (FILES, row(OWN, expires=None)))
    os.mkfifo(folder / "files" / OWN)
    store = Store(folder, MUCH)
    assert not store.list_uploads()
    store.close()
    (folder / "files" / OWN).mkdir()
    with pytest.raises(RestoreKVError, match="not a regular file; remove it"):
        Store(folder, MUCH)


@pytest.mark.parametrize("name", ["files", "caches", "damaged"])
def test_a_store_does_not_tidy_another_through_a_link(tmp_path, name):
    other, folder = tmp_path / "other", tmp_path / "store"
    Store(other, MUCH).close()
    kept = other / name / (OWN if name == "files" else f"{KEY}.rkv")
    kept.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(other / name)
    with pytest.raises(RestoreKVError, match="symbolic link, which is not followed"):
        Store(folder, MUCH)
    assert kept.read_text() == "precious"


def to_attempts(folder: Path, victim: Path) -> None:
    (folder / "a.jsonl").symlink_to(victim)
    AttemptFile(folder / "a.jsonl")


def to_parts(folder: Path, victim: Path) -> None:
    (folder / PARTS_FOLDER).symlink_to(victim.parent)
    begin_data(folder, None, {})


def to_cells(folder: Path, victim: Path) -> None:
    (folder / results.CELLS).symlink_to(victim.parent)
    cell = next(
        iter(Grid(("tiny",), [("knorm", None)], ("tiny:count=2",), ratios=("0.2",)).list_cells())
    )
    results.open_result(folder, cell, {})


def to_adapter(folder: Path, victim: Path) -> None:
    (victim.parent / adapter_file.README).write_text("precious")
    (folder / adapter_file.PENDING).symlink_to(victim.parent)
    adapter_file.move_into_place(folder)


@pytest.mark.parametrize("work", [to_attempts, to_parts, to_cells, to_adapter])
def test_a_link_in_a_folder_changes_nothing_elsewhere(tmp_path, work: Callable[[Path, Path], None]):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    victim = elsewhere / "victim"
    victim.write_text("precious")  # without a line's end: half a line, which Attempts cuts
    with pytest.raises(RestoreKVError, match="symbolic link, which is not followed; remove it"):
        work(folder, victim)
    others = {adapter_file.README} if work is to_adapter else set()
    assert {path.name for path in elsewhere.iterdir()} == {
        "victim"
    } | others and victim.read_text() == "precious"


def test_an_adapters_folder_with_a_circle_of_links_gives_a_sentence(tmp_path):
    from restorekv import compress

    (tmp_path / "x").symlink_to("x")
    with pytest.raises(RestoreKVError, match=r"has no adapter_config\.json"):
        compress(
            *load_model("tiny"), "The red house belongs to Ada. " * 20, adapter=tmp_path, ratio=0.5
        )


@pytest.mark.parametrize("field", ["config", "origin", "step"])
@pytest.mark.parametrize("text", ["[]", "[1]", "7", "null", '"x"', "{}", '{"a": []}', ""])
def test_a_checkpoint_that_records_something_else_gives_a_sentence(tmp_path, field, text):
    """A list as the config gave an AttributeError once (case 2634 of tests.hostile.others)."""
    make_checkpoint(tmp_path)
    metadata, tensors = seal.read_sealed(tmp_path / checkpoint.CHECKPOINT_FILE, checkpoint.KIND)
    seal.write_sealed(
        tmp_path / checkpoint.CHECKPOINT_FILE, checkpoint.KIND, tensors, {**metadata, field: text}
    )
    with pytest.raises(RestoreKVError) as caught:
        checkpoint.load_checkpoint(tmp_path, a_run(4))
    assert str(caught.value).isprintable() and json.dumps(str(caught.value))
