"""Contexts that grow: a text appended to a small cache, and independently compressed caches joined
end to end.

An appended part is prefilled at its own positions over the chat prefix and the retained cache,
scored as streaming scores a part, and evicted to the rest of the grown context's budget; the pairs
retained before stay. The part reads the restore pairs of the parts before it, and `restore` decides
what becomes of them: "last" drops them when the part has its own, "every" turns them into context
pairs, "none" drops them and makes no new ones.

Caches to compose were compressed independently: their keys are rotated to the positions that their
texts have in the composed one (model/rope.py), and every restore cache but the last becomes
context.

Restore pairs among the context's rows have the positions from S + T on, which no token of the text
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.dense import list_dense_layers
from restorekv.cache.ragged import ContextLayer, ContextPairs, RaggedCache, RaggedLayer
from restorekv.cache.sliding import SlidingLayer
from restorekv.cache.states import PairlessLayer
from restorekv.cache.tail import KeysValues
from restorekv.compression.budget import Budget
from restorekv.compression.compressor import time_phase
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import prefill_and_score, prefill_unscored
from restorekv.compression.streaming import run_restore_pass
from restorekv.errors import (
    BudgetError,
    ModelError,
    RestoreKVError,
    UnlikeContextsError,
    check_choice,
)
from restorekv.model import support
from restorekv.model.position_limits import refuse_beyond_positions
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.model.rope import shift_keys
from restorekv.model.shape import CacheShape

RestoreParts = Literal["last", "every", "none"]
RESTORE_CHOICES: tuple[RestoreParts, ...] = get_args(RestoreParts)


@dataclass
class Growth:
    """A text being appended to the cache of a context.

    Args:
        model: The model that made the cache.
        tokenizer: Its tokenizer.
        context: The text so far.
        cache: Its cache, which does not change.
        eviction: What scores and evicts the new part, with the adapter that `restore` calls for.
        restore: What becomes of the restore tokens of earlier parts: "last", "every" or "none".
        ids: The ids (1, t) of the new part.
        ratio: The share of the grown context's pairs to hold.
        fix: What the user can do if the part is too short or the budget too small.
        seconds: Gets the seconds of each phase.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    cache: RaggedCache
    eviction: Eviction
    restore: str
    ids: Tensor
    ratio: Fraction
    fix: str = "append more at once"
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        evictor = self.eviction.evictor
        check_choice("restore", self.restore, RESTORE_CHOICES)
        # Scores of parts must be comparable with each other.
        if not evictor.streams:
            raise RestoreKVError(
                f"The evictor {evictor.name} scores a context as a whole; compress the whole text "
                "again."
            )
        if self.eviction.config.offset:
            raise RestoreKVError(
                "A cache with an offset cannot grow; compress the whole text again, or without an "
                "offset."
            )
        if any(layer.bias is not None for layer in self.cache.full_attention):
            raise RestoreKVError(
                "A cache made by am-fast has weights of its pairs and cannot grow; compress the "
                "whole text again, or with an evictor."
            )

    @cached_property
    def grown_context(self) -> Context:
        """The context with the new part at its end."""
        return replace(self.context, ids=torch.cat([self.context.ids, self.ids], -1))

    @cached_property
    def budget(self) -> Budget:
        """What the grown context may hold, with the new part's restore tokens."""
        shape = CacheShape.from_model(self.model)
        adapter = self.eviction.adapter
        tokens = adapter.restore_tokens if adapter else 0
        config = self.eviction.config
        if config.on_small_budget == "whole":
            # What was evicted is gone, so the grown text cannot be kept whole.
            config = replace(config, on_small_budget="error")
        return config.make_budget(self.ratio, self.grown_context, shape.layers, shape.heads, tokens)

    @torch.no_grad()
    def run(self) -> RaggedCache:
        """Return the cache of the grown context, evicted to its budget."""
        config = self.eviction.config
        adapter = self.eviction.adapter
        refuse_beyond_positions(self.model, self.grown_context.num_tokens, "The grown context")
        prefix = self.context.ids[:, : self.context.prefix_length]
        # As in streaming, the evictor takes the prefix and the new part for the whole text.
        part = replace(self.context, ids=torch.cat([prefix, self.ids], -1))
        evictor = self.eviction.evictor.for_later_part(part)
        room = self._count_room()
        keeps_all = self._keeps_all(part, room)
        pinned = evictor.count_pinned_tail(part)
        if pinned >= part.text_tokens and not keeps_all:
            raise RestoreKVError(
                f"{evictor.spec} always keeps the latest {pinned} tokens, and the new text has "
                f"{part.text_tokens}; {self.fix}."
            )
        support.prepare_model(self.model)
        tokens = self.budget.restore_tokens
        # The part is read over all that is kept, scored as a separate context, and evicted to
        # what the budget leaves. The restore pass comes before or after that, as the config says.
        reading = self._make_reading_cache()
        if keeps_all:
            read, scores = prefill_unscored(self.model, part, reading, self.seconds)
        else:
            read, scores = prefill_and_score(
                self.model, self.tokenizer, evictor, part, reading, self.seconds
            )
        restored: list[KeysValues] = []
        if adapter is not None and tokens and config.restore_from == "full":
            restored = run_restore_pass(adapter, read, self.budget, self.seconds)
        with time_phase(self.seconds, "evict"):
            keep = config.mark_kept(scores, min(room, scores.numel()))
            cache = self._build_grown_cache(read, keep, restored)
        if adapter is not None and tokens and not restored:
            with time_phase(self.seconds, "restore"):
                adapter.run_restore_pass(cache, tokens, self.budget.ratio)
                cache.commit_tail()
        return cache

    @property
    def earlier_restore_pairs(self) -> int:
        """How many context pairs of each head are restore pairs of earlier parts."""
        # They have the positions from S + T on, and every head has the same number of them.
        layer = self.cache.full_attention[0]
        return int((layer.positions >= self.context.num_tokens).sum()) // layer.heads

    @property
    def carried_restore_pairs(self) -> int:
        """How many restore pairs of earlier parts each head will hold in the grown cache."""
        if not self.keeps_restore_pairs:
            return 0
        return self.earlier_restore_pairs + self.cache.restore_length

    @property
    def keeps_restore_pairs(self) -> bool:
        """Whether restore pairs of earlier parts stay; under "last" they do if the new part has no
        restore tokens.
        """
        if self.restore == "last":
            return not self.budget.restore_tokens
        return self.restore == "every"

    def _keeps_all(self, part: Context, room: int) -> bool:
        """Return whether there is room for all pairs of a part, so that no scores are needed, as at
        ratio 1.
        """
        shape = CacheShape.from_model(self.model)
        return room >= shape.layers * shape.heads * part.text_tokens

    def _count_room(self) -> int:
        """Return how many pairs of the new part may stay: what the budget leaves after all that is
        kept.
        """
        budget = self.budget
        first = self.eviction.config.first_competing_column(self.context)
        # What was kept before stays, so the new part gets what it leaves of the budget.
        held = 0
        for layer in self.cache.full_attention:
            of_text = (layer.positions >= first) & (layer.positions < self.context.num_tokens)
            held += int(of_text.sum())
        room = budget.retained - held - self.carried_restore_pairs * budget.layers * budget.heads
        if room < 0:
            other_fix = ""
            if self.restore == "every":
                other_fix = ", or with restore='last'"
            raise BudgetError(
                f"The budget has no room for the new text: {-room:,} pairs too many are held; "
                f"{self.fix}{other_fix}."
            )
        return room

    def _make_reading_cache(self) -> RaggedCache:
        """Return a cache whose context is all that is kept, restore pairs included, and whose tail
        is the prefix.

        Layers with a window hold the end of the text alone, and layers with states what they were
        after it; the new part follows it there.
        """
        prefix = self.context.prefix_length
        layers: list[ContextLayer] = []
        with time_phase(self.seconds, "prefill"):
            # The tail gets all pairs of the prefix again, since some may have been evicted.
            dense = []
            if prefix:
                dense = list_dense_layers(prefill(self.model, self.context.ids[:, :prefix]))
            for index, layer in enumerate(self.cache.layers):
                if isinstance(layer, PairlessLayer):
                    layers.append(layer.copy())
                    continue
                keys, values = _make_empty_pairs(layer)
                if isinstance(layer, SlidingLayer):
                    layers.append(layer.with_restore_cache((keys, values)))
                    continue
                if dense:
                    keys = dense[index].keys
                    values = dense[index].values
                restored = ContextPairs.from_restore_cache(
                    layer, self.context.num_tokens + self.earlier_restore_pairs
                )
                pairs = ContextPairs.concatenate([ContextPairs.from_layer(layer), restored])
                pairs = pairs.select(pairs.positions >= prefix)
                layers.append(pairs.to_layer(layer.heads, self.context.text_tokens, keys, values))
        return RaggedCache(layers)

    def _build_grown_cache(
        self, read: RaggedCache, keep: Tensor, restored: list[KeysValues]
    ) -> RaggedCache:
        """Return the grown cache: the pairs kept before, the new part's pairs that `keep` (L, H, t)
        marks, and the restore cache.
        """
        layers: list[ContextLayer] = []
        prefix = self.context.prefix_length
        seen = self.grown_context.num_tokens
        masks = iter(keep)
        for index, (old, new) in enumerate(zip(self.cache.layers, read.layers, strict=True)):
            if isinstance(new, PairlessLayer):
                layers.append(new.copy())
                continue
            if isinstance(new, SlidingLayer):
                # The budget does not count windows: the layer slides to the end of the text.
                recent = new.move_to(seen)
                if restored:
                    recent = recent.with_restore_cache(restored[index])
                layers.append(recent)
                continue
            assert isinstance(old, RaggedLayer), "both caches are one model's"
            # Evictors score layers without a window alone, so `keep` has one entry for each.
            keep_layer = next(masks)
            pairs = ContextPairs.from_layer(old)
            parts = [pairs.select(pairs.positions < self.context.num_tokens)]
            if self.keeps_restore_pairs:
                # Restore pairs have the positions after the text, wherever that ends.
                moved_by = seen - self.context.num_tokens
                earlier = pairs.select(pairs.positions >= self.context.num_tokens)
                parts.append(replace(earlier, positions=earlier.positions + moved_by))
                parts.append(
                    ContextPairs.from_restore_cache(old, seen + self.earlier_restore_pairs)
                )
            # The new part was prefilled after the chat prefix, so its column `slot` is at
            # prefix + slot of the tail (1, H, S + t, D). Rows come out sorted by head.
            heads, slots = keep_layer.to(new.device).nonzero(as_tuple=True)
            keys, values = (tail[0, heads, prefix + slots] for tail in new.keys_and_values)
            if old.shares_pairs:
                values = keys
            parts.append(ContextPairs(keys, values, heads, self.context.num_tokens + slots))
            tail_keys, tail_values = _make_empty_pairs(old)
            if restored:
                tail_keys, tail_values = restored[index]
            gathered = ContextPairs.concatenate(parts)
            layers.append(gathered.to_layer(old.heads, seen, tail_keys, tail_values))
        return RaggedCache(layers)


def _make_empty_pairs(layer: RaggedLayer | SlidingLayer) -> tuple[Tensor, Tensor]:
    """Return keys and values (1, H, 0, D)."""
    return layer.restore_keys[:, :, :0], layer.restore_values[:, :, :0]


@torch.no_grad()
def compose_caches(
    model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]]
) -> tuple[Context, RaggedCache]:
    """Join contexts that share a chat prefix, and their caches. Only the first keeps its prefix."""
    first, first_cache = parts[0]
    prefix = first.ids[:, : first.prefix_length]
    ids = [prefix]
    for context, cache in parts:
        if not context.ids[:, : context.prefix_length].equal(prefix):
            # Some tokenizers merge the template's last line break with line breaks at the start of
            # a text into one token.
            raise UnlikeContextsError(
                "Only contexts with the same chat prefix can be composed; compress them with one "
                "system text, and without blank lines at the beginning of a text."
            )
        if context.suffix_text != first.suffix_text:
            raise UnlikeContextsError(
                "Only contexts with the same chat template can be composed; compress them with one "
                "tokenizer, and set its chat template before."
            )
        if cache.sliding:
            raise ModelError(
                "Caches of a model with sliding-window layers cannot be composed: those layers "
                "hold the end of each text alone; compress the texts as one, or append them."
            )
        if cache.with_states:
            raise ModelError(
                "Caches of a model with linear attention, convolutions or state-space layers "
                "cannot be composed: the states of such layers have read one text alone; compress "
                "the texts as one, or append them."
            )
        if cache.full_attention[0].shares_pairs:
            raise ModelError(
                "Caches of a model with latent attention cannot be composed: restorekv does not "
                "move its keys; compress the texts as one, or append them."
            )
        if any(layer.bias is not None for layer in cache.full_attention):
            raise RestoreKVError(
                "Caches made by am-fast have weights of their pairs and cannot be composed; "
                "compress the texts with an evictor."
            )
        if cache.seen != context.num_tokens:
            raise RestoreKVError(
                "Caches with an offset cannot be composed; compress the texts without it."
            )
        ids.append(context.ids[:, context.prefix_length :])
    whole = replace(first, ids=torch.cat(ids, -1))
    refuse_beyond_positions(model, whole.num_tokens, "The composed context")
    layers = []
    for index in range(len(first_cache.full_attention)):
        layers.append(_compose_layer(model, parts, index, whole))
    return whole, RaggedCache(layers)


def _move_pairs(model: PreTrainedModel, rows: ContextPairs, distance: int) -> ContextPairs:
    """Return the rows as if their text stood `distance` positions later."""
    keys = rows.keys
    if distance:
        keys = shift_keys(model, rows.keys, distance)
    return replace(rows, keys=keys, positions=rows.positions + distance)


def _compose_layer(
    model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]], index: int, whole: Context
) -> RaggedLayer:
    """Return one layer of the composed cache; all restore pairs but the last cache's become context
    pairs with positions after the text.
    """
    pairs = []
    # How far a text moves: the tokens of the texts before it.
    moved_by = 0
    # Restore pairs get the positions after the whole text.
    next_restore_position = whole.num_tokens
    for number, (context, cache) in enumerate(parts):
        layer = cache.full_attention[index]
        own = ContextPairs.from_layer(layer)
        # All texts were compressed after the same chat prefix; the first cache's stays.
        first = 0
        if number:
            first = context.prefix_length
        text = own.select((own.positions < context.num_tokens) & (own.positions >= first))
        pairs.append(_move_pairs(model, text, moved_by))
        restored = [own.select(own.positions >= context.num_tokens)]
        if number < len(parts) - 1:
            restored.append(ContextPairs.from_restore_cache(layer, 0))
        # Each head holds the same number of restore pairs.
        for each in restored:
            count = len(each.heads) // layer.heads
            rotated = _move_pairs(model, each, moved_by)
            numbers = torch.arange(count, device=rotated.heads.device).repeat(layer.heads)
            pairs.append(replace(rotated, positions=next_restore_position + numbers))
            next_restore_position += count
        moved_by += context.text_tokens
    last_context, last_cache = parts[-1]
    last = last_cache.layers[index]
    last_start = moved_by - last_context.text_tokens
    keys = last.restore_keys
    if last_start:
        keys = shift_keys(model, keys, last_start)
    composed = ContextPairs.concatenate(pairs)
    return composed.to_layer(last.heads, whole.num_tokens, keys, last.restore_values)
