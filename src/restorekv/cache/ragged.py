"""A compressed cache: a frozen ragged context beside a dense tail that grows.

After eviction the heads of a layer keep different numbers of pairs, while whatever comes later (restore
cache, question, answer) has one length in every head. So a layer holds flat context keys and values (N, D),
written once and shared by every fork, and an ordinary tail (B, H, n + q, D) that begins with the restore
cache: Concat(retained, restore) of the paper is (context, tail[:n]). Positions count tokens seen, not kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from restorekv.cache import quantized
from restorekv.cache.quantized import Packed
from restorekv.cache.tail import TailLayer
from restorekv.errors import RestoreKVError


class RaggedLayer(TailLayer):
    """One layer: a context, and the tail behind it.

    context_keys, context_values (N, D), in 8 bits if Packed; offsets (H + 1,) int32: head h owns the rows
    offsets[h]:offsets[h + 1]; positions (N,) int32, the column of the full cache that each row came from; bias (N,)
    added to the logits, or None.
    """

    def __init__(
        self,
        context_keys: Tensor | Packed,
        context_values: Tensor | Packed,
        offsets: Tensor,
        positions: Tensor,
        seen: int,
        restore_keys: Tensor,
        restore_values: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(restore_keys, restore_values, seen)
        self.context_keys, self.context_values = context_keys, context_values
        self.offsets, self.positions, self.bias = offsets, positions, bias
        self.bounds = tuple(offsets.tolist())  # reading offsets on every token would wait for the device
        self.plans: dict[str, object] = {}  # what a backend worked out from the bounds; forks share it, files never do

    @property
    def longest(self) -> int:
        """Context pairs of the head that keeps most."""
        return max(end - start for start, end in pairwise(self.bounds))

    def fork(self, batch: int = 1) -> RaggedLayer:
        """The same context and restore cache, with a tail of its own for `batch` questions."""
        layer = copy.copy(self)
        layer.spread(batch)
        return layer

    def tensors(self) -> list[Tensor]:
        """Everything the layer holds; the restore cache counts once while it is still the whole tail."""
        held = [x for rows in (self.context_keys, self.context_values) for x in quantized.tensors_of(rows)]
        held += [self.offsets, self.positions]
        held += [] if self.bias is None else [self.bias]
        held += [self.restore_keys, self.restore_values]
        if self.room:
            return [*held, *self.room]
        return held + ([self.keys, self.values] if self.columns > self.restore else [])


class WholeLayer(RaggedLayer):
    """All pairs of a dense layer, as views of it, beside a tail: what a restore pass reads and what it leaves.

    joined: attention gets dense keys and values, context and tail in one copy, as from a DynamicCache; otherwise, as
    from every ragged layer, the layer itself.
    """

    def __init__(self, dense: DynamicLayer, joined: bool) -> None:
        keys, values = dense.keys.contiguous(), dense.values.contiguous()
        # In place too, so that of all layers just one is ever there twice; after a prefill they all are. An offloaded
        # layer has no keys of its own: it lends them.
        if "keys" in vars(dense):
            dense.keys, dense.values = keys, values
        keys, values = keys.detach(), values.detach()
        heads, columns = keys.shape[1:3]
        offsets = torch.arange(heads + 1, dtype=torch.int32, device=keys.device) * columns
        positions = torch.arange(columns, dtype=torch.int32, device=keys.device).repeat(heads)
        flat, nothing = (x[0].flatten(0, 1) for x in (keys, values)), (x[:, :, :0] for x in (keys, values))
        super().__init__(*flat, offsets, positions, columns, *nothing)
        self.joined = joined

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Appends (1, H, Q, D) to the tail."""
        super().update(key_states, value_states)
        if not self.joined:
            return self, self
        context = (x.unflatten(0, (self.heads, -1))[None] for x in (self.context_keys, self.context_values))
        return tuple(torch.cat(pair, -2) for pair in zip(context, (self.keys, self.values), strict=True))

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        tail, seen = super().get_mask_sizes(query)
        return (seen + tail, 0) if self.joined else (tail, seen)


class RaggedCache(Cache):
    """All layers; a transformers Cache, so `model.generate(..., past_key_values=cache.fork())` works."""

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
        """Gathers what `keep` (L, H, S + T) bool marks, with `restore_cache` beside it.

        `restore_cache` holds keys and values (1, H, n, D) of every layer; without it, these are the columns of `full`
        beyond S + T. `offset` makes questions start so many positions later (a control of the paper's). Gradients
        reach the restore cache and never the context, though both may have been cut from one tensor. `consume` empties
        each layer of `full` before the next is gathered: full and ragged cache never stand side by side.
        """
        columns = keep.shape[-1]
        if restore_cache is None:
            restore_cache = ((layer.keys[:, :, columns:], layer.values[:, :, columns:]) for layer in full.layers)
        layers = []
        for dense, kept, (restore_keys, restore_values) in zip(full.layers, keep, restore_cache, strict=True):
            kept = kept.to(dense.keys.device)
            heads, places = kept.nonzero(as_tuple=True)
            counts = kept.sum(-1).cumsum(0)
            layers.append(
                RaggedLayer(
                    dense.keys.detach()[0][heads, places],
                    dense.values.detach()[0][heads, places],
                    torch.cat([counts.new_zeros(1), counts]).to(torch.int32),
                    places.to(torch.int32),
                    columns + offset,
                    # Cloned: a view would keep the whole full cache alive.
                    restore_keys.clone(),
                    restore_values.clone(),
                )
            )
            if consume:
                dense.keys = dense.values = None
                dense.is_initialized = False
        return cls(layers)

    @classmethod
    def whole(cls, full: DynamicCache, joined: bool) -> RaggedCache:
        """Every pair of `full`, which stays as it is, for a pass whose own pairs become the tails; see WholeLayer."""
        return cls([WholeLayer(layer, joined) for layer in full.layers])

    def store(self, how: str) -> None:
        """Holds the context in 8 bits a number from now on, "int8" or "fp8", layer by layer; see quantized.py."""
        for layer in self.layers:
            rows = layer.context_keys, layer.context_values
            layer.context_keys, layer.context_values = quantized.pack(*rows, layer.bounds, how)

    def fork(self, batch: int = 1) -> RaggedCache:
        """Shares the context and the restore cache; the tail is its own."""
        return RaggedCache([layer.fork(batch) for layer in self.layers])

    def settle(self) -> None:
        """What the tails hold now becomes the restore cache."""
        for layer in self.layers:
            layer.settle()

    def rewind(self) -> None:
        """Forgets question and answer."""
        for layer in self.layers:
            layer.rewind()

    @property
    def positions(self) -> int:
        """S + T, the positions the context occupied, and the offset, if any."""
        return self.layers[0].seen

    @property
    def restore(self) -> int:
        """n, the rows of the restore cache in every head."""
        return self.layers[0].restore

    @property
    def lengths(self) -> Tensor:
        """(L, H) int64: context pairs kept, without the restore cache."""
        return torch.stack([layer.offsets.diff().long().cpu() for layer in self.layers])

    def to_dynamic_cache(self) -> DynamicCache:
        """A plain transformers cache with copies of context and restore cache, where every head keeps equally many.

        transformers takes a plain cache's length for the number of tokens seen, which is too low here: pass
        position_ids that start at `get_seq_length()` of this cache, as `CompressedContext.inputs(plain=True)` does.
        Refuses ragged heads and a bias.
        """
        if len(self.lengths.unique()) > 1 or any(layer.bias is not None for layer in self.layers):
            raise RestoreKVError(
                "A plain cache needs heads of one length and no bias; evict with allocation='per-head'."
            )
        plain = DynamicCache()
        for index, layer in enumerate(self.layers):
            context = (x[:].unflatten(0, (layer.heads, -1))[None] for x in (layer.context_keys, layer.context_values))
            restored = (layer.restore_keys, layer.restore_values)
            plain.update(*(torch.cat(pair, 2) for pair in zip(context, restored, strict=True)), index)
        return plain

    @property
    def pairs(self) -> int:
        """Context pairs kept, prefix included, plus the restore cache's n*L*H."""
        return sum(layer.bounds[-1] + layer.heads * layer.restore for layer in self.layers)

    def pairs_of_prefix(self, prefix: int) -> int:
        """Kept pairs that came from the first `prefix` columns."""
        return sum(int((layer.positions < prefix).sum()) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, plans included; the tail counts with whatever it holds now."""
        return sum(getattr(x, "nbytes", 0) for layer in self.layers for x in (*layer.tensors(), *layer.plans.values()))
