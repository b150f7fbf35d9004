"""Answers to questions about compressed contexts: in a batch, or as a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError, join_words, warn
from restorekv.generation import decoding
from restorekv.generation.repetition import drop_repetition
from restorekv.generation.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    GREEDY,
    UNUSED_MODEL_FIELDS,
    SamplingConfig,
    TokenSampler,
    any_begins_with_space,
    asks_for_something,
    find_first_stop,
    make_samplers,
)
from restorekv.model.channels import ChannelReader, find_shown_ids
from restorekv.model.prompt import (
    Context,
    check_question,
    describe_type,
    encode_question,
    explain_text,
)
from restorekv.model.tokenize import TextStream

WARNED_MODELS: WeakSet[PreTrainedModel] = WeakSet()  # see `_warn_about_model_options`
# Options that have an effect only at a temperature above 0.
SAMPLING_ONLY = ("top_p", "top_k", "min_p")
ContextQuestion = tuple[Context, RaggedCache, str]


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about.

    Args:
        text: The answer without special tokens, and without the copies of a repetition.
        ids: All generated ids, with the EOS.
        finish: "stop" if the model, a stop string or a criterion ended the answer, "length" if the
            limit did, "repetition" if `stop_repeats` did.
        prompt_tokens: Tokens of the question with the template around it.
        logprobs: The log-probability of every id, None unless they were asked for.
        top: The likeliest ids at every place with their log-probabilities, None unless asked for.
    """

    text: str
    ids: tuple[int, ...]
    finish: str
    prompt_tokens: int
    logprobs: tuple[float, ...] | None = None
    top: tuple[dict[int, float], ...] | None = None

    def __str__(self) -> str:
        return self.text


def list_questions(question: str | Sequence[str]) -> list[str]:
    """Return one question, or a list of them, as a list."""
    if isinstance(question, Mapping):
        check_question(question)  # its error explains what to do with a chat message
    if not isinstance(question, str | list | tuple):
        fix = explain_text(question)
        if isinstance(question, Iterable) and not isinstance(question, bytes | bytearray):
            fix = "pass a list of them: list(questions)"
        raise RestoreKVError(
            f"A question must be text, or a list of texts, not {describe_type(question)}; {fix}."
        )
    return [question] if isinstance(question, str) else list(question)


def answer_greedily(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    cache: RaggedCache,
    questions: Sequence[str],
    max_new_tokens: int | Sequence[int] = DEFAULT_MAX_NEW_TOKENS,
    answer_prefix: str = "",
    graph: bool | None = None,
) -> list[str]:
    """Return one greedy answer per question; `cache` itself does not change."""
    requests = [(context, cache, question) for question in questions]
    answers = answer_questions(
        model, tokenizer, requests, max_new_tokens, answer_prefix=answer_prefix, graph=graph
    )
    # One sample of each question.
    return [samples[0].text for samples in answers]


def answer_questions(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    requests: Sequence[ContextQuestion],
    max_new_tokens: int | Sequence[int] = DEFAULT_MAX_NEW_TOKENS,
    *,
    answer_prefix: str = "",
    graph: bool | None = None,
    sampling: SamplingConfig = GREEDY,
) -> list[list[Answer]]:
    """Answer questions to one context or to several in one batch.

    Args:
        model: The model that made the caches.
        tokenizer: Its tokenizer.
        requests: A context, its cache and a question for each answer.
        max_new_tokens: How long an answer may be: one limit, or one for each question.
        answer_prefix: Text that every answer continues from. It is not part of the
            answer that is returned.
        graph: Decode in steps of a fixed shape, which a GPU replays as a CUDA graph. Only for
            greedy answers; None does so for those on a GPU.
        sampling: How tokens are chosen.

    Returns:
        For each question, as many answers as `sampling` has samples.
    """
    if graph and not sampling.plain:
        raise RestoreKVError(
            "graph=True always takes the most likely token; leave it or the other options out."
        )
    limits = decoding.parse_limits(max_new_tokens, len(requests))
    stop_ids = decoding.get_stop_ids(model, tokenizer)
    # One row of the batch for every sample of every question.
    prompts = []
    caches = []
    row_limits = []
    seeds = []
    prompt_ids = []  # with the context's, for penalties of repetition
    for (context, cache, question), limit in zip(requests, limits, strict=True):
        prompt = encode_question(tokenizer, context, question, answer_prefix)[0]
        for sample in range(sampling.samples):
            prompts.append(prompt)
            caches.append(cache)
            row_limits.append(limit)
            seeds.append(sampling.seed + sample)
            prompt_ids.append(torch.cat([context.ids[0], prompt])[None])
    samplers = make_samplers(sampling, tokenizer, prompt_ids, seeds, stop_ids)
    generated = decoding.generate_ids(
        model, tokenizer, caches, prompts, row_limits, graph=graph, samplers=samplers
    )
    answers = []
    for row, ids in enumerate(generated):
        sampler = samplers[row] if samplers else None
        answers.append(make_answer(tokenizer, ids.tolist(), stop_ids, len(prompts[row]), sampler))
    samples = sampling.samples
    return [answers[start : start + samples] for start in range(0, len(answers), samples)]


def make_answer(
    tokenizer: Tokenizer,
    ids: list[int],
    stop_ids: set[int],
    prompt_tokens: int,
    sampler: TokenSampler | None,
    keep_leading_space: bool = False,
) -> Answer:
    """Make an Answer from generated ids. Its text has no leading space and stops before a stop
    string, or before the repetition that ended it.

    Args:
        tokenizer: The model's tokenizer.
        ids: The generated ids, at least one.
        stop_ids: The EOS ids.
        prompt_tokens: How many tokens the question has, with the template around it.
        sampler: What chose the ids; None if the likeliest ones were taken.
        keep_leading_space: Leave a space at the start, as in a text's continuation.
    """
    repeated = sampler.count_repeated() if sampler else 0
    stop: Sequence[str] = ()
    if sampler is not None:
        keep_leading_space = keep_leading_space or sampler.sampling.keeps_leading_space
        stop = sampler.sampling.stop
    kept = ids[: len(ids) - repeated]
    continues = keep_leading_space or any_begins_with_space(stop)
    text = decoding.decode_answer(tokenizer, kept, stop_ids, continues=continues)
    cut = None
    logprobs = None
    top = None
    ended = ids[-1] in stop_ids
    if sampler is not None:
        # Found again in the final text: a stop string may end in the middle of a token.
        cut = find_first_stop(stop, text)
        ended = ended or cut is not None or sampler.ends()
        if sampler.sampling.logprobs is not None:
            logprobs = tuple(sampler.logprobs)
            top = tuple(sampler.top)
    finish = "length"
    # A stop string that comes before the repetition is what the caller asked for.
    if repeated and cut is None:
        finish = "repetition"
    elif ended:
        finish = "stop"
    text = text[:cut] if keep_leading_space else text[:cut].lstrip()
    if finish == "length" and not find_shown_ids(tokenizer, ids):
        warn(
            "An answer reached max_new_tokens before its final channel and is empty; allow more "
            "tokens."
        )
    return Answer(text, tuple(ids), finish, prompt_tokens, logprobs, top)


def refuse_other_eos(config: object, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Refuse a GenerationConfig that ends answers at other ids or lengths than the model's own one.

    Values that agree with the model's own one, such as several EOS ids, are not refused.

    Args:
        config: What was passed as `config`, if anything was.
        model: The model that answers.
        tokenizer: Its tokenizer.
    """
    if not isinstance(config, GenerationConfig):
        return
    own_lengths = (None, GenerationConfig().max_length, model.generation_config.max_length)
    if config.max_length not in own_lengths:
        raise RestoreKVError(
            "ask takes no max_length from a GenerationConfig; pass max_new_tokens, which limits "
            "the answer alone."
        )
    stop_ids = decoding.get_stop_ids(model, tokenizer)
    wanted = decoding.collect_ids(config.eos_token_id)
    if wanted and wanted != stop_ids:
        raise RestoreKVError(
            f"The eos_token_id of this model is {sorted(stop_ids)}, not {sorted(wanted)}; set "
            "model.generation_config.eos_token_id, or pass stop with a text."
        )


def _warn_about_model_options(model: PreTrainedModel) -> None:
    """Warn, once for each model, about settings of its own generation config that answers do not
    use, such as tokens that it must not write. The settings of sampling are not mentioned.
    """
    if model in WARNED_MODELS:
        return
    WARNED_MODELS.add(model)
    own = model.generation_config
    unused = []
    for name in UNUSED_MODEL_FIELDS:
        value = getattr(own, name, None)
        if asks_for_something(name, value) and value not in ([], {}):
            unused.append(name)
    if unused:
        them = "it" if len(unused) == 1 else "them"
        warn(
            f"Answers do not use {join_words(unused, 'and')} of the model's generation_config; "
            f"generate, transformers' own, uses {them}, and processors, criteria or stop can do "
            "the same here."
        )


def warn_about_truncated_output(written: Iterable[Answer], sampling: SamplingConfig) -> None:
    """Warn about answers that should be JSON or match a regular expression, but reached the limit
    first.
    """
    if sampling.json_schema is None and sampling.regex is None:
        return
    cut = sum(answer.finish == "length" for answer in written)
    if not cut:
        return
    who = "An answer" if cut == 1 else f"{cut} answers"
    if sampling.json_schema is not None:
        outcome = "before the end of its JSON and cannot be parsed"
    else:
        outcome = "and may not match its regex as a whole"  # it might be long enough already
    warn(f"{who} reached max_new_tokens {outcome}; allow more tokens.")


def warn_about_unused_options(
    model: PreTrainedModel, sampling: SamplingConfig, details: bool = True
) -> None:
    """Warn about options that change nothing: those of the model's own generation config, those of
    sampling at temperature 0, and logprobs without `details`, which would hold them.
    """
    _warn_about_model_options(model)
    if not sampling.temperature and sampling.samples > 1:
        warn(
            f"All {sampling.samples} answers to a question are the same, because temperature 0 "
            "always takes the most likely token; give a temperature above 0, such as 0.7."
        )
    idle = [name for name in SAMPLING_ONLY if getattr(sampling, name) != getattr(GREEDY, name)]
    if not sampling.temperature and idle:
        verb = "has" if len(idle) == 1 else "have"
        warn(
            f"{join_words(idle, 'and')} {verb} no effect, because temperature 0 always takes the "
            "most likely token; give a temperature above 0, such as 0.7."
        )
    if sampling.logprobs is not None and not details:
        warn("The log-probabilities are in Answer objects; pass details=True to get them.")


def to_result(answers: list[Answer], details: bool, samples: int) -> str | Answer | list[Any]:
    """Return the answers to one question: texts, or with `details` Answer objects, and a list only
    if there are several samples.
    """
    results = answers if details else [answer.text for answer in answers]
    return results if samples > 1 else results[0]


class AnswerStream(Iterator[str]):
    """Iterates over the pieces of an answer's text while it is generated.

    `answer` is None until the iterator has ended; then it is the complete `Answer`, with the reason
    why it ended. It stays None if the iterator was closed or failed.

    Args:
        pieces: The pieces of the text.
        finish_answer: Makes the complete answer after the last piece.
    """

    def __init__(
        self, pieces: Generator[str, None, None], finish_answer: Callable[[], Answer]
    ) -> None:
        self.pieces = pieces
        self.finish_answer = finish_answer
        self.answer: Answer | None = None
        self.closed = False

    def __next__(self) -> str:
        try:
            return next(self.pieces)
        except StopIteration:
            if self.answer is None and not self.closed:
                self.answer = self.finish_answer()
            raise
        except BaseException:
            # What was written so far is not an answer, also for who asks for the next piece.
            self.closed = True
            raise

    def close(self) -> None:
        """Stop generating; `answer` stays None."""
        self.closed = True
        self.pieces.close()


def stream_answer(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    request: ContextQuestion,
    max_new_tokens: int | Sequence[int] = DEFAULT_MAX_NEW_TOKENS,
    answer_prefix: str = "",
    sampling: SamplingConfig = GREEDY,
) -> AnswerStream:
    """Return an iterator over the pieces of one answer's text."""
    context, cache, question = request
    if sampling.samples > 1:
        raise RestoreKVError("Only one answer can be streamed; leave out samples.")
    prompt = encode_question(tokenizer, context, question, answer_prefix)[0]
    stop_ids = decoding.get_stop_ids(model, tokenizer)
    samplers = make_samplers(
        sampling, tokenizer, [torch.cat([context.ids[0], prompt])[None]], [sampling.seed], stop_ids
    )
    limits = decoding.parse_limits(max_new_tokens, 1)
    steps = decoding.generate_tokens(model, tokenizer, cache, [prompt], limits, samplers=samplers)
    token_ids: list[int] = []

    def record_tokens() -> Iterator[int]:
        # There is only one prompt, so the row number is not needed.
        for _, token in steps:
            token_ids.append(token)
            yield token

    def finish_answer() -> Answer:
        sampler = samplers[0] if samplers else None
        answer = make_answer(tokenizer, token_ids, stop_ids, len(prompt), sampler)
        warn_about_truncated_output([answer], sampling)
        return answer

    tokens = record_tokens()
    if sampling.copies:
        tokens = drop_repetition(tokens, tokenizer, sampling.copies)
    return AnswerStream(stream_text(tokenizer, tokens, stop_ids, sampling), finish_answer)


def stream_text(
    tokenizer: Tokenizer,
    tokens: Iterable[int],
    eos_ids: set[int],
    sampling: SamplingConfig = GREEDY,
) -> Generator[str, None, None]:
    """Yield the text of a growing answer as soon as it is certain."""
    text = GrowingText(tokenizer, eos_ids, sampling.stop, sampling.keeps_leading_space)
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if rest := text.rest():
        yield rest


class GrowingText:
    """The text of an answer while it is generated. It returns only what later tokens cannot change:
    whole characters, and nothing that may be the start of a stop string.

    The text has no leading space, unless `keep_leading_space`, and ends before any stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: set[int],
        stop_strings: Sequence[str] = (),
        keep_leading_space: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.stop_strings = stop_strings
        self.keep_leading_space = keep_leading_space
        continues = keep_leading_space or any_begins_with_space(stop_strings)
        self.stream = TextStream(tokenizer, skip_special_tokens=True, continues=continues)
        self.channels = ChannelReader(tokenizer)
        # An id of `eos_ids` that came last. It is part of the text only if another id follows.
        self.end: int | None = None
        self.sent = 0  # characters returned so far

    def push(self, token: int) -> str:
        """Return what has become certain with this token."""
        # Something follows the EOS id, so it did not end the answer and belongs to the text.
        if self.end is not None:
            self.add(self.end)
        self.end = token if token in self.eos_ids else None
        if self.end is None:
            self.add(token)
        written = self.stream.settled
        written = written[: find_first_stop(self.stop_strings, written)]
        # What may become a stop string is held back until the next token decides. It may include
        # the leading space that `strip` removes.
        held = count_uncertain(written, self.stop_strings)
        text = self.strip(written)
        return self.take_unsent(text, max(len(text) - held, 0))

    def add(self, token: int) -> None:
        """Add a token to the text, if it is shown."""
        if self.channels.push(token):
            self.stream.push(token)

    def rest(self) -> str:
        """Return the rest of the text after the last token."""
        written = self.stream.get_text()
        text = self.strip(written[: find_first_stop(self.stop_strings, written)])
        return self.take_unsent(text, len(text))

    def strip(self, text: str) -> str:
        """Remove the white space at the start of a text, unless the answer keeps it."""
        return text if self.keep_leading_space else text.lstrip()

    def take_unsent(self, text: str, end: int) -> str:
        """Return those of the first `end` characters that were not returned before."""
        start = self.sent
        # Never move back: a new token can make more characters at the end uncertain than before.
        self.sent = max(start, end)
        return text[start : self.sent]


def count_uncertain(text: str, stop_strings: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the start of a stop string."""
    longest = 0
    for each in stop_strings:
        for size in range(1, len(each)):
            if text.endswith(each[:size]):
                longest = max(longest, size)
    return longest
