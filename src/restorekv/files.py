"""Writes files completely or not at all, and locks them between processes."""

import errno
import glob
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from restorekv.errors import RestoreKVError

HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node()) or "here"  # several machines may write to one disk
NUMBERS = itertools.count()  # several threads may write to one path


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name next to `path`; what the block writes there replaces `path`, unless the block raises."""
    check_target(path)
    path = path.resolve()  # so that a symbolic link stays one
    sweep(path)
    temporary = path.with_name(f".{path.name}.{HOST}-{os.getpid()}-{next(NUMBERS)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
            acquired = True
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


def write_json(path: Path, content: object) -> None:
    """Writes indented UTF-8 JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
