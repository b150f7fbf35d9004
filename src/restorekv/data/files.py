"""Source files: which files a path names, what identifies them, and their rows.

JSON is parsed here because `datasets` changes it: of mixed types it makes strings, of dates time
stamps. Datasets on the hub are read through `datasets`.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from restorekv.bounds import ROW_ELEMENTS, TEXT_BYTES
from restorekv.errors import RestoreKVError, import_extra, summarize_error
from restorekv.files import check_elements, check_levels, open_regular_file
from restorekv.seal import digest_file

ENDINGS = (".json", ".jsonl", ".parquet", ".txt")
FORMATS = ", ".join(ENDINGS)
LONGEST_LINE = 1 << 28  # bytes


def format_suffix(path: Path) -> str:
    """Return the ending that names the format: ".jsonl" for "a.jsonl.gz"."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def list_source_files(path: Path) -> list[Path]:
    """Return the file itself, or the files of a known format below a folder, sorted."""
    if path.is_file():
        if format_suffix(path) not in ENDINGS:
            raise RestoreKVError(f"{path} is not a file of type {FORMATS}; convert it first.")
        return [path]
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and format_suffix(file) in ENDINGS
    )
    if not files:
        raise RestoreKVError(f"The folder {path} has no file that ends in {FORMATS}; give another.")
    return files


def identify_source(where: str) -> dict:
    """Return what identifies a source: names and hashes of local files, or a hub id and its
    current commit.
    """
    path = Path(where)
    if path.exists():
        return {
            "files": [
                {"name": file.name, "sha256": digest_file(file)} for file in list_source_files(path)
            ]
        }
    if (
        path.is_absolute()
        or where.startswith(".")
        or format_suffix(path) in ENDINGS
        or where.count("/") > 1
    ):
        raise RestoreKVError(f"There is no file or folder {where}; check the path.")
    from huggingface_hub import HfApi

    name, _, revision = where.partition("@")
    try:
        return {"hub": name, "revision": HfApi().dataset_info(name, revision=revision or None).sha}
    except Exception as error:  # unreachable, unknown, gated: the hub's client raises many kinds
        raise _make_read_error(where, error) from error


def _make_read_error(where: str, error: Exception) -> RestoreKVError:
    return RestoreKVError(
        f"Cannot read the dataset {where}; give a hub id that can be reached or a file ({summarize_error(error)})."
    )


def iterate_rows(where: str, known: dict) -> Iterator[dict]:
    """Yield the rows of a source, a text file being one row {text}; `known` is what `identify_source` returned."""
    if "hub" in known:
        yield from stream_hub_rows(where, known)
        return
    for file in list_source_files(Path(where)):
        if not file.stat().st_size:
            raise RestoreKVError(f"{file} is empty; fetch it again or leave it out.")
        for place, row in iterate_values(file):
            if not isinstance(row, dict):
                raise RestoreKVError(
                    f"{file}, {place} is not a JSON object; fix it or leave it out."
                )
            yield row


def stream_hub_rows(where: str, known: dict) -> Iterator[dict]:
    """Stream the split "train", so that only what is needed is downloaded."""
    try:
        yield from load_hub_dataset(
            path=known["hub"], revision=known["revision"], split="train", streaming=True
        )
    except (
        Exception
    ) as error:  # foreign, unreachable, gated: the readers' errors have no common kind
        raise _make_read_error(where, error) from error


def load_hub_dataset(*name: str, **which: Any) -> Iterable[dict]:
    """Return `datasets.load_dataset`, without its messages; its errors share no base class."""
    library = import_extra("datasets", "data")
    library.logging.set_verbosity(library.logging.CRITICAL)
    library.disable_progress_bars()
    return library.load_dataset(*name, **which)


def iterate_values(file: Path) -> Iterator[tuple[str, object]]:
    """Yield what a file holds as (line or row, JSON value), a text file as one {text}; refuse a
    damaged file.
    """
    kind = format_suffix(file)
    packed = file.suffix == ".gz"
    if kind == ".parquet":
        if packed:
            raise RestoreKVError(f"{file} is compressed; unpack it first.")
        yield from ((f"row {number}", row) for number, row in enumerate(read_parquet_rows(file), 1))
        return
    try:
        with open_regular_file(file, str(file)) as raw, gzip.open(raw) if packed else raw as stream:
            if kind == ".txt":
                yield "its text", {"text": _read_plain_text(file, stream)}
            elif _has_object_per_line(file, stream) or kind == ".jsonl":
                for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
                    if line.strip():
                        yield f"line {number}", _parse_json_at(file, line, number)
            else:
                content = _read_limited(file, stream)
                parsed = _parse_json_at(file, content) if content.strip() else []
                listed = parsed if isinstance(parsed, list) else [parsed]
                yield from ((f"row {number}", value) for number, value in enumerate(listed, 1))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RestoreKVError(
            f"{file} is damaged ({str(error).rstrip('.')}); fetch it again."
        ) from error


def _has_object_per_line(file: Path, stream: BinaryIO) -> bool:
    """Return whether a JSON file has one object per line; refuse a binary file, however long."""
    first = stream.readline(LONGEST_LINE)
    stream.seek(0)
    if b"\0" in first[:4096]:
        raise RestoreKVError(f"{file} is binary; give a file of JSON.")
    try:
        check_elements(first, str(file), ROW_ELEMENTS)
        return not first.lstrip().startswith(b"[") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_limited(file: Path, stream: BinaryIO) -> bytes:
    """Return what a stream holds, which may unfold from a small file; refuse more than
    TEXT_BYTES.
    """
    content = stream.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise RestoreKVError(f"{file} holds more than {TEXT_BYTES:,} bytes; split it.")
    return content


def _read_plain_text(file: Path, stream: BinaryIO) -> str:
    try:
        return (
            _read_limited(file, stream)
            .decode("utf-8-sig")
            .replace("\r\n", "\n")
            .replace("\r", "\n")
        )
    except UnicodeDecodeError as error:
        raise RestoreKVError(
            f"{file} is not UTF-8 text (byte {error.start}); convert it first."
        ) from error


def _parse_json_at(file: Path, content: bytes, line: int = 1) -> object:
    """Parse JSON that begins on line `line` of the file."""
    try:
        check_elements(content, str(file), ROW_ELEMENTS)
        value = json.loads(content.rstrip().decode("utf-8-sig"))
        check_levels(value)
        return value
    except UnicodeEncodeError as error:
        raise RestoreKVError(
            f"{file}, line {line} has half a character (a surrogate); fix it."
        ) from error
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise RestoreKVError(
            f"{file}, line {line} is not UTF-8 text; convert the file first."
        ) from error
    except (ValueError, RecursionError) as error:
        line += getattr(error, "lineno", 1) - 1
        reason = (
            f"{error.msg}, character {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise RestoreKVError(
            f"{file}, line {line} is not JSON ({reason}); fix it or fetch the file again."
        ) from error


def read_parquet_rows(path: Path, raw: bytes | None = None) -> Iterator[dict]:
    """Yield rows as plain values, of the bytes `raw` if they were read already; refuse a damaged
    file.
    """
    parquet = import_extra("pyarrow.parquet", "data")
    arrow = import_extra("pyarrow", "data")
    try:
        for batch in parquet.ParquetFile(path if raw is None else io.BytesIO(raw)).iter_batches(
            256
        ):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = summarize_error(error)
        raise RestoreKVError(
            f"{path} is damaged or not a parquet file ({reason}); get or build it again."
        ) from error
