"""What a user can do wrong, one class per kind; the message is one sentence naming cause and mend."""


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


def first_sentence(error: BaseException) -> str:
    """What a library said, short enough for a sentence of ours and without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")
