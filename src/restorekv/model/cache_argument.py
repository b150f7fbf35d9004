"""The argument in which a model takes its cache: `past_key_values` up to transformers 5.23, `cache`
from 5.24 on.

A class from outside transformers may keep the old name under a new version, so the class itself is
asked. Passing the old name where the new one is expected works until 5.40, with a warning for every
call.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache

NEW_NAME = "cache"
OLD_NAME = "past_key_values"
NEOX_NAME = "layer_past"  # of the layers of GPT-NeoX and of their attention


def pass_cache(model: Any, cache: Cache) -> dict[str, Cache]:
    """Return `cache` as the keyword argument of a model's forward pass."""
    return {_find_name(type(model)): cache}


def pass_cache_to_generate(cache: Cache) -> dict[str, Cache]:
    """Return `cache` as the keyword argument of `model.generate`, which transformers defines."""
    return {_get_generation_name(): cache}


def find_cache(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache among the keyword arguments of a module's call; None if there is none."""
    for name in (NEW_NAME, OLD_NAME, NEOX_NAME):
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def replace_cache(arguments: dict[str, Any], change: Callable[[Cache], Any]) -> None:
    """Replace the cache among the keyword arguments of a module's call, if there is one, by what
    `change` makes of it.
    """
    for name in (NEW_NAME, OLD_NAME):
        if arguments.get(name) is not None:
            arguments[name] = change(arguments[name])


# A process meets few classes of models; a test run meets some hundred.
@lru_cache(maxsize=256)
def _find_name(kind: type) -> str:
    """Return the name that a class's forward pass has for its cache."""
    called: Any = kind.forward if issubclass(kind, nn.Module) else kind.__call__
    parameters = signature(called).parameters
    for name in (NEW_NAME, OLD_NAME):
        if name in parameters:
            return name
    # A wrapper that hands its arguments on to a model of transformers
    return _get_generation_name()


@lru_cache(maxsize=1)
def _get_generation_name() -> str:
    """Return the name that this version of transformers uses in its own code."""
    mixin: Any = GenerationMixin  # which the checker takes for a model
    parameters = signature(mixin.prepare_inputs_for_generation).parameters
    return NEW_NAME if NEW_NAME in parameters else OLD_NAME
