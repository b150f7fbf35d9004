"""What requests do: uploads are stored and compressed, questions answered whole or as streams."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import UploadFile
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from restorekv.errors import RestoreKVError
from restorekv.generation.answers import Growing
from restorekv.readers.extract import CACHE, TEXT, extract_text, find_kind, printable_name
from restorekv.serve import replies, schemas
from restorekv.serve.documents import document_hash
from restorekv.serve.engine import (
    ENDING,
    AwayError,
    BusyError,
    Document,
    Engine,
    Question,
    Reply,
    begin,
    explain_lack,
    settle,
)
from restorekv.serve.index import FAILED, PROCESSED
from restorekv.serve.requests import Attached, ChatRequest, conversation
from restorekv.serve.store import Store, Upload
from restorekv.serve.variants import Variant

LOG = logging.getLogger("restorekv.serve")
GRACE = 2.5  # seconds that answers may still take once the server ends
PATIENCE = 5.0  # seconds until an upload is tried again whose engine was away
# For files in requests, which may take long to read.
READERS = ThreadPoolExecutor(2, "restorekv-read")
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a request may cost: bytes of an upload or a body, tokens of an answer, seconds of a
    request.

    At most `waiting` requests wait for documents, and as many questions for answers.
    """

    upload: int = 64 << 20
    tokens: int = 1024
    seconds: float = 600.0
    waiting: int = 256


class ApiError(Exception):
    """An answer other than success, as OpenAI's API writes it."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers


class Service:
    """Connects requests with the store and the engine."""

    def __init__(
        self, engine: Engine, store: Store, base: str, default: Variant, limits: Limits
    ) -> None:
        self.engine = engine
        self.store = store
        self.base = base
        self.default = default
        self.limits = limits
        self.tasks: set[asyncio.Task] = set()
        self.wanting = 0  # requests whose documents are not at hand yet
        self.answering: dict[asyncio.Future, Question] = {}
        self.ending = False

    async def end(self) -> None:
        """Refuses what has not begun, lets answers be written for GRACE seconds, and ends the
        others with an error.
        """
        self.ending = True
        self.engine.end()
        if self.answering:
            await asyncio.wait(list(self.answering), timeout=GRACE)
        for question in list(self.answering.values()):
            question.cancelled = True
            settle(question.done, error=AwayError(ENDING))

    def check_open(self) -> None:
        """Refuses to begin anything once the server ends."""
        if self.ending:
            raise AwayError(ENDING)

    async def create(self, file: UploadFile, purpose: str, seconds: int | None) -> Upload:
        """Stores an upload and begins to compress it."""
        self.check_open()
        if (file.size or 0) > self.limits.upload:
            raise ApiError(413, f"The file is larger than {self.limits.upload:,} bytes; split it.")
        name = printable_name(file.filename or "file")
        try:
            made = await asyncio.to_thread(
                self.store.add, name, printable_name(purpose), file.file, seconds
            )
        except (OSError, sqlite3.Error, RestoreKVError) as error:
            if (lack := explain_lack(error)) is None:
                raise
            raise ApiError(
                lack[0], lack[1].replace("The server", "The server cannot store the file: it", 1)
            ) from None
        self.begin(made)
        return made

    def begin(self, upload: Upload) -> None:
        """Begins to compress an upload in the background."""
        task = asyncio.create_task(self.process(upload))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def process(self, upload: Upload) -> None:
        """Compresses an upload as the default variant."""
        try:
            await self.engine.document(upload.sha256, self.default, lambda: self.content(upload))
        except AwayError:
            if self.ending:  # the next start goes on with it
                return
            await asyncio.sleep(PATIENCE)
            if self.store.is_here(upload):
                self.begin(upload)
        except Exception as error:  # whatever it is, the file has not been processed
            self.store.settle(upload, FAILED, problem_of(error))
        else:
            self.store.settle(upload, PROCESSED)

    def content(self, upload: Upload) -> str | Path:
        """Returns the text of an upload, or the path of a cache file, which is taken as it is."""
        if find_kind(upload.name) == CACHE:
            return self.store.file(upload.id)
        return extract_text(upload.name, self.store.content(upload.id))

    def found(self, name: str) -> Upload:
        upload = self.store.get(name)
        if upload is None:
            raise ApiError(
                404, f"There is no file {name[:60]!r} here; upload it first.", "file_not_found"
            )
        return upload

    async def documents(
        self, parts: Sequence[tuple[str, str | Attached]], variant: Variant
    ) -> list[Document]:
        """Returns a request's documents, unless too many requests wait for theirs."""
        if self.wanting >= self.limits.waiting:
            raise BusyError
        self.wanting += 1
        try:
            return [await self.document(*each, variant) for each in parts]
        finally:
            self.wanting -= 1

    async def document(self, kind: str, value: str | Attached, variant: Variant) -> Document:
        """Returns a document, from memory, from disk or compressed now; see `Part.document`."""
        if isinstance(value, Attached):
            reading = asyncio.get_running_loop().run_in_executor(
                READERS, extract_text, value.name, value.content
            )
            kind = "text"
            value = await reading
        if kind == "text":
            # As files are read, whose byte order mark is no part of the text.
            text = value.lstrip("\ufeff")
            digest = document_hash(TEXT)
            digest.update(text.encode())
            return await self.engine.document(digest.hexdigest(), variant, lambda: text)
        upload = self.found(value)
        if upload.status == FAILED:
            raise ApiError(400, f"The file {upload.id} could not be processed: {upload.problem}")
        made = await self.engine.document(upload.sha256, variant, lambda: self.content(upload))
        if made.fresh and not self.store.is_here(upload):
            raise ApiError(
                404, f"The file {upload.id} was deleted while it was compressed.", "file_not_found"
            )
        return made

    async def complete(self, request: ChatRequest, gone: Callable[[], object]) -> Response:
        """Answers a chat request, whole or as a stream."""
        pending = await self.asked(request, "chatcmpl", gone)
        if request.stream:
            return await pending.stream(streamed(pending, request), gone, self.limits.seconds)
        reply = await pending.whole(gone, self.limits.seconds)
        answer = replies.completion(pending.about, reply, self.engine.tokenizer, request.logprobs)
        return JSONResponse(schemas.to_json(answer))

    async def asked(self, request: ChatRequest, kind: str, gone: Callable[[], object]) -> Pending:
        """Hands a request to the engine; `kind` begins the id of the answer."""
        asked = conversation(request.messages)
        variant = Variant.parse(request.model, self.base)
        decoding = request.decoding(secrets.randbelow(2**31))
        self.check_open()

        async def left() -> object:
            self.check_open()
            return await gone()

        getting = asyncio.ensure_future(self.documents(asked.documents, variant))
        try:
            documents = await asyncio.wait_for(watched(getting, left), self.limits.seconds)
        except BaseException:  # one that is compressed already is finished all the same
            getting.cancel()
            raise
        question, future, tokens = begin(
            self.engine,
            documents=documents,
            turns=asked.turns,
            text=asked.question,
            system=asked.system,
            limit=request.limit(self.limits.tokens),
            decoding=decoding,
        )
        self.answering[future] = question
        future.add_done_callback(self.answering.pop)
        about = replies.About(
            f"{kind}-{secrets.token_hex(12)}", request.model, int(time.time()), documents
        )
        texts = [
            Growing(self.engine.tokenizer, self.engine.stops, decoding.stop)
            for _ in range(decoding.samples)
        ]
        return Pending(question, future, tokens, texts, about)


@dataclass
class Pending:
    """An answer that is being written."""

    question: Question
    future: asyncio.Future[Reply]
    tokens: asyncio.Queue[tuple | None]
    texts: list[Growing]
    about: replies.About
    # Of the tokens, where it was waited for.
    first: list[tuple | None] = field(default_factory=list)

    async def whole(self, gone: Callable[[], object], seconds: float) -> Reply:
        """Returns the reply; a client who leaves and a limit of seconds end the writing."""
        return await self.awaited(self.future, gone, seconds)

    async def stream(
        self, events: AsyncIterator[str], gone: Callable[[], object], seconds: float
    ) -> Response:
        """Returns the events as a response once the first token is there; raises what is wrong with
        the question.
        """
        self.first = [await self.awaited(asyncio.ensure_future(self.tokens.get()), gone, seconds)]
        if self.first == [None]:
            self.future.result()
        return StreamingResponse(events, media_type="text/event-stream")

    async def awaited(
        self, future: asyncio.Future[T], gone: Callable[[], object], seconds: float
    ) -> T:
        """Returns the result of a future unless `whole` ends the writing."""
        try:
            return await asyncio.wait_for(watched(future, gone), seconds)
        except BaseException:
            self.question.cancelled = True
            raise

    async def pieces(self) -> AsyncIterator[tuple[int, str, list[tuple]]]:
        """Yields (sample, piece of its text, its ids with `Row.likely`); whoever stops listening
        ends the writing.
        """
        likely: list[list[tuple]] = [[] for _ in self.texts]
        try:
            while (item := self.first.pop() if self.first else await self.tokens.get()) is not None:
                sample, token, *more = item
                likely[sample] += [(token, *each) for each in more]
                if piece := self.texts[sample].push(token):
                    yield sample, piece, likely[sample]
                    likely[sample] = []
            await self.future
            for number, text in enumerate(self.texts):
                if (rest := text.rest()) or likely[number]:
                    yield number, rest, likely[number]
        finally:
            self.question.cancelled = True


async def streamed(pending: Pending, request: ChatRequest) -> AsyncIterator[str]:
    """Yields the server-sent events of a chat completion."""
    about = pending.about
    try:
        for number in range(len(pending.texts)):
            yield event(replies.chunk(about, number, ChoiceDelta(role="assistant", content="")))
        async for number, piece, rows in pending.pieces():
            likely = replies.likelihoods(rows, pending.texts[number].tokenizer)
            yield event(replies.chunk(about, number, ChoiceDelta(content=piece), likely=likely))
        reply = pending.future.result()
        for number, answer in enumerate(reply.answers):
            yield event(replies.chunk(about, number, ChoiceDelta(), finish=answer.finish))
        if (request.stream_options or {}).get("include_usage"):
            yield event(replies.usage_chunk(about, reply))
        yield "data: [DONE]\n\n"
    except RestoreKVError as error:
        yield event(schemas.problem_of("server_error", str(error)))


async def watched(future: asyncio.Future[T], gone: Callable[[], object]) -> T:
    """Returns the result of a future; a client who has gone ends the waiting."""
    while not future.done():
        await asyncio.wait([future], timeout=1.0)
        if not future.done() and await gone():
            raise ApiError(499, "The client has gone.")
    return future.result()


def event(content: BaseModel) -> str:
    """Returns one server-sent event."""
    return f"data: {json.dumps(schemas.to_json(content), ensure_ascii=False)}\n\n"


def problem_of(error: Exception) -> str:
    """Returns a sentence for an error; only ours are meant for users."""
    if lack := explain_lack(error):
        return lack[1].replace("try again", "upload it again")
    if isinstance(error, RestoreKVError):
        return str(error)
    LOG.error("unexpected error", exc_info=error)
    return "The server failed on this; its log says why."
