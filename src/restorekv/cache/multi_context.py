"""Several compressed documents in one batch: its rows ask different contexts in one pass of the
model.

In each layer every document keeps its own context and its own tail, with one row per question. New
pairs go to the documents' rows and attention is computed document by document; everything else sees
one batch. The tails end together but start at different columns, since they hold different numbers
of restore tokens: a tail corresponds to the last columns of the mask. Positions differ from row to
row and are up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from restorekv.cache.ragged import AnyTailLayer, RaggedCache
from restorekv.cache.states import PairlessLayer
from restorekv.cache.tail import CompressedLayer


class ManyContextsLayer(CompressedLayer):
    """One layer of several documents: a ragged or sliding layer for each of them."""

    seen = 0  # masks and positions are the caller's

    def __init__(self, contexts: Sequence[AnyTailLayer]) -> None:
        super().__init__()
        self.contexts = list(contexts)
        self.dtype = contexts[0].dtype
        self.device = contexts[0].device
        self.is_initialized = True
        # The pairs are in the layers of the documents. transformers' own code asks an initialized
        # layer how many numbers it holds itself.
        self.keys = self.values = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def heads(self) -> int:
        return self.contexts[0].heads

    @property
    def columns(self) -> int:
        """Columns of the longest tail."""
        return max(context.columns for context in self.contexts)


class MultiContextLayer(ManyContextsLayer):
    """One layer of all documents; the first one has the first rows of the batch, and so on."""

    @property
    def rows(self) -> list[int]:
        """The number of rows of each document."""
        return [len(context.keys) for context in self.contexts]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, columns, D), for kvpress; see TailLayer.shape."""
        return sum(self.rows), self.heads, self.columns, self.contexts[0].keys.shape[-1]

    def split_query(
        self, query: Tensor, mask: Tensor | None
    ) -> Iterator[tuple[AnyTailLayer, Tensor, Tensor | None]]:
        """Yield each document with its rows of query (B, H*G, Q, D) and of the mask (B or 1, 1, Q,
        columns) or None.
        """
        # Rows of the batch are ordered by document, so that each document's rows are one slice.
        queries = query.split(self.rows)
        if mask is None:
            for context, own_query in zip(self.contexts, queries, strict=True):
                yield context, own_query, None
            return
        masks = mask.expand(len(query), -1, -1, -1).split(self.rows)
        for context, own_query, own_mask in zip(self.contexts, queries, masks, strict=True):
            # A mask as wide as the longest tail: a shorter tail corresponds to its last columns.
            first = own_mask.shape[-1] - context.columns  # tails are aligned at their last column
            yield context, own_query, own_mask[..., first:]

    def make_static(self, count: int, written: Tensor) -> None:
        """Make the tail of every document static, with `count` more columns; see
        TailLayer.make_static.
        """
        for context in self.contexts:
            context.make_static(count, written)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Append (B, H, Q, D) to the tails and return this layer twice, for attention."""
        keys = key_states.split(self.rows)
        values = value_states.split(self.rows)
        for context, own_keys, own_values in zip(self.contexts, keys, values, strict=True):
            context.update(own_keys, own_values)
        return self, self

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given in ascending order, and drop documents that have none left."""
        # `indices` count rows of the whole batch; each document selects by the numbers of its own
        # rows.
        remaining = []
        first = 0
        for context, rows in zip(self.contexts, self.rows, strict=True):
            in_context = (indices >= first) & (indices < first + rows)
            own = indices[in_context] - first
            first += rows
            if len(own):
                context.batch_select_indices(own)
                remaining.append(context)
        self.contexts = remaining


class SeparateStates:
    """The layers without pairs of several forks in one layer of a batch; each fork's rows are read
    by a pass of their own (`forward_groups` in generation/decoding.py).
    """

    def __init__(self, contexts: Sequence[PairlessLayer]) -> None:
        self.contexts = list(contexts)


def fork_caches(caches: Sequence[RaggedCache], lengths: Sequence[int]) -> Cache:
    """Return a cache for a batch in which row i asks caches[i]; a plain fork if all are the same
    cache.

    Args:
        caches: The cache of each row.
        lengths: How many tokens each row will read. Where layers have states, rows share a fork
            only if they read as many, since padding would change their states.
    """
    # Neighboring rows that ask the same cache share one fork of it.
    forks = []
    for (cache, _), rows in groupby(zip(caches, lengths, strict=True), key=_name_fork):
        forks.append(cache.fork(len(list(rows))))
    if len(forks) == 1:
        return forks[0]
    layers: list[Any] = []
    # The layers of all forks at one depth become one layer of the batch.
    for at_depth in zip(*(fork.layers for fork in forks), strict=True):
        if isinstance(at_depth[0], PairlessLayer):
            layers.append(SeparateStates(at_depth))
        else:
            layers.append(MultiContextLayer(at_depth))
    return Cache(layers=layers)


def _name_fork(row: tuple[RaggedCache, int]) -> tuple[RaggedCache, int]:
    """Return what rows of one fork have in common: the cache, and with states the length."""
    cache, length = row
    return cache, length if cache.with_states else 0
