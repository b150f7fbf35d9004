"""Compression in two steps: everything expensive once, then any number of budgets (Section 3 of the paper).

prepare    prefill, score every pair, append the restore cache while the full cache is still there
at         B = floor(r * T_b * L * H) -> the evictor keeps the B - n*L*H best pairs, the rest is dropped
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import evictors, spec
from restorekv.cache.quantized import check
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.attention_matching.method import AttentionMatching
from restorekv.compression.budget import Budget
from restorekv.compression.context import CompressedContext
from restorekv.compression.manifest import describe
from restorekv.compression.prepared import PLAIN, CompressionConfig, PreparedContext, timed
from restorekv.compression.streaming import Stream, parts
from restorekv.errors import AdapterError, BudgetError, RestoreKVError, RestoreKVWarning
from restorekv.model import attention
from restorekv.model.load import SHIPPING, canonical, model_name, shipped_path
from restorekv.model.observer import observe_layers
from restorekv.model.offload import offloaded, trim_heap
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, default_between, make_context
from restorekv.model.shape import CacheShape
from restorekv.restore import publish
from restorekv.restore.adapter import RestoreAdapter

Progress = Callable[[str], None]
METHODS: dict[str, type[AttentionMatching]] = {"am-fast": AttentionMatching}
DEFAULT = "kvzip"
PRESETS = {"fast": "fastkvzip", "best": "kvzip"}  # scores come with the prefill; a pass of its own scores


@dataclass(frozen=True)
class Eviction:
    """An evictor, and an adapter that restores what it loses."""

    evictor: evictors.Evictor
    adapter: RestoreAdapter | None = None
    conventions: CompressionConfig = PLAIN

    def __post_init__(self) -> None:
        if self.adapter and self.conventions.offset:
            raise RestoreKVError(
                "An offset is the control without restore states; leave out the adapter or the offset."
            )

    @classmethod
    def make(cls, evictor: str, adapter: RestoreAdapter | None = None, **conventions: Any) -> Eviction:
        """From an evictor's spec and the arguments of `CompressionConfig.make`."""
        if evictor.partition(":")[0] in METHODS:
            raise RestoreKVError(f"{evictor} is no evictor: it restores nothing, so there is nothing to train for it.")
        return cls(evictors.make(evictor), adapter, CompressionConfig.make(**conventions))

    def identity(self, model: PreTrainedModel) -> str:
        """The evictor's."""
        return self.evictor.identity(model)

    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        progress: Progress | None = None,
        offload: bool = False,
    ) -> PreparedContext:
        """Prefill, scores and, with an adapter, the restore cache; `progress` hears the name of each phase.

        `offload` keeps the full cache elsewhere, one layer at a time excepted; see offload.py.
        """
        tell = progress or (lambda phase: None)
        if offload and not self.evictor.offloads:
            raise RestoreKVError(f"{self.evictor.name} makes a full cache of its own in memory; leave out offload.")
        attention.install(model)
        if isinstance(context, str):
            context = make_context(tokenizer, context)
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
        prepared = PreparedContext(model, context, full, scores, self.conventions, 0, seconds)
        if self.adapter is None:
            return prepared
        tell("restore")
        return prepared.with_restore_cache(self.adapter)


def method(text: str, conventions: CompressionConfig = PLAIN) -> Eviction | AttentionMatching:
    """What a spec names: eviction by an evictor, or a method that makes a compact cache of its own."""
    made = spec.parse(text, {**evictors.EVICTORS, **METHODS}, "evictor")
    if isinstance(made, AttentionMatching):
        return replace(made, conventions=conventions)
    return Eviction(made, None, conventions)


def compress(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: str,
    *,
    evictor: str | None = None,
    preset: str | None = None,
    ratio: float | str | Fraction | None = None,
    tokens_per_head: int | None = None,
    adapter: RestoreAdapter | str | Path | None = "auto",
    restore_tokens: int | None = None,
    storage: str = "model",
    streaming: int | None = None,
    offload: bool = False,
    progress: Progress | None = None,
    between: str | None = None,
    **conventions: Any,
) -> CompressedContext:
    """Compress `context` to `ratio` (0.1 unless given) of its KV pairs, or to `tokens_per_head` of them per head.

    The evictor is kvzip unless named, by itself or by `preset`: "fast" (fastkvzip) or "best" (kvzip). `adapter` is a
    RestoreAdapter made for `model`, a folder or hub id of one, "auto" for the one that ships for the model and evictor,
    "published" for the one that the paper's authors publish, or None. `restore_tokens` uses the first so many of its n.
    `storage` "int8" or "fp8" holds what is kept in 8 bits a number; it does not change how many pairs are kept.
    `streaming` compresses as the prefill goes, so many tokens at a time, and never holds the full cache: an
    approximation, see streamed.py. `offload` keeps all but one layer of the full cache in a temporary file, on a GPU in
    the host's memory, and changes nothing else. `between` parts the text from every question (None: what the
    tokenizer's config names, or a blank line). Further arguments are those of `CompressionConfig.make`.
    """
    check(storage)
    eviction = method(chosen_evictor(evictor, preset), CompressionConfig.make(**conventions))
    parsed = make_context(tokenizer, context, default_between(tokenizer) if between is None else between)
    budget = plan(model, parsed, ratio, tokens_per_head, eviction.conventions)
    budget(0)  # refuses a bad ratio before any work is done
    restorer = load_adapter(model, adapter, eviction, restore_tokens, parsed.between)
    wanted = budget(restorer.restore_tokens if restorer else 0)
    with torch.no_grad():
        chosen = replace(eviction, adapter=restorer) if restorer else eviction
        source, cache = build_cache(chosen, model, tokenizer, parsed, wanted, streaming, offload, progress)
        with timed(source.seconds, "evict"):
            if storage != "model":
                cache.store(storage)
        made = describe(
            model, tokenizer, source, wanted, cache, eviction.identity(model), restorer, storage,
            streaming if isinstance(source, Stream) else None,
        )  # fmt: skip
    del source  # and what is left of the full cache
    trim_heap()
    return CompressedContext(model, tokenizer, parsed, cache, made)


def chosen_evictor(evictor: str | None, preset: str | None) -> str:
    """The evictor's spec, of itself or by the preset that stands for it."""
    if preset is None:
        return evictor or DEFAULT
    if evictor is not None:
        raise RestoreKVError("A preset names the evictor; give either a preset or an evictor, not both.")
    if preset not in PRESETS:
        raise RestoreKVError(f"There is no preset {preset!r}; use {' or '.join(PRESETS)}.")
    return PRESETS[preset]


def build_cache(
    chosen: Eviction | AttentionMatching,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    budget: Budget,
    streaming: int | None,
    offload: bool,
    progress: Progress | None,
) -> tuple[PreparedContext | Stream, RaggedCache]:
    """What the cache was made from, and the cache: in parts if the context is longer than `streaming` tokens."""
    tell = progress or (lambda phase: None)
    if streaming is not None or offload:
        streamable(chosen)
    if streaming is not None and len(parts(chosen.evictor, context, streaming)) > 1:
        stream = Stream(model, tokenizer, context, chosen.evictor, chosen.conventions, budget, chosen.adapter, tell)
        return stream, stream.run(streaming)
    elsewhere = {"offload": True} if offload else {}
    prepared = chosen.prepare(model, tokenizer, context, tell, **elsewhere)
    tell("evict")
    with timed(prepared.seconds, "evict"):
        return prepared, prepared.at(budget, last=True)


def streamable(chosen: Eviction | AttentionMatching) -> None:
    """Refuses a method that wants the whole cache in memory."""
    if not isinstance(chosen, Eviction):
        raise RestoreKVError("am-fast fits a cache to a full one in memory; leave out streaming and offload.")


def plan(
    model: PreTrainedModel,
    context: Context,
    ratio: float | str | Fraction | None,
    tokens_per_head: int | None,
    conventions: CompressionConfig,
) -> Callable[[int], Budget]:
    """The budget as a function of n; a tenth of the pairs unless a ratio or `tokens_per_head` is given."""
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either a ratio or tokens_per_head, not both.")
    shape = CacheShape.of(model)
    if tokens_per_head is None:
        share = 0.1 if ratio is None else ratio
        return lambda n: conventions.budget(share, context, shape.layers, shape.heads, n)
    columns, on_tight = conventions.columns(context), conventions.on_tight
    return lambda n: Budget.of_tokens_per_head(tokens_per_head, columns, shape.layers, shape.heads, n, on_tight)


def load_adapter(
    model: PreTrainedModel,
    adapter: RestoreAdapter | str | Path | None,
    eviction: Eviction | AttentionMatching,
    restore_tokens: int | None = None,
    between: str | None = None,
) -> RestoreAdapter | None:
    """The adapter itself, or one from a folder, the hub, ("auto") the package or ("published") the paper's authors.

    "tiny:NAME" or "smollm2:NAME" is the one that ships for the evictor NAME, for use with another evictor.
    `restore_tokens` takes its first so many. Warns of another use than the training's, which `between` is a part of.
    """
    if isinstance(eviction, AttentionMatching):
        if adapter not in (None, "auto"):
            raise AdapterError("am-fast restores nothing; leave out the adapter.")
        return None
    if adapter == "auto":
        adapter = shipped_adapter(model_name(model), eviction.evictor.spec)
        if adapter and eviction.conventions.offset:
            warnings.warn(
                "An offset is a control without restoring: no adapter is used.", RestoreKVWarning, stacklevel=3
            )
            adapter = None
    elif adapter == "published":
        adapter = publish.published_name(model_name(model), eviction.evictor.spec)
    elif isinstance(adapter, str):
        adapter = shipped_adapter(*adapter.split(":", 1)) or adapter if ":" in adapter else adapter
    if adapter is None:
        if eviction.conventions.restore_from != "full":
            raise RestoreKVError("restore_from is about a restore pass, and there is no adapter; give one.")
        return None
    if not isinstance(adapter, RestoreAdapter):
        adapter = RestoreAdapter.from_pretrained(model, adapter)
    if adapter.model is not model:
        raise AdapterError("The adapter was made for another model object; load it for this one.")
    conventions = eviction.conventions
    adapter.check_use(
        eviction.identity(model), conventions.allocation.spec, conventions.restore_from, conventions.prefix_policy,
        between,
    )  # fmt: skip
    return adapter if restore_tokens is None else adapter.first(restore_tokens)


def shipped_adapter(model: str, evictor: str) -> Path | None:
    """The folder that ships for the model of that name and this evictor, if one does."""
    name = canonical(model)
    folder = shipped_path(name, "adapters", evictor)
    return folder if name in SHIPPING and evictor and folder.is_dir() else None
