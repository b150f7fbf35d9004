"""KVzip (arXiv:2505.23416): a pair matters as much as the model attends to it while it repeats the
context.

For every chunk of the context the model reads "repeat it" and the chunk again, on top of the full
cache. With the queries q_j of that pass (all rows, instruction included) and, as keys, the
attention sinks, the chunk's pairs in the cache and the pass's own pairs (causally),

    A_ji = softmax_i(q_j k_i / sqrt(D))          score_i = max over j and the G query heads of A_ji.

Where later layers attend to the same pairs (Gemma 3n, Gemma 4), the maximum is over their query
heads too. Each pass has its own softmax. The learned sinks of a model such as gpt-oss, to which a
head may pay attention instead of to any pair, are in it as they are in the model's own. One product
of queries and keys gives both the pass's attention and the maxima, block by block
(attention/blocked.py; on a GPU triton_maxima.py): neither A nor a copy of the full cache ever
exists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from restorekv.cache.dense import list_full_attention
from restorekv.cache.ragged import RaggedLayer
from restorekv.cache.tail import KeysValues
from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import attend_pass, can_use_kernels, triton_maxima
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.model.cache_argument import pass_cache
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
    """The defaults are kvpress's. The authors' code has chunk=2000 and space=true, which ends later
    prompts with a space.
    """

    name: ClassVar[str] = "kvzip"
    rereads: ClassVar[int] = 1

    chunk: int = 2048
    sinks: int = 4
    space: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.sinks < 0:
            raise RestoreKVError(
                f"{self.name} takes chunk >= 1 and sinks >= 0, not {self.chunk} and {self.sinks}."
            )

    def as_published(self, prefix: int) -> Self:
        """Return the settings of the authors' code: chunks of 2,000 tokens, every prefix column as
        a sink and prompts that end with a space.
        """
        # A setting that differs from its default was chosen by the user and stays.
        published = {"chunk": 2000, "sinks": prefix, "space": True}
        changes = {}
        for field in fields(self):
            if field.name in published and getattr(self, field.name) == field.default:
                changes[field.name] = published[field.name]
        return replace(self, **changes)

    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) after one pass over the full cache for every chunk."""
        passes = make_repetitions(tokenizer, context, self.chunk, self.space)
        return self.collect_maxima(model, context, full, passes)

    @torch.no_grad()
    def collect_maxima(
        self, model: Model, context: Context, full: Cache, passes: Iterable[Repetition]
    ) -> Tensor:
        """Return (L, H, T) float32; every pass writes the columns that it names."""
        shape = CacheShape.from_model(model)
        backbone = get_backbone(model)
        layers = list_full_attention(full)
        scores = torch.zeros(
            shape.layers, shape.heads, context.text_tokens, dtype=torch.float32, device=model.device
        )
        for each in passes:
            # The pass's positions lie after the text, and some models change their RoPE frequencies
            # beyond a limit.
            refuse_scoring_beyond(model, full.get_seq_length() + each.ids.shape[-1])
            # This chunk's columns of the scores (L, H, T), as a view that the observer writes.
            start = each.start - context.prefix_length
            end = each.end - context.prefix_length
            columns = scores[..., start:end]

            # As defaults, since the loop variables of a closure would be those of the last pass.
            def on_layer(
                view: LayerView, each: Repetition = each, columns: Tensor = columns
            ) -> Tensor:
                maxima, output = self.score_chunk(view, layers[view.layer], each.start, each.end)
                # Layers that share pairs come one after the other with the same number.
                columns[view.layer] = torch.maximum(columns[view.layer], maxima)
                return output

            with observe_layers(model, on_layer, sharing=True):
                backbone(
                    # The observer computes attention itself; the model's layers see only their own
                    # pairs.
                    input_ids=each.ids.to(model.device),
                    **pass_cache(backbone, query_only_view(full)),
                    use_cache=True,
                )
        return scores

    def score_chunk(
        self, view: LayerView, cached: Any, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Return the maxima (H, end - start) of the columns over rows and query heads, and the
        attention output.
        """
        # Sinks are the first columns of the whole sequence, and only those before the chunk.
        best, output = find_column_maxima(view, cached, start, end, min(self.sinks, start))
        return best.amax(1), output


def make_repetitions(
    tokenizer: Tokenizer, context: Context, chunk: int, space: bool = False
) -> Iterator[Repetition]:
    """Yield the passes in order; a later one starts from the last ids of the chunk before it.

    Args:
        tokenizer: The model's tokenizer.
        context: What is repeated.
        chunk: Tokens per pass.
        space: Whether a space ends the prompt of later chunks.
    """
    for start in range(context.prefix_length, context.num_tokens, chunk):
        end = min(start + chunk, context.num_tokens)
        if start == context.prefix_length:
            prompt = [encode_text(tokenizer, FIRST_PROMPT)]
        else:
            # A later chunk is announced by the last ids before it, or by fewer where a chunk is
            # shorter.
            hint = context.ids[:, start - min(HINT_LENGTH, chunk) : start]
            prompt_text = f"{LATER_PROMPT} " if space else LATER_PROMPT
            prompt = [encode_text(tokenizer, prompt_text), hint]
        # The turn is closed and the assistant opens with the chunk's own tokens, which it repeats.
        ids = torch.cat([*prompt, context.suffix_ids, context.ids[:, start:end]], -1)
        yield Repetition(ids, start, end)


def find_column_maxima(
    view: LayerView,
    cached: Any,
    start: int,
    end: int,
    sinks: int,
    row_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return max over j of A_ji * row_weight_j for columns i of `cached`, (H, G, end - start), and
    the output of attention over `cached` and the pass, (Q, H * G, D).

    Args:
        view: The pass's queries, keys and values in one layer.
        cached: The same layer of the full cache, or a `RaggedLayer`.
        start: The first column i.
        end: The column after the last.
        sinks: How many columns at the start of the cache share the softmax; not the learned
            logits of `view.sinks`.
        row_weight: (Q,), or None for weights of 1.
    """
    own = view.key, view.value
    if can_use_kernels(view.query, view.sinks, view.cap) and not isinstance(cached, RaggedLayer):
        keys, values = cached.keys[0], cached.values[0]
        output, lse = triton_maxima.attend_pass(
            view.query, own, (keys, values), view.scale, sinks, start, end
        )
        if row_weight is not None:
            # exp2(logit - lse) * weight = exp2(logit - (lse - log2 weight)): the kernel needs no
            # argument for weights. Its logarithms are to base 2.
            lse = lse - row_weight.log2()
        maxima = triton_maxima.find_maxima(view.query, keys[:, start:end], lse, view.scale)
        return maxima, output
    maxima = torch.zeros(
        *view.query.shape[:2], end - start, dtype=torch.float32, device=view.query.device
    )

    def get_pairs(head: int) -> KeysValues:
        return _gather_head_pairs(cached, head)

    def on_weights(head: int, low: int, high: int, weights: Tensor) -> None:
        # (G, rows, sinks + chunk + own): the softmax runs over all of them, the maxima over the
        # chunk's columns alone.
        columns = weights[..., sinks : sinks + end - start]
        if row_weight is not None:
            columns = columns.mul_(row_weight[low:high, None])
        torch.maximum(maxima[head], columns.amax(1), out=maxima[head])

    inside = [slice(0, sinks), slice(start, end)]
    output = attend_pass(
        view.query, own, get_pairs, view.scale, inside, on_weights, view.sinks, view.cap
    )
    return maxima, output


def _gather_head_pairs(cached: Any, head: int) -> KeysValues:
    """Return a head's keys and values (K, D); of a ragged layer the tail's columns come first."""
    keys, values = cached.keys[0, head], cached.values[0, head]
    if not isinstance(cached, RaggedLayer):
        return keys, values
    rows = slice(cached.bounds[head], cached.bounds[head + 1])
    keys = torch.cat([keys, cached.context_keys[rows]])
    values = torch.cat([values, cached.context_values[rows]])
    return keys, values
