"""What every analysis gets: a document at a ratio with its caches, a way to watch attention
weights, and the figures of all documents.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression.config import RatioOrBudget
from restorekv.compression.full_cache import SINKS, ScoredContext
from restorekv.evaluation.protocols import AskingProtocol
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, draw_resamples
from restorekv.model import attention
from restorekv.model.attention import autograd
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.tokenize import decode_ids
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Sample

FULL = "full"
BASE = "base"
RESTORED = "restored"
BINS = 20  # parts into which positions in a context are binned
See = Callable[[int, RaggedLayer, Iterator[Tensor]], None]
Statistic = Callable[[np.ndarray], np.ndarray]  # (R, ...) -> (R,)


@dataclass(frozen=True)
class Case:
    """One document at one ratio, for the analyses to measure.

    With an `adapter`, `prepared` has a restore cache. `index` is the document's number in the run.
    """

    prepared: ScoredContext
    tokenizer: Tokenizer
    protocol: AskingProtocol
    sample: Sample
    ratio: RatioOrBudget
    adapter: RestoreAdapter | None = None
    index: int = 0

    @cached_property
    def caches(self) -> dict[str, RaggedCache]:
        """The full cache (as views), the evicted one and, with an adapter, the restored one, which
        holds as many pairs as the evicted one.
        """
        caches = {FULL: RaggedCache.from_full_cache(self.prepared.full)}
        caches[BASE] = self.prepared.evict(self.ratio, 0)
        return caches | ({RESTORED: self.prepared.evict(self.ratio)} if self.adapter else {})

    @cached_property
    def prompts(self) -> list[Tensor]:
        """The ids (1, q) of every question as the protocol asks it, up to where its
        answer begins.
        """
        context = self.prepared.context
        return [
            self.protocol.make_prompt(self.tokenizer, context, question)
            for question in self.sample.questions
        ]

    @property
    def sinks(self) -> int:
        """The number of columns that count as attention sinks: the chat prefix, but at
        least SINKS.
        """
        return max(self.prepared.context.prefix_length, SINKS)

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """(L, H, S + T) bool for every compressed cache: the columns that each head holds."""
        columns = self.prepared.context.num_tokens
        return {
            name: cache.mark_held(columns) for name, cache in self.caches.items() if name != FULL
        }

    @cached_property
    def bins(self) -> Tensor:
        """(T,) long: the bin of each context token's position."""
        tokens = self.prepared.context.text_tokens
        return torch.arange(tokens) * BINS // tokens

    @cached_property
    def pieces(self) -> list[str]:
        """The text of every context token, with the space that begins a word."""
        ids = self.prepared.context.ids[0, self.prepared.context.prefix_length :].tolist()
        names = self.tokenizer.convert_ids_to_tokens(ids)
        texts = [decode_ids(self.tokenizer, [token]) for token in ids]
        # SentencePiece writes that space as U+2581 and drops it when it decodes a token alone.
        starts = (name.startswith("\u2581") for name in names)
        return [
            f" {text.lstrip(' ')}" if begins else text
            for begins, text in zip(starts, texts, strict=True)
        ]

    def read_by_restore(self) -> RaggedCache:
        """Return the cache that the restore pass reads: the full or the evicted one, as
        `restore_from` says.
        """
        if self.prepared.config.restore_from == "full":
            return RaggedCache.from_full_cache(self.prepared.full)
        return RaggedCache.from_kept_pairs(self.prepared.full, self.kept[RESTORED])


@dataclass(frozen=True)
class DocumentFigures:
    """What an analysis measured in each document at one ratio, and how many questions each document
    has.
    """

    documents: list[dict]
    questions: list[int]

    def __contains__(self, name: str) -> bool:
        return name in self.documents[0]

    def stacked(self, *path: str) -> np.ndarray:
        """Return one figure of all documents: (documents, ...)."""
        values = self.documents
        for name in path:
            values = [each[name] for each in values]
        return np.array(values, dtype=np.float64)

    def mean(self, *path: str, by_question: bool = False) -> np.ndarray:
        """Return the mean over documents, or over questions, with equal weights."""
        return np.average(self.stacked(*path), axis=0, weights=self.weights(by_question))

    def interval(self, statistic: Statistic, *path: str, by_question: bool = False) -> list:
        """Return [low, high], a 95 % bootstrap over documents of a statistic of the mean.

        `statistic` maps the means of R resamples (R, ...) to (R,). Returns [None, None] if it is
        not finite for one of them, or if there are fewer than MIN_FOR_INTERVAL documents.
        """
        if len(self.documents) < MIN_FOR_INTERVAL:
            return [None, None]
        values = self.stacked(*path)
        drawn = draw_resamples(len(self.documents), 0) * self.weights(by_question)
        means = drawn @ values.reshape(len(values), -1) / drawn.sum(1, keepdims=True)
        drawn_values = statistic(means.reshape(-1, *values.shape[1:]))
        finite = np.isfinite(drawn_values).all()
        if not finite:
            return [None, None]
        return to_plain_list(np.percentile(drawn_values, (2.5, 97.5)))

    def weights(self, by_question: bool) -> np.ndarray:
        return np.array(self.questions if by_question else [1] * len(self.questions))


def to_plain(values: np.ndarray | float) -> list | float | None:
    """Return the values rounded to six significant digits for JSON; None for those not finite."""
    if isinstance(values, np.ndarray) and values.ndim:
        return to_plain_list(values)
    return float(f"{float(values):.6g}") if np.isfinite(values) else None


def to_plain_list(values: np.ndarray) -> list:
    """Return the values of an array with at least one dimension for JSON, as `to_plain` does."""
    return [to_plain(value) for value in values]


@contextmanager
def watch_attention(model: PreTrainedModel, see: See, last: int | None = None) -> Iterator[None]:
    """Call see(layer index, layer, weights) for every ragged layer of every pass in the block.

    The passes must have batch size 1.

    `weights` yields (G, Q, N + t) for each of the H KV heads: a softmax over the head's N context
    pairs, in the order of the layer's rows, and the t pairs of the tail, which include those of the
    pass itself. In a model with learned sinks they sum to less than 1, because the sinks get a
    share. With `last`, Q covers only the last `last` queries. The backend `autograd` computes the
    pass, and the weights are computed by the same blocks, in float64.
    """

    def on_layer(view: LayerView) -> None:
        query = view.query[None]
        layer = view.ragged
        assert layer is not None, "only passes over ragged caches are watched"
        mask = view.mask
        if mask is None:
            mask = make_causal_mask(query.shape[-2], layer.columns, query.device)[None, None]
        first = 0 if last is None else query.shape[-2] - last
        see(
            view.layer,
            layer,
            _compute_weights(query[..., first:, :], layer, mask[..., first:, :], view),
        )

    with attention.force_backend("autograd"), observe_layers(model, on_layer):
        yield


def _compute_weights(
    query: Tensor, layer: RaggedLayer, mask: Tensor, view: LayerView
) -> Iterator[Tensor]:
    """Yield the weights (G, Q, N + t) of each head, on the CPU.

    `query` is (1, H, G, Q, D), `mask` (1, 1, Q, t) bool; `view` has the model's scale, sinks and
    cap.
    """
    # Apple's GPUs have no float64.
    exact = query.dtype if query.device.type == "mps" else torch.float64
    blocks = autograd.iterate_blocks(
        query.to(exact),
        layer.keys,
        layer.values,
        mask,
        layer.context_keys[:],
        layer.context_values[:],
        layer.bias,
        view.sinks,
        layer.bounds,
        view.scale,
        view.cap,
    )
    for _, found in groupby(blocks, key=lambda block: block[0]):
        weights = [of_block[0] for _, _, _, _, _, of_block, _ in found]
        yield torch.cat(weights, 1).double().cpu()
