"""A compressed cache: a frozen ragged context and a dense tail that grows.

After eviction the heads of a layer keep different numbers of pairs, while everything that follows
(restore cache, question, answer) has one length in every head. So a layer holds flat context keys
and values (N, D), which are written once and shared by all forks, and an ordinary tail (B, H, n +
q, D): the n columns of the restore cache, then those of q tokens of question and answer. The
paper's Concat(retained, restore) is (context, tail[:n]). Positions count tokens seen, not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from restorekv.cache import quantized
from restorekv.cache.dense import (
    DenseLayer,
    list_dense_layers,
    list_full_attention,
    make_plain_cache,
)
from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.sliding import RecentLayer, SlidingLayer
from restorekv.cache.states import PairlessLayer, StateLayer, list_state_layers
from restorekv.cache.tail import KeysValues, TailLayer
from restorekv.errors import RestoreKVError

NO_LATENT_CODES = (
    "The pairs of latent attention are held once for keys and values, in the model's dtype, and 8 "
    "bits for each would take as much memory; leave out kv_dtype."
)


class RaggedLayer(TailLayer):
    """One layer: a context and the tail that follows it.

    Args:
        context_keys: (N, D), perhaps in 8 bits.
        context_values: (N, D), like the keys.
        offsets: (H + 1,) int32; head h has the rows offsets[h]:offsets[h + 1].
        positions: (N,) int32, the column of the full cache that each row came from.
        seen: The number of positions that the context occupied.
        restore_keys: (1, H, n, D), the first columns of the tail.
        restore_values: (1, H, n, D).
        bias: (N,), added to the logits; or None.
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
        # Whether this is the first ragged layer of its cache. The positions of a pass are the same
        # in all layers, so model/attention/dispatch.py checks them only in this one.
        self.checks_positions = False
        # Whether layers of its cache keep states, which padding in a pass would change.
        self.refuses_padding = False

    @classmethod
    def from_full_layer(cls, dense: DenseLayer) -> RaggedLayer:
        """Return a layer with all pairs of a dense one, as views of them, and an empty tail."""
        keys, values = _map_pair(dense.keys, dense.values, lambda states: states.contiguous())
        # Replaced in the dense layer too, so that at most one layer exists twice (after a prefill,
        # all are contiguous). An offloaded layer has no attribute to replace: it loads its keys.
        if "keys" in vars(dense):
            dense.keys = keys
            dense.values = values
        heads, columns = keys.shape[1:3]
        context_keys, context_values = _map_pair(
            keys, values, lambda states: states.detach()[0].flatten(0, 1)
        )
        # Head h has the columns 0 to S + T - 1, one head after the other: no pair is moved.
        offsets = torch.arange(heads + 1, dtype=torch.int32, device=keys.device) * columns
        positions = torch.arange(columns, dtype=torch.int32, device=keys.device)
        return cls(
            context_keys=context_keys,
            context_values=context_values,
            offsets=offsets,
            positions=positions.repeat(heads),
            seen=columns,
            restore_keys=keys.detach()[:, :, :0],
            restore_values=values.detach()[:, :, :0],
        )

    @property
    def shares_pairs(self) -> bool:
        """Whether the context's keys are its values too, in one tensor, as those of latent
        attention are.
        """
        return self.context_keys is self.context_values

    @property
    def longest_head(self) -> int:
        """The number of context pairs in the head that keeps most."""
        return max(end - start for start, end in pairwise(self.bounds))

    @property
    def row_heads(self) -> Tensor:
        """The head (N,) int64 of every row of the context."""
        # Heads keep different numbers of pairs, so the head of a row follows from the offsets
        # alone.
        counts = self.offsets.diff().long()
        return torch.arange(self.heads, device=counts.device).repeat_interleave(counts)

    def list_tensors(self) -> list[Tensor]:
        """Return every tensor of the layer."""
        tensors = quantized.list_tensors(self.context_keys)
        if not self.shares_pairs:
            tensors += quantized.list_tensors(self.context_values)
        tensors += [self.offsets, self.positions]
        if self.bias is not None:
            tensors.append(self.bias)
        return tensors + self.list_tail_tensors()


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
        """Return a layer's context, in the model's dtype."""
        keys, values = _map_pair(layer.context_keys, layer.context_values, lambda rows: rows[:])
        return cls(
            keys=keys,
            values=values,
            heads=layer.row_heads,
            positions=layer.positions.long(),
        )

    @classmethod
    def from_restore_cache(cls, layer: RaggedLayer, first: int) -> ContextPairs:
        """Return a layer's restore cache as context pairs at positions first, first + 1, ..."""
        count = layer.restore_length
        # The restore cache is a rectangle (H, n). Row i of the flat pairs belongs to the head
        # i // n, and is its column i % n.
        rows = torch.arange(layer.heads * count, device=layer.device)
        keys = layer.restore_keys[0].flatten(0, 1)
        return cls(
            keys=keys,
            values=keys if layer.shares_pairs else layer.restore_values[0].flatten(0, 1),
            heads=rows // max(count, 1),
            positions=first + rows % max(count, 1),
        )

    @classmethod
    def concatenate(cls, parts: Iterable[ContextPairs]) -> ContextPairs:
        """Return the pairs of all parts."""
        parts = list(parts)
        keys = torch.cat([part.keys for part in parts])
        values = keys
        if any(part.keys is not part.values for part in parts):
            values = torch.cat([part.values for part in parts])
        return cls(
            keys=keys,
            values=values,
            heads=torch.cat([part.heads for part in parts]),
            positions=torch.cat([part.positions for part in parts]),
        )

    def select(self, mask: Tensor) -> ContextPairs:
        """Return the pairs that `mask` (N,) bool marks."""
        keys, values = _map_pair(self.keys, self.values, lambda rows: rows[mask])
        return ContextPairs(keys, values, self.heads[mask], self.positions[mask])

    def to_layer(
        self, heads: int, seen: int, restore_keys: Tensor, restore_values: Tensor
    ) -> RaggedLayer:
        """Return a layer with these pairs as its context, sorted by head and position.

        Args:
            heads: The number H of KV heads.
            seen: The number of positions that the context occupied.
            restore_keys: (1, H, n, D).
            restore_values: (1, H, n, D).
        """
        # Sorting by head and then position with one key: head * columns + position. It is unique,
        # since a head holds a position once.
        columns = int(self.positions.max()) + 1 if len(self.heads) else 1
        order = (self.heads * columns + self.positions).argsort()
        counts = torch.bincount(self.heads, minlength=heads)
        keys, values = _map_pair(self.keys, self.values, lambda rows: rows[order])
        return RaggedLayer(
            context_keys=keys,
            context_values=values,
            offsets=_make_offsets(counts),
            positions=self.positions[order].int(),
            seen=seen,
            restore_keys=restore_keys,
            restore_values=restore_values,
        )


# One layer of a cache with one context. All but a PairlessLayer have a tail.
AnyTailLayer = RaggedLayer | SlidingLayer
ContextLayer = AnyTailLayer | PairlessLayer


def list_tails(layers: Iterable[Any]) -> list[AnyTailLayer]:
    """Return those of one context's layers that have a tail."""
    return [layer for layer in layers if isinstance(layer, RaggedLayer | SlidingLayer)]


class RaggedCache(Cache):
    """A compressed cache of all layers; it is a transformers Cache, so that
    `model.generate(..., past_key_values=cache.fork())` works.

    Layers with a sliding window (SlidingLayer) keep all pairs of their window, layers without pairs
    (PairlessLayer) their states, and no budget counts either. L is the number of the other layers.
    """

    layers: list[ContextLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, layers: Iterable[ContextLayer]) -> None:
        super().__init__(layers=list[Any](layers))
        for layer in self.full_attention[:1]:
            layer.checks_positions = True
            layer.refuses_padding = bool(self.with_states)

    @property
    def full_attention(self) -> list[RaggedLayer]:
        """The L layers that see the whole text."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @property
    def sliding(self) -> list[SlidingLayer]:
        """The layers that have a window."""
        return [layer for layer in self.layers if isinstance(layer, SlidingLayer)]

    @property
    def with_states(self) -> list[StateLayer]:
        """The layers that keep a state instead of pairs."""
        return list_state_layers(self.layers)

    @property
    def with_tails(self) -> list[AnyTailLayer]:
        """The layers that have a tail: all that have pairs."""
        return list_tails(self.layers)

    @classmethod
    def from_kept_pairs(
        cls,
        full: Cache,
        keep_mask: Tensor,
        restore_cache: Iterable[KeysValues] | None = None,
        offset: int = 0,
        consume: bool = False,
    ) -> RaggedCache:
        """Copy the pairs of a full cache that a mask marks, and add a restore cache.

        Gradients reach the restore cache and never the context, even if both are views of one
        tensor.

        Args:
            full: The full cache, with S + T columns or more.
            keep_mask: (L, H, S + T) bool, which pairs stay.
            restore_cache: Keys and values (1, H, n, D) of every layer, those with a window
                included; of layers without pairs they are ignored. None takes the columns of `full`
                after the first S + T, where a restore pass left them.
            offset: How many positions questions are moved by (a control of the paper).
            consume: Whether to empty each layer of `full` before the next is gathered, so that
                memory never holds both caches completely.
        """
        dense_layers = list_dense_layers(full)
        columns = keep_mask.shape[-1]
        if restore_cache is None:
            restore_cache = (_slice_restore_pairs(dense, columns) for dense in dense_layers)
        full_layers = list_full_attention(full)
        if len(full_layers) != len(keep_mask):
            raise ValueError(
                f"The mask has {len(keep_mask)} layers, but {len(full_layers)} layers of the cache "
                "see the whole text."
            )
        # Layers with a window, and those without pairs, have no row in the mask.
        masks = iter(keep_mask)
        layers: list[ContextLayer] = []
        for dense, restore_pairs in zip(dense_layers, restore_cache, strict=True):
            if isinstance(dense, PairlessLayer):
                layers.append(dense.copy())
            elif isinstance(dense, RecentLayer):
                layers.append(
                    SlidingLayer.from_recent(dense, columns, columns + offset, restore_pairs)
                )
            else:
                layers.append(_gather_layer(dense, next(masks), columns + offset, restore_pairs))
            # Before the next layer is gathered, so that at most one layer exists twice.
            if consume:
                _release_pairs(dense)
        return cls(layers)

    @classmethod
    def from_full_cache(cls, full: Cache) -> RaggedCache:
        """Return a cache with every pair of `full`, as views except in layers with a window, and
        with copies of its states.

        Later passes append to the tails, so `full` does not change.
        """
        layers: list[ContextLayer] = []
        for layer in list_dense_layers(full):
            if isinstance(layer, PairlessLayer):
                layers.append(layer.copy())
            elif isinstance(layer, RecentLayer):
                seen = layer.get_seq_length()
                layers.append(SlidingLayer.from_recent(layer, seen, seen))
            else:
                layers.append(RaggedLayer.from_full_layer(layer))
        return cls(layers)

    def quantize(self, kv_dtype: str, on_cpu: bool = False) -> None:
        """Convert the context to "int8" or "fp8", layer by layer; "model" does nothing.

        With `on_cpu` the CPU computes, and the result goes back to the cache's device.
        """
        if kv_dtype == "model":
            return
        for layer in self.full_attention:
            if layer.shares_pairs:
                raise RestoreKVError(NO_LATENT_CODES)
            device = layer.device
            # `[:]` reads rows of any `kv_dtype` in the model's dtype.
            keys = layer.context_keys[:]
            values = layer.context_values[:]
            if on_cpu:
                keys = keys.cpu()
                values = values.cpu()
            packed_keys, packed_values = quantized.quantize(keys, values, layer.bounds, kv_dtype)
            layer.context_keys = packed_keys.to(device)
            layer.context_values = packed_values.to(device)

    def fork(self, batch: int = 1) -> RaggedCache:
        """Return a cache that shares the context and the restore cache and has its own tail, and
        its own copy of the states.
        """
        return RaggedCache([layer.fork(batch) for layer in self.layers])

    def lock(self) -> None:
        """Make the cache refuse every change from now on, also inside `model.generate`; its forks
        can change.
        """
        for layer in self.with_tails:
            layer.locked = True

    def commit_tail(self) -> None:
        """Turn the current tail of every layer into its restore cache."""
        for layer in self.with_tails:
            layer.commit_tail()

    @property
    def seen(self) -> int:
        """How many positions the context occupied: S + T, plus the offset if there is one."""
        return self.full_attention[0].seen

    @property
    def restore_length(self) -> int:
        """The length n of the restore cache in every head."""
        return self.full_attention[0].restore_length

    @property
    def columns(self) -> int:
        """The columns of the tail: the restore cache and what was read after it."""
        return self.full_attention[0].columns

    @property
    def lengths(self) -> Tensor:
        """(L, H) int64: context pairs kept, without the restore cache."""
        # From the bounds, which are on the host already.
        return torch.stack([torch.tensor(layer.bounds).diff() for layer in self.full_attention])

    def mark_held(self, columns: int) -> Tensor:
        """Return which of the full cache's first columns are held: (L, H, columns) bool."""
        layers = self.full_attention
        keep = torch.zeros(len(layers), layers[0].heads, columns, dtype=torch.bool)
        for index, layer in enumerate(layers):
            heads = layer.row_heads.cpu()
            positions = layer.positions.long().cpu()
            of_text = positions < columns  # the others are restore pairs of earlier texts
            keep[index, heads[of_text], positions[of_text]] = True
        return keep

    def to_dynamic_cache(self) -> DynamicCache:
        """Return a plain transformers cache with copies of context and restore cache.

        transformers takes a plain cache's length for the number of tokens seen, which is too low
        here: pass position_ids that start at `get_seq_length()` of this cache, as
        `CompressedContext.inputs(plain=True)` does. Refuses layers with a window or with states,
        heads of different lengths and a bias.
        """
        what = self.find_unlike_plain()
        if what is not None:
            raise RestoreKVError(
                f"A plain cache has no layers with {what}; pass `cache.fork()` instead."
            )
        layers = self.full_attention
        # transformers has one length per layer and no bias, so only a rectangle can be handed over.
        if any(layer.bias is not None for layer in layers):
            raise RestoreKVError(
                "A plain cache has no weights of pairs, which am-fast fits; compress with an "
                "evictor, with allocation='per-head'."
            )
        if len(self.lengths.unique()) > 1:
            raise RestoreKVError(
                "A plain cache needs heads of one length; evict with allocation='per-head'."
            )
        pairs = []
        for layer in layers:
            keys = layer.context_keys[:].unflatten(0, (layer.heads, -1))[None]
            values = layer.context_values[:].unflatten(0, (layer.heads, -1))[None]
            pairs.append(
                (
                    torch.cat([keys, layer.restore_keys], 2),
                    torch.cat([values, layer.restore_values], 2),
                )
            )
        return make_plain_cache(pairs)

    def find_unlike_plain(self) -> str | None:
        """Return what some layers have that those of a plain cache cannot; None if there is no such
        layer.
        """
        if self.sliding:
            return "a sliding window"
        if self.with_states:
            return "states instead of pairs"
        if self.full_attention[0].shares_pairs:
            return "latents that our caches hold joined"
        return None

    @property
    def pairs_held(self) -> int:
        """Context pairs kept, prefix included, plus the restore cache's n*L*H."""
        return sum(
            layer.bounds[-1] + layer.heads * layer.restore_length for layer in self.full_attention
        )

    def count_prefix_pairs(self, prefix: int) -> int:
        """Return how many kept pairs came from the first `prefix` columns."""
        return sum(int((layer.positions < prefix).sum()) for layer in self.full_attention)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor, positions, offsets and plans included, as memory really holds
        them; the tail counts with its current size.
        """
        total = 0
        for layer in self.layers:
            total += sum(tensor.nbytes for tensor in layer.list_tensors())
        for layer in self.full_attention:
            total += sum(getattr(plan, "nbytes", 0) for plan in layer.plans.values())
        return total


def _map_pair(keys: Any, values: Any, change: Callable[[Any], Tensor]) -> KeysValues:
    """Return keys and values after a change; if they are one tensor, so is the result."""
    changed = change(keys)
    return changed, changed if values is keys else change(values)


def _make_offsets(counts: Tensor) -> Tensor:
    """Return where every head's pairs begin and the last ones end (H + 1,) int32."""
    ends = counts.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def _gather_layer(
    dense: DenseLayer, keep_mask: Tensor, seen: int, restore_pairs: KeysValues
) -> RaggedLayer:
    """Return a layer with the pairs of a dense one that `keep_mask` (H, S + T) bool marks."""
    mask = keep_mask.to(dense.keys.device)
    # `nonzero` goes row by row: by head and, within a head, by position. That is the order of a
    # layer's rows, so no sort is needed.
    heads, positions = mask.nonzero(as_tuple=True)
    # Indexing copies, so the full cache can be released afterwards.
    keys, values = _map_pair(
        dense.keys, dense.values, lambda states: states.detach()[0][heads, positions]
    )
    return RaggedLayer(
        context_keys=keys,
        context_values=values,
        offsets=_make_offsets(mask.sum(-1)),
        positions=positions.to(torch.int32),
        seen=seen,
        # Copied, because a view would keep the whole full cache alive.
        restore_keys=restore_pairs[0].clone(),
        restore_values=restore_pairs[1].clone(),
    )


def _slice_restore_pairs(dense: DenseLayer, columns: int) -> KeysValues:
    """Return keys and values (1, H, n, D) of what a dense layer holds after the first columns."""
    if isinstance(dense, RecentLayer):
        return dense.take_columns(columns, dense.get_seq_length())
    return dense.keys[:, :, columns:], dense.values[:, :, columns:]


def _release_pairs(dense: Any) -> None:
    """Free keys and values of a dense layer, which is then as it was before its first update.
    States are small and stay.
    """
    if isinstance(dense, PairlessLayer):
        return
    dense.keys = None
    dense.values = None
    dense.is_initialized = False
