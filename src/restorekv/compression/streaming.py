"""Compression during the prefill: at any time, at most the budget, the chat prefix and one part of
the context are held.

The context is read in parts of at most `chunk` tokens, all of one size. A part is prefilled over
the retained pairs of the parts before it, at its own positions; then its pairs get scores, and the
best of all pairs stay, as many as the whole budget allows. So the pairs that stay at the end are
those that the allocation would choose among all scores together: no pair that is dropped on the way
could have stayed. It still only approximates compressing the whole text at once:

- the keys and values of later parts come from a model that reads the kept pairs instead of all;
- a pair is scored once, when its part is the newest, as if prefix and part were the whole text.
  Pairs kept earlier are left out of that softmax, and queries of later parts never rescore earlier
  pairs.

If an evictor always keeps the latest columns (the window of SnapKV), these columns of a part are
not scored yet: they are read again with the next part. Sinks, the first columns that an evictor
always keeps, are pinned in the first part only. A restore pass reads all that is held before the
last eviction, not the full cache.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.dense import DenseLayer, list_dense_layers
from restorekv.cache.ragged import ContextLayer, ContextPairs, RaggedCache, RaggedLayer
from restorekv.cache.sliding import RecentLayer, SlidingLayer
from restorekv.cache.states import PairlessLayer, mark_position
from restorekv.cache.tail import KeysValues
from restorekv.compression.budget import Budget
from restorekv.compression.compressor import (
    BeginPhase,
    PreparedContext,
    ignore_phase,
    time_phase,
)
from restorekv.compression.full_cache import UNHELD_SCORE, pin_prefix, prefill_and_score
from restorekv.errors import RestoreKVError, warn
from restorekv.evictors import Evictor
from restorekv.model import support
from restorekv.model.prefill import make_full_cache, read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter


@dataclass(frozen=True)
class Part:
    """Columns [start, end) of the whole sequence. Those before `scored_end` get their scores with
    this part, the others with the next one.
    """

    start: int
    scored_end: int
    end: int


def split_context(evictor: Evictor, context: Context, chunk: int) -> list[Part]:
    """Return parts of up to `chunk` tokens, all of one size; each but the first repeats the columns
    that the evictor always keeps at the end of the part before it.
    """
    tokens = context.text_tokens
    first = context.prefix_length
    if tokens <= chunk:
        return [Part(first, context.num_tokens, context.num_tokens)]
    pinned = evictor.count_pinned_tail(_select_part(context, Part(first, first, first + chunk)))
    if pinned >= chunk:
        raise RestoreKVError(
            f"{evictor.spec} always keeps the latest {pinned} tokens; stream more than that at a "
            "time."
        )
    count = ceil(Fraction(tokens - pinned, chunk - pinned))
    edges = [first + (tokens - pinned) * number // count for number in range(count + 1)]
    parts = [Part(start, end, end + pinned) for start, end in pairwise(edges)]
    parts[-1] = replace(parts[-1], scored_end=context.num_tokens)
    return parts


def _select_part(context: Context, part: Part) -> Context:
    """Return what the evictor takes for the whole text: the chat prefix and the part."""
    prefix = context.ids[:, : context.prefix_length]
    return replace(context, ids=torch.cat([prefix, context.ids[:, part.start : part.end]], -1))


@dataclass(frozen=True)
class StreamedContext(PreparedContext):
    """A context that keeps nothing between budgets: `evict` prefills it again each time,
    `streaming_chunk` tokens at a time.
    """

    # There never is a full cache: the field of the base class is not an argument here.
    full: None = field(default=None, init=False)
    _: KW_ONLY
    tokenizer: Tokenizer
    evictor: Evictor
    streaming_chunk: int
    adapter: RestoreAdapter | None = None

    def with_restore_cache(
        self, adapter: RestoreAdapter, begin_phase: BeginPhase = ignore_phase
    ) -> Self:
        """Return this context with an adapter; `evict` will run its restore pass."""
        return replace(self, adapter=adapter)

    def count_restore_tokens(self) -> int:
        if self.adapter is None:
            return 0
        return self.adapter.restore_tokens

    def _make_cache(
        self, budget: Budget, consume: bool, begin_phase: BeginPhase
    ) -> tuple[RaggedCache, dict[str, float]]:
        """Read the context part by part. `consume` is ignored: no full cache is held."""
        # A new pass over the text for every budget: nothing of an earlier one is kept.
        stream = Stream(self, budget, begin_phase)
        return stream.run(), stream.seconds


@dataclass
class Stream:
    """One pass over a context, which compresses it to one budget.

    `scores` (L, H, S + T) holds UNHELD_SCORE for every pair that was dropped or has not been read
    yet.

    Args:
        source: The context that is read.
        budget: What may be held at the end.
        begin_phase: Called with the name of each phase when it begins.
        seconds: Gets the seconds of every phase.
    """

    source: StreamedContext
    budget: Budget
    begin_phase: BeginPhase = ignore_phase
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.source.model
        self.context = self.source.context
        self.config = self.source.config

    @torch.no_grad()
    def run(self) -> RaggedCache:
        """Read and evict all parts; return the cache at the budget."""
        support.prepare_model(self.model)
        shape = CacheShape.from_model(self.model)
        parts = split_context(self.source.evictor, self.context, self.source.streaming_chunk)
        self.scores = torch.full(
            (shape.layers, shape.heads, self.context.num_tokens),
            UNHELD_SCORE,
            dtype=torch.float32,
            device=self.model.device,
        )
        adapter = self.source.adapter
        tokens = self.budget.restore_tokens
        reads_before_eviction = tokens > 0 and self.config.restore_from == "full"
        if reads_before_eviction and len(parts) > 1:
            warn(
                "The adapter learned to read full caches; with streaming_chunk it reads what is "
                "held at the end; expect worse answers."
            )
        # Each part is read over what is held and scored, then all that is held competes again. The
        # restore pass comes before the last eviction, or after it if it reads evicted caches.
        cache: RaggedCache | None = None
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            self.begin_phase(f"part {number} of {len(parts)}")
            cache = self._read_part(cache, part)
            restored: list[KeysValues] = []
            if adapter is not None and last and reads_before_eviction:
                restored = run_restore_pass(adapter, cache, self.budget, self.seconds)
            with time_phase(self.seconds, "evict"):
                self._evict_part(cache, part, restored, last)
        assert cache is not None, "a context has at least one part"
        if adapter is not None and tokens and not reads_before_eviction:
            with time_phase(self.seconds, "restore"):
                adapter.run_restore_pass(cache, tokens, self.budget.ratio)
                cache.commit_tail()
        assert self.config.count_pairs(cache, self.context) == self.budget.pairs
        return cache

    def _read_part(self, cache: RaggedCache | None, part: Part) -> RaggedCache:
        """Prefill a part over what is held and write its scores; the tail is then prefix and
        part.
        """
        # The evictor takes the prefix and this part for the whole text.
        part_context = _select_part(self.context, part)
        evictor = self.source.evictor
        if cache is None:
            # The first part goes into an ordinary cache, with room for the columns that are read
            # twice. The evictor may pin fewer columns of this part than the next part repeats,
            # since those were counted for a part of `streaming_chunk` tokens.
            pinned = evictor.count_pinned_tail(part_context)
            into = make_full_cache(self.model, max(part.end - part.scored_end, pinned))
        else:
            evictor = evictor.for_later_part(part_context)
            into = cache
        # The next part begins there, so the states are needed as they are there.
        mark_position(into.layers, part.scored_end)
        read, scores = prefill_and_score(
            self.model, self.source.tokenizer, evictor, part_context, into, self.seconds
        )
        # Columns that the evictor pins at the end get their scores with the next part, which reads
        # them again.
        columns = self.scores[..., part.start : part.scored_end]
        # A score of -inf would be taken for UNHELD_SCORE.
        columns.copy_(scores[..., : columns.shape[-1]].clamp_min(torch.finfo(scores.dtype).min))
        if self.config.prefix_policy == "counted":
            pin_prefix(self.scores, self.context.prefix_length)
        if isinstance(read, RaggedCache):
            return read
        return RaggedCache([_to_compressed_layer(layer) for layer in list_dense_layers(read)])

    def _evict_part(
        self, cache: RaggedCache, part: Part, restored: list[KeysValues], last: bool
    ) -> None:
        """Drop the pairs that do not stay, layer by layer. After the last part, move the prefix
        from the tail into the context.

        A layer with a window keeps the last columns of what has been read and scored, and a layer
        with states those after it.
        """
        prefix = self.context.prefix_length
        # All that has a score competes: what earlier parts kept, and this part.
        keep = self.choose_kept(last)
        # Until the last part the prefix is in the tail, so the context's length does not count it.
        seen = part.scored_end - prefix
        if last:
            seen = self.context.num_tokens + self.config.offset
        device = self.scores.device
        columns = torch.cat(
            [torch.arange(prefix, device=device), torch.arange(part.start, part.end, device=device)]
        )
        # One mask for each layer that sees the whole text, in their order.
        masks = iter(keep)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PairlessLayer):
                cache.layers[index] = layer.copy_at(part.scored_end)
                continue
            if isinstance(layer, SlidingLayer):
                # After the last part the tail starts `offset` positions later.
                if last:
                    recent = layer.move_to(part.scored_end, seen)
                else:
                    recent = layer.move_to(part.scored_end)
                if restored:
                    recent = recent.with_restore_cache(restored[index])
                cache.layers[index] = recent
                continue
            keep_layer = next(masks)
            # Columns of the tail: the prefix's, then this part's. What stays moves into the
            # context.
            heads, slots = keep_layer[:, columns].nonzero(as_tuple=True)
            keys = layer.keys[0, heads, slots]
            values = keys if layer.shares_pairs else layer.values[0, heads, slots]
            new = ContextPairs(keys, values, heads, columns[slots])
            # What earlier parts kept competes again and may be dropped now.
            old = ContextPairs.from_layer(layer)
            rows = ContextPairs.concatenate([old.select(keep_layer[old.heads, old.positions]), new])
            if restored:
                keys, values = restored[index]
            else:
                # The prefix stays in the tail until the last part has been read.
                end = prefix
                if last:
                    end = 0
                keys = layer.keys[:, :, :end].clone()
                values = layer.values[:, :, :end].clone()
            cache.layers[index] = rows.to_layer(layer.heads, seen, keys, values)
        self.scores.masked_fill_(~keep, UNHELD_SCORE)

    def choose_kept(self, last: bool) -> Tensor:
        """Return what stays, (L, H, S + T) bool: the best of what has a score.

        Before the last part the prefix is left out: it is in the tail.
        """
        prefix = self.context.prefix_length
        if last and self.config.prefix_policy == "counted":
            return self.config.mark_kept(self.scores, self.budget.retained)
        competing = self.scores[..., prefix:]
        # At the beginning there may be fewer pairs than the budget allows.
        pairs = min(self.budget.retained, int((competing > UNHELD_SCORE).sum()))
        keep = self.config.mark_kept(competing, pairs)
        return torch.nn.functional.pad(keep, (prefix, 0), value=last)


def run_restore_pass(
    adapter: RestoreAdapter, cache: RaggedCache, budget: Budget, seconds: dict[str, float]
) -> list[KeysValues]:
    """Return the restore cache of a pass over all that is held, layer by layer."""
    tokens = budget.restore_tokens
    with time_phase(seconds, "restore"):
        view = read_only_view(cache)
        adapter.run_restore_pass(view, tokens, budget.ratio)
    restored = []
    for layer in list_dense_layers(view):
        restored.append((layer.keys[:, :, -tokens:].clone(), layer.values[:, :, -tokens:].clone()))
    return restored


def _to_compressed_layer(dense: DenseLayer) -> ContextLayer:
    """Return a RaggedLayer with an empty context and the dense layer's pairs as its tail, a
    SlidingLayer with the columns that a RecentLayer holds, or a layer with states itself.
    """
    if isinstance(dense, PairlessLayer):
        return dense
    if isinstance(dense, RecentLayer):
        seen = dense.get_seq_length()
        keys, values = dense.take_columns(dense.first, seen)
        return SlidingLayer(
            context_keys=keys,
            context_values=values,
            first=dense.first,
            window=dense.window,
            seen=seen,
            restore_keys=keys[:, :, :0],
            restore_values=values[:, :, :0],
        )
    heads = dense.keys.shape[1]
    no_keys = dense.keys[0, 0, :0]
    # Two tensors, unless keys and values are one (`RaggedLayer.shares_pairs`).
    no_values = no_keys if dense.values is dense.keys else dense.values[0, 0, :0]
    offsets = torch.zeros(heads + 1, dtype=torch.int32, device=no_keys.device)
    return RaggedLayer(no_keys, no_values, offsets, offsets[:0], 0, dense.keys, dense.values)
