"""What answers look like: the openai package's types, narrowed to what is sent here, and this
server's own objects.

replies.py and responses.py make them, and `/openapi.json` describes them. An answer on the wire has
the fields that were set, also those set to None, and no others.
"""

# The openai package's fields may be changed, so pyright refuses that their types are narrowed.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Any, Literal

from openai.types import Completion as TextCompletionBase
from openai.types import CompletionChoice, FileObject, Model, responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel, Field


def to_json(answer: BaseModel) -> dict[str, Any]:
    """Return an object as JSON values.

    A value inside is written as the type that it has, not as the one that its field names.
    """
    return answer.model_dump(exclude_unset=True, serialize_as_any=True)


class Problem(BaseModel):
    """An answer other than success: a sentence that names the cause and the fix."""

    error: ErrorObject


def make_problem(
    kind: str, message: str, code: str | None = None, param: str | None = None
) -> Problem:
    """Return an answer other than success; `param` is the field of the request that is at fault."""
    return Problem(error=ErrorObject(message=message, type=kind, param=param, code=code))


class Status(BaseModel):
    status: Literal["ok"]


class Ready(BaseModel):
    ready: bool


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class File(FileObject):
    """An uploaded file; times are in seconds since 1970."""

    purpose: str  # whatever the client gave


class Files(BaseModel):
    object: Literal["list"]
    data: list[File]
    has_more: bool


class CompressionProgress(BaseModel):
    phase: str = Field(description='"waiting", a phase of the compression, "error" or "ready"')
    share: float = Field(description="the share of the compression that is done, from 0 to 1")


class Default(BaseModel):
    method: str
    ratio: float


class Variants(BaseModel):
    base: str
    default: Default
    methods: list[str]
    max_tokens: int


class BeforeAfter(BaseModel):
    before: int
    after: int


class Kept(BaseModel):
    """What survives of a document: pieces of its text, each with the share of its pairs kept."""

    layers: int
    heads: int
    tokens: int
    prefix: int = Field(description="tokens of the chat template before the text")
    surviving: int
    kept_share: float = Field(description="of all pairs of the text, without restore tokens")
    restore_tokens: int
    evictor: str
    seconds: dict[str, float]
    pairs: BeforeAfter
    bytes: BeforeAfter
    pieces: list[tuple[str, float]]


class Cost(BaseModel):
    """Documents of the question, KV pairs and bytes of their caches, and seconds by phase.

    Without a document the plain model answers, and nothing is counted as held.
    """

    documents: int
    pairs: int
    bytes: int
    seconds: dict[str, float]


class Completion(ChatCompletion):
    """A whole chat completion."""

    restorekv: Cost


class Chunk(ChatCompletionChunk):
    """A piece of a streamed chat completion; the last one may have what the answer cost."""

    restorekv: Cost | None = None


class TextChoice(CompletionChoice):
    """A continuation, or a piece of one, which ends for no reason yet."""

    finish_reason: Literal["stop", "length"] | None = None


class TextCompletion(TextCompletionBase):
    """The continuation of a text, whole or a piece of a stream."""

    choices: list[TextChoice]
    restorekv: Cost | None = None


class Response(responses.Response):
    """The object of the Responses API; `restorekv` comes with the finished one."""

    created_at: int  # openai's type would write 1700000000.0
    instructions: str | None = None
    output: list[responses.ResponseOutputMessage]
    tool_choice: Literal["auto"]
    tools: list[Any] = Field(max_length=0)
    restorekv: Cost | None = None


def describe_content(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that is not JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}, "description": "Success"}}


def describe_stream(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that is whole, or a stream of server-sent events."""
    event = {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
    return {
        200: {
            "model": model,
            "content": {"text/event-stream": {"schema": event}},
            "description": "The answer",
        },
        504: {"model": Problem, "description": "The answer took too long"},
    }


PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "A sentence that says what is wrong"}
}
