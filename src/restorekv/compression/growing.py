"""Contexts that grow: a text appended to a small cache, and caches that were compressed apart put behind one another.

An appended part is prefilled at its own positions over the chat prefix and all that is kept, scored as streaming scores
a part, and evicted to what the budget of the grown whole has left; what was kept before stays. The part reads the
restore tokens of the parts before it, and `restore` decides what becomes of them: "last" drops them when the part has
its own, "every" turns them into context pairs, "none" does without restoring. Composed caches are independent: keys are
rotated to where the text would stand in the whole (portable.py), and every restore cache but the last becomes context.

Restore pairs among the context's rows have the positions from S + T on, which no token of the text has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression.budget import Budget
from restorekv.compression.eviction import Eviction
from restorekv.compression.portable import rotated
from restorekv.compression.prepared import timed
from restorekv.errors import BudgetError, RestoreKVError
from restorekv.model import attention
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill, read_only_view
from restorekv.model.prompt import Context, tell_beyond

RESTORE = ("last", "every", "none")


@dataclass(frozen=True)
class Rows:
    """The context pairs of one layer: keys and values (N, D), their heads (N,) and positions (N,), in any order."""

    keys: Tensor
    values: Tensor
    heads: Tensor
    positions: Tensor

    @classmethod
    def of(cls, layer: RaggedLayer) -> Rows:
        """Returns a layer's context, in the model's dtype."""
        counts = layer.offsets.diff().long()
        heads = torch.arange(layer.heads, device=counts.device).repeat_interleave(counts)
        return cls(layer.context_keys[:], layer.context_values[:], heads, layer.positions.long())

    @classmethod
    def of_restore_cache(cls, layer: RaggedLayer, first: int) -> Rows:
        """Returns a layer's restore cache as context pairs from position `first` on."""
        heads, count = layer.heads, layer.restore
        numbers = torch.arange(heads * count, device=layer.device)
        keys, values = (x[0].flatten(0, 1) for x in (layer.restore_keys, layer.restore_values))
        return cls(keys, values, numbers // max(count, 1), first + numbers % max(count, 1))

    def where(self, kept: Tensor) -> Rows:
        """Returns the rows that `kept` (N,) marks."""
        return Rows(self.keys[kept], self.values[kept], self.heads[kept], self.positions[kept])

    def moved(self, model: PreTrainedModel, distance: int) -> Rows:
        """Returns the rows as if their text stood `distance` positions later."""
        keys = rotated(model, self.keys, distance) if distance else self.keys
        return replace(self, keys=keys, positions=self.positions + distance)

    def layer(self, heads: int, seen: int, *tail: Tensor) -> RaggedLayer:
        """Returns a layer with these rows as its context; `tail` are its restore keys and values (1, H, n, D)."""
        order = (
            (self.heads * (int(self.positions.max()) + 1) + self.positions).argsort() if len(self.heads) else self.heads
        )
        counts = torch.bincount(self.heads, minlength=heads).cumsum(0)
        offsets = torch.cat([counts.new_zeros(1), counts]).int()
        return RaggedLayer(self.keys[order], self.values[order], offsets, self.positions[order].int(), seen, *tail)


def joined(rows: Sequence[Rows]) -> Rows:
    """Returns the rows of all."""
    return Rows(
        *(torch.cat([getattr(each, name) for each in rows]) for name in ("keys", "values", "heads", "positions"))
    )


@dataclass
class Growth:
    """A text being appended to a cache of a context, by an eviction with the adapter that `restore` calls for."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    cache: RaggedCache
    how: Eviction
    restore: str
    tokens: int  # the new part's restore tokens
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        evictor, config = self.how.evictor, self.how.conventions
        if self.restore not in RESTORE:
            raise RestoreKVError(f"restore is one of {', '.join(RESTORE)}, not {self.restore!r}.")
        if not evictor.streams:
            why = f"The evictor {evictor.name} scores a context as a whole"
            raise RestoreKVError(f"{why}; compress the whole text again.")
        if config.offset or any(layer.bias is not None for layer in self.cache.layers):
            raise RestoreKVError(
                "Only a cache of an evictor without an offset can grow; compress the text in another way."
            )

    @torch.no_grad()
    def append(self, ids: Tensor, budget: Budget) -> tuple[Context, RaggedCache]:
        """Returns the context and the cache with ids (1, t) at the end, evicted to the budget of the whole."""
        whole = replace(self.context, ids=torch.cat([self.context.ids, ids], -1))
        tell_beyond(self.model, whole.positions, "The grown context")
        part = replace(self.context, ids=torch.cat([self.context.ids[:, : self.context.prefix], ids], -1))
        evictor = self.how.evictor.later(part)
        if (again := evictor.latest(part)) >= ids.shape[-1]:
            kept = f"{evictor.spec} always keeps the latest {again} tokens"
            raise RestoreKVError(f"{kept}, and the new text has {ids.shape[-1]}; append more at once.")
        attention.install(self.model)
        room = self.room(budget)
        reading, scores = self.read(part, evictor)
        restored = self.restored(reading, budget.restore_tokens)
        with timed(self.seconds, "evict"):
            keep = self.how.conventions.allocation(scores, min(room, scores.numel()))
            cache = self.gathered(reading, keep, restored, whole.positions)
        if budget.restore_tokens and not restored:
            with timed(self.seconds, "restore"):
                self.how.adapter.append(cache, budget.restore_tokens)
                cache.settle()
        return whole, cache

    @property
    def earlier(self) -> int:
        """The restore pairs of earlier parts among the rows of every head."""
        layer = self.cache.layers[0]
        return int((layer.positions >= self.context.positions).sum()) // layer.heads

    @property
    def carried(self) -> int:
        """The restore pairs that every head goes on holding among its rows."""
        return self.earlier + self.cache.restore if self.keeps else 0

    @property
    def keeps(self) -> bool:
        """Whether restore pairs of earlier parts stay: also under "last" where the new part has none of its own."""
        return self.restore == "every" or (self.restore == "last" and not self.tokens)

    def room(self, budget: Budget) -> int:
        """Returns how many pairs of the new part may stay: what the budget leaves after all that is kept."""
        first = self.context.prefix if self.how.conventions.prefix_policy == "free" else 0
        held = sum(
            int(((layer.positions >= first) & (layer.positions < self.context.positions)).sum())
            for layer in self.cache.layers
        )
        room = budget.retained - held - self.carried * budget.layers * budget.heads
        if room < 0:
            raise BudgetError(
                f"The budget has no room for the new text: {-room:,} pairs too many are held; append more at once"
                + (", or with restore='last'." if self.restore == "every" else ".")
            )
        return room

    def read(self, part: Context, evictor: object) -> tuple[RaggedCache, Tensor]:
        """Returns a cache whose tail is prefix and part, behind what is kept, and the scores (L, H, t) of the part."""
        prefix, observer = self.context.prefix, evictor.observer(self.model, part)
        observing = observe_layers(self.model, observer.on_layer) if observer else nullcontext()
        with timed(self.seconds, "prefill"):
            first = prefill(self.model, part.ids[:, :prefix]).layers if prefix else self.cache.layers
            layers = []
            for layer, dense in zip(self.cache.layers, first, strict=True):
                rows = joined([Rows.of(layer), Rows.of_restore_cache(layer, self.context.positions + self.earlier)])
                rows = rows.where(rows.positions >= prefix)
                pair = (dense.keys, dense.values) if prefix else none(layer)
                layers.append(rows.layer(layer.heads, self.context.tokens, *pair))
            reading = RaggedCache(layers)
            with observing:
                prefill(self.model, part.ids[:, prefix:], into=reading)
        with timed(self.seconds, "score"):
            scores = evictor.score(self.model, self.tokenizer, part, reading, observer)
        return reading, scores[..., -part.tokens :]

    def restored(self, reading: RaggedCache, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns every layer's restore cache of a pass over all that is held; none if it reads evicted caches."""
        if not count or self.how.conventions.restore_from == "evicted":
            return []
        with timed(self.seconds, "restore"):
            view = read_only_view(reading)
            self.how.adapter.append(view, count)
        return [(layer.keys[:, :, -count:].clone(), layer.values[:, :, -count:].clone()) for layer in view.layers]

    def gathered(
        self, reading: RaggedCache, keep: Tensor, restored: list[tuple[Tensor, Tensor]], seen: int
    ) -> RaggedCache:
        """Returns what was kept, what `keep` (L, H, t) marks of the new part, and the restore cache."""
        layers, prefix = [], self.context.prefix
        for index, (old, new, kept) in enumerate(zip(self.cache.layers, reading.layers, keep, strict=True)):
            rows = Rows.of(old)
            parts = [rows.where(rows.positions < self.context.positions)]
            if self.keeps:
                grown = seen - self.context.positions  # restore pairs are numbered behind the text, wherever that ends
                earlier = rows.where(rows.positions >= self.context.positions)
                parts.append(replace(earlier, positions=earlier.positions + grown))
                parts.append(Rows.of_restore_cache(old, seen + self.earlier))
            heads, slots = kept.to(new.device).nonzero(as_tuple=True)
            tail = (x[0, heads, prefix + slots] for x in new.pair)
            parts.append(Rows(*tail, heads, self.context.positions + slots))
            layers.append(joined(parts).layer(old.heads, seen, *(restored[index] if restored else none(old))))
        return RaggedCache(layers)


def none(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """Returns keys and values (1, H, 0, D)."""
    return layer.restore_keys[:, :, :0], layer.restore_values[:, :, :0]


@torch.no_grad()
def composed(model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]]) -> tuple[Context, RaggedCache]:
    """Returns contexts with one chat prefix as one, and their caches as one; the first alone keeps its prefix."""
    first, prefix = parts[0][0], parts[0][0].prefix
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
    whole = replace(first, ids=torch.cat([before[0], *(context.ids[:, prefix:] for context, _ in parts)], -1))
    tell_beyond(model, whole.positions, "The composed context")
    attention.install(model)
    layers = [composed_layer(model, parts, index, whole) for index in range(len(parts[0][1].layers))]
    return whole, RaggedCache(layers)


def composed_layer(
    model: PreTrainedModel, parts: Sequence[tuple[Context, RaggedCache]], index: int, whole: Context
) -> RaggedLayer:
    """Returns one layer of all caches; restore pairs but the last cache's become context, behind the text."""
    rows, start, end = [], 0, whole.positions
    for number, (context, cache) in enumerate(parts):
        layer, own = cache.layers[index], Rows.of(cache.layers[index])
        text = own.where((own.positions < context.positions) & (own.positions >= (context.prefix if number else 0)))
        rows.append(text.moved(model, start))
        restored = [own.where(own.positions >= context.positions)]
        if number < len(parts) - 1:
            restored.append(Rows.of_restore_cache(layer, 0))
        for each in restored:
            count = len(each.heads) // layer.heads
            turned = each.moved(model, start)
            numbers = torch.arange(count, device=turned.heads.device).repeat(layer.heads)
            rows.append(replace(turned, positions=end + numbers))
            end += count
        last = start
        start += context.tokens
    keys = rotated(model, layer.restore_keys, last) if last else layer.restore_keys
    return joined(rows).layer(layer.heads, whole.positions, keys, layer.restore_values)
