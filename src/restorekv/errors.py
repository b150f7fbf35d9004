"""The exception classes, one for each kind of user error, and helpers that word their messages.

Every message is one sentence that names the cause and the fix.
"""

import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# How a text that is too long is made to fit, in Python; cli/errors.py has the flags.
CUT_END = "CompressionConfig(on_long_text='cut')"
STRETCH_ROPE = "load_model(..., rope={})"  # with the factor
# Parts of the messages with which PyTorch, the system and libraries report a lack of memory.
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "annot allocate memory",
    "not enough memory",
    "failed to map segment",
    "can't start new thread",
)


class RestoreKVError(ValueError):
    """A user error. The command line prints only the message and exits with a nonzero status.

    Attributes:
        option: The option, or the field of a request, that is at fault; "" if none is known.
    """

    option: str = ""


class BudgetError(RestoreKVError):
    """A ratio, token count or number of restore tokens that cannot be met."""


class CacheFileError(RestoreKVError):
    """A cache file that is missing, damaged, unwritable, of a different format or made with a
    different model.
    """


class AdapterError(RestoreKVError):
    """A restore adapter that is missing, damaged or trained for a different model."""


class GateError(RestoreKVError):
    """A learned scorer that is missing, damaged or made for a different model."""


class ModelError(RestoreKVError):
    """A model or tokenizer that cannot be loaded or is not supported."""


class OptionError(RestoreKVError):
    """An option, or a field of a request, with a value that cannot be used.

    Args:
        message: The sentence.
        option: The name of the option or field.
    """

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class TextTooLongError(RestoreKVError):
    """A text of more tokens than the model has room for.

    The message names the fixes in Python; the command line replaces them with its flags. The
    numbers are for callers that suggest other fixes.

    Attributes:
        tokens: How many tokens the text has.
        positions: How many positions the model has.
        room: The tokens that the text may have.
    """

    def __init__(
        self, message: str = "", *, tokens: int = 0, positions: int = 0, room: int = 0
    ) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.positions = positions
        self.room = room


class UnlikeContextsError(RestoreKVError):
    """Compressed contexts that cannot be composed, since they were not compressed alike."""


class RestoreKVWarning(UserWarning):
    """Something that works but is probably not what the user wants, such as an adapter trained with
    another evictor.
    """


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is not one of `known`."""
    if value not in known:
        raise RestoreKVError(f"{name} must be one of {', '.join(known)}, not {value!r}.")


def describe_missing_extra(what: str, package: str, extra: str) -> str:
    """Return the sentence about a package that only an optional extra installs.

    `what` needs the package: "This", "Serving" or "Reading a.gguf".
    """
    return f"{what} needs the package {package}; run pip install 'restorekv[{extra}]'."


def import_extra(name: str, extra: str, what: str = "This") -> ModuleType:
    """Import a package that only an optional extra installs, or a module of ours that needs one.

    Args:
        name: The module to import.
        extra: The extra of `pip install 'restorekv[extra]'` that brings it.
        what: What needs the package, for the message.

    Raises:
        RestoreKVError: The package is missing; the sentence names it and the pip command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise RestoreKVError(describe_missing_extra(what, missing, extra)) from error


@contextmanager
def reraise_as(kind: type[RestoreKVError]) -> Iterator[None]:
    """Raise a RestoreKVError of the block as one of `kind`, with the same sentence."""
    try:
        yield
    except RestoreKVError as error:
        raise kind(str(error)) from error


@contextmanager
def name_option(option: str) -> Iterator[None]:
    """Raise a RestoreKVError of the block as an OptionError of this option."""
    try:
        yield
    except RestoreKVError as error:
        raise OptionError(str(error), option) from error


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a RestoreKVError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or summarize_error(error)
        raise RestoreKVError(
            f"Cannot write {path}: {reason}; free some space or choose a different place or name."
        ) from error


# Frames that `warn` skips; torch's decorators are between the package's own calls.
_INTERNAL_PACKAGES = ("restorekv", "torch", "contextlib")


def warn(message: str) -> None:
    """Give a RestoreKVWarning at the line of the user's code that called the package."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _INTERNAL_PACKAGES:
            break
        level += 1
        frame = frame.f_back
    warnings.warn(message, RestoreKVWarning, stacklevel=level)


def join_words(words: Sequence[str], conjunction: str) -> str:
    """Return words as a sentence lists them: "a, b or c", with the conjunction before the last."""
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory."""
    text = str(error)
    return isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY)


def summarize_error(error: BaseException) -> str:
    """Return the start of a library's error message, without its period, to quote in one of
    ours.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    words = lines[0].split(". ")[0].rstrip(".:")
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def make_printable(text: object) -> str:
    """Make untrusted text safe to quote in an error message: printable, at most 120 characters."""
    text = str(text)
    if not text.isprintable():
        text = repr(text)
    return text[:120]
