"""Turn an exception into one sentence on stderr and an exit code; bugs keep their traceback."""

import codecs
import errno
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Any, cast

import typer

from restorekv.errors import (
    CUT_END,
    STRETCH_ROPE,
    RestoreKVError,
    RestoreKVWarning,
    is_out_of_memory,
)
from restorekv.spec import find_meant_arguments

# The root of the usage errors of click or, since typer carries its own copy, of typer.
UsageError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose a different path"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "change its permissions or choose a different path"
    ),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check the path"),
    errno.EFBIG: "choose a file system that allows larger files",
    errno.EROFS: "choose a folder that can be written to",
    errno.EISDIR: "give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# Parts of messages about numbers that are too large.
TOO_LARGE = ("Overflow when unpacking", "overflowed", "too large to convert")
# Signs of tables and charts, and the ASCII that replaces them if an output cannot encode them.
SIGNS = (
    "\u2591\u2592\u2593\u2588"
    "\u2581\u2582\u2583\u2584\u2585\u2586\u2587"
    "\u00b7\u2502\u2503\u2500\u2501"
)
PLAIN = str.maketrans(SIGNS, ".:#@_.,-=+*.||--")
# Control characters could act on a terminal: Unicode has pictures of the first 32 and of DEL.
CONTROL = {n: 0x2400 + n for n in range(32) if chr(n) not in "\t\n"}
CONTROL[127] = 0x2421
CONTROL |= dict.fromkeys(range(128, 160), 0xFFFD)
# Python's arguments in the library's messages, and the flags that replace them in the shell.
FLAGS = {
    CUT_END: "--on-long-text cut",
    "adapter=None (in the shell --adapter none)": "--adapter none",
    "adapter=None": "--adapter none",
    "adapter=FOLDER": "--adapter FOLDER",
    "pass adapter=...": "name one with --adapter",
    "restore_from='evicted' needs": "--restore-from evicted needs",
    "drop restore_from": "drop --restore-from",
    "restore_tokens needs": "--restore-tokens needs",
    "drop restore_tokens": "drop --restore-tokens",
    "leave out restore_from": "leave out --restore-from",
    "leave out restore_tokens": "leave out --restore-tokens",
    "on_small_budget='fewer', in the shell ": "",
    "reached max_new_tokens": "reached --max-new-tokens",
    "evict with allocation='per-head'": "compress with --allocation per-head",
    "with an evictor, with allocation='per-head'": "with an evictor, with --allocation per-head",
}
# For each command, options that it lacks but others have, and what to use instead.
ELSEWHERE = {
    "eval": {"--adapter": "an adapter follows its evictor, as in kvzip@FOLDER"},
}
LONGEST = 400  # characters of a word in a message
ENDINGS = ("SIGTERM", "SIGHUP")
RECEIVED: list[int] = []  # signals that ended the command


def explain_usage_error(error: Any) -> str:
    """Return a usage error as one clause, with the names that may be meant in brackets."""
    # For an option, typer suggests names that have little in common with it, so look for near ones.
    if hasattr(error, "possibilities") and hasattr(error, "option_name") and error.ctx is not None:
        option = error.option_name
        if option in ELSEWHERE.get(error.ctx.command.name, {}):
            fix = ELSEWHERE[error.ctx.command.name][option]
            return f"No such option: {option}; {fix}"
        near = _find_meant_options(option, error.ctx.command)
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        return f"No such option: {make_visible(error.option_name)}{hint}"
    suggestion = r"\.? \(?(?:Did you mean|Possible options:) (.+?)\??\)?$"
    clause = re.sub(suggestion, r" (did you mean \1?)", error.format_message().rstrip("."))
    # The shell expands texts/*.txt to several names, for example.
    command = error.ctx.command.name if error.ctx is not None else ""
    if "unexpected extra argument" in clause and command == "compress":
        clause += "; name one text, or a folder of texts"
    return clause


def _find_meant_options(name: str, command: Any) -> list[str]:
    """Return the options of a command that a misspelled name may mean."""
    options = {}
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--"):
                options[option.removeprefix("--").replace("-", "_")] = option
    meant = find_meant_arguments(name.lstrip("-").replace("-", "_"), options)
    return [options[each] for each in meant]


@contextmanager
def explain_interrupt(fix: str) -> Iterator[None]:
    """Report how to continue the work of the block later, if a user interrupts it.

    `fix` is a clause without a period.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; {fix}.") from None


def report_error(error: BaseException) -> int:
    """Print an error that a user can fix and return the exit code; raise a bug again."""
    if isinstance(error, KeyboardInterrupt):
        return print_error(str(error) or "Interrupted; no half-written file was left.", 130)
    if isinstance(error, RestoreKVError):
        return print_error(name_flags(str(error)), 1)
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
        _flush_output()
        return 1
    text = str(error)
    if is_out_of_memory(error):
        return print_error(
            "There is not enough memory; use a shorter text, a smaller model or another device.",
            1,
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = error.filename or "the output"
        fix = FIXES.get(error.errno, "check it and try again")
        return print_error(f"Cannot use {where}: {error.strerror}; {fix}.", 1)
    if isinstance(error, OverflowError) or any(words in text for words in TOO_LARGE):
        return print_error("A number is too large to compute with; give a smaller one.", 1)
    if isinstance(error, UnicodeEncodeError) and _is_broken(error.object):
        return print_error(
            "A text or a name on the command line is not UTF-8; convert or rename it.", 1
        )
    raise error


def name_flags(message: str) -> str:
    """Return a message with the flags of the command line instead of Python's arguments."""
    for in_python, in_shell in FLAGS.items():
        message = message.replace(in_python, in_shell)
    stretch = re.escape(STRETCH_ROPE).replace(re.escape("{}"), r"(\d+)")
    return re.sub(stretch, r"--yarn \1", message)


def _is_broken(text: str) -> bool:
    """Return whether a text has a lone surrogate, which is how Python represents a byte on the
    command line that is not UTF-8.
    """
    return any("\ud800" <= each <= "\udfff" for each in text)


def prepare_process() -> None:
    """Refuse a closed stdout, replace characters that the terminal cannot show, and make SIGTERM
    and SIGHUP end the command as Ctrl-C does.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:  # closed: a file that is opened later would get its number
            os.open(os.devnull, os.O_RDWR)
            if number == 2:
                sys.stderr = open(os.devnull, mode)  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(
            print_error(
                "The standard output is closed; redirect it to a file, such as /dev/null.", 1
            )
        )
    codecs.register_error("plain", _replace_unencodable)
    cast("TextIOWrapper", sys.stdout).reconfigure(errors="plain")
    # No traceback for a plain OSError in a thread, such as TensorBoard's writer on a full disk.
    threading.excepthook = lambda failure: (
        None if failure.exc_type is OSError else threading.__excepthook__(failure)
    )
    for name in ENDINGS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores one
            signal.signal(number, _end_command)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an output cannot show by similar ASCII signs or question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end].translate(PLAIN)
    return part.encode("ascii", "replace").decode(), error.end


def make_visible(text: str) -> str:
    """Return a text with signs for control characters other than tabs and line ends, which could
    act on a terminal.
    """
    return text.translate(CONTROL)


def _end_command(number: int, frame: FrameType | None) -> None:
    """End the command as Ctrl-C does, so that nothing half-written stays."""
    RECEIVED.append(number)
    raise KeyboardInterrupt


def print_error(text: str, code: int) -> int:
    """Print a text as one line and return the exit code."""
    _flush_output()
    text = " ".join(make_visible(text).split())
    text = re.sub(rf"\S{{{LONGEST},}}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", text)
    print("error:", text, file=sys.stderr)
    return code


def _flush_output() -> None:
    """Flush stdout; if that fails, drop the rest of the output, which Python would otherwise try to
    write again at exit.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warnings() -> None:
    """Print our warnings as one line each on stderr and hide those of libraries."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", RestoreKVWarning)
    warnings.showwarning = lambda message, *_, **__: print(
        "warning:", name_flags(str(message)), file=sys.stderr
    )
