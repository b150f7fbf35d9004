"""From an exception to one sentence on stderr and an exit code; bugs keep their traceback."""

import errno
import os
import sys
import warnings

import typer

from restorekv.errors import RestoreKVError, RestoreKVWarning

# The root of the usage errors of click or, since typer carries its own copy, of typer.
UsageMistake: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

MENDS = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.EFBIG: "choose a place that takes larger files",
    errno.EACCES: "change its permissions or choose another place",
    errno.EPERM: "change its permissions or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOENT: "check the path",
    errno.EISDIR: "give the name of a file",
    errno.ENOTDIR: "check the path",
    errno.ENAMETOOLONG: "choose a shorter name",
}
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def sentence(error: BaseException) -> tuple[str, int] | None:
    """What to tell, and the exit code; None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Interrupted; no half-written file was left.", 130
    if isinstance(error, RestoreKVError):
        return str(error), 1
    if isinstance(error, OSError) and error.errno is not None:
        where = error.filename or "the output"
        return f"Cannot use {where}: {error.strerror}; {MENDS.get(error.errno, 'check it and try again')}.", 1
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return "There is not enough memory; take a shorter context, a smaller model or another device.", 1
    return None


def report(error: BaseException) -> int:
    """Tells a mistake; raises a bug again."""
    told = sentence(error)
    if told is None:
        raise error
    if isinstance(error, BrokenPipeError):  # the reader, as `head`, has seen enough
        flush_output()
        return 1
    return tell(*told)


def tell(text: str, code: int) -> int:
    """One line, whatever the text was."""
    flush_output()
    print("error:", " ".join(text.split()), file=sys.stderr)
    return code


def flush_output() -> None:
    """What cannot be written is dropped; Python would try again, and complain, when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warnings() -> None:
    """Ours as one line each on stderr; those of libraries are not for the user."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", RestoreKVWarning)
    warnings.showwarning = lambda message, *_, **__: print("warning:", message, file=sys.stderr)
