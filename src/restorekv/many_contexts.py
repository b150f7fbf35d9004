"""Several compressed contexts at once: questions to all of them in one batch, or one context of all
their texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Literal, Unpack, overload

from restorekv.compression.budget import parse_ratio
from restorekv.compression.growing import compose_caches
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, UnlikeContextsError
from restorekv.generation import answers
from restorekv.generation.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    SamplingConfig,
    SamplingOptions,
    take_limit,
)
from restorekv.model import attention
from restorekv.model.prompt import hash_template
from restorekv.model.shape import CacheShape
from restorekv.model.support import refuse_cast_model
from restorekv.model.tokenize import hash_token_names
from restorekv.storage.manifest import Manifest

Questions = list[str] | tuple[str, ...]
# What composed contexts must have in common besides the model.
ALIKE = (
    "evictor",
    "adapter",
    "prefix_policy",
    "allocation",
    "restore_from",
    "offset",
    "kv_dtype",
    "separator",
)


@overload
def ask_many(
    asked: Iterable[tuple[CompressedContext, str]],
    max_new_tokens: int = ...,
    answer_prefix: str = ...,
    details: Literal[False] = ...,
    **options: Unpack[SamplingOptions],
) -> list[str]: ...


@overload
def ask_many(
    asked: Iterable[tuple[CompressedContext, Questions]],
    max_new_tokens: int = ...,
    answer_prefix: str = ...,
    details: Literal[False] = ...,
    **options: Unpack[SamplingOptions],
) -> list[list[str]]: ...


@overload
def ask_many(
    asked: Iterable[tuple[CompressedContext, str | Questions]],
    max_new_tokens: int = ...,
    answer_prefix: str = ...,
    details: bool = ...,
    *,
    samples: int = ...,
    **options: Unpack[SamplingOptions],
) -> list[Any]: ...


def ask_many(
    asked: Iterable[tuple[CompressedContext, str | Sequence[str]]],
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    answer_prefix: str = "",
    details: bool = False,
    **options: Any,
) -> list[Any]:
    """Answer the questions of several compressed contexts in one batch.

    The answers are the same as if each context were asked alone. The contexts may differ in
    everything except the model and its chat template, and may appear more than once.

    Args:
        asked: Pairs of a compressed context and its question, or a list of its questions.
        max_new_tokens: How many tokens an answer may have.
        answer_prefix: Text that every answer continues from. It is not part of the
            answer that is returned.
        details: Return `Answer` objects, with ids and log-probabilities.
        **options: How tokens are chosen, as `ask` takes it.

    Returns:
        For each pair, one answer for one question, a list for a list.

    Raises:
        RestoreKVError: Something is not a pair of a context and its questions, or the contexts
            differ in their model or chat template.
    """
    max_new_tokens = take_limit(options, max_new_tokens)
    sampling = SamplingConfig.make(**options)
    pairs = _check_pairs(asked)
    questions_of = [answers.list_questions(questions) for _, questions in pairs]
    rows = []
    for (context, _), questions in zip(pairs, questions_of, strict=True):
        # Neighbors with one context share its pairs in the batch, so questions stay together.
        rows += [(context.context, context.cache, question) for question in questions]
    # All lists of questions are empty, and so are the lists of answers.
    if not rows:
        return [[] for _ in pairs]
    first = _check_one_model([context for context, _ in pairs])
    for context, _ in pairs:
        refuse_cast_model(context.model, context.manifest.dtype)
    answers.refuse_other_eos(options.get("config"), first.model, first.tokenizer)
    answers.warn_about_unused_options(first.model, sampling, details)
    written = answers.answer_questions(
        first.model,
        first.tokenizer,
        rows,
        max_new_tokens,
        answer_prefix=answer_prefix,
        sampling=sampling,
    )
    answers.warn_about_truncated_output(chain.from_iterable(written), sampling)
    # The answers come in the order of the rows: first those of the first pair, then the next.
    remaining = iter(written)
    results = []
    for (_, asked_as), questions in zip(pairs, questions_of, strict=True):
        own = [answers.to_result(next(remaining), details, sampling.samples) for _ in questions]
        results.append(own[0] if isinstance(asked_as, str) else own)
    return results


def _check_pairs(asked: object) -> list[tuple[CompressedContext, str | Sequence[str]]]:
    """Return pairs of a compressed context and its questions as a list; refuse anything else."""
    pairs: list[Any] = list(asked) if isinstance(asked, Iterable) else [asked]
    for each in pairs:
        if (
            not isinstance(each, tuple | list)
            or len(each) != 2
            or not isinstance(each[0], CompressedContext)
        ):
            raise RestoreKVError(
                "ask_many takes a list of pairs, each of a compressed context and its questions."
            )
    return pairs


def compose(contexts: Sequence[CompressedContext], *more: object) -> CompressedContext:
    """Join contexts that were compressed separately, as if their texts followed each other.

    Nothing is prefilled again: keys are rotated to their new positions, and every context keeps its
    restore cache. So, unlike in a context that was compressed in one piece, no text has attended to
    the texts before it.

    >>> both = compose([small, small])
    >>> both.manifest.tokens == 2 * small.manifest.tokens
    True

    Raises:
        RestoreKVError: The contexts differ in model, chat prefix, evictor, adapter or config, or
            the model's keys cannot be moved.
    """
    if more:
        raise RestoreKVError("compose takes one list: compose([first, second]).")
    if not isinstance(contexts, Iterable):
        raise RestoreKVError(
            f"compose needs a list of compressed contexts, not {type(contexts).__name__}."
        )
    start = time.perf_counter()
    contexts = list(contexts)
    if not contexts:
        raise RestoreKVError("There is nothing to compose; give at least one compressed context.")
    first = _check_one_model(contexts)
    manifests = [each.manifest for each in contexts]
    refuse_unlike(manifests)
    # A later `append` uses the compressor and adapter of the last context that has an adapter, or
    # else of the last one that lost pairs. Contexts that were kept whole may have others.
    restored_contexts = [each for each in contexts if each.manifest.adapter]
    compressed_contexts = [each for each in contexts if not _kept_whole(each.manifest)]
    continued = (restored_contexts or compressed_contexts or contexts)[-1]
    context, cache = compose_caches(first.model, [(each.context, each.cache) for each in contexts])
    shape = CacheShape.from_model(first.model)
    attention.quantize_context(cache, manifests[0].kv_dtype, shape.groups)
    # The ratio of the whole is the mean of the ratios, each weighted by its text's length.
    parts: list[int] = []
    held = Fraction(0)
    restored = 0
    for each in manifests:
        parts += each.parts or [each.tokens]
        held += Fraction(each.ratio) * each.tokens
        restored += each.earlier + each.restore_tokens
    # A text that fits into one part was read whole, beside longer ones of the same config.
    chunks = [each.streaming_chunk for each in manifests if each.streaming_chunk is not None]
    manifest = manifests[0].for_derived_cache(
        context,
        cache,
        streaming_chunk=max(chunks, default=None),
        ratio=str(parse_ratio(held / context.text_tokens)),
        seconds={"compose": round(time.perf_counter() - start, 4)},
        cut=sum(each.cut for each in manifests),
        tokens_hash=hash_token_names(first.tokenizer, context.ids),
        parts=parts,
        # The restore pairs of all contexts but the last are ordinary pairs of the whole by now.
        earlier=restored - cache.restore_length,
        evictor=continued.manifest.evictor,
        adapter=continued.manifest.adapter,
        # The whole ends as the last text does.
        folded_separator=manifests[-1].folded_separator,
    )
    return CompressedContext(
        first.model, first.tokenizer, context, cache, manifest, continued.compressor
    )


def refuse_unlike(manifests: Sequence[Manifest]) -> None:
    """Raise UnlikeContextsError unless caches were made alike, so that they can be composed."""
    for name in ALIKE:
        compared = manifests
        if name in ("evictor", "adapter"):
            # A context that kept every pair had nothing to evict and nothing to restore.
            compared = [each for each in manifests if not _kept_whole(each)]
        for each in compared:
            if getattr(each, name) != getattr(compared[0], name):
                raise UnlikeContextsError(_explain_difference(name, compared[0], each))


def _kept_whole(manifest: Manifest) -> bool:
    """Return whether a cache has every pair of its text and nothing else."""
    return manifest.adapter is None and Fraction(manifest.ratio) == 1


def _explain_difference(name: str, first: Manifest, other: Manifest) -> str:
    """Return the sentence about two caches that differ in a field.

    If their ratios differ too, it names these, since they may be the reason: adapter="auto"
    restores nothing at high ratios, and a text too short for its ratio is kept whole.
    """
    if first.ratio == other.ratio:
        return f"The contexts differ in {name}; compress them alike to compose them."
    values = []
    for each in (first, other):
        value = getattr(each, name)
        if name == "adapter":
            value = value["hash"] if value else "none"
        values.append(f"{value} at ratio {float(Fraction(each.ratio)):g}")
    fix = "alike"
    if name == "adapter" and first.adapter and other.adapter:
        fix = "with the same adapter"
    elif name == "adapter":
        fix = "at one ratio, or with adapter=None (in the shell --adapter none),"
    return (
        f"The contexts differ in {name}, {values[0]} and {values[1]}; compress them {fix} to "
        "compose them."
    )


def _check_one_model(contexts: Sequence[CompressedContext]) -> CompressedContext:
    """Return the first of them; refuse several models or chat templates."""
    first = contexts[0]
    for each in contexts:
        if not isinstance(each, CompressedContext):
            raise RestoreKVError(
                "A compressed context, as compress returns it, is needed, not "
                f"{type(each).__name__}."
            )
        # The object and not its name: two loads of one model have weights in different places.
        if each.model is not first.model:
            raise RestoreKVError(
                "A batch has one model; load the cache files with the same model object."
            )
        if hash_template(each.tokenizer) != hash_template(first.tokenizer):
            raise RestoreKVError(
                "A batch has one chat template; load the cache files with the same tokenizer."
            )
    return first
