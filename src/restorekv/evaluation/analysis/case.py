"""What every analysis gets: one document at one ratio with its caches, and the figures of all documents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.prepared import SINKS, Ratio, ScoredContext
from restorekv.evaluation.protocols import Protocol
from restorekv.evaluation.stats import resamples
from restorekv.evaluation.survivors import kept_columns
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Sample

FULL, BASE, RESTORED = "full", "base", "restored"
BINS = 20  # parts into which positions in a context are binned
Statistic = Callable[[np.ndarray], np.ndarray]  # (R, ...) -> (R,)


@dataclass(frozen=True)
class Case:
    """One document at one ratio, number `index` of the run; with an `adapter`, `prepared` has a restore cache."""

    prepared: ScoredContext
    tokenizer: Tokenizer
    protocol: Protocol
    sample: Sample
    ratio: Ratio
    adapter: RestoreAdapter | None = None
    index: int = 0

    @cached_property
    def caches(self) -> dict[str, RaggedCache]:
        """The full cache (as views), the evicted one and, with an adapter, the restored one of as many pairs."""
        caches = {FULL: RaggedCache.whole(self.prepared.full, joined=False)}
        caches[BASE] = self.prepared.evict(self.ratio, 0)
        return caches | ({RESTORED: self.prepared.evict(self.ratio)} if self.adapter else {})

    @cached_property
    def prompts(self) -> list[Tensor]:
        """Every question as the protocol asks it, up to where its answer begins: (1, q) ids each."""
        context = self.prepared.context
        return [self.protocol.prompt(self.tokenizer, context, question) for question in self.sample.questions]

    @property
    def sinks(self) -> int:
        """Number of columns that count as attention sinks: the chat prefix, at least SINKS."""
        return max(self.prepared.context.prefix, SINKS)

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """(L, H, S + T) bool for every compressed cache: the columns that each head holds."""
        columns = self.prepared.context.positions
        return {name: kept_columns(cache, columns) for name, cache in self.caches.items() if name != FULL}

    @cached_property
    def bins(self) -> Tensor:
        """(T,) long: the bin of each context token's position."""
        tokens = self.prepared.context.tokens
        return torch.arange(tokens) * BINS // tokens

    @cached_property
    def pieces(self) -> list[str]:
        """The text of every context token, with the space that begins a word."""
        ids = self.prepared.context.ids[0, self.prepared.context.prefix :].tolist()
        names, texts = self.tokenizer.convert_ids_to_tokens(ids), [self.tokenizer.decode([token]) for token in ids]
        # SentencePiece writes that space as U+2581 and drops it when it decodes a token alone.
        starts = (name.startswith("\u2581") for name in names)
        return [f" {text.lstrip(' ')}" if begins else text for begins, text in zip(starts, texts, strict=True)]

    def read_by_restore(self) -> RaggedCache:
        """Returns the cache that the restore pass reads: full, or evicted where the conventions say so."""
        if self.prepared.conventions.restore_from == "full":
            return RaggedCache.whole(self.prepared.full, joined=False)
        return RaggedCache.from_dense(self.prepared.full, self.kept[RESTORED])


@dataclass(frozen=True)
class DocumentFigures:
    """What an analysis measured in each document at one ratio, and how many questions each document has."""

    documents: list[dict]
    questions: list[int]

    def __contains__(self, name: str) -> bool:
        return name in self.documents[0]

    def stacked(self, *path: str) -> np.ndarray:
        """Returns one figure of all documents: (documents, ...)."""
        values = self.documents
        for name in path:
            values = [each[name] for each in values]
        return np.array(values, dtype=np.float64)

    def mean(self, *path: str, by_question: bool = False) -> np.ndarray:
        """Returns the mean in which every document, or every question, weighs the same."""
        return np.average(self.stacked(*path), axis=0, weights=self.weights(by_question))

    def interval(self, statistic: Statistic, *path: str, by_question: bool = False) -> list[float]:
        """Returns [low, high], a 95 % bootstrap over documents of a statistic of the mean.

        `statistic` maps the means of R resamples (R, ...) to (R,); [None, None] where it is not finite in one of them.
        """
        values, drawn = self.stacked(*path), resamples(len(self.documents), 0) * self.weights(by_question)
        means = drawn @ values.reshape(len(values), -1) / drawn.sum(1, keepdims=True)
        drawn_values = statistic(means.reshape(-1, *values.shape[1:]))
        finite = np.isfinite(drawn_values).all()
        return plain(np.percentile(drawn_values, (2.5, 97.5)) if finite else np.full(2, np.nan))

    def weights(self, by_question: bool) -> np.ndarray:
        return np.array(self.questions if by_question else [1] * len(self.questions))


def plain(values: np.ndarray | float) -> list | float | None:
    """Returns JSON values of six significant digits; None for what is not finite."""
    if isinstance(values, np.ndarray) and values.ndim:
        return [plain(value) for value in values]
    return float(f"{float(values):.6g}") if np.isfinite(values) else None
