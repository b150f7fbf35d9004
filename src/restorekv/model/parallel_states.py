"""Layers that have pairs and a state, as in Falcon-H1, where attention and a state-space model read
the same input in parallel.

transformers 5.24 keeps both in one layer of its cache. In a cache of restorekv the pairs of a model
of N such layers are in the first N layers, and their states in N more (`find_state_layers` in
shape.py). So a layer of a cache has either pairs or a state, and whatever evicts, copies, saves or
restores layers needs to know no third kind.

Here the classes that compute with states are changed, so that they find them there. With any other
cache they compute what they always did.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.cache.states import StateLayer
from restorekv.errors import ModelError
from restorekv.model.cache_argument import replace_cache
from restorekv.model.shape import find_attention, get_backbone, list_parallel_layers

_lock = threading.Lock()
_changed_classes: set[type] = set()


class _CacheOfStates:
    """A cache in which a module finds the states of its layer.

    Args:
        cache: The cache.
        number: The layer of it that has the states.
    """

    def __init__(self, cache: Cache, number: int) -> None:
        self.cache = cache
        self.number = number

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.cache.get_conv_state(self.number, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.cache.get_recurrent_state(self.number, *args, **kwargs)

    def update_conv_state(self, states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update_conv_state(states, self.number, *args, **kwargs)

    def update_recurrent_state(self, states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update_recurrent_state(states, self.number, *args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        return self.cache.has_previous_state(self.number, *args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.cache.is_recording_past(self.number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def install_parallel_states(model: PreTrainedModel) -> None:
    """Let the classes of modules with a state, in layers that also have pairs, use caches of
    restorekv.

    Raises:
        ModelError: The module that has a layer's state is not to be found.
    """
    backbone: Any = get_backbone(model)
    for index in list_parallel_layers(model.config):
        module = _find_module(backbone.layers[index], index)
        if module is None:
            raise ModelError(
                f"{type(model).__name__} has layers with pairs and a state, whose parts are not "
                "where restorekv looks for them; use another model."
            )
        with _lock:
            if type(module) not in _changed_classes:
                _change_class(type(module))
                _changed_classes.add(type(module))


def _find_module(layer: nn.Module, index: int) -> nn.Module | None:
    """Return the one module besides attention that has the layer's number; None if there is not
    exactly one.
    """
    attention = find_attention(layer)
    found = []
    for module in layer.children():
        if module is not attention and getattr(module, "layer_idx", None) == index:
            found.append(module)
    return found[0] if len(found) == 1 else None


def _change_class(kind: Any) -> None:
    """Let modules of a class find their states in the further layers of a cache of restorekv."""
    original_forward = kind.forward

    @functools.wraps(original_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def wrap_cache(cache: Cache) -> Any:
            number = _find_state_layer(cache, self.layer_idx)
            return cache if number is None else _CacheOfStates(cache, number)

        replace_cache(kwargs, wrap_cache)
        return original_forward(self, *args, **kwargs)

    kind.forward = forward


def _find_state_layer(cache: Any, index: int) -> int | None:
    """Return the number of the layer of a cache of restorekv that has the state of the model's
    layer `index`; None in any other cache.
    """
    layers = getattr(cache, "layers", ())
    number = len(layers) // 2 + index
    if number < len(layers) and isinstance(layers[number], StateLayer):
        return number
    return None
