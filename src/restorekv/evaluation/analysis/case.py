"""One document at one ratio, ready for every analysis: its caches and its questions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.prepared import SINKS, Ratio, ScoredContext
from restorekv.evaluation.protocols import Protocol
from restorekv.evaluation.survivors import kept_columns
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Sample

FULL, BASE, RESTORED = "full", "base", "restored"
BINS = 20  # of the relative position in a context


@dataclass(frozen=True)
class Case:
    """`prepared` has a restore cache where there is an `adapter`; `index` counts the documents of a run."""

    prepared: ScoredContext
    tokenizer: Tokenizer
    protocol: Protocol
    sample: Sample
    ratio: Ratio
    adapter: RestoreAdapter | None = None
    index: int = 0

    @cached_property
    def caches(self) -> dict[str, RaggedCache]:
        """The full cache (views of it), the evictor's at the ratio and, with an adapter, the restored one.

        The last two hold the same number of pairs.
        """
        made = {FULL: RaggedCache.whole(self.prepared.full, joined=False)}
        made[BASE] = self.prepared.evict(self.ratio, 0)
        return made | ({RESTORED: self.prepared.evict(self.ratio)} if self.adapter else {})

    @cached_property
    def prompts(self) -> list[Tensor]:
        """Every question as the protocol puts it, to where its answer begins: (1, q) ids each."""
        context = self.prepared.context
        return [self.protocol.prompt(self.tokenizer, context, asked) for asked in self.sample.questions]

    @property
    def sinks(self) -> int:
        """Columns that count as attention sinks: the chat prefix, and the first SINKS where it is shorter."""
        return max(self.prepared.context.prefix, SINKS)

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """(L, H, S + T) bool for every compressed cache: the columns that each head holds."""
        columns = self.prepared.context.positions
        return {name: kept_columns(cache, columns) for name, cache in self.caches.items() if name != FULL}

    @cached_property
    def bins(self) -> Tensor:
        """(T,) long: the twentieth of the context in which each of its tokens lies."""
        tokens = self.prepared.context.tokens
        return torch.arange(tokens) * BINS // tokens

    def read_by_restore(self) -> RaggedCache:
        """A cache as the restore pass reads it: whole, or evicted where the conventions say so."""
        if self.prepared.conventions.restore_from == "full":
            return RaggedCache.whole(self.prepared.full, joined=False)
        return RaggedCache.from_dense(self.prepared.full, self.kept[RESTORED])
