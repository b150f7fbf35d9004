"""Turns an exception into one sentence on stderr and an exit code; bugs keep their traceback."""

import errno
import os
import re
import sys
import warnings

import typer

from restorekv.errors import RestoreKVError, RestoreKVWarning

# The root of the usage errors of click or, since typer carries its own copy, of typer.
UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another place"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check the path"),
    errno.EFBIG: "choose a place that takes larger files",
    errno.EROFS: "choose a place that can be written",
    errno.EISDIR: "give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def usage_message(error: Exception) -> str:
    """Returns a usage error as one clause, with the names that typer suggests in brackets."""
    suggestion = r"\.? \(?(?:Did you mean|Possible options:) (.+?)\??\)?$"
    return re.sub(suggestion, r" (did you mean \1?)", error.format_message().rstrip("."))


def report_error(error: BaseException) -> int:
    """Prints an error that a user can fix and returns the exit code; raises a bug again."""
    if isinstance(error, KeyboardInterrupt):
        return print_error(str(error) or "Interrupted; no half-written file was left.", 130)
    if isinstance(error, RestoreKVError):
        return print_error(str(error), 1)
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
        flush_output()
        return 1
    if isinstance(error, OSError) and error.errno is not None:
        where, fix = error.filename or "the output", FIXES.get(error.errno, "check it and try again")
        return print_error(f"Cannot use {where}: {error.strerror}; {fix}.", 1)
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return print_error("There is not enough memory; take a shorter context, a smaller model or another device.", 1)
    raise error


def print_error(text: str, code: int) -> int:
    """Prints a text as one line and returns the exit code."""
    flush_output()
    print("error:", " ".join(text.split()), file=sys.stderr)
    return code


def flush_output() -> None:
    """Drops what cannot be written, which Python would otherwise try to write again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warnings() -> None:
    """Prints our warnings as one line each on stderr and hides those of libraries."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", RestoreKVWarning)
    warnings.showwarning = lambda message, *_, **__: print("warning:", message, file=sys.stderr)
