"""Rows of a source: of local files, read here, or of a dataset of the hub through the library `datasets`."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from restorekv.data.files import local_files, optional, suffix, unreadable
from restorekv.data.shard import parquet_rows
from restorekv.errors import RestoreKVError


def rows(where: str, known: dict) -> Iterator[dict]:
    """The rows of the split "train", one by one; a text file is one row {text}. `known` is the identity."""
    if "hub" in known:
        yield from hub_rows(where, known)
        return
    for file in local_files(Path(where)):
        if not file.stat().st_size:
            raise RestoreKVError(f"{file} is empty; fetch it again or leave it out.")
        for place, row in values(file):
            if not isinstance(row, dict):
                raise RestoreKVError(f"{file}, {place} is no JSON object; mend it or leave it out.")
            yield row


def hub_rows(where: str, known: dict) -> Iterator[dict]:
    """Streams, so that a dataset is fetched as far as it is needed."""
    library = optional("datasets")
    library.logging.set_verbosity(library.logging.CRITICAL)
    library.disable_progress_bars()
    try:
        yield from library.load_dataset(path=known["hub"], revision=known["revision"], split="train", streaming=True)
    except Exception as error:  # foreign, unreachable, gated: the readers' errors have no common kind
        raise unreadable(where, error) from error


def values(file: Path) -> Iterator[tuple[str, object]]:
    """What a file holds as (line or row, JSON value); a text file is one {text}. Refuses what is damaged."""
    kind, packed = suffix(file), file.suffix == ".gz"
    if kind == ".parquet":
        if packed:
            raise RestoreKVError(f"{file} is packed; unpack it first.")
        yield from ((f"row {number}", row) for number, row in enumerate(parquet_rows(file), 1))
        return
    try:
        with gzip.open(file) if packed else file.open("rb") as stream:
            if kind == ".txt":
                yield "its text", {"text": plain(file, stream)}
            elif kind == ".jsonl" or starts_with_a_line(stream):
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield f"line {number}", parsed(file, line, number)
            else:
                content = stream.read()
                found = parsed(file, content) if content.strip() else []
                listed = found if isinstance(found, list) else [found]
                yield from ((f"row {number}", value) for number, value in enumerate(listed, 1))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RestoreKVError(f"{file} is damaged ({str(error).rstrip('.')}); fetch it again.") from error


def starts_with_a_line(stream: BinaryIO) -> bool:
    """Whether a file of JSON holds an object a line."""
    first = stream.readline()
    stream.seek(0)
    try:
        return not first.lstrip().startswith(b"[") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def plain(file: Path, stream: BinaryIO) -> str:
    try:
        return io.TextIOWrapper(stream, encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise RestoreKVError(f"{file} is not UTF-8 text (byte {error.start}); convert it first.") from error


def parsed(file: Path, content: bytes, line: int = 1) -> object:
    """JSON that begins on that line of the file."""
    try:
        return json.loads(content.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise RestoreKVError(f"{file}, line {line} is not UTF-8 text; convert the file first.") from error
    except (ValueError, RecursionError) as error:
        line += getattr(error, "lineno", 1) - 1
        told = getattr(error, "msg", str(error))
        raise RestoreKVError(f"{file}, line {line} is not JSON ({told}); mend it or fetch the file again.") from error
