"""Source files: which files a path names, what identifies them, and their rows.

JSON is parsed here because `datasets` changes it: it turns mixed types into strings, and dates into
time stamps. Datasets on the hub are read through `datasets`.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from restorekv.errors import RestoreKVError, import_extra, summarize_error
from restorekv.files import (
    check_elements,
    check_levels,
    decode_text,
    list_files,
    open_regular_file,
)
from restorekv.seal import digest_file
from restorekv.size_limits import ROW_ELEMENTS, TEXT_BYTES

ENDINGS = (".json", ".jsonl", ".parquet", ".txt")
FORMATS = ", ".join(ENDINGS)
LONGEST_LINE = 1 << 28  # bytes
LONGEST_INTEGER = 4300  # digits; Python parses no longer ones


class RepeatedKeyError(ValueError):
    """Raised with a key that a JSON object has twice, since one of its values would be lost."""


def format_suffix(path: Path) -> str:
    """Return the ending that names the format: ".jsonl" for "a.jsonl.gz"."""
    if path.suffix == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


def list_source_files(path: Path) -> list[Path]:
    """Return the file itself, or the sorted files of a known format below a folder, including those
    in linked folders.
    """
    if path.is_file():
        # A file with an unknown ending would be parsed as JSON.
        if format_suffix(path) not in ENDINGS:
            raise RestoreKVError(f"{path} is not a file of type {FORMATS}; convert it first.")
        return [path]
    if not path.is_dir():
        raise RestoreKVError(f"There is no file or folder {path}; check the path.")
    files = [file for file in list_files(path) if format_suffix(file) in ENDINGS]
    if not files:
        raise RestoreKVError(f"The folder {path} has no file that ends in {FORMATS}; give another.")
    return files


def check_source(where: str) -> None:
    """Refuse a source that is neither a file or folder of known formats nor a name that a hub id
    can be; whether the hub has it is not asked.
    """
    path = Path(where)
    if path.exists():
        list_source_files(path)
    else:
        _refuse_missing_path(where)


def _refuse_missing_path(where: str) -> None:
    """Refuse the path of a missing source, unless it can be a hub id."""
    path = Path(where)
    # A hub id is OWNER/NAME, without a leading dot and with one slash at most.
    cannot_be_hub_id = path.is_absolute() or where.startswith(".") or where.count("/") > 1
    if cannot_be_hub_id or format_suffix(path) in ENDINGS:
        raise RestoreKVError(f"There is no file or folder {where}; check the path.")


def identify_source(where: str) -> dict:
    """Return what identifies a source: names and hashes of local files, or a hub id and its
    current commit.
    """
    path = Path(where)
    if path.exists():
        files = []
        for file in list_source_files(path):
            files.append({"name": file.name, "sha256": digest_file(file)})
        return {"files": files}
    _refuse_missing_path(where)
    from huggingface_hub import HfApi

    name, _, revision = where.partition("@")
    try:
        commit = HfApi().dataset_info(name, revision=revision or None).sha
    except Exception as error:  # unreachable, unknown, gated: the hub's client raises many kinds
        raise _make_read_error(where, error) from error
    return {"hub": name, "revision": commit}


def _make_read_error(where: str, error: Exception) -> RestoreKVError:
    return RestoreKVError(
        f"Cannot read the dataset {where}; give a hub id that can be reached or a file "
        f"({summarize_error(error)})."
    )


def iterate_rows(where: str, origin: dict) -> Iterator[dict]:
    """Yield the rows of a source; a text file is one row {text}.

    Args:
        where: A hub id, a file or a folder.
        origin: What `identify_source` returned for it; {} for local files.
    """
    if "hub" in origin:
        yield from stream_hub_rows(where, origin)
        return
    for file in list_source_files(Path(where)):
        if not file.stat().st_size:
            raise RestoreKVError(f"{file} is empty; fetch it again or leave it out.")
        for location, row in iterate_values(file):
            if not isinstance(row, dict):
                raise RestoreKVError(
                    f"{file}, {location} is not a JSON object; fix it or leave it out."
                )
            yield row


def stream_hub_rows(where: str, origin: dict) -> Iterator[dict]:
    """Stream the split "train", so that only what is needed is downloaded."""
    try:
        yield from load_hub_dataset(
            path=origin["hub"], revision=origin["revision"], split="train", streaming=True
        )
    # A foreign format, an unreachable hub, a gated dataset: the errors share no base class.
    except Exception as error:
        raise _make_read_error(where, error) from error


def load_hub_dataset(*name: str | None, **options: Any) -> Iterable[dict]:
    """Call `datasets.load_dataset`, without its messages; its errors share no base class."""
    library = import_extra("datasets", "data")
    library.logging.set_verbosity(library.logging.CRITICAL)
    library.disable_progress_bars()
    return library.load_dataset(*name, **options)


def iterate_values(file: Path) -> Iterator[tuple[str, object]]:
    """Yield what a file holds as pairs of a location, such as "line 3", and a JSON value; a text
    file is one {text}. Refuse a damaged file.
    """
    kind = format_suffix(file)
    packed = file.suffix == ".gz"
    # Parquet is read by its own library, which seeks; other formats are streams.
    if kind == ".parquet":
        if packed:
            raise RestoreKVError(f"{file} is compressed; unpack it first.")
        for number, row in enumerate(read_parquet_rows(file), 1):
            yield f"row {number}", row
        return
    try:
        with open_regular_file(file, str(file)) as raw, _unpack(raw, packed) as stream:
            if kind == ".txt":
                yield "its text", {"text": _read_plain_text(file, stream)}
            elif _has_object_per_line(file, stream) or kind == ".jsonl":
                # A bounded read: a file without line breaks is not read whole.
                lines = iter(partial(stream.readline, LONGEST_LINE), b"")
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"line {number}", _parse_json_at(file, line, number)
            else:
                yield from _iterate_json(file, _read_limited(file, stream))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RestoreKVError(
            f"{file} is damaged ({str(error).rstrip('.')}); fetch it again."
        ) from error


def _iterate_json(file: Path, content: bytes) -> Iterator[tuple[str, object]]:
    """Yield the elements of a JSON list, or the one value of any other file."""
    if not content.strip():
        return
    parsed = _parse_json_at(file, content)
    elements = parsed if isinstance(parsed, list) else [parsed]
    for number, value in enumerate(elements, 1):
        yield f"row {number}", value


def _unpack(raw: IO[bytes], packed: bool) -> IO[bytes]:
    """Return the stream, or the one that gzip unpacks from it."""
    # typeshed does not say that a GzipFile is an IO[bytes], though it has all of its methods.
    return cast("IO[bytes]", gzip.open(raw)) if packed else raw


def _has_object_per_line(file: Path, stream: IO[bytes]) -> bool:
    """Return whether a JSON file has one object per line, judging by the first one; refuse a binary
    file.
    """
    first = stream.readline(LONGEST_LINE)
    stream.seek(0)
    if b"\0" in first[:4096]:
        raise RestoreKVError(f"{file} is binary; give a file of JSON.")
    try:
        check_elements(first, str(file), ROW_ELEMENTS)
        # A list of objects starts with a bracket; lines start with a brace.
        return not first.lstrip().startswith(b"[") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_limited(file: Path, stream: IO[bytes]) -> bytes:
    """Return the content of a stream; refuse more than TEXT_BYTES, to which even a small compressed
    file may unpack.
    """
    # One byte more than allowed distinguishes a long file from one that just fits.
    content = stream.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise RestoreKVError(f"{file} holds more than {TEXT_BYTES:,} bytes; split it.")
    return content


def _read_plain_text(file: Path, stream: IO[bytes]) -> str:
    text = decode_text(_read_limited(file, stream), str(file))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse_json_at(file: Path, content: bytes, line: int = 1) -> object:
    """Parse JSON that begins on line `line` of the file."""
    try:
        check_elements(content, str(file), ROW_ELEMENTS)
        value = json.loads(
            content.rstrip().decode("utf-8-sig"),
            object_pairs_hook=_parse_object,
            parse_int=_parse_integer,
        )
        check_levels(value)
        return value
    except RepeatedKeyError as error:
        # If the content has several lines, it is not known which one has the key.
        where = file if b"\n" in content.strip() else f"{file}, line {line}"
        raise RestoreKVError(
            f"{where} has the key {str(error)[:120]!r} twice in an object; fix it."
        ) from error
    except UnicodeEncodeError as error:
        raise RestoreKVError(
            f"{file}, line {line} has half a character (a surrogate); fix it."
        ) from error
    except UnicodeDecodeError as error:
        # The line of the byte that is not UTF-8, counted from where this content begins.
        line += content[: error.start].count(b"\n")
        raise RestoreKVError(
            f"{file}, line {line} is not UTF-8 text; convert the file first."
        ) from error
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        reason = f"{error.msg}, character {error.colno}"
        raise _make_json_error(file, line, reason) from error
    except (ValueError, RecursionError) as error:
        raise _make_json_error(file, line, str(error)) from error


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise RepeatedKeyError for a key that it has twice."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise RepeatedKeyError(key)
        entries[key] = value
    return entries


def _parse_integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(text.removeprefix('-')):,} digits")
    return int(text)


def _make_json_error(file: Path, line: int, reason: str) -> RestoreKVError:
    return RestoreKVError(
        f"{file}, line {line} is not JSON ({reason}); fix it or fetch the file again."
    )


def read_parquet_rows(path: Path, raw: bytes | None = None) -> Iterator[dict]:
    """Yield rows as plain values, from the bytes `raw` if they were already read; refuse a damaged
    file.
    """
    parquet = import_extra("pyarrow.parquet", "data")
    arrow = import_extra("pyarrow", "data")
    source = path if raw is None else io.BytesIO(raw)
    try:
        # In batches, so that a large file never is in memory as Python values.
        for batch in parquet.ParquetFile(source).iter_batches(256):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise RestoreKVError(
            f"{path} is damaged or not a parquet file ({summarize_error(error)}); "
            "get or build it again."
        ) from error
