"""Compression in two steps: everything expensive once, then any number of budgets (Section 3 of the paper).

prepare    prefill, score every pair, append the restore cache while the full cache is still there
at         B = floor(r * T_b * L * H) -> the evictor keeps the B - n*L*H best pairs, the rest is dropped
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__, attention, evictors
from restorekv.budget import PREFIX_POLICIES, Budget, OnTight, PrefixPolicy
from restorekv.cache import RaggedCache
from restorekv.compressed import CompressedContext
from restorekv.context_file import Manifest
from restorekv.errors import AdapterError, BudgetError, RestoreKVError
from restorekv.evictors.allocate import exact_top
from restorekv.models import BUNDLED, CacheShape, bundled_path, model_fingerprint, model_name, rope_fingerprint
from restorekv.prefill import prefill
from restorekv.prompt import Context, make_context, template_hash
from restorekv.restore import RestoreAdapter

SINKS = 4
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """One context ready for every budget: `full` (S + T columns, then n of the restore cache), scores (L, H, T)."""

    model: PreTrainedModel
    context: Context
    full: DynamicCache
    scores: Tensor
    prefix_policy: PrefixPolicy = "free"
    on_tight: OnTight = "error"
    restore_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def restored_by(self, adapter: RestoreAdapter) -> Prepared:
        """The same context with the adapter's restore cache; this one stays without. Gradients reach the adapter."""
        if self.restore_tokens:
            raise RestoreKVError("This context has a restore cache already; prepare it without an adapter.")
        full = copy.copy(self.full)
        full.layers = [copy.copy(layer) for layer in self.full.layers]
        seconds = dict(self.seconds)
        with timed(seconds, "restore"):
            adapter.append(full)
        return replace(self, full=full, restore_tokens=adapter.restore_tokens, seconds=seconds)

    def budget(self, ratio: float | str | Fraction | Budget, restored: bool = True) -> Budget:
        """What `ratio` means for this context under its prefix policy."""
        layers, heads, tokens = self.scores.shape
        restore = self.restore_tokens if restored else 0
        columns = tokens if self.prefix_policy == "free" else self.context.positions
        if isinstance(ratio, Budget):
            if (ratio.tokens, ratio.layers, ratio.heads) != (columns, layers, heads):
                raise BudgetError(f"The budget is for {ratio.tokens} tokens, the context has {columns}; make another.")
            return ratio
        return Budget.of_ratio(ratio, columns, layers, heads, restore, self.on_tight)

    def at(self, ratio: float | str | Fraction | Budget, restored: bool = True) -> RaggedCache:
        """The cache at one budget; restored=False leaves the restore cache out and gives its share to the evictor."""
        budget = self.budget(ratio, restored)
        if budget.restore_tokens > self.restore_tokens:
            raise BudgetError(f"The budget reserves {budget.restore_tokens} restore tokens; prepare with an adapter.")
        keep = exact_top(self.competing(), budget.retained)
        if self.prefix_policy == "free":
            layers, heads, _ = keep.shape
            keep = torch.cat([keep.new_ones(layers, heads, self.context.prefix), keep], -1)
        cache = RaggedCache.from_dense(self.full, keep, self.context.positions, budget.restore_tokens)
        assert counted_pairs(cache, self.context, self.prefix_policy) == budget.pairs
        return cache

    def competing(self) -> Tensor:
        """Scores of the pairs that compete for the budget: (L, H, T), or (L, H, S + T) with the prefix counted.

        As in kvpress 0.5.5 the prefix scores 0, and the first four columns, whether prefix or context, are pinned.
        """
        if self.prefix_policy == "free":
            return self.scores
        scores = torch.nn.functional.pad(self.scores, (self.context.prefix, 0))
        scores[..., :SINKS] = torch.inf
        return scores


@dataclass(frozen=True)
class Eviction:
    """An evictor, and an adapter that restores what it loses."""

    evictor: evictors.Evictor
    adapter: RestoreAdapter | None = None
    prefix_policy: PrefixPolicy = "free"
    on_tight: OnTight = "error"

    @classmethod
    def make(
        cls,
        evictor: str,
        adapter: RestoreAdapter | None = None,
        prefix_policy: PrefixPolicy = "free",
        on_tight: OnTight = "error",
    ) -> Eviction:
        """From an evictor's name."""
        if prefix_policy not in PREFIX_POLICIES:
            raise RestoreKVError(f"prefix_policy is one of {', '.join(PREFIX_POLICIES)}, not {prefix_policy!r}.")
        return cls(evictors.make(evictor), adapter, prefix_policy, on_tight)

    def prepare(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: str | Context, progress: Progress | None = None
    ) -> Prepared:
        """Prefill, scores and, with an adapter, the restore cache; `progress` hears the name of each phase."""
        tell = progress or (lambda phase: None)
        attention.install(model)
        if isinstance(context, str):
            context = make_context(tokenizer, context)
        seconds: dict[str, float] = {}
        with torch.no_grad():
            tell("prefill")
            with timed(seconds, "prefill"):
                full = prefill(model, context.ids)
            tell("score")
            with timed(seconds, "score"):
                scores = self.evictor.score(model, tokenizer, context, full)
        prepared = Prepared(model, context, full, scores, self.prefix_policy, self.on_tight, 0, seconds)
        if self.adapter is None:
            return prepared
        tell("restore")
        return prepared.restored_by(self.adapter)


def compress(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: str,
    *,
    evictor: str = "kvzip",
    ratio: float | str | Fraction | None = None,
    tokens_per_head: int | None = None,
    adapter: RestoreAdapter | str | Path | None = "auto",
    prefix_policy: PrefixPolicy = "free",
    on_tight: OnTight = "error",
    progress: Progress | None = None,
) -> CompressedContext:
    """Compress `context` to `ratio` (0.1 unless given) of its KV pairs, or to `tokens_per_head` of them per head.

    `adapter` is a RestoreAdapter made for `model`, a folder or hub id of one, "auto" for the one that ships with the
    bundled model, or None.
    """
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either a ratio or tokens_per_head, not both.")
    eviction = Eviction.make(evictor, None, prefix_policy, on_tight)
    parsed = make_context(tokenizer, context)
    budget = plan(model, parsed, 0.1 if ratio is None else ratio, tokens_per_head, prefix_policy, on_tight)
    budget(0)  # refuses a bad ratio before any work is done
    restorer = load_adapter(model, adapter, evictor)
    wanted = budget(restorer.restore_tokens if restorer else 0)
    with torch.no_grad():
        prepared = replace(eviction, adapter=restorer).prepare(model, tokenizer, parsed, progress)
        seconds = dict(prepared.seconds)
        with timed(seconds, "evict"):
            cache = prepared.at(wanted)
        made = describe(model, tokenizer, prepared, wanted, cache, seconds, evictor, restorer)
    return CompressedContext(model, tokenizer, parsed, cache, made)


def plan(
    model: PreTrainedModel,
    context: Context,
    ratio: float | str | Fraction,
    tokens_per_head: int | None,
    prefix_policy: PrefixPolicy,
    on_tight: OnTight,
) -> Callable[[int], Budget]:
    """The budget as a function of n."""
    shape = CacheShape.of(model)
    columns = context.tokens if prefix_policy == "free" else context.positions
    if tokens_per_head is None:
        return lambda n: Budget.of_ratio(ratio, columns, shape.layers, shape.heads, n, on_tight)
    return lambda n: Budget.of_tokens_per_head(tokens_per_head, columns, shape.layers, shape.heads, n, on_tight)


def load_adapter(
    model: PreTrainedModel, adapter: RestoreAdapter | str | Path | None, evictor: str
) -> RestoreAdapter | None:
    """The adapter itself, or one from a folder, the hub or, with "auto", the package; warns if the evictor differs."""
    if adapter == "auto":
        adapter = bundled_adapter(model, evictor)
    if adapter is None:
        return None
    if not isinstance(adapter, RestoreAdapter):
        return RestoreAdapter.from_pretrained(model, adapter, evictor=evictor)
    if adapter.model is not model:
        raise AdapterError("The adapter was made for another model object; load it for this one.")
    adapter.check_evictor(evictor)
    return adapter


def bundled_adapter(model: PreTrainedModel, evictor: str) -> Path | None:
    """The folder shipped for this evictor if `model` is the bundled one."""
    folder = bundled_path("adapters", evictor)
    return folder if model_name(model) == BUNDLED and folder.is_dir() else None


def counted_pairs(cache: RaggedCache, context: Context, prefix_policy: PrefixPolicy) -> int:
    """What the budget is compared with: everything under "counted", everything but the prefix under "free"."""
    return cache.pairs - (cache.pairs_of_prefix(context.prefix) if prefix_policy == "free" else 0)


def describe(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prepared: Prepared,
    budget: Budget,
    cache: RaggedCache,
    seconds: dict[str, float],
    evictor: str,
    adapter: RestoreAdapter | None,
) -> Manifest:
    """Everything a reader of the cache file needs to know."""
    shape, context = CacheShape.of(model), prepared.context
    columns = shape.layers * shape.heads * context.positions
    element = cache.layers[0].context_keys.element_size()
    return Manifest(
        model=model_name(model),
        fingerprint=model_fingerprint(model),
        rope=rope_fingerprint(model.config),
        template=template_hash(tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        shape=vars(shape),
        prefix=context.prefix,
        tokens=context.tokens,
        restore_tokens=budget.restore_tokens,
        ratio=str(budget.ratio),
        prefix_policy=prepared.prefix_policy,
        on_tight=budget.on_tight,
        evictor=evictor,
        adapter=None if adapter is None else adapter.identity(),
        pairs=counted_pairs(cache, context, prepared.prefix_policy),
        pairs_of_prefix=cache.pairs_of_prefix(context.prefix),
        pairs_held=cache.pairs,
        bytes_full=columns * 2 * shape.head_dim * element,
        bytes_held=cache.nbytes,
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        versions={
            "restorekv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": platform.python_version(),
        },
    )


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall time of the block."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
