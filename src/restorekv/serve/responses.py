"""OpenAI's Responses API: the same questions, with earlier turns found by the id of the last
answer.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, Field, model_validator

from restorekv.errors import RestoreKVError
from restorekv.serve import fields, replies, schemas
from restorekv.serve.engine import Reply
from restorekv.serve.requests import ChatRequest, Message, Text
from restorekv.serve.service import ApiError, Pending, Service

# Answers whose turns are known, and bytes of all their messages.
REMEMBERED = 1000
LARGEST = 256 << 20

FORMAT = {"type": None, "schema": None}  # fields of a format that have an effect


class TextOptions(BaseModel):
    """How the answer looks; `format` is `text`, `json_object`, or `json_schema` with its `schema`."""

    format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        taken = fields.take_known(
            given, cls.model_fields, frozenset(), fields.TEXT_REFUSED, "text."
        )
        if isinstance(taken, dict) and taken.get("format"):
            fields.take_known(taken["format"], FORMAT, fields.FORMAT_IDLE, {}, "text.format.")
        return taken


class ResponsesRequest(BaseModel):
    """What `/v1/responses` takes; fields.py says what becomes of OpenAI's other fields."""

    model_config = fields.describe(fields.RESPONSES_IDLE, fields.RESPONSES_REFUSED)

    model: Text
    input: Text | list[Message]
    instructions: Text | None = None
    previous_response_id: str | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        return fields.take_known(
            given, cls.model_fields, fields.RESPONSES_IDLE, fields.RESPONSES_REFUSED
        )

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """Returns the same question as a chat request, after earlier messages."""
        own = (
            [Message(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        options = {
            name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")
        }
        if form := self.text and self.text.format:
            schema = {"schema": form["schema"]} if "schema" in form else None
            options["response_format"] = {"type": form.get("type", "text"), "json_schema": schema}
        return ChatRequest(
            messages=[*system, *earlier, *own], max_tokens=self.max_output_tokens, **options
        )


class Remembered:
    """The messages behind the latest answers, by their ids."""

    def __init__(self) -> None:
        self.turns: OrderedDict[str, list[Message]] = OrderedDict()
        self.sizes: dict[str, int] = {}

    def before(self, name: str | None) -> list[Message]:
        """Returns the messages up to and with an answer."""
        if name is None:
            return []
        if name not in self.turns:
            raise ApiError(
                404, f"There is no response {name[:60]!r} here any more; send the turns again."
            )
        return self.turns[name]

    def add(self, name: str, messages: list[Message], text: str) -> None:
        """Remembers an answer, without system messages, which every request gives anew."""
        said = [each for each in messages if each.role not in ("system", "developer")]
        self.turns[name] = [*said, Message(role="assistant", content=text)]
        self.sizes[name] = sum(len(each.model_dump_json()) for each in self.turns[name])
        while len(self.turns) > REMEMBERED or sum(self.sizes.values()) > LARGEST:
            del self.sizes[self.turns.popitem(last=False)[0]]


def add_responses(app: FastAPI, service: Service) -> None:
    """Adds the path."""
    remembered = Remembered()

    @app.post("/v1/responses", responses=schemas.streamed(schemas.Response))
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        chat = asked.chat(remembered.before(asked.previous_response_id))
        limits = request.is_disconnected, service.limits.seconds
        pending = await service.asked(chat, "resp", limits[0])

        def done(reply: Reply) -> schemas.Response:
            if asked.store is not False:
                remembered.add(pending.about.id, chat.messages, reply.answers[0].text)
            return response(pending, asked, reply)

        if asked.stream:
            return await pending.stream(events(pending, asked, done), *limits)
        return JSONResponse(schemas.to_json(done(await pending.whole(*limits))))


async def events(
    pending: Pending, asked: ResponsesRequest, done: Callable[[Reply], schemas.Response]
) -> AsyncIterator[str]:
    """Yields the server-sent events of a response."""
    numbers = itertools.count()

    def event(kind: type[BaseModel], name: str, **content: Any) -> str:
        data = schemas.to_json(kind(type=name, sequence_number=next(numbers), **content))
        return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

    item = f"msg_{pending.about.id}"
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    try:
        yield event(
            types.ResponseCreatedEvent, "response.created", response=response(pending, asked)
        )
        started = message(pending)
        yield event(
            types.ResponseOutputItemAddedEvent,
            "response.output_item.added",
            output_index=0,
            item=started,
        )
        yield event(
            types.ResponseContentPartAddedEvent,
            "response.content_part.added",
            part=part(""),
            **place,
        )
        async for _, piece, _ in pending.pieces():
            yield event(
                types.ResponseTextDeltaEvent,
                "response.output_text.delta",
                delta=piece,
                logprobs=[],
                **place,
            )
        reply = pending.future.result()
        text = reply.answers[0].text
        yield event(
            types.ResponseTextDoneEvent,
            "response.output_text.done",
            text=text,
            logprobs=[],
            **place,
        )
        yield event(
            types.ResponseContentPartDoneEvent,
            "response.content_part.done",
            part=part(text),
            **place,
        )
        written = message(pending, reply)
        yield event(
            types.ResponseOutputItemDoneEvent,
            "response.output_item.done",
            output_index=0,
            item=written,
        )
        whole = done(reply)
        if whole.status == "incomplete":
            yield event(types.ResponseIncompleteEvent, "response.incomplete", response=whole)
        else:
            yield event(types.ResponseCompletedEvent, "response.completed", response=whole)
    except RestoreKVError as error:
        yield event(
            types.ResponseErrorEvent, "error", code="server_error", message=str(error), param=None
        )


def part(text: str) -> types.ResponseOutputText:
    return types.ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])


def status_of(reply: Reply | None) -> Literal["in_progress", "incomplete", "completed"]:
    """Returns how far a response is; without a reply, it is being written."""
    if reply is None:
        return "in_progress"
    return "incomplete" if reply.answers[0].finish == "length" else "completed"


def message(pending: Pending, reply: Reply | None = None) -> types.ResponseOutputMessage:
    """Returns the answer as an item of the output; without a reply, one that is being written."""
    content = [part(reply.answers[0].text)] if reply else []
    return types.ResponseOutputMessage(
        id=f"msg_{pending.about.id}",
        type="message",
        role="assistant",
        status=status_of(reply),
        content=content,
    )


def usage(pending: Pending, reply: Reply) -> types.ResponseUsage:
    """Return what `replies.usage` counts in the names of the Responses API."""
    counts = replies.usage(pending.about, reply)
    return types.ResponseUsage(
        input_tokens=counts.prompt_tokens,
        output_tokens=counts.completion_tokens,
        total_tokens=counts.total_tokens,
        input_tokens_details=InputTokensDetails(**counts.prompt_tokens_details.to_dict()),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    )


def response(
    pending: Pending, asked: ResponsesRequest, reply: Reply | None = None
) -> schemas.Response:
    """Returns the object of a response, with what it cost at its end."""
    status = status_of(reply)
    made = schemas.Response(
        id=pending.about.id,
        object="response",
        created_at=pending.about.created,
        model=asked.model,
        status=status,
        output=[message(pending, reply)] if reply else [],
        usage=usage(pending, reply) if reply else None,
        error=None,
        incomplete_details=IncompleteDetails(reason="max_output_tokens")
        if status == "incomplete"
        else None,
        tools=[],
        tool_choice="auto",
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        metadata=asked.metadata or {},
        parallel_tool_calls=False,
        temperature=asked.temperature,
        top_p=asked.top_p,
    )
    if reply:
        made.restorekv = replies.cost(reply)
    return made
