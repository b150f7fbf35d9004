"""The standard path from a context to a small cache: it holds the full cache on the way.

    prefill and score    one pass of the model over S + T columns, and scores (L, H, T) of all pairs
    restore pass         n more columns over the full cache (Eq. 5)
    evict                B = floor(r * T_b * L * H); the B - n*L*H best pairs stay (Eqs. 1-3, 6)

The first two are expensive and do not depend on the ratio. `evict` chooses pairs and gathers them.
There are two kinds of restore pass that it has to run again for each cache: that of an adapter that
knows the ratio, and one that reads the evicted cache instead of the full one.

streaming.py is the other path, which never holds the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv.cache.dense import list_dense_layers, list_full_attention
from restorekv.cache.ragged import RaggedCache
from restorekv.cache.states import mark_position
from restorekv.cache.tail import KeysValues
from restorekv.compression.budget import Budget
from restorekv.compression.compressor import (
    BeginPhase,
    PreparedContext,
    ignore_phase,
    time_phase,
)
from restorekv.errors import RestoreKVError
from restorekv.evictors import Evictor
from restorekv.model.attention import dispatch
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import AnyCache, prefill, read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape, describe_windows
from restorekv.restore.adapter import RestoreAdapter

SINKS = 4  # how many columns at the start always stay when the prefix is counted
UNHELD_SCORE = -torch.inf  # the score of a pair that is not held


def prefill_and_score(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    evictor: Evictor,
    context: Context,
    cache: AnyCache,
    seconds: dict[str, float],
    begin_phase: BeginPhase = ignore_phase,
) -> tuple[AnyCache, Tensor]:
    """Read a context once and score its pairs.

    Args:
        model: The model.
        tokenizer: Its tokenizer, for evictors that write instructions.
        evictor: What scores; it may observe the layers during the prefill.
        context: What the evictor takes for the whole text.
        cache: Where the pairs go. A ragged one holds the prefix and earlier parts of the text
            already, so that only what follows the prefix is read.
        seconds: Gets the seconds of the phases "prefill" and "score".
        begin_phase: Called with the name of each phase.

    Returns:
        The filled cache, and scores (L, H, T).
    """
    # Some evictors see the layers while the prefill runs, others read the cache afterwards.
    observer = evictor.make_observer(model, context)
    observing = nullcontext()
    sees_sharing = getattr(observer, "sees_sharing", False)
    if observer:
        observing = observe_layers(model, observer.on_layer, sees_sharing)
    begin_phase("prefill")
    with time_phase(seconds, "prefill"), observing:
        ids = _select_unread_ids(context, cache)
        # Where an evictor begins to read the end of the text again.
        end = cache.get_seq_length() + ids.shape[-1]
        mark_position(cache.layers, end - evictor.count_pinned_tail(context))
        full = prefill(model, ids, into=cache, whole=sees_sharing)
    begin_phase("score")
    before = _note_versions(full)
    with time_phase(seconds, "score"):
        scores = evictor.score(model, tokenizer, context, full, observer)
    _check_scores(scores, evictor, model, context)
    if any(tensor._version != version for tensor, version in before):
        raise RestoreKVError(
            f"The evictor {evictor.name} wrote into the full cache, which is read again later; let "
            "its score() change copies only."
        )
    return full, scores


def _select_unread_ids(context: Context, cache: Cache) -> Tensor:
    """Return the ids of a context that a cache lacks; a ragged one has the prefix in its tail."""
    if isinstance(cache, RaggedCache):
        return context.ids[:, context.prefix_length :]
    return context.ids


def _note_versions(full: Cache) -> list[tuple[Tensor, int]]:
    """Return every tensor that a cache holds, with the number of times that it was written to.

    Layers that fetch their tensors from elsewhere hold none.
    """
    noted = []
    for layer in full.layers:
        for name in ("keys", "values"):
            tensor = vars(layer).get(name)
            if isinstance(tensor, Tensor) and not tensor.is_inference():
                noted.append((tensor, tensor._version))
    return noted


def _check_scores(
    scores: object, evictor: Evictor, model: PreTrainedModel, context: Context
) -> None:
    """Check type, shape and numbers: evictors of users are a common source of mistakes."""
    shape = CacheShape.from_model(model)
    wanted = (shape.layers, shape.heads, context.text_tokens)
    if isinstance(scores, Tensor) and tuple(scores.shape) == wanted:
        if scores.dtype.is_floating_point:
            _check_numbers(scores, evictor)
            return
        found = f"numbers of the type {str(scores.dtype).removeprefix('torch.')}"
    elif isinstance(scores, Tensor):
        found = f"the shape {tuple(scores.shape)}"
    else:
        found = f"an object of the type {type(scores).__name__}"
    layers = ""
    if describe_windows(model.config):
        layers = " and the layers of list_full_attention(full)"
    raise RestoreKVError(
        f"The evictor {evictor.name} returned {found}; its score() gives float32 of the shape "
        f"(L, H, T) = {wanted}, for the tokens after the chat prefix{layers}."
    )


def _check_numbers(scores: Tensor, evictor: Evictor) -> None:
    """Refuse NaN, which has no rank."""
    wrong = int(scores.isnan().sum())
    if wrong:
        raise RestoreKVError(
            f"{wrong:,} of {scores.numel():,} scores of the evictor {evictor.name} are not numbers "
            "(NaN): load the model in bfloat16 or float32, or fix score() if the evictor is yours."
        )


def prefill_unscored(
    model: PreTrainedModel,
    context: Context,
    cache: AnyCache,
    seconds: dict[str, float],
    begin_phase: BeginPhase = ignore_phase,
) -> tuple[AnyCache, Tensor]:
    """Read a context once and give every pair the score 0, which is enough if all of them stay.

    The arguments are those of `prefill_and_score`.
    """
    begin_phase("prefill")
    with time_phase(seconds, "prefill"):
        full = prefill(model, _select_unread_ids(context, cache), into=cache)
    return full, make_zero_scores(model, context)


def make_zero_scores(model: PreTrainedModel, context: Context) -> Tensor:
    """Return scores of 0 for the pairs of a text, (L, H, T)."""
    shape = CacheShape.from_model(model)
    return torch.zeros(
        shape.layers, shape.heads, context.text_tokens, dtype=torch.float32, device=model.device
    )


@dataclass(frozen=True)
class ScoredContext(PreparedContext):
    """A context with its full cache, scores (L, H, T) and, with an adapter, the restore cache.

    `restore_cache` holds keys and values (1, H, n, D) of every layer.
    """

    full: Cache
    streaming_chunk: None = field(default=None, init=False)
    scores: Tensor
    restore_tokens: int = 0
    # An adapter that has to run its restore pass again for every ratio, because the pass reads the
    # evicted cache or depends on r.
    per_ratio_adapter: RestoreAdapter | None = None
    restore_cache: tuple[KeysValues, ...] = ()

    def with_restore_cache(
        self, adapter: RestoreAdapter, begin_phase: BeginPhase = ignore_phase
    ) -> Self:
        """Run the restore pass over the full cache, unless it reads evicted caches or depends on
        the ratio: then `evict` runs it. Gradients reach the adapter.
        """
        if self.restore_tokens:
            raise RestoreKVError(
                "This context has a restore cache already; prepare it without an adapter."
            )
        if self.config.offset:
            raise RestoreKVError(
                "An offset is the control without restore states; prepare without it to restore."
            )
        if self.config.restore_from == "evicted" or adapter.knows_ratio:
            return replace(self, per_ratio_adapter=adapter, restore_tokens=adapter.restore_tokens)
        begin_phase("restore")
        seconds = dict(self.seconds)
        with time_phase(seconds, "restore"):
            restore_cache = self._read_full_cache(adapter)
        return replace(
            self,
            restore_cache=restore_cache,
            restore_tokens=adapter.restore_tokens,
            seconds=seconds,
        )

    def _read_full_cache(
        self, adapter: RestoreAdapter, ratio: Fraction | None = None
    ) -> tuple[KeysValues, ...]:
        """Return the restore cache that a restore pass over the full cache leaves."""
        # A view shares the full cache's tensors, and copies one layer at a time to join it with the
        # pass's own pairs; a ragged cache reads the full cache in place.
        if self._may_join_layers():
            cache = read_only_view(self.full)
        else:
            cache = RaggedCache.from_full_cache(self.full)
        adapter.run_restore_pass(cache, ratio=ratio)
        return tuple((layer.keys, layer.values) for layer in list_dense_layers(cache))

    def _may_join_layers(self) -> bool:
        """Return whether a restore pass may join a layer's pairs with its own, which copies them.

        SDPA needs such a copy for every query head, and with gradients all copies stay until the
        backward pass.
        """
        shape = CacheShape.from_model(self.model)
        layer = list_full_attention(self.full)[0]
        copied = (layer.keys.nbytes + layer.values.nbytes) * shape.groups
        return not torch.is_grad_enabled() or copied <= dispatch.MAX_COPY_BYTES

    def count_restore_tokens(self) -> int:
        return self.restore_tokens

    def _make_cache(
        self, budget: Budget, consume: bool, begin_phase: BeginPhase
    ) -> tuple[RaggedCache, dict[str, float]]:
        """Choose the pairs that stay and gather them, with the restore cache as the tail.

        The fewer restore tokens the budget has, the more pairs the evictor may keep.
        """
        if not list_full_attention(self.full)[0].is_initialized:
            raise RestoreKVError(
                "The full cache was used up by evict(..., consume=True); prepare the context again."
            )
        restore_cache = self.restore_cache
        adapter = None
        if budget.restore_tokens:
            adapter = self.per_ratio_adapter
        seconds: dict[str, float] = {}
        if adapter is not None and self.config.restore_from == "full":
            begin_phase("restore")
            with time_phase(seconds, "restore"):
                restore_cache = self._read_full_cache(adapter, budget.ratio)
        begin_phase("evict")
        with time_phase(seconds, "evict"):
            cache = self._gather_pairs(budget, restore_cache, consume)
        if adapter is not None and self.config.restore_from == "evicted":
            begin_phase("restore")
            with time_phase(seconds, "restore"):
                adapter.run_restore_pass(cache, budget.restore_tokens, budget.ratio)
                cache.commit_tail()
        # The budget is exact, in every head, layer and allocation.
        assert self.config.count_pairs(cache, self.context) == budget.pairs
        return cache, seconds

    def _gather_pairs(
        self, budget: Budget, restore_cache: Sequence[KeysValues], consume: bool
    ) -> RaggedCache:
        """Return the best pairs of the full cache, with the restore cache as the tail."""
        keep = self.config.mark_kept(self.competing_scores(), budget.retained)
        # Columns that do not compete stay.
        uncounted = self.config.first_competing_column(self.context)
        keep = torch.nn.functional.pad(keep, (uncounted, 0), value=True)
        # The restore pass is causal: its first n columns are the same as those of a pass with n
        # restore tokens.
        first = budget.restore_tokens
        tail = [(keys[:, :, :first], values[:, :, :first]) for keys, values in restore_cache]
        return RaggedCache.from_kept_pairs(
            self.full, keep, tail or None, self.config.offset, consume
        )

    def competing_scores(self) -> Tensor:
        """Return the scores of the pairs that compete: (L, H, T), or (L, H, S + T) with the prefix
        counted.
        """
        if self.config.prefix_policy == "free":
            return self.scores
        # `pin_prefix` writes the scores of the prefix's columns.
        padded = torch.nn.functional.pad(self.scores, (self.context.prefix_length, 0))
        return pin_prefix(padded, self.context.prefix_length)


def pin_prefix(scores: Tensor, prefix: int) -> Tensor:
    """Write into scores (L, H, S + T) how a counted prefix of S columns competes, as in kvpress
    0.5.5.

    The first SINKS columns always stay if they are held, whether they belong to the prefix or the
    context. The rest of the prefix is the first to be dropped.
    """
    scores[..., :prefix] = torch.finfo(scores.dtype).min
    first = scores[..., :SINKS]
    first.masked_fill_(first > UNHELD_SCORE, torch.inf)
    return scores
