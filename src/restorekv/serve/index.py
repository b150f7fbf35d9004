"""The index of a store: rows in SQLite on disk, and a copy in memory that serves all reads.

So reading does not need the disk, and a change that may wait is written once the disk takes it
again. What a client was promised is durable: it is on disk before it is in memory.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from restorekv.errors import RestoreKVError, make_printable

VERSION = 2  # of what the rows mean
RESERVE = 1 << 16  # bytes
# `pending` has what the shared folder does not know yet: new caches and, as rows with an empty key,
# deleted documents. `reserve` keeps the journal large; see `open_writable`.
SCHEMA = """
create table if not exists files (
    id text primary key, sha256 text not null, name text not null, purpose text not null,
    bytes integer not null, created integer not null, expires integer, status text not null,
    problem text not null default '');
create table if not exists caches (
    key text primary key, sha256 text not null, bytes integer not null, used real not null);
create table if not exists pending (
    sha256 text not null, key text not null, primary key (sha256, key));
create table if not exists reserve (id integer primary key, filler blob not null);
"""
TABLES = {"files", "caches", "pending"}
Statement = tuple[str, Sequence[Any]]  # SQL and its parameters

# What rows may hold. Ids, keys and hashes become names of files that are read and removed, so a
# forged one could lead out of the store.
FILE = r"file-[0-9a-f]{24}"
KEY = r"[0-9a-f]{32}"
SHA256 = r"[0-9a-f]{64}"
Status = Literal["uploaded", "processed", "error"]
UPLOADED: Status = "uploaded"
PROCESSED: Status = "processed"
FAILED: Status = "error"
Hash = Annotated[str, Field(pattern=f"^{SHA256}$")]
STRICT = ConfigDict(strict=True)  # a row has the types that the store writes; fields are columns


@dataclass(frozen=True, config=STRICT)
class Upload:
    """A file that a client sent; times are in seconds since 1970."""

    id: Annotated[str, Field(pattern=f"^{FILE}$")]
    sha256: Hash
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int | None
    status: Status
    problem: str


@dataclass(frozen=True, config=STRICT)
class CacheRow:
    """A cache on disk, and when it was used last."""

    key: Annotated[str, Field(pattern=f"^{KEY}$")]
    sha256: Hash
    bytes: int
    used: int | float


@dataclass(frozen=True, config=STRICT)
class PendingRow:
    """A change that the shared folder does not know yet."""

    sha256: Hash
    key: Annotated[str, Field(pattern=f"^({KEY})?$")]


ROWS: dict[str, Any] = {"files": Upload, "caches": CacheRow, "pending": PendingRow}


class Index:
    """The rows of the file `path`; callers hold a lock around every call.

    If the disk cannot be written, the rows can only be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.deferred: list[Statement] = []  # changes that are in memory and not yet on disk
        # Times of last use that are not yet on disk, by key.
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
                f"The store {path.parent} has a damaged index ({error}); move the whole folder "
                "away."
            ) from None
        try:
            self._check_rows()
        except BaseException:
            self.close_disk()
            raise

    def _check_rows(self) -> None:
        """Refuse rows that no server wrote, before any of them names a file."""
        for table, kind in ROWS.items():
            columns = [column.name for column in fields(kind)]
            for row in self.memory.execute(f"select {', '.join(columns)} from {table}"):
                try:
                    kind(**dict(zip(columns, row, strict=True)))
                except ValidationError as error:
                    column = error.errors()[0]["loc"][0]
                    raise _make_foreign_error(
                        self.path, f"a row with a {column} other than the store gives"
                    ) from None

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        """Return the rows of a query."""
        return self.memory.execute(sql, parameters).fetchall()

    def apply(self, *statements: Statement, deferrable: bool = False) -> None:
        """Execute all the statements or none.

        Args:
            statements: What to change.
            deferrable: Whether the disk may take them later, so that this never fails because of
                it.

        Raises:
            sqlite3.Error: The disk does not take them.
        """
        if not deferrable:
            self.write_to_disk(statements)
        self.memory.execute("begin")
        try:
            for sql, parameters in statements:
                self.memory.execute(sql, parameters)
        except BaseException:
            self.memory.execute("rollback")
            raise
        self.memory.execute("commit")
        if deferrable:
            self.deferred += statements
            with suppress(sqlite3.Error):
                self.write_to_disk(())

    def touch(self, key: str, used: float) -> bool:
        """Note when a cache was used, in memory alone until the next change.

        Returns:
            Whether there is such a cache.
        """
        change = "update caches set used = ? where key = ?"
        is_known = self.memory.execute(change, (used, key)).rowcount > 0
        if is_known:
            self.touched[key] = used
        return is_known

    def write_to_disk(self, statements: Sequence[Statement]) -> None:
        """Write what waits, then the statements, in one transaction."""
        if self.disk is None:
            self.disk = open_writable(self.path)
        changes = list(self.deferred)
        for key, used in self.touched.items():
            changes.append(("update caches set used = ? where key = ?", (used, key)))
        changes.extend(statements)
        try:
            self.disk.execute("begin immediate")
            for sql, parameters in changes:
                self.disk.execute(sql, parameters)
            self.disk.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):
                if self.disk.in_transaction:
                    self.disk.execute("rollback")
            raise
        self.deferred.clear()
        self.touched.clear()

    def close(self) -> None:
        """Write what waits, if the disk takes it, and close the index."""
        with suppress(sqlite3.Error):
            if self.deferred or self.touched:
                self.write_to_disk(())
        self.close_disk()
        self.memory.close()

    def close_disk(self) -> None:
        """Close the file."""
        if self.disk:
            self.disk.close()
        self.disk = None


def check_schema(path: Path, disk: sqlite3.Connection) -> set[str]:
    """Return the names of the tables; refuse a different version, and anything but our tables.

    Triggers, views and computed columns would run their author's code with every change.
    """
    version = disk.execute("pragma user_version").fetchone()[0]
    if version > VERSION:
        raise RestoreKVError(
            f"The store {path.parent} was made by a newer version of restorekv; update this one, "
            "or choose a different folder with --store."
        )
    own = {_normalize(statement) for statement in SCHEMA.split(";")}
    names = set()
    for kind, name, sql in disk.execute("select type, name, sql from sqlite_master"):
        is_index_of_key = kind == "index" and sql is None
        if not is_index_of_key and (kind != "table" or _normalize(str(sql)) not in own):
            raise _make_foreign_error(path, f"the {kind} {make_printable(name)}")
        names.add(name)
    if names & TABLES and version != VERSION:
        raise RestoreKVError(
            f"The store {path.parent} has version {version}, this restorekv reads {VERSION}; "
            "choose a different folder with --store."
        )
    return names


def _normalize(sql: str) -> str:
    """Return a statement without what may differ between two that make the same table."""
    sql = re.sub(r"\s+", "", sql.lower())
    return sql.replace("createtableifnotexists", "createtable").strip(";")


def _make_foreign_error(path: Path, what: str) -> RestoreKVError:
    return RestoreKVError(
        f"The index of the store {path.parent} has {what}, and no server wrote it; move it away."
    )


def open_writable(path: Path) -> sqlite3.Connection:
    """Return a connection that can write; raise sqlite3.Error.

    The rollback journal stays on disk between transactions, at the size that a change of RESERVE
    bytes needs. A small change, such as a deletion, overwrites it and the pages of the index, and
    so needs no further space. Only one process uses a store, so the index stays locked; then SQLite
    needs no file of shared memory either.
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
        # This change gives the journal its size.
        disk.execute("update reserve set filler = randomblob(?)", (RESERVE,))
    except BaseException:
        disk.close()
        raise
    return disk


def load_read_only(path: Path, memory: sqlite3.Connection, problem: sqlite3.Error) -> None:
    """Copy the rows of an index that cannot be written.

    Args:
        path: The file of the index.
        memory: Where the rows go.
        problem: Why it cannot be written.

    Raises:
        RestoreKVError: It cannot be read either.
    """
    # The second try, immutable, needs neither a lock nor a log next to the file.
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        if problem.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            break  # another process holds the index
        with suppress(sqlite3.Error):
            disk = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=1)
            try:
                disk.execute("pragma locking_mode = exclusive")
                disk.execute("pragma temp_store = memory")
                check_schema(path, disk)
                for table in TABLES:
                    # Raises an error immediately; `backup` would retry forever.
                    disk.execute(f"select 1 from {table} limit 1")
                disk.backup(memory)
                return
            finally:
                disk.close()
    raise RestoreKVError(
        f"The index of the store {path.parent} cannot be opened ({problem}); free some space, make "
        "the folder writable, end other servers there, or choose a different folder with --store."
    ) from None
