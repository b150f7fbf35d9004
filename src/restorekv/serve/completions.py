"""`/v1/completions`: the plain model continues a text, without a chat template or documents.

This is the older form of OpenAI's API, which base models and editors still use. A prompt is read as
the tokenizer reads it, control tokens included: it is the whole of what the model gets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import CompletionUsage
from openai.types.completion_choice import Logprobs
from pydantic import Field, StrictInt, model_validator
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import OptionError
from restorekv.model.tokenize import TextStream, decode_token
from restorekv.serve import fields, replies, schemas
from restorekv.serve.engine import BusyError, Reply, ServedQuestion
from restorekv.serve.questions import IsGone, PendingAnswer, Questions, format_event
from restorekv.serve.requests import AnswerDefaults, SamplingRequest, Text
from restorekv.serve.service import explain_error
from restorekv.serve.variants import Variant

MAX_PROMPTS = 64
DEFAULT_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingRequest):
    """What `/v1/completions` takes; fields.py says what becomes of OpenAI's other fields."""

    model_config = fields.make_config(fields.COMPLETION_IGNORED, fields.COMPLETION_REFUSED)

    model: Text
    prompt: Text | list[Text] | list[StrictInt] | list[list[StrictInt]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        return fields.take_request(
            given, cls.model_fields, fields.COMPLETION_IGNORED, fields.COMPLETION_REFUSED
        )

    @model_validator(mode="after")
    def check_prompts(self) -> Self:
        prompts = self.list_prompts()
        why = ""
        if not all(prompts):
            why = "is empty; give a text to continue"
        elif len(prompts) > MAX_PROMPTS:
            why = f"has more than {MAX_PROMPTS} texts; send fewer"
        elif self.stream and len(prompts) > 1:
            why = "may have only one text in a stream; send them one by one"
        if why:
            raise fields.make_field_error("invalid_value", "prompt", why)
        return self

    def list_prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        given: Any = self.prompt
        is_single = isinstance(given, str) or not given or isinstance(given[0], int)
        return [given] if is_single else list(given)

    def list_options(self, defaults: AnswerDefaults) -> dict[str, Any]:
        options = super().list_options(defaults)
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return options


def add_completions(app: FastAPI, questions: Questions) -> None:
    """Add the path."""

    @app.post("/v1/completions", responses=schemas.describe_stream(schemas.TextCompletion))
    async def continue_text(request: Request, asked: CompletionRequest) -> Response:
        return await complete_text(questions, asked, request.is_disconnected)


async def complete_text(
    questions: Questions, request: CompletionRequest, is_gone: IsGone
) -> Response:
    """Continue the prompts of a request, whole or as a stream."""
    service = questions.service
    service.check_open()
    variant = Variant.parse(request.model, service.model_name)
    if variant.method:
        raise OptionError(
            f"A completion has no document to compress; use {service.model_name} as the model.",
            "model",
        )
    limit = min(request.max_tokens or DEFAULT_TOKENS, service.limits.tokens)
    pending: list[PendingAnswer] = []

    def begin(prompt: str | list[int]) -> PendingAnswer:
        question = ServedQuestion(
            documents=[],
            turns=(),
            text="",
            system="",
            limit=limit,
            # Each draws its own seed, so that equal prompts get different answers.
            sampling=request.make_sampling(service.defaults),
            prompt=prompt,
            has_seed=request.seed is not None,
        )
        return questions.begin(question, request.model, "cmpl", is_gone)

    prompts = request.list_prompts()
    if request.stream:  # of one prompt
        first = begin(prompts[0])
        return await first.start_stream(stream_text(first, request))
    try:
        for prompt in prompts:
            pending.append(await _begin_in_turn(partial(begin, prompt), pending))
        parts = [await each.wait_for_reply() for each in pending]
    finally:
        # If one fails or is refused, the others are not needed.
        for each in pending:
            each.question.cancelled = True
    whole = make_text_completion(pending[0].header, parts, service.engine.tokenizer)
    return JSONResponse(schemas.to_json(whole))


async def _begin_in_turn(
    begin: Callable[[], PendingAnswer], earlier: Sequence[PendingAnswer]
) -> PendingAnswer:
    """Begin an answer; if too many are waiting, wait for an earlier answer of the request first.

    This way a request may have more prompts than the queue has places.

    Raises:
        BusyError: Too many answers of other requests wait.
    """
    for each in earlier:
        with suppress(BusyError):
            return begin()
        await each.wait_for_reply()
    return begin()


async def stream_text(pending: PendingAnswer, request: CompletionRequest) -> AsyncIterator[str]:
    """Yield the server-sent events of a continued text."""
    header = pending.header
    streams = []
    for each in pending.texts:
        streams.append(TextStream(each.tokenizer, skip_special_tokens=True, continues=True))
    try:
        async for number, piece, rows in pending.iter_pieces():
            logprobs = None
            if request.logprobs is not None:
                logprobs = list_logprobs(rows, streams[number])
            choice = schemas.TextChoice(index=number, text=piece, logprobs=logprobs)
            yield format_event(make_text_chunk(header, [choice]))
        reply = pending.reply.result()
        for number, answer in enumerate(reply.answers):
            finish = replies.find_finish(answer)
            choice = schemas.TextChoice(index=number, text="", finish_reason=finish)
            yield format_event(make_text_chunk(header, [choice]))
        if request.includes_usage:
            chunk = make_text_chunk(header, [])
            chunk.usage = replies.count_usage(header, reply)
            chunk.restorekv = replies.make_cost(header, reply)
            yield format_event(chunk)
        yield "data: [DONE]\n\n"
    # Any error, such as a lack of memory: the status has been sent, so the stream itself must say
    # what went wrong.
    except Exception as error:
        yield format_event(schemas.make_problem("server_error", explain_error(error)))


def make_text_chunk(
    header: replies.AnswerHeader, choices: list[schemas.TextChoice]
) -> schemas.TextCompletion:
    """Return a piece of a streamed continuation."""
    return schemas.TextCompletion(
        id=header.id,
        object="text_completion",
        created=header.created,
        model=header.model,
        choices=choices,
    )


def make_text_completion(
    header: replies.AnswerHeader, parts: Sequence[Reply], tokenizer: Tokenizer
) -> schemas.TextCompletion:
    """Return the continuations of all prompts, those of the first prompt first."""
    choices = []
    usage = []
    for reply in parts:
        usage.append(replies.count_usage(header, reply))
        for answer in reply.answers:
            logprobs = None
            if answer.logprobs is not None:
                rows = zip(answer.ids, answer.logprobs, answer.top or (), strict=True)
                stream = TextStream(tokenizer, skip_special_tokens=True, continues=True)
                logprobs = list_logprobs(rows, stream)
            choices.append(
                schemas.TextChoice(
                    index=len(choices),
                    text=answer.text,
                    finish_reason=replies.find_finish(answer),
                    logprobs=logprobs,
                )
            )
    completion = make_text_chunk(header, choices)
    completion.usage = CompletionUsage(
        prompt_tokens=sum(each.prompt_tokens for each in usage),
        completion_tokens=sum(each.completion_tokens for each in usage),
        total_tokens=sum(each.total_tokens for each in usage),
    )
    completion.restorekv = replies.make_cost(header, parts[0])
    return completion


def list_logprobs(
    rows: Iterable[tuple[int, float, dict[int, float]]], answer: TextStream
) -> Logprobs:
    """Return log-probabilities in the form of this API: lists over the tokens.

    Args:
        rows: Ids with their log-probabilities and those of the likeliest ones.
        answer: The text of the answer before these tokens; they are added to it.
    """
    tokenizer = answer.tokenizer
    texts: list[str] = []
    values: list[float] = []
    offsets: list[int] = []
    likeliest: list[dict[str, float]] = []
    for token, value, top in rows:
        texts.append(decode_token(tokenizer, token))
        values.append(value)
        # The texts of single tokens do not add up to this: several tokens may make one character,
        # which begins with the first of them.
        offsets.append(len(answer.whole_text))
        answer.push(token)
        texts_of_top: dict[str, float] = {}
        for other, each in top.items():
            # Tokens may look alike, such as parts of characters; the likeliest of them counts.
            texts_of_top.setdefault(decode_token(tokenizer, other), each)
        likeliest.append(texts_of_top)
    return Logprobs(
        tokens=texts, token_logprobs=values, text_offset=offsets, top_logprobs=likeliest
    )
