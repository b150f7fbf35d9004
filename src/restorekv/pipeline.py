"""`compress`: a text in, a small cache out.

>>> compress(model, tokenizer, text, ratio=0.2).manifest.ratio
'1/5'
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.bounds import TEXT_BYTES
from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.budget import Budget, OnSmallBudget, PrefixPolicy, exact_ratio
from restorekv.compression.eviction import load_adapter, make_compressor
from restorekv.compression.prepared import (
    CompressionConfig,
    Compressor,
    PreparedContext,
    Progress,
    RestoreFrom,
    timed,
)
from restorekv.context import CompressedContext
from restorekv.errors import BudgetError, RestoreKVError
from restorekv.files import read_bytes
from restorekv.model import attention
from restorekv.model.identity import fingerprint_model
from restorekv.model.names import get_model_name
from restorekv.model.offload import trim_heap
from restorekv.model.prompt import (
    Context,
    check_system_message,
    fit_context,
    get_default_between,
    hash_template,
    make_context,
)
from restorekv.model.rope import get_rope_settings
from restorekv.model.shape import CacheShape
from restorekv.model.tokenize import decode_utf8
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage.cache_checks import sums
from restorekv.storage.cache_file import Manifest

DEFAULT = "kvzip"
# Scores come with the prefill; a pass of its own scores.
PRESETS = {"fast": "fastkvzip", "best": "kvzip"}


def compress(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: str | Path | Sequence[int] | Sequence[Mapping] | Tensor,
    *,
    evictor: str | None = None,
    preset: str | None = None,
    ratio: float | str | Fraction | None = None,
    tokens_per_head: int | None = None,
    compression_ratio: float | str | Fraction | None = None,
    adapter: RestoreAdapter | str | Path | None = "auto",
    restore_tokens: int | None = None,
    prefix_policy: PrefixPolicy = "free",
    on_small_budget: OnSmallBudget = "error",
    allocation: str = "global",
    restore_from: RestoreFrom = "full",
    offset: int = 0,
    storage: str = "model",
    streaming: int | None = None,
    offload: bool = False,
    between: str | None = None,
    system: str | None = "",
    max_context: str = "refuse",
    progress: Progress | None = None,
) -> CompressedContext:
    """Compresses a context to `ratio` (0.1 unless given) of its KV pairs or to `tokens_per_head`.

    `context` is a text, the `Path` of one, token ids, or messages: one of the user, after one of
    the system if there is one, which `system` gives otherwise. `compression_ratio` is kvpress's
    name for 1 - ratio. The evictor is kvzip unless named, by itself or by `preset`: "fast"
    (fastkvzip) or "best" (kvzip). `adapter` is a RestoreAdapter made for `model`, a folder or hub
    id of one, "auto" for the one that ships for the model and evictor, "published" for the one that
    the paper's authors publish, or None; `restore_tokens` uses the first so many of its n.
    `prefix_policy`, `on_small_budget`, `allocation`, `restore_from` and `offset` are those of
    `CompressionConfig`. `storage` "int8" or "fp8" stores the kept pairs in 8 bits a number.
    `streaming` compresses while the prefill reads so many tokens at a time and never holds the full
    cache: an approximation, see streaming.py. `offload` keeps all but one layer of the full cache
    in a temporary file, on a GPU in the host's memory. `between` separates the text from every
    question (None: what the tokenizer's config names, or a blank line). `max_context` "cut" drops
    the end of a context that is too long for the model's positions. With ratio=1 nothing is lost
    and "auto" restores nothing, nor above the ratios of the adapter's training, unless
    `restore_tokens` or `restore_from` asks for it.
    """
    quantized.check_storage(storage)
    conventions = CompressionConfig(
        prefix_policy, on_small_budget, allocation, restore_from, offset
    )
    compressor = make_compressor(chosen_evictor(evictor, preset), conventions, streaming)
    ratio = kept_ratio(ratio, compression_ratio)
    text, system = text_and_system(context, check_system_message(system))
    between = get_default_between(tokenizer) if between is None else between
    parsed, cut = fit_context(
        model, make_context(tokenizer, text, between, system), max_context, offset
    )
    size = model, parsed, conventions, ratio, tokens_per_head
    kept = budget_for(*size).ratio
    adapter, restore_tokens = (
        (None, None) if kept == 1 and adapter == "auto" else (adapter, restore_tokens)
    )
    restorer = load_adapter(model, adapter, compressor, restore_tokens, parsed.between, kept)
    budget = budget_for(*size, restorer.restore_tokens if restorer else 0)
    chosen = (replace(compressor, adapter=restorer) if restorer else compressor).suited_to(
        parsed, budget
    )
    with torch.no_grad():
        prepared = chosen.prepare(model, tokenizer, parsed, progress, offload)
        if progress and prepared.full is not None:
            progress("evict")
        cache, seconds = prepared.evict_timed(budget, consume=True)
        with timed(seconds, "evict"):
            attention.store_context(cache, storage, CacheShape.from_model(model).groups)
        seconds = prepared.seconds | seconds
        manifest = describe(
            tokenizer, chosen, prepared, budget, cache, seconds, storage, cut, system
        )
    del prepared  # and what is left of the full cache
    trim_heap()
    return CompressedContext(model, tokenizer, parsed, cache, manifest, chosen)


def kept_ratio(
    ratio: float | str | Fraction | None, compression_ratio: float | str | Fraction | None
) -> float | str | Fraction | None:
    """Returns the share that stays, of which kvpress's compression_ratio is the rest."""
    if compression_ratio is None:
        return ratio
    if ratio is not None:
        raise BudgetError("compression_ratio is 1 - ratio; give one of them, not both.")
    try:
        return exact_ratio(1 - Fraction(str(compression_ratio)))
    except (ValueError, ZeroDivisionError, BudgetError):
        wrong = f"compression_ratio is the share that goes, at least 0 and below 1, not {compression_ratio}."
        raise BudgetError(wrong) from None


def text_and_system(context: object, system: str) -> tuple[str | Sequence[int] | Tensor, str]:
    """Returns the text or token ids of any form of context that `compress` takes, and the system
    message.
    """
    if isinstance(context, Path):
        what = f"The file {context}"
        return decode_utf8(read_bytes(context, what, TEXT_BYTES), what), system
    if not isinstance(context, list | tuple) or not context or not isinstance(context[0], Mapping):
        return context, system
    roles = [each.get("role") if isinstance(each, Mapping) else None for each in context]
    texts = [each.get("content") if isinstance(each, Mapping) else None for each in context]
    if roles not in (["user"], ["system", "user"]) or not all(
        isinstance(text, str) for text in texts
    ):
        raise RestoreKVError(
            "Messages are one of the user, after one of the system at most, each with a text."
        )
    if len(texts) == 2 and system:
        raise RestoreKVError("The messages have a system message; leave out system.")
    return texts[-1], texts[0] if len(texts) == 2 else system


def chosen_evictor(evictor: str | None, preset: str | None) -> str:
    """Returns the evictor's spec: the one given, or the one that the preset stands for."""
    if preset is None:
        return evictor or DEFAULT
    if evictor is not None:
        raise RestoreKVError(
            "A preset names the evictor; give either a preset or an evictor, not both."
        )
    if preset not in PRESETS:
        raise RestoreKVError(f"There is no preset {preset!r}; use {' or '.join(PRESETS)}.")
    return PRESETS[preset]


def budget_for(
    model: PreTrainedModel,
    context: Context,
    conventions: CompressionConfig,
    ratio: float | str | Fraction | None,
    tokens_per_head: int | None,
    restore_tokens: int = 0,
) -> Budget:
    """Returns the budget with n restore tokens; a tenth of the pairs unless a ratio or
    `tokens_per_head` is given.
    """
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either a ratio or tokens_per_head, not both.")
    shape = CacheShape.from_model(model)
    if tokens_per_head is None:
        return conventions.budget(
            0.1 if ratio is None else ratio, context, shape.layers, shape.heads, restore_tokens
        )
    size = tokens_per_head, conventions.columns(context), shape.layers, shape.heads
    return Budget.of_tokens_per_head(*size, restore_tokens, conventions.on_small_budget)


def describe(
    tokenizer: Tokenizer,
    compressor: Compressor,
    prepared: PreparedContext,
    budget: Budget,
    cache: RaggedCache,
    seconds: dict[str, float],
    storage: str,
    cut: int,
    system: str,
) -> Manifest:
    """Returns the record of a compression: everything that a reader of the cache file needs to
    know.
    """
    model = prepared.model
    context = prepared.context
    conventions = prepared.conventions
    shape = CacheShape.from_model(model)
    adapter = compressor.adapter
    libraries = {"torch": torch, "transformers": transformers, "peft": peft}
    versions = {name: library.__version__ for name, library in libraries.items()}
    return Manifest(
        model=get_model_name(model),
        fingerprint=fingerprint_model(model),
        rope=get_rope_settings(model.config),
        template=hash_template(tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        shape=vars(shape),
        prefix=context.prefix,
        tokens=context.tokens,
        restore_tokens=budget.restore_tokens,
        ratio=str(budget.ratio),
        **conventions.described(),
        evictor=compressor.identity(model),
        adapter=adapter and adapter.identity(),
        **sums(cache, context.prefix, context.positions, conventions.prefix_policy),
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        versions={"restorekv": __version__, **versions, "python": platform.python_version()},
        storage=storage,
        streaming=prepared.streaming,
        between=context.between,
        cut=cut,
        system=system,
        parts=[],
        earlier=0,
    )
