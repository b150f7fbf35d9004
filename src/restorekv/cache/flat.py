"""Rows of any number of documents in one pass of the model, each with its own number of new tokens.

The tokens of all rows are laid end to end, (1, T): the layers of the model treat every token by
itself, and only attention has to know where a row begins. So a row that decodes its next token and
one that prefills a chunk of a long prompt share a pass. Only rows of one document, which are read
in one block, may need padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from restorekv.cache.multi_context import ManyContextsLayer, MultiContextLayer
from restorekv.cache.ragged import AnyTailLayer, ContextLayer
from restorekv.cache.states import EmptyLayer, PairlessLayer, StateLayer, join_states
from restorekv.cache.tail import SPARE


@dataclass(frozen=True)
class Block:
    """What a pass reads for one document: `queries` new tokens in each of `rows` rows.

    mask (B, 1, Q, columns) says what each query sees of the tail, new tokens included; None is
    causal.
    """

    rows: int
    queries: int
    mask: Tensor | None

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class FlatLayer(ManyContextsLayer):
    """One layer of a pass: the layers of several documents, and each document's block of tokens."""

    def __init__(self, contexts: Sequence[AnyTailLayer], blocks: Sequence[Block]) -> None:
        super().__init__(contexts)
        self.blocks = list(blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """(1, H, columns, D), for kvpress; see TailLayer.shape."""
        return 1, self.heads, self.columns, self.contexts[0].keys.shape[-1]

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Append (1, H, T, D) to the tails and return this layer twice, for attention."""
        # (1, H, T, D) is cut into the rows of each document; the tails then grow by
        # different numbers of columns in one pass.
        keys = self._split_rows(key_states)
        values = self._split_rows(value_states)
        for context, own_keys, own_values in zip(self.contexts, keys, values, strict=True):
            context.update(own_keys, own_values)
        return self, self

    def split_query(self, query: Tensor) -> Iterator[tuple[AnyTailLayer, Tensor, Tensor | None]]:
        """Yield documents with their rows (B, H*G, Q, D) of query (1, H*G, T, D), and masks."""
        queries = self._split_rows(query)
        for context, rows, block in zip(self.contexts, queries, self.blocks, strict=True):
            yield context, rows, block.mask

    def _split_rows(self, states: Tensor) -> list[Tensor]:
        """Return views (B, H, Q, D) of states (1, H, T, D), one for each document."""
        # Tokens of one document lie next to each other: its first row, then its second, and so on.
        pieces = states[0].split([block.tokens for block in self.blocks], dim=1)
        views = []
        for piece, block in zip(pieces, self.blocks, strict=True):
            views.append(piece.unflatten(1, (block.rows, block.queries)).transpose(0, 1))
        return views


class StackedLayer(MultiContextLayer):
    """One layer of a pass in which every document reads as many tokens in each of its rows.

    The rows lie in a batch, (B, Q), and not end to end: a layer with states computes a row from its
    first token to its last.
    """

    def __init__(self, contexts: Sequence[AnyTailLayer], blocks: Sequence[Block]) -> None:
        super().__init__(contexts)
        self.blocks = list(blocks)

    def split_query(
        self, query: Tensor, mask: Tensor | None
    ) -> Iterator[tuple[AnyTailLayer, Tensor, Tensor | None]]:
        """Yield each document with its rows of query (B, H*G, Q, D), and its block's own mask."""
        queries = query.split(self.rows)
        for context, own_query, block in zip(self.contexts, queries, self.blocks, strict=True):
            yield context, own_query, block.mask


def share_tail(layer: ContextLayer) -> ContextLayer:
    """Return a layer with the same context that shares the tail until either of them grows. States
    are copied.
    """
    if isinstance(layer, PairlessLayer):
        return layer.copy()
    # A shallow copy shares the context. Assigning the pair drops the copy's claim on the buffers,
    # so that its next append makes new buffers instead of writing into the other's.
    other = copy.copy(layer)
    other.keys, other.values = layer.keys_and_values
    return other


def gather_rows(
    sources: Sequence[tuple[ContextLayer, Sequence[int]]], widths: Sequence[int], room: int
) -> ContextLayer:
    """Return one layer with chosen rows of layers over one context, their tails aligned at the last
    column.

    Args:
        sources: The layers, each with the indices of the rows to take from it.
        widths: How many of its last columns each source keeps; its rows need no others.
        room: Columns that the tail is expected to grow by, reserved at once.
    """
    if isinstance(sources[0][0], EmptyLayer):
        return EmptyLayer()
    if isinstance(sources[0][0], StateLayer):
        return _gather_states(sources)
    # All rows get the width of the longest; a shorter row starts with columns of zeros, which its
    # mask hides.
    width = max(widths)
    indices = [torch.tensor(list(rows), device=layer.device) for layer, rows in sources]
    buffers = []
    for number in range(2):  # keys, then values
        like = sources[0][0].keys_and_values[number]
        count = sum(len(rows) for rows in indices)
        buffer = like.new_zeros(count, like.shape[1], width + max(room, SPARE), like.shape[-1])
        first = 0
        for (layer, _), rows, own_width in zip(sources, indices, widths, strict=True):
            # The last `own_width` columns of the source, without what its rows do not need.
            states = layer.keys_and_values[number][:, :, layer.columns - own_width :]
            block = buffer[first : first + len(rows), :, width - own_width : width]
            block.copy_(states.index_select(0, rows))
            first += len(rows)
        buffers.append(buffer)
    gathered = copy.copy(sources[0][0])
    # Assigning keys and values forgets the buffers, so these are assigned after them.
    gathered.keys, gathered.values = buffers
    gathered.buffers = buffers[0], buffers[1]
    gathered.set_end(width)
    return gathered


def _gather_states(sources: Sequence[tuple[Any, Sequence[int]]]) -> StateLayer:
    """Return a layer with the states of chosen rows of layers."""
    chosen = []
    for layer, rows in sources:
        own = layer.copy()
        own.batch_select_indices(torch.tensor(list(rows)))
        chosen.append(own)
    return join_states(chosen)
