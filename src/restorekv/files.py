"""Files: written completely or not at all, locked between processes, and read with suspicion.

A file that someone else wrote is data. It is opened once, read once, and refused with a sentence
unless it is complete.
"""

import codecs
import errno
import glob
import itertools
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from restorekv.errors import OptionError, RestoreKVError, explain_write_errors, summarize_error
from restorekv.size_limits import (
    DEPTH,
    HEADER_BYTES,
    HEADER_ELEMENTS,
    JSON_BYTES,
    JSON_ELEMENTS,
    LINES_BYTES,
)

# Several machines may write to one disk.
HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node()) or "here"
NUMBERS = itertools.count()  # several threads may write to one path
# Flags of `os.open`, 0 where the system has no such flag.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAITING = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)
START_BYTES = 1 << 16  # of a file: each of ours names its format within them
# How ISO-2022-JP and its relatives switch to other characters. They use ASCII bytes alone, so UTF-8
# would decode them to garbage without an error.
SHIFT_OF_ISO_2022 = re.compile(rb"\x1b\$[@B()]")
FETCH_AGAIN = "fetch or make it again"
# Every value of JSON except the first follows one of the signs [ { , or :. A string may contain
# these signs too, so it is matched as a whole. Possessive quantifiers never backtrack, so the
# search takes linear time, whatever a stranger has written.
SIGNS = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[{,:]'
SIGNS_OF_TEXT = re.compile(SIGNS, re.DOTALL)
SIGNS_OF_BYTES = re.compile(SIGNS.encode(), re.DOTALL)


def parse_path(path: str | Path) -> Path:
    """Return a user's path; refuse anything other than text or a path."""
    if not isinstance(path, str | os.PathLike):
        raise RestoreKVError(f"A path must be text or a Path, not {type(path).__name__}.")
    return Path(path)


def list_files(
    folder: Path, hidden: bool = True, broken_links: list[Path] | None = None
) -> list[Path]:
    """Return the files below a folder, sorted, including those in linked folders.

    Every folder is listed once, so links may form a circle. If it is below `folder`, it is listed
    under its own name, otherwise under that of a link. A link to a folder that contains `folder` is
    not followed.

    Args:
        folder: Where to look.
        hidden: Whether to list files and folders with names that begin with a period.
        broken_links: A list to which the links that lead nowhere are added, sorted.

    Raises:
        RestoreKVError: A folder below cannot be read, so that its files would be missing.
    """

    def refuse_folder(error: OSError) -> None:
        raise RestoreKVError(
            f"The folder {error.filename} cannot be read ({error.strerror}), so its files would be "
            "missing; make it readable or move it away."
        ) from error

    root = Path(os.path.realpath(folder))
    seen: set[Path] = set()
    files = []
    tops = [folder]
    while tops:
        links = []
        for top in sorted(tops):
            for current, folders, names in os.walk(top, onerror=refuse_folder):
                real = Path(os.path.realpath(current))
                if real in seen or (real != root and root.is_relative_to(real)):
                    folders.clear()
                    continue
                seen.add(real)
                if not hidden:
                    folders[:] = [name for name in folders if not name.startswith(".")]
                    names = [name for name in names if not name.startswith(".")]
                # os.walk lists links to folders, but does not follow them.
                inside = [Path(current, name) for name in folders]
                links += [path for path in inside if path.is_symlink()]
                files += [Path(current, name) for name in names]
        # Links come after all real folders, so that no real folder is listed under a link's name.
        tops = links
    if broken_links is not None:
        broken_links += sorted(path for path in files if path.is_symlink() and not path.exists())
    return sorted(path for path in files if path.is_file())


def check_target(path: Path) -> None:
    """Refuse a path that cannot be written, before hours of work go into the contents; remove what
    killed processes left under temporary names of it.
    """
    if "\0" in str(path):
        raise RestoreKVError("The name of a file has no NUL character; give a different name.")
    if path.is_dir():
        raise RestoreKVError(f"{path} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise RestoreKVError(
            f"The folder {path.parent} does not exist; create it or choose a different one."
        )
    if path.exists() and not path.is_file():
        raise RestoreKVError(f"{path} is not a regular file; give the name of one.")
    if not os.access(path.parent, os.W_OK):
        raise RestoreKVError(
            f"The folder {path.parent} is not writable; choose a different one or change its "
            "permissions."
        )
    probe = make_temporary_name(path)
    with explain_write_errors(path):
        # Only an attempt shows what the disk allows and how long a name may be.
        probe.touch(exist_ok=False)
        probe.unlink()


def check_replaceable(path: Path, kind: str, file_format: str | None = None) -> None:
    """Refuse to replace a file that is not of the kind that will be written: its user may need it.

    Args:
        path: The file, which may be missing or empty.
        kind: What the error message calls the kind of file, as in "a restorekv cache".
        file_format: The format that files of this kind name near their start; None for JSON of any
            format.

    Raises:
        RestoreKVError: The file does not begin like a file of this kind.
    """
    if not path.is_file():
        return
    with open_with_size(path, str(path)) as (file, _):
        start = file.read(START_BYTES)
    sign = rb"\s*[\[{]"
    if file_format is not None:
        sign = rb'.*"format": ?"' + re.escape(file_format.encode()) + rb'"'
    if start and not re.match(sign, start, re.DOTALL):
        raise RestoreKVError(
            f"{path} exists and is not {kind}; give a different name, or delete it first."
        )


@contextmanager
def replace_file(path: Path, follow: bool = True) -> Iterator[Path]:
    """Yield a temporary file next to `path`, which replaces `path` unless the block raises.

    Args:
        path: The file to write.
        follow: Whether to follow a symbolic link at `path` and replace the file that it leads to.
            That is right for names that users choose: they may keep their files elsewhere. Pass
            False for a name that the package itself chose: the folder may come from a stranger, so
            the new file replaces the link.
    """
    check_target(path)  # which also removes what killed processes left next to it
    if follow:
        is_link = path.is_symlink()
        path = Path(os.path.realpath(path))  # resolve() raises for a circle of links
        if is_link:
            remove_stale_files(path)
    temporary = make_unique_name(path)
    with explain_write_errors(path):
        # Exclusively, so that no existing file is written to, least of all through a link.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666))
        # The new file gets the old one's permissions, so that a private file stays private. While
        # it is written, its owner may write to it in any case.
        mode = None
        if path.exists() and not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            temporary.chmod(mode | 0o600)
    try:
        yield temporary
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_temporary_name(path: Path) -> Path:
    """Return a name next to `path` for this process alone; remove what killed processes left
    under such names.
    """
    remove_stale_files(path)
    return make_unique_name(path)


def make_unique_name(path: Path) -> Path:
    """Return a new name next to `path`.

    It contains the process id, for `remove_stale_files`, and random digits, so that nobody can
    guess it and put a link there first.
    """
    process = f"{HOST}-{os.getpid()}-{next(NUMBERS)}"
    return path.with_name(f".{path.name}.{process}-{secrets.token_hex(8)}.tmp")


@contextmanager
def folder_lock(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Lock a folder, creating it if needed; refuse if another process is working in it.

    If the folder was created here and is still empty at the end, it is removed again.
    """
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / name) as acquired:
        if not acquired:
            raise RestoreKVError(
                f"Another process is at work in {folder}; wait until it ends or choose a different "
                "folder."
            )
        try:
            yield
        finally:
            (folder / name).unlink(missing_ok=True)
            if not existed:
                with suppress(OSError):  # there are files in it
                    folder.rmdir()


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Lock the file `path` without waiting, and yield whether that succeeded.

    The system releases the lock of a process that is killed. On a system without file locks, every
    block gets True.
    """
    try:
        import fcntl  # only POSIX systems have it
    except ImportError:
        yield True
        return
    with open_without_links(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the last holder removed the file after it was opened here, this lock is worthless:
            # other processes lock a new file of that name.
            acquired = os.fstat(file.fileno()).st_nlink > 0
        except OSError as error:
            # Other errors come from a disk without locks.
            acquired = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        yield acquired


def open_without_links(path: Path) -> BinaryIO:
    """Open one of the package's own files for reading and appending; create it if needed.

    Refuse special files and symbolic links: a stranger may have put a link there to get another
    file changed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW | NO_WAITING | BINARY
    try:
        number = os.open(path, flags, 0o666)
    except OSError:
        check_not_link(path)
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise RestoreKVError(f"{path} is not a regular file; remove it.")
    return os.fdopen(number, "ab+")


def check_not_link(path: Path) -> None:
    """Refuse a symbolic link at a name that the package chose, which a library or the system would
    follow.
    """
    if path.is_symlink():
        raise RestoreKVError(f"{path} is a symbolic link, which is not followed; remove it.")


def remove_stale_files(path: Path) -> None:
    """Remove temporary files and folders of processes on this machine that were killed while they
    wrote `path`.

    Those of other users stay, and so do links: no process of ours makes one.
    """
    begin = f".{path.name}.{HOST}-"
    for stale in path.parent.glob(f"{glob.escape(begin)}*"):
        process = re.match(r"[0-9]+(?=[-.])", stale.name[len(begin) :])
        if not process or is_process_alive(int(process[0])):
            continue
        try:
            status = stale.lstat()
        except OSError:  # another process has removed it meanwhile
            continue
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            continue
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(stale, ignore_errors=True)
        elif stat.S_ISREG(status.st_mode):
            stale.unlink(missing_ok=True)


def is_process_alive(process: int) -> bool:
    """Return whether a process with this id runs on this machine; True if that cannot be found
    out.
    """
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def find_cache_folder() -> Path | None:
    """Return where prepared models and self-tests are kept, or None without a home folder."""
    chosen = os.environ.get("RESTOREKV_CACHE")
    try:
        return Path(chosen).expanduser() if chosen else _default_cache_folder()
    except RuntimeError:
        return None


def _default_cache_folder() -> Path:
    """Return the folder that is used unless RESTOREKV_CACHE names one; raise RuntimeError without a
    home folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "restorekv"


def format_json(content: object) -> str:
    """Return indented JSON with a line end."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, content: object, follow: bool = True) -> None:
    """Write indented UTF-8 JSON; for `follow`, see `replace_file`."""
    text = format_json(content)
    with explain_write_errors(path), replace_file(path, follow) as temporary:
        temporary.write_text(text, "utf-8", "backslashreplace")


def format_line(content: object) -> bytes:
    """Return JSON in one line, with its end."""
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def append_line(path: Path, content: object) -> None:
    """Add a line of JSON at the end of a file; it is on the disk before this returns.

    A half-written line that a killed process left there is removed first.
    """
    with open_without_links(path) as file:
        # A line without a line break at its end was being written when the process died.
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(format_line(content))
        file.flush()
        os.fsync(file.fileno())


# Reading files that someone else may have written


def load_lines(path: Path) -> Iterator[dict]:
    """Yield the objects that `append_line` wrote, none if there is no file; leave out a
    half-written line at the end.
    """
    if not path.exists():
        return
    for line in read_bytes(path, str(path), LINES_BYTES).split(b"\n")[:-1]:
        content = parse_json(line, str(path))
        if not isinstance(content, dict):
            raise RestoreKVError(f"{path} is damaged (a line is not an object); {FETCH_AGAIN}.")
        yield content


def read_bytes(path: Path, what: str, limit: int = JSON_BYTES, follow: bool = True) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        what: What error messages call it.
        limit: The most bytes that it may have.
        follow: Whether a symbolic link may lead to it; pass False for a name that the package
            chose.

    Raises:
        RestoreKVError: The file is missing, larger or not a regular file, or cannot be read.
    """
    with open_with_size(path, what, follow) as (file, size):
        if size > limit:
            raise RestoreKVError(
                f"{what} has {size:,} bytes, more than the {limit:,} of such a file; {FETCH_AGAIN}."
            )
        return read_exactly(file, size, what)


def decode_text(payload: bytes, what: str) -> str:
    """Return bytes in UTF-8, or in UTF-16 with its byte order mark, as text without the mark.

    `what` begins an error's sentence.
    """
    # Windows editors save this as "Unicode". No UTF-8 text begins with these bytes.
    is_utf16 = payload.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not is_utf16 and SHIFT_OF_ISO_2022.search(payload):
        raise RestoreKVError(f"{what} is in ISO-2022, not UTF-8; save it as UTF-8 first.")
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    try:
        text = payload.decode(encoding)
    except UnicodeDecodeError as error:
        # Pictures, archives and programs have zero bytes; a text of another encoding has none.
        if b"\0" in payload and not is_utf16:
            raise RestoreKVError(f"{what} is binary; give a text.") from None
        raise RestoreKVError(
            f"{what} is not {encoding.removesuffix('-sig').upper()} text (byte {error.start}); "
            "save it as UTF-8 first."
        ) from None
    if "\0" in text:
        raise RestoreKVError(f"{what} is binary; give a text.")
    return text


def read_json(path: Path, what: str, elements: int = JSON_ELEMENTS) -> Any:
    """Return the JSON value of a file; refuse what `parse_json` refuses."""
    return parse_json(read_bytes(path, what), what, elements=elements)


def read_record(path: Path, what: str) -> Any:
    """Return the JSON value of a record, which has at most as many elements as a header."""
    return read_json(path, what, HEADER_ELEMENTS)


def parse_json(
    text: str | bytes, what: str, limit: int = JSON_BYTES, elements: int = JSON_ELEMENTS
) -> Any:
    """Return a JSON value, unless it is one that a program should not compute with.

    Args:
        text: The JSON.
        what: What error messages call it.
        limit: The most characters.
        elements: The most values and keys.

    Raises:
        RestoreKVError: The JSON is invalid, exceeds these limits or has more than DEPTH levels, or
            it has a key twice in an object, NaN, infinity, an integer of more than 64 bits, or a
            surrogate, which is half a character.
    """
    if len(text) > limit:
        raise RestoreKVError(
            f"{what} has {len(text):,} characters of JSON, more than {limit:,}; {FETCH_AGAIN}."
        )
    check_elements(text, what, elements)
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            text,
            object_pairs_hook=parse_object,
            parse_constant=parse_float,
            parse_float=parse_float,
            parse_int=parse_int,
        )
        check_levels(value)
    except (ValueError, RecursionError) as error:
        raise RestoreKVError(
            f"{what} is damaged ({summarize_error(error)}); {FETCH_AGAIN}."
        ) from error
    return value


def parse_record(text: str | bytes, what: str) -> Any:
    """Return the JSON value of a header, or of a record in one."""
    return parse_json(text, what, HEADER_BYTES, HEADER_ELEMENTS)


def check_elements(text: str | bytes, what: str, limit: int) -> None:
    """Refuse JSON of more than `limit` values and keys before any of them takes memory."""
    # A fast upper bound first: it counts the signs inside strings, too.
    if isinstance(text, bytes):
        at_most = sum(text.count(sign) for sign in (b"[", b"{", b",", b":"))
        matches = SIGNS_OF_BYTES.finditer(text)
    else:
        at_most = sum(text.count(sign) for sign in "[{,:")
        matches = SIGNS_OF_TEXT.finditer(text)
    if at_most < limit:
        return
    texts = 0
    values = 1
    for match in matches:
        if match[0][:1] in ('"', b'"'):
            texts += 1
        else:
            values += 1
        if max(texts, values) > limit:
            raise RestoreKVError(f"{what} has more than {limit:,} elements of JSON; {FETCH_AGAIN}.")


@contextmanager
def open_with_size(
    path: Path, what: str, follow: bool = True
) -> Iterator[tuple[BufferedReader, int]]:
    """Yield a regular file, opened for reading, and its size.

    A FIFO or a device is refused without waiting for it. Errors in the block, such as those of a
    disk, become RestoreKVErrors too. For `follow`, see `read_bytes`.
    """
    try:
        with open_regular_file(path, what, follow) as file:
            yield file, os.fstat(file.fileno()).st_size
    except RestoreKVError:
        raise
    except (OSError, MemoryError, ValueError) as error:
        raise RestoreKVError(
            f"{what} cannot be read ({summarize_error(error)}); {FETCH_AGAIN}."
        ) from error


def open_regular_file(path: Path, what: str, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading; refuse all others at once, without waiting for a writer."""
    flags = os.O_RDONLY | NO_WAITING | BINARY
    if not follow:
        flags |= NO_FOLLOW
    try:
        number = os.open(path, flags)
    except FileNotFoundError as error:
        raise RestoreKVError(f"{what} does not exist; check its name.") from error
    except PermissionError as error:
        raise RestoreKVError(
            f"{what} cannot be read ({error.strerror}); check its permissions."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RestoreKVError(
            f"{what} cannot be read ({summarize_error(error)}); {FETCH_AGAIN}."
        ) from error
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = "a folder, not" if stat.S_ISDIR(mode) else "not"
        raise RestoreKVError(f"{what} is {kind} a regular file; give the name of one.")
    return os.fdopen(number, "rb")


def refuse_other_kind(start: bytes, what: str, fix: str = "name the file that you mean") -> None:
    """Refuse a file that begins like JSON or another text, which a safetensors file never does, not
    even a damaged one: it begins with a length in eight bytes, and the last of them are 0.
    """
    if len(start) < 8 or 0 in start[:8]:
        return
    found = "JSON, such as a conversation's" if start[:1] == b"{" else "a text, or another kind"
    raise RestoreKVError(f"{what} is not a safetensors file, but {found}; {fix}.")


def read_exactly(file: BinaryIO, size: int, what: str) -> bytes:
    """Return the `size` bytes of a file; refuse one that changed meanwhile."""
    raw = file.read(size) or b""
    if len(raw) != size:
        raise RestoreKVError(
            f"{what} changed while it was read; try again when no process writes to it."
        )
    return raw


def parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key is twice in an object")
    return entries


def parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def parse_int(text: str) -> int:
    # By its length first: Python refuses to read a number of thousands of digits.
    if len(text) > 30:
        digits = len(text.removeprefix("-"))
        raise ValueError(f"an integer of {digits:,} digits has more than 64 bits")
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"the number {text} has more than 64 bits")
    return number


def check_levels(value: object) -> None:
    """Refuse deep nesting and texts that are not Unicode."""
    level = [value]
    for _ in range(DEPTH):
        for each in level:
            if isinstance(each, str):
                each.encode()  # raises UnicodeEncodeError, a ValueError, for a surrogate
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.keys())
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        if not inner:
            return
        level = inner
    raise ValueError(f"more than {DEPTH} levels")


def cut_name(name: str, limit: int) -> str:
    """Shorten a file name to at most `limit` bytes, since file systems limit its length."""
    return name.encode()[:limit].decode(errors="ignore")


def check_option(
    name: str,
    value: object,
    hint: Any,
    wanted: str,
    holds: Callable[[Any], object] = lambda _: True,
) -> None:
    """Refuse an option's value if it has a wrong type or does not meet a condition.

    Args:
        name: The option.
        value: Its value.
        hint: The type that it must have, as an annotation.
        wanted: Type and condition in words, for the message.
        holds: The condition; it is called only with values of the right type.

    Raises:
        OptionError: The value has a different type or does not meet the condition.
    """
    if not matches_type(value, hint) or not holds(value):
        raise OptionError(f"{name} must be {wanted}, not {repr(value)[:60]}.", name)


def find_wrong_entry(value: object, hints: Mapping[str, Any]) -> str | None:
    """Return the name of the first entry in `hints` that a JSON object lacks or has with a
    different type, or None if all are right.
    """
    entries = value if isinstance(value, dict) else {}
    for name, hint in hints.items():
        if name not in entries or not matches_type(entries[name], hint):
            return name
    return None


def matches_type(value: object, hint: Any) -> bool:
    """Return whether a JSON value has the type that an annotation names.

    A hint [{name: type}] means a list of objects with these entries. True does not count as an
    integer, but an integer counts as a float.
    """
    if isinstance(hint, list):
        return isinstance(value, list) and not any(find_wrong_entry(e, hint[0]) for e in value)
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(matches_type(value, part) for part in parts)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if origin is dict:
        return isinstance(value, dict) and all(
            matches_type(each, parts[1]) for each in value.values()
        )
    if origin is list:
        return isinstance(value, list) and all(matches_type(each, parts[0]) for each in value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(hints) and all(map(matches_type, value, hints))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)
