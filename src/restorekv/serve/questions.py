"""Questions of requests: handed to the engine, and answered whole or as streams of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from restorekv.generation.answers import GrowingText
from restorekv.generation.repetition import CopyFilter
from restorekv.serve import replies, schemas
from restorekv.serve.engine import (
    ENDING,
    Reply,
    ServedQuestion,
    UnavailableError,
    ask_engine,
    settle_future,
)
from restorekv.serve.requests import ChatRequest, parse_chat
from restorekv.serve.service import ApiError, Service, explain_error

GRACE = 2.5  # seconds that answers may still take once the server ends
# Otherwise nginx buffers some kilobytes of a stream, and a cache may keep it.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")

# Returns whether the client has disconnected.
IsGone = Callable[[], Awaitable[bool]]


class Questions:
    """The link from requests to the engine, and the answers that are being written."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.answering: dict[asyncio.Future[Reply], ServedQuestion] = {}

    async def end(self) -> None:
        """Refuse what has not begun; after GRACE seconds, end the other answers with an error."""
        self.service.end()
        # `wait` refuses an empty list.
        if self.answering:
            await asyncio.wait(list(self.answering), timeout=GRACE)
        for question in list(self.answering.values()):
            question.cancelled = True
            settle_future(question.done, error=UnavailableError(ENDING))

    async def complete_chat(self, request: ChatRequest, is_gone: IsGone) -> Response:
        """Answer a chat request, whole or as a stream."""
        pending = await self.ask(request, "chatcmpl", is_gone)
        if request.stream:
            return await pending.start_stream(stream_chat(pending, request))
        reply = await pending.wait_for_reply()
        tokenizer = self.service.engine.tokenizer
        answer = replies.make_completion(pending.header, reply, tokenizer, request.logprobs)
        return JSONResponse(schemas.to_json(answer))

    async def ask(
        self,
        request: ChatRequest,
        kind: str,
        is_gone: IsGone,
        names: Sequence[str] | None = None,
    ) -> PendingAnswer:
        """Hand a request to the engine.

        Args:
            request: What is asked.
            kind: How the id of the answer begins.
            is_gone: Returns whether the client has disconnected.
            names: The fields of the messages, as `parse_chat` takes them.

        Returns:
            The answer; perhaps nothing of it is written yet.

        Raises:
            RestoreKVError: The request asks for what cannot be done.
            ApiError: A document is not there or took too long, or the client has disconnected.
            BusyError: Too many questions wait.
        """
        service = self.service
        chat = parse_chat(
            request, service.model_name, service.limits.tokens, service.defaults, names
        )
        service.check_open()

        # The server may end while documents are compressed; the client is then told so.
        async def is_over() -> bool:
            service.check_open()
            return await is_gone()

        getting = asyncio.ensure_future(service.get_documents(chat.documents, chat.variant))
        seconds = service.limits.seconds
        try:
            documents = await wait_unless_gone(getting, is_over, seconds)
        except BaseException as error:  # a running compression is finished anyway
            getting.cancel()
            if isinstance(error, TimeoutError):
                raise ApiError(
                    504,
                    f"The documents of this question were not compressed within {seconds:g} "
                    "seconds; upload them, and ask again once their status is processed.",
                ) from None
            raise

        question = ServedQuestion(
            documents=documents,
            turns=chat.turns,
            text=chat.question,
            system=chat.system,
            answer_prefix=chat.answer_prefix,
            limit=chat.limit,
            sampling=chat.sampling,
            has_seed=request.seed is not None,
        )
        return self.begin(question, request.model, kind, is_gone)

    def begin(
        self, question: ServedQuestion, model: str, kind: str, is_gone: IsGone
    ) -> PendingAnswer:
        """Have the engine begin to answer a question.

        Args:
            question: What is asked.
            model: The model id of the request.
            kind: How the id of the answer begins.
            is_gone: Returns whether the client has disconnected.
        """
        service = self.service
        # While it is in `answering`, the server's shutdown can settle it.
        reply, tokens = ask_engine(service.engine, question)
        self.answering[reply] = question
        reply.add_done_callback(self.answering.pop)

        header = replies.AnswerHeader(
            id=f"{kind}-{secrets.token_hex(12)}",
            model=model,
            created=int(time.time()),
            documents=question.documents,
        )
        texts = []
        for _ in range(question.sampling.samples):
            text = GrowingText(
                service.engine.tokenizer,
                service.engine.stop_ids,
                question.sampling.stop,
                keep_leading_space=question.continues_text,
            )
            texts.append(text)
        return PendingAnswer(
            question=question,
            reply=reply,
            tokens=tokens,
            texts=texts,
            header=header,
            is_gone=is_gone,
            seconds=service.limits.seconds,
        )


@dataclass
class PendingAnswer:
    """An answer that is being written.

    Args:
        question: What the engine was asked.
        reply: The engine's reply, once the answer is complete.
        tokens: What `on_token` got and is not read yet, with None at the end.
        texts: The text of each sample so far.
        header: What all parts of the answer begin with.
        is_gone: Returns whether the client has disconnected.
        seconds: How long it may take until its first token or its end.
        peeked: The item that `start_stream` took from the queue; empty once it is read.
    """

    question: ServedQuestion
    reply: asyncio.Future[Reply]
    tokens: asyncio.Queue[tuple | None]
    texts: list[GrowingText]
    header: replies.AnswerHeader
    is_gone: IsGone
    seconds: float
    peeked: list[tuple | None] = field(default_factory=list)

    async def wait_for_reply(self) -> Reply:
        """Return the reply; stop the writing if the client leaves or the time limit passes."""
        return await self._wait(self.reply)

    async def start_stream(self, events: AsyncIterator[str]) -> Response:
        """Return events as a response once the first token is there.

        This way an error of the question is raised while it can still decide the response's status.
        """
        first = await self._wait(asyncio.ensure_future(self.tokens.get()))
        # No token came: raise the error, if there was one.
        if first is None:
            self.reply.result()
        self.peeked = [first]
        return StreamingResponse(events, headers=STREAM_HEADERS, media_type="text/event-stream")

    async def iter_pieces(self) -> AsyncIterator[tuple[int, str, list[tuple]]]:
        """Yield (sample, piece of its text, its ids with `TokenSampler.latest_logprobs`).

        A caller that stops listening ends the writing.
        """
        likely: list[list[tuple]] = [[] for _ in self.texts]
        try:
            async for (sample, token, *more), is_copy in self._iter_tokens():
                for each in more:
                    # A token whose text is not certain yet sends nothing; its log-probabilities
                    # wait for it.
                    likely[sample].append((token, *each))
                piece = "" if is_copy else self.texts[sample].push(token)
                if piece:
                    yield sample, piece, likely[sample]
                    likely[sample] = []
            # The reply comes after the last token, and an error with it.
            await self.reply
            for number, text in enumerate(self.texts):
                rest = text.rest()
                if rest or likely[number]:
                    yield number, rest, likely[number]
        finally:
            # Also after the last piece, when it no longer matters.
            self.question.cancelled = True

    async def _iter_tokens(self) -> AsyncIterator[tuple[tuple, bool]]:
        """Yield what `on_token` got for each token, and whether the token is in one of the copies
        at the end of an answer that repeats itself; the answer's text leaves these out.
        """
        copies = self.question.sampling.copies
        filters: list[CopyFilter[tuple]] = [
            CopyFilter(text.tokenizer, copies) for text in self.texts if copies
        ]
        while True:
            item = self.peeked.pop() if self.peeked else await self.tokens.get()
            if item is None:  # all tokens have been read
                break
            if not copies:
                yield item, False
                continue
            for each in filters[item[0]].push(item[1], item):
                yield each, False
        for certain in filters:
            kept, dropped = certain.finish()
            for each in kept:
                yield each, False
            for each in dropped:
                yield each, True

    async def _wait(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future; if it does not come, stop the writing."""
        try:
            return await wait_unless_gone(future, self.is_gone, self.seconds)
        except BaseException:
            self.question.cancelled = True
            raise


async def stream_chat(pending: PendingAnswer, request: ChatRequest) -> AsyncIterator[str]:
    """Yield the server-sent events of a chat completion."""
    header = pending.header
    try:
        for number in range(len(pending.texts)):
            # OpenAI's clients expect the role before the first piece, in every sample.
            delta = ChoiceDelta(role="assistant", content="")
            yield format_event(replies.make_chunk(header, number, delta))
        async for number, piece, rows in pending.iter_pieces():
            likely = replies.describe_logprobs(rows, pending.texts[number].tokenizer)
            delta = ChoiceDelta(content=piece)
            yield format_event(replies.make_chunk(header, number, delta, likely=likely))
        reply = pending.reply.result()
        for number, answer in enumerate(reply.answers):
            chunk = replies.make_chunk(
                header, number, ChoiceDelta(), finish=replies.find_finish(answer)
            )
            yield format_event(chunk)
        if request.includes_usage:
            yield format_event(replies.make_usage_chunk(header, reply))
        yield "data: [DONE]\n\n"
    # Any error, such as a lack of memory: the status has been sent, so the stream itself must say
    # what went wrong.
    except Exception as error:
        yield format_event(schemas.make_problem("server_error", explain_error(error)))


async def wait_unless_gone(future: asyncio.Future[T], is_gone: IsGone, seconds: float) -> T:
    """Return the result of a future; raise if the client leaves or `seconds` pass first.

    Raises:
        ApiError: The client has disconnected.
        TimeoutError: It took too long.
    """

    async def wait_and_look() -> T:
        # Nothing here is cancelled when the client leaves, so check for that every second.
        while not future.done():
            await asyncio.wait([future], timeout=1.0)
            if not future.done() and await is_gone():
                raise ApiError(499, "The client disconnected.")
        return future.result()

    return await asyncio.wait_for(wait_and_look(), seconds)


def format_event(content: BaseModel) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(schemas.to_json(content), ensure_ascii=False)}\n\n"
