"""`Eviction`, the compressor that keeps the pairs an evictor scores highest, with an adapter that
restores what is lost; and `make_compressor`, which makes the compressor that a spec names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import evictors, spec
from restorekv.compression.attention_matching.method import AttentionMatching
from restorekv.compression.budget import Budget, OnSmallBudget, PrefixPolicy
from restorekv.compression.compressor import (
    BeginPhase,
    Compressor,
    PreparedContext,
    ignore_phase,
)
from restorekv.compression.config import CompressionConfig
from restorekv.compression.full_cache import ScoredContext, prefill_and_score, prefill_unscored
from restorekv.compression.presets import PRESETS
from restorekv.compression.streaming import StreamedContext, split_context
from restorekv.errors import RestoreKVError
from restorekv.model import support
from restorekv.model.offload import make_offloaded_cache
from restorekv.model.position_limits import check_positions
from restorekv.model.prefill import make_full_cache
from restorekv.model.prompt import Context, make_context
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.choices import RestoreFrom

# Compressors other than eviction by one of the evictors, by the name in their spec.
COMPRESSORS: dict[str, type[Compressor]] = {"am-fast": AttentionMatching}


@dataclass(frozen=True)
class Eviction(Compressor):
    """An evictor, and an adapter that restores what it loses.

    scoring=False skips the evictor and gives every pair the score 0. `specialize` sets it when the
    budget keeps all pairs.
    """

    evictor: evictors.Evictor
    adapter: RestoreAdapter | None = None
    config: CompressionConfig = CompressionConfig()
    scoring: bool = True
    restores: ClassVar[bool] = True
    any_config: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.adapter and self.config.offset:
            raise RestoreKVError(
                "An offset is a control without restore states; leave out the adapter or the "
                "offset."
            )
        if self.config.streaming_chunk is not None and not self.evictor.streams:
            raise RestoreKVError(
                f"{self.evictor.name} scores a context as a whole; leave out streaming_chunk or "
                "use another evictor."
            )
        if self.config.offload and not self.evictor.offloads:
            raise RestoreKVError(
                f"{self.evictor.name} makes a full cache of its own in memory; leave out offload."
            )

    @classmethod
    def make(
        cls,
        evictor: str,
        adapter: RestoreAdapter | None = None,
        *,
        prefix_policy: PrefixPolicy = "free",
        on_small_budget: OnSmallBudget = "error",
        allocation: str = "global",
        restore_from: RestoreFrom = "full",
        offset: int = 0,
        offload: bool = False,
    ) -> Eviction:
        """Make an eviction from an evictor's spec.

        The other settings are those of `CompressionConfig`, but by default a budget without room
        for the restore tokens is refused.
        """
        if evictor.partition(":")[0] in COMPRESSORS:
            raise RestoreKVError(
                f"{evictor} is not an evictor: it restores nothing, so there is nothing to train "
                "for it."
            )
        config = CompressionConfig(
            prefix_policy=prefix_policy,
            on_small_budget=on_small_budget,
            allocation=allocation,
            restore_from=restore_from,
            offset=offset,
            offload=offload,
        )
        return cls(evictors.make_evictor(evictor), adapter, config)

    @property
    def spec(self) -> str:
        """The spec of the evictor."""
        return self.evictor.spec

    def identity(self, model: PreTrainedModel) -> str:
        """Return the evictor's identity."""
        return self.evictor.identity(model)

    def digest_code(self) -> str:
        """Return the digest of the evictor's files."""
        return spec.digest_code(type(self.evictor))

    def count_passes(self) -> int:
        return 1 + (self.evictor.rereads if self.scoring else 0)

    def with_config(self, config: CompressionConfig) -> Eviction:
        return replace(self, config=config)

    def with_adapter(self, adapter: RestoreAdapter) -> Eviction:
        return replace(self, adapter=adapter)

    def as_published(self, prefix: int) -> Eviction:
        """Return the same eviction with the evictor's authors' settings."""
        return replace(self, evictor=self.evictor.as_published(prefix))

    def specialize(self, context: Context, budget: Budget) -> Eviction:
        """Return an eviction that does not stream if the context is a single part, and does not
        score if every pair stays.
        """
        config = self.config
        if config.streaming_chunk is not None:
            # A text of one part needs no streaming: the standard path scores it exactly.
            parts = split_context(self.evictor, context, config.streaming_chunk)
            if len(parts) == 1:
                config = replace(config, streaming_chunk=None)
        # With ratio=1 nothing competes, unless restore tokens displace pairs.
        scoring = budget.ratio < 1 or budget.restore_tokens > 0
        return replace(self, config=config, scoring=scoring)

    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        begin_phase: BeginPhase = ignore_phase,
    ) -> PreparedContext:
        """Prefill, score and, with an adapter, run the restore pass.

        A restore pass that depends on the ratio or reads evicted caches is left to `evict`, and
        with streaming_chunk everything is.
        """
        if isinstance(context, str):
            context = make_context(tokenizer, context)
        check_positions(model, context.num_tokens, "The context")
        if self.config.streaming_chunk is not None:
            return StreamedContext(
                model,
                context,
                tokenizer=tokenizer,
                evictor=self.evictor,
                config=self.config,
                streaming_chunk=self.config.streaming_chunk,
                adapter=self.adapter,
            )
        support.prepare_model(model)
        seconds: dict[str, float] = {}
        pinned = self.evictor.count_pinned_tail(context)  # columns that the evictor may read again
        if self.config.offload:
            into = make_offloaded_cache(model, context.num_tokens, pinned)
        else:
            into = make_full_cache(model, pinned)
        with torch.no_grad():
            if self.scoring:
                full, scores = prefill_and_score(
                    model, tokenizer, self.evictor, context, into, seconds, begin_phase
                )
            else:
                full, scores = prefill_unscored(model, context, into, seconds, begin_phase)
        prepared = ScoredContext(model, context, full, scores, config=self.config, seconds=seconds)
        if self.adapter is None:
            return prepared
        # Outside of `no_grad`: training differentiates the restore pass.
        return prepared.with_restore_cache(self.adapter, begin_phase)


def make_compressor(text: str, config: CompressionConfig = CompressionConfig()) -> Compressor:
    """Return the method that a spec names: eviction by an evictor, or one of the other compressors,
    such as Attention Matching.
    """
    spec.load_waiting()
    classes = {**evictors.EVICTORS, **COMPRESSORS}
    bases = (evictors.Evictor, Compressor)
    named = spec.parse_spec(text, classes, "evictor", PRESETS, bases)
    if isinstance(named, Compressor):
        return named.with_config(config)
    return Eviction(named, None, config)
