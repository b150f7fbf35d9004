"""The interface of compressors. `Compressor.prepare` does the expensive work once per context:
prefill, scores, restore pass. `PreparedContext.evict` then makes a cache for any budget.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Self

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.budget import Budget
from restorekv.compression.config import CompressionConfig, RatioOrBudget
from restorekv.errors import AdapterError, BudgetError
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter
from restorekv.spec import digest_code

# Called with the name of a phase when it begins.
BeginPhase = Callable[[str], None]


def ignore_phase(phase: str) -> None:
    """Do nothing when a phase begins."""


class Compressor(ABC):
    """A way to make small caches, with its settings."""

    # What a compressor can do, so that callers can refuse settings before a model is loaded.
    restores: ClassVar[bool]  # an adapter can restore what it loses
    any_config: ClassVar[bool]  # one preparation serves every CompressionConfig
    config: CompressionConfig
    adapter: RestoreAdapter | None = None

    @property
    @abstractmethod
    def spec(self) -> str:
        """The shortest spec that makes this compressor."""

    def identity(self, model: PreTrainedModel) -> str:
        """Return what decides the scores of `model`, for records: the spec, with the contents of
        files it names.
        """
        return self.spec

    def digest_code(self) -> str:
        """Return a digest of the files that define the method, for records that have to notice when
        they change.
        """
        return digest_code(type(self))

    @abstractmethod
    def with_config(self, config: CompressionConfig) -> Self:
        """Return a compressor with a different config."""

    def with_adapter(self, adapter: RestoreAdapter) -> Self:
        """Return a compressor with an adapter that restores what it loses."""
        raise AdapterError(f"{self.spec} restores nothing; leave out the adapter.")

    def count_passes(self) -> int:
        """Return how many forward passes over the whole context `prepare` and `evict` take.
        Progress is counted in them.
        """
        return 1

    def as_published(self, prefix: int) -> Self:
        """Return a compressor with its authors' own settings where the spec leaves the defaults;
        `prefix` is S.
        """
        return self

    def specialize(self, context: Context, budget: Budget) -> Self:
        """Return a compressor that may skip work this context and budget do not need, such as
        scores where every pair stays.
        """
        return self

    @abstractmethod
    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        begin_phase: BeginPhase = ignore_phase,
    ) -> PreparedContext:
        """Do everything expensive that no budget changes: prefill, scores and, unless it depends on
        the ratio or reads evicted caches, the restore pass.

        Args:
            model: The model that will answer.
            tokenizer: Its tokenizer.
            context: A text, or one that is tokenized already.
            begin_phase: Called with the name of each phase when it begins.

        Returns:
            The context, from which `evict` makes a cache of any budget.
        """


@dataclass(frozen=True)
class PreparedContext(ABC):
    """A context that is ready for every budget.

    `seconds` holds what each phase of preparing it took.
    """

    model: PreTrainedModel
    context: Context
    full: Cache | None  # S + T columns; None while streaming, which never holds the full cache
    _: KW_ONLY
    config: CompressionConfig = CompressionConfig()
    streaming_chunk: int | None  # tokens of a part, where the context is read part by part
    seconds: dict[str, float] = field(default_factory=dict)

    def with_config(self, config: CompressionConfig) -> Self:
        """Return the same context under a different config."""
        return replace(self, config=config)

    @abstractmethod
    def with_restore_cache(
        self, adapter: RestoreAdapter, begin_phase: BeginPhase = ignore_phase
    ) -> Self:
        """Return the same context with the adapter's restore cache; this one stays without."""

    @abstractmethod
    def count_restore_tokens(self) -> int:
        """Return how many restore tokens a cache can have: the adapter's n, 0 without one."""

    def make_budget(self, ratio: RatioOrBudget, restore_tokens: int | None = None) -> Budget:
        """Return the `Budget` for `ratio`; a Budget is checked and returned as it is.

        `restore_tokens` is how many restore tokens to reserve room for; None reserves for all.

        Raises:
            BudgetError: The Budget is for a different context or has room for other restore tokens,
                or the restore tokens do not fit.
        """
        if restore_tokens is None:
            restore_tokens = self.count_restore_tokens()
        elif isinstance(ratio, Budget) and restore_tokens != ratio.restore_tokens:
            raise BudgetError(
                f"The budget reserves {ratio.restore_tokens} restore tokens, not {restore_tokens}; "
                "pass a ratio, or make a new budget."
            )
        shape = CacheShape.from_model(self.model)
        budget = self.config.make_budget(
            ratio, self.context, shape.layers, shape.heads, restore_tokens
        )
        budget.require_at_most(self.count_restore_tokens())
        return budget

    def evict(
        self, budget: RatioOrBudget, restore_tokens: int | None = None, consume: bool = False
    ) -> RaggedCache:
        """Return the cache at one budget.

        Args:
            budget: A ratio or a Budget.
            restore_tokens: Use the first n tokens of the restore cache; None uses all of them.
            consume: Free the full cache layer by layer on the way. No other cache can be made from
                it afterwards.
        """
        cache, _ = self.evict_timed(budget, restore_tokens, consume)
        return cache

    def evict_timed(
        self,
        budget: RatioOrBudget,
        restore_tokens: int | None = None,
        consume: bool = False,
        begin_phase: BeginPhase = ignore_phase,
    ) -> tuple[RaggedCache, dict[str, float]]:
        """Return the cache that `evict` makes, and the seconds of every phase of the call."""
        return self._make_cache(self.make_budget(budget, restore_tokens), consume, begin_phase)

    @abstractmethod
    def _make_cache(
        self, budget: Budget, consume: bool, begin_phase: BeginPhase
    ) -> tuple[RaggedCache, dict[str, float]]:
        """Make the cache of `evict_timed`, for a budget that has been checked."""


@contextmanager
def time_phase(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the wall time of the block to the phase's seconds."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
