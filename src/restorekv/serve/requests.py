"""Requests in OpenAI's form, and what they ask for: documents first, then turns, then a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from restorekv.compression.sampling import Decoding
from restorekv.errors import RestoreKVError

WHERE = (
    "Put the document before the question, in the first user message: a file part, or a text part with "
    'prompt_cache_breakpoint {"mode": "explicit"} or cache_control.'
)
PARTS = {"text", "input_text", "file", "input_file"}


class Part(BaseModel):
    """A piece of a message: a text, which may be a document, or a file that was uploaded."""

    type: str
    text: str | None = None
    file: dict[str, Any] | None = None
    file_id: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def named(self) -> str | None:
        """The id of the file, if this is one."""
        return self.file_id or (self.file or {}).get("file_id")

    @property
    def cached(self) -> bool:
        """Whether this text is a document."""
        return bool(self.cache_control) or (self.prompt_cache_breakpoint or {}).get("mode") == "explicit"


class Message(BaseModel):
    """Who says what."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class Format(BaseModel):
    """How answers look: `text`, `json_object`, or a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class ChatRequest(BaseModel):
    """What `/v1/chat/completions` takes; other fields of OpenAI's are ignored."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=1000)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=2**62)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Format | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    tools: list[Any] | None = None

    def decoding(self, seed: int) -> Decoding:
        """Returns how the answers are written, by default sampled at temperature 1, as OpenAI's are; `seed` unless
        the request has its own."""
        if self.frequency_penalty or self.presence_penalty or self.tools:
            raise RestoreKVError("frequency_penalty, presence_penalty and tools are not supported; leave them out.")
        options: dict[str, Any] = {"temperature": 1.0 if self.temperature is None else self.temperature}
        options |= {"top_p": self.top_p or 1.0, "samples": self.n or 1, "stop": self.stop or ()}
        options["seed"] = seed if self.seed is None else self.seed
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        form = self.response_format or Format()
        if form.type == "json_object":
            options["json_schema"] = {"type": "object"}
        elif form.type == "json_schema":
            options["json_schema"] = (form.json_schema or {}).get("schema", {})
        return Decoding.make(**options)

    def limit(self, most: int) -> int:
        """Returns the longest answer in tokens, at most `most`."""
        return min(self.max_completion_tokens or self.max_tokens or most, most)


@dataclass(frozen=True)
class Conversation:
    """What a list of messages comes to: files by id and texts, in order; earlier turns; the question."""

    documents: Sequence[tuple[str, str]]  # ("file", id) or ("text", words)
    system: str
    turns: Sequence[tuple[str, str]]
    question: str


def conversation(messages: Sequence[Message]) -> Conversation:
    """Reads messages: system first, then the user and the assistant in turn; documents stand in the first of them."""
    system = "\n\n".join(words(each) for each in messages if each.role in ("system", "developer"))
    said = [each for each in messages if each.role in ("user", "assistant")]
    first = len(messages) - len(said)
    if any(each.role not in ("system", "developer") for each in messages[:first]):
        raise RestoreKVError("System messages come first; put them before the others.")
    roles = [each.role for each in said]
    if roles != ["user", "assistant"] * (len(said) // 2) + ["user"]:
        raise RestoreKVError("After system messages, user and assistant take turns, and the user has the last word.")
    documents, question = opened(said[0])
    questions = [question, *(words(each) for each in said[2::2])]
    answers = [words(each) for each in said[1::2]]
    return Conversation(documents, system, list(zip(questions[:-1], answers, strict=True)), questions[-1])


def opened(message: Message) -> tuple[list[tuple[str, str]], str]:
    """Returns the documents of the first message and the question after them."""
    documents, question = [], []
    for part in message.content if isinstance(message.content, list) else []:
        check_kind(part)
        document = ("file", part.named) if "file" in part.type else ("text", part.text or "") if part.cached else None
        if document and question:
            raise RestoreKVError(WHERE)
        if document and not document[1]:
            raise RestoreKVError("A file part names its file: {'type': 'file', 'file': {'file_id': ...}}.")
        (documents if document else question).append(document or part.text or "")
    if not documents:
        raise RestoreKVError(f"There is no document to ask. {WHERE}")
    return documents, "\n".join(question)


def words(message: Message) -> str:
    """Returns the text of a message; refuses documents, which belong into the first one."""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        check_kind(part)
        if part.cached or "file" in part.type:
            raise RestoreKVError(WHERE)
    return "\n".join(part.text or "" for part in message.content)


def check_kind(part: Part) -> None:
    if part.type not in PARTS:
        raise RestoreKVError(f"A part is a text or a file, not {part.type[:40]!r}; leave it out.")
