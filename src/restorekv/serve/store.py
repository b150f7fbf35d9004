"""The server's documents in a folder: what was uploaded, and caches by content, with an index in SQLite.

A file is written whole before its row, and a row goes before its file, so that sudden death leaves at most files
without a row, which the next start removes. Caches are the least recently used first to go when the disk quota is full.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.files import replacing

SCHEMA = """
create table if not exists files (
    id text primary key, sha256 text not null, name text not null, purpose text not null, bytes integer not null,
    created integer not null, expires integer, status text not null, problem text not null default '');
create table if not exists caches (
    key text primary key, sha256 text not null, bytes integer not null, used real not null);
"""
UPLOADED, PROCESSED, FAILED = "uploaded", "processed", "error"


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

    def __init__(self, folder: Path, disk: int) -> None:
        self.folder, self.disk, self.lock = folder, disk, threading.RLock()
        self.on_drop: Callable[[str], object] = bool  # takes the key of every cache that goes
        for name in ("files", "caches", "damaged"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            self.rows = sqlite3.connect(folder / "index.sqlite", check_same_thread=False, isolation_level=None)
            self.rows.execute("pragma journal_mode = wal")
            self.rows.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RestoreKVError(f"The store {folder} has a damaged index ({error}); move it away.") from None
        self.tidy()

    def tidy(self) -> None:
        """Removes files without a row and rows without a file, which sudden death leaves."""
        with self.lock:
            known = {row[0] for row in self.rows.execute("select id from files")}
            kept = {row[0] for row in self.rows.execute("select key from caches")}
            for path in (self.folder / "files").iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)
            for path in (self.folder / "caches").iterdir():
                if path.stem not in kept or path.suffix != ".rkv":
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

    def add(self, name: str, purpose: str, content: bytes, seconds: int | None = None) -> Upload:
        """Stores an upload, which expires after so many seconds, if given."""
        created, digest = int(time.time()), hashlib.sha256(content).hexdigest()
        made = Upload(f"file-{secrets.token_hex(12)}", digest, name, purpose, len(content), created,
                      seconds and created + seconds, UPLOADED, "")  # fmt: skip
        with replacing(self.file(made.id)) as temporary:
            temporary.write_bytes(content)
        with self.lock:
            self.rows.execute("insert into files values (?, ?, ?, ?, ?, ?, ?, ?, ?)", tuple(vars(made).values()))
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
        return self.file(name).read_bytes()

    def settle(self, name: str, status: str, problem: str = "") -> None:
        """Records how processing an upload ended."""
        with self.lock:
            self.rows.execute("update files set status = ?, problem = ? where id = ?", (status, problem, name))

    def delete(self, name: str) -> bool:
        """Removes an upload, and the caches that only it needs; returns whether it was there."""
        with self.lock:
            row = self.rows.execute("select sha256 from files where id = ?", (name,)).fetchone()
            if not row:
                return False
            self.rows.execute("delete from files where id = ?", (name,))
            self.file(name).unlink(missing_ok=True)
            if not self.rows.execute("select 1 from files where sha256 = ?", row).fetchone():
                for (key,) in self.rows.execute("select key from caches where sha256 = ?", row).fetchall():
                    self.drop(key)
            return True

    def expire(self) -> None:
        now = int(time.time())
        for (name,) in self.rows.execute("select id from files where expires <= ?", (now,)).fetchall():
            self.delete(name)

    @contextmanager
    def writing(self, key: str, sha256: str) -> Iterator[Path]:
        """Gives the block a path for a cache, which is known once the block has ended."""
        yield self.cache(key)
        size = self.cache(key).stat().st_size
        with self.lock:
            self.rows.execute("insert or replace into caches values (?, ?, ?, ?)", (key, sha256, size, time.time()))
            self.make_room(key)

    def find(self, key: str) -> Path | None:
        """Returns the file of a cache, and notes that it was used."""
        with self.lock:
            done = self.rows.execute("update caches set used = ? where key = ?", (time.time(), key))
            return self.cache(key) if done.rowcount else None

    def set_aside(self, key: str, error: CacheFileError) -> None:
        """Moves a damaged cache away; it is made again when it is needed."""
        with self.lock:
            self.rows.execute("delete from caches where key = ?", (key,))
            if self.cache(key).exists():
                self.cache(key).replace(self.folder / "damaged" / f"{key}.rkv")

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

    def close(self) -> None:
        with self.lock:
            self.rows.close()
