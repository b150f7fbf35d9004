"""One exception class for each kind of user error; the message is one sentence that names the cause and the fix."""


class RestoreKVError(ValueError):
    """A user error. The command line prints only the message and exits with a nonzero status."""


class BudgetError(RestoreKVError):
    """A ratio, token count or number of restore tokens that cannot be met."""


class CacheFileError(RestoreKVError):
    """A cache file that is missing, damaged, unwritable, of another format or made with another model."""


class AdapterError(RestoreKVError):
    """A restore adapter that is missing, damaged or trained for another model."""


class GateError(RestoreKVError):
    """A learned scorer that is missing, damaged or made for another model."""


class ModelError(RestoreKVError):
    """A model or tokenizer that cannot be loaded or is not supported."""


class RestoreKVWarning(UserWarning):
    """Something that works but is probably not what the user wants, such as an adapter trained with another evictor."""


def first_sentence(error: BaseException) -> str:
    """Returns the start of a library's error message, without its period, to quote in one of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")
