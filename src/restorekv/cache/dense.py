"""What the package reads of a full cache: layers with dense keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from restorekv.cache.states import PairlessLayer


class DenseLayer(Protocol):
    """A layer of a filled cache of transformers or of a view of one.

    keys and values (B, H, columns, D) hold every position; those of a layer with a sliding window
    (`is_sliding`) hold the last ones. A `PairlessLayer` has none, as if it had no heads. If
    `is_initialized` is False, there are none yet, or they were released.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool
    is_sliding: bool

    def get_seq_length(self) -> int: ...


def list_dense_layers(full: Cache) -> list[DenseLayer]:
    """Return the layers of a full cache.

    Only their annotation changes: in transformers a layer may hold other things than keys and
    values. The probe refuses models with such layers before any of their caches is read.
    """
    return cast(list[DenseLayer], full.layers)


def list_full_attention(full: Cache) -> list[DenseLayer]:
    """Return the L layers of a full cache that see the whole text; only these are scored."""
    # A hybrid model's layers with a window, and those without pairs, are neither scored nor
    # evicted, so they have no row in the scores (L, H, T).
    found = []
    for layer in list_dense_layers(full):
        if not layer.is_sliding and not isinstance(layer, PairlessLayer):
            found.append(layer)
    return found


class LatentLayer(DynamicLayer):
    """One layer of a full cache whose values are its keys, in one tensor (1, 1, columns, D), as
    latent attention has them (model/latent.py).
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append (1, 1, Q, D) and return all columns twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None, "made by the line above, or by an earlier update"
        keys = torch.cat([self.keys, key_states], -2)
        self.keys = keys
        self.values = keys
        return keys, keys


def make_plain_cache(pairs: Iterable[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Return a cache of transformers that begins with the keys and values (1, H, m, D) of every
    layer.
    """
    plain = DynamicCache()
    for index, (keys, values) in enumerate(pairs):
        plain.update(keys, values, index)
    for layer in list[Any](plain.layers):
        # Assisted decoding of transformers 5.24 reads the whole prompt again into a cache that
        # begins with a part of it. It refuses a cache that says this.
        layer.is_croppable = False  # type: ignore[reportAttributeAccessIssue]
    return plain
