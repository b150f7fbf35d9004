"""What clients receive, compared field by field with wire.json: answers recorded when every object
was written by hand.

An engine without a model writes fixed tokens, so that everything but the ids and times of objects
is the same every time. To record again after an intended change:
`python -m tests.serve.test_wire`.
"""

import http.client
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("openai")

from restorekv.errors import RestoreKVError
from restorekv.generation.answers import Answer
from restorekv.serve.engine import READY, BusyError, Reply, ServedDocument, settle_future
from restorekv.serve.run import Settings, build_engine_app, open_store
from tests.helpers.models import build_tokenizer
from tests.helpers.serving import KEY, listening

RECORDED = Path(__file__).with_name("wire.json")
WORDS = "the ü, 日本 or 😀"
MASKED = {"created", "created_at"}
NAMES = re.compile(r"(chatcmpl|resp|file)-[0-9a-f]{24}")


class Scripted:
    """An engine that answers WORDS to every question, or fails as the question asks it to."""

    shutdown_grace = 0.0

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer()
        self.stop_ids = {self.tokenizer.eos_token_id}
        self.ids = self.tokenizer(WORDS, add_special_tokens=False).input_ids

    def start(self) -> None: ...

    def stop_asking(self) -> None: ...

    def close(self) -> None: ...

    def make_key(self, sha256, variant):
        return "0" * 32

    def has_method(self, name):
        return True

    async def get_document(self, sha256, variant, content):
        text = content()
        if "unreadable" in str(text):
            raise RestoreKVError("The text cannot be compressed; give another one.")
        return ServedDocument(sha256, variant, 40, "fresh" in text)

    def forget_document(self, sha256) -> None: ...

    def write_held_cache(self, sha256, variant) -> None: ...

    def get_state(self, sha256, variant):
        return READY

    async def find_survivors(self, document, layer, head):
        sizes = {"before": 20, "after": 8}
        return {
            "layers": 2,
            "heads": 2,
            "tokens": 5,
            "surviving": 4,
            "prefix": 24,
            "kept_share": 0.5,
            "restore_tokens": 0,
            "evictor": "snapkv",
            "seconds": {"prefill": 0.5},
            "pairs": sizes,
            "bytes": sizes,
            "pieces": [["the", 0.25], [" blue", 1.0]],
        }

    def collect_metrics(self):
        return {"questions": 1}, {"documents_held": 2}

    def ask(self, question):
        if "busy" in question.text:
            raise BusyError
        answers, likely = (
            [],
            ((-0.5, {5: -0.5, 7: -1.25}),) if question.sampling.logprobs is not None else (),
        )
        for sample in range(question.sampling.samples):
            ids = (
                [*self.ids, self.tokenizer.eos_token_id]
                if sample == 0 and "whole" in question.text
                else self.ids
            )
            for token in ids:
                question.on_token(sample, token, *likely)
            logprobs, top = ([likely[0][each]] * len(ids) if likely else None for each in (0, 1))
            finish = "length" if ids is self.ids else "stop"
            answers.append(Answer(WORDS, tuple(ids), finish, 9, logprobs, top))
        if "fails" in question.text:
            settle_future(
                question.done, error=RestoreKVError("The answer was cancelled; ask again.")
            )
        else:
            seconds = {"first": 0.25, "total": 1.5, "prefill": 2.0}
            settle_future(
                question.done,
                Reply(answers, 9, 40 * len(question.documents), 320, 4096, seconds, 3),
            )
        return question.done


def chat(question, *texts, **options):
    parts = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    return (
        "POST",
        "/v1/chat/completions",
        {"model": "tiny:snapkv-0.4", "messages": messages, **options},
    )


def respond(question, **options):
    part = {"type": "input_text", "text": "A text.", "cache_control": {"type": "ephemeral"}}
    asked = [{"role": "user", "content": [part, {"type": "input_text", "text": question}]}]
    return "POST", "/v1/responses", {"model": "tiny:snapkv-0.4", "input": asked, **options}


def upload(text, **fields):
    return "POST", "/v1/files", {"file": text, **fields}


LIKELY = {"logprobs": True, "top_logprobs": 2}
REQUESTS = {
    "models": ("GET", "/v1/models", None),
    "a model": ("GET", "/v1/models/tiny:snapkv-0.4", None),
    "no model": ("GET", "/v1/models/other", None),
    "variants": ("GET", "/v1/variants", None),
    "health": ("GET", "/health", None),
    "ready": ("GET", "/ready", None),
    "a chat": chat("Say the whole.", "A text."),
    "a chat to its limit": chat("What?", "A fresh text.", "Another text."),
    "a chat of two answers with likelihoods": chat(
        "Say the whole.", "A text.", n=2, temperature=1, seed=3, **LIKELY
    ),
    "a stream": chat("Say the whole.", "A text.", stream=True),
    "a stream with usage": chat(
        "What?", "A text.", stream=True, stream_options={"include_usage": True}
    ),
    "a stream of two answers with likelihoods": chat(
        "Say the whole.", "A text.", n=2, stream=True, **LIKELY
    ),
    "a stream with a stop string": chat("What?", "A text.", stream=True, stop=["日本"]),
    "a stream that fails": chat("This fails.", "A text.", stream=True),
    "a chat that fails": chat("This fails.", "A text."),
    "a busy server": chat("Are you busy?", "A text."),
    "a chat without a document": chat("Say the whole."),
    "an unknown field": chat("What?", "A text.", strange=1),
    "a refused field": chat("What?", "A text.", tool_choice="required"),
    "a wrong value": chat("What?", "A text.", temperature=7),
    "half a body": ("POST", "/v1/chat/completions", "{"),
    "a response": respond(
        "Say the whole.", metadata={"a": "b"}, instructions="Be brief.", temperature=1, top_p=0.5
    ),
    "an incomplete response": respond("What?", store=False),
    "a streamed response": respond("Say the whole.", stream=True, metadata={"a": "b"}),
    "an incomplete streamed response": respond("What?", stream=True),
    "a streamed response that fails": respond("This fails.", stream=True),
    "no earlier response": respond("What?", previous_response_id="resp-1"),
    "an upload": upload("A text."),
    "an upload that expires": upload(
        "A text.", purpose="anything", **{"expires_after[seconds]": "3600"}
    ),
    "an upload with a wrong field": upload("A text.", strange="1"),
    "an upload that fails": upload("unreadable"),
    "files": ("GET", "/v1/files", None),
    "a file": ("GET", "/v1/files/ID", None),
    "its progress": ("GET", "/v1/files/ID/progress?model=tiny:snapkv-0.4", None),
    "what it keeps": ("GET", "/v1/files/ID/kept?model=tiny:snapkv-0.4", None),
    "its content": ("GET", "/v1/files/ID/content", None),
    "a deletion": ("DELETE", "/v1/files/ID", None),
    "a file that is gone": ("GET", "/v1/files/ID", None),
    "no path": ("GET", "/v1/nothing", None),
    "another method": ("PUT", "/v1/files", None),
}


def exchange(connection, method, path, body):
    """Send a request; return status, media type and text of the answer."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    if path == "/v1/files" and isinstance(body, dict):
        disposition = {name: f'name="{name}"' for name in body} | {
            "file": 'name="file"; filename="doc.txt"'
        }
        parts = (
            f"--x\r\ncontent-disposition: form-data; {disposition[name]}\r\n\r\n{value}\r\n"
            for name, value in body.items()
        )
        headers["content-type"] = "multipart/form-data; boundary=x"
        body = "".join(parts) + "--x--\r\n"
    elif isinstance(body, dict):
        body = json.dumps(body)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers["content-type"], answer.read().decode()


def masked(value, name=""):
    """Return a JSON value with names in place of ids and times, which differ every time."""
    if isinstance(value, dict):
        return {key: masked(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [masked(each) for each in value]
    if name in MASKED or (name == "expires_at" and value is not None):
        return type(value).__name__
    return NAMES.sub(r"\1-ID", value) if isinstance(value, str) else value


def parsed(kind, text):
    """Return an answer as JSON; a stream as a list of its lines."""
    if kind.startswith("application/json"):
        return masked(json.loads(text))
    lines = text.split("\n")
    return [
        f"data: {json.dumps(masked(json.loads(line[6:])), sort_keys=True, ensure_ascii=False)}"
        if line.startswith("data: {")
        else masked(line)
        for line in lines
    ]


def settled(connection, method, path, body):
    """Return an answer; for an upload, wait until it has been processed."""
    status, kind, text = exchange(connection, method, path, body)
    for _ in range(1000 if path == "/v1/files" and method == "POST" and status == 200 else 0):
        found = exchange(connection, "GET", f"/v1/files/{json.loads(text)['id']}", None)[2]
        if json.loads(found)["status"] != "uploaded":
            break
    return status, kind, text


def all_answers(folder):
    """Return the answer to each of REQUESTS."""
    engine, settings = Scripted(), Settings(folder, "tiny", "tiny:snapkv-0.4", keys=(KEY,))
    answers, made = {}, ""
    with listening(build_engine_app(engine, open_store(settings), settings)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        for name, (method, path, body) in REQUESTS.items():
            status, kind, text = settled(connection, method, path.replace("ID", made), body)
            if name == "an upload":
                made = json.loads(text)["id"]
            answers[name] = {"status": status, "type": kind, "body": parsed(kind, text)}
        connection.close()
    return answers


def typed(value):
    """Return a JSON value as text: 1 and 1.0 differ, but the order of fields does not matter."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return all_answers(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_that_were_recorded(answers, name):
    recorded = json.loads(RECORDED.read_text())
    assert typed(answers[name]) == typed(recorded[name])


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as made_in:
        found = all_answers(Path(made_in))
    lines = [
        f"{json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}"
        for name, each in found.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
