"""Two stores over one shared folder: what one writes, the other finds, deletes and repairs."""

import io
import logging
import os
import secrets
import time
from pathlib import Path

import pytest

from restorekv import compress
from restorekv.cli import execute
from restorekv.errors import RestoreKVError
from restorekv.serve import shared as shared_module
from restorekv.serve.shared import SharedFolder
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant
from tests.helpers.caches import DocumentHolder
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 3
)
SHA, KEY, MUCH = "ab" * 32, "cd" * 16, 1 << 30


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return (
        f"file://{tmp_path}/shared"
        if request.param == "file"
        else f"memory://{secrets.token_hex(8)}"
    )


@pytest.fixture
def two(url, tmp_path):
    stores = [Store(tmp_path / name, MUCH, SharedFolder(url)) for name in ("one", "two")]
    yield stores
    for store in stores:
        store.close()


def write(store, content=b"cache", key=KEY, sha256=SHA):
    with store.write_cache_file(key, sha256) as path:
        path.write_bytes(content)


def names(store):
    files = store.shared.files
    return sorted(path.removeprefix(store.shared.root) for path in files.find(store.shared.root))


def test_what_one_writes_the_other_finds(two):
    one, other = two
    assert other.find_or_fetch_file(KEY, SHA) is None
    write(one)
    found = other.find_or_fetch_file(KEY, SHA)
    assert (
        found.read_bytes() == b"cache"
        and found.is_relative_to(other.folder)
        and other.has_cache(KEY)
    )
    assert names(one) == [f"/{SHA}/{KEY}.rkv"]
    assert not one.index.select("select * from pending")


def test_the_quota_is_the_local_folders(url, tmp_path):
    """A cache that was dropped locally is fetched again; one that is too large is never fetched."""
    store = Store(tmp_path / "small", 12, SharedFolder(url))
    for number in range(3):
        write(store, b"12345", f"{number}" * 32)
    assert len(list((tmp_path / "small" / "caches").iterdir())) == 2 and not store.has_cache(
        "0" * 32
    )
    assert store.find_or_fetch_file("0" * 32, SHA).read_bytes() == b"12345"
    assert len(list((tmp_path / "small" / "caches").iterdir())) == 2
    write(store, b"1" * 20, "9" * 32)
    store.drop_caches(["9" * 32])
    assert store.find_or_fetch_file("9" * 32, SHA) is None
    store.close()


def test_a_cache_that_the_quota_dropped_before_its_push_costs_no_other_server_its_copy(two):
    one, other = two
    one.shared.resumes = time.monotonic() + 60  # it cannot be reached
    write(one)
    assert one.index.select("select key from pending") == [(KEY,)]
    write(other)
    one.drop_caches([KEY])
    one.shared.resumes = 0
    one.sync_once()
    assert names(other) == [f"/{SHA}/{KEY}.rkv"]
    assert not one.index.select("select * from pending")
    assert one.find_or_fetch_file(KEY, SHA).read_bytes() == b"cache"


def test_a_deleted_document_goes_everywhere(two):
    """Also from a server that fetched it, unless that server has an upload that needs it."""
    one, other = two
    made = one.add_upload("a.txt", "user_data", io.BytesIO(b"text"))
    write(one, sha256=made.sha256)
    assert other.find_or_fetch_file(KEY, made.sha256)
    os.utime(other.cache_path(KEY), (time.time() - 60,) * 2)
    own = other.add_upload("b.txt", "user_data", io.BytesIO(b"text"))
    assert one.delete_upload(made.id)
    one.sync_once()
    other.sync_once()
    assert names(one)[0].startswith("/deleted/") and len(names(one)) == 1 and other.has_cache(KEY)
    other.delete_upload(own.id)
    other.sync_once()
    assert (
        not other.has_cache(KEY)
        and not other.cache_path(KEY).exists()
        and other.find_or_fetch_file(KEY, made.sha256) is None
    )
    write(one, b"again", sha256=made.sha256)
    assert other.find_or_fetch_file(KEY, made.sha256).read_bytes() == b"again"
    other.sync_once()
    assert other.has_cache(KEY)


def shared_caches(store):
    return [name for name in names(store) if name.endswith(".rkv")]


def test_a_deletion_is_heeded_before_anything_is_pushed(two, monkeypatch):
    """Otherwise a cache that waited for the folder would return after its document was deleted."""
    one, other = two
    # The folder cannot be reached when the cache is written, so pushing it has to wait.
    with monkeypatch.context() as patch:
        patch.setattr(one.shared, "put_cache", lambda *_: None)
        write(one)
    assert one.index.select("select * from pending")
    other.shared.remove_document(SHA)
    one.sync_once()
    assert not shared_caches(one)
    assert not one.has_cache(KEY)
    assert not one.index.select("select * from pending")


def test_where_deletions_cannot_be_read_nothing_is_pushed(two, monkeypatch):
    one, other = two
    with monkeypatch.context() as patch:
        patch.setattr(one.shared, "put_cache", lambda *_: None)
        write(one)
    other.shared.remove_document(SHA)
    with monkeypatch.context() as patch:
        patch.setattr(one.shared, "list_removed", lambda: None)
        one.sync_once()
        assert not shared_caches(one)
    one.sync_once()
    assert not shared_caches(one)
    assert not one.has_cache(KEY)


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_a_push_that_races_a_deletion_is_undone(two, monkeypatch, when):
    one, other = two
    put = one.shared.put_cache

    def race(path, sha256, key):
        if when == "before the copy":
            other.shared.remove_document(sha256)
        is_done = put(path, sha256, key)
        if when == "after the copy":
            other.shared.remove_document(sha256)
        return is_done

    monkeypatch.setattr(one.shared, "put_cache", race)
    write(one)
    assert not shared_caches(one)
    assert not one.has_cache(KEY)
    # A third server that fetched the copy in between drops it as well.
    assert one.shared.list_removed()[SHA] <= time.time_ns()
    assert not one.index.select("select * from pending")


def test_a_deletion_that_races_a_push_removes_the_copy(two, monkeypatch):
    """The cache arrives while the folder of the document is being deleted."""
    one, other = two
    files = other.shared.files
    remove = files.rm
    calls = []

    def race(path, recursive=False):
        remove(path, recursive=recursive)
        calls.append(path)
        if len(calls) == 1:
            write(one, b"made meanwhile")

    write(one)
    monkeypatch.setattr(files, "rm", race)
    other.shared.remove_document(SHA)
    monkeypatch.undo()
    one.sync_once()
    assert not shared_caches(one)
    assert not one.has_cache(KEY)


def test_an_upload_keeps_its_cache_through_a_race(two, monkeypatch):
    """The other server deletes the document while this one uploads it: the cache stays, and is
    shared.
    """
    one, other = two
    put = one.shared.put_cache

    def race(path, sha256, key):
        other.shared.remove_document(sha256)
        return put(path, sha256, key)

    made = one.add_upload("a.txt", "user_data", io.BytesIO(b"text"))
    monkeypatch.setattr(one.shared, "put_cache", race)
    write(one, sha256=made.sha256)
    assert one.has_cache(KEY)
    assert shared_caches(one) == [f"/{made.sha256}/{KEY}.rkv"]


@pytest.mark.parametrize("when", ["during the copy", "after the copy"])
def test_a_copy_that_was_fetched_while_it_was_deleted_goes(two, monkeypatch, when):
    one, other = two
    write(one)
    get = other.shared.files.get_file

    def race(source, target):
        get(source, target)
        one.shared.remove_document(SHA)

    with monkeypatch.context() as patch:
        if when == "during the copy":
            patch.setattr(other.shared.files, "get_file", race)
        found = other.find_or_fetch_file(KEY, SHA)
    if when == "after the copy":
        assert found
        one.shared.remove_document(SHA)
        other.sync_once()
    else:
        assert found is None
    assert not other.has_cache(KEY)
    assert not other.cache_path(KEY).exists()


def test_a_disk_that_can_only_be_read_ends_nothing(two, monkeypatch):
    """A read-only disk ends neither the thread of the shared folder nor the work on a list of
    caches.
    """
    store, _ = two
    keys = [f"{number}" * 32 for number in range(2)]
    for key in keys:
        write(store, key=key)
    dropped = []
    store.on_drop = dropped.append

    def refuse(path, missing_ok=False):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        store.drop_caches(keys)
    assert dropped == keys and not any(map(store.has_cache, keys))


def test_the_thread_of_the_shared_folder_outlives_an_error(tmp_path, url, monkeypatch, caplog):
    calls = []

    def fail_once(store):
        calls.append(store)
        if len(calls) == 1:
            raise ValueError("unforeseen")

    monkeypatch.setattr(Store, "sync_once", fail_once)
    monkeypatch.setattr("restorekv.serve.store.SYNC_SECONDS", 0.01)
    store = Store(tmp_path / "own", MUCH, SharedFolder(url))
    deadline = time.monotonic() + 60
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    store.close()
    assert len(calls) >= 3 and "it will be retried" in caplog.text


def test_an_unreachable_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("x")
    for url in (f"file://{tmp_path}/file/below", "nothing://x"):
        with pytest.raises(
            RestoreKVError, match=r"Cannot use the shared folder .*; check its address"
        ):
            SharedFolder(url)
    with pytest.raises(RestoreKVError, match="ftp://host/x ") as caught:
        SharedFolder("ftp://me:secret@host/x")
    assert "secret" not in str(caught.value)


def test_the_command_refuses_it_before_a_model_is_loaded(tmp_path, capsys):
    given = [
        "--store",
        str(tmp_path / "store"),
        "--shared",
        "nothing://x",
        "--model",
        "no/such/model",
        "--port",
        "0",
    ]
    assert execute(["serve", *given]) == 1
    assert "Cannot use the shared folder nothing://x" in capsys.readouterr().err


def test_a_folder_that_fails_later_is_told_later(two, monkeypatch, caplog):
    """Meanwhile the local folder is used, and the log says why from time to time."""
    one, other = two
    files = type(one.shared.files)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "restorekv.serve"):
        for name in ("put_file", "info", "ls"):
            broken.setattr(
                files,
                name,
                lambda *_, **__: (_ for _ in ()).throw(TimeoutError("no route to host")),
            )
        write(one)
        assert (
            one.find_or_fetch_file(KEY, SHA).read_bytes() == b"cache"
            and other.find_or_fetch_file(KEY, SHA) is None
        )
        write(one, key="ee" * 16)
        assert [json.count("no route to host") for json in caplog.messages] == [1, 1]
    one.shared.resumes = other.shared.resumes = 0
    one.sync_once()
    assert other.find_or_fetch_file(KEY, SHA).read_bytes() == b"cache" and len(names(one)) == 2


def test_nothing_half_is_seen(tmp_path, monkeypatch):
    """A write that breaks off leaves no cache; what a killed server left is removed after a day."""
    shared = SharedFolder(f"file://{tmp_path}/shared")
    (tmp_path / "cache").write_bytes(b"whole")

    def half(self, source, target):
        with open(target, "wb") as file:
            file.write(b"wh")
        raise OSError("disk full")

    monkeypatch.setattr(type(shared.files), "put_file", half)
    assert shared.put_cache(tmp_path / "cache", SHA, KEY) is None
    assert not shared.files.find(shared.root)
    monkeypatch.undo()
    for age in (10, 2 * shared_module.HALF_WRITTEN):
        (
            tmp_path / "shared" / "tmp" / f"{time.time_ns() - age * 10**9}-dead-1-2-{KEY}"
        ).write_bytes(b"wh")
    SharedFolder(f"file://{tmp_path}/shared")
    assert len(list((tmp_path / "shared" / "tmp").iterdir())) == 1


def test_servers_that_start_together_remove_what_was_left_once(tmp_path, monkeypatch):
    shared = SharedFolder(f"file://{tmp_path}/shared")
    left = tmp_path / "shared" / "deleted" / f"{time.time_ns() - 31 * 86400 * 10**9}-{SHA}"
    left.write_bytes(b"")
    remove = type(shared.files).rm_file

    def remove_after_another(self, path):
        if path.endswith(left.name):
            left.unlink()
        remove(self, path)

    monkeypatch.setattr(type(shared.files), "rm_file", remove_after_another)
    SharedFolder(f"file://{tmp_path}/shared")
    assert not left.exists()


def test_damage_that_another_server_has_moved_pauses_nothing(two, caplog):
    one, other = two
    write(one, b"damaged")
    with caplog.at_level(logging.WARNING, "restorekv.serve"):
        for store in two:
            store.shared.set_aside(SHA, KEY)
        # As long as the folder is paused, nothing is found there.
        write(one, b"whole")
        assert other.find_or_fetch_file(KEY, SHA).read_bytes() == b"whole"
    assert not caplog.messages


@pytest.mark.parametrize("where", ["shared", "local", "both"])
def test_damage_is_set_aside_where_it_is(where, two, model, tiny_tokenizer):
    """A damaged local copy is fetched again; a damaged shared one is made again, for both."""
    one, other = (DocumentHolder(model, tiny_tokenizer, store) for store in two)
    variant = Variant.parse("tiny:snapkv-0.4", "tiny")
    made = one.make_document(SHA, variant, lambda: TEXT)
    key, shared = one.make_key(SHA, variant), other.store.shared
    assert not other.make_document(SHA, variant, lambda: TEXT).fresh and other.counts["loaded"] == 1
    other.held.clear()
    place = shared.cache_path(SHA, key)
    if where != "local":
        shared.files.pipe_file(place, shared.files.cat_file(place)[:-40])
    if where != "shared":
        other.store.cache_path(key).write_bytes(b"not a cache")
    else:
        other.store.drop_caches([key])
    again = other.make_document(SHA, variant, lambda: TEXT)
    assert again.fresh == (where != "local") == other.counts["compressed"]
    assert other.load_document(again).ask("Which code?", 8) == one.load_document(made).ask(
        "Which code?", 8
    )
    assert (f"/damaged/{key}.rkv" in names(other.store)) == (where != "local")
    assert shared.files.cat_file(place) == other.store.cache_path(key).read_bytes()
    assert len(list((other.store.folder / "damaged").iterdir())) == 1


def test_a_strangers_cache_is_checked(two, model, tiny_tokenizer):
    """A sound file of another model in the shared folder is not used."""
    caches = DocumentHolder(model, tiny_tokenizer, two[0])
    stranger = compress(
        build_model("llama"), tiny_tokenizer, TEXT, ratio=0.4, evictor="snapkv", adapter=None
    )
    variant = Variant.parse("tiny:snapkv-0.4", "tiny")
    stranger.save(path := two[0].folder / "stranger.rkv")
    assert two[0].shared.put_cache(path, SHA, caches.make_key(SHA, variant))
    assert caches.load_cache(caches.make_key(SHA, variant), SHA) is None
    assert caches.make_document(SHA, variant, lambda: TEXT).fresh
