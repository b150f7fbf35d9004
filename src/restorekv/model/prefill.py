"""Filling a cache: a chunked prefill, and a cache that can be looked at without being filled.

Only the decoder runs, never the LM head, and no gradient is recorded.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.shape import decoder

CHUNK = 4096
MASK = 1 << 26  # entries of a chunk's mask, so that it takes as much memory for a million tokens as for 16,384


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, chunk: int | None = None, into: Cache | None = None) -> Cache:
    """ids (1, S + T) -> keys and values (1, H, S + T, D) of every layer; `chunk` bounds the memory of activations.

    They join what the cache `into` holds, or make a new one. Without `chunk` the mask is bounded too.
    """
    full = DynamicCache() if into is None else into
    chunk = chunk or max(min(CHUNK, MASK // ids.shape[-1]), 1)
    for piece in ids.to(model.device).split(chunk, dim=-1):
        decoder(model)(input_ids=piece, past_key_values=full, use_cache=True)
    return full


class PassingLayer(DynamicLayer):
    """Shows a dense layer's pairs followed by those of the pass at hand; `keys` and `values` are the pass's own.

    Nothing has to be cut back after a pass, and of all layers just one holds the joined copy at a time. The dense layer
    is not looked at before its turn: it may lie elsewhere until then.
    """

    def __init__(self, dense: DynamicLayer, columns: int | None = None) -> None:
        super().__init__()
        self.dense, self.columns = dense, columns
        self.is_initialized = True

    def get_seq_length(self, *_: object) -> int:
        return self.dense.get_seq_length() if self.columns is None else self.columns

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Q new pairs (1, H, Q, D) -> all of them, (1, H, S + T + Q, D)."""
        self.keys, self.values = key_states, value_states
        held = (x[..., : self.columns, :] for x in (self.dense.keys, self.dense.values))
        return tuple(torch.cat(pair, dim=-2) for pair in zip(held, (key_states, value_states), strict=True))


def passing(full: Cache, columns: int | None = None) -> Cache:
    """A cache for passes that read `full`, or its first `columns`, and leave no trace in it, whatever happens.

    Of a ragged cache, these are columns of its tail; the whole context is read.
    """
    return Cache(layers=[reading(layer, columns) for layer in full.layers])


class QueryOnlyLayer(DynamicLayer):
    """Shows the pairs of a pass alone, at positions after `seen` held ones: its observer computes attention."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen, self.is_initialized = seen, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """(1, H, Q, D) as they are."""
        return key_states, value_states

    def get_seq_length(self, *_: object) -> int:
        return self.seen

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Width and offset of the mask: the pass alone. transformers 5.2 gives positions, later ones their number."""
        return query.shape[0] if isinstance(query, Tensor) else query, self.seen


def behind(full: Cache) -> Cache:
    """A cache for passes whose observer reads `full` itself; nothing of it is copied."""
    return Cache(layers=[QueryOnlyLayer(full.get_seq_length()) for _ in full.layers])


def reading(layer: DynamicLayer | RaggedLayer, columns: int | None) -> PassingLayer | RaggedLayer:
    """One layer of such a cache."""
    if not isinstance(layer, RaggedLayer):
        return PassingLayer(layer, columns)
    tail = (x[..., :columns, :] for x in (layer.keys, layer.values))
    context = (layer.context_keys, layer.context_values, layer.offsets, layer.positions)
    return RaggedLayer(*context, layer.seen, *tail, layer.bias)
