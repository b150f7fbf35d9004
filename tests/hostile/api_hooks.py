"""What Schemathesis is told about the server, so that its cases reach documents and answers: names that exist.

A quarter of the cases stays as Schemathesis made it. What is changed follows from the case alone, so that a seed gives
the same run again.
"""

import os
import zlib
from typing import Any

import schemathesis

FILES, MODELS = os.environ["RESTOREKV_FILES"].split(), ["tiny:best-0.2", "tiny", "tiny:snapkv-0.3-base"]
TOKENS = 8  # of an answer
NEVER = ("tools", "previous_response_id", "frequency_penalty", "presence_penalty")  # in a question that is answered
SELDOM = ("temperature", "top_p", "stop", "response_format", "text")


def chance(value: object, sides: int) -> int:
    return zlib.crc32(repr(value).encode(errors="replace")) % sides


def name(value: object) -> str:
    return FILES[chance(value, len(FILES))]


def model(value: object) -> str:
    return MODELS[chance(value, len(MODELS))]


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict | None) -> dict | None:
    """Names a file or model that exists; what is deleted is what Schemathesis uploaded itself."""
    if not path_parameters or not chance(path_parameters, 4) or context.operation.method.upper() == "DELETE":
        return path_parameters
    return {"name": (model if "/models/" in context.operation.path else name)(path_parameters)}


@schemathesis.hook
def map_query(context: Any, query: dict | None) -> dict | None:
    if not query or not chance(query, 4) or "model" not in query:
        return query
    return {**query, "model": model(query)}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Asks a model that exists for a short answer, half of the time about a document that exists."""
    if not isinstance(body, dict) or "model" not in body or not chance(body, 4):
        return body
    short = {"max_tokens": TOKENS} if "messages" in body else {"max_output_tokens": TOKENS}
    made = {**body, **short, "model": model(body)}
    made.pop("max_completion_tokens", None)
    if chance(body, 8) < 4:
        key, kind = ("messages", "file") if "messages" in body else ("input", "input_file")
        reference = {"file_id": name(body)}
        document = {"type": kind, **({"file": reference} if kind == "file" else reference)}
        question = {"type": "text" if kind == "file" else "input_text", "text": f"Who? {str(body.get(key))[:40]}"}
        made[key] = [{"role": "user", "content": [document, question]}]
        for field in (*NEVER, *(SELDOM if chance(body, 3) else ())):
            made.pop(field, None)
    return made
