"""Hooks that give Schemathesis names of documents and models that exist, so that its cases reach
documents and answers.

A quarter of the cases stays as Schemathesis made it. Some get contents that no program should
accept: half characters, deep nesting, unknown fields, fields that are refused, many fields of a
form, and Hosts and Origins of other sites. A check after each case requires that unknown fields are
never ignored, and that pages of other sites get no answers. All changes are derived from the case
alone, so a seed reproduces the same run.
"""

import os
import zlib
from typing import Any

import schemathesis

FILES, MODELS = (
    os.environ["RESTOREKV_FILES"].split(),
    ["tiny:best-0.2", "tiny", "tiny:snapkv-0.3-base"],
)
TOKENS = 8  # of an answer
NEVER = ("previous_response_id",)  # in a question that is answered
HALF = "\ud800"
HOSTS = ("testserver", "evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example")
UNKNOWN = "nonsense"
SELDOM = ("temperature", "top_p", "stop", "response_format", "text")


def chance(value: object, sides: int) -> int:
    return zlib.crc32(repr(value).encode(errors="replace")) % sides


def name(value: object) -> str:
    return FILES[chance(value, len(FILES))]


def model(value: object) -> str:
    return MODELS[chance(value, len(MODELS))]


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict | None) -> dict | None:
    """Put in a file or model that exists, except for DELETE: only Schemathesis' own uploads are
    deleted.
    """
    if (
        not path_parameters
        or not chance(path_parameters, 4)
        or context.operation.method.upper() == "DELETE"
    ):
        return path_parameters
    return {"name": (model if "/models/" in context.operation.path else name)(path_parameters)}


@schemathesis.hook
def map_query(context: Any, query: dict | None) -> dict | None:
    if not query or not chance(query, 4) or "model" not in query:
        return query
    return {**query, "model": model(query)}


@schemathesis.hook
def map_headers(context: Any, headers: dict | None) -> dict | None:
    """Make a request come from a page of another site, once in a while."""
    if chance((headers, "host"), 40):
        return headers
    kind = "Host" if chance((headers, "kind"), 2) else "Origin"
    name = HOSTS[chance((headers, "name"), len(HOSTS))]
    return {**(headers or {}), kind: name if kind == "Host" else f"http://{name}"}


def deep(levels: int) -> dict:
    made: dict = {}
    for _ in range(levels):
        made = {"a": made}
    return made


def harmed(body: dict) -> dict:
    """Return the body with something in it that must not be answered."""
    harm = chance((body, "harm"), 8)
    key = "messages" if "messages" in body else "input"
    part = {
        "type": "text",
        "text": "The red house.",
        "cache_control": {"type": HALF} if harm % 2 else deep(260),
    }
    if harm < 3:
        return {
            **body,
            key: [{"role": "user", "content": [part, {"type": "text", "text": "Who?"}]}],
        }
    if harm == 3:
        return {**body, "metadata": {HALF: "a"}}
    if harm == 4:
        return {**body, "tools": [deep(500)]}
    if harm == 5:
        return {**body, HALF: 1}
    return {**body, UNKNOWN: body.get("model")}


@schemathesis.check
def nothing_is_ignored(ctx: Any, response: Any, case: Any) -> None:
    """Check that unknown fields and pages of other sites are refused."""
    headers = case.headers or {}
    foreign = (
        str(headers.get("Host", "")) in HOSTS
        or str(headers.get("Origin", "")).removeprefix("http://") in HOSTS
    )
    if foreign and response.status_code < 400:
        raise AssertionError("a page of another site was answered")
    if isinstance(case.body, dict) and UNKNOWN in case.body and response.status_code < 400:
        raise AssertionError("an unknown field was ignored")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Make the body ask a model that exists for a short answer, half of the time about a document
    that exists.
    """
    if isinstance(body, dict) and "file" in body and not chance(body, 5):
        return {**body, **{f"{UNKNOWN}{number}": "a" * 1000 for number in range(60)}}
    if not isinstance(body, dict) or "model" not in body or not chance(body, 4):
        return body
    if not chance((body, "harm"), 6):
        return harmed(body)
    short = {"max_tokens": TOKENS} if "messages" in body else {"max_output_tokens": TOKENS}
    made = {**body, **short, "model": model(body)}
    made.pop("max_completion_tokens", None)
    if chance(body, 8) < 4:
        key, kind = ("messages", "file") if "messages" in body else ("input", "input_file")
        reference = {"file_id": name(body)}
        document = {"type": kind, **({"file": reference} if kind == "file" else reference)}
        question = {
            "type": "text" if kind == "file" else "input_text",
            "text": f"Who? {str(body.get(key))[:40]}",
        }
        made[key] = [{"role": "user", "content": [document, question]}]
        for field in (*NEVER, *(SELDOM if chance(body, 3) else ())):
            made.pop(field, None)
    return made
