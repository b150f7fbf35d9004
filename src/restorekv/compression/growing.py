"""Contexts that grow: a text appended to a small cache, and caches that were compressed apart put
behind one another.

An appended part is prefilled at its own positions over the chat prefix and all that is kept, scored
as streaming scores a part, and evicted to what the budget of the grown whole has left; what was
kept before stays. The part reads the restore tokens of the parts before it, and `restore` decides
what becomes of them: "last" drops them when the part has its own, "every" turns them into context
pairs, "none" does without restoring. Composed caches are independent: keys are rotated to where the
text would stand in the whole (model/rope.py), and every restore cache but the last becomes context.

Restore pairs among the context's rows have the positions from S + T on, which no token of the text
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import ContextPairs, RaggedCache, RaggedLayer
from restorekv.compression.budget import Budget
from restorekv.compression.compressor import time_phase
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import prefill_and_score
from restorekv.compression.streaming import Pairs, run_restore_pass
from restorekv.errors import BudgetError, RestoreKVError, check_choice
from restorekv.model import support
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, warn_if_beyond_positions
from restorekv.model.rope import shift_keys
from restorekv.model.shape import CacheShape

RESTORE = ("last", "every", "none")


@dataclass
class Growth:
    """A text being appended to a cache of a context, by an eviction with the adapter that `restore`
    calls for.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    cache: RaggedCache
    how: Eviction
    restore: str
    ids: Tensor  # (1, t), of the text
    ratio: Fraction
    more: str = "append more at once"  # what to do if the text is too short
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        evictor = self.how.evictor
        config = self.how.config
        check_choice("restore", self.restore, RESTORE)
        if not evictor.streams:
            why = f"The evictor {evictor.name} scores a context as a whole"
            raise RestoreKVError(f"{why}; compress the whole text again.")
        if config.offset or any(layer.bias is not None for layer in self.cache.layers):
            raise RestoreKVError(
                "Only a cache of an evictor without an offset can grow; compress the text in another way."
            )

    @cached_property
    def whole(self) -> Context:
        """The context with the text at its end."""
        return replace(self.context, ids=torch.cat([self.context.ids, self.ids], -1))

    @cached_property
    def budget(self) -> Budget:
        """What the whole may hold, with the new part's restore tokens."""
        shape = CacheShape.from_model(self.model)
        adapter = self.how.adapter
        tokens = adapter.restore_tokens if adapter else 0
        return self.how.config.make_budget(
            self.ratio, self.whole, shape.layers, shape.heads, tokens
        )

    @torch.no_grad()
    def run(self) -> RaggedCache:
        """Returns the cache of the whole, evicted to its budget."""
        warn_if_beyond_positions(self.model, self.whole.positions, "The grown context")
        part = replace(
            self.context, ids=torch.cat([self.context.ids[:, : self.context.prefix], self.ids], -1)
        )
        evictor = self.how.evictor.for_later_part(part)
        if (again := evictor.count_pinned_tail(part)) >= self.ids.shape[-1]:
            kept = f"{evictor.spec} always keeps the latest {again} tokens"
            raise RestoreKVError(f"{kept}, and the new text has {self.ids.shape[-1]}; {self.more}.")
        support.prepare_model(self.model)
        room = self.room()
        tokens = self.budget.restore_tokens
        restored = []
        reading, scores = prefill_and_score(
            self.model, self.tokenizer, evictor, part, self.opened(), self.seconds
        )
        if tokens and self.how.config.restore_from == "full":
            restored = run_restore_pass(self.how.adapter, reading, tokens, self.seconds)
        with time_phase(self.seconds, "evict"):
            scores = scores[..., -part.tokens :]
            cache = self.gathered(
                reading,
                self.how.config.allocation(scores, min(room, scores.numel())),
                restored,
            )
        if tokens and not restored:
            with time_phase(self.seconds, "restore"):
                self.how.adapter.append(cache, tokens)
                cache.commit_tail()
        return cache

    @property
    def earlier(self) -> int:
        """The restore pairs of earlier parts among the rows of every head."""
        layer = self.cache.layers[0]
        return int((layer.positions >= self.context.positions).sum()) // layer.heads

    @property
    def carried(self) -> int:
        """The restore pairs that every head goes on holding among its rows."""
        return self.earlier + self.cache.restore_length if self.keeps else 0

    @property
    def keeps(self) -> bool:
        """Whether restore pairs of earlier parts stay: also under "last" where the new part has
        none of its own.
        """
        return self.restore == "every" or (
            self.restore == "last" and not self.budget.restore_tokens
        )

    def room(self) -> int:
        """Returns how many pairs of the new part may stay: what the budget leaves after all that is
        kept.
        """
        budget = self.budget
        first = self.context.prefix if self.how.config.prefix_policy == "free" else 0
        held = sum(
            int(((layer.positions >= first) & (layer.positions < self.context.positions)).sum())
            for layer in self.cache.layers
        )
        room = budget.retained - held - self.carried * budget.layers * budget.heads
        if room < 0:
            raise BudgetError(
                f"The budget has no room for the new text: {-room:,} pairs too many are held; {self.more}"
                + (", or with restore='last'." if self.restore == "every" else ".")
            )
        return room

    def opened(self) -> RaggedCache:
        """Returns a cache whose context is all that is kept, restore pairs included, and whose tail
        is the prefix.
        """
        prefix = self.context.prefix
        layers = []
        with time_phase(self.seconds, "prefill"):
            first = (
                prefill(self.model, self.context.ids[:, :prefix]).layers
                if prefix
                else self.cache.layers
            )
            for layer, dense in zip(self.cache.layers, first, strict=True):
                restored = ContextPairs.from_restore_cache(
                    layer, self.context.positions + self.earlier
                )
                rows = ContextPairs.concatenate([ContextPairs.from_layer(layer), restored])
                pair = (dense.keys, dense.values) if prefix else _make_empty_pairs(layer)
                layers.append(
                    rows.select(rows.positions >= prefix).to_layer(
                        layer.heads, self.context.tokens, *pair
                    )
                )
        return RaggedCache(layers)

    def gathered(self, reading: RaggedCache, keep: Tensor, restored: list[Pairs]) -> RaggedCache:
        """Returns what was kept, what `keep` (L, H, t) marks of the new part, and the restore
        cache.
        """
        layers = []
        prefix = self.context.prefix
        seen = self.whole.positions
        for index, (old, new, kept) in enumerate(
            zip(self.cache.layers, reading.layers, keep, strict=True)
        ):
            rows = ContextPairs.from_layer(old)
            parts = [rows.select(rows.positions < self.context.positions)]
            if self.keeps:
                # Restore pairs are numbered behind the text, wherever that ends.
                grown = seen - self.context.positions
                earlier = rows.select(rows.positions >= self.context.positions)
                parts.append(replace(earlier, positions=earlier.positions + grown))
                parts.append(ContextPairs.from_restore_cache(old, seen + self.earlier))
            heads, slots = kept.to(new.device).nonzero(as_tuple=True)
            tail = (x[0, heads, prefix + slots] for x in new.pair)
            parts.append(ContextPairs(*tail, heads, self.context.positions + slots))
            layers.append(
                ContextPairs.concatenate(parts).to_layer(
                    old.heads, seen, *(restored[index] if restored else _make_empty_pairs(old))
                )
            )
        return RaggedCache(layers)


def _make_empty_pairs(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """Returns keys and values (1, H, 0, D)."""
    return layer.restore_keys[:, :, :0], layer.restore_values[:, :, :0]


@torch.no_grad()
def compose_caches(
    model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]]
) -> tuple[Context, RaggedCache]:
    """Returns contexts with one chat prefix as one, and their caches as one; the first alone keeps
    its prefix.
    """
    first = parts[0][0]
    prefix = parts[0][0].prefix
    before = [context.ids[:, : context.prefix] for context, _ in parts]
    if any(not each.equal(before[0]) for each in before):
        raise RestoreKVError(
            "Only contexts with the same chat prefix can be composed; compress them with one system text."
        )
    if any(
        layer.bias is not None or cache.positions != context.positions
        for context, cache in parts
        for layer in cache.layers
    ):
        raise RestoreKVError(
            "Only caches of evictors without an offset can be composed; compress the texts in another way."
        )
    whole = replace(
        first, ids=torch.cat([before[0], *(context.ids[:, prefix:] for context, _ in parts)], -1)
    )
    warn_if_beyond_positions(model, whole.positions, "The composed context")
    support.prepare_model(model)
    layers = [
        _compose_layer(model, parts, index, whole) for index in range(len(parts[0][1].layers))
    ]
    return whole, RaggedCache(layers)


def _move_pairs(model: PreTrainedModel, rows: ContextPairs, distance: int) -> ContextPairs:
    """Returns the rows as if their text stood `distance` positions later."""
    keys = shift_keys(model, rows.keys, distance) if distance else rows.keys
    return replace(rows, keys=keys, positions=rows.positions + distance)


def _compose_layer(
    model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]], index: int, whole: Context
) -> RaggedLayer:
    """Returns one layer of all caches; restore pairs but the last cache's become context, behind
    the text.
    """
    rows = []
    start = 0
    end = whole.positions
    for number, (context, cache) in enumerate(parts):
        layer = cache.layers[index]
        own = ContextPairs.from_layer(cache.layers[index])
        text = own.select(
            (own.positions < context.positions)
            & (own.positions >= (context.prefix if number else 0))
        )
        rows.append(_move_pairs(model, text, start))
        restored = [own.select(own.positions >= context.positions)]
        if number < len(parts) - 1:
            restored.append(ContextPairs.from_restore_cache(layer, 0))
        for each in restored:
            count = len(each.heads) // layer.heads
            turned = _move_pairs(model, each, start)
            numbers = torch.arange(count, device=turned.heads.device).repeat(layer.heads)
            rows.append(replace(turned, positions=end + numbers))
            end += count
        last = start
        start += context.tokens
    keys = shift_keys(model, layer.restore_keys, last) if last else layer.restore_keys
    return ContextPairs.concatenate(rows).to_layer(
        layer.heads, whole.positions, keys, layer.restore_values
    )
