"""Several compressed documents behind one batch: rows of different contexts in one pass of the model.

Of a layer every document keeps its own context and its own tail, for as many rows as it has questions; what a pass
appends is dealt out by rows, and attention is computed document by document. Everything else sees one batch. The tails
end together and begin apart, as they hold different numbers of restore tokens: the last columns of a mask are a tail's.
Positions differ from row to row and are the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from restorekv.cache.ragged import RaggedCache, RaggedLayer


class MultiContextLayer(CacheLayerMixin):
    """One layer of all documents; `parts` hold neighbouring rows of the batch, the first part the first rows."""

    is_sliding = False

    def __init__(self, parts: Sequence[RaggedLayer]) -> None:
        super().__init__()
        self.parts = list(parts)
        self.dtype, self.device = parts[0].dtype, parts[0].device
        self.is_initialized = True

    @property
    def heads(self) -> int:
        return self.parts[0].heads

    @property
    def columns(self) -> int:
        """Of the longest tail."""
        return max(part.columns for part in self.parts)

    @property
    def rows(self) -> list[int]:
        """Of each part."""
        return [len(part.keys) for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, columns, D), for kvpress; see TailLayer.shape."""
        return sum(self.rows), self.heads, self.columns, self.parts[0].keys.shape[-1]

    def split(self, query: Tensor, mask: Tensor | None) -> Iterator[tuple[RaggedLayer, Tensor, Tensor | None]]:
        """query (B, H*G, Q, D), mask (B or 1, 1, Q, columns) or None -> every part with its queries and its mask."""
        masks = [None] * len(self.parts)
        if mask is not None:
            masks = mask.expand(len(query), -1, -1, -1).split(self.rows)
        for part, queries, own in zip(self.parts, query.split(self.rows), masks, strict=True):
            yield part, queries, None if own is None else own[..., own.shape[-1] - part.columns :]

    def fix(self, count: int, moved: Tensor) -> None:
        """Of every part; see TailLayer."""
        for part in self.parts:
            part.fix(count, moved)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Appends (B, H, Q, D) to the tails and hands itself to the attention function, twice."""
        for part, *states in zip(self.parts, key_states.split(self.rows), value_states.split(self.rows), strict=True):
            part.update(*states)
        return self, self

    def lazy_initialization(self, *_: object) -> None:
        """A compressed layer is born complete."""

    def get_seq_length(self, *_: object) -> int:
        """Columns before the next one, for masks; the contexts have none."""
        return self.columns

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """As TailLayer's, of the longest tail."""
        return self.columns + (query.shape[0] if isinstance(query, Tensor) else query), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under the name that transformers 5.2 asks for."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in ascending order; a document without rows is left out."""
        kept, first = [], 0
        for part, rows in zip(self.parts, self.rows, strict=True):
            own = indices[(indices >= first) & (indices < first + rows)] - first
            first += rows
            if len(own):
                part.batch_select_indices(own)
                kept.append(part)
        self.parts = kept


def forked(caches: Sequence[RaggedCache]) -> Cache:
    """A cache for a batch whose row i asks caches[i]: a fork where all are one, otherwise joint."""
    forks = [cache.fork(len(list(rows))) for cache, rows in groupby(caches, key=lambda cache: cache)]
    if len(forks) == 1:
        return forks[0]
    return Cache(layers=[MultiContextLayer(parts) for parts in zip(*(fork.layers for fork in forks), strict=True)])
