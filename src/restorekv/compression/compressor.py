"""Compression in two steps: everything expensive once, then any number of budgets (Section 3 of the paper).

prepare    prefill, score every pair, append the restore cache while the full cache is still there
evict      B = floor(r * T_b * L * H) -> the evictor keeps the B - n*L*H best pairs, the rest is dropped
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import peft
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__, evictors, spec
from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.attention_matching.method import AttentionMatching
from restorekv.compression.budget import Budget, OnSmallBudget, PrefixPolicy, from_file
from restorekv.compression.context import CompressedContext
from restorekv.compression.context_file import Manifest
from restorekv.compression.prepared import (
    CompressionConfig,
    Compressor,
    PreparedContext,
    Progress,
    RestoreFrom,
    ScoredContext,
    timed,
)
from restorekv.compression.streaming import StreamedContext, parts
from restorekv.errors import AdapterError, BudgetError, RestoreKVError, warn
from restorekv.model import attention
from restorekv.model.load import SHIPPING, canonical, model_fingerprint, model_name, rope_fingerprint, shipped_path
from restorekv.model.observer import observe_layers
from restorekv.model.offload import offloaded, trim_heap
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, default_between, fit, make_context, tell_beyond, template_hash
from restorekv.model.shape import CacheShape
from restorekv.restore import publish
from restorekv.restore.adapter import RestoreAdapter

METHODS: dict[str, type[Compressor]] = {"am-fast": AttentionMatching}  # besides eviction by each of the evictors
DEFAULT = "kvzip"
PRESETS = {"fast": "fastkvzip", "best": "kvzip"}  # scores come with the prefill; a pass of its own scores


@dataclass(frozen=True)
class Eviction(Compressor):
    """An evictor, and an adapter that restores what it loses; `streaming` reads so many tokens at a time."""

    evictor: evictors.Evictor
    adapter: RestoreAdapter | None = None
    conventions: CompressionConfig = CompressionConfig()
    streaming: int | None = None
    restores: ClassVar[bool] = True
    any_config: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.adapter and self.conventions.offset:
            raise RestoreKVError("An offset is a control without restore states; leave out the adapter or the offset.")
        if self.streaming is not None and not self.evictor.streams:
            why = f"{self.evictor.name} scores a context as a whole"
            raise RestoreKVError(f"{why}; leave out streaming or use another evictor.")

    @classmethod
    def make(
        cls, evictor: str, adapter: RestoreAdapter | None = None, *, prefix_policy: PrefixPolicy = "free",
        on_small_budget: OnSmallBudget = "error", allocation: str = "global", restore_from: RestoreFrom = "full",
        offset: int = 0,
    ) -> Eviction:  # fmt: skip
        """Makes an eviction from an evictor's spec and the settings of `CompressionConfig`."""
        if evictor.partition(":")[0] in METHODS:
            raise RestoreKVError(f"{evictor} is no evictor: it restores nothing, so there is nothing to train for it.")
        conventions = CompressionConfig(prefix_policy, on_small_budget, allocation, restore_from, offset)
        return cls(evictors.make(evictor), adapter, conventions)

    @property
    def spec(self) -> str:
        """The evictor's."""
        return self.evictor.spec

    def identity(self, model: PreTrainedModel) -> str:
        """Returns the evictor's identity."""
        return self.evictor.identity(model)

    def as_published(self, prefix: int) -> Eviction:
        """Returns the same eviction with the evictor's authors' settings."""
        return replace(self, evictor=self.evictor.as_published(prefix))

    def suited_to(self, context: Context) -> Eviction:
        """Returns an eviction that does not stream where the context fits into one part."""
        streams = self.streaming is not None and len(parts(self.evictor, context, self.streaming)) > 1
        return self if streams else replace(self, streaming=None)

    def prepare(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: str | Context, progress: Progress | None = None,
        offload: bool = False,
    ) -> PreparedContext:  # fmt: skip
        """Does prefill, scores and, with an adapter, the restore pass; a context that streams is left to `evict`."""
        tell = progress or (lambda phase: None)
        if isinstance(context, str):
            context = make_context(tokenizer, context)
        tell_beyond(model, context.positions, "The context")
        if self.streaming is not None:
            how = self.evictor, self.conventions, self.streaming, self.adapter
            return StreamedContext(model, tokenizer, context, *how, tell)
        if offload and not self.evictor.offloads:
            raise RestoreKVError(f"{self.evictor.name} makes a full cache of its own in memory; leave out offload.")
        attention.install(model)
        seconds: dict[str, float] = {}
        with torch.no_grad():
            tell("prefill")
            observer = self.evictor.observer(model, context)
            observing = observe_layers(model, observer.on_layer) if observer else nullcontext()
            with timed(seconds, "prefill"), observing:
                full = prefill(model, context.ids, into=offloaded(model, context.positions) if offload else None)
            tell("score")
            with timed(seconds, "score"):
                scores = self.evictor.score(model, tokenizer, context, full, observer)
        prepared = ScoredContext(model, context, full, scores, self.conventions, seconds=seconds)
        if self.adapter is None:
            return prepared
        tell("restore")
        return prepared.with_restore_cache(self.adapter)


def make_compressor(
    text: str, conventions: CompressionConfig = CompressionConfig(), streaming: int | None = None
) -> Compressor:
    """Returns what a spec names: eviction by an evictor, or a method that makes a compact cache of its own."""
    named = spec.parse(text, {**evictors.EVICTORS, **METHODS}, "evictor")
    if text.partition(":")[0] not in METHODS:
        return Eviction(named, None, conventions, streaming)
    if streaming is not None:
        raise RestoreKVError(f"{named.name} fits a cache to a full one in memory; leave out streaming.")
    return replace(named, conventions=conventions)


def compress(
    model: PreTrainedModel, tokenizer: Tokenizer, context: str | Sequence[int] | Tensor, *,
    evictor: str | None = None, preset: str | None = None,
    ratio: float | str | Fraction | None = None, tokens_per_head: int | None = None,
    adapter: RestoreAdapter | str | Path | None = "auto", restore_tokens: int | None = None,
    prefix_policy: PrefixPolicy = "free", on_small_budget: OnSmallBudget = "error", allocation: str = "global",
    restore_from: RestoreFrom = "full", offset: int = 0,
    storage: str = "model", streaming: int | None = None, offload: bool = False,
    between: str | None = None, max_context: str = "refuse", progress: Progress | None = None,
) -> CompressedContext:  # fmt: skip
    """Compresses a text, or its token ids, to `ratio` (0.1 unless given) of its KV pairs or to `tokens_per_head`.

    The evictor is kvzip unless named, by itself or by `preset`: "fast" (fastkvzip) or "best" (kvzip). `adapter` is a
    RestoreAdapter made for `model`, a folder or hub id of one, "auto" for the one that ships for the model and evictor,
    "published" for the one that the paper's authors publish, or None; `restore_tokens` uses the first so many of its n.
    `prefix_policy`, `on_small_budget`, `allocation`, `restore_from` and `offset` are those of `CompressionConfig`.
    `storage` "int8" or "fp8" stores the kept pairs in 8 bits a number. `streaming` compresses while the prefill reads
    so many tokens at a time and never holds the full cache: an approximation, see streaming.py. `offload` keeps all but
    one layer of the full cache in a temporary file, on a GPU in the host's memory, and changes nothing else. `between`
    separates the text from every question (None: what the tokenizer's config names, or a blank line). `max_context`
    "cut" drops the end of a context that is too long for the model's positions, instead of refusing it.
    """
    quantized.check(storage)
    conventions = CompressionConfig(prefix_policy, on_small_budget, allocation, restore_from, offset)
    compressor = make_compressor(chosen_evictor(evictor, preset), conventions, streaming)
    parsed = make_context(tokenizer, context, default_between(tokenizer) if between is None else between)
    parsed, cut = fit(model, parsed, max_context, offset)
    size = model, parsed, conventions, ratio, tokens_per_head
    budget_for(*size)  # refuses a bad ratio before any work is done
    restorer = load_adapter(model, adapter, compressor, restore_tokens, parsed.between)
    budget = budget_for(*size, restorer.restore_tokens if restorer else 0)
    chosen = (replace(compressor, adapter=restorer) if restorer else compressor).suited_to(parsed)
    with torch.no_grad():
        prepared = chosen.prepare(model, tokenizer, parsed, progress, offload)
        if progress and prepared.full is not None:
            progress("evict")
        cache, seconds = prepared.evict_timed(budget, consume=True)
        with timed(seconds, "evict"):
            if storage != "model":
                cache.store(storage)
        manifest = describe(tokenizer, chosen, prepared, budget, cache, prepared.seconds | seconds, storage, cut)
    del prepared  # and what is left of the full cache
    trim_heap()
    return CompressedContext(model, tokenizer, parsed, cache, manifest)


def chosen_evictor(evictor: str | None, preset: str | None) -> str:
    """Returns the evictor's spec: the one given, or the one that the preset stands for."""
    if preset is None:
        return evictor or DEFAULT
    if evictor is not None:
        raise RestoreKVError("A preset names the evictor; give either a preset or an evictor, not both.")
    if preset not in PRESETS:
        raise RestoreKVError(f"There is no preset {preset!r}; use {' or '.join(PRESETS)}.")
    return PRESETS[preset]


def budget_for(
    model: PreTrainedModel, context: Context, conventions: CompressionConfig, ratio: float | str | Fraction | None,
    tokens_per_head: int | None, restore_tokens: int = 0,
) -> Budget:  # fmt: skip
    """Returns the budget with n restore tokens; a tenth of the pairs unless a ratio or `tokens_per_head` is given."""
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either a ratio or tokens_per_head, not both.")
    shape = CacheShape.of(model)
    if tokens_per_head is None:
        return conventions.budget(0.1 if ratio is None else ratio, context, shape.layers, shape.heads, restore_tokens)
    size = tokens_per_head, conventions.columns(context), shape.layers, shape.heads
    return Budget.of_tokens_per_head(*size, restore_tokens, conventions.on_small_budget)


def load_adapter(
    model: PreTrainedModel, adapter: RestoreAdapter | str | Path | None, compressor: Compressor,
    restore_tokens: int | None = None,
    between: str | None = None,
) -> RestoreAdapter | None:  # fmt: skip
    """Returns the adapter that `compress` is given or finds (see there), or its first `restore_tokens` as one.

    "tiny:NAME" or "smollm2:NAME" is the one that ships for the evictor NAME, for use with another evictor. Warns where
    the adapter was trained for another use, which `between` is a part of.
    """
    conventions = compressor.conventions
    if not compressor.restores:
        if adapter not in (None, "auto"):
            raise AdapterError(f"{compressor.spec} restores nothing; leave out the adapter.")
        return None
    if isinstance(adapter, str):
        adapter = locate_adapter(model, adapter, compressor)
    if adapter is None:
        if conventions.restore_from != "full":
            raise RestoreKVError("restore_from is about a restore pass, and there is no adapter; give one.")
        return None
    if not isinstance(adapter, RestoreAdapter):
        adapter = RestoreAdapter.from_pretrained(model, adapter)
    if adapter.model is not model:
        raise AdapterError("The adapter was made for another model object; load it for this one.")
    trained_for = conventions.allocation.spec, conventions.restore_from, conventions.prefix_policy, between
    adapter.check_use(compressor.identity(model), *trained_for)
    return adapter if restore_tokens is None else adapter.first(restore_tokens)


def locate_adapter(model: PreTrainedModel, name: str, compressor: Compressor) -> str | Path | None:
    """Returns the folder or hub id that a name stands for, None where "auto" finds no adapter."""
    if name == "published":
        return publish.published_name(model_name(model), compressor.spec)
    if name != "auto":
        return shipped_adapter(*name.split(":", 1)) or name if ":" in name else name
    folder = shipped_adapter(model_name(model), compressor.spec)
    if folder and compressor.conventions.offset:
        warn("An offset is a control without restoring: no adapter is used.")
        return None
    return folder


def shipped_adapter(model: str, evictor: str) -> Path | None:
    """Returns the folder that ships for the model of that name and this evictor, if one does."""
    name = canonical(model)
    folder = shipped_path(name, "adapters", evictor)
    return folder if name in SHIPPING and evictor and folder.is_dir() else None


def describe(
    tokenizer: Tokenizer, compressor: Compressor, prepared: PreparedContext, budget: Budget, cache: RaggedCache,
    seconds: dict[str, float], storage: str, cut: int = 0,
) -> Manifest:  # fmt: skip
    """Returns the record of a compression: everything that a reader of the cache file needs to know."""
    model, context, conventions = prepared.model, prepared.context, prepared.conventions
    shape, adapter = CacheShape.of(model), compressor.adapter
    libraries = {"torch": torch, "transformers": transformers, "peft": peft}
    versions = {name: library.__version__ for name, library in libraries.items()}
    pair_bytes = 2 * shape.head_dim * cache.layers[0].dtype.itemsize
    return Manifest(
        model=model_name(model), fingerprint=model_fingerprint(model), rope=rope_fingerprint(model.config),
        template=template_hash(tokenizer), dtype=str(model.dtype).removeprefix("torch."), shape=vars(shape),
        prefix=context.prefix, tokens=context.tokens, restore_tokens=budget.restore_tokens, ratio=str(budget.ratio),
        **from_file(conventions.described()), evictor=compressor.identity(model),
        adapter=adapter and adapter.identity(), pairs=conventions.counted_pairs(cache, context),
        pairs_of_prefix=cache.pairs_of_prefix(context.prefix), pairs_held=cache.pairs,
        bytes_full=shape.layers * shape.heads * context.positions * pair_bytes, bytes_held=cache.nbytes,
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        versions={"restorekv": __version__, **versions, "python": platform.python_version()},
        storage=storage, streaming=prepared.streaming, between=context.between, cut=cut,
    )  # fmt: skip
