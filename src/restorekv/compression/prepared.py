"""A context that is ready for every budget: everything expensive is done, `at` chooses and gathers (Eqs. 1-3, 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.compression import allocate
from restorekv.compression.allocate import GLOBAL, Allocation
from restorekv.compression.budget import ON_TIGHT, PREFIX_POLICIES, Budget, OnTight, PrefixPolicy
from restorekv.errors import BudgetError, RestoreKVError
from restorekv.model import attention
from restorekv.model.prefill import read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter

SINKS = 4
RestoreFrom = Literal["full", "evicted"]
Ratio = float | str | Fraction | Budget
RESTORE_FROM: tuple[str, ...] = ("full", "evicted")


@dataclass(frozen=True)
class CompressionConfig:
    """What decides a cache besides the model, the evictor, the adapter and the ratio.

    `allocation` says which pairs compete. `offset` and `restore_from` are the paper's controls: questions that start
    `offset` positions later with no restore states; a restore pass that reads the evicted cache, not the full one.
    """

    prefix_policy: PrefixPolicy = "free"
    on_tight: OnTight = "error"
    allocation: Allocation = GLOBAL
    restore_from: RestoreFrom = "full"
    offset: int = 0

    @classmethod
    def make(
        cls,
        prefix_policy: PrefixPolicy = "free",
        on_tight: OnTight = "error",
        allocation: str = "global",
        restore_from: RestoreFrom = "full",
        offset: int = 0,
    ) -> CompressionConfig:
        """From plain values; refuses unknown ones."""
        one_of("prefix_policy", prefix_policy, PREFIX_POLICIES)
        one_of("on_tight", on_tight, ON_TIGHT)
        one_of("restore_from", restore_from, RESTORE_FROM)
        if offset < 0:
            raise RestoreKVError(f"offset is a number of positions, at least 0, not {offset}.")
        return cls(prefix_policy, on_tight, allocate.make(allocation), restore_from, offset)

    def described(self) -> dict[str, str | int]:
        """For results and files."""
        return {**vars(self), "allocation": self.allocation.spec}

    def columns(self, context: Context) -> int:
        """T_b: the columns that compete for the budget."""
        return context.tokens if self.prefix_policy == "free" else context.positions

    def budget(self, ratio: Ratio, context: Context, layers: int, heads: int, restore_tokens: int = 0) -> Budget:
        """What `ratio` of this context is; a Budget is checked and passed on."""
        columns = self.columns(context)
        if not isinstance(ratio, Budget):
            whole = self.allocation.rectangular
            return Budget.of_ratio(ratio, columns, layers, heads, restore_tokens, self.on_tight, whole)
        if (ratio.tokens, ratio.layers, ratio.heads) != (columns, layers, heads):
            made = f"{ratio.tokens} tokens, {ratio.layers} layers and {ratio.heads} heads"
            raise BudgetError(f"The budget is for {made}, not {columns}, {layers} and {heads}; make another.")
        if self.allocation.rectangular and ratio.total % (layers * heads):
            raise BudgetError("Heads of one length need whole tokens per head; make the budget with whole_tokens=True.")
        return ratio

    def counted_pairs(self, cache: RaggedCache, context: Context) -> int:
        """What the budget is compared with: everything under "counted", everything but the prefix under "free"."""
        return cache.pairs - (cache.pairs_of_prefix(context.prefix) if self.prefix_policy == "free" else 0)


PLAIN = CompressionConfig()


@dataclass(frozen=True)
class PreparedContext:
    """One context ready for every budget: `full` (S + T columns), scores (L, H, T) and, restored, the restore cache.

    `restore_cache` holds keys and values (1, H, n, D) of every layer.
    """

    model: PreTrainedModel
    context: Context
    full: DynamicCache
    scores: Tensor
    conventions: CompressionConfig = PLAIN
    restore_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    restorer: RestoreAdapter | None = None  # for a restore pass over each evicted cache
    restore_cache: tuple[tuple[Tensor, Tensor], ...] = ()

    def with_restore_cache(self, adapter: RestoreAdapter) -> PreparedContext:
        """The same context with the adapter's restore cache; this one stays without. Gradients reach the adapter."""
        if self.restore_tokens:
            raise RestoreKVError("This context has a restore cache already; prepare it without an adapter.")
        if self.conventions.offset:
            raise RestoreKVError("An offset is the control without restore states; prepare without it to restore.")
        if self.conventions.restore_from == "evicted":
            return replace(self, restorer=adapter, restore_tokens=adapter.restore_tokens)
        seconds = dict(self.seconds)
        cache = read_only_view(self.full) if self.joined() else RaggedCache.whole(self.full, joined=False)
        with timed(seconds, "restore"):
            adapter.append(cache)
        made = tuple((layer.keys, layer.values) for layer in cache.layers)
        return replace(self, restore_cache=made, restore_tokens=adapter.restore_tokens, seconds=seconds)

    def joined(self) -> bool:
        """Whether a restore pass may copy each layer for SDPA: with gradients all copies stay until the backward pass.

        Under a mask SDPA gets the pairs once for every query head.
        """
        shape, layer = CacheShape.of(self.model), self.full.layers[0]
        copied = (layer.keys.nbytes + layer.values.nbytes) * shape.groups
        return not torch.is_grad_enabled() or copied <= attention.WORKSPACE

    def budget(self, ratio: Ratio, restored: bool | int = True) -> Budget:
        """What `ratio` means for this context under its conventions, with all, no or so many restore tokens."""
        layers, heads, _ = self.scores.shape
        tokens = self.restore_tokens if restored is True else int(restored)
        return self.conventions.budget(ratio, self.context, layers, heads, tokens)

    def at(self, ratio: Ratio, restored: bool | int = True, last: bool = False) -> RaggedCache:
        """The cache at one budget.

        restored=False leaves the restore cache out and gives its share to the evictor; a number keeps its first tokens.
        `last` frees the full cache layer by layer on the way: there is nothing left to make another cache from.
        """
        if not self.full.layers[0].is_initialized:
            raise RestoreKVError("The full cache was used up by at(..., last=True); prepare the context again.")
        budget = self.budget(ratio, restored)
        if budget.restore_tokens > self.restore_tokens:
            raise BudgetError(f"The budget reserves {budget.restore_tokens} restore tokens; prepare with an adapter.")
        keep = self.conventions.allocation(self.competing(), budget.retained)
        if self.conventions.prefix_policy == "free":
            layers, heads, _ = keep.shape
            keep = torch.cat([keep.new_ones(layers, heads, self.context.prefix), keep], -1)
        first = [tuple(x[:, :, : budget.restore_tokens] for x in pair) for pair in self.restore_cache]
        cache = RaggedCache.from_dense(self.full, keep, first or None, self.conventions.offset, consume=last)
        if self.restorer and budget.restore_tokens:
            self.restorer.append(cache, budget.restore_tokens)
            cache.settle()
        assert self.conventions.counted_pairs(cache, self.context) == budget.pairs
        return cache

    def competing(self) -> Tensor:
        """Scores of the pairs that compete for the budget: (L, H, T), or (L, H, S + T) with the prefix counted.

        As in kvpress 0.5.5 the first four columns, whether prefix or context, are pinned; the rest of the prefix goes
        first.
        """
        if self.conventions.prefix_policy == "free":
            return self.scores
        scores = torch.nn.functional.pad(self.scores, (self.context.prefix, 0), value=-torch.inf)
        scores[..., :SINKS] = torch.inf
        return scores


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RestoreKVError(f"{name} is one of {', '.join(known)}, not {value!r}.")


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall time of the block."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
