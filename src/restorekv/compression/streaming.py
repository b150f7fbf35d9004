"""Compression as the prefill goes: never more than the budget, the chat prefix and one part of the context are held.

The context is read in parts of `chunk` tokens at most, all of one size. A part is prefilled over what is kept of the
parts before it, at its own positions; then its pairs get scores, and of all pairs the best stay, as many as the whole
budget allows. So what stays in the end is what the allocation would choose among all scores at once: nothing that is
dropped on the way could have stayed. It is an approximation of compressing at once all the same:

- the keys and values of later parts come from a model that reads the kept pairs instead of all;
- a pair is scored once, when its part is the newest, by the evictor as if prefix and part were the whole text: what
  earlier parts keep is read by the model and takes no share of the softmax, and later parts do not ask for anything.

Where an evictor always keeps the latest columns (the window of SnapKV), those of a part get no scores: they are read
again with the next part. First columns that it always keeps are those of the first part alone. A restore pass reads all
that is held before the last eviction, not the full cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import DynamicLayer

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression.budget import Budget
from restorekv.compression.prepared import SINKS, CompressionConfig, Ratio, timed
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evictors import Evictor
from restorekv.model import attention
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill, read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter

Pairs = tuple[Tensor, Tensor]  # keys and values (1, H, n, D)
GONE = -torch.inf  # the score of a pair that was dropped or is still to come


@dataclass(frozen=True)
class Part:
    """Columns [start, end) of the whole sequence, of which those before `settled` are scored with this part."""

    start: int
    settled: int
    end: int


def parts(evictor: Evictor, context: Context, chunk: int) -> list[Part]:
    """Parts of up to `chunk` tokens, all alike, each but the first with the latest columns of the one before it."""
    if chunk < 1:
        raise RestoreKVError(f"Streaming reads at least 1 token at a time, not {chunk}.")
    check(evictor)
    tokens, first = context.tokens, context.prefix
    if tokens <= chunk:
        return [Part(first, context.positions, context.positions)]
    again = evictor.latest(portion(context, Part(first, first, first + chunk)))
    if again >= chunk:
        raise RestoreKVError(f"{evictor.spec} always keeps the latest {again} tokens; stream more than that at a time.")
    count = -((again - tokens) // (chunk - again))
    edges = [first + (tokens - again) * number // count for number in range(count + 1)]
    made = [Part(start, end, end + again) for start, end in pairwise(edges)]
    return [*made[:-1], replace(made[-1], settled=context.positions)]


def check(evictor: Evictor) -> None:
    """Refuses one whose scores of parts cannot be compared."""
    if not evictor.streams:
        raise RestoreKVError(f"{evictor.name} scores a context as a whole; leave out streaming or use another evictor.")


def portion(context: Context, part: Part) -> Context:
    """What the evictor takes for the whole text: the chat prefix and the part."""
    ids = torch.cat([context.ids[:, : context.prefix], context.ids[:, part.start : part.end]], -1)
    return replace(context, ids=ids)


@dataclass
class Stream:
    """A compression under way. `most`: the largest number of pairs held at once, in all layers and heads."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    evictor: Evictor
    conventions: CompressionConfig
    budget: Budget
    restorer: RestoreAdapter | None = None
    tell: Callable[[str], None] = lambda phase: None
    seconds: dict[str, float] = field(default_factory=dict)
    most: int = 0

    @torch.no_grad()
    def run(self, chunk: int) -> RaggedCache:
        """The cache at the budget."""
        attention.install(self.model)
        shape, pieces = CacheShape.of(self.model), parts(self.evictor, self.context, chunk)
        size = shape.layers, shape.heads, self.context.positions
        self.scores = torch.full(size, GONE, device=self.model.device)
        self.warn(len(pieces))
        cache = None
        for number, part in enumerate(pieces, 1):
            self.tell(f"part {number} of {len(pieces)}")
            cache = self.read(cache, part)
            self.most = max(self.most, sum(layer.bounds[-1] + layer.keys[0, ..., 0].numel() for layer in cache.layers))
            restored = self.restored(cache) if part is pieces[-1] else []
            with timed(self.seconds, "evict"):
                self.settle(cache, part, restored, part is pieces[-1])
        if self.budget.restore_tokens and not restored:
            with timed(self.seconds, "restore"):
                self.restorer.append(cache, self.budget.restore_tokens)
                cache.settle()
        assert self.conventions.counted_pairs(cache, self.context) == self.budget.pairs
        return cache

    def warn(self, pieces: int) -> None:
        """Of an adapter used as it was not trained."""
        if pieces > 1 and self.budget.restore_tokens and self.conventions.restore_from == "full":
            told = "The adapter learned to read full caches; with streaming it reads what is held at the end"
            warnings.warn(f"{told}; expect worse answers.", RestoreKVWarning, stacklevel=6)  # the caller of `compress`

    def read(self, cache: RaggedCache | None, part: Part) -> RaggedCache:
        """Prefills a part over what is held and writes its scores; the tail is then prefix and part."""
        seen = portion(self.context, part)
        evictor = self.evictor if cache is None else self.evictor.later(seen)
        observer = evictor.observer(self.model, seen)
        observing = observe_layers(self.model, observer.on_layer) if observer else nullcontext()
        with timed(self.seconds, "prefill"), observing:
            full = prefill(self.model, seen.ids if cache is None else seen.ids[:, seen.prefix :], into=cache)
        with timed(self.seconds, "score"):
            found = evictor.score(self.model, self.tokenizer, seen, full, observer)
        here = self.scores[..., part.start : part.settled]
        here.copy_(found[..., : here.shape[-1]].clamp_min(torch.finfo(found.dtype).min))
        if cache is None and self.conventions.prefix_policy == "counted":
            here[..., : max(SINKS - part.start, 0)] = torch.inf
        return full if cache is not None else RaggedCache([as_tail(layer) for layer in full.layers])

    def restored(self, cache: RaggedCache) -> list[Pairs]:
        """The restore cache, by a pass over all that is held; empty if there is none to be made here."""
        tokens = self.budget.restore_tokens
        if not tokens or self.conventions.restore_from != "full":
            return []
        with timed(self.seconds, "restore"):
            reading = read_only_view(cache)
            self.restorer.append(reading, tokens)
        return [(layer.keys[:, :, -tokens:].clone(), layer.values[:, :, -tokens:].clone()) for layer in reading.layers]

    def settle(self, cache: RaggedCache, part: Part, restored: list[Pairs], last: bool) -> None:
        """Drops what does not stay, layer by layer; at the end the prefix joins the rest."""
        prefix, keep = self.context.prefix, self.kept(last)
        for index, (layer, kept) in enumerate(zip(cache.layers, keep, strict=True)):
            tail = (layer.keys[:, :, : 0 if last else prefix], layer.values[:, :, : 0 if last else prefix])
            seen = self.context.positions + self.conventions.offset if last else part.settled - prefix
            tail = restored[index] if restored else (x.clone() for x in tail)
            cache.layers[index] = RaggedLayer(*gathered(layer, kept, part, prefix), seen, *tail)
        self.scores.masked_fill_(~keep, GONE)

    def kept(self, last: bool) -> Tensor:
        """(L, H, S + T) bool: the best of what has a score. Until the end the prefix stays apart."""
        prefix, competing = self.context.prefix, self.scores
        if last and self.conventions.prefix_policy == "counted":
            competing[..., :prefix] = torch.finfo(competing.dtype).min
            competing[..., : min(SINKS, prefix)] = torch.inf
            return self.conventions.allocation(competing, self.budget.retained)
        competing = competing[..., prefix:]
        pairs = min(self.budget.retained, int((competing > GONE).sum()))
        keep = self.conventions.allocation(competing, pairs)
        return torch.nn.functional.pad(keep, (prefix, 0), value=last)


@dataclass
class Streaming:
    """What `PreparedContext` is to compressing at once: every budget reads the context anew, `chunk` tokens at a time.

    `seconds` are those of the last one.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    evictor: Evictor
    conventions: CompressionConfig
    chunk: int
    restorer: RestoreAdapter | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def at(self, ratio: Ratio, restored: bool = True) -> RaggedCache:
        """The cache at one budget; restored=False leaves the restore cache out."""
        shape, restorer = CacheShape.of(self.model), self.restorer if restored else None
        tokens = restorer.restore_tokens if restorer else 0
        budget = self.conventions.budget(ratio, self.context, shape.layers, shape.heads, tokens)
        made = Stream(self.model, self.tokenizer, self.context, self.evictor, self.conventions, budget, restorer)
        self.seconds = made.seconds
        return made.run(self.chunk)


def as_tail(dense: DynamicLayer) -> RaggedLayer:
    """All pairs of a dense layer as the tail of a ragged one without a context."""
    heads, nothing = dense.keys.shape[1], dense.keys[0, 0, :0]
    offsets = torch.zeros(heads + 1, dtype=torch.int32, device=nothing.device)
    return RaggedLayer(nothing, nothing, offsets, offsets[:0], 0, dense.keys, dense.values)


def gathered(layer: RaggedLayer, kept: Tensor, part: Part, prefix: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys (N, D), values (N, D), offsets (H + 1,) and positions (N,) of the pairs in `kept` (H, S + T)."""
    device = layer.offsets.device
    columns = torch.cat([torch.arange(prefix, device=device), torch.arange(part.start, part.end, device=device)])
    heads = torch.arange(layer.heads, device=device).repeat_interleave(layer.offsets.diff().long())
    old = kept[heads, layer.positions.long()]
    owners, slots = kept[:, columns].nonzero(as_tuple=True)
    positions = torch.cat([layer.positions[old], columns[slots].int()])
    order = (torch.cat([heads[old], owners]) * kept.shape[1] + positions).argsort()
    keys, values = (
        torch.cat([context[old], tail[0, owners, slots]])[order]
        for context, tail in ((layer.context_keys, layer.keys), (layer.context_values, layer.values))
    )
    counts = kept.sum(-1).cumsum(0)
    return keys, values, torch.cat([counts.new_zeros(1), counts]).to(torch.int32), positions[order]
