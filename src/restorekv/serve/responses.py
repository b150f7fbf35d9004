"""OpenAI's Responses API: the same questions; earlier turns are found by the last answer's id."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, Field, StrictBool, model_validator

from restorekv.serve import fields, replies, schemas
from restorekv.serve.engine import Reply
from restorekv.serve.questions import PendingAnswer, Questions
from restorekv.serve.requests import EARLIER, ChatRequest, Message, Text, read_text
from restorekv.serve.service import ApiError, explain_error

REMEMBERED = 1000  # answers whose turns are known
LARGEST = 256 << 20  # characters of all their messages and of the answers themselves
FORMAT = {"type": None, "schema": None}  # fields of a format that have an effect
# What requests call the fields of the chat request that `to_chat` returns; the inner ones first.
CHAT_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


class TextOptions(BaseModel):
    """How the answer looks: as text, as a JSON object, or as a JSON schema says."""

    format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        taken = fields.take_known(given, cls.model_fields, frozenset(), fields.TEXT_REFUSED)
        if isinstance(taken, dict) and taken.get("format"):
            fields.take_known(taken["format"], FORMAT, fields.FORMAT_IGNORED, {}, "format.")
        return taken


class ResponsesRequest(BaseModel):
    """What `/v1/responses` takes; fields.py says what becomes of OpenAI's other fields."""

    model_config = fields.make_config(fields.RESPONSES_IGNORED, fields.RESPONSES_REFUSED)

    model: Text
    input: Text | list[Message]
    instructions: Text | None = None
    previous_response_id: str | None = None
    stream: StrictBool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    store: StrictBool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        return fields.take_known(
            given, cls.model_fields, fields.RESPONSES_IGNORED, fields.RESPONSES_REFUSED
        )

    def name_messages(self, earlier: Sequence[Message]) -> list[str]:
        """Return the field that each message of `to_chat` is from."""
        names = ["instructions"] if self.instructions else []
        names += [EARLIER] * len(earlier)
        if isinstance(self.input, str):
            return [*names, "input"]
        return names + [f"input.{number}" for number in range(len(self.input))]

    def to_chat(self, earlier: list[Message]) -> ChatRequest:
        """Return the same question as a chat request, after earlier messages."""
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message(role="system", content=self.instructions))
        messages.extend(earlier)
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages.extend(self.input)
        options: dict[str, Any] = {}
        form = self.text and self.text.format
        if form:
            schema = {"schema": form["schema"]} if "schema" in form else None
            options["response_format"] = {"type": form.get("type", "text"), "json_schema": schema}
        return ChatRequest(
            messages=messages,
            model=self.model,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
            **options,
        )


class ResponseMemory:
    """The latest answers, and the messages up to them, by the answers' ids."""

    def __init__(self) -> None:
        self.turns: OrderedDict[str, list[Message]] = OrderedDict()
        self.answers: dict[str, dict[str, Any]] = {}  # as they were sent
        self.answer_sizes: dict[str, int] = {}  # characters
        # The turns of a conversation share messages, and each message counts only once. By the
        # message's identity: in how many turns it is, and its characters.
        self.uses: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}

    def find(self, name: str | None) -> list[Message]:
        """Return the messages up to and including the answer that a request names."""
        if name is None:
            return []
        self._check(name, "send the turns again", EARLIER)
        return self.turns[name]

    def find_answer(self, name: str) -> dict[str, Any]:
        """Return an answer as it was sent."""
        self._check(name, "ask again")
        return self.answers[name]

    def _check(self, name: str, remedy: str, param: str | None = None) -> None:
        """Raise ApiError for an answer that is not remembered; `param` is the field that names
        it.
        """
        if name not in self.turns:
            message = f"There is no response {name[:60]!r} here any more; {remedy}."
            raise ApiError(404, message, param=param)

    def add(self, name: str, messages: list[Message], text: str, answer: dict[str, Any]) -> None:
        """Remember an answer to messages.

        Args:
            name: Its id.
            messages: What was asked.
            text: What it says.
            answer: The whole answer, as it is sent.
        """
        self.answers[name] = answer
        self.answer_sizes[name] = len(json.dumps(answer))
        turns = list(messages)
        if turns and turns[-1].role == "assistant":  # the answer continued it
            text = read_text(turns.pop()) + text
        turns.append(Message(role="assistant", content=text))
        self.turns[name] = turns
        for message in turns:
            self.uses[id(message)] += 1
            if id(message) not in self.sizes:
                self.sizes[id(message)] = len(message.model_dump_json())
        while len(self.turns) > REMEMBERED or self._count_characters() > LARGEST:
            self.forget(next(iter(self.turns)))  # the oldest

    def _count_characters(self) -> int:
        """Return the characters of all messages and answers."""
        return sum(self.sizes.values()) + sum(self.answer_sizes.values())

    def forget(self, name: str) -> None:
        """Forget an answer and the messages that no other one shares."""
        self._check(name, "it is forgotten already")
        del self.answers[name]
        del self.answer_sizes[name]
        for message in self.turns.pop(name):
            self.uses[id(message)] -= 1
            if not self.uses[id(message)]:
                del self.uses[id(message)]
                del self.sizes[id(message)]


def add_responses(app: FastAPI, questions: Questions) -> None:
    """Add the paths."""
    memory = ResponseMemory()

    @app.get("/v1/responses/{name}", response_model=schemas.Response)
    async def retrieve(name: str) -> JSONResponse:
        return JSONResponse(memory.find_answer(name))

    @app.delete("/v1/responses/{name}")
    async def forget(name: str) -> dict[str, str | bool]:
        memory.forget(name)
        return {"id": name, "object": "response", "deleted": True}

    @app.post("/v1/responses", responses=schemas.describe_stream(schemas.Response))
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        earlier = memory.find(asked.previous_response_id)
        chat = asked.to_chat(earlier)
        names = asked.name_messages(earlier)
        pending = await questions.ask(chat, "resp", request.is_disconnected, names)

        def finish(reply: Reply) -> schemas.Response:
            response = make_response(pending, asked, reply)
            if asked.store is not False:
                # Every request gives its instructions again; they come first.
                messages = chat.messages[1:] if asked.instructions else chat.messages
                answer = schemas.to_json(response)
                memory.add(response.id, messages, reply.answers[0].text, answer)
            return response

        if asked.stream:
            return await pending.start_stream(stream_response(pending, asked, finish))
        return JSONResponse(schemas.to_json(finish(await pending.wait_for_reply())))


async def stream_response(
    pending: PendingAnswer, asked: ResponsesRequest, finish: Callable[[Reply], schemas.Response]
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response."""
    numbers = itertools.count()

    def format_event(kind: type[BaseModel], name: str, **content: Any) -> str:
        data = schemas.to_json(kind(type=name, sequence_number=next(numbers), **content))
        return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

    # The output is one message with one text in it, which every event about it has to name.
    item = f"msg_{pending.header.id}"
    location = {"item_id": item, "output_index": 0, "content_index": 0}
    try:
        yield format_event(
            types.ResponseCreatedEvent, "response.created", response=make_response(pending, asked)
        )
        yield format_event(
            types.ResponseOutputItemAddedEvent,
            "response.output_item.added",
            output_index=0,
            item=make_message(pending),
        )
        yield format_event(
            types.ResponseContentPartAddedEvent,
            "response.content_part.added",
            part=make_part(""),
            **location,
        )
        async for _, piece, _ in pending.iter_pieces():
            yield format_event(
                types.ResponseTextDeltaEvent,
                "response.output_text.delta",
                delta=piece,
                logprobs=[],
                **location,
            )
        reply = pending.reply.result()
        text = reply.answers[0].text
        yield format_event(
            types.ResponseTextDoneEvent,
            "response.output_text.done",
            text=text,
            logprobs=[],
            **location,
        )
        yield format_event(
            types.ResponseContentPartDoneEvent,
            "response.content_part.done",
            part=make_part(text),
            **location,
        )
        yield format_event(
            types.ResponseOutputItemDoneEvent,
            "response.output_item.done",
            output_index=0,
            item=make_message(pending, reply),
        )
        response = finish(reply)
        if response.status == "incomplete":
            yield format_event(
                types.ResponseIncompleteEvent, "response.incomplete", response=response
            )
        else:
            yield format_event(
                types.ResponseCompletedEvent, "response.completed", response=response
            )
    # Any error: the status has been sent, so the stream itself must say what went wrong.
    except Exception as error:
        yield format_event(
            types.ResponseErrorEvent,
            "error",
            code="server_error",
            message=explain_error(error),
            param=None,
        )


def make_part(text: str) -> types.ResponseOutputText:
    """Return a text as a part of a message."""
    return types.ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])


def find_status(reply: Reply | None) -> Literal["in_progress", "incomplete", "completed"]:
    """Return how far a response is; without a reply, it is being written."""
    if reply is None:
        return "in_progress"
    return "incomplete" if reply.answers[0].finish == "length" else "completed"


def make_message(pending: PendingAnswer, reply: Reply | None = None) -> types.ResponseOutputMessage:
    """Return the answer as an item of the output; without a reply, one that is being written."""
    return types.ResponseOutputMessage(
        id=f"msg_{pending.header.id}",
        type="message",
        role="assistant",
        status=find_status(reply),
        content=[make_part(reply.answers[0].text)] if reply else [],
    )


def count_usage(pending: PendingAnswer, reply: Reply) -> types.ResponseUsage:
    """Return the counts of `replies.count_usage`, in the names of the Responses API."""
    counts = replies.count_usage(pending.header, reply)
    details = counts.prompt_tokens_details.to_dict() if counts.prompt_tokens_details else {}
    return types.ResponseUsage(
        input_tokens=counts.prompt_tokens,
        output_tokens=counts.completion_tokens,
        total_tokens=counts.total_tokens,
        input_tokens_details=InputTokensDetails.model_validate(details),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    )


def make_response(
    pending: PendingAnswer, asked: ResponsesRequest, reply: Reply | None = None
) -> schemas.Response:
    """Return the object of a response; with a reply, also what it says and cost."""
    status = find_status(reply)
    incomplete = None
    if status == "incomplete":
        incomplete = IncompleteDetails(reason="max_output_tokens")
    sampling = pending.question.sampling
    response = schemas.Response(
        id=pending.header.id,
        object="response",
        created_at=pending.header.created,
        model=asked.model,
        status=status,
        output=[make_message(pending, reply)] if reply else [],
        usage=count_usage(pending, reply) if reply else None,
        error=None,
        incomplete_details=incomplete,
        tools=[],
        tool_choice="auto",
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        metadata=asked.metadata or {},
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=False,
        # If the request does not give these, they are the server's defaults.
        temperature=sampling.temperature if asked.temperature is None else asked.temperature,
        top_p=sampling.top_p if asked.top_p is None else asked.top_p,
    )
    if reply:
        response.restorekv = replies.make_cost(pending.header, reply)
    return response
