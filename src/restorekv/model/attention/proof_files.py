"""Proofs on disk, in the user's cache folder: what a check found, so that the next process need not
check again.

A file is named by a hash of its key, which says what the proof holds for. It is data: a small JSON
object with a checksum, which only this user can have written. One that is damaged, of another key
or writable by others counts for nothing, and the check is done again. Where nothing can be written,
proofs last as long as the process.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

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

# bytes
FORMAT = "restorekv-proof-1"
LIMIT = 1 << 16
FOLDER = "proofs"
DIED = object()  # a check that began in a process that is gone, and never ended


def locate_proof(key: Mapping[str, object]) -> Path | None:
    """Returns the file of a key, or None without a cache folder."""
    root = find_cache_folder()
    return (
        root and root / FOLDER / f"{hashlib.sha256(_to_canonical_json(key)).hexdigest()[:32]}.json"
    )


def load_proof(key: Mapping[str, object], kind: type) -> object | None:
    """Returns the proof of a key as a `kind`, DIED, or None if there is none that can be trusted."""
    path = locate_proof(key)
    record = path and _load_record(path)
    if not record or record["key"] != key:
        return None
    if record["proof"] is None:
        return DIED if _has_died(record["process"]) else None
    proof = record["proof"]
    hints = get_type_hints(kind)
    if set(proof) != set(hints) or not all(
        matches_type(proof[name], hint) for name, hint in hints.items()
    ):
        return None
    return kind(**proof)


def save_proof(key: Mapping[str, object], proof: object) -> None:
    """Keeps a proof, where files can be written."""
    _save_record(key, asdict(proof))


@contextmanager
def mark_check(key: Mapping[str, object]) -> Iterator[None]:
    """Keeps a mark that a check has begun, until the block ends in any way but the end of the
    process.
    """
    _save_record(key, None)
    try:
        yield
    finally:
        path = locate_proof(key)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _load_record(path: Path) -> dict | None:
    """Returns what a file holds, or None if it is damaged or anybody else may have written it."""
    try:
        with open_with_size(path, str(path)) as (file, size):
            if size > LIMIT or not _is_private(os.fstat(file.fileno())):
                return None
            record = parse_json(file.read(LIMIT), str(path), LIMIT)
    except RestoreKVError:
        return None
    wanted = {"format": str, "key": dict, "proof": dict | None, "process": str, "sum": str}
    if not isinstance(record, dict) or set(record) != set(wanted):
        return None
    if (
        not all(isinstance(record[name], kind) for name, kind in wanted.items())
        or record["format"] != FORMAT
    ):
        return None
    return record if record.pop("sum") == digest_record(record) else None


def _save_record(key: Mapping[str, object], proof: Mapping[str, object] | None) -> None:
    """Writes a file that only this user can change, or nothing."""
    path = locate_proof(key)
    if path is None:
        return
    record = {
        "format": FORMAT,
        "key": dict(key),
        "proof": proof,
        "process": f"{HOST}-{os.getpid()}",
    }
    text = json.dumps({**record, "sum": digest_record(record)}, indent=1)
    with suppress(OSError, RestoreKVError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        with replace_file(path) as temporary:
            descriptor = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0),
                0o600,
            )
            with open(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o600) if hasattr(os, "fchmod") else None
                file.write(text)


def _has_died(process: str) -> bool:
    """Returns whether a process of this machine, HOST-ID, is gone."""
    host, _, number = process.rpartition("-")
    return host == HOST and number.isdecimal() and not is_process_alive(int(number))


def _is_private(status: os.stat_result) -> bool:
    """Returns whether a file belongs to this user, and nobody else may write it; Windows has no
    such modes.
    """
    if os.name != "posix":
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def digest_record(record: Mapping[str, object]) -> str:
    """Returns the SHA-256 of a record."""
    return hashlib.sha256(_to_canonical_json(record)).hexdigest()


def _to_canonical_json(value: Mapping[str, object]) -> bytes:
    """Returns JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
