"""Writes files completely or not at all, locks them between processes, and reads those of strangers."""

import errno
import glob
import itertools
import json
import math
import os
import platform
import re
import shutil
import stat
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from restorekv.errors import RestoreKVError, first_sentence, writing

HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node()) or "here"  # several machines may write to one disk
NUMBERS = itertools.count()  # several threads may write to one path
JSON_LIMIT, HEADER_LIMIT, DEPTH = 64 << 20, 16 << 20, 40  # bytes, bytes, levels
TEXT_LIMIT = 1 << 30  # bytes; a model reads less
FIX = "fetch or make it again"


def check_target(path: Path) -> None:
    """Refuses a path that cannot be written, before hours of work go into the contents."""
    if path.is_dir():
        raise RestoreKVError(f"{path} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise RestoreKVError(f"The folder {path.parent} does not exist; create it or choose another.")
    if path.exists() and not path.is_file():
        raise RestoreKVError(f"{path} is not a regular file; give the name of one.")
    if not os.access(path.parent, os.W_OK):
        raise RestoreKVError(f"The folder {path.parent} is not writable; choose another or change its permissions.")
    probe = own_name(path)
    with writing(path):
        probe.touch(exist_ok=False)  # only trying tells what the disk allows, and how long a name it takes
        probe.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name next to `path`; what the block writes there replaces `path`, unless the block raises."""
    check_target(path)
    path = Path(os.path.realpath(path))  # so that a symbolic link stays one; resolve() raises for a circle of them
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Returns a name next to `path` for this process alone; removes what killed processes left under such names."""
    sweep(path)
    return own_name(path)


def own_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{HOST}-{os.getpid()}-{next(NUMBERS)}.tmp")


@contextmanager
def alone(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Refuses a second process that works in the folder, which is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / name) as acquired:
        if not acquired:
            raise RestoreKVError(
                f"Another process is at work in {folder}; wait until it ends or choose another folder."
            )
        try:
            yield
        finally:
            (folder / name).unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Yields whether the block holds the lock `path` alone; without file locks on this system, that is always true.

    The system releases the lock of a process that is killed.
    """
    try:
        import fcntl  # only POSIX systems have it
    except ImportError:
        yield True
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired = os.fstat(file.fileno()).st_nlink > 0  # else a holder has removed it, and others lock a new one
        except OSError as error:
            acquired = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # other errors: a disk without locks
        yield acquired


def sweep(path: Path) -> None:
    """Removes temporary files and folders of processes on this machine that were killed while they wrote `path`."""
    begin = f".{path.name}.{HOST}-"
    for stale in path.parent.glob(f"{glob.escape(begin)}*"):
        process = re.match(r"[0-9]+(?=[-.])", stale.name[len(begin) :])
        if process and not alive(int(process[0])):
            shutil.rmtree(stale, ignore_errors=True) if stale.is_dir() else stale.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Returns whether this process id runs on this machine, or True where that cannot be found out."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def cache_folder() -> Path | None:
    """Returns where prepared models and proofs are kept, or None without a home folder."""
    own, general = os.environ.get("RESTOREKV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or Path(general or "~/.cache") / "restorekv").expanduser()
    except RuntimeError:
        return None


def write_json(path: Path, content: object) -> None:
    """Writes indented UTF-8 JSON."""
    with writing(path), replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")


# A file that someone else wrote is data: it is opened once, read once, and refused with a sentence unless it is whole.


def read_bytes(path: Path, what: str, limit: int = JSON_LIMIT) -> bytes:
    """Returns the bytes of a regular file of at most `limit` bytes; `what` begins the sentence of an error."""
    with regular(path, what) as (file, size):
        if size > limit:
            raise RestoreKVError(f"{what} has {size:,} bytes, more than the {limit:,} of such a file; {FIX}.")
        return read_whole(file, size, what)


def read_json(path: Path, what: str) -> Any:
    """Returns the JSON value of a file; see `parse_json`."""
    return parse_json(read_bytes(path, what), what)


def read_tensor_bytes(path: Path, what: str) -> bytes:
    """Returns the bytes of a safetensors file, after its size was compared with what its header says."""
    with regular(path, what) as (file, size):
        start = file.read(8) or b""  # None where nothing is there yet, as in /proc/kmsg
        start += file.read(header_length(start, size, what))
        read_header(start, size, what)
        file.seek(0)
        return read_whole(file, size, what)


def read_tensors(path: Path, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata and the tensors of a safetensors file, never those of a pickle."""
    return open_tensors(read_tensor_bytes(path, what), what)


def open_tensors(raw: bytes, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata and the tensors, on the CPU, that the bytes of a safetensors file hold."""
    header = read_header(raw, len(raw), what)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # what the library raises for a bad entry has no common class
        raise RestoreKVError(
            f"{what} is damaged or not a safetensors file ({first_sentence(error)}); {FIX}."
        ) from error
    return header.get("__metadata__") or {}, tensors


def parse_json(text: str | bytes, what: str, limit: int = JSON_LIMIT) -> Any:
    """Returns a JSON value; refuses what a program should not compute with.

    That is: more than `limit` characters, more than DEPTH levels, a key twice in an object, NaN and infinity, integers
    of more than 64 bits, and surrogates, which are half a character.
    """
    if len(text) > limit:
        raise RestoreKVError(f"{what} has {len(text):,} characters of JSON, more than {limit:,}; {FIX}.")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            text, object_pairs_hook=unique, parse_constant=finite, parse_float=finite, parse_int=whole_number
        )
        check_levels(value)
    except (ValueError, RecursionError) as error:
        raise RestoreKVError(f"{what} is damaged ({first_sentence(error)}); {FIX}.") from error
    return value


@contextmanager
def regular(path: Path, what: str) -> Iterator[tuple[BinaryIO, int]]:
    """Yields a regular file, opened for reading, and its size; a FIFO or a device is refused, and never waited for."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RestoreKVError(f"{what} is not a regular file; give the name of one.")
            yield file, status.st_size
    except RestoreKVError:
        raise
    except FileNotFoundError as error:
        raise RestoreKVError(f"{what} does not exist; check its name.") from error
    except IsADirectoryError as error:
        raise RestoreKVError(f"{what} is not a regular file; give the name of one.") from error
    except (OSError, MemoryError, ValueError) as error:  # ValueError: a NUL in the name
        raise RestoreKVError(f"{what} cannot be read ({first_sentence(error)}); {FIX}.") from error


def read_whole(file: BinaryIO, size: int, what: str) -> bytes:
    raw = file.read(size) or b""
    if len(raw) != size:
        raise RestoreKVError(f"{what} changed while it was read; try again when nobody writes it.")
    return raw


def header_length(raw: bytes, size: int, what: str) -> int:
    """Returns the length of a safetensors header from the first 8 bytes of a file of `size` bytes."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT):
        raise RestoreKVError(f"{what} is cut short or not a safetensors file; {FIX}.")
    return length


def read_header(raw: bytes, size: int, what: str) -> dict[str, Any]:
    """Returns the header at the start of `raw`; refuses one whose tensors do not end where the file does."""
    length = header_length(raw, size, what)
    header = parse_json(raw[8 : 8 + length], what, HEADER_LIMIT)
    try:
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        whole = 8 + length + end == size
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise RestoreKVError(f"{what} is not a safetensors file; {FIX}.") from error
    if not whole:
        raise RestoreKVError(f"{what} is cut short or too long; {FIX}.")
    return header


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return entries


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def whole_number(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the number {text[:20]} has more than 64 bits")
    return int(text)


def check_levels(value: object) -> None:
    """Refuses deep nesting and texts that are not Unicode."""
    level = [value]
    for _ in range(DEPTH):
        for text in [each for each in level if isinstance(each, str)]:
            text.encode()  # raises UnicodeEncodeError, a ValueError, for a surrogate
        objects = [part for each in level if isinstance(each, dict) for item in each.items() for part in item]
        level = objects + [part for each in level if isinstance(each, list) for part in each]
        if not level:
            return
    raise ValueError(f"more than {DEPTH} levels")


def has_type(value: object, hint: Any) -> bool:
    """Returns whether a JSON value is of an annotated type: True is no integer, an integer is a float."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(has_type(value, part) for part in parts)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if origin is dict:
        return isinstance(value, dict) and all(has_type(each, parts[1]) for each in value.values())
    if origin is list:
        return isinstance(value, list) and all(has_type(each, parts[0]) for each in value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(hints) and all(map(has_type, value, hints))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)
