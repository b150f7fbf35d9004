"""Every field of OpenAI's requests is honored, has no effect by its nature, or is refused
by name.
"""

import json
import re
import typing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

openai = pytest.importorskip("openai")

from openai.types import file_create_params  # noqa: E402
from openai.types.chat import completion_create_params  # noqa: E402
from openai.types.responses import response_create_params  # noqa: E402

from restorekv.serve import body, fields  # noqa: E402
from restorekv.serve.requests import ChatRequest, Message, MessagePart  # noqa: E402
from restorekv.serve.responses import ResponsesRequest  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    QUESTION,
    TEXT,
    VARIANT,
    about,
    ask,
    client_of,
    expected,
    serving,
)

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CHAT = typing.get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming)
RESPONSES = typing.get_type_hints(response_create_params.ResponseCreateParamsNonStreaming)
KINDS = {
    "chat": (CHAT, ChatRequest, fields.CHAT_IGNORED, fields.CHAT_REFUSED),
    "responses": (RESPONSES, ResponsesRequest, fields.RESPONSES_IGNORED, fields.RESPONSES_REFUSED),
}


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, tmp_path_factory):
    with serving(
        model, tiny_tokenizer, tmp_path_factory.mktemp("store"), limits=Limits(tokens=16)
    ) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def replace_each(value: object, others: list) -> typing.Iterator[object]:
    """Yield copies of a JSON value with one place, at any depth, replaced by each of `others`."""
    yield from others
    if isinstance(value, dict):
        for key, inner in value.items():
            for changed in replace_each(inner, others):
                yield {**value, key: changed}
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            for changed in replace_each(inner, others):
                yield [*value[:number], changed, *value[number + 1 :]]


SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}
REQUESTS = {
    "chat/completions": {
        "model": "nobody",
        "messages": [
            {"role": "system", "content": "Be short."},
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"file_id": "file-1"}},
                    {"type": "text", "text": "A note.", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "Hi"},
                ],
            },
        ],
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True},
        "tools": [],
        "metadata": {"a": "b"},
    },
    "responses": {
        "model": "nobody",
        "input": [
            {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "text": {"format": {"type": "json_schema", **SCHEMA}},
        "metadata": {},
    },
    "completions": {"model": "nobody", "prompt": [1, 2], "stop": ["a"], "logprobs": 1},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_values_of_any_type_are_refused_in_a_sentence(path, url):
    """The model does not exist, so that nothing is answered."""
    assert "no model 'nobody'" in sent(url, path, REQUESTS[path])[1]["message"]
    for request in replace_each(REQUESTS[path], [{}, [], [{}], "x", 1, True, None]):
        code, answer = sent(url, path, request)
        assert 400 <= code < 500, request
        assert answer["message"].endswith("."), request


def sent(url: str, path: str, request: dict) -> tuple[int, dict]:
    asked = Request(
        f"{url}/{path}", json.dumps(request).encode(), {"content-type": "application/json"}
    )
    try:
        with urlopen(asked) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def request_of(kind: str, file: object, **more: object) -> tuple[str, dict]:
    """Return a path and a body of a request that is answered."""
    if kind == "chat":
        body = {"messages": about(file), "max_tokens": 4}
    else:
        parts = [
            {"type": "input_file", "file_id": file.id},
            {"type": "input_text", "text": QUESTION},
        ]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    path = {"chat": "chat/completions", "responses": "responses"}[kind]
    return path, {"model": VARIANT, "temperature": 0, **body, **more}


def said(answer: dict) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    return answer["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_client_is_in_one_class(kind):
    theirs, ours, idle, refused = KINDS[kind]
    classes = [set(ours.model_fields), set(idle), set(refused)]
    assert set(theirs) <= set.union(*classes), "classify it in fields.py, and in docs/serving.md"
    assert sum(map(len, classes)) == len(set.union(*classes)), "a field is in one class alone"


@pytest.mark.parametrize("kind", KINDS)
def test_the_description_lists_every_field_and_no_other(kind):
    theirs, ours, *_ = KINDS[kind]
    described = ours.model_json_schema()
    assert (
        set(theirs) <= set(described["properties"]) and described["additionalProperties"] is False
    )
    assert (
        described["properties"]["tool_choice"] == {"enum": [None, "none", "auto"]}
        and described["properties"]["user"] == {}
    )


def test_every_field_of_an_upload_is_taken():
    names = {name.partition("[")[0] for name in body.FORM}
    assert set(typing.get_type_hints(file_create_params.FileCreateParams)) == names


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_in_the_documents_is_the_servers(kind):
    section = PAGE.read_text().partition("## Fields of requests\n")[2]
    rows = [
        line.replace("`", "").split("|")[1:4]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    column = list(KINDS).index(kind) + 1
    told = {row[0].strip(): row[column].strip() for row in rows}
    _, ours, idle, refused = KINDS[kind]
    known = {**dict.fromkeys(ours.model_fields, "honored"), **dict.fromkeys(idle, "no effect")}
    known |= dict.fromkeys(refused, "refused")
    assert {name: said for name, said in told.items() if said != "unknown"} == known


def test_the_documents_name_what_completions_ignore_and_refuse():
    text = " ".join(PAGE.read_text().split())
    ignored, refused = text.split("`/v1/completions` has the fields")[1].split("refuses", 1)
    assert set(re.findall(r"`(\w+)`", ignored.partition("ignores")[2])) == fields.COMPLETION_IGNORED
    assert set(re.findall(r"`(\w+)`", refused.partition(".")[0])) == set(fields.COMPLETION_REFUSED)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_without_effect_change_no_answer(kind, url, file):
    """Not even with a value of the wrong type; null counts as absent."""
    plain = sent(url, *request_of(kind, file))
    assert plain[0] == 200
    values = dict.fromkeys(KINDS[kind][3]) | {name: {"a": ["b"]} for name in KINDS[kind][2]}
    neutral = {name: each.nothing[0] for name, each in KINDS[kind][3].items() if each.nothing}
    metadata = {"metadata": {"a": "b"}}
    for more in (values | metadata, neutral):
        status, answer = sent(url, *request_of(kind, file, **more))
        assert status == 200, answer
        text = (
            (lambda x: x["choices"][0]["message"]["content"])
            if kind == "chat"
            else (lambda x: x["output"][0]["content"])
        )
        assert text(answer) == text(plain[1])


@pytest.mark.parametrize("kind", KINDS)
def test_refused_and_unknown_fields_are_named(kind, url, file):
    path, request = request_of(kind, file)
    for name in KINDS[kind][3]:
        status, error = sent(url, path, {**request, name: "x"})
        assert status == 400 and error["param"] == name and error["code"] == "unsupported_parameter"
        assert error["message"].startswith(f"{name} is not supported, since ") and error[
            "message"
        ].endswith(".")
    for name in ("nonsense", "logit_biases", "best_of", "guided_json", "x" * 1000, "é"):
        status, error = sent(url, path, {**request, name: None})
        assert (status, error["param"], error["code"]) == (400, name[:120], "unknown_parameter")
        assert (
            error["type"] == "invalid_request_error"
            and "not a field of this request" in error["message"]
        )


@pytest.mark.parametrize(
    "more, param",
    [
        ({"messages": [{"role": "user", "content": "a", "nonsense": 1}]}, "messages.0.nonsense"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "weight": 2}]}
                ]
            },
            "messages.0.content.0.weight",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
        ),
        ({"stream_options": {"nonsense": True}}, "stream_options.nonsense"),
        ({"response_format": {"type": "json_object", "grammar": "x"}}, "response_format.grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schemas": {}}}},
            "response_format.json_schema.schemas",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_fields_inside_are_not_ignored_either(url, file, more, param):
    status, error = sent(url, *request_of("chat", file, **more))
    assert (status, error["param"]) == (400, param)


FILE_PART = {"type": "file", "file": {"file_id": ""}}
TWO_FILES = {"type": "file", "file": {"file_id": "file-a", "file_data": "YQ=="}}
PAGES = {"type": "file", "file": {"file_id": "file-a", "format": "text/plain", "pages": "1-3"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
HELLO = {"role": "user", "content": "Hello."}
HI = {"type": "text", "text": "Hi."}
FLAT = {"type": "input_file"}
EMPTY = {"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}
NOT_BASE64 = {"type": "file", "file": {"filename": "a.txt", "file_data": "%"}}


@pytest.mark.parametrize(
    "more, param",
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 9: 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop_repeats": 1}, "stop_repeats"),
        ({"model": "tiny:kvzip-7"}, "model"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [FILE_PART]}]}, "messages.0.content.0.file"),
        ({"messages": [{"role": "user", "content": [TWO_FILES]}]}, "messages.0.content.0.file"),
        ({"messages": [HELLO, {"role": "user", "content": [FLAT]}]}, "messages.1.content.0"),
        ({"messages": [{"role": "user", "content": [EMPTY]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [NOT_BASE64]}]}, "messages.0.content.0.file"),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [HI, EMPTY]}]},
            "messages.1.content.1",
        ),
        (
            {"messages": [{"role": "user", "content": [PAGES]}]},
            "messages.0.content.0.file.pages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "messages"),
        ({"response_format": SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
    ],
)
def test_a_refusal_names_its_field(url, file, more, param):
    status, error = sent(url, *request_of("chat", file, **more))
    assert (status, error["param"]) == (400, param), error


def user(*parts: object) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


ABSENT = {"type": "file", "file": {"file_id": "file-absent"}}
DAMAGED = {"type": "input_file", "filename": "a.pdf", "file_data": "YQ=="}
ENDLESS_TEXT = {"type": "text", "text": "hello " * 4000, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("kind, field", [("chat", "messages"), ("responses", "input")])
@pytest.mark.parametrize(
    "part, status, inner",
    [
        (ABSENT, 404, "content.1.file"),
        (DAMAGED, 400, "content.1"),
        (ENDLESS_TEXT, 400, "content.1.text"),
    ],
)
def test_a_refusal_names_the_document_that_is_at_fault(url, file, kind, field, part, status, inner):
    good = {"type": "file", "file": {"file_id": file.id}}
    messages = [HELLO, {"role": "assistant", "content": "Hi."}, *user(good, part, HI)]
    code, error = sent(url, *request_of(kind, file, **{field: messages}))
    assert (code, error["param"]) == (status, f"{field}.2.{inner}"), error


def test_a_refused_response_does_not_count_what_it_has_besides_its_input(url, client):
    """Instructions and earlier turns come first, but do not shift the input's indices in errors."""
    made = client.files.create(file=("a.txt", TEXT.encode()), purpose="user_data")
    client.files.wait_for_processing(made.id)
    good = {"type": "input_file", "file_id": made.id}
    first = sent(url, *request_of("responses", made, input=user(good, HI)))[1]
    more = {"instructions": "Be brief.", "previous_response_id": first["id"]}
    status, error = sent(url, *request_of("responses", made, input=user(HI, ABSENT), **more))
    assert (status, error["param"]) == (404, "input.0.content.1.file"), error
    unknown = {**more, "previous_response_id": "resp-absent"}
    status, error = sent(url, *request_of("responses", made, input="Why?", **unknown))
    assert (status, error["param"]) == (404, "previous_response_id"), error
    # The file of the earlier turn is not part of this request.
    client.files.delete(made.id)
    status, error = sent(url, *request_of("responses", made, input="Why?", **more))
    assert (status, error["param"]) == (404, "previous_response_id"), error


@pytest.mark.parametrize(
    "path, field, value",
    [
        ("chat/completions", "messages", [{"role": "user", "content": "hello " * 4000}]),
        ("responses", "input", "hello " * 4000),
        ("completions", "prompt", "hello " * 4000),
        ("completions", "prompt", [10**9]),
        ("chat/completions", "messages", [{"role": "user", "content": ""}]),
        ("responses", "input", " \n"),
    ],
)
def test_a_refused_question_names_its_field(url, path, field, value):
    status, error = sent(url, path, {"model": "tiny", field: value})
    assert (status, error["param"]) == (400, field), error


@pytest.mark.parametrize(
    "path, more, param",
    [
        ("chat/completions", {"stream": "yes"}, "stream"),
        ("chat/completions", {"stream": 1}, "stream"),
        ("chat/completions", {"logprobs": "on"}, "logprobs"),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usage": "no"}},
            "stream_options.include_usage",
        ),
        (
            "completions",
            {"stream": True, "stream_options": {"include_obfuscation": 0}},
            "stream_options.include_obfuscation",
        ),
        ("completions", {"stream": "no"}, "stream"),
        ("responses", {"stream": "true"}, "stream"),
        ("responses", {"store": 0}, "store"),
    ],
)
def test_what_must_be_a_boolean_is_nothing_else(url, path, more, param):
    """The word "no" once counted as true in one place, and as false in others."""
    text = {"chat/completions": {"messages": [HELLO]}, "responses": {"input": "Hello."}}
    request = {"model": "tiny", **text.get(path, {"prompt": "Hello."}), **more}
    status, error = sent(url, path, request)
    assert (status, error["param"]) == (400, param), error
    assert error["message"].startswith(param) and "boolean" in error["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_stream_of_null_is_none(url, path):
    text = {"chat/completions": {"messages": [HELLO]}, "responses": {"input": "Hello."}}
    request = {"model": "tiny", **text.get(path, {"prompt": "Hello."}), "stream": None}
    if path != "responses":
        request["stream_options"] = {"include_usage": None}
    assert sent(url, path, request)[0] == 200


@pytest.mark.parametrize(
    "more, param, example, kind",
    [
        ({"messages": ["hi"]}, "messages.0", '{"role": "user", "content": "..."}', "a string"),
        (
            {"messages": user("hi")},
            "messages.0.content.0",
            '{"type": "text", "text": "..."}',
            "a string",
        ),
        (
            {"messages": user({"type": "file", "file": "file-1"}, {"type": "text", "text": "a"})},
            "messages.0.content.0.file",
            '{"file_id": "file-..."}',
            "a string",
        ),
        ({"response_format": "json"}, "response_format", '{"type": "json_object"}', "a string"),
        ({"response_format": ["json"]}, "response_format", '{"type": "json_object"}', "a list"),
        ({"stream_options": True}, "stream_options", '{"include_usage": true}', "a boolean"),
        ({"logit_bias": 1}, "logit_bias", '{"50256": -100}', "a number"),
    ],
)
def test_what_must_be_an_object_is_named(url, file, more, param, example, kind):
    status, error = sent(url, *request_of("chat", file, **more))
    assert (status, error["param"]) == (400, param)
    assert error["message"] == f"{param} must be an object such as {example}, not {kind}."


BREAKPOINT = "messages.0.content.0.prompt_cache_breakpoint"
CONTROL = "messages.0.content.0.cache_control"


@pytest.mark.parametrize(
    "mark, param, known",
    [
        ({"prompt_cache_breakpoint": {"mode": "Explicit"}}, f"{BREAKPOINT}.mode", "explicit"),
        ({"prompt_cache_breakpoint": {"mode": "auto"}}, f"{BREAKPOINT}.mode", "explicit"),
        ({"prompt_cache_breakpoint": {"mode": 5}}, f"{BREAKPOINT}.mode", "explicit"),
        ({"prompt_cache_breakpoint": {"mode": ["a"]}}, f"{BREAKPOINT}.mode", "explicit"),
        ({"prompt_cache_breakpoint": {}}, f"{BREAKPOINT}.mode", "explicit"),
        ({"cache_control": {"type": "foo"}}, f"{CONTROL}.type", "ephemeral"),
        ({"cache_control": {}}, f"{CONTROL}.type", "ephemeral"),
        ({"cache_control": {"ttl": "1h"}}, f"{CONTROL}.type", "ephemeral"),
    ],
)
def test_a_mistyped_cache_mark_is_refused(url, file, mark, param, known):
    """Such a mark was once ignored, so that the text silently was not compressed."""
    messages = user({"type": "text", "text": "A text.", **mark}, {"type": "text", "text": "Who?"})
    status, error = sent(url, *request_of("chat", file, messages=messages))
    assert (status, error["param"]) == (400, param)
    assert error["message"] == f'{param} must be "{known}"; send that, or leave out the mark.'


@pytest.mark.parametrize(
    "mark, param, message",
    [
        (
            {"prompt_cache_breakpoint": "explicit"},
            BREAKPOINT,
            'must be an object such as {"mode": "explicit"}, not a string',
        ),
        (
            {"cache_control": True},
            CONTROL,
            'must be an object such as {"type": "ephemeral"}, not a boolean',
        ),
        (
            {"cache_control": {"type": "ephemeral", "mode": "a"}},
            f"{CONTROL}.mode",
            "is not a field of this request; leave it out",
        ),
    ],
)
def test_a_cache_mark_of_another_form_is_refused(url, file, mark, param, message):
    messages = user({"type": "text", "text": "A text.", **mark}, {"type": "text", "text": "Who?"})
    status, error = sent(url, *request_of("chat", file, messages=messages))
    assert (status, error["param"], error["message"]) == (400, param, f"{param} {message}.")


@pytest.mark.parametrize(
    "mark, documents",
    [
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}, 1),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 1),
        ({"cache_control": None, "prompt_cache_breakpoint": None}, 0),
    ],
)
def test_a_cache_mark_with_a_lifetime_is_taken(url, file, mark, documents):
    messages = user({"type": "text", "text": "A text.", **mark}, {"type": "text", "text": "Who?"})
    status, answer = sent(url, *request_of("chat", file, messages=messages))
    assert (status, answer["restorekv"]["documents"]) == (200, documents)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_a", "summary": []},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
        {"type": 1, "role": "user", "content": "Hello."},
    ],
)
def test_an_input_of_other_items_than_messages_names_their_type(url, file, item):
    status, error = sent(url, *request_of("responses", file, input=[item, HELLO]))
    assert (status, error["param"]) == (400, "input.0.type"), error
    assert error["message"].startswith(f"input.0.type is '{item['type']}', and only messages")
    messages = [{**HELLO, "type": "message"}]
    assert sent(url, *request_of("responses", file, input=messages))[0] == 200


NAMED = {"file": {"file_id": "file-a"}}


@pytest.mark.parametrize(
    ("part", "field", "fix"),
    [
        ({"type": "text", "text": "Who?", **NAMED}, "file", "part of type file"),
        ({"type": "text", "text": "Who?", "file_id": "file-a"}, "file_id", "part of type file"),
        ({"type": "input_text", "text": "Who?", "file_data": "YQ=="}, "file_data", "type file"),
        ({"type": "file", "text": "Who?", **NAMED}, "text", "part of type text"),
        ({"type": "input_file", "text": "Who?", "file_id": "file-a"}, "text", "type text"),
        ({"type": "file", "file_id": "file-b", **NAMED}, "file_id", "leave one of them out"),
    ],
)
def test_a_part_is_a_text_or_a_file(url, file, part, field, fix):
    """If a part could be both, the answer would ignore one of them."""
    status, error = sent(url, *request_of("chat", file, messages=user(part)))
    assert (status, error["param"]) == (400, f"messages.0.content.0.{field}"), error
    assert fix in error["message"]


@pytest.mark.parametrize("kind", ["text", "file"])
def test_a_part_may_say_that_it_is_not_of_the_other_kind(url, file, kind):
    empty = {"text": None, "file": None, "file_id": None, "file_data": None}
    known = {"text": HI, "file": {"type": "file", "file": {"file_id": file.id}}}
    messages = user({**empty, **known[kind]}, HI)
    assert sent(url, *request_of("chat", file, messages=messages))[0] == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat/completions", "n"),
        ("chat/completions", "max_tokens"),
        ("chat/completions", "top_logprobs"),
        ("chat/completions", "temperature"),
        ("completions", "logprobs"),  # a boolean in the other API
        ("responses", "max_output_tokens"),
    ],
)
def test_what_must_be_a_number_is_no_boolean(url, path, field):
    """True would be 1: an answer of one token, or logprobs that nobody asked for."""
    text = {"chat/completions": {"messages": [HELLO]}, "responses": {"input": "Hello."}}
    request = {"model": "tiny", **text.get(path, {"prompt": "Hello."}), field: True}
    status, error = sent(url, path, request)
    assert (status, error["param"]) == (400, field), error
    assert error["message"] == f"{field} must be a number, not true or false."


def test_a_bias_is_no_boolean(url):
    request = {"model": "tiny", "messages": [HELLO], "logit_bias": {"5": True}}
    status, error = sent(url, "chat/completions", request)
    assert (status, error["param"]) == (400, "logit_bias.5"), error
    assert error["message"] == "logit_bias.5 must be a number, not true or false."


@pytest.mark.parametrize("prompt", ([True], [[5, True]]))
def test_ids_of_a_prompt_are_no_booleans(url, prompt):
    status, error = sent(url, "completions", {"model": "tiny", "prompt": prompt})
    assert status == 400 and error["param"].startswith("prompt"), error


def test_more_stops_than_the_limit_name_it(url, file):
    assert sent(url, *request_of("chat", file, stop=["x"] * 64))[0] == 200
    status, error = sent(url, *request_of("chat", file, stop=["x"] * 65))
    assert (status, error["param"]) == (400, "stop")
    assert error["message"] == "stop: List should have at most 64 items, not 65."


WITH_URL = {"type": "input_file", "file_url": "https://example.com/a.pdf"}
ENDLESS = {"type": "json_schema", "schema": {"enum": ["x" * 40_000]}}


@pytest.mark.parametrize(
    "more, param",
    [
        ({"input": []}, "input"),
        ({"input": [], "instructions": "Be brief."}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"role": "system", "content": "Be brief."}]}, "input"),
        ({"input": user(WITH_URL)}, "input.0.content.0.file_url"),
        ({"input": user({"type": "input_image"})}, "input.0.content.0.type"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "weight": 1}}}, "text.format.weight"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": ENDLESS}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
    ],
)
def test_a_refused_response_names_its_own_fields(url, file, more, param):
    status, error = sent(url, *request_of("responses", file, **more))
    assert (status, error["param"]) == (400, param), error
    assert "messages" not in error["message"] and "response_format" not in error["message"]


REFUSALS = [
    *fields.CHAT_REFUSED.items(),
    *fields.COMPLETION_REFUSED.items(),
    *fields.RESPONSES_REFUSED.items(),
    *fields.MESSAGE_REFUSED.items(),
    *fields.PART_REFUSED.items(),
]
ORDERS = {"ask", "leave", "name", "send", "upload", "use"}


@pytest.mark.parametrize("name, refusal", REFUSALS)
def test_a_reason_is_a_clause_and_a_fix_an_order(name, refusal):
    assert refusal.why.split()[0] not in ORDERS and ";" not in refusal.why
    assert refusal.fix.split()[0] in ORDERS and ";" not in refusal.fix


def test_a_refused_upload_names_its_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(
            file=("a.txt", b"A text."),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 5},
        )
    assert refused.value.param == "expires_after[seconds]"


def test_a_response_says_its_limit(url, file):
    answer = sent(url, *request_of("responses", file, max_output_tokens=3))[1]
    assert answer["max_output_tokens"] == 3


def test_max_completion_tokens_holds_over_max_tokens(url, file):
    for more, limit in (
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
    ):
        answer = sent(url, *request_of("chat", file, **more))[1]
        assert answer["usage"]["completion_tokens"] == limit


def test_any_purpose_is_taken(client):
    made = client.files.create(file=("a.txt", TEXT.encode()), purpose="zzz")
    assert client.files.wait_for_processing(made.id).status == "processed" and made.purpose == "zzz"


def test_a_top_p_of_0_takes_the_likeliest_token(url, file):
    options = {"temperature": 1.7, "top_p": 0, "seed": 4}
    answers = [sent(url, *request_of("chat", file, **options))[1]]
    answers.append(sent(url, *request_of("chat", file, temperature=0))[1])
    first, second = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert first == second


def test_a_negative_seed_is_a_seed(url, file):
    """Some clients send -1, or any number of 64 bits."""
    options = {"temperature": 1.7, "seed": -1}
    answers = [sent(url, *request_of("chat", file, **options))[1] for _ in range(2)]
    first, second = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert first == second


def test_what_an_answer_holds_can_be_sent_back():
    """Clients send back the message of an answer, and the items of a response."""
    Message.model_validate(
        {
            "role": "assistant",
            "content": "a",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        }
    )
    MessagePart.model_validate(
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    )


def test_a_bias_decides_answers(url, file, model, tiny_tokenizer):
    """Greedy and sampled answers with a bias are those of the library."""
    token = tiny_tokenizer.encode("seven", add_special_tokens=False)[0]
    for options in ({"temperature": 0}, {"temperature": 1.3, "seed": 3}):
        answer = sent(url, *request_of("chat", file, **options, logit_bias={str(token): 100}))[1]
        plain = sent(url, *request_of("chat", file, **options))[1]
        own = expected(model, tiny_tokenizer).ask(QUESTION, 4, logit_bias={token: 100}, **options)
        assert (
            answer["choices"][0]["message"]["content"]
            == own
            == tiny_tokenizer.decode([token] * 4).strip()
        )
        assert plain["choices"][0]["message"]["content"] != own
    for bias in ({"x": 1}, {"-1": 1}, {"9" * 9: 1}, {"1": 101}, {"1": "a lot"}, [1]):
        status, error = sent(url, *request_of("chat", file, logit_bias=bias))
        assert status == 400 and "logit_bias" in error["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2},
        {"repetition_penalty": 1.8},
        {"top_k": 1, "temperature": 1.5},
        {"min_p": 1, "temperature": 1.5},
        {"top_k": 3, "temperature": 1.5, "seed": 9},
    ],
)
def test_the_other_settings_are_the_librarys(client, file, options, model, tiny_tokenizer):
    known = {"frequency_penalty", "presence_penalty", "temperature", "seed"}
    extra = {name: value for name, value in options.items() if name not in known}
    answer = ask(
        client,
        about(file),
        **{each: options[each] for each in options if each in known},
        extra_body=extra,
    )
    assert answer.choices[0].message.content == expected(model, tiny_tokenizer).ask(
        QUESTION, 12, **options
    )


def test_store_false_is_not_remembered_and_metadata_comes_back(url, file):
    for store, status in {None: 200, True: 200, False: 404}.items():
        answer = sent(url, *request_of("responses", file, store=store, metadata={"a": "b"}))[1]
        assert answer["metadata"] == {"a": "b"}
        again = {
            "model": VARIANT,
            "input": "And?",
            "previous_response_id": answer["id"],
            "max_output_tokens": 2,
        }
        assert sent(url, "responses", again)[0] == status
