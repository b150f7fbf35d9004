"""`compress`: a text in, a small cache out.

>>> compress(model, tokenizer, text, ratio=0.2).manifest.ratio
'1/5'
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.cache.ragged import NO_LATENT_CODES, RaggedCache
from restorekv.compression.adapters import load_adapter
from restorekv.compression.arguments import explain_arguments
from restorekv.compression.budget import Budget, parse_ratio
from restorekv.compression.compressor import Compressor, PreparedContext, time_phase
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.compression.prepared_cache import PreparedContextCache
from restorekv.compression.presets import DEFAULT_EVICTOR, resolve_preset
from restorekv.compression.progress import OnProgress, measure_progress
from restorekv.context import CompressedContext
from restorekv.errors import BudgetError, RestoreKVError, warn
from restorekv.generation.sampling import SamplingConfig
from restorekv.model import attention
from restorekv.model.identity import ModelIdentity, identify_model
from restorekv.model.offload import trim_heap
from restorekv.model.position_limits import fit_context
from restorekv.model.prompt import Context, check_system_message, make_context
from restorekv.model.rope import describe_rotation
from restorekv.model.shape import CacheShape, is_latent_config
from restorekv.model.tokenize import check_model_and_tokenizer, hash_token_names
from restorekv.readers.extract import DOCUMENT_ENDINGS, load_document
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.use_warnings import warn_of_unhelpful_ratio
from restorekv.spec import drop_gate
from restorekv.storage.manifest import Manifest, count_pairs_and_bytes, describe_states

# What to write instead of arguments that other libraries have, or that belong elsewhere.
ARGUMENT_HINTS = {
    "preset": 'write evictor="fast" or evictor="best".',
    "press": 'a press of kvpress is evictor="kvpress:press=NAME".',
    "method": 'write evictor="kvzip", for example.',
    "window_size": 'it is a setting of the evictor: evictor="snapkv:window=64".',
    "kernel_size": 'it is a setting of the evictor: evictor="snapkv:kernel=5".',
    "text": "the text is the third argument, context.",
    "budget": "give ratio, or tokens_per_head.",
    "question": "compress the text first, then ask: compress(...).ask(question).",
    "questions": "compress the text first, then ask: compress(...).ask(questions).",
    "max_new_tokens": "it belongs to ask: compress(...).ask(question, max_new_tokens=64).",
    **{
        each.name: f"it belongs to ask: compress(...).ask(question, {each.name}=...)."
        for each in fields(SamplingConfig)
    },
    **{
        each.name: f"it belongs to the config: config=CompressionConfig({each.name}=...)."
        for each in fields(CompressionConfig)
    },
}
DEFAULT_RATIO = Fraction(1, 10)
USAGE = "compress(model, tokenizer, context, ratio=0.1)"


@explain_arguments(ARGUMENT_HINTS, USAGE)
def compress(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: str | Path | Sequence[int] | Sequence[Mapping] | Tensor,
    *,
    ratio: float | str | Fraction | None = None,
    tokens_per_head: int | None = None,
    compression_ratio: float | str | Fraction | None = None,
    evictor: str = DEFAULT_EVICTOR,
    adapter: RestoreAdapter | str | Path | None = "auto",
    config: CompressionConfig = CompressionConfig(),
    progress: OnProgress | None = None,
    prepared_cache: PreparedContextCache | None = None,
) -> CompressedContext:
    """Compress a context to a share of its KV pairs.

    Args:
        model: The model that will answer. Its weights are not changed.
        tokenizer: Its tokenizer.
        context: A text, the `Path` of a text, HTML, PDF, DOCX or EPUB file, token ids, or chat
            messages: an optional system message, then one user message.
        ratio: The share of the KV pairs to hold, 0.1 unless a size is given. With ratio=1 every
            pair is kept and adapter="auto" restores nothing; any other adapter still runs, and its
            n restore pairs in every head replace as many others.
        tokens_per_head: Instead of a ratio: how many pairs to hold per head, on average.
        compression_ratio: Instead of a ratio: kvpress's name for 1 - ratio.
        evictor: The spec of an evictor or of another method, or a preset: "fast" (fastkvzip) or
            "best" (kvzip).
        adapter: "auto" for the adapter that ships for model and evictor, "published" for the one
            that the paper's authors publish, the name of an adapter that ships ("smollm2:kvzip"), a
            folder or hub id, a RestoreAdapter made for `model`, or None. "auto" restores nothing at
            ratios at which the adapter does not help this evictor: above the highest ratio at which
            it was measured to help (or, without a measurement, was trained), and below the lowest
            one. The config's `restore_tokens` or `restore_from` overrides that. Any other adapter
            is used at every ratio, with a warning where it does not help.
        config: The settings that are rarely changed.
        progress: Called with the phase ("prefill", "score" and so on) and the share of all work
            that is done, whenever a phase begins or the share has grown by a hundredth.
        prepared_cache: Keeps the full KV cache and the scores of the last text, so that compressing
            the same text at another ratio skips prefill and scoring. None frees the full cache
            during eviction.

    Returns:
        The small cache, which answers questions and can be saved.

    Raises:
        RestoreKVError: Something that the caller can fix; the message says how.
    """
    check_model_and_tokenizer(model, tokenizer)
    if not isinstance(config, CompressionConfig):
        raise RestoreKVError(
            f"config must be a CompressionConfig, not {type(config).__name__}; write "
            "CompressionConfig(streaming_chunk=512), for example."
        )
    compressor = make_compressor(resolve_preset(evictor), config)
    # A wrong ratio is refused before a file is read, which may take minutes.
    exact_ratio = parse_ratio_arguments(ratio, compression_ratio, tokens_per_head)
    text, system = separate_text_and_system(context, check_system_message(config.system))
    tokenized = make_context(tokenizer, text, config.choose_separator(tokenizer), system)
    tokenized, cut = fit_context(model, tokenized, config.on_long_text, config.offset)

    if config.kv_dtype != "model" and is_latent_config(model.config):
        raise RestoreKVError(NO_LATENT_CODES)
    # The budget is computed once; the restore tokens take their part of it when n is known.
    shape = CacheShape.from_model(model)
    budget = make_budget(shape, tokenized, config, exact_ratio, tokens_per_head)
    # A hash of all weights, which takes a while: only after the budget has been checked.
    identity = identify_model(model, tokenizer)
    compressor, budget = add_adapter(
        compressor, adapter, config.restore_tokens, budget, model, tokenized, identity
    )
    compressor = compressor.specialize(tokenized, budget)

    tokens_to_read = tokenized.num_tokens * compressor.count_passes()
    with torch.no_grad(), measure_progress(model, tokens_to_read, progress) as begin_phase:
        prepared_cache = prepared_cache or PreparedContextCache(max_bytes=0)
        prepared = prepared_cache.prepare(
            model, identity, tokenizer, tokenized, compressor, begin_phase
        )
        keeps_full = prepared_cache.holds(prepared)
        cache, eviction_seconds = prepared.evict_timed(
            budget, consume=not keeps_full, begin_phase=begin_phase
        )
        # Quantizing the retained pairs is counted as a part of the eviction.
        with time_phase(eviction_seconds, "evict"):
            attention.quantize_context(cache, config.kv_dtype, shape.groups)
        seconds = prepared.seconds | eviction_seconds
        manifest = make_manifest(
            tokenizer, identity, compressor, prepared, budget, cache, seconds, cut, system
        )
    del prepared  # and the rest of the full cache
    trim_heap()
    return CompressedContext(model, tokenizer, tokenized, cache, manifest, compressor)


def add_adapter(
    compressor: Compressor,
    adapter: RestoreAdapter | str | Path | None,
    restore_tokens: int | None,
    budget: Budget,
    model: PreTrainedModel,
    context: Context,
    identity: ModelIdentity,
) -> tuple[Compressor, Budget]:
    """Load the adapter that was asked for, if any, and reserve its part of the budget.

    Warn if the adapter is not known to help at the ratio.

    Args:
        compressor: What compresses, without an adapter.
        adapter: As `compress` takes it.
        restore_tokens: How many of its restore tokens to use; None uses all.
        budget: The budget, without room for restore tokens.
        model: The model that will answer.
        context: The tokenized context.
        identity: The identity of the model.

    Returns:
        The compressor, with the adapter if there is something to restore, and the budget.
    """
    # With ratio=1 nothing is lost, so "auto" has nothing to restore, whatever the config says.
    if budget.ratio == 1 and adapter == "auto":
        return compressor, budget
    restore_adapter = load_adapter(
        model, adapter, compressor, restore_tokens, context.separator, budget.ratio, identity
    )
    if restore_adapter is None:
        return compressor, budget
    budget = budget.reserve(restore_adapter.restore_tokens)
    # A budget too small for the restore tokens keeps the whole text under on_small_budget="whole":
    # then there is nothing to restore, although the adapter was found.
    if not budget.kept_whole:
        warn_of_unhelpful_ratio(restore_adapter.card, drop_gate(compressor.spec), budget.ratio)
        compressor = compressor.with_adapter(restore_adapter)
    return compressor, budget


def parse_ratio_arguments(
    ratio: float | str | Fraction | None,
    compression_ratio: float | str | Fraction | None,
    tokens_per_head: int | None,
) -> Fraction | None:
    """Return the ratio that `compress` was called with, or None if it was given none."""
    if ratio is not None and compression_ratio is not None:
        raise BudgetError("compression_ratio is 1 - ratio; pass only one of them.")
    if tokens_per_head is not None and (ratio, compression_ratio) != (None, None):
        raise BudgetError("Pass ratio or tokens_per_head, not both.")
    if ratio is not None:
        return parse_ratio(ratio)
    if compression_ratio is None:
        return None
    try:
        return parse_ratio(1 - Fraction(str(compression_ratio)))
    except (ValueError, ZeroDivisionError, BudgetError):
        raise BudgetError(
            "compression_ratio is the share of the pairs to drop, at least 0 and below 1, "
            f"not {compression_ratio}."
        ) from None


def separate_text_and_system(context: Any, system: str) -> tuple[str | Sequence[int] | Tensor, str]:
    """Return the text or token ids of a context in any form that `compress` takes, and the system
    message: the one among the messages, or else `system`.
    """
    if isinstance(context, Path):
        if context.is_dir():
            raise RestoreKVError(
                f"{context} is a folder; compress its files one by one, or all of them in the "
                "shell: restorekv compress FOLDER -o FOLDER"
            )
        return load_document(context), system
    if isinstance(context, str):
        _warn_of_file_name(context)
    if not isinstance(context, list | tuple) or not context or not isinstance(context[0], Mapping):
        return context, system
    roles = []
    texts: list[str] = []
    for number, message in enumerate(context, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            raise RestoreKVError(
                f"Only text is compressed, and message {number} has a list of parts, as messages "
                "with images do; pass the text of each message as one string."
            )
        if not isinstance(content, str):
            raise RestoreKVError(
                f'Message {number} has no text; pass {{"role": ..., "content": "..."}}.'
            )
        roles.append(message.get("role"))
        texts.append(content)
    if roles not in (["user"], ["system", "user"]):
        raise RestoreKVError(
            f"Messages must be one user message, optionally after one system message, not {roles}."
        )
    if len(texts) == 1:
        return texts[0], system
    if system:
        raise RestoreKVError("The messages have a system message; leave out system.")
    return texts[1], texts[0]


def _warn_of_file_name(text: str) -> None:
    """Warn if a text looks like a file name: one word with the ending of a document. It is
    compressed as text.

    Whether the file exists is not checked, so that a server's clients cannot find out which files
    do.
    """
    name = text.strip()
    if len(name.split()) == 1 and PurePath(name).suffix.lower() in DOCUMENT_ENDINGS:
        warn(f"The context is the text {name!r} itself; pass Path(...) to read that file.")


def make_budget(
    shape: CacheShape,
    context: Context,
    config: CompressionConfig,
    ratio: Fraction | None,
    tokens_per_head: int | None,
) -> Budget:
    """Return the budget without restore tokens: a tenth of the pairs unless a size is given."""
    if tokens_per_head is None:
        return config.make_budget(ratio or DEFAULT_RATIO, context, shape.layers, shape.heads)
    return Budget.of_tokens_per_head(
        tokens_per_head,
        config.competing_columns(context),
        shape.layers,
        shape.heads,
        on_small_budget=config.on_small_budget,
    )


def make_manifest(
    tokenizer: Tokenizer,
    identity: ModelIdentity,
    compressor: Compressor,
    prepared: PreparedContext,
    budget: Budget,
    cache: RaggedCache,
    seconds: dict[str, float],
    cut: int,
    system: str,
) -> Manifest:
    """Return the record of a compression: everything that a reader of the cache file needs to
    know.

    `cut` is the number of tokens that were cut from the end of the text, `system` the system
    message before it.
    """
    # `compress` identified the model with its tokenizer, so the template's hash is known.
    assert identity.template is not None
    model = prepared.model
    context = prepared.context
    config = prepared.config
    adapter = compressor.adapter
    model_name = identity.name
    if not model_name.isprintable():
        # For example a folder with a no-break space: readers refuse names that cannot be printed.
        model_name = repr(model_name)
    libraries = {"torch": torch, "transformers": transformers, "peft": peft}
    versions = {name: library.__version__ for name, library in libraries.items()}
    return Manifest(
        model=model_name,
        fingerprint=identity.fingerprint,
        rope=describe_rotation(model),
        template=identity.template,
        tokens_hash=hash_token_names(tokenizer, context.ids),
        dtype=identity.dtype,
        shape=vars(identity.shape),
        prefix=context.prefix_length,
        tokens=context.text_tokens,
        restore_tokens=budget.restore_tokens,
        ratio=str(budget.ratio),
        **config.to_json(),
        evictor=compressor.identity(model),
        adapter=adapter and adapter.identity(),
        **count_pairs_and_bytes(
            cache, context.prefix_length, context.num_tokens, config.prefix_policy
        ),
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        versions={"restorekv": __version__, **versions, "python": platform.python_version()},
        kv_dtype=config.kv_dtype,
        streaming_chunk=prepared.streaming_chunk,
        separator=context.separator,
        cut=cut,
        system=system,
        parts=[],
        earlier=0,
        windows=identity.windows,
        sliding_shape=identity.sliding_shape,
        **describe_states(cache),
    )
