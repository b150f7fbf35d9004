"""Requests in OpenAI's form, and what they ask for: documents first, then turns, then a question."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from restorekv.errors import RestoreKVError
from restorekv.generation.sampling import Decoding
from restorekv.model.tokenize import check_unicode
from restorekv.serve import fields

WHERE = (
    "Put the document before the question, in the first user message: a file part, or a text part with "
    'prompt_cache_breakpoint {"mode": "explicit"} or cache_control.'
)
PARTS = {"text", "input_text", "output_text", "file", "input_file"}
NAMELESS = "A file part names its file: {'type': 'file', 'file': {'file_id': ...}}, or has its filename and file_data."
LARGEST_SCHEMA = 1 << 15  # characters; one of 250,000 keeps all others waiting for 17 seconds
# Of files without a name.
ENDINGS = {"application/pdf": ".pdf", "text/html": ".html", "text/markdown": ".md"}


def unicode_only(text: str) -> str:
    check_unicode(text)
    return text


Text = Annotated[str, AfterValidator(unicode_only)]


@dataclass(frozen=True)
class Attached:
    """A file inside a request."""

    name: str
    content: bytes


class Reference(BaseModel):
    """A file by the id of its upload, or the file itself: its name and its bytes in base64 or as a
    data: URL.
    """

    file_id: Text | None = None
    filename: Text | None = None
    file_data: Text | None = None

    def attached(self) -> Attached | None:
        """Returns the file itself, if it is here."""
        if not self.file_data:
            return None
        kind, _, coded = self.file_data.rpartition(",")
        try:
            content = base64.b64decode(coded, validate=True)
        except ValueError:
            raise RestoreKVError(
                "file_data is base64, or a data: URL of it; encode the file."
            ) from None
        mime = kind.removeprefix("data:").partition(";")[0]
        return Attached(self.filename or f"file{ENDINGS.get(mime, '.txt')}", content)


class Part(Reference):
    """A piece of a message: a text, which may be a document, or a file."""

    type: Text
    text: Text | None = None
    file: Reference | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored; of parts that are of no kind of ours, `check_kind`
        speaks.
        """
        if not isinstance(given, dict) or given.get("type") not in PARTS:
            return given
        return fields.take_known(
            given, cls.model_fields, fields.PART_IDLE, fields.PART_REFUSED, "messages.content."
        )

    @property
    def cached(self) -> bool:
        """Whether this text is a document."""
        return (
            bool(self.cache_control)
            or (self.prompt_cache_breakpoint or {}).get("mode") == "explicit"
        )

    @property
    def document(self) -> tuple[str, str | Attached] | None:
        """The document that this part is: ("file", id), ("attached", file) or ("text", words)."""
        if "file" not in self.type:
            return ("text", self.text or "") if self.cached else None
        reference = self.file or self
        if not reference.file_id and (attached := reference.attached()):
            return "attached", attached
        return "file", reference.file_id or ""


class Message(BaseModel):
    """Who says what; an assistant may have said nothing."""

    model_config = fields.describe(fields.MESSAGE_IDLE, fields.MESSAGE_REFUSED)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        return fields.take_known(
            given, cls.model_fields, fields.MESSAGE_IDLE, fields.MESSAGE_REFUSED, "messages."
        )


class Format(BaseModel):
    """How answers look: `text`, `json_object`, or a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        taken = fields.take_known(given, cls.model_fields, frozenset(), {}, "response_format.")
        if isinstance(taken, dict) and taken.get("json_schema"):
            place = "response_format.json_schema."
            fields.take_known(taken["json_schema"], {"schema": None}, fields.FORMAT_IDLE, {}, place)
        return taken


class ChatRequest(BaseModel):
    """What `/v1/chat/completions` takes; fields.py says what becomes of OpenAI's other fields."""

    model_config = fields.describe(fields.CHAT_IDLE, fields.CHAT_REFUSED)

    model: Text
    messages: list[Message] = Field(min_length=1, max_length=1000)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = Field(None, max_length=64)
    seed: int | None = Field(None, ge=0, lt=2**62)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Format | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    # VLLM's names, from here; -1 and 0 are all tokens.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuses fields that would be ignored."""
        taken = fields.take_known(given, cls.model_fields, fields.CHAT_IDLE, fields.CHAT_REFUSED)
        if isinstance(taken, dict):
            fields.take_known(
                taken.get("stream_options"),
                dict.fromkeys(fields.STREAM),
                frozenset(),
                {},
                "stream_options.",
            )
        return taken

    @model_validator(mode="after")
    def check_likelihoods(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fields.field_error(
                "invalid_value", "top_logprobs", "needs logprobs: true; add it"
            )
        return self

    def decoding(self, seed: int) -> Decoding:
        """Returns how the answers are written, by default sampled at temperature 1, as OpenAI's
        are; `seed` unless the request has its own.
        """
        options: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature
        }
        options |= {"top_p": self.top_p or 1.0, "samples": self.n or 1, "stop": self.stop or ()}
        options["seed"] = seed if self.seed is None else self.seed
        options |= {"top_k": max(self.top_k or 0, 0), "min_p": self.min_p or 0.0}
        options["repetition_penalty"] = self.repetition_penalty or 1.0
        options["frequency_penalty"] = self.frequency_penalty or 0.0
        options["presence_penalty"] = self.presence_penalty or 0.0
        if self.logit_bias:
            options["logit_bias"] = bias_of(self.logit_bias)
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        form = self.response_format or Format()
        if form.type == "json_object":
            options["json_schema"] = {"type": "object"}
        elif form.type == "json_schema":
            options["json_schema"] = (form.json_schema or {}).get("schema", {})
            if len(json.dumps(options["json_schema"])) > LARGEST_SCHEMA:
                raise RestoreKVError(
                    f"The JSON schema has more than {LARGEST_SCHEMA:,} characters; shorten it."
                )
        return Decoding.make(**options)

    def limit(self, most: int) -> int:
        """Returns the longest answer in tokens, at most `most`."""
        return min(self.max_completion_tokens or self.max_tokens or most, most)


def bias_of(given: Mapping[str, float]) -> dict[int, float]:
    """Returns `logit_bias` by token id, which JSON writes as a text."""
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,9}", name) for name in given):
        raise RestoreKVError(
            "logit_bias names tokens by their ids, such as {'50256': -100}; give numbers."
        )
    return {int(name): value for name, value in given.items()}


@dataclass(frozen=True)
class Conversation:
    """What a list of messages comes to: files by id and texts, in order; earlier turns; the
    question.
    """

    documents: Sequence[tuple[str, str | Attached]]  # as `Part.document`
    system: str
    turns: Sequence[tuple[str, str]]
    question: str


def conversation(messages: Sequence[Message]) -> Conversation:
    """Reads messages: system first, then the user and the assistant in turn; documents stand in the
    first of them.
    """
    system = "\n\n".join(words(each) for each in messages if each.role in ("system", "developer"))
    said = [each for each in messages if each.role in ("user", "assistant")]
    first = len(messages) - len(said)
    if any(each.role not in ("system", "developer") for each in messages[:first]):
        raise RestoreKVError("System messages come first; put them before the others.")
    roles = [each.role for each in said]
    if roles != ["user", "assistant"] * (len(said) // 2) + ["user"]:
        raise RestoreKVError(
            "After system messages, user and assistant take turns, and the user has the last word."
        )
    documents, question = opened(said[0])
    questions = [question, *(words(each) for each in said[2::2])]
    answers = [words(each) for each in said[1::2]]
    return Conversation(
        documents, system, list(zip(questions[:-1], answers, strict=True)), questions[-1]
    )


def opened(message: Message) -> tuple[list[tuple[str, str | Attached]], str]:
    """Returns the documents of the first message and the question after them."""
    documents = []
    question = []
    for part in message.content if isinstance(message.content, list) else []:
        check_kind(part)
        document = part.document
        if document and question:
            raise RestoreKVError(WHERE)
        if document and not document[1]:
            raise RestoreKVError(
                NAMELESS if document[0] == "file" else "A document is empty; give a text."
            )
        (documents if document else question).append(document or part.text or "")
    if not documents:
        raise RestoreKVError(f"There is no document to ask. {WHERE}")
    return documents, "\n".join(question)


def words(message: Message) -> str:
    """Returns the text of a message; refuses documents, which belong into the first one."""
    if message.content is None and message.role != "assistant":
        raise RestoreKVError("Only an assistant's message may have no content; give a text.")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        check_kind(part)
        if part.cached or "file" in part.type:
            raise RestoreKVError(WHERE)
    return "\n".join(part.text or "" for part in message.content)


def check_kind(part: Part) -> None:
    if part.type not in PARTS:
        raise RestoreKVError(
            f"A part of a message is a text or a file here, not {part.type[:40]!r}; leave it out."
        )
