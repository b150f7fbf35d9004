"""A compressed cache: a frozen ragged context and a dense tail that grows.

After eviction the heads of a layer keep different numbers of pairs, while everything that follows
(restore cache, question, answer) has one length in every head. So a layer holds flat context keys
and values (N, D), which are written once and shared by all forks, and an ordinary tail (B, H, n +
q, D) that starts with the restore cache. The paper's Concat(retained, restore) is (context,
tail[:n]). Positions count tokens seen, not kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from restorekv.cache import quantized
from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.tail import TailLayer
from restorekv.errors import RestoreKVError


class RaggedLayer(TailLayer):
    """One layer: a context and the tail that follows it.

    context_keys, context_values (N, D), in 8 bits if QuantizedRows; offsets (H + 1,) int32: head h has the
    rows offsets[h]:offsets[h + 1]; positions (N,) int32: the column of the full cache that each row
    came from; bias (N,) is added to the logits, or None.
    """

    def __init__(
        self,
        context_keys: Tensor | QuantizedRows,
        context_values: Tensor | QuantizedRows,
        offsets: Tensor,
        positions: Tensor,
        seen: int,
        restore_keys: Tensor,
        restore_values: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(restore_keys, restore_values, seen)
        self.context_keys = context_keys
        self.context_values = context_values
        self.offsets = offsets
        self.positions = positions
        self.bias = bias
        # On the host: reading offsets at every token would wait for the device.
        self.bounds = tuple(offsets.tolist())
        # What a backend derives from the bounds; shared by forks, never saved.
        self.plans: dict[str, object] = {}

    @classmethod
    def from_full_layer(cls, dense: DynamicLayer) -> RaggedLayer:
        """Returns a layer with all pairs of a dense one, as views of them, and an empty tail."""
        keys = dense.keys.contiguous()
        values = dense.values.contiguous()
        # Replaced in the dense layer too, so that at most one layer exists twice (after a prefill,
        # all are contiguous). An offloaded layer has no keys of its own to replace.
        if "keys" in vars(dense):
            dense.keys, dense.values = keys, values
        keys = keys.detach()
        values = values.detach()
        heads, columns = keys.shape[1:3]
        offsets = torch.arange(heads + 1, dtype=torch.int32, device=keys.device) * columns
        positions = torch.arange(columns, dtype=torch.int32, device=keys.device).repeat(heads)
        flat = (x[0].flatten(0, 1) for x in (keys, values))
        empty = (x[:, :, :0] for x in (keys, values))
        return cls(*flat, offsets, positions, columns, *empty)

    @property
    def longest_head(self) -> int:
        """Context pairs of the head that keeps most."""
        return max(end - start for start, end in pairwise(self.bounds))

    @property
    def row_heads(self) -> Tensor:
        """Returns the head (N,) int64 of every row of the context."""
        counts = self.offsets.diff().long()
        return torch.arange(self.heads, device=counts.device).repeat_interleave(counts)

    def fork(self, batch: int = 1) -> RaggedLayer:
        """Returns a layer with the same context and restore cache and its own tail, for `batch`
        questions.
        """
        layer = copy.copy(self)
        layer.locked = False
        layer.share_restore_cache(batch)
        return layer

    def list_tensors(self) -> list[Tensor]:
        """Returns every tensor of the layer; the restore cache counts once while it is still the
        whole tail.
        """
        tensors = [
            x
            for rows in (self.context_keys, self.context_values)
            for x in quantized.list_tensors(rows)
        ]
        tensors += [self.offsets, self.positions, self.restore_keys, self.restore_values]
        tensors += [] if self.bias is None else [self.bias]
        return tensors + list(
            self.buffers or (self.pair if self.columns > self.restore_length else ())
        )


@dataclass(frozen=True)
class ContextPairs:
    """Context pairs of one layer: keys and values (N, D), their heads (N,) and positions (N,), in
    any order.
    """

    keys: Tensor
    values: Tensor
    heads: Tensor
    positions: Tensor

    @classmethod
    def from_layer(cls, layer: RaggedLayer) -> ContextPairs:
        """Returns a layer's context, in the model's dtype."""
        return cls(
            layer.context_keys[:], layer.context_values[:], layer.row_heads, layer.positions.long()
        )

    @classmethod
    def from_restore_cache(cls, layer: RaggedLayer, first: int) -> ContextPairs:
        """Returns a layer's restore cache as context pairs from position `first` on."""
        heads = layer.heads
        count = layer.restore_length
        numbers = torch.arange(heads * count, device=layer.device)
        keys, values = (x[0].flatten(0, 1) for x in (layer.restore_keys, layer.restore_values))
        return cls(keys, values, numbers // max(count, 1), first + numbers % max(count, 1))

    @classmethod
    def concatenate(cls, parts: Iterable[ContextPairs]) -> ContextPairs:
        """Returns the rows of all."""
        return cls(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))

    def select(self, kept: Tensor) -> ContextPairs:
        """Returns the rows that `kept` (N,) marks."""
        return ContextPairs(*(x[kept] for x in vars(self).values()))

    def to_layer(self, heads: int, seen: int, *tail: Tensor) -> RaggedLayer:
        """Returns a layer with these rows as its context; `tail` are its restore keys and values
        (1, H, n, D).
        """
        columns = int(self.positions.max()) + 1 if len(self.heads) else 1
        order = (self.heads * columns + self.positions).argsort()
        counts = torch.bincount(self.heads, minlength=heads).cumsum(0)
        offsets = torch.cat([counts.new_zeros(1), counts]).int()
        return RaggedLayer(
            self.keys[order], self.values[order], offsets, self.positions[order].int(), seen, *tail
        )


class RaggedCache(Cache):
    """All layers; a transformers Cache, so `model.generate(..., past_key_values=cache.fork())`
    works.
    """

    layers: list[RaggedLayer]

    def __init__(self, layers: list[RaggedLayer]) -> None:
        super().__init__(layers=layers)

    @classmethod
    def from_dense(
        cls,
        full: DynamicCache,
        keep: Tensor,
        restore_cache: Iterable[tuple[Tensor, Tensor]] | None = None,
        offset: int = 0,
        consume: bool = False,
    ) -> RaggedCache:
        """Gathers the pairs that `keep` (L, H, S + T) bool marks and adds `restore_cache`.

        `restore_cache` holds keys and values (1, H, n, D) of every layer; by default these are the
        columns of `full` after the first S + T. `offset` moves the positions of questions (a
        control of the paper). Gradients reach the restore cache and never the context, even if both
        are views of one tensor. `consume` empties each layer of `full` before the next is gathered,
        so that the full and the ragged cache never exist side by side.
        """
        columns = keep.shape[-1]
        if restore_cache is None:
            restore_cache = (
                (layer.keys[:, :, columns:], layer.values[:, :, columns:]) for layer in full.layers
            )
        layers = []
        for dense, kept, restored in zip(full.layers, keep, restore_cache, strict=True):
            kept = kept.to(dense.keys.device)
            heads, columns_kept = kept.nonzero(as_tuple=True)
            counts = kept.sum(-1).cumsum(0)
            layers.append(
                RaggedLayer(
                    dense.keys.detach()[0][heads, columns_kept],
                    dense.values.detach()[0][heads, columns_kept],
                    torch.cat([counts.new_zeros(1), counts]).to(torch.int32),
                    columns_kept.to(torch.int32),
                    columns + offset,
                    *(x.clone() for x in restored),  # a view would keep the whole full cache alive
                )
            )
            if consume:
                dense.keys = dense.values = None
                dense.is_initialized = False
        return cls(layers)

    @classmethod
    def from_full_cache(cls, full: DynamicCache) -> RaggedCache:
        """Returns every pair of `full`, which is not changed, for passes whose own pairs go to the
        tails.
        """
        return cls([RaggedLayer.from_full_layer(layer) for layer in full.layers])

    def quantize(self, storage: str) -> None:
        """Converts the context to "int8" or "fp8", layer by layer; see quantized.py. "model" leaves
        it as it is.
        """
        for layer in self.layers if storage != "model" else ():
            rows = layer.context_keys, layer.context_values
            layer.context_keys, layer.context_values = quantized.quantize(
                *rows, layer.bounds, storage
            )

    def fork(self, batch: int = 1) -> RaggedCache:
        """Returns a cache that shares the context and the restore cache and has its own tail."""
        return RaggedCache([layer.fork(batch) for layer in self.layers])

    def lock(self) -> None:
        """Lets only forks change from now on: the cache itself refuses, also inside
        `model.generate`.
        """
        for layer in self.layers:
            layer.locked = True

    def commit_tail(self) -> None:
        """Makes what the tails hold now the restore cache."""
        for layer in self.layers:
            layer.commit_tail()

    @property
    def positions(self) -> int:
        """S + T, the positions that the context occupied, plus the offset if there is one."""
        return self.layers[0].seen

    @property
    def restore_length(self) -> int:
        """n, the rows of the restore cache in every head."""
        return self.layers[0].restore_length

    @property
    def lengths(self) -> Tensor:
        """(L, H) int64: context pairs kept, without the restore cache."""
        return torch.stack([layer.offsets.diff().long().cpu() for layer in self.layers])

    def keep_mask(self, columns: int) -> Tensor:
        """Returns which of the full cache's first `columns` columns are held: (L, H, columns) bool."""
        keep = torch.zeros(len(self.layers), self.layers[0].heads, columns, dtype=torch.bool)
        for index, layer in enumerate(self.layers):
            heads = layer.row_heads.cpu()
            positions = layer.positions.long().cpu()
            of_text = positions < columns  # the others are restore pairs of earlier texts
            keep[index, heads[of_text], positions[of_text]] = True
        return keep

    def to_dynamic_cache(self) -> DynamicCache:
        """Returns a plain transformers cache with copies of context and restore cache.

        transformers takes a plain cache's length for the number of tokens seen, which is too low
        here: pass position_ids that start at `get_seq_length()` of this cache, as
        `CompressedContext.inputs(plain=True)` does. Refuses heads of different lengths and a bias.
        """
        if len(self.lengths.unique()) > 1 or any(layer.bias is not None for layer in self.layers):
            raise RestoreKVError(
                "A plain cache needs heads of one length and no bias; evict with allocation='per-head'."
            )
        plain = DynamicCache()
        for index, layer in enumerate(self.layers):
            context = (
                x[:].unflatten(0, (layer.heads, -1))[None]
                for x in (layer.context_keys, layer.context_values)
            )
            restored = (layer.restore_keys, layer.restore_values)
            plain.update(
                *(torch.cat(pair, 2) for pair in zip(context, restored, strict=True)), index
            )
        return plain

    @property
    def pairs(self) -> int:
        """Context pairs kept, prefix included, plus the restore cache's n*L*H."""
        return sum(layer.bounds[-1] + layer.heads * layer.restore_length for layer in self.layers)

    def count_prefix_pairs(self, prefix: int) -> int:
        """Returns how many kept pairs came from the first `prefix` columns."""
        return sum(int((layer.positions < prefix).sum()) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor, plans included; the tail counts with what it holds now."""
        return sum(
            getattr(x, "nbytes", 0)
            for layer in self.layers
            for x in (*layer.list_tensors(), *layer.plans.values())
        )
