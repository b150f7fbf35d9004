"""The server's documents in a folder: what was uploaded, and caches by content, with an index in SQLite.

A file is written whole before its row, and a row goes before its file, so that sudden death leaves at most files
without a row, which the next start removes. Caches are the least recently used first to go when the disk quota is full.
With a shared folder, what is written here is written there too, and what is missing here is fetched from there.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

from restorekv.errors import RestoreKVError
from restorekv.files import check_not_link, replacing
from restorekv.serve.documents import KINDS
from restorekv.serve.shared import Shared

SCHEMA = """
create table if not exists files (
    id text primary key, sha256 text not null, name text not null, purpose text not null, bytes integer not null,
    created integer not null, expires integer, status text not null, problem text not null default '');
create table if not exists caches (
    key text primary key, sha256 text not null, bytes integer not null, used real not null);
create table if not exists pending (sha256 text not null, key text not null, primary key (sha256, key));
"""  # pending is what the shared folder does not know yet: a new cache, or with an empty key, a document's deletion
PERIOD = 60.0  # seconds between two looks at the shared folder
UPLOADED, PROCESSED, FAILED = "uploaded", "processed", "error"
PIECE = 1 << 20  # bytes
OWN = re.compile(r"\.?(file-[0-9a-f]{24}|[0-9a-f]{32}\.rkv)(\..*\.tmp)?")  # names that this file makes


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
    """A folder with `files/` and `caches/`; `disk` bounds the bytes of caches. Threads may share it."""

    def __init__(self, folder: Path, disk: int, shared: Shared | None = None) -> None:
        self.folder, self.disk, self.shared, self.lock = folder, disk, shared, threading.RLock()
        self.fetched: set[str] = set()  # caches that came from the shared folder and were not yet found whole
        self.fetching = threading.Lock()
        self.telling, self.news, self.closed = threading.Lock(), threading.Event(), False
        self.on_drop: Callable[[str], object] = bool  # takes the key of every cache that goes
        self.on_delete: Callable[[str], object] = bool  # takes the SHA-256 of every content that no upload has
        if not (folder / "index.sqlite").exists() and any(map(is_own, folder.glob("files/*"))):
            raise RestoreKVError(f"The store {folder} has files and no index; move the whole folder away.")
        for name in ("files", "caches", "damaged"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for ending in ("", "-wal", "-shm"):
            check_not_link(folder / f"index.sqlite{ending}")
        try:
            self.rows = sqlite3.connect(folder / "index.sqlite", check_same_thread=False, isolation_level=None)
            self.rows.execute("pragma journal_mode = wal")
            self.rows.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RestoreKVError(
                f"The store {folder} has a damaged index ({error}); move the whole folder away."
            ) from None
        self.tidy()
        if shared:
            threading.Thread(target=self.keep_up, name="restorekv-shared", daemon=True).start()

    def tidy(self) -> None:
        """Removes files without a row and rows without a file, which sudden death leaves."""
        with self.lock:
            known = {row[0] for row in self.rows.execute("select id from files")}
            kept = {row[0] for row in self.rows.execute("select key from caches")}
            wanted = {self.file(name) for name in known} | {self.cache(key) for key in kept}
            for path in [*self.folder.glob("files/*"), *self.folder.glob("caches/*")]:
                if path not in wanted and is_own(path):
                    path.unlink(missing_ok=True)
            for name in known:
                if not self.file(name).exists():
                    self.rows.execute("delete from files where id = ?", (name,))
            for key in kept:
                if not self.cache(key).exists():
                    self.rows.execute("delete from caches where key = ?", (key,))

    def file(self, name: str) -> Path:
        return self.folder / "files" / name

    def cache(self, key: str) -> Path:
        return self.folder / "caches" / f"{key}.rkv"

    def add(self, name: str, purpose: str, content: BinaryIO, seconds: int | None = None) -> Upload:
        """Stores an upload, a piece at a time; it expires after so many seconds, if given.

        Its SHA-256 is that of its content, behind how the content is read, where it is not as plain text.
        """
        own, created, size = f"file-{secrets.token_hex(12)}", int(time.time()), 0
        digest = hashlib.sha256(({".rkv": "rkv"} | KINDS).get(PurePath(name).suffix.lower(), "").encode())
        with replacing(self.file(own), follow=False) as temporary, temporary.open("wb") as file:
            while piece := content.read(PIECE):
                digest.update(piece)
                size += file.write(piece)
        made = Upload(
            own, digest.hexdigest(), name, purpose, size, created, seconds and created + seconds, UPLOADED, ""
        )
        try:
            with self.lock:
                self.rows.execute(f"insert into files values ({', '.join('?' * 9)})", tuple(vars(made).values()))
        except sqlite3.Error:
            self.file(own).unlink()
            raise
        return made

    def get(self, name: str) -> Upload | None:
        """Returns an upload that has not expired."""
        with self.lock:
            self.expire()
            row = self.rows.execute("select * from files where id = ?", (name,)).fetchone()
        return Upload(*row) if row else None

    def list(self) -> list[Upload]:
        """Returns all uploads, the newest first."""
        with self.lock:
            self.expire()
            return [Upload(*row) for row in self.rows.execute("select * from files order by created desc, rowid desc")]

    def content(self, name: str) -> bytes:
        """Returns what was uploaded."""
        try:
            return self.file(name).read_bytes()
        except FileNotFoundError:
            raise RestoreKVError(f"{name} was deleted while it was read; upload it again.") from None

    def settle(self, upload: Upload, status: str, problem: str = "") -> None:
        """Records how processing an upload ended; of one that was deleted meanwhile, no cache stays."""
        with self.lock:
            change = "update files set status = ?, problem = ? where id = ?"
            self.rows.execute(change, (status, problem, upload.id))
            self.is_here(upload)

    def is_here(self, upload: Upload) -> bool:
        """Returns whether an upload was not deleted; of one that was, no cache stays."""
        with self.lock:
            here = self.rows.execute("select 1 from files where id = ?", (upload.id,)).fetchone()
            if not here:
                self.drop_unused(upload.sha256)
            return bool(here)

    def delete(self, name: str) -> bool:
        """Removes an upload, and the caches that only it needs; returns whether it was there."""
        with self.lock:
            row = self.rows.execute("select sha256 from files where id = ?", (name,)).fetchone()
            if not row:
                return False
            self.rows.execute("delete from files where id = ?", (name,))
            self.file(name).unlink(missing_ok=True)
            self.drop_unused(row[0])
            return True

    def drop_unused(self, sha256: str) -> None:
        """Removes the caches of a content that no upload has, here and in the shared folder."""
        if not self.rows.execute("select 1 from files where sha256 = ?", (sha256,)).fetchone():
            for (key,) in self.rows.execute("select key from caches where sha256 = ?", (sha256,)).fetchall():
                self.drop(key)
            self.on_delete(sha256)
            if self.shared:
                self.rows.execute("delete from pending where sha256 = ?", (sha256,))
                self.rows.execute("insert into pending values (?, '')", (sha256,))
                self.news.set()

    def expire(self) -> None:
        now = int(time.time())
        for (name,) in self.rows.execute("select id from files where expires <= ?", (now,)).fetchall():
            self.delete(name)

    @contextmanager
    def writing(self, key: str, sha256: str) -> Iterator[Path]:
        """Gives the block a path for a cache, which is known once the block has ended."""
        yield self.cache(key)
        self.keep(key, sha256)
        if self.shared:
            with self.lock:
                self.rows.execute("delete from pending where sha256 = ? and key = ''", (sha256,))
                self.rows.execute("insert or ignore into pending values (?, ?)", (sha256, key))
            self.tell(sha256, key)

    def keep(self, key: str, sha256: str) -> None:
        """Takes a cache that was written into the index."""
        size = self.cache(key).stat().st_size
        with self.lock:
            self.rows.execute("insert or replace into caches values (?, ?, ?, ?)", (key, sha256, size, time.time()))
            self.make_room(key)

    def has(self, key: str) -> bool:
        """Returns whether a cache is here, whatever the shared folder has."""
        with self.lock:
            return bool(self.rows.execute("select 1 from caches where key = ?", (key,)).fetchone())

    def find(self, key: str, sha256: str) -> Path | None:
        """Returns the file of a cache, which may have to be fetched."""
        return self.here(key) or (self.here(key) if self.fetch(key, sha256) else None)

    def here(self, key: str) -> Path | None:
        """Returns the file of a cache that is here, and notes that it was used."""
        with self.lock:
            if not self.rows.execute("update caches set used = ? where key = ?", (time.time(), key)).rowcount:
                return None
            return self.cache(key)

    def fetch(self, key: str, sha256: str) -> bool:
        """Copies a cache from the shared folder, if it has one that is not here yet; returns whether it is here."""
        with self.fetching:
            if not self.has(key) and self.shared and self.shared.get(sha256, key, self.cache(key), self.disk):
                self.keep(key, sha256)
                self.fetched.add(key)
            return self.has(key)

    def set_aside(self, key: str, sha256: str) -> None:
        """Moves a damaged cache away, where it was fetched from as well; it is made again when it is needed."""
        with self.lock:
            self.rows.execute("delete from caches where key = ?", (key,))
            if self.cache(key).exists():
                self.cache(key).replace(self.folder / "damaged" / f"{key}.rkv")
        if key in self.fetched:
            self.fetched.discard(key)
            self.shared.set_aside(sha256, key)

    def make_room(self, newest: str) -> None:
        """Drops the caches that were used least recently, until the quota holds; never the newest."""
        total = self.rows.execute("select coalesce(sum(bytes), 0) from caches").fetchone()[0]
        for key, size in self.rows.execute("select key, bytes from caches order by used").fetchall():
            if total <= self.disk or key == newest:
                continue
            self.drop(key)
            total -= size

    def drop(self, key: str) -> None:
        self.rows.execute("delete from caches where key = ?", (key,))
        self.cache(key).unlink(missing_ok=True)
        self.on_drop(key)

    def tell(self, sha256: str, key: str) -> None:
        """Tells the shared folder what is pending, unless that has been settled meanwhile."""
        with self.telling:
            with self.lock:
                row = "from pending where sha256 = ? and key = ?", (sha256, key)
                if self.closed or not self.rows.execute(f"select 1 {row[0]}", row[1]).fetchone():
                    return
            gone = key and not self.cache(key).exists()
            if gone or (self.shared.put(self.cache(key), sha256, key) if key else self.shared.remove(sha256)):
                with self.lock:
                    if not self.closed:
                        self.rows.execute(f"delete {row[0]}", row[1])

    def keep_up(self) -> None:
        """Runs in a thread: looks at the shared folder now and then."""
        while not self.closed:
            self.catch_up()
            self.news.wait(PERIOD)
            self.news.clear()

    def catch_up(self) -> None:
        """Tells the shared folder what it could not be told, and drops what was deleted there, unless it is ours."""
        with self.lock:
            pending = [] if self.closed else self.rows.execute("select * from pending").fetchall()
        for sha256, key in pending:
            self.tell(sha256, key)
        removed = self.shared.removed() or {}
        with self.lock:
            if self.closed:
                return
            own = {row[0] for row in self.rows.execute("select sha256 from files")}
            for key, sha256 in self.rows.execute("select key, sha256 from caches").fetchall():
                gone = sha256 in removed and sha256 not in own
                if gone and self.cache(key).exists() and self.cache(key).stat().st_mtime_ns < removed[sha256]:
                    self.drop(key)
                    self.on_delete(sha256)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.news.set()
            self.rows.close()


def is_own(path: Path) -> bool:
    """Returns whether a file has a name that the store gives; the folder may hold a user's own files, too."""
    return bool(OWN.fullmatch(path.name))
