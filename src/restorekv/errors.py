"""What a user can do wrong, one class per kind; the message is one sentence naming cause and mend."""

import sys
import warnings


class RestoreKVError(ValueError):
    """A user's mistake. The command line prints the message alone and exits with a non-zero status."""


class BudgetError(RestoreKVError):
    """A ratio, token count or restore reserve that cannot be met."""


class CacheFileError(RestoreKVError):
    """A cache file that is missing, damaged, foreign, unwritable or made with another model."""


class AdapterError(RestoreKVError):
    """A restore adapter that is missing, damaged or trained for another model."""


class GateError(RestoreKVError):
    """A learned scorer that is missing, damaged or made for another model."""


class ModelError(RestoreKVError):
    """A model or tokenizer that cannot be loaded or is not supported."""


class RestoreKVWarning(UserWarning):
    """Something that works but is probably not what was meant, as an adapter trained with another evictor."""


INSIDE = ("restorekv", "torch", "contextlib")  # torch's decorators stand between the package's own calls


def warn(message: str) -> None:
    """Raises a RestoreKVWarning at the line of the user's code that called the package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RestoreKVWarning, stacklevel=level)


def first_sentence(error: BaseException) -> str:
    """What a library said, short enough for a sentence of ours and without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")
