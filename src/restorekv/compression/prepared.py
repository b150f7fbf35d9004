"""What every compression method does: a Compressor prepares a context once, `evict` then makes a
cache of any budget.

Everything expensive happens in `prepare`: prefill, scores and the restore cache. `evict` chooses
pairs and gathers them (Eqs. 1-3, 6).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression import allocate
from restorekv.compression.allocate import GLOBAL, Allocation
from restorekv.compression.budget import (
    ON_SMALL_BUDGET,
    PREFIX_POLICIES,
    Budget,
    OnSmallBudget,
    PrefixPolicy,
)
from restorekv.errors import BudgetError, RestoreKVError, check_choice
from restorekv.model import attention
from restorekv.model.prefill import read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter

SINKS = 4
GONE = -torch.inf  # the score of a pair that is not held
RestoreFrom = Literal["full", "evicted"]
Ratio = float | str | Fraction | Budget
Progress = Callable[[str], None]
RESTORE_FROM: tuple[str, ...] = ("full", "evicted")


@dataclass(frozen=True)
class CompressionConfig:
    """What decides a cache besides the model, the evictor, the adapter and the ratio. Refuses
    unknown values.

    `allocation`, an Allocation or its spec, says which pairs compete. `offset` and `restore_from`
    are the paper's controls: questions that start `offset` positions later with no restore states;
    a restore pass that reads the evicted cache, not the full one.
    """

    prefix_policy: PrefixPolicy = "free"
    on_small_budget: OnSmallBudget = "error"
    allocation: Allocation | str = GLOBAL
    restore_from: RestoreFrom = "full"
    offset: int = 0

    def __post_init__(self) -> None:
        check_choice("prefix_policy", self.prefix_policy, PREFIX_POLICIES)
        check_choice("on_small_budget", self.on_small_budget, ON_SMALL_BUDGET)
        check_choice("restore_from", self.restore_from, RESTORE_FROM)
        if self.offset < 0:
            raise RestoreKVError(f"offset is a number of positions, at least 0, not {self.offset}.")
        if isinstance(self.allocation, str):
            object.__setattr__(self, "allocation", allocate.make(self.allocation))

    def described(self) -> dict[str, str | int]:
        """Returns the settings as results and files hold them."""
        return {**vars(self), "allocation": self.allocation.spec}

    def columns(self, context: Context) -> int:
        """T_b: the columns that compete for the budget."""
        return context.tokens if self.prefix_policy == "free" else context.positions

    def budget(
        self, ratio: Ratio, context: Context, layers: int, heads: int, restore_tokens: int = 0
    ) -> Budget:
        """Returns what `ratio` of this context is; a Budget is checked and passed on."""
        columns = self.columns(context)
        if not isinstance(ratio, Budget):
            whole = self.allocation.rectangular
            return Budget.of_ratio(
                ratio, columns, layers, heads, restore_tokens, self.on_small_budget, whole
            )
        if (ratio.tokens, ratio.layers, ratio.heads) != (columns, layers, heads):
            given = f"{ratio.tokens} tokens, {ratio.layers} layers and {ratio.heads} heads"
            raise BudgetError(
                f"The budget is for {given}, not {columns}, {layers} and {heads}; make another."
            )
        if self.allocation.rectangular and ratio.total % (layers * heads):
            raise BudgetError(
                "Heads of one length need whole tokens per head; make the budget with whole_tokens=True."
            )
        return ratio

    def counted_pairs(self, cache: RaggedCache, context: Context) -> int:
        """Counts what the budget bounds: all pairs under "counted", all but the prefix's under
        "free".
        """
        return cache.pairs - (
            cache.count_prefix_pairs(context.prefix) if self.prefix_policy == "free" else 0
        )


class Compressor(ABC):
    """A compression method with its settings."""

    restores: ClassVar[bool]  # an adapter can restore what it loses
    any_config: ClassVar[bool]  # one preparation serves every CompressionConfig
    conventions: CompressionConfig
    adapter: RestoreAdapter | None = None

    @property
    @abstractmethod
    def spec(self) -> str:
        """The shortest spec that makes this method."""

    def identity(self, model: PreTrainedModel) -> str:
        """Returns what decides the scores of `model`, for records: the spec, with the contents of
        files it names.
        """
        return self.spec

    def as_published(self, prefix: int) -> Self:
        """Returns the method with its authors' own settings where the spec leaves the defaults;
        `prefix` is S.
        """
        return self

    def suited_to(self, context: Context, budget: Budget) -> Self:
        """Returns the method for this context and budget alone: it may leave out what these do not
        need.
        """
        return self

    @abstractmethod
    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        progress: Progress | None = None,
        offload: bool = False,
    ) -> PreparedContext:
        """Does everything expensive; `progress` is called with the name of each phase.

        `offload` keeps all but one layer of the full cache in a temporary file, on a GPU in the
        host's memory.
        """


class PreparedContext(ABC):
    """A context that is ready for every budget. `seconds` are those of each phase of preparing it."""

    model: PreTrainedModel
    context: Context
    conventions: CompressionConfig
    seconds: dict[str, float]
    full: DynamicCache | None  # S + T columns; None where the context is never held whole
    streaming: int | None  # tokens of a part, where the context is read part by part

    def with_conventions(self, conventions: CompressionConfig) -> Self:
        """Returns the same context under another config."""
        return replace(self, conventions=conventions)

    @abstractmethod
    def with_restore_cache(self, adapter: RestoreAdapter) -> Self:
        """Returns the same context with the adapter's restore cache; this one stays without."""

    @abstractmethod
    def evict(
        self, budget: Ratio, restore_tokens: int | None = None, consume: bool = False
    ) -> RaggedCache:
        """Returns the cache at a ratio or Budget, with the first `restore_tokens` of the restore
        cache (None: all).

        `consume` frees the full cache layer by layer on the way: no other cache can be made from it
        afterwards.
        """

    def evict_timed(
        self, budget: Ratio, restore_tokens: int | None = None, consume: bool = False
    ) -> tuple[RaggedCache, dict[str, float]]:
        """Returns what `evict` does, and the seconds of every phase that the call took."""
        seconds: dict[str, float] = {}
        with timed(seconds, "evict"):
            cache = self.evict(budget, restore_tokens, consume)
        return cache, seconds


@dataclass(frozen=True)
class ScoredContext(PreparedContext):
    """A context with its full cache, scores (L, H, T) and, with an adapter, the restore cache.

    `restore_cache` holds keys and values (1, H, n, D) of every layer.
    """

    model: PreTrainedModel
    context: Context
    full: DynamicCache
    scores: Tensor
    conventions: CompressionConfig = CompressionConfig()
    restore_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    restorer: RestoreAdapter | None = None  # for a restore pass over each evicted cache
    restore_cache: tuple[tuple[Tensor, Tensor], ...] = ()
    streaming: ClassVar[None] = None

    def with_restore_cache(self, adapter: RestoreAdapter) -> Self:
        """Reads the full cache once, unless the restore pass reads evicted caches. Gradients reach
        the adapter.
        """
        if self.restore_tokens:
            raise RestoreKVError(
                "This context has a restore cache already; prepare it without an adapter."
            )
        if self.conventions.offset:
            raise RestoreKVError(
                "An offset is the control without restore states; prepare without it to restore."
            )
        if self.conventions.restore_from == "evicted":
            return replace(self, restorer=adapter, restore_tokens=adapter.restore_tokens)
        seconds = dict(self.seconds)
        cache = (
            read_only_view(self.full) if self.joined() else RaggedCache.from_full_cache(self.full)
        )
        with timed(seconds, "restore"):
            adapter.append(cache)
        pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
        return replace(
            self, restore_cache=pairs, restore_tokens=adapter.restore_tokens, seconds=seconds
        )

    def joined(self) -> bool:
        """Tells whether a restore pass may copy each layer for SDPA, which gets the pairs once for
        every query head.

        With gradients all copies stay until the backward pass.
        """
        shape = CacheShape.from_model(self.model)
        layer = self.full.layers[0]
        copied = (layer.keys.nbytes + layer.values.nbytes) * shape.groups
        return not torch.is_grad_enabled() or copied <= attention.WORKSPACE

    def budget(self, ratio: Ratio, restore_tokens: int | None = None) -> Budget:
        """Returns what `ratio` means for this context, with all restore tokens or the first so
        many.
        """
        layers, heads, _ = self.scores.shape
        tokens = self.restore_tokens if restore_tokens is None else restore_tokens
        return self.conventions.budget(ratio, self.context, layers, heads, tokens)

    def evict(
        self, budget: Ratio, restore_tokens: int | None = None, consume: bool = False
    ) -> RaggedCache:
        """With fewer restore tokens, the evictor gets their share of the budget."""
        if not self.full.layers[0].is_initialized:
            raise RestoreKVError(
                "The full cache was used up by evict(..., consume=True); prepare the context again."
            )
        budget = self.budget(budget, restore_tokens)
        if budget.restore_tokens > self.restore_tokens:
            raise BudgetError(
                f"The budget reserves {budget.restore_tokens} restore tokens; prepare with an adapter."
            )
        keep = self.conventions.allocation(self.competing(), budget.retained)
        if self.conventions.prefix_policy == "free":
            keep = torch.nn.functional.pad(keep, (self.context.prefix, 0), value=True)
        first = [
            tuple(x[:, :, : budget.restore_tokens] for x in pair) for pair in self.restore_cache
        ]
        cache = RaggedCache.from_dense(
            self.full, keep, first or None, self.conventions.offset, consume
        )
        if self.restorer and budget.restore_tokens:
            self.restorer.append(cache, budget.restore_tokens)
            cache.commit_tail()
        assert self.conventions.counted_pairs(cache, self.context) == budget.pairs
        return cache

    def competing(self) -> Tensor:
        """Returns the scores of the pairs that compete: (L, H, T), or (L, H, S + T) with the prefix
        counted.
        """
        if self.conventions.prefix_policy == "free":
            return self.scores
        return pin_prefix(
            torch.nn.functional.pad(self.scores, (self.context.prefix, 0)), self.context.prefix
        )


def pin_prefix(scores: Tensor, prefix: int) -> Tensor:
    """Writes into scores (L, H, S + T) how a counted prefix of S columns competes, as in kvpress
    0.5.5.

    The first SINKS columns that are held, of prefix or context, always stay; the rest of the prefix
    goes first.
    """
    scores[..., :prefix] = torch.finfo(scores.dtype).min
    first = scores[..., :SINKS]
    first.masked_fill_(first > GONE, torch.inf)
    return scores


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall time of the block to the phase's seconds."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
