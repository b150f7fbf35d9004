"""What answers look like, for the description at `/openapi.json`; replies.py and responses.py write them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Detail(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Problem(BaseModel):
    """An answer other than success: a sentence that names the cause and the fix."""

    error: Detail


class Status(BaseModel):
    status: Literal["ok"]


class Ready(BaseModel):
    ready: bool


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class File(BaseModel):
    """An uploaded file; times are in seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None


class Files(BaseModel):
    object: Literal["list"]
    data: list[File]
    has_more: bool


class Deleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class Progress(BaseModel):
    phase: str = Field(description='"waiting", a phase of the compression, "error" or "ready"')


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
    """Which tokens of a document survive: pieces of its text, each with the share of heads that keep it."""

    layers: int
    heads: int
    tokens: int
    surviving: int
    restore_tokens: int
    evictor: str
    seconds: dict[str, float]
    pairs: BeforeAfter
    bytes: BeforeAfter
    pieces: list[tuple[str, float]]


class PromptDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Cost(BaseModel):
    """KV pairs and bytes of the documents' caches, and seconds by phase."""

    pairs: int
    bytes: int
    seconds: dict[str, float]


class Said(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(BaseModel):
    index: int
    message: Said
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class Completion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    restorekv: Cost


class Response(BaseModel):
    """The object of the Responses API, of whose fields these are always there."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    restorekv: Cost


def content(kind: str) -> dict[int, dict]:
    """Returns the description of an answer that is no JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}, "description": "Success"}}


def streamed(model: type[BaseModel]) -> dict[int, dict]:
    """Returns the description of an answer that is whole or a stream of server-sent events, each as in `schema`."""
    event = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
    events = {"text/event-stream": {"schema": {**event, "required": ["data"]}}}
    slow = {"model": Problem, "description": "The answer took too long"}
    return {200: {"model": model, "content": events, "description": "The answer"}, 504: slow}


PROBLEMS = {"4XX": {"model": Problem, "description": "A sentence that says what is wrong"}}
