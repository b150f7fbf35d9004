"""OpenAI's Responses API: the same questions, with earlier turns found by the id of the last answer."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, model_validator

from restorekv.errors import RestoreKVError
from restorekv.serve import fields, replies, schemas
from restorekv.serve.engine import Reply
from restorekv.serve.requests import ChatRequest, Message, Text
from restorekv.serve.service import ApiError, Pending, Service

REMEMBERED, LARGEST = 1000, 256 << 20  # answers whose turns are known, and bytes of all their messages

FORMAT = {"type": None, "schema": None}  # fields of a format that have an effect


class TextOptions(BaseModel):
    """How the answer looks; `format` is `text`, `json_object`, or `json_schema` with its `schema`."""

    format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        taken = fields.take_known(given, cls.model_fields, frozenset(), fields.TEXT_REFUSED, "text.")
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
        return fields.take_known(given, cls.model_fields, fields.RESPONSES_IDLE, fields.RESPONSES_REFUSED)

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """Returns the same question as a chat request, after earlier messages."""
        own = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        options = {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")}
        if form := self.text and self.text.format:
            schema = {"schema": form["schema"]} if "schema" in form else None
            options["response_format"] = {"type": form.get("type", "text"), "json_schema": schema}
        return ChatRequest(messages=[*system, *earlier, *own], max_tokens=self.max_output_tokens, **options)


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
            raise ApiError(404, f"There is no response {name[:60]!r} here any more; send the turns again.")
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

        def done(reply: Reply) -> dict:
            if asked.store is not False:
                remembered.add(pending.about.id, chat.messages, reply.answers[0].text)
            return response(pending, asked, reply)

        if asked.stream:
            return await pending.stream(events(pending, asked, done), *limits)
        return JSONResponse(done(await pending.whole(*limits)))


async def events(pending: Pending, asked: ResponsesRequest, done: Callable[[Reply], dict]) -> AsyncIterator[str]:
    """Yields the server-sent events of a response."""
    number = 0

    def event(kind: str, **content: object) -> str:
        nonlocal number
        number += 1
        data = json.dumps({"type": kind, "sequence_number": number - 1, **content}, ensure_ascii=False)
        return f"event: {kind}\ndata: {data}\n\n"

    place = {"item_id": f"msg_{pending.about.id}", "output_index": 0, "content_index": 0}
    try:
        yield event("response.created", response=response(pending, asked))
        yield event("response.output_item.added", output_index=0, item=message(pending))
        yield event("response.content_part.added", part=part(""), **place)
        async for _, piece, _ in pending.pieces():
            yield event("response.output_text.delta", delta=piece, logprobs=[], **place)
        reply = pending.future.result()
        text = reply.answers[0].text
        yield event("response.output_text.done", text=text, logprobs=[], **place)
        yield event("response.content_part.done", part=part(text), **place)
        yield event("response.output_item.done", output_index=0, item=message(pending, reply))
        yield event(f"response.{status_of(reply)}", response=done(reply))
    except RestoreKVError as error:
        yield event("error", code="server_error", message=str(error), param=None)


def part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def status_of(reply: Reply | None) -> str:
    """Returns how far a response is; without a reply, it is being written."""
    if reply is None:
        return "in_progress"
    return "incomplete" if reply.answers[0].finish == "length" else "completed"


def message(pending: Pending, reply: Reply | None = None) -> dict:
    """Returns the answer as an item of the output; without a reply, one that is being written."""
    name, content = f"msg_{pending.about.id}", [part(reply.answers[0].text)] if reply else []
    return {"id": name, "type": "message", "role": "assistant", "status": status_of(reply), "content": content}


def response(pending: Pending, asked: ResponsesRequest, reply: Reply | None = None) -> dict:
    """Returns the object of a response, with what it cost at its end."""
    status, output = status_of(reply), [message(pending, reply)] if reply else []
    short = {"reason": "max_output_tokens"} if status == "incomplete" else None
    told = replies.usage(pending.about, reply) if reply else {}
    counts = told.pop("usage", None)
    usage = counts and {
        "input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
        "total_tokens": counts["total_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {
        "id": pending.about.id, "object": "response", "created_at": pending.about.created, "model": asked.model,
        "status": status, "output": output, "usage": usage, "error": None,
        "incomplete_details": short, "tools": [], "tool_choice": "auto",
        "instructions": asked.instructions, "previous_response_id": asked.previous_response_id,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": False, "temperature": asked.temperature, "top_p": asked.top_p, **told,
    }  # fmt: skip
