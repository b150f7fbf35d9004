"""KVzip (arXiv:2505.23416): a pair matters as much as the model looks at it while repeating the context.

For every chunk of the context the model reads "repeat it" and the chunk again, on top of the full cache. With the
queries q_j of that pass (all of its rows, instruction included) and, as keys, the attention sinks, the chunk's pairs
in the cache and the pass's own pairs (causally),

    A_ji = softmax_i(q_j k_i / sqrt(D))          score_i = max over j and the G query heads of A_ji.

Each pass is normalised on its own. One product of queries and keys serves both the pass's attention and the maxima,
block by block (attention/blocked.py; on a GPU the kernels of triton_maxima.py): neither the matrix A nor a copy of the
full cache is ever made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import CacheLayerMixin

from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import on_gpu, triton_maxima
from restorekv.evictors.base import Evictor
from restorekv.model.attention import blocked
from restorekv.model.observer import LayerProbe, probing
from restorekv.model.prefill import behind
from restorekv.model.prompt import Context, encode
from restorekv.model.shape import CacheShape, decoder

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
HINT = 8  # ids of the previous chunk that tell where a later one starts


@dataclass(frozen=True)
class Repetition:
    """One pass: `ids` (1, Q) repeat the columns [start, end) of the cache."""

    ids: Tensor
    start: int
    end: int


@dataclass(frozen=True)
class KVzip(Evictor):
    """The defaults are kvpress's; the authors' own code repeats 2,000 tokens at a time.

    It also ends the prompt of later chunks with a `space`.
    """

    name: ClassVar[str] = "kvzip"

    chunk: int = 2048
    sinks: int = 4
    space: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.sinks < 0:
            raise RestoreKVError(f"{self.name} takes chunk >= 1 and sinks >= 0, not {self.chunk} and {self.sinks}.")

    def as_published(self, prefix: int) -> Self:
        """The authors repeat 2,000 tokens at a time, use every prefix column as a sink and end prompts with a space."""
        own = {"chunk": 2000, "sinks": prefix, "space": True}
        left = [field.name for field in fields(self) if getattr(self, field.name) == field.default]
        return replace(self, **{name: own[name] for name in left if name in own})

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """One pass over the full cache for every chunk."""
        return self.maxima(model, context, full, repetitions(tokenizer, context, self.chunk, self.space))

    @torch.no_grad()
    def maxima(
        self, model: PreTrainedModel, context: Context, full: DynamicCache, passes: Iterable[Repetition]
    ) -> Tensor:
        """(L, H, T) float32: every pass writes the columns that it names."""
        shape = CacheShape.of(model)
        scores = torch.zeros(shape.layers, shape.heads, context.tokens, device=model.device)
        for part in passes:
            columns = scores[..., part.start - context.prefix : part.end - context.prefix]

            def see(probe: LayerProbe, part: Repetition = part, columns: Tensor = columns) -> Tensor:
                columns[probe.layer], output = self.chunk_scores(probe, full.layers[probe.layer], part.start, part.end)
                return output

            with probing(model, see):
                decoder(model)(input_ids=part.ids.to(model.device), past_key_values=behind(full), use_cache=True)
        return scores

    def chunk_scores(self, probe: LayerProbe, held: CacheLayerMixin, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(H, end - start), the column maxima over rows and query heads, and what attention gives."""
        best, output = column_maxima(probe, held, start, end, min(self.sinks, start))
        return best.amax(1), output


def repetitions(tokenizer: Tokenizer, context: Context, chunk: int, space: bool = False) -> Iterator[Repetition]:
    """The passes, in order; a later one is told the last ids of the chunk before it."""
    for start in range(context.prefix, context.positions, chunk):
        end = min(start + chunk, context.positions)
        pieces = [encode(tokenizer, FIRST)]
        if start > context.prefix:
            hint = context.ids[:, start - min(HINT, chunk) : start]
            pieces = [encode(tokenizer, LATER + " " * space), hint]
        yield Repetition(torch.cat([*pieces, context.suffix, context.ids[:, start:end]], -1), start, end)


def column_maxima(
    probe: LayerProbe,
    held: CacheLayerMixin,
    start: int,
    end: int,
    sinks: int,
    row_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """max over rows j of A_ji * row_weight_j for the columns i in [start, end) of `held`: (H, G, end - start) float32.

    Also what attention over `held` and the pass gives, (Q, H * G, D).
    """
    own = probe.key, probe.value
    if on_gpu(probe.query) and not isinstance(held, RaggedLayer):
        dense = held.keys[0], held.values[0]
        output, lse = triton_maxima.attend(probe.query, own, dense, probe.scale, sinks, start, end)
        lse = lse if row_weight is None else lse - row_weight.log2()
        return triton_maxima.highest(probe.query, dense[0][:, start:end], lse, probe.scale), output
    best = torch.zeros(*probe.query.shape[:2], end - start, device=probe.query.device)

    def see(head: int, low: int, high: int, weights: Tensor) -> None:
        columns = weights[..., sinks : sinks + end - start]
        if row_weight is not None:
            columns = columns.mul_(row_weight[low:high, None])
        torch.maximum(best[head], columns.amax(1), out=best[head])

    inside = [slice(0, sinks), slice(start, end)]
    return best, blocked.attend(probe.query, own, lambda head: pairs(held, head), probe.scale, inside, see)


def pairs(held: CacheLayerMixin, head: int) -> tuple[Tensor, Tensor]:
    """Keys and values (K, D) that one head of a layer holds; of a ragged layer the tail's columns come first."""
    columns = held.keys[0, head], held.values[0, head]
    if not isinstance(held, RaggedLayer):
        return columns
    rows = slice(*held.bounds[head : head + 2])
    context = held.context_keys[rows], held.context_values[rows]
    return tuple(torch.cat(both) for both in zip(columns, context, strict=True))
