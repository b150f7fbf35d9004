"""Error messages for calls with arguments that a function does not have, or without those it needs.

Python's own message only names the argument; these also say what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from restorekv.errors import RestoreKVError
from restorekv.spec import suggest_argument

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


class CallError(RestoreKVError, TypeError):
    """A call with wrong arguments: a TypeError as for any function, with a message that says how to
    fix the call.
    """


def explain_arguments(
    hints: Mapping[str, str], usage: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that refuses wrong arguments with a sentence.

    Args:
        hints: What to write instead of an argument that the function does not have, by its name.
        usage: How the function is called, for calls that lack an argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = _find_unknown(kwargs, signature)
                if unknown:
                    hint = suggest_argument(unknown, list(signature.parameters), hints)
                    sentence = f"there is no argument {unknown}; {hint}"
                else:
                    sentence = f"{error}; call {usage}."
                raise CallError(f"{function.__name__}: {sentence}") from None
            return function(*args, **kwargs)

        return call

    return decorate


def explain_fields(hints: Mapping[str, str], usage: str) -> Callable[[C], C]:
    """Return a decorator for dataclasses that refuses wrong arguments with a sentence that lists
    the fields.

    Args:
        hints: What to write instead of an argument that is not a field, by its name.
        usage: How the class is called, for calls that Python refuses for another reason.
    """

    def decorate(kind: C) -> C:
        create = kind.__init__
        signature = inspect.signature(create)
        names = [each.name for each in fields(kind)]

        @wraps(create)
        def check_and_create(self: object, *args: Any, **kwargs: Any) -> None:
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                unknown = _find_unknown(kwargs, signature)
                sentence = f"{error}; call {usage}."
                if unknown:
                    hint = suggest_argument(unknown, names, hints)
                    sentence = f"there is no argument {unknown}; {hint}"
                    # If no field is like the name, the hint itself lists the fields.
                    if not hint.endswith(f"{names[-1]}."):
                        sentence += f" The arguments are {', '.join(names)}."
                raise CallError(f"{kind.__name__}: {sentence}") from None
            create(self, *args, **kwargs)

        kind.__init__ = check_and_create
        return kind

    return decorate


def _find_unknown(given: Mapping[str, object], signature: inspect.Signature) -> str | None:
    """Return the first keyword argument that a signature does not have, or None."""
    return next((name for name in given if name not in signature.parameters), None)
