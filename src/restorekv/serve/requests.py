"""Requests in OpenAI's form, and what they ask: documents, turns and a question."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mimetypes import MimeTypes
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from restorekv.errors import OptionError, RestoreKVError, name_option
from restorekv.generation.sampling import MIN_TEMPERATURE, SamplingConfig
from restorekv.model.prompt import check_question
from restorekv.model.tokenize import check_unicode
from restorekv.readers.extract import TEXT, find_kind, guess_ending, printable_name
from restorekv.serve import fields
from restorekv.serve.variants import Variant

PART_TYPES = ("text", "input_text", "output_text", "file", "input_file")
LARGEST_SCHEMA = 1 << 15  # characters; one of 250,000 blocks all other requests for 17 seconds

DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
# Endings that are added to the names of files without a known one, by media type.
ENDINGS = {
    "application/pdf": ".pdf",
    "application/xhtml+xml": ".html",
    "text/html": ".html",
    "text/markdown": ".md",
    DOCX: ".docx",
    "application/epub+zip": ".epub",
}
# Types of texts, besides those that begin with "text/" or end in "+json" or "+xml".
TEXT_TYPES = {
    "application/javascript",
    "application/json",
    "application/toml",
    "application/x-yaml",
    "application/xml",
    "application/yaml",
}
# What clients send if they know no type; "none" is LlamaIndex's.
UNKNOWN_TYPES = {"", "application/octet-stream", "none", "null", "undefined"}
CHARSETS = {"", "utf-8", "utf8", "us-ascii"}

# Python's own, not the system's, so that a name means the same everywhere.
KNOWN_ENDINGS = {*MimeTypes().types_map[True], *ENDINGS.values(), ".rkv"}

EARLIER = "previous_response_id"  # the field that replaces the messages up to an answer

WHOSE_DOCUMENTS = (
    "An assistant message cannot have documents; move the part to a user or system message."
)
NAMELESS = (
    "A file part must name its file: {'type': 'file', 'file': {'file_id': ...}}, or have its "
    "filename and file_data."
)


def _check_text(text: str) -> str:
    check_unicode(text)
    return text


Text = Annotated[str, AfterValidator(_check_text)]


@dataclass(frozen=True)
class UploadedFile:
    """An uploaded file by its id, and the kind of file that the request says it is, if it does."""

    id: str
    kind: str | None = None


@dataclass(frozen=True)
class AttachedFile:
    """A file inside a request."""

    name: str
    content: bytes


# A document of a request: a text itself, or a file.
DocumentPart = str | UploadedFile | AttachedFile


@dataclass(frozen=True)
class RequestedDocument:
    """A document of a request, and the field that names it, such as "messages.0.content.1.file"."""

    part: DocumentPart
    field: str


class FileReference(BaseModel):
    """A file by its id, or the file itself: its name, and its bytes in base64 or as a data: URL.

    `format` is litellm's: the file's media type.
    """

    file_id: Text | None = None
    filename: Text | None = None
    file_data: Text | None = None
    format: Text | None = None

    def find_file(self) -> UploadedFile | AttachedFile:
        """Return the file; its id is empty if the request has neither an id nor a file."""
        if self.file_id and self.file_data:
            raise RestoreKVError("A file part must have file_id or file_data, not both; drop one.")
        stated_type = (self.format or "").strip().lower()
        stated_kind = find_kind_of_type(stated_type)
        if self.file_id or not self.file_data:
            return UploadedFile(self.file_id or "", stated_kind)
        media_type, content = _decode_file(self.file_data)
        if media_type in UNKNOWN_TYPES:
            media_type = stated_type
        name = self.filename or "file"
        if PurePath(name).suffix.lower() not in KNOWN_ENDINGS:
            find_kind_of_type(media_type)  # refuses a picture and the like
        name = complete_name(name, media_type, content)
        if stated_kind not in (None, find_kind(name)):
            raise RestoreKVError(
                f"The format of a file is {printable_name(stated_type)}, which does not match its "
                f"name or data: URL ({printable_name(name)}); make them agree."
            )
        _check_name(name, media_type)
        return AttachedFile(name, content)


def complete_name(name: str, media_type: str, content: bytes) -> str:
    """Return the name of a file with the ending that says how it is read.

    That is the name's own ending if it is a known one, else that of the media type. Without either
    it is guessed from how the file begins.

    Args:
        name: What the client calls the file.
        media_type: In lower case; it may be one of UNKNOWN_TYPES.
        content: The bytes, or the first of them.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix in KNOWN_ENDINGS:
        return name
    # What follows the last dot need not be an ending, as in "notes v1.2".
    if media_type in ENDINGS:
        return name + ENDINGS[media_type]
    # A file with an unknown ending, such as .php, may be a text that only begins like an HTML page.
    if media_type in UNKNOWN_TYPES and not suffix:
        return name + guess_ending(content)
    return name


def _check_name(name: str, media_type: str) -> None:
    """Refuse a PDF, DOCX or EPUB with the name of a different kind, and one of these names for a
    file of a different kind.

    Between texts the name decides, since many clients call all of them text/plain.
    """
    kind = find_kind(name)
    stated = find_kind(f"file{ENDINGS.get(media_type, '.txt')}")
    is_stated = media_type in ENDINGS or _is_text_type(media_type)
    if is_stated and kind != stated and {kind, stated} - {TEXT, "html"}:
        raise RestoreKVError(
            f"A file is named {printable_name(name)}, and its type is "
            f"{printable_name(media_type)}; send a filename with the ending of its kind."
        )


def find_kind_of_type(media_type: str) -> str | None:
    """Return the kind of a media type's files (extract.py), or None if the type does not say;
    refuse types that cannot be read.
    """
    if media_type in UNKNOWN_TYPES:
        return None
    if media_type in ENDINGS:
        return find_kind(f"file{ENDINGS[media_type]}")
    if _is_text_type(media_type):
        return TEXT
    printable = printable_name(media_type)
    if "/" not in media_type:
        raise RestoreKVError(
            f"A format must be a media type such as application/pdf, not {printable!r}."
        )
    raise RestoreKVError(
        f"Files of the type {printable} cannot be read here; send a text, HTML, PDF, DOCX or EPUB."
    )


def _is_text_type(media_type: str) -> bool:
    """Return whether files of a media type are texts, HTML and Markdown among them."""
    is_known = media_type in TEXT_TYPES or media_type.startswith("text/")
    return is_known or media_type.endswith(("+json", "+xml"))


def _decode_file(file_data: str) -> tuple[str, bytes]:
    """Return the media type of base64 or a data: URL, "" without one, and the bytes.

    Raises:
        RestoreKVError: It is neither, or a text in an encoding other than UTF-8.
    """
    wrong = RestoreKVError("file_data must be base64, or a data: URL of it; encode the file.")
    header, comma, encoded = file_data.rpartition(",")
    media_type = ""
    if comma:
        scheme, _, rest = header.lower().partition(":")
        media_type, *parameters = [part.strip() for part in rest.split(";")]
        if scheme != "data" or "base64" not in parameters:
            raise wrong
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name == "charset" and value.strip('"') not in CHARSETS:
                raise RestoreKVError(
                    f"file_data is a text in {printable_name(value)}; save it as UTF-8 first."
                )
    # Programs such as `base64` wrap their output into lines.
    encoded = "".join(encoded.split())
    try:
        return media_type, base64.b64decode(encoded, validate=True)
    except ValueError:
        raise wrong from None


class MessagePart(FileReference):
    """A piece of a message: a text, which may be a document, or a file."""

    type: Text
    text: Text | None = None
    file: FileReference | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored; `check_type` refuses parts of other types."""
        if not isinstance(given, dict) or given.get("type") not in PART_TYPES:
            return given
        taken = fields.take_known(given, cls.model_fields, fields.PART_IGNORED, fields.PART_REFUSED)
        fields.check_cache_marks(taken)
        fields.check_kind_of_part(taken)
        if taken.get("file"):
            known = FileReference.model_fields
            refused = fields.PART_REFUSED
            taken["file"] = fields.take_known(taken["file"], known, frozenset(), refused, "file.")
        return taken

    @property
    def is_document(self) -> bool:
        """Whether this is a file, or a text that is marked as a document."""
        # `check_cache_marks` has refused marks that are neither null nor of the known kind.
        is_marked = bool(self.cache_control or self.prompt_cache_breakpoint)
        return "file" in self.type or is_marked

    @property
    def document_field(self) -> str:
        """The field that has the document; "" if the part itself names its file."""
        if "file" not in self.type:
            return "text"
        return "file" if self.type == "file" or self.file else ""

    def find_document(self) -> DocumentPart:
        """Return the document that this part is; raise RestoreKVError if it is empty."""
        if "file" not in self.type:
            if not self.text:
                raise RestoreKVError("A document is empty; give a text.")
            return self.text
        document = (self.file or self).find_file()
        if isinstance(document, UploadedFile) and not document.id:
            raise RestoreKVError(NAMELESS)
        return document

    def check_type(self) -> None:
        """Refuse a part that is neither a text nor a file."""
        if self.type not in PART_TYPES:
            raise RestoreKVError(
                f"A part of a message must be a text or a file here, not {self.type[:40]!r}; "
                "leave it out."
            )


class Message(BaseModel):
    """Who says what; an assistant may have said nothing."""

    model_config = fields.make_config(fields.MESSAGE_IGNORED, fields.MESSAGE_REFUSED)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[MessagePart] | None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        # An input of the Responses API may hold calls of tools and reasoning, too.
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "message"):
            printable = printable_name(str(kind))[:40]
            why = f"is {printable!r}, and only messages are read here; leave that item out"
            raise fields.make_field_error("unsupported_parameter", "type", why)
        return fields.take_known(
            given, cls.model_fields, fields.MESSAGE_IGNORED, fields.MESSAGE_REFUSED
        )


class Format(BaseModel):
    """How answers look: `text`, `json_object`, or a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        taken = fields.take_known(given, cls.model_fields, frozenset(), {})
        if not isinstance(taken, dict):
            return taken
        field = "json_schema"
        has_schema = taken.get("json_schema") is not None
        if has_schema != (taken.get("type") == "json_schema"):
            why = "is for type json_schema alone; send both or neither"
            raise fields.make_field_error("invalid_value", field, why)
        if has_schema:
            known = {"schema": None}
            schema = fields.take_known(
                taken["json_schema"], known, fields.FORMAT_IGNORED, {}, f"{field}."
            )
            if isinstance(schema, dict) and not isinstance(schema.get("schema", {}), dict | None):
                raise fields.make_field_error(
                    "invalid_value", f"{field}.schema", "must be an object, which is a JSON schema"
                )
        return taken

    def find_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that answers follow, None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        schema = (self.json_schema or {}).get("schema") or {}
        if len(json.dumps(schema)) > LARGEST_SCHEMA:
            raise OptionError(
                f"The JSON schema has more than {LARGEST_SCHEMA:,} characters; shorten it.",
                "response_format",
            )
        return schema


@dataclass(frozen=True)
class AnswerDefaults:
    """Settings of answers, for requests that do not give them.

    Args:
        temperature: 1, as in OpenAI's API, unless the server's flag says otherwise.
        stop_repeats: As in `SamplingRequest`; 0 never ends an answer that repeats itself.
    """

    temperature: float = 1.0
    stop_repeats: int = 0

    def __post_init__(self) -> None:
        # Refused when the server starts, not with every request.
        SamplingConfig.make(temperature=self.temperature, stop_repeats=self.stop_repeats)


class SamplingRequest(BaseModel):
    """How answers are written and sent: what all requests for completions have."""

    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    # 0 is the likeliest token alone, as in OpenAI's API.
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    # Some clients send negative numbers; `list_options` maps each to one of ours.
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    # From here, the names are vLLM's. A top_k of -1 or 0 is all tokens.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    # Ours: an answer ends once it ends with the same block of tokens this many times; 0 (never) or
    # 2 to 1000.
    stop_repeats: int | None = Field(None, ge=0, le=1000)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def refuse_booleans(cls, given: Any) -> Any:
        """Refuse true and false as the bias of a token."""
        if isinstance(given, dict):
            for token, value in given.items():
                fields.refuse_boolean(str(token), value)
        return given

    @property
    def includes_usage(self) -> bool:
        """Whether the last event of a stream says what the answer cost."""
        return bool((self.stream_options or {}).get("include_usage"))

    def make_sampling(self, defaults: AnswerDefaults) -> SamplingConfig:
        """Return how the answers are written. The seed is random unless the request has one."""
        return SamplingConfig.make(**self.list_options(defaults))

    def list_options(self, defaults: AnswerDefaults) -> dict[str, Any]:
        """Return settings of `SamplingConfig`: what the request asks for, else the defaults."""
        options: dict[str, Any] = {
            "temperature": _choose(self.temperature, defaults.temperature),
            "top_p": self.top_p or 1.0,
            "samples": self.n or 1,
            "stop": self.stop or (),
            "seed": secrets.randbelow(2**31) if self.seed is None else self.seed % 2**62,
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "stop_repeats": _choose(self.stop_repeats, defaults.stop_repeats),
        }
        # Clients ask for the likeliest tokens with 1e-8, too.
        if self.top_p == 0 or options["temperature"] < MIN_TEMPERATURE:
            options["temperature"] = 0.0
        if self.logit_bias:
            options["logit_bias"] = _parse_bias(self.logit_bias)
        return options


class ChatRequest(SamplingRequest):
    """What `/v1/chat/completions` takes; fields.py says what becomes of OpenAI's other fields."""

    model_config = fields.make_config(fields.CHAT_IGNORED, fields.CHAT_REFUSED)

    model: Text
    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Format | None = None

    @model_validator(mode="before")
    @classmethod
    def take_fields(cls, given: Any) -> Any:
        """Refuse fields that would be ignored."""
        return fields.take_request(
            given, cls.model_fields, fields.CHAT_IGNORED, fields.CHAT_REFUSED
        )

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fields.make_field_error(
                "invalid_value", "top_logprobs", "needs logprobs: true; add it"
            )
        return self

    def list_options(self, defaults: AnswerDefaults) -> dict[str, Any]:
        options = super().list_options(defaults)
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        schema = (self.response_format or Format()).find_schema()
        if schema is not None:
            options["json_schema"] = schema
        return options


def _parse_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Return `logit_bias` by token id, which JSON writes as a text."""
    bias = {}
    for name, value in given.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", name):
            raise OptionError(
                "logit_bias must name tokens by their ids, such as {'50256': -100}.",
                "logit_bias",
            )
        bias[int(name)] = value
    return bias


@dataclass(frozen=True)
class ParsedChat:
    """What a chat request asks.

    Args:
        documents: In their order; without one, the plain model answers.
        system: All system messages.
        turns: Earlier questions with their answers.
        question: The last question.
        answer_prefix: What the assistant has begun to answer to it, or "".
        variant: How the documents are held.
        sampling: How the answers are written.
        limit: How many tokens an answer may have.
    """

    documents: Sequence[RequestedDocument]
    system: str
    turns: Sequence[tuple[str, str]]
    question: str
    answer_prefix: str
    variant: Variant
    sampling: SamplingConfig
    limit: int


def parse_chat(
    request: ChatRequest,
    base: str,
    max_tokens: int,
    defaults: AnswerDefaults,
    names: Sequence[str] | None = None,
) -> ParsedChat:
    """Parse a request into system messages and the turns of user and assistant.

    Any message but the assistant's may hold documents. The model reads all of them first, in their
    order; the texts of a message stay together. Chat templates do not allow a system message after
    the first turn, so it becomes a user message. Nor do they allow a conversation that the
    assistant begins, so an empty question precedes it. If the last message is the assistant's, the
    model continues it.

    Args:
        request: What was sent.
        base: The name of the server's model.
        max_tokens: The server's limit on answers.
        defaults: Settings of answers, for what the request does not give.
        names: The fields of the messages, for errors; "messages.0" and so on by default.

    Raises:
        OptionError: A message cannot be used; `option` is the field.
    """
    if names is None:
        names = [f"messages.{number}" for number in range(len(request.messages))]
    documents: list[RequestedDocument] = []
    system: list[str] = []
    roles: list[str] = []
    texts: list[str] = []
    for message, name in zip(request.messages, names, strict=True):
        text = _read_message(message, name, documents)
        role = message.role
        if role in ("system", "developer"):
            if not roles:
                system.append(text)
                continue
            role = "user"
        if not roles and role == "assistant":
            roles.append("user")
            texts.append("")
        if roles and roles[-1] == role:
            # Chat templates do not allow two messages of the same role in a row.
            texts[-1] = _join_texts([texts[-1], text])
        else:
            roles.append(role)
            texts.append(text)
    answer_prefix = ""
    if roles and roles[-1] == "assistant":
        answer_prefix = texts.pop()
        if (request.response_format or Format()).find_schema() is not None:
            raise OptionError(
                "response_format cannot continue a partial answer; leave out the assistant's last "
                "message.",
                "response_format",
            )
    if not texts:
        raise OptionError("There is no question; send a user message.", "messages")
    questions = texts[::2]
    # Checked here as well, because the engine would refuse it only after compressing documents.
    with name_option("messages"):
        check_question(questions[-1])
    return ParsedChat(
        documents=documents,
        system=_join_texts(system),
        turns=list(zip(questions[:-1], texts[1::2], strict=True)),
        question=questions[-1],
        answer_prefix=answer_prefix,
        variant=Variant.parse(request.model, base),
        sampling=request.make_sampling(defaults),
        limit=min(request.max_completion_tokens or request.max_tokens or max_tokens, max_tokens),
    )


def _choose(asked: float | None, default: float) -> float:
    """Return the value that a request asks for, which may be 0, or the default."""
    return default if asked is None else asked


def read_text(message: Message) -> str:
    """Return the text of a message, without its documents."""
    return _read_message(message, "messages.0", [])


def _read_message(message: Message, name: str, documents: list[RequestedDocument]) -> str:
    """Return the text of a message, and add its documents to those of the conversation.

    Args:
        message: What was sent.
        name: Its field, for errors.
        documents: The list to which its documents are added.

    Raises:
        OptionError: The message cannot be used; `option` is the field.
    """
    content = _name_inside(name, "content")
    if message.content is None and message.role != "assistant":
        raise OptionError("Only an assistant's message may have no content; give a text.", content)
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        name_of_part = _name_inside(content, str(number))
        with name_option(_name_inside(name_of_part, "type")):
            part.check_type()
        if not part.is_document:
            texts.append(part.text or "")
        elif message.role == "assistant":
            raise OptionError(WHOSE_DOCUMENTS, name_of_part)
        else:
            field = _name_inside(name_of_part, part.document_field)
            with name_option(field):
                documents.append(RequestedDocument(part.find_document(), field))
    return "\n".join(texts)


def _name_inside(name: str, inner: str) -> str:
    """Return the name of a field inside another one.

    Inside EARLIER it is EARLIER itself: the request has no field for each of those messages, only
    the id of the answer to them.
    """
    return f"{name}.{inner}" if inner and name != EARLIER else name


def _join_texts(texts: Sequence[str]) -> str:
    """Return texts with a blank line between them; empty ones are left out."""
    return "\n\n".join(text for text in texts if text)
