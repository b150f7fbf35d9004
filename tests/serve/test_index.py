"""The index of the store: on full disks, on read-only disks, and as other versions wrote it."""

import errno
import io
import json
import os
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

openai = pytest.importorskip("openai")

from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.serve import run  # noqa: E402
from restorekv.serve import store as store_module  # noqa: E402
from restorekv.serve.index import PROCESSED, UPLOADED, VERSION, Index  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from tests.helpers.serving import OTHER, TEXT, VARIANT, about, ask, client_of, serving, upload  # noqa: E402
from tests.hostile.kill import disk, may_mount  # noqa: E402

MUCH, KEY, SHA = 1 << 30, "cd" * 16, "ab" * 32


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store", MUCH)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB, and a function that changes its options."""
    if not may_mount(tmp_path):
        pytest.skip("mounting is not allowed here")
    with disk(tmp_path / "disk", "size=3m") as made:
        yield made


def fill(folder: Path) -> None:
    """Fill every free byte of the folder's disk."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    assert os.statvfs(folder).f_bavail == 0


@contextmanager
def refusing(store: Store):
    """Make the index refuse writes inside the block, as one on a read-only disk does."""
    store.index.disk.execute("pragma query_only = 1")
    yield
    store.index.disk.execute("pragma query_only = 0")


def on_disk(store: Store, sql: str) -> list[tuple]:
    return store.index.disk.execute(sql).fetchall()


def test_changes_that_may_wait_are_written_later(store):
    made = store.add_upload("a.txt", "user_data", io.BytesIO(b"text"))
    with store.write_cache_file(KEY, SHA) as path:
        path.write_bytes(b"cache")
    with refusing(store):
        store.set_status(made, PROCESSED)
        used = on_disk(store, "select used from caches")
        assert store.find_cache_file(KEY) == store.cache_path(KEY)
        assert store.get_upload(made.id).status == PROCESSED
        assert on_disk(store, "select status from files") == [(UPLOADED,)]
    store.add_upload("b.txt", "user_data", io.BytesIO(b"more"))
    assert on_disk(store, "select status from files") == [(PROCESSED,), (UPLOADED,)]
    assert on_disk(store, "select used from caches") > used
    assert not store.index.deferred and not store.index.touched


def test_reading_writes_nothing(store):
    with store.write_cache_file(KEY, SHA) as path:
        path.write_bytes(b"cache")
    before = store.index.disk.total_changes
    for _ in range(3):
        assert (
            store.find_or_fetch_file(KEY, SHA)
            and store.has_cache(KEY)
            and not store.list_uploads()
            and store.get_upload("file-x") is None
        )
    assert store.index.disk.total_changes == before


def test_a_deletion_without_room_for_its_row_removes_the_file(store, tmp_path):
    """A server that dies before it can write the row deletes the upload again when it starts."""
    made, same = (store.add_upload("a.txt", "user_data", io.BytesIO(b"text")) for _ in range(2))
    with store.write_cache_file(KEY, made.sha256) as path:
        path.write_bytes(b"cache")
    with refusing(store):
        assert (
            store.delete_upload(made.id)
            and store.get_upload(made.id) is None
            and store.has_cache(KEY)
        )
        assert (
            store.delete_upload(same.id) and not store.has_cache(KEY) and not store.list_uploads()
        )
        assert not list((tmp_path / "store" / "files").iterdir()) + list(
            (tmp_path / "store" / "caches").iterdir()
        )
        assert len(on_disk(store, "select * from files")) == 2
        store.index.deferred.clear()  # so that it is not written at the end
    store.close()
    again = Store(tmp_path / "store", MUCH)
    assert not again.list_uploads() and not on_disk(again, "select * from files")
    again.close()


def test_an_upload_that_expired_is_gone_even_where_it_cannot_be_deleted(store, monkeypatch):
    made = store.add_upload("a.txt", "user_data", io.BytesIO(b"text"), 3600)
    assert store.get_upload(made.id)
    monkeypatch.setattr(store_module.time, "time", lambda: made.expires)

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store, "delete_upload", refused)
    assert store.get_upload(made.id) is None and not store.list_uploads()


def test_a_store_of_another_version_is_refused(tmp_path):
    Store(tmp_path, MUCH).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as rows:
        rows.execute("pragma user_version = 1")
    rows.close()
    with pytest.raises(
        RestoreKVError,
        match=f"has version 1, this restorekv reads {VERSION}; choose a different folder",
    ):
        Store(tmp_path, MUCH)


def test_a_store_of_a_newer_version_is_refused(tmp_path):
    Store(tmp_path, MUCH).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as rows:
        rows.execute(f"pragma user_version = {VERSION + 1}")
    rows.close()
    with pytest.raises(
        RestoreKVError, match="made by a newer version of restorekv; update this one"
    ):
        Store(tmp_path, MUCH)


def test_two_servers_cannot_share_an_index(store, tmp_path):
    with pytest.raises(RestoreKVError, match="end other servers"):
        Index(tmp_path / "store" / "index.sqlite")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_full_disk_stops_no_reading_and_no_deletion(model, tiny_tokenizer, small_disk, restarted):
    folder, _ = small_disk
    with serving(model, tiny_tokenizer, folder / "store") as url:
        client = client_of(url)
        made = [
            upload(client, text, name)
            for text, name in ((TEXT, "a.txt"), (OTHER, "b.txt"), (OTHER * 2, "c.txt"))
        ]
        before = ask(client, about(made[0])).choices[0].message.content
        if not restarted:
            use_full_disk(client, folder, made, before)
    if restarted:
        fill(folder)
        with serving(model, tiny_tokenizer, folder / "store", memory=1) as url:
            use_full_disk(client_of(url), folder, made, before)
    store = Store(folder / "store", MUCH)
    assert [each.id for each in store.list_uploads()] == [made[0].id]
    store.close()


def use_full_disk(client, folder: Path, made: list, before: str) -> None:
    """Ask and delete on a disk without a free byte."""
    fill(folder)
    for each in made:
        assert ask(client, about(each)).choices
    assert ask(client, about(made[0])).choices[0].message.content == before
    assert list(ask(client, about(made[0]), stream=True))
    assert [each.id for each in client.files.list()] == [each.id for each in reversed(made)]
    url = str(client.base_url)
    for path in ("content", "cache", f"kept?model={VARIANT}", f"progress?model={VARIANT}"):
        assert urlopen(f"{url}files/{made[0].id}/{path}").status == 200
    with pytest.raises(
        openai.APIStatusError, match=r"no room .* delete files, then try again"
    ) as variant:
        ask(client, about(made[0]), "tiny:snapkv-0.9")
    with pytest.raises(
        openai.APIStatusError, match=r"cannot store the file: it has no room .* delete files"
    ) as new:
        client.files.create(file=("new.txt", b"new"), purpose="user_data")
    assert variant.value.status_code == new.value.status_code == 507
    assert os.statvfs(folder).f_bavail == 0
    for each in made[1:]:
        assert client.files.delete(each.id).deleted
    assert os.statvfs(folder).f_bavail > 0
    fill(folder)
    assert ask(client, about(made[0])).choices[0].message.content == before


def test_a_read_only_disk_stops_no_reading(model, tiny_tokenizer, small_disk):
    folder, change = small_disk
    with serving(model, tiny_tokenizer, folder / "store") as url:
        made = upload(client_of(url))
        before = ask(client_of(url), about(made)).choices[0].message.content
    change("ro")
    with serving(model, tiny_tokenizer, folder / "store", memory=1) as url:
        client = client_of(url)
        assert ask(client, about(made)).choices[0].message.content == before
        assert client.files.content(made.id).read() == TEXT.encode()
        for change_something in (
            lambda: client.files.delete(made.id),
            lambda: client.files.create(file=("new.txt", b"new"), purpose="user_data"),
            lambda: ask(client, about(made), "tiny:snapkv-0.9"),
        ):
            with pytest.raises(
                openai.APIStatusError, match=r"Read-only .* has to make the store writable"
            ) as no:
                change_something()
            assert no.value.status_code == 507 and str(folder) not in str(no.value)
        assert client.files.retrieve(made.id).status == "processed"


def test_the_check_of_loading_needs_no_disk(model, tiny_tokenizer, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "_check_read_tokens", full)
    run.check_loading(model, tiny_tokenizer)
    assert "Loading was not checked" in json.loads(caplog.messages[-1])["problem"]
