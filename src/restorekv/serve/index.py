"""The index of a store: rows in SQLite on disk, and a copy of them in memory, from which everything
is read.

Reading therefore needs no disk, and a change that may wait is written once the disk takes it again.
What a client was promised is durable: it is on disk before it is in memory.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from restorekv.errors import RestoreKVError, make_printable

VERSION = 2  # of what the rows mean
RESERVE = 1 << 16  # bytes
# Pending is what the shared folder does not know yet: a new cache, or with an empty key, the
# deletion of a document.
SCHEMA = """
create table if not exists files (
    id text primary key, sha256 text not null, name text not null, purpose text not null, bytes integer not null,
    created integer not null, expires integer, status text not null, problem text not null default '');
create table if not exists caches (
    key text primary key, sha256 text not null, bytes integer not null, used real not null);
create table if not exists pending (sha256 text not null, key text not null, primary key (sha256, key));
create table if not exists reserve (id integer primary key, filler blob not null);
"""
TABLES = {"files", "caches", "pending"}
Statement = tuple[str, Sequence[Any]]  # SQL and its parameters

# What rows may hold. Ids, keys and hashes become names of files, which are read and removed: a
# stranger's would lead out of the store.
FILE = r"file-[0-9a-f]{24}"
KEY = r"[0-9a-f]{32}"
SHA256 = r"[0-9a-f]{64}"
UPLOADED = "uploaded"
PROCESSED = "processed"
FAILED = "error"


class Row(BaseModel):
    """A row as the store writes it; its fields are the columns."""

    model_config = ConfigDict(strict=True)


class FileRow(Row):
    """An upload; times are in seconds since 1970."""

    id: str = Field(pattern=f"^{FILE}$")
    sha256: str = Field(pattern=f"^{SHA256}$")
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int | None
    status: Literal["uploaded", "processed", "error"]
    problem: str


class CacheRow(Row):
    """A cache on disk, and when it was used last."""

    key: str = Field(pattern=f"^{KEY}$")
    sha256: str = Field(pattern=f"^{SHA256}$")
    bytes: int
    used: int | float


class PendingRow(Row):
    """A change that the shared folder does not know yet."""

    sha256: str = Field(pattern=f"^{SHA256}$")
    key: str = Field(pattern=f"^({KEY})?$")


ROWS: dict[str, type[Row]] = {"files": FileRow, "caches": CacheRow, "pending": PendingRow}


class Index:
    """The rows of the file `path`; callers hold a lock of their own around every call.

    Where the disk cannot be written, the rows are read alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.late: list[Statement] = []  # changes that are in memory and not yet on disk
        # When caches were used last, where that is not yet on disk.
        self.touched: dict[str, float] = {}
        self.memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.disk: sqlite3.Connection | None = None  # None while it cannot be written
        try:
            self.disk = open_writable(path)
            self.disk.backup(self.memory)
        except sqlite3.OperationalError as error:
            self.close_disk()
            load_read_only(path, self.memory, error)
        except sqlite3.DatabaseError as error:
            self.close_disk()
            raise RestoreKVError(
                f"The store {path.parent} has a damaged index ({error}); move the whole folder away."
            ) from None
        try:
            self.check_rows()
        except BaseException:
            self.close_disk()
            raise

    def check_rows(self) -> None:
        """Refuses rows that no server wrote, before any of them names a file."""
        for table, kind in ROWS.items():
            columns = list(kind.model_fields)
            for row in self.memory.execute(f"select {', '.join(columns)} from {table}"):
                try:
                    kind.model_validate(dict(zip(columns, row, strict=True)))
                except ValidationError as error:
                    column = error.errors()[0]["loc"][0]
                    raise foreign(
                        self.path, f"a row with another {column} than the store gives"
                    ) from None

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        """Returns the rows of a query."""
        return self.memory.execute(sql, parameters).fetchall()

    def change(self, *statements: Statement, late: bool = False) -> None:
        """Executes all the statements or none; raises sqlite3.Error where the disk does not take
        them.

        Args:
            statements: SQL with its parameters.
            late: whether the disk may take them later, so that this never fails for the disk's sake.
        """
        if not late:
            self.write(statements)
        self.memory.execute("begin")
        try:
            for sql, parameters in statements:
                self.memory.execute(sql, parameters)
        except BaseException:
            self.memory.execute("rollback")
            raise
        self.memory.execute("commit")
        if late:
            self.late += statements
            with suppress(sqlite3.Error):
                self.write(())

    def touch(self, key: str, used: float) -> bool:
        """Notes when a cache was used, in memory alone until the next change; returns whether there
        is such a row.
        """
        found = self.memory.execute(
            "update caches set used = ? where key = ?", (used, key)
        ).rowcount
        if found:
            self.touched[key] = used
        return bool(found)

    def write(self, statements: Sequence[Statement]) -> None:
        """Writes what waits, then the statements, in one transaction on disk."""
        self.disk = self.disk or open_writable(self.path)
        touched = [
            ("update caches set used = ? where key = ?", (used, key))
            for key, used in self.touched.items()
        ]
        try:
            self.disk.execute("begin immediate")
            for sql, parameters in [*self.late, *touched, *statements]:
                self.disk.execute(sql, parameters)
            self.disk.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):
                if self.disk.in_transaction:
                    self.disk.execute("rollback")
            raise
        self.late.clear()
        self.touched.clear()

    def close(self) -> None:
        """Writes what waits, where that is possible."""
        with suppress(sqlite3.Error):
            if self.late or self.touched:
                self.write(())
        self.close_disk()
        self.memory.close()

    def close_disk(self) -> None:
        if self.disk:
            self.disk.close()
        self.disk = None


def check_schema(path: Path, disk: sqlite3.Connection) -> set[str]:
    """Returns the names of the tables; refuses another version, and triggers, views and tables of
    other columns.

    They would compute whatever their author liked with every change.
    """
    version = disk.execute("pragma user_version").fetchone()[0]
    if version > VERSION:
        raise RestoreKVError(
            f"The store {path.parent} was made by a newer version of restorekv; update this one, or choose another "
            "folder with --store."
        )
    own = {plain(statement) for statement in SCHEMA.split(";")}
    names = set()
    for kind, name, sql in disk.execute("select type, name, sql from sqlite_master"):
        of_a_key = kind == "index" and sql is None
        if not of_a_key and (kind != "table" or plain(str(sql)) not in own):
            raise foreign(path, f"the {kind} {make_printable(name)}")
        names.add(name)
    if names & TABLES and version != VERSION:
        raise RestoreKVError(
            f"The store {path.parent} has version {version}, this restorekv reads {VERSION}; choose another folder "
            "with --store."
        )
    return names


def plain(sql: str) -> str:
    """Returns a statement that makes a table, without what may differ between two that make the
    same.
    """
    return (
        re.sub(r"\s+", "", sql.lower()).replace("createtableifnotexists", "createtable").strip(";")
    )


def foreign(path: Path, what: str) -> RestoreKVError:
    return RestoreKVError(
        f"The index of the store {path.parent} has {what}, and no server wrote it; move it away."
    )


def open_writable(path: Path) -> sqlite3.Connection:
    """Returns a connection that can write; raises sqlite3.Error.

    The rollback journal stays on disk between transactions, at the size that a change of RESERVE
    bytes needs. A small change, such as a deletion, overwrites it and the pages of the index, and
    so needs no further space. One process uses a store, so the index stays locked, which needs no
    file of shared memory either.
    """
    disk = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=1)
    try:
        disk.execute("pragma locking_mode = exclusive")
        disk.execute("pragma temp_store = memory")
        disk.execute("pragma journal_mode = persist")
        disk.execute("begin immediate")
        if not check_schema(path, disk) & TABLES:
            disk.execute(f"pragma user_version = {VERSION}")
        for statement in SCHEMA.split(";"):
            disk.execute(statement)
        disk.execute("insert or replace into reserve values (1, randomblob(?))", (RESERVE,))
        disk.execute("commit")
        # The journal gets its size.
        disk.execute("update reserve set filler = randomblob(?)", (RESERVE,))
    except BaseException:
        disk.close()
        raise
    return disk


def load_read_only(path: Path, memory: sqlite3.Connection, problem: sqlite3.Error) -> None:
    """Copies the rows of an index that cannot be written; `problem` says why not. Raises
    RestoreKVError.
    """
    # Immutable: without a lock and without a log beside it.
    for how in ("mode=ro", "mode=ro&immutable=1"):
        if problem.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            break  # another process holds the index
        with suppress(sqlite3.Error):
            disk = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=1)
            try:
                disk.execute("pragma locking_mode = exclusive")
                disk.execute("pragma temp_store = memory")
                check_schema(path, disk)
                for table in TABLES:
                    # Raises at once what `backup` would try for ever.
                    disk.execute(f"select 1 from {table} limit 1")
                disk.backup(memory)
                return
            finally:
                disk.close()
    raise RestoreKVError(
        f"The index of the store {path.parent} cannot be opened ({problem}); free some space, make the folder "
        "writable, end other servers there, or choose another folder with --store."
    ) from None
