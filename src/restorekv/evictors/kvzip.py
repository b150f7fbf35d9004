"""KVzip (arXiv:2505.23416): a pair matters as much as the model attends to it while it repeats the
context.

For every chunk of the context the model reads "repeat it" and the chunk again, on top of the full
cache. With the queries q_j of that pass (all rows, instruction included) and, as keys, the
attention sinks, the chunk's pairs in the cache and the pass's own pairs (causally),

    A_ji = softmax_i(q_j k_i / sqrt(D))          score_i = max over j and the G query heads of A_ji.

Each pass has its own softmax. One product of queries and keys gives both the pass's attention and
the maxima, block by block (attention/blocked.py; on a GPU triton_maxima.py): neither A nor a copy
of the full cache ever exists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import attend_pass, can_use_kernels, triton_maxima
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.prefill import query_only_view
from restorekv.model.prompt import encode_text
from restorekv.model.shape import CacheShape, get_backbone
from restorekv.model.support import refuse_scoring_beyond

FIRST_PROMPT = "\n\nRepeat the previous context exactly."
LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"
HINT_LENGTH = 8  # ids of the previous chunk that show where a later one starts


@dataclass(frozen=True)
class Repetition:
    """One pass: `ids` (1, Q) repeat the columns [start, end) of the cache."""

    ids: Tensor
    start: int
    end: int


@dataclass(frozen=True)
class KVzip(Evictor):
    """The defaults are kvpress's. The authors' code has chunk=2000 and space=true, a space after
    later prompts.
    """

    name: ClassVar[str] = "kvzip"

    chunk: int = 2048
    sinks: int = 4
    space: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.sinks < 0:
            raise RestoreKVError(
                f"{self.name} takes chunk >= 1 and sinks >= 0, not {self.chunk} and {self.sinks}."
            )

    def as_published(self, prefix: int) -> Self:
        """The authors repeat 2,000 tokens at a time, use every prefix column as a sink and end
        prompts with a space.
        """
        own = {"chunk": 2000, "sinks": prefix, "space": True}
        left = [field.name for field in fields(self) if getattr(self, field.name) == field.default]
        return replace(self, **{name: own[name] for name in left if name in own})

    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Returns (L, H, T) after one pass over the full cache for every chunk."""
        return self.collect_maxima(
            model, context, full, make_repetitions(tokenizer, context, self.chunk, self.space)
        )

    @torch.no_grad()
    def collect_maxima(
        self, model: Model, context: Context, full: Cache, passes: Iterable[Repetition]
    ) -> Tensor:
        """Returns (L, H, T) float32; every pass writes the columns that it names."""
        shape = CacheShape.from_model(model)
        scores = torch.zeros(shape.layers, shape.heads, context.tokens, device=model.device)
        for part in passes:
            columns = scores[..., part.start - context.prefix : part.end - context.prefix]

            def on_layer(
                view: LayerView, part: Repetition = part, columns: Tensor = columns
            ) -> Tensor:
                columns[view.layer], output = self.score_chunk(
                    view, full.layers[view.layer], part.start, part.end
                )
                return output

            refuse_scoring_beyond(model, full.get_seq_length() + part.ids.shape[-1])
            with observe_layers(model, on_layer):
                ids = part.ids.to(model.device)
                get_backbone(model)(
                    input_ids=ids, past_key_values=query_only_view(full), use_cache=True
                )
        return scores

    def score_chunk(
        self, view: LayerView, cached: CacheLayerMixin, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Returns (H, end - start), the column maxima over rows and query heads, and the attention
        output.
        """
        best, output = find_column_maxima(view, cached, start, end, min(self.sinks, start))
        return best.amax(1), output


def make_repetitions(
    tokenizer: Tokenizer, context: Context, chunk: int, space: bool = False
) -> Iterator[Repetition]:
    """Yields the passes in order; a later one starts from the last ids of the chunk before it."""
    for start in range(context.prefix, context.positions, chunk):
        end = min(start + chunk, context.positions)
        pieces = [encode_text(tokenizer, FIRST_PROMPT)]
        if start > context.prefix:
            hint = context.ids[:, start - min(HINT_LENGTH, chunk) : start]
            pieces = [encode_text(tokenizer, LATER_PROMPT + " " * space), hint]
        yield Repetition(
            torch.cat([*pieces, context.suffix, context.ids[:, start:end]], -1), start, end
        )


def find_column_maxima(
    view: LayerView,
    cached: CacheLayerMixin,
    start: int,
    end: int,
    sinks: int,
    row_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns max over j of A_ji * row_weight_j for the columns i in [start, end) of `cached`, (H,
    G, end - start).

    The second result is the output of attention over `cached` and the pass, (Q, H * G, D).
    """
    own = view.key, view.value
    if can_use_kernels(view.query) and not isinstance(cached, RaggedLayer):
        dense = cached.keys[0], cached.values[0]
        output, lse = triton_maxima.attend_pass(
            view.query, own, dense, view.scale, sinks, start, end
        )
        lse = lse if row_weight is None else lse - row_weight.log2()
        return triton_maxima.find_maxima(
            view.query, dense[0][:, start:end], lse, view.scale
        ), output
    best = torch.zeros(*view.query.shape[:2], end - start, device=view.query.device)

    def on_weights(head: int, low: int, high: int, weights: Tensor) -> None:
        columns = weights[..., sinks : sinks + end - start]
        if row_weight is not None:
            columns = columns.mul_(row_weight[low:high, None])
        torch.maximum(best[head], columns.amax(1), out=best[head])

    inside = [slice(0, sinks), slice(start, end)]
    return best, attend_pass(
        view.query,
        own,
        lambda head: _gather_head_pairs(cached, head),
        view.scale,
        inside,
        on_weights,
    )


def _gather_head_pairs(cached: CacheLayerMixin, head: int) -> tuple[Tensor, Tensor]:
    """Returns a head's keys and values (K, D); of a ragged layer the tail's columns come first."""
    columns = cached.keys[0, head], cached.values[0, head]
    if not isinstance(cached, RaggedLayer):
        return columns
    rows = slice(*cached.bounds[head : head + 2])
    context = cached.context_keys[rows], cached.context_values[rows]
    return tuple(torch.cat(both) for both in zip(columns, context, strict=True))
