"""Outcomes of self-tests on disk, in the user's cache folder, so that the next process need not run
them again.

A file is named by a hash of its key, which says what the outcome holds for. It is data: a small
JSON object with a checksum, which only this user can have written. A file that is damaged, of
another key or writable by others counts for nothing, and the self-test runs again. If nothing can
be written, outcomes last as long as the process.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from restorekv.errors import RestoreKVError
from restorekv.files import (
    HOST,
    find_cache_folder,
    is_process_alive,
    matches_type,
    open_with_size,
    parse_json,
    replace_file,
)

FORMAT = "restorekv-self-test-1"
LIMIT = 1 << 16  # bytes of a file
# Below the user's cache folder.
FOLDER = "self-tests"
# What `load_self_test` returns for a self-test that began in a process that is gone, and never
# ended: it may have crashed the process, and would again.
DIED = object()


def locate_self_test(key: Mapping[str, object]) -> Path | None:
    """Return the file of a key, or None without a cache folder."""
    root = find_cache_folder()
    if root is None:
        return None
    return root / FOLDER / f"{digest_record(key)[:32]}.json"


def load_self_test(key: Mapping[str, object], kind: type) -> object | None:
    """Return the outcome of a key as a `kind`, DIED, or None if no file can be trusted."""
    path = locate_self_test(key)
    record = None if path is None else _load_record(path)
    # The name of the file is only a short hash, so the whole key is compared too.
    if record is None or record["key"] != key:
        return None
    self_test = record["self_test"]
    if self_test is None:  # the mark of one that has begun
        return DIED if _has_died(record["process"]) else None
    # A file is data: its fields must be those of the class, with their types.
    hints = get_type_hints(kind)
    if set(self_test) != set(hints):
        return None
    for name, hint in hints.items():
        if not matches_type(self_test[name], hint):
            return None
    return kind(**self_test)


def save_self_test(key: Mapping[str, object], self_test: Any) -> None:
    """Keep an outcome, if files can be written."""
    _save_record(key, asdict(self_test))


@contextmanager
def mark_self_test(key: Mapping[str, object]) -> Iterator[None]:
    """Mark on disk that a self-test has begun.

    The mark is removed when the block ends, and stays if the process dies.
    """
    _save_record(key, None)
    try:
        yield
    finally:
        path = locate_self_test(key)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _load_record(path: Path) -> dict | None:
    """Return what a file holds, or None if it is damaged or anybody else may have written it."""
    try:
        with open_with_size(path, str(path)) as (file, size):
            if size > LIMIT or not _is_private(os.fstat(file.fileno())):
                return None
            record = parse_json(file.read(LIMIT), str(path), LIMIT)
    except RestoreKVError:
        return None
    wanted = {"format": str, "key": dict, "self_test": dict | None, "process": str, "sum": str}
    if not isinstance(record, dict) or set(record) != set(wanted):
        return None
    for name, kind in wanted.items():
        if not isinstance(record[name], kind):
            return None
    # The checksum is that of everything else in the record.
    if record["format"] != FORMAT or record.pop("sum") != digest_record(record):
        return None
    return record


def _save_record(key: Mapping[str, object], self_test: Mapping[str, object] | None) -> None:
    """Write a file that only this user can change, or nothing."""
    path = locate_self_test(key)
    if path is None:
        return
    record = {
        "format": FORMAT,
        "key": dict(key),
        "self_test": self_test,
        "process": f"{HOST}-{os.getpid()}",
    }
    text = json.dumps({**record, "sum": digest_record(record)}, indent=1)
    # An outcome that cannot be kept is found again by the next process, which only takes time.
    with suppress(OSError, RestoreKVError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        with replace_file(path) as temporary:
            # Created with these permissions from the start, and never through a link.
            descriptor = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0),
                0o600,
            )
            with open(descriptor, "w", encoding="utf-8") as file:
                if hasattr(os, "fchmod"):
                    os.fchmod(descriptor, 0o600)  # whatever the file was before
                file.write(text)


def _has_died(process: str) -> bool:
    """Return whether a process of this machine, HOST-ID, is gone."""
    # A process of another machine may share this folder, and cannot be asked.
    host, _, number = process.rpartition("-")
    return host == HOST and number.isdecimal() and not is_process_alive(int(number))


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user, and nobody else may write it."""
    if os.name != "posix":
        return True  # Windows has no such modes
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def digest_record(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a record."""
    return hashlib.sha256(_to_canonical_json(record)).hexdigest()


def _to_canonical_json(value: Mapping[str, object]) -> bytes:
    """Return JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
