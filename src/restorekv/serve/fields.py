"""Which fields of OpenAI's requests have an effect, which change no answer, and which are refused.

A field that the request's class has is honored. All others are in one of the two tables below, or
unknown, which is refused as well: a server that ignores what it was asked for would silently give
wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString, NamedTuple

from pydantic import ConfigDict
from pydantic_core import PydanticCustomError

TOOLS = "this server calls no tools"
REASONING = "the models here do not reason first"
# Frameworks ask for a call of a tool if they want an answer in JSON.
WITHOUT_TOOLS = "leave it out, or ask for an answer in JSON by {}"


class Refusal(NamedTuple):
    """The error of a field that cannot be honored: "X is not supported, since WHY; FIX".

    Args:
        nothing: The values that ask for nothing, in addition to null.
        why: Why others cannot be honored.
        fix: What a client can do instead.
    """

    nothing: tuple[Any, ...]
    why: str
    fix: str = "leave it out"


Refused = Mapping[str, Refusal]  # by field

IGNORED_ALWAYS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        # An answer may always be a text, unless `tool_choice` asks for a call.
        "tools",
        "user",
    }
)
REFUSED_ALWAYS: Refused = {
    "moderation": Refusal((), "this server moderates nothing"),
    "tool_choice": Refusal(("none", "auto"), TOOLS, WITHOUT_TOOLS.format("response_format")),
}

CHAT_IGNORED = IGNORED_ALWAYS | {"functions", "prediction", "store"}
CHAT_REFUSED: Refused = {
    **REFUSED_ALWAYS,
    "audio": Refusal((), "answers are text"),
    # A field of vLLM, by which clients turn thinking off.
    "chat_template_kwargs": Refusal(
        ({"enable_thinking": False}, {}), "the chat template is used unchanged, with thinking off"
    ),
    "function_call": Refusal(("none", "auto"), TOOLS),
    "modalities": Refusal((["text"],), "answers are text"),
    "reasoning_effort": Refusal(("none",), REASONING),
    "verbosity": Refusal(
        ("medium",),
        "no model here has such a setting",
        "ask in words for a short or a long answer",
    ),
    "web_search_options": Refusal((), TOOLS),
}

COMPLETION_IGNORED = frozenset({"service_tier", "user"})
COMPLETION_REFUSED: Refused = {
    "best_of": Refusal((1,), "every answer is returned", "use n to ask for several"),
    "echo": Refusal((False,), "an answer is what follows the prompt"),
    "suffix": Refusal(("",), "the models here write after a text, not before one"),
}

RESPONSES_IGNORED = (IGNORED_ALWAYS - {"metadata"}) | {"max_tool_calls", "stream_options"}
RESPONSES_REFUSED: Refused = {
    **REFUSED_ALWAYS,
    "access_programs": Refusal(([],), TOOLS),
    "background": Refusal((False,), "an answer is written while its request waits"),
    "background_options": Refusal((), "an answer is written while its request waits"),
    "context_management": Refusal(([],), "a conversation is read as a whole"),
    "conversation": Refusal(
        (), "this server keeps no conversations", "name the last answer as previous_response_id"
    ),
    "image": Refusal((), "answers are text"),
    "include": Refusal(
        ([], ["reasoning.encrypted_content"]), "answers have nothing but their text"
    ),
    "prompt": Refusal((), "this server keeps no prompts", "send its text as input"),
    "reasoning": Refusal(({}, {"effort": None}, {"effort": "none"}), REASONING),
    "tool_choice": Refusal(("none", "auto"), TOOLS, WITHOUT_TOOLS.format("text.format")),
    "top_logprobs": Refusal(
        (0,), "responses have no log-probabilities", "ask /v1/chat/completions for them"
    ),
    "truncation": Refusal(("disabled",), "a conversation is read as a whole"),
}

TEXT_REFUSED: Refused = {"verbosity": CHAT_REFUSED["verbosity"]}
MESSAGE_IGNORED = frozenset({"annotations", "id", "name", "phase", "refusal", "status", "type"})
MESSAGE_REFUSED: Refused = {
    "audio": Refusal((), "messages are text and files"),
    "function_call": Refusal((), TOOLS),
    "reasoning": Refusal((), REASONING),
    "tool_call_id": Refusal((), TOOLS),
    "tool_calls": Refusal(([],), TOOLS),
}
PART_IGNORED = frozenset({"annotations", "detail", "id", "index", "logprobs"})
PART_REFUSED: Refused = {
    "file_url": Refusal(
        (), "this server fetches nothing from other sites", "upload the file and send its file_id"
    ),
}
# OpenAI's and Anthropic's marks that make a text a document; for each, the field with its kind, and
# the only kind that there is. How long a cache lasts is up to the server.
CACHE_MARKS = {
    "prompt_cache_breakpoint": ("mode", "explicit"),
    "cache_control": ("type", "ephemeral"),
}
MARK_IGNORED = frozenset({"ttl"})
# Fields that name a file, in a part of a message or in the object `file` of a part.
FILE_FIELDS = ("file_id", "filename", "file_data", "format")
# Fields of an answer's format without effect; every answer follows its schema strictly anyway.
FORMAT_IGNORED = frozenset({"description", "name", "strict"})
NUMBERS: tuple[Any, ...] = (int | None, float | None)  # types of fields that are numbers
STREAM = frozenset({"include_usage", "include_obfuscation"})


# Names that other servers have for fields of requests here.
FIELD_ALIASES = {
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}


def take_known(
    given: Any,
    honored: Mapping[str, object],
    ignored: frozenset[str],
    refused: Refused,
    prefix: str = "",
) -> Any:
    """Return an object of a request without the fields that have no effect.

    Args:
        given: What the request holds; anything but an object is returned unchanged.
        honored: The fields that have an effect.
        ignored: Those that may have any value, since none changes an answer.
        refused: Those that may only ask for nothing.
        prefix: What an error puts before the names of its fields, such as "file.", if the object
            is inside the one that pydantic validates and names.

    Raises:
        PydanticCustomError: A field is unknown, asks for what is not supported, or has a boolean
            instead of a number.
    """
    if not isinstance(given, dict):
        return given
    taken = {}
    for name, value in given.items():
        if name in honored:
            if getattr(honored[name], "annotation", None) in NUMBERS:
                refuse_boolean(prefix + name, value)
            taken[name] = value
        elif name in refused:
            refusal = refused[name]
            if value is not None and not _is_one_of(value, refusal.nothing):
                raise make_field_error(
                    "unsupported_parameter",
                    prefix + name,
                    f"is not supported, since {refusal.why}; {refusal.fix}",
                )
        elif name not in ignored:
            ours = FIELD_ALIASES.get(name)
            fix = f"use {ours}" if ours in honored else "leave it out"
            raise make_field_error(
                "unknown_parameter", prefix + name, f"is not a field of this request; {fix}"
            )
    return taken


def refuse_boolean(name: str, value: Any) -> None:
    """Refuse true and false where a number belongs.

    Pydantic would silently read true, such as a flag of a different API, as 1.
    """
    if isinstance(value, bool):
        raise make_field_error("invalid_value", name, "must be a number, not true or false")


def take_request(
    given: Any, honored: Mapping[str, object], ignored: frozenset[str], refused: Refused
) -> Any:
    """Return a request that may be streamed without the fields that have no effect."""
    taken = take_known(given, honored, ignored, refused)
    if isinstance(taken, dict):
        field = "stream_options"
        options = take_known(taken.get(field), dict.fromkeys(STREAM), frozenset(), {}, f"{field}.")
        if not isinstance(options, dict):
            return taken  # none were sent, or their type is refused later
        for name, value in options.items():
            if not isinstance(value, bool | None):
                why = "must be a boolean, true or false"
                raise make_field_error("invalid_value", f"{field}.{name}", why)
    return taken


def check_cache_marks(part: Mapping[str, Any]) -> None:
    """Refuse a mistyped mark of a message part. Ignoring it would leave a text uncompressed.

    Raises:
        PydanticCustomError: A mark is of no known kind, or has an unknown field.
    """
    for mark, (name, known) in CACHE_MARKS.items():
        given = part.get(mark)
        if not isinstance(given, dict):
            continue
        take_known(given, {name: None}, MARK_IGNORED, {}, f"{mark}.")
        if given.get(name) != known:
            raise make_field_error(
                "invalid_value",
                f"{mark}.{name}",
                f'must be "{known}"; send that, or leave out the mark',
            )


def check_kind_of_part(part: Mapping[str, Any]) -> None:
    """Refuse a text in a file part and a file in a text part, which would be ignored.

    Raises:
        PydanticCustomError: A part has a field of the other kind, or names two files.
    """
    is_file = "file" in part["type"]
    for name in ("text",) if is_file else ("file", *FILE_FIELDS):
        if part.get(name):
            other = "text" if is_file else "file"
            why = f"is not read in a part of type {part['type']}; send a part of type {other}"
            raise make_field_error("invalid_value", name, why)
    if part.get("file"):
        for name in FILE_FIELDS:
            if part.get(name):
                why = "comes next to file, which names one as well; leave one of them out"
                raise make_field_error("invalid_value", name, why)


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Return whether a value is one of those, of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in known)


def make_config(ignored: frozenset[str], refused: Refused) -> ConfigDict:
    """Return a request class's setting that lists these fields in its schema, and no others."""

    def extend(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        for name in ignored:
            schema["properties"].setdefault(name, {})
        for name, refusal in refused.items():
            schema["properties"][name] = {"enum": [None, *refusal.nothing]}

    return ConfigDict(json_schema_extra=extend)


def make_field_error(code: LiteralString, name: str, why: str) -> PydanticCustomError:
    """Return an error that app.py turns into an answer that names the field.

    Args:
        code: A word for programs.
        name: The field, named inside the object that pydantic validates.
        why: The rest of the sentence.
    """
    return PydanticCustomError(code, "{param} {why}", {"param": name[:120], "why": why})
