"""What `compress` returns: a small cache that answers questions, can be saved and says what it
holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from torch import Tensor
from transformers import (
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.adapters import load_adapter
from restorekv.compression.compressor import Compressor
from restorekv.compression.config import RECORDED, CompressionConfig
from restorekv.compression.eviction import COMPRESSORS, Eviction, make_compressor
from restorekv.compression.growing import Growth
from restorekv.compression.presets import resolve_preset
from restorekv.errors import CacheFileError, RestoreKVError, warn
from restorekv.generation import answers, decoding
from restorekv.generation.answers import Answer, AnswerStream
from restorekv.generation.chat import Chat
from restorekv.generation.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    SamplingConfig,
    SamplingOptions,
    take_limit,
)
from restorekv.generation.transformers_generate import (
    generate_answer,
    make_generate_inputs,
    number_positions,
)
from restorekv.model import attention, support
from restorekv.model.position_limits import check_question_positions
from restorekv.model.prompt import (
    Context,
    check_system_message,
    check_token_ids,
    check_vocabulary,
    encode_text,
)
from restorekv.model.rope import count_positions
from restorekv.model.shape import CacheShape, get_vocabulary_size
from restorekv.model.tokenize import check_model_and_tokenizer, hash_token_names
from restorekv.restore.adapter import RestoreAdapter
from restorekv.spec import drop_gate
from restorekv.storage import cache_file, portable
from restorekv.storage.cache_checks import check_model, check_tokenizer
from restorekv.storage.cache_file import CacheFile
from restorekv.storage.manifest import Manifest
from restorekv.storage.portable import Portable


@dataclass(frozen=True, repr=False, eq=False)
class CompressedContext:
    """A small cache of a text, with the model that made it.

    `cache` never changes: every question gets a fork of it, and the cache itself refuses to be
    written to.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    context: Context
    cache: RaggedCache
    manifest: Manifest
    compressor: Compressor | None = None  # what made it; None if it was loaded from a file

    def __post_init__(self) -> None:
        attention.plan_kernels(self.cache.full_attention)
        self.cache.lock()

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[True],
        answer_prefix: str = ...,
        **options: Unpack[SamplingOptions],
    ) -> AnswerStream: ...

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[False] = ...,
        answer_prefix: str = ...,
        graph: bool | None = ...,
        details: Literal[False] = ...,
        **options: Unpack[SamplingOptions],
    ) -> str: ...

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[False] = ...,
        answer_prefix: str = ...,
        graph: bool | None = ...,
        details: Literal[True],
        **options: Unpack[SamplingOptions],
    ) -> Answer: ...

    @overload
    def ask(
        self,
        question: list[str] | tuple[str, ...],
        max_new_tokens: int | Sequence[int] = ...,
        *,
        stream: Literal[False] = ...,
        answer_prefix: str = ...,
        graph: bool | None = ...,
        details: Literal[False] = ...,
        **options: Unpack[SamplingOptions],
    ) -> list[str]: ...

    @overload
    def ask(
        self,
        question: list[str] | tuple[str, ...],
        max_new_tokens: int | Sequence[int] = ...,
        *,
        stream: Literal[False] = ...,
        answer_prefix: str = ...,
        graph: bool | None = ...,
        details: Literal[True],
        **options: Unpack[SamplingOptions],
    ) -> list[Answer]: ...

    @overload
    def ask(
        self,
        question: str | list[str] | tuple[str, ...],
        max_new_tokens: int | Sequence[int] = ...,
        *,
        samples: int,
        answer_prefix: str = ...,
        details: bool = ...,
        **options: Unpack[SamplingOptions],
    ) -> list[Any]: ...

    def ask(
        self,
        question: str | Sequence[str],
        max_new_tokens: int | Sequence[int] = DEFAULT_MAX_NEW_TOKENS,
        *,
        stream: bool = False,
        answer_prefix: str = "",
        graph: bool | None = None,
        details: bool = False,
        **options: Any,
    ) -> str | list[Any] | Answer | AnswerStream:
        """Answer one question, or a list of questions in one batch.

        With samples=N above 1, each question gets a list of N answers.

        >>> small.ask("What is the code of the market?", max_new_tokens=16)
        'market 46.'
        >>> "".join(small.ask("What is the trade of Agnes?", stream=True, temperature=0.3, seed=1))
        'Agnes teacher.'

        Args:
            question: A question, or a list of questions.
            max_new_tokens: How many tokens an answer may have: one limit, or one for each question.
                OpenAI's name for it, `max_tokens`, works too.
            stream: Return the pieces of one answer as they are written.
            answer_prefix: Text that every answer continues from. It is not part of the
                answer that is returned.
            graph: Decode in steps of a fixed shape, which a GPU replays as a CUDA graph. Only for
                greedy answers; None does so for those on a GPU.
            details: Return `Answer` objects, with ids and log-probabilities.
            **options: How tokens are chosen, greedily by default: fields of `SamplingConfig`, or
                `config`, a `SamplingConfig` or transformers' `GenerationConfig`.

        Returns:
            The answer to one question, or a list of answers to a list of questions. With
            stream=True, an iterator; after its last piece, its `answer` says why the answer ended.
        """
        max_new_tokens = take_limit(options, max_new_tokens)
        sampling = SamplingConfig.make(**options)
        support.refuse_cast_model(self.model, self.manifest.dtype)
        answers.refuse_other_eos(options.get("config"), self.model, self.tokenizer)
        single = isinstance(question, str)
        rows = [(self.context, self.cache, each) for each in answers.list_questions(question)]
        answers.warn_about_unused_options(self.model, sampling, details or stream)
        # Pieces of several answers would arrive mixed, and answers with details or from a graph
        # only exist as a whole.
        if stream:
            if not single or details or graph:
                raise RestoreKVError(
                    "Only the text of a single answer can be streamed; ask other questions one "
                    "by one."
                )
            return answers.stream_answer(
                self.model, self.tokenizer, rows[0], max_new_tokens, answer_prefix, sampling
            )
        written = answers.answer_questions(
            self.model,
            self.tokenizer,
            rows,
            max_new_tokens,
            answer_prefix=answer_prefix,
            graph=graph,
            sampling=sampling,
        )
        answers.warn_about_truncated_output(chain.from_iterable(written), sampling)
        results = [answers.to_result(each, details, sampling.samples) for each in written]
        return results[0] if single else results

    async def ask_async(
        self,
        question: str | Sequence[str],
        max_new_tokens: int | Sequence[int] = DEFAULT_MAX_NEW_TOKENS,
        **options: Any,
    ) -> Any:
        """Answer as `ask` does, with its options, while other tasks of the event loop continue.

        Cancelling the task ends the answers, too.
        """
        if options.get("stream"):
            raise RestoreKVError("Use stream_async to get the pieces of an answer.")
        return await decoding.run_in_thread(partial(self.ask, question, max_new_tokens, **options))

    async def stream_async(
        self, question: str, max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS, **options: Any
    ) -> AsyncIterator[str]:
        """Yield the pieces of an answer as they are written, while other tasks of the event loop
        continue. The options are those of `ask`.
        """
        if not options.pop("stream", True):
            raise RestoreKVError("Use ask_async to get an answer as a whole.")
        pieces = self.ask(question, max_new_tokens, stream=True, **options)
        # Each piece is waited for in a thread, so the event loop is free between two tokens.
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    @property
    def digest(self) -> str:
        """16 hex digits of a SHA-256 over the cache, its text and where questions begin."""
        return cache_file.hash_cache(self.cache, self.context)

    def chat(self, system: str | None = "") -> Chat:
        """Start a conversation; `system` is said between the text and the first question.

        >>> chat = small.chat()
        >>> chat.ask("What is the code of the market?")
        'market 46.'
        >>> len(chat.messages)
        2
        """
        return Chat(self, check_system_message(system))

    def append(
        self,
        text: str | Sequence[int] | Tensor,
        *,
        restore: Literal["last", "every", "none"] = "last",
        adapter: RestoreAdapter | str | Path | None = "auto",
        evictor: str | None = None,
    ) -> CompressedContext:
        """Return a new context with a text appended to this one, which does not change.

        Only the new part is prefilled and scored, with the config of this context. Pairs of the
        text that are already held stay, and the new part is evicted to the rest of the new
        context's budget.

        >>> text = " The code of the harbor is 12, and the code of the tower is 31." * 3
        >>> longer = small.append(text)
        >>> longer.manifest.parts[0] == small.manifest.tokens
        True

        Args:
            text: A text, or its token ids.
            restore: What becomes of the restore tokens of earlier parts. "last" drops them when the
                new part has its own, "every" keeps them as ordinary pairs, "none" drops them and
                makes no new ones.
            adapter: As in `compress`, except that "auto" is the adapter that made this cache.
            evictor: The spec of an evictor other than the one that made this cache.

        Raises:
            RestoreKVError: The text is empty, the cache was made by a method that cannot grow, or
                the model's weights or dtype have changed since it was made.
        """
        if isinstance(text, str):
            ids = encode_text(self.tokenizer, text, continues=True)
        else:
            ids = check_token_ids(self.tokenizer, text)
        if not ids.shape[-1] or (isinstance(text, str) and not text.strip()):
            raise RestoreKVError("There is nothing to append; give a text with at least one word.")
        check_vocabulary(self.model, ids)
        return self.append_ids(ids, restore, adapter, evictor)

    def append_ids(
        self,
        ids: Tensor,
        restore: str = "last",
        adapter: RestoreAdapter | str | Path | None = "auto",
        evictor: str | None = None,
        separator: str | None = None,
        fix: str = "append more at once",
    ) -> CompressedContext:
        """Return a new context with the tokens `ids` (1, t) of a text or conversation appended.

        Args:
            ids: The tokens of the new part, which are not checked.
            restore: As in `append`.
            adapter: As in `append`.
            evictor: As in `append`.
            separator: What separates the new context from later questions, if the new part is a
                conversation that they continue. None if it is a text: then it is the separator
                that was used before any conversation was appended.
            fix: What error messages suggest if the new part is too short for its budget.
        """
        old = self.manifest
        # The model may have changed since the cache was made, for example because a LoRA was
        # loaded or merged.
        check_model("The cache", old, self.model)
        if restore == "none":
            adapter = None
        eviction = self._eviction_for_append(adapter, evictor)
        # What was evicted stays evicted: the old pairs are kept unchanged, and the new part gets
        # the rest of the budget of the whole.
        growth = Growth(
            model=self.model,
            tokenizer=self.tokenizer,
            context=self.context,
            cache=self.cache,
            eviction=eviction,
            restore=restore,
            ids=ids,
            ratio=Fraction(old.ratio),
            fix=fix,
        )
        cache = growth.run()
        context = growth.grown_context
        # `Chat.fold` appends the conversation so far, so the user's next message follows without a
        # separator. If a text is appended after that, questions need the earlier separator again.
        before_fold = old.folded_separator
        if before_fold is None:
            before_fold = old.separator
        if separator is None:
            context = replace(context, separator=before_fold)
        else:
            context = replace(context, separator=separator)
        # If the old cache was quantized to 8 bits, so is the grown one.
        attention.quantize_context(cache, old.kv_dtype, CacheShape.from_model(self.model).groups)
        manifest = old.for_derived_cache(
            context,
            cache,
            seconds={name: round(value, 4) for name, value in growth.seconds.items()},
            parts=[*(old.parts or [old.tokens]), ids.shape[-1]],
            earlier=growth.carried_restore_pairs,
            separator=context.separator,
            folded_separator=None if separator is None else before_fold,
            tokens_hash=hash_token_names(self.tokenizer, context.ids),
            streaming_chunk=None,
            adapter=eviction.adapter and eviction.adapter.identity(),
            evictor=eviction.identity(self.model),
        )
        return CompressedContext(self.model, self.tokenizer, context, cache, manifest, eviction)

    def _eviction_for_append(
        self, adapter: RestoreAdapter | str | Path | None, evictor: str | None
    ) -> Eviction:
        """Return the eviction for an appended part: the one that made this cache, or one made from
        its manifest if the cache was loaded or a different evictor or adapter is wanted.
        """
        original = self.compressor
        if isinstance(original, Eviction) and evictor is None and adapter in ("auto", None):
            # Reuse the original evictor and adapter objects. The new part is prefilled in one go,
            # and may need scores even if the first part kept everything.
            return replace(
                original,
                config=replace(original.config, streaming_chunk=None),
                scoring=True,
                adapter=original.adapter if adapter == "auto" else None,
            )
        manifest = self.manifest
        spec = drop_gate(manifest.evictor)
        # The cache of a method that is not an evictor cannot grow with one either.
        has_evictor = spec.partition(":")[0] not in COMPRESSORS
        if evictor and has_evictor:
            spec = resolve_preset(evictor)
        eviction = make_compressor(spec)
        if not isinstance(eviction, Eviction):
            raise RestoreKVError(
                f"{spec} makes a cache that cannot grow; compress the whole text with an evictor."
            )
        recorded_config: dict[str, Any] = {field: getattr(manifest, field) for field in RECORDED}
        eviction = replace(eviction, config=CompressionConfig(**recorded_config))
        identity = eviction.identity(self.model)
        if identity != manifest.evictor:
            warn(f"The cache was made with {manifest.evictor}, and is extended with {identity}.")
        recorded_adapter = manifest.adapter
        if adapter is None or (adapter == "auto" and recorded_adapter is None):
            return eviction
        # After `Chat.fold` the separator is empty. That says nothing against the adapter, so an
        # empty separator is not compared with the one that it was trained with.
        loaded = load_adapter(self.model, adapter, eviction, None, manifest.separator or None)
        if recorded_adapter is None:
            return replace(eviction, adapter=loaded)
        if loaded is None:
            raise RestoreKVError(
                "The adapter that made this cache is not available; pass its folder, or "
                "adapter=None."
            )
        # The cache may have been made with only the first of the adapter's restore tokens.
        if recorded_adapter["restore_tokens"] < loaded.restore_tokens:
            loaded = loaded.truncate(recorded_adapter["restore_tokens"])
        if loaded.identity()["hash"] != recorded_adapter["hash"]:
            warn(
                f"The cache was made with the adapter {recorded_adapter['hash']}, and "
                f"is extended with {loaded.identity()['hash']}; pass the original adapter's folder "
                "(adapter=FOLDER), or adapter=None to restore nothing."
            )
        return replace(eviction, adapter=loaded)

    @property
    def kept(self) -> Tensor:
        """Which pairs of the full cache are held: (L, H, S + T) bool."""
        return self.cache.mark_held(self.context.num_tokens)

    def inputs(
        self, question: str, answer_prefix: str = "", plain: bool = False
    ) -> dict[str, Tensor]:
        """Return inputs for model.generate(**compressed.inputs(question),
        past_key_values=compressed.cache.fork()).

        With plain=True, pass compressed.cache.to_dynamic_cache() instead, which does not know how
        many tokens were seen. The answer is result[:, input_ids.shape[1]:].

        The ids are placeholders, then the ids of text and question. With plain=True there are
        placeholders instead of the text, so transformers' penalties count question and answer
        alone. Some models that take images too also get `position_ids`.
        """
        support.refuse_cast_model(self.model, self.manifest.dtype)
        inputs = make_generate_inputs(
            self.tokenizer, self.context, self.cache, question, answer_prefix, plain
        )
        # The same check as in `ask`. Unless plain, ids span all that the cache has seen.
        end = inputs["input_ids"].shape[1]
        if plain:
            end = int(inputs["position_ids"][0, -1]) + 1
        first = self.cache.get_seq_length()
        check_question_positions(self.model, [first], [end - first], [0])
        inputs |= number_positions(self.model, inputs)
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def generate(self, question: str, answer_prefix: str = "", **options: Any) -> str:
        """Return the answer of transformers' own `generate` with its options.

        It is greedy and has at most 128 tokens, unless the options or their generation_config say
        otherwise. All other options that they leave out come from the model's generation_config.
        """
        support.refuse_cast_model(self.model, self.manifest.dtype)
        return generate_answer(
            self.model,
            self.tokenizer,
            self.context,
            self.cache,
            question,
            answer_prefix=answer_prefix,
            options=options,
        )

    def portable(self) -> Portable:
        """Return the cache as an ordinary prefix of m tokens for other engines. This needs
        allocation="per-head", so that all heads hold the same number of pairs.
        """
        return portable.make_portable(self.model, self.context, self.cache, self.manifest)

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file. If anything goes wrong, a file that was there
        stays; a file that is not a cache is never replaced.
        """
        cache_file.write_cache_file(path, self.cache, self.context, self.manifest)

    @classmethod
    def load(
        cls, file: str | Path | CacheFile, model: PreTrainedModel, tokenizer: Tokenizer
    ) -> CompressedContext:
        """Load a cache file.

        Args:
            file: The path of a cache file, or a `CacheFile` that was read.
            model: The model that the cache was made with.
            tokenizer: Its tokenizer.

        Raises:
            CacheFileError: The file is damaged, contradicts itself, or was made with a different
                model.
        """
        check_model_and_tokenizer(model, tokenizer)
        # Everything that a stranger's file claims is checked before the first tensor is used.
        stored = file if isinstance(file, CacheFile) else cache_file.open_cache_file(file)
        check_fit(stored, model, tokenizer)
        support.prepare_model(model)
        return cls(
            model, tokenizer, stored.context, stored.make_cache(model.device), stored.manifest
        )

    def __repr__(self) -> str:
        m = self.manifest
        method = m.evictor
        if m.restore_tokens:
            method += f" + {m.restore_tokens} restore tokens"
        ratio = f"r = {float(Fraction(m.ratio)):g}"
        # What competes for the budget: the text's pairs, and under "counted" the chat prefix's too.
        columns = m.tokens
        prefix = f", and {m.pairs_of_prefix:,} of the chat prefix"
        if m.prefix_policy == "counted":
            columns += m.prefix
            prefix = ", chat prefix included"
        full = columns * m.shape["layers"] * m.shape["heads"]
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in m.seconds.items())
        return (
            f"CompressedContext({method}, {ratio}, prefix {m.prefix_policy})\n"
            f"  tokens   T = {m.tokens:,}, chat prefix S = {m.prefix:,}\n"
            f"  pairs    {m.pairs:,} of {full:,} ({100 * m.pairs / full:.1f} %){prefix}\n"
            f"  bytes    {format_bytes(m.bytes_held)}; full cache {format_bytes(m.bytes_full)}\n"
            f"  seconds  {phases}"
        )


def check_fit(stored: CacheFile, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Refuse a model or a tokenizer other than the one that the cache was computed with."""
    path = stored.path
    manifest = stored.manifest
    check_model(path, manifest, model)
    vocabulary = get_vocabulary_size(model)
    for ids in (stored.context.ids, stored.context.suffix_ids):
        if ids.numel() and int(ids.max()) >= vocabulary:
            raise CacheFileError(
                f"{path} has token ids that the model's vocabulary lacks; compress the context "
                "again."
            )
    check_tokenizer(path, manifest, stored.context, tokenizer)
    # `compress` makes no cache that reaches beyond the model's positions, but a file can claim
    # anything.
    reach = stored.context.num_tokens + manifest.offset
    limit = count_positions(model.config)
    if manifest.offset and reach > limit:
        raise CacheFileError(
            f"{path} moves questions to position {reach:,}, and the model has {limit:,}; compress "
            "the context again."
        )


def format_bytes(count: float) -> str:
    """Return a number of bytes for people: 1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def describe_bytes(held: int, full: int) -> str:
    """Return the bytes of a cache and their share of the full cache's, for people.

    A cache that keeps every pair is larger than the full one: it holds each pair's position, too.
    """
    share = f"{held / full:.1%}"
    if held > full:
        share += ", with the position of each pair"
    return f"{format_bytes(held)} of {format_bytes(full)} ({share})"
