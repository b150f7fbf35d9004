"""The server's documents in a folder: what was uploaded, and caches by content, with an index in
SQLite.

A file is written whole before its row, and a row goes before its file, so that sudden death leaves
at most files without a row, which the next start removes. Caches are the least recently used first
to go when the disk quota is full. With a shared folder, what is written here is written there too,
and what is missing here is fetched from there.

On a full disk, everything but uploads and new caches works: reading writes nothing, and a deletion
goes through the index's own reserve, or else removes the file first, whose row the next start
removes.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from restorekv.errors import RestoreKVError
from restorekv.files import check_not_link, read_bytes, replace_file
from restorekv.readers.extract import find_kind
from restorekv.serve.documents import document_hash
from restorekv.serve.index import FILE, KEY, UPLOADED, Index
from restorekv.serve.shared import SharedFolder

LOG = logging.getLogger("restorekv.serve")
FOLDERS = ("files", "caches", "damaged")
PERIOD = 60.0  # seconds between two looks at the shared folder
FRESH = "(expires is null or expires > ?)"  # of an upload, with the time now
PIECE = 1 << 20  # bytes
OWN = re.compile(rf"\.?({FILE}|{KEY}\.rkv)(\..*\.tmp)?")  # names that this file makes


@dataclass(frozen=True)
class Upload:
    """A file as the index knows it; times are in seconds since 1970."""

    id: str
    sha256: str
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int | None
    status: str
    problem: str


class Store:
    """A folder with `files/` and `caches/`; `disk` bounds the bytes of caches. Threads may share
    it.
    """

    def __init__(self, folder: Path, disk: int, shared: SharedFolder | None = None) -> None:
        self.folder = folder
        self.disk = disk
        self.shared = shared
        self.lock = threading.RLock()
        # Caches that came from the shared folder and were not yet found whole.
        self.fetched: set[str] = set()
        self.fetching = threading.Lock()
        self.telling = threading.Lock()
        self.news = threading.Event()
        self.closed = False
        self.on_drop: Callable[[str], object] = bool  # takes the key of every cache that goes
        # Takes the SHA-256 of every content that no upload has.
        self.on_delete: Callable[[str], object] = bool
        for name in FOLDERS:
            check_not_link(folder / name)
        if not (folder / "index.sqlite").exists() and any(map(is_own, folder.glob("files/*"))):
            raise RestoreKVError(
                f"The store {folder} has files and no index; move the whole folder away."
            )
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for ending in ("", "-journal", "-wal", "-shm"):
            check_not_link(folder / f"index.sqlite{ending}")
        self.index = Index(folder / "index.sqlite")
        try:
            self.remove_links()
            self.tidy()
        except BaseException:
            self.index.close()
            raise
        if shared:
            threading.Thread(target=self.keep_up, name="restorekv-shared", daemon=True).start()

    def remove_links(self) -> None:
        """Removes what has a name of ours and is no regular file: a link would be read, and served,
        as an upload.
        """
        for path in [*self.folder.glob("files/*"), *self.folder.glob("caches/*")]:
            if is_own(path) and not stat.S_ISREG(path.lstat().st_mode):
                with suppress(OSError):  # a folder, or a disk that can only be read
                    path.unlink()
                if os.path.lexists(path):
                    raise RestoreKVError(f"{path} is not a regular file; remove it.")

    def tidy(self) -> None:
        """Removes files without a row and rows without a file, which sudden death leaves."""
        with self.lock:
            known = {row[0] for row in self.index.read("select id from files")}
            kept = {row[0] for row in self.index.read("select key from caches")}
            wanted = {self.file(name) for name in known} | {self.cache(key) for key in kept}
            for path in [*self.folder.glob("files/*"), *self.folder.glob("caches/*")]:
                if path not in wanted and is_own(path):
                    with suppress(OSError):  # such as of a disk that can only be read
                        path.unlink(missing_ok=True)
            for name in known:
                if not self.file(name).exists():
                    self.delete(name)
            for key in kept:
                if not self.cache(key).exists():
                    self.index.change(("delete from caches where key = ?", (key,)), late=True)

    def file(self, name: str) -> Path:
        return self.folder / "files" / name

    def cache(self, key: str) -> Path:
        return self.folder / "caches" / f"{key}.rkv"

    def check_writable(self) -> None:
        """Raises OSError where the folder can only be read."""
        for name in ("files", "caches"):
            if not os.access(self.folder / name, os.W_OK):
                number = errno.EROFS if is_read_only(self.folder) else errno.EACCES
                raise OSError(number, os.strerror(number))

    def add(self, name: str, purpose: str, content: BinaryIO, seconds: int | None = None) -> Upload:
        """Stores an upload, a piece at a time; it expires after so many seconds, if given.

        Raises OSError, sqlite3.Error or RestoreKVError where the disk does not take it.
        """
        self.check_writable()
        own = f"file-{secrets.token_hex(12)}"
        created = int(time.time())
        size = 0
        digest = document_hash(find_kind(name))
        with replace_file(self.file(own), follow=False) as temporary, temporary.open("wb") as file:
            while piece := content.read(PIECE):
                digest.update(piece)
                size += file.write(piece)
        made = Upload(
            own,
            digest.hexdigest(),
            name,
            purpose,
            size,
            created,
            seconds and created + seconds,
            UPLOADED,
            "",
        )
        try:
            with self.lock:
                self.index.change(
                    (f"insert into files values ({', '.join('?' * 9)})", tuple(vars(made).values()))
                )
        except sqlite3.Error:
            self.file(own).unlink()
            raise
        return made

    def get(self, name: str) -> Upload | None:
        """Returns an upload that has not expired."""
        with self.lock:
            self.expire()
            rows = self.index.read(
                f"select * from files where id = ? and {FRESH}", (name, int(time.time()))
            )
        return Upload(*rows[0]) if rows else None

    def list(self) -> list[Upload]:
        """Returns all uploads, the newest first."""
        with self.lock:
            self.expire()
            order = "order by created desc, rowid desc"
            rows = self.index.read(
                f"select * from files where {FRESH} {order}", (int(time.time()),)
            )
        return [Upload(*row) for row in rows]

    def content(self, name: str) -> bytes:
        """Returns what was uploaded."""
        try:
            return read_bytes(
                self.file(name), f"The upload {name}", limit=sys.maxsize, follow=False
            )
        except RestoreKVError:
            if self.file(name).exists():
                raise
            raise RestoreKVError(
                f"{name} was deleted while it was read; upload it again."
            ) from None

    def settle(self, upload: Upload, status: str, problem: str = "") -> None:
        """Records how processing an upload ended; of one that was deleted meanwhile, no cache
        stays.
        """
        with self.lock:
            change = "update files set status = ?, problem = ? where id = ?"
            self.index.change((change, (status, problem, upload.id)), late=True)
            self.is_here(upload)

    def is_here(self, upload: Upload) -> bool:
        """Returns whether an upload was not deleted; of one that was, no cache stays."""
        with self.lock:
            here = self.index.read("select 1 from files where id = ?", (upload.id,))
            if not here:
                self.drop_unused(upload.sha256)
            return bool(here)

    def delete(self, name: str) -> bool:
        """Removes an upload, and the caches that only it needs; returns whether it was there.

        Raises OSError where the disk can only be read.
        """
        with self.lock:
            rows = self.index.read("select sha256 from files where id = ?", (name,))
            if not rows:
                return False
            change = "delete from files where id = ?", (name,)
            try:
                self.index.change(change)
            except sqlite3.Error:
                # The disk has no room even for this, so that the file goes first. If the row is
                # still on disk at the next start, `tidy` deletes the upload again.
                self.file(name).unlink(missing_ok=True)
                self.index.change(change, late=True)
            self.file(name).unlink(missing_ok=True)
            self.drop_unused(rows[0][0])
            return True

    def drop_unused(self, sha256: str) -> None:
        """Removes the caches of a content that no upload has, here and in the shared folder."""
        if self.index.read("select 1 from files where sha256 = ?", (sha256,)):
            return
        self.drop(
            *(
                row[0]
                for row in self.index.read("select key from caches where sha256 = ?", (sha256,))
            )
        )
        self.on_delete(sha256)
        if self.shared:
            forget = "delete from pending where sha256 = ?", (sha256,)
            self.index.change(forget, ("insert into pending values (?, '')", (sha256,)), late=True)
            self.news.set()

    def expire(self) -> None:
        """Deletes the uploads whose time is over; one that the disk keeps is hidden all the same."""
        now = int(time.time())
        for (name,) in self.index.read("select id from files where expires <= ?", (now,)):
            with suppress(OSError):
                self.delete(name)

    @contextmanager
    def writing(self, key: str, sha256: str) -> Iterator[Path]:
        """Gives the block a path for a cache, which is known once the block has ended."""
        yield self.cache(key)
        self.keep(key, sha256)
        if self.shared:
            with self.lock:
                settled = "delete from pending where sha256 = ? and key = ''", (sha256,)
                self.index.change(
                    settled,
                    ("insert or ignore into pending values (?, ?)", (sha256, key)),
                    late=True,
                )
            self.tell(sha256, key)

    def keep(self, key: str, sha256: str) -> None:
        """Takes a cache that was written into the index."""
        size = self.cache(key).stat().st_size
        with self.lock:
            row = key, sha256, size, time.time()
            self.index.change(("insert or replace into caches values (?, ?, ?, ?)", row), late=True)
            self.make_room(key)

    def has(self, key: str) -> bool:
        """Returns whether a cache is here, whatever the shared folder has."""
        with self.lock:
            return bool(self.index.read("select 1 from caches where key = ?", (key,)))

    def find(self, key: str, sha256: str) -> Path | None:
        """Returns the file of a cache, which may have to be fetched."""
        return self.here(key) or (self.here(key) if self.fetch(key, sha256) else None)

    def here(self, key: str) -> Path | None:
        """Returns the file of a cache that is here, and notes that it was used."""
        with self.lock:
            return self.cache(key) if self.index.touch(key, time.time()) else None

    def fetch(self, key: str, sha256: str) -> bool:
        """Copies a cache from the shared folder, if it has one that is not here yet; returns
        whether it is here.
        """
        with self.fetching:
            if (
                not self.has(key)
                and self.shared
                and self.shared.get(sha256, key, self.cache(key), self.disk)
            ):
                self.keep(key, sha256)
                self.fetched.add(key)
            return self.has(key)

    def set_aside(self, key: str, sha256: str) -> None:
        """Moves a damaged cache away, where it was fetched from as well; it is made again when it
        is needed.
        """
        with self.lock:
            self.index.change(("delete from caches where key = ?", (key,)), late=True)
            if self.cache(key).exists():
                # A disk that can only be read; the file is not in the index any more.
                with suppress(OSError):
                    self.cache(key).replace(self.folder / "damaged" / f"{key}.rkv")
        if key in self.fetched:
            self.fetched.discard(key)
            self.shared.set_aside(sha256, key)

    def make_room(self, newest: str) -> None:
        """Drops the caches that were used least recently, until the quota holds; never the newest."""
        total = self.index.read("select coalesce(sum(bytes), 0) from caches")[0][0]
        for key, size in self.index.read("select key, bytes from caches order by used"):
            if total <= self.disk or key == newest:
                continue
            self.drop(key)
            total -= size

    def drop(self, *keys: str) -> None:
        """Removes caches."""
        if keys:
            self.index.change(
                *(("delete from caches where key = ?", (key,)) for key in keys), late=True
            )
        for key in keys:
            self.cache(key).unlink(missing_ok=True)
            self.on_drop(key)

    def tell(self, sha256: str, key: str) -> None:
        """Tells the shared folder what is pending, unless that has been settled meanwhile."""
        with self.telling:
            with self.lock:
                row = "from pending where sha256 = ? and key = ?", (sha256, key)
                if self.closed or not self.index.read(f"select 1 {row[0]}", row[1]):
                    return
            gone = key and not self.cache(key).exists()
            if gone or (
                self.shared.put(self.cache(key), sha256, key) if key else self.shared.remove(sha256)
            ):
                with self.lock:
                    if not self.closed:
                        self.index.change((f"delete {row[0]}", row[1]), late=True)

    def keep_up(self) -> None:
        """Runs in a thread: looks at the shared folder now and then."""
        while not self.closed:
            self.catch_up()
            self.news.wait(PERIOD)
            self.news.clear()

    def catch_up(self) -> None:
        """Tells the shared folder what it could not be told, and drops what was deleted there,
        unless it is ours.
        """
        with self.lock:
            pending = [] if self.closed else self.index.read("select * from pending")
        for sha256, key in pending:
            self.tell(sha256, key)
        removed = self.shared.removed() or {}
        with self.lock:
            if self.closed:
                return
            own = {row[0] for row in self.index.read("select sha256 from files")}
            for key, sha256 in self.index.read("select key, sha256 from caches"):
                gone = sha256 in removed and sha256 not in own
                if (
                    gone
                    and self.cache(key).exists()
                    and self.cache(key).stat().st_mtime_ns < removed[sha256]
                ):
                    self.drop(key)
                    self.on_delete(sha256)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.news.set()
            self.index.close()


def is_own(path: Path) -> bool:
    """Returns whether a file has a name that the store gives; the folder may hold a user's own
    files, too.
    """
    return bool(OWN.fullmatch(path.name))


def is_read_only(folder: Path) -> bool:
    """Returns whether the file system of a folder is mounted read-only."""
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
