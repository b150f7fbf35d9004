"""Layers with a sliding window, in models that also have layers that see the whole text.

A token in such a layer sees itself and the W - 1 tokens before it. So nothing is evicted there: of
a context only the last W - 1 columns matter, and they stay dense, in every head. What follows is an
ordinary tail, from which nothing is dropped: turns can be taken back, and what a question sees is
decided by positions (model/attention/sliding.py).

transformers makes one mask for all layers with `is_sliding` and one for all others. It asks the
first layer of each kind for the sizes (`get_mask_sizes`).
"""

# Keys and values are properties of a tail and attributes in transformers.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from restorekv.cache.tail import KeysValues, TailLayer, count_queries


class RecentLayer(DynamicLayer):
    """A dense layer of a full cache that keeps its last W - 1 + `margin` columns.

    Args:
        window: W.
        margin: Extra columns to keep, for evictors that read the end of a text twice (SnapKV).
    """

    is_sliding = True
    is_croppable = False

    def __init__(self, window: int, margin: int = 0) -> None:
        super().__init__()
        self.window = window
        self.margin = margin
        self.first = 0  # position of the first column that is held

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append (1, H, Q, D). Return the held columns with the new ones, then keep only the last
        W - 1 + `margin`.
        """
        keys, values = super().update(key_states, value_states)
        # What no later query can see is dropped, but the pass that just ran gets all columns.
        surplus = keys.shape[-2] - (self.window - 1 + self.margin)
        if surplus > 0:
            # Copied, because a view would keep the dropped columns alive.
            self.keys = keys[:, :, surplus:].clone()
            self.values = values[:, :, surplus:].clone()
            self.first += surplus
        return keys, values

    def get_seq_length(self, *_: object) -> int:
        """Return the number of positions seen."""
        return self.first + super().get_seq_length()

    # transformers 5.2 names the parameter `cache_position`.
    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: int | Tensor
    ) -> tuple[int, int]:
        """Return the mask's width and the position of its first column."""
        return super().get_seq_length() + count_queries(query), self.first

    # Positions and not indices: after a long text column 0 of the tensors is not position 0.
    def take_columns(self, start: int, end: int) -> KeysValues:
        """Return keys and values (1, H, end - start, D) of the positions [start, end)."""
        if not self.first <= start <= end <= self.get_seq_length():
            raise ValueError(
                f"positions {start}:{end} are not held; this layer holds "
                f"{self.first}:{self.get_seq_length()}"
            )
        keys = self.keys
        values = self.values
        assert keys is not None and values is not None, "nothing was read into this layer"
        columns = slice(start - self.first, end - self.first)
        return keys[:, :, columns], values[:, :, columns]


class SlidingLayer(TailLayer):
    """One layer with a window over a context: its last columns, and the tail that follows it.

    Args:
        context_keys: (1, H, N, D), the last N <= W - 1 columns of the context.
        context_values: (1, H, N, D).
        first: The position of the first of these columns.
        window: W.
        seen: The position of the tail's first column: S + T, plus the offset if there is one.
        restore_keys: (1, H, n, D), the first columns of the tail.
        restore_values: (1, H, n, D).
    """

    is_sliding = True

    def __init__(
        self,
        context_keys: Tensor,
        context_values: Tensor,
        first: int,
        window: int,
        seen: int,
        restore_keys: Tensor,
        restore_values: Tensor,
    ) -> None:
        super().__init__(restore_keys, restore_values, seen)
        self.context_keys = context_keys
        self.context_values = context_values
        self.first = first
        self.window = window

    @classmethod
    def from_recent(
        cls, dense: RecentLayer, columns: int, seen: int, restored: KeysValues | None = None
    ) -> SlidingLayer:
        """Return the layer of a context, made from a full cache's layer.

        Args:
            dense: The layer of a full cache.
            columns: How many positions the context has, S + T.
            seen: The position at which questions begin.
            restored: Keys and values (1, H, n, D) of the restore cache; none by default.
        """
        # A token that follows the context directly sees itself and these W - 1 positions.
        start = max(columns - (dense.window - 1), 0)
        keys, values = dense.take_columns(start, columns)
        if restored is None:
            restored = keys[:, :, :0], values[:, :, :0]
        return cls(
            context_keys=keys.detach().clone(),
            context_values=values.detach().clone(),
            first=start,
            window=dense.window,
            seen=seen,
            restore_keys=restored[0].clone(),
            restore_values=restored[1].clone(),
        )

    @property
    def context_columns(self) -> int:
        """N, the number of context columns held."""
        return self.context_keys.shape[-2]

    def move_to(self, end: int, seen: int | None = None) -> SlidingLayer:
        """Return a layer over the context and the tail up to position `end`, with an empty tail.

        The tail's columns have to follow the context's directly, as they do after a text was read.
        `seen` is `end` unless given.
        """
        # Otherwise a column's position would not follow from its place.
        assert self.first + self.context_columns == self.seen, "a gap between context and tail"
        start = max(end - (self.window - 1), self.first)
        columns = slice(start - self.first, end - self.first)
        keys = torch.cat([self.context_keys, self.keys], -2)[:, :, columns].clone()
        values = torch.cat([self.context_values, self.values], -2)[:, :, columns].clone()
        return SlidingLayer(
            context_keys=keys,
            context_values=values,
            first=start,
            window=self.window,
            seen=end if seen is None else seen,
            restore_keys=keys[:, :, :0],
            restore_values=values[:, :, :0],
        )

    def with_restore_cache(self, restored: KeysValues) -> SlidingLayer:
        """Return the same context with keys and values (1, H, n, D) as its tail."""
        return SlidingLayer(
            self.context_keys, self.context_values, self.first, self.window, self.seen, *restored
        )

    def list_tensors(self) -> list[Tensor]:
        """Return every tensor of the layer."""
        return [self.context_keys, self.context_values, *self.list_tail_tensors()]
