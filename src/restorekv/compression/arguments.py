"""Sentences for calls with arguments that a function does not have, or without those it needs.

Python's own message names a parameter; a sentence can say what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from restorekv.errors import RestoreKVError
from restorekv.spec import suggest_argument

P = ParamSpec("P")
R = TypeVar("R")


class CallError(RestoreKVError, TypeError):
    """A call with wrong arguments: a TypeError, as for any function, whose message says the fix."""


def explain_arguments(
    hints: Mapping[str, str], usage: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that refuses wrong arguments with a sentence.

    Args:
        hints: By the name of an argument that the function does not have, what to write instead.
        usage: How the function is called, for calls that lack an argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = [name for name in kwargs if name not in signature.parameters]
                if unknown:
                    hint = suggest_argument(unknown[0], list(signature.parameters), hints)
                    sentence = f"there is no argument {unknown[0]}; {hint}"
                else:
                    sentence = f"{error}; call {usage}."
                raise CallError(f"{function.__name__}: {sentence}") from None
            return function(*args, **kwargs)

        return call

    return decorate
