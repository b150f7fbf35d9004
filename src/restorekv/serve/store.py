"""The server's documents in a folder: uploads, and caches by content, with an index in SQLite.

A file is written whole before its row, and a row is deleted before its file. So a crash leaves at
worst files without a row, which the next start removes. When the disk quota is full, the caches
used least recently are dropped. With a shared folder, what is written here is written there too,
and what is missing here is fetched from there.

On a full disk, everything but uploads and new caches works: reading writes nothing. A deletion uses
the index's own reserve of space. If even that fails, it removes the file first, and the next start
removes the row.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO

from restorekv.errors import RestoreKVError
from restorekv.files import check_not_link, read_bytes, replace_file
from restorekv.readers.extract import find_kind
from restorekv.serve.document_checks import start_document_hash
from restorekv.serve.index import FILE, KEY, PROCESSED, UPLOADED, Index, Status, Upload
from restorekv.serve.shared import SharedFolder

LOG = logging.getLogger("restorekv.serve")
FOLDERS = ("files", "caches", "damaged")
ORIGIN = "origin"  # the file that says what uploads were compressed with
SYNC_SECONDS = 60.0  # between two checks of the shared folder
# SQL condition of an upload; its parameter is the time now.
NOT_EXPIRED = "(expires is null or expires > ?)"
CHUNK_BYTES = 1 << 20  # of an upload, read at a time
# Names of files that this module makes.
OWN_NAME = re.compile(rf"\.?({FILE}|{KEY}\.rkv)(\..*\.tmp)?")


class Store:
    """A folder with `files/` and `caches/`, which threads may share.

    Args:
        folder: Where it is.
        disk_quota: Bytes that caches may take; beyond it the least recently used ones are dropped.
        shared: A folder of caches that several servers use.
    """

    def __init__(self, folder: Path, disk_quota: int, shared: SharedFolder | None = None) -> None:
        self.folder = folder
        self.disk_quota = disk_quota
        self.shared = shared
        self.lock = threading.RLock()  # of the index
        # Keys of caches that were fetched from the shared folder and not yet checked. If one of
        # them is damaged, the copy there is damaged too.
        self.unverified: set[str] = set()
        self.fetching_lock = threading.Lock()
        self.pushing_lock = threading.Lock()
        # Set when `pending` has a row for the thread that serves the shared folder.
        self.has_pending = threading.Event()
        self.closed = False
        # Takes the key of every cache that is dropped.
        self.on_drop: Callable[[str], object] = lambda _: None
        # Takes the SHA-256 of every content that no upload has any more.
        self.on_delete: Callable[[str], object] = lambda _: None

        _prepare_folder(folder)
        self.index = Index(folder / "index.sqlite")
        try:
            self._remove_links()
            self._remove_orphans()
        except BaseException:
            # The caller gets no object, so it cannot close the index.
            self.index.close()
            raise
        if shared:
            threading.Thread(target=self.sync_loop, name="restorekv-shared", daemon=True).start()

    def _remove_links(self) -> None:
        """Remove what has a name of ours and is not a regular file.

        The target of a link would be read and served as an upload.
        """
        for path in self._list_files():
            if _is_own(path) and not stat.S_ISREG(path.lstat().st_mode):
                with suppress(OSError):  # a folder, or a disk that can only be read
                    path.unlink()
                if os.path.lexists(path):
                    raise RestoreKVError(f"{path} is not a regular file; remove it.")

    def _remove_orphans(self) -> None:
        """Remove files without a row and rows without a file, which a crash leaves."""
        with self.lock:
            uploads = [row[0] for row in self.index.select("select id from files")]
            keys = [row[0] for row in self.index.select("select key from caches")]
            wanted = {self.upload_path(upload_id) for upload_id in uploads}
            wanted |= {self.cache_path(key) for key in keys}
            for path in self._list_files():
                # A crash between file and row left it: no client has this id.
                if path not in wanted and _is_own(path):
                    with suppress(OSError):  # such as of a disk that can only be read
                        path.unlink(missing_ok=True)
            for upload_id in uploads:
                if not self.upload_path(upload_id).exists():
                    self.delete_upload(upload_id)
            for key in keys:
                if not self.cache_path(key).exists():
                    self.index.apply(("delete from caches where key = ?", (key,)), deferrable=True)

    def _list_files(self) -> list[Path]:
        return [*self.folder.glob("files/*"), *self.folder.glob("caches/*")]

    def upload_path(self, upload_id: str) -> Path:
        """Return where an upload's file is."""
        return self.folder / "files" / upload_id

    def cache_path(self, key: str) -> Path:
        """Return where the cache with a key is."""
        return self.folder / "caches" / f"{key}.rkv"

    def check_writable(self) -> None:
        """Raise OSError if the folder can only be read."""
        for name in ("files", "caches"):
            if not os.access(self.folder / name, os.W_OK):
                number = errno.EROFS if _is_read_only(self.folder) else errno.EACCES
                raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Close the index. What the shared folder does not know yet is pushed after the next
        start.
        """
        with self.lock:
            self.closed = True
            # Wakes the thread, which then sees that the store is closed.
            self.has_pending.set()
            self.index.close()

    # Uploads.

    def add_upload(
        self, name: str, purpose: str, content: BinaryIO, lifetime: int | None = None
    ) -> Upload:
        """Store an upload, a chunk at a time.

        Args:
            name: The client's name for it, whose ending says how it is read.
            purpose: Whatever the client gave.
            content: What is stored.
            lifetime: Seconds after which it expires; None is never.

        Raises:
            OSError, sqlite3.Error, RestoreKVError: The disk does not take it.
        """
        self.check_writable()
        upload_id = f"file-{secrets.token_hex(12)}"
        path = self.upload_path(upload_id)
        created = int(time.time())
        size = 0
        # The same bytes read as HTML and as text are two documents.
        digest = start_document_hash(find_kind(name))
        with replace_file(path, follow=False) as temporary, temporary.open("wb") as file:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
                size += file.write(chunk)
        expires = None
        if lifetime is not None:
            expires = created + lifetime
        upload = Upload(
            id=upload_id,
            sha256=digest.hexdigest(),
            name=name,
            purpose=purpose,
            bytes=size,
            created=created,
            expires=expires,
            status=UPLOADED,
            problem="",
        )
        row = astuple(upload)
        placeholders = ", ".join("?" * len(row))
        try:
            with self.lock:
                self.index.apply((f"insert into files values ({placeholders})", row))
        except sqlite3.Error:
            # Without a row the client gets an error, and the file would be an orphan.
            path.unlink()
            raise
        return upload

    def get_upload(self, upload_id: str) -> Upload | None:
        """Return an upload that has not expired."""
        with self.lock:
            self._delete_expired()
            rows = self.index.select(
                f"select * from files where id = ? and {NOT_EXPIRED}", (upload_id, int(time.time()))
            )
        return Upload(*rows[0]) if rows else None

    def list_uploads(self) -> list[Upload]:
        """Return all uploads, the newest first."""
        with self.lock:
            self._delete_expired()
            order = "order by created desc, rowid desc"
            rows = self.index.select(
                f"select * from files where {NOT_EXPIRED} {order}", (int(time.time()),)
            )
        return [Upload(*row) for row in rows]

    def find_processed_duplicate(self, upload: Upload) -> Upload | None:
        """Return another upload of the same content that was processed."""
        with self.lock:
            rows = self.index.select(
                "select * from files where sha256 = ? and id != ? and status = ?",
                (upload.sha256, upload.id, PROCESSED),
            )
        return Upload(*rows[0]) if rows else None

    def read_upload(self, upload: Upload) -> bytes:
        """Return the content of an upload.

        Raises:
            RestoreKVError: It was deleted meanwhile, or the file is not what was uploaded.
        """
        path = self.upload_path(upload.id)
        try:
            content = read_bytes(path, f"The upload {upload.id}", limit=sys.maxsize, follow=False)
        except RestoreKVError:
            if path.exists():
                raise
            raise RestoreKVError(
                f"{upload.id} was deleted while it was read; upload it again."
            ) from None
        digest = start_document_hash(find_kind(upload.name))
        digest.update(content)
        # Its caches are named by this hash: a cache of other bytes would answer for every upload
        # of the right ones.
        if digest.hexdigest() != upload.sha256:
            raise RestoreKVError(
                f"{upload.name} is damaged on the server's disk; delete {upload.id}, and upload "
                "it again."
            )
        return content

    def set_status(self, upload: Upload, status: Status, problem: str = "") -> None:
        """Record how processing an upload ended.

        If the upload was deleted meanwhile, its caches are removed.
        """
        with self.lock:
            change = "update files set status = ?, problem = ? where id = ?"
            self.index.apply((change, (status, problem, upload.id)), deferrable=True)
            self.drop_caches_if_deleted(upload)

    def read_origin(self) -> str:
        """Return the origin that `write_origin` wrote, or ""."""
        path = self.folder / ORIGIN
        try:
            return read_bytes(path, str(path), follow=False).decode(errors="replace")
        except RestoreKVError:
            return ""

    def write_origin(self, origin: str) -> None:
        """Record what the statuses of uploads refer to, if the disk takes it."""
        path = self.folder / ORIGIN
        with suppress(OSError, RestoreKVError), replace_file(path, follow=False) as temporary:
            temporary.write_text(origin)

    def drop_caches_if_deleted(self, upload: Upload) -> bool:
        """Remove the caches of an upload that was deleted; return whether it was."""
        with self.lock:
            if self.index.select("select 1 from files where id = ?", (upload.id,)):
                return False
            self._drop_unused_caches(upload.sha256)
            return True

    def delete_upload(self, upload_id: str) -> bool:
        """Remove an upload, and the caches that only it needs; return whether it was there.

        Raises:
            OSError: The disk can only be read.
        """
        with self.lock:
            rows = self.index.select("select sha256 from files where id = ?", (upload_id,))
            if not rows:
                return False
            change = ("delete from files where id = ?", (upload_id,))
            path = self.upload_path(upload_id)
            try:
                self.index.apply(change)
            except sqlite3.Error:
                # The disk has no room even for this, so the file goes first. If the row is still
                # on disk at the next start, `_remove_orphans` deletes the upload again.
                path.unlink(missing_ok=True)
                self.index.apply(change, deferrable=True)
            path.unlink(missing_ok=True)
            self._drop_unused_caches(rows[0][0])
            return True

    def _drop_unused_caches(self, sha256: str) -> None:
        """Remove the caches of a content that no upload has, here and in the shared folder."""
        if self.index.select("select 1 from files where sha256 = ?", (sha256,)):
            return
        rows = self.index.select("select key from caches where sha256 = ?", (sha256,))
        self.drop_caches([row[0] for row in rows])
        self.on_delete(sha256)
        if self.shared:
            self.index.apply(
                ("delete from pending where sha256 = ?", (sha256,)),
                ("insert into pending values (?, '')", (sha256,)),
                deferrable=True,
            )
            self.has_pending.set()

    def _delete_expired(self) -> None:
        """Delete the uploads that have expired. If the disk refuses a deletion, queries still hide
        the upload.
        """
        now = int(time.time())
        for (upload_id,) in self.index.select("select id from files where expires <= ?", (now,)):
            with suppress(OSError):
                self.delete_upload(upload_id)

    # Caches.

    @contextmanager
    def write_cache_file(self, key: str, sha256: str) -> Iterator[Path]:
        """Yield the path to write a cache to, and index the cache when the block ends without an
        error.
        """
        made = time.time_ns()
        # If the block fails there is no row, and the next start removes the file.
        yield self.cache_path(key)
        self._index_cache(key, sha256, made)
        if self.shared:
            with self.lock:
                self.index.apply(
                    ("delete from pending where sha256 = ? and key = ''", (sha256,)),
                    ("insert or ignore into pending values (?, ?)", (sha256, key)),
                    deferrable=True,
                )
            self._push_pending(self.shared, sha256, key)

    def has_cache(self, key: str) -> bool:
        """Return whether a cache is here, whatever the shared folder has."""
        with self.lock:
            return bool(self.index.select("select 1 from caches where key = ?", (key,)))

    def note_use(self, key: str) -> bool:
        """Note that a cache was used, so that the quota drops others first; return whether its
        file is here.
        """
        with self.lock:
            return self.index.touch(key, time.time())

    def find_cache_file(self, key: str) -> Path | None:
        """Return the file of a cache that is here, and note that it was used."""
        return self.cache_path(key) if self.note_use(key) else None

    def find_or_fetch_file(self, key: str, sha256: str) -> Path | None:
        """Return the file of a cache, which may have to be fetched from the shared folder."""
        path = self.find_cache_file(key)
        if path is None and self.fetch_if_missing(key, sha256):
            path = self.find_cache_file(key)
        return path

    def fetch_if_missing(self, key: str, sha256: str) -> bool:
        """Copy a cache from the shared folder, if it has one that is not here yet.

        Returns:
            Whether the cache is here.
        """
        # One at a time: of two threads that want one cache, the second finds it here.
        with self.fetching_lock:
            if self.shared and not self.has_cache(key):
                path = self.cache_path(key)
                # What is deleted there from now on is deleted here, too.
                started = time.time_ns()
                if self.shared.get_cache(sha256, key, path, self.disk_quota):
                    self._index_cache(key, sha256, started)
                    self.unverified.add(key)
            return self.has_cache(key)

    def mark_verified(self, key: str) -> None:
        """Note that a cache was read and is sound, and so is its copy in the shared folder."""
        self.unverified.discard(key)

    def quarantine_cache(self, key: str, sha256: str) -> None:
        """Move a damaged cache to `damaged/`, and in the shared folder too if it was fetched from
        there.

        The next request computes it again.
        """
        with self.lock:
            self.index.apply(("delete from caches where key = ?", (key,)), deferrable=True)
            path = self.cache_path(key)
            if path.exists():
                # If the disk can only be read, the file stays, but is no longer in the index.
                with suppress(OSError):
                    path.replace(self.folder / "damaged" / f"{key}.rkv")
        # A cache that was made here was pushed before it was damaged, so only a fetched one is
        # damaged in the shared folder too.
        if self.shared and key in self.unverified:
            self.unverified.discard(key)
            self.shared.set_aside(sha256, key)

    def drop_caches(self, keys: Iterable[str]) -> None:
        """Remove caches. The caller holds the lock."""
        keys = list(keys)
        if keys:
            changes = [("delete from caches where key = ?", (key,)) for key in keys]
            self.index.apply(*changes, deferrable=True)
        for key in keys:
            # A cache that is made again under this key was not fetched.
            self.unverified.discard(key)
            # A disk that can only be read keeps the file; the next start removes it.
            with suppress(OSError):
                self.cache_path(key).unlink(missing_ok=True)
            self.on_drop(key)

    def _enforce_quota(self, newest: str) -> None:
        """Drop the caches used least recently until the quota holds, but never the newest. The
        caller holds the lock.
        """
        total = self.index.select("select coalesce(sum(bytes), 0) from caches")[0][0]
        for key, size in self.index.select("select key, bytes from caches order by used"):
            if total <= self.disk_quota:
                break
            # It stays even if it alone is larger than the quota, because it is being used.
            if key == newest:
                continue
            self.drop_caches([key])
            total -= size

    def _index_cache(self, key: str, sha256: str, made: int) -> None:
        """Add a cache that was written to the index.

        Args:
            key: Its key.
            sha256: The hash of its document.
            made: When it was begun, in nanoseconds. A later deletion in the shared folder applies
                to this cache.
        """
        path = self.cache_path(key)
        # Set here, because file systems take their times from a different, coarser clock.
        with suppress(OSError):
            os.utime(path, ns=(made, made))
        size = path.stat().st_size
        with self.lock:
            row = (key, sha256, size, time.time())
            self.index.apply(
                ("insert or replace into caches values (?, ?, ?, ?)", row), deferrable=True
            )
            self._enforce_quota(key)

    # The shared folder. Every change that it must learn of is a row of `pending` until it has been
    # pushed, so that none is lost if the folder cannot be reached or the server ends. A row with an
    # empty key is a deleted document.

    def _push_pending(self, shared: SharedFolder, sha256: str, key: str) -> None:
        """Push a new cache, or the deletion of a document if `key` is empty.

        Does nothing if the row is not pending any more.
        """
        row = (sha256, key)
        # Pushing takes long, so the index is not locked meanwhile.
        with self.pushing_lock:
            with self.lock:
                select = "select 1 from pending where sha256 = ? and key = ?"
                if self.closed or not self.index.select(select, row):
                    return
            if not key:
                is_done = shared.remove_document(sha256)
            elif self.cache_path(key).exists():
                is_done = self._push_cache(shared, sha256, key)
            else:
                is_done = self._remove_copy_if_deleted(shared, sha256, key)
            if is_done:
                with self.lock:
                    if not self.closed:
                        delete = "delete from pending where sha256 = ? and key = ?"
                        self.index.apply((delete, row), deferrable=True)

    def _push_cache(self, shared: SharedFolder, sha256: str, key: str) -> bool | None:
        """Copy a cache to the shared folder. If its document was deleted there meanwhile, delete
        the copy again, and the cache here.

        Returns:
            Whether that is done; None if the folder cannot be reached.
        """
        if not shared.put_cache(self.cache_path(key), sha256, key):
            return None
        removed = shared.list_removed()
        if removed is None:
            return None
        with self.lock:
            is_removed = not self.closed and self._was_removed(key, sha256, removed)
        if not is_removed:
            return True
        # This leaves a new note of the deletion, so that servers that fetched the copy drop it.
        if not shared.remove_document(sha256):
            return None
        with self.lock:
            if not self.closed:
                self.drop_caches([key])
                self.on_delete(sha256)
        return True

    def _remove_copy_if_deleted(self, shared: SharedFolder, sha256: str, key: str) -> bool | None:
        """Remove the copy that a failed push may have left of a cache that is gone, if its document
        was deleted.

        If the quota dropped the cache, the copy stays: it is whole, and may be another server's.

        Returns:
            Whether that is done; None if the folder cannot be reached.
        """
        removed = shared.list_removed()
        if removed is None:
            return None
        return True if sha256 not in removed else shared.remove_cache(sha256, key)

    def _was_removed(self, key: str, sha256: str, removed: Mapping[str, int]) -> bool:
        """Return whether a deletion in the shared folder applies to a cache here. The caller holds
        the lock.

        Args:
            key: The key of the cache.
            sha256: The hash of its document.
            removed: What `SharedFolder.list_removed` returned.
        """
        if sha256 not in removed:
            return False
        # A document that was deleted elsewhere and uploaded here stays.
        if self.index.select("select 1 from files where sha256 = ?", (sha256,)):
            return False
        # A cache that was made after the deletion stays.
        path = self.cache_path(key)
        return path.exists() and path.stat().st_mtime_ns < removed[sha256]

    def sync_loop(self) -> None:
        """Run `sync_once` every SYNC_SECONDS, and immediately when there is something to push. Runs
        in a thread.
        """
        while not self.closed:
            # This thread is the only one that serves the shared folder, so it must not end.
            try:
                self.sync_once()
            except Exception:
                LOG.exception("Syncing with the shared folder failed; it will be retried.")
            self.has_pending.wait(SYNC_SECONDS)
            self.has_pending.clear()

    def sync_once(self) -> None:
        """Drop the caches of documents that were deleted there, unless an upload here has the
        document. Then push what is pending.
        """
        shared = self.shared
        if shared is None:
            return
        removed = shared.list_removed()
        # Without knowing what was deleted, a push could bring a deleted cache back.
        if removed is None:
            return
        with self.lock:
            if self.closed:
                return
            for key, sha256 in self.index.select("select key, sha256 from caches"):
                if self._was_removed(key, sha256, removed):
                    self.drop_caches([key])
                    self.on_delete(sha256)
            pending = self.index.select("select * from pending")
        for sha256, key in pending:
            self._push_pending(shared, sha256, key)


def _prepare_folder(folder: Path) -> None:
    """Make the folders of a store; refuse one that is not safe to use."""
    # If a folder were a link, files of others would be deleted there as orphans.
    for name in FOLDERS:
        check_not_link(folder / name)
    has_index = (folder / "index.sqlite").exists()
    # Without an index all these files would be taken for orphans and removed.
    if not has_index and any(_is_own(path) for path in folder.glob("files/*")):
        raise RestoreKVError(
            f"The store {folder} has files and no index; move the whole folder away."
        )
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for ending in ("", "-journal", "-wal", "-shm"):
        check_not_link(folder / f"index.sqlite{ending}")


def _is_own(path: Path) -> bool:
    """Return whether a name is one that the store gives; users' own files may be in the folder."""
    return bool(OWN_NAME.fullmatch(path.name))


def _is_read_only(folder: Path) -> bool:
    """Return whether the file system of a folder is mounted read-only."""
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
