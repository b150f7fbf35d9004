"""Files that are written whole or not at all, and locks between processes."""

import errno
import glob
import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from restorekv.errors import RestoreKVError

HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node()) or "here"  # several machines may write to one disk


def check_target(path: Path) -> None:
    """Refuses a place that cannot hold a file, before hours of work go into its contents."""
    if path.is_dir():
        raise RestoreKVError(f"{path} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise RestoreKVError(f"The folder {path.parent} does not exist; create it or choose another.")
    if path.exists() and not path.is_file():
        raise RestoreKVError(f"{path} is not a regular file; give the name of one.")
    if not os.access(path.parent, os.W_OK):
        raise RestoreKVError(f"The folder {path.parent} is not writable; choose another or change its permissions.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path`; what was written there takes its place if the block ends well, else vanishes."""
    check_target(path)
    path = path.resolve()  # through a symbolic link, which stays
    sweep(path)
    temporary = path.with_name(f".{path.name}.{HOST}-{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether the block has the lock `path` to itself; the system frees that of a process that was killed.

    Where there are no such locks, everybody has it.
    """
    try:
        import fcntl  # posix alone has it
    except ImportError:
        yield True
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except OSError as error:
            mine = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # else a disk that knows no locks
        yield mine


def sweep(path: Path) -> None:
    """Removes what processes of this machine, killed while they wrote `path`, have left beside it."""
    begin = f".{path.name}.{HOST}-"
    for left in path.parent.glob(f"{glob.escape(begin)}*.tmp"):
        number = left.name[len(begin) : -len(".tmp")]
        if number.isdecimal() and not alive(int(number)):
            left.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Whether a process of that number runs on this machine; where that cannot be asked, yes."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def write_json(path: Path, figures: object) -> None:
    """Indented UTF-8 JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
