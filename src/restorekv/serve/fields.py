"""Which fields of OpenAI's requests have an effect, which change no answer, and which are refused.

A field that the request's class has is honored. All others are in one of the two tables below, or
unknown, which is refused as well: a server that ignores what it was asked for would give wrong
answers without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from pydantic import ConfigDict
from pydantic_core import PydanticCustomError

TOOLS = "this server calls no tools"
REASONING = "the models here do not reason first"

# By field: the values that ask for nothing, in addition to null, and why others cannot be honored.
Refused = Mapping[str, tuple[tuple[Any, ...], str]]

IDLE_ALWAYS = frozenset(
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
    "moderation": ((), "this server moderates nothing"),
    "tool_choice": (("none", "auto"), TOOLS),
}

CHAT_IDLE = IDLE_ALWAYS | {"functions", "prediction", "store"}
CHAT_REFUSED: Refused = {
    **REFUSED_ALWAYS,
    "audio": ((), "answers are text"),
    "function_call": (("none", "auto"), TOOLS),
    "modalities": ((["text"],), "answers are text"),
    "reasoning_effort": (("none",), REASONING),
    "verbosity": (("medium",), "ask for short or long answers in words"),
    "web_search_options": ((), TOOLS),
}

COMPLETION_IDLE = frozenset({"service_tier", "user"})
COMPLETION_REFUSED: Refused = {
    "best_of": ((1,), "every answer is returned; ask for n of them"),
    "echo": ((False,), "an answer is what follows the prompt"),
    "suffix": (("",), "the models here write after a text, not before one"),
}

RESPONSES_IDLE = (IDLE_ALWAYS - {"metadata"}) | {"max_tool_calls", "stream_options"}
RESPONSES_REFUSED: Refused = {
    **REFUSED_ALWAYS,
    "access_programs": (([],), TOOLS),
    "background": ((False,), "an answer is written while its request waits"),
    "background_options": ((), "an answer is written while its request waits"),
    "context_management": (([],), "a conversation is read as a whole"),
    "conversation": ((), "name the last answer as previous_response_id"),
    "image": ((), "answers are text"),
    "include": (([], ["reasoning.encrypted_content"]), "answers have no more than their text"),
    "prompt": ((), "this server keeps no prompts"),
    "reasoning": (({}, {"effort": None}, {"effort": "none"}), REASONING),
    "top_logprobs": ((0,), "ask for them at /v1/chat/completions"),
    "truncation": (("disabled",), "a conversation is read as a whole"),
}

TEXT_REFUSED: Refused = {"verbosity": CHAT_REFUSED["verbosity"]}
MESSAGE_IDLE = frozenset({"annotations", "id", "name", "phase", "refusal", "status", "type"})
MESSAGE_REFUSED: Refused = {
    "audio": ((), "messages are text and files"),
    "function_call": ((), TOOLS),
    "reasoning": ((), REASONING),
    "tool_call_id": ((), TOOLS),
    "tool_calls": (([],), TOOLS),
}
PART_IDLE = frozenset({"annotations", "detail", "id", "index", "logprobs"})
PART_REFUSED: Refused = {
    "file_url": ((), "this server fetches nothing; upload the file"),
}
# Fields of the file in a part: litellm says its kind, which its name or its data: URL says here.
FILE_IDLE = frozenset({"format"})
# Fields of a schema: every answer follows it strictly.
FORMAT_IDLE = frozenset({"description", "name", "strict"})
STREAM = frozenset({"include_usage", "include_obfuscation"})


# What other servers call a field that requests here have.
OTHER_NAMES = {
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}


def take_known(
    given: Any,
    honored: Mapping[str, object],
    idle: frozenset[str],
    refused: Refused,
    place: str = "",
) -> Any:
    """Return an object of a request without the fields that have no effect.

    Args:
        given: What the request holds; anything but an object is returned as it is.
        honored: The fields that have an effect.
        idle: Those that may have any value, since none changes an answer.
        refused: Those that may only ask for nothing.
        place: Where the object is in the request, such as "messages."; for the sentence.

    Raises:
        PydanticCustomError: A field is unknown, or asks for what is not supported.
    """
    if not isinstance(given, dict):
        return given
    taken = {}
    for name, value in given.items():
        if name in honored:
            taken[name] = value
        elif name in refused:
            nothing, why = refused[name]
            if value is not None and not _is_one_of(value, nothing):
                raise make_field_error(
                    "unsupported_parameter",
                    place + name,
                    f"is not supported, since {why}; leave it out",
                )
        elif name not in idle:
            ours = OTHER_NAMES.get(name)
            fix = f"use {ours}" if ours in honored else "leave it out"
            raise make_field_error(
                "unknown_parameter", place + name, f"is not a field of this request; {fix}"
            )
    return taken


def take_request(
    given: Any, honored: Mapping[str, object], idle: frozenset[str], refused: Refused
) -> Any:
    """Return a request that may be streamed without the fields that have no effect."""
    taken = take_known(given, honored, idle, refused)
    if isinstance(taken, dict):
        options = taken.get("stream_options")
        take_known(options, dict.fromkeys(STREAM), frozenset(), {}, "stream_options.")
    return taken


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Return whether a value is one of those, of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in known)


def make_config(idle: frozenset[str], refused: Refused) -> ConfigDict:
    """Return a request class's setting that lists these fields in its schema, and no others."""

    def extend(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        for name in idle:
            schema["properties"].setdefault(name, {})
        for name, (nothing, _) in refused.items():
            schema["properties"][name] = {"enum": [None, *nothing]}

    return ConfigDict(json_schema_extra=extend)


def make_field_error(code: LiteralString, name: str, why: str) -> PydanticCustomError:
    """Return an error that app.py turns into an answer that names the field."""
    return PydanticCustomError(code, "{param} {why}", {"param": name[:120], "why": why})
