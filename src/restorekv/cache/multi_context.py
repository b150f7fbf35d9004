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

from torch import Tensor
from transformers.cache_utils import Cache

from restorekv.cache.ragged import ContextLayer, RaggedCache
from restorekv.cache.tail import CompressedLayer


class MultiPartLayer(CompressedLayer):
    """One layer of several documents: a ragged layer for each of them."""

    seen = 0  # masks and positions are the caller's

    def __init__(self, parts: Sequence[ContextLayer]) -> None:
        super().__init__()
        self.parts = list(parts)
        self.dtype = parts[0].dtype
        self.device = parts[0].device
        self.is_initialized = True

    @property
    def heads(self) -> int:
        return self.parts[0].heads

    @property
    def columns(self) -> int:
        """Columns of the longest tail."""
        return max(part.columns for part in self.parts)


class MultiContextLayer(MultiPartLayer):
    """One layer of all documents; the first part holds the first rows of the batch, and so on."""

    @property
    def rows(self) -> list[int]:
        """The number of rows of each part."""
        return [len(part.keys) for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, columns, D), for kvpress; see TailLayer.shape."""
        return sum(self.rows), self.heads, self.columns, self.parts[0].keys.shape[-1]

    def split_query(
        self, query: Tensor, mask: Tensor | None
    ) -> Iterator[tuple[ContextLayer, Tensor, Tensor | None]]:
        """Yield each part with its rows of query (B, H*G, Q, D) and of the mask (B or 1, 1, Q,
        columns) or None.
        """
        # Rows of the batch are ordered by document, so that each part's rows are one slice.
        queries = query.split(self.rows)
        if mask is None:
            for part, part_query in zip(self.parts, queries, strict=True):
                yield part, part_query, None
            return
        masks = mask.expand(len(query), -1, -1, -1).split(self.rows)
        for part, part_query, part_mask in zip(self.parts, queries, masks, strict=True):
            # A mask as wide as the longest tail: a shorter tail corresponds to its last columns.
            first = part_mask.shape[-1] - part.columns  # tails are aligned at their last column
            yield part, part_query, part_mask[..., first:]

    def make_static(self, count: int, written: Tensor) -> None:
        """Make the tail of every part static; see TailLayer."""
        for part in self.parts:
            part.make_static(count, written)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Append (B, H, Q, D) to the tails; see TailLayer."""
        keys = key_states.split(self.rows)
        values = value_states.split(self.rows)
        for part, part_keys, part_values in zip(self.parts, keys, values, strict=True):
            part.update(part_keys, part_values)
        return self, self

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given in ascending order, and drop documents that have none left."""
        # `indices` count rows of the whole batch; each part selects by the numbers of its own rows.
        remaining = []
        first = 0
        for part, rows in zip(self.parts, self.rows, strict=True):
            in_part = (indices >= first) & (indices < first + rows)
            own = indices[in_part] - first
            first += rows
            if len(own):
                part.batch_select_indices(own)
                remaining.append(part)
        self.parts = remaining


def fork_caches(caches: Sequence[RaggedCache]) -> Cache:
    """Return a cache for a batch whose row i asks caches[i]; where all are the same cache, that is
    a plain fork.
    """
    # Neighboring rows that ask the same cache share one fork of it.
    forks = [
        cache.fork(len(list(rows))) for cache, rows in groupby(caches, key=lambda cache: cache)
    ]
    if len(forks) == 1:
        return forks[0]
    layers = []
    # The layers of all forks at one depth become one layer of the batch.
    for parts in zip(*(fork.layers for fork in forks), strict=True):
        layers.append(MultiContextLayer(parts))
    return Cache(layers=layers)
