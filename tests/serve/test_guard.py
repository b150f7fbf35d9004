"""Requests that are too large, too slow or malicious: each is refused with a sentence, and the
server continues.
"""

import base64
import errno
import gzip
import json
import re
import socket
import sqlite3
import time
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

openai = pytest.importorskip("openai")

import httpx2  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from starlette.datastructures import URL  # noqa: E402

from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.readers import extract  # noqa: E402
from restorekv.readers.extract import extract_text  # noqa: E402
from restorekv.readers.pdf_text import MAX_PAGES  # noqa: E402
from restorekv.serve import document_checks, guard  # noqa: E402
from restorekv.serve.app import add_errors  # noqa: E402
from restorekv.serve.engine import Engine  # noqa: E402
from restorekv.serve.requests import Message  # noqa: E402
from restorekv.serve.responses import ResponseMemory  # noqa: E402
from restorekv.serve.run import HTTP, Settings, build_app  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from restorekv.serve.variants import UnknownModelError  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    OTHER,
    QUESTION,
    TEXT,
    VARIANT,
    about,
    ask,
    client_of,
    serving,
    upload,
)
from tests.hostile import uploads  # noqa: E402

LARGEST = 100_000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, store):
    with serving(model, tiny_tokenizer, store, limits=Limits(upload=LARGEST, tokens=16)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def connected(url: str) -> socket.socket:
    host, port = url.split("/")[2].split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.settimeout(20)
    return made


def head(path: str, kind: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def said(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer


FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
BODIES = [  # path, type, how a body of it starts
    ("/v1/files", "multipart/form-data; boundary=x", FORM),
    ("/v1/chat/completions", "application/json", b'{"model": "'),
]


@pytest.mark.parametrize("path, kind, start", BODIES)
def test_a_body_without_a_length_is_bounded_while_it_arrives(url, monkeypatch, path, kind, start):
    monkeypatch.setattr(guard, "DRAIN", 0.5)
    with connected(url) as connection:
        connection.sendall(head(path, kind, "Transfer-Encoding: chunked"))
        connection.sendall(b"%x\r\n%s\r\n" % (len(start), start))
        with pytest.raises(OSError):  # it is cut off, while it would go on for a gigabyte
            for _ in range(1 << 14):
                connection.sendall(b"10000\r\n%s\r\n" % (b"x" * (1 << 16)))


@pytest.mark.parametrize("path, kind, start", BODIES)
def test_a_body_that_is_too_large_gets_a_sentence(url, path, kind, start):
    with connected(url) as connection:
        connection.sendall(head(path, kind, "Transfer-Encoding: chunked"))
        body = start + b"x" * (2 << 20)
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        answer = said(connection)
    assert (
        b" 413 " in answer.splitlines()[0] and b"The request is larger than 100,000 bytes" in answer
    )


@pytest.mark.parametrize(
    "error, status, code",
    [
        (UnknownModelError("There is no model x here; use tiny.", "model"), 404, "model_not_found"),
        (RestoreKVError("There is no model of a house in this text; add one."), 400, None),
    ],
)
def test_the_class_of_an_error_decides_its_status(error, status, code):
    """The text of an error does not decide: others may begin with the same words."""
    app = FastAPI()
    add_errors(app, SimpleNamespace())

    @app.get("/")
    async def fail():
        raise error

    answer = TestClient(app).get("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_an_answer_that_takes_too_long_is_not_asked_for_again():
    """Clients that retry server errors must not retry this one: it would take as long again."""
    app = FastAPI()
    add_errors(app, SimpleNamespace(limits=Limits(seconds=7)))

    @app.get("/")
    async def fail():
        raise TimeoutError

    answer = TestClient(app).get("/")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    assert "longer than 7 seconds" in answer.json()["error"]["message"]


def test_a_length_that_is_no_number_gets_a_sentence(model, tiny_tokenizer, tmp_path):
    app = TestClient(build_app(model, tiny_tokenizer, Settings(tmp_path, "tiny", VARIANT)))
    for length in ("x", "-1", "1e9", "²", "9" * 5000):
        answer = app.get("/v1/models", headers={"content-length": length.encode()})
        assert (
            answer.status_code == 400
            and "content-length must be a number" in answer.json()["error"]["message"]
        )


@pytest.mark.parametrize("path", ["chat/completions", "files"])
def test_a_compressed_body_gets_a_sentence(url, path):
    headers = {"content-type": "application/json", "content-encoding": "GZip"}
    answer = httpx2.post(f"{url}/{path}", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert "compressed (GZip)" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"
    headers["content-encoding"] = "identity"
    assert httpx2.post(f"{url}/{path}", content=b"{}", headers=headers).status_code == 400


def test_slow_clients_are_let_go(url, client, monkeypatch):
    """Connections with silence, half a head, half a body or a trickle of one are closed, and others
    are answered.
    """
    monkeypatch.setattr(guard, "IDLE_TIMEOUT", 1.0)
    body = head("/v1/chat/completions", "application/json", "Content-Length: 50000")
    with (
        connected(url) as silent,
        connected(url) as half,
        connected(url) as stalled,
        connected(url) as trickle,
    ):
        half.sendall(b"GET /v1/models HTTP/1.1\r\nHost: lo")
        stalled.sendall(body + b'{"model"')
        trickle.sendall(body)
        for _ in range(3):  # the last of them comes when the body is too slow
            time.sleep(0.5)
            trickle.sendall(b" ")
        assert client.models.list().data
        answers = [said(each) for each in (silent, half, stalled, trickle)]
    assert answers[:2] == [b"", b""]
    assert b" 408 " in answers[2].splitlines()[0] and b"Nothing of the request came" in answers[2]
    assert b" 408 " in answers[3].splitlines()[0] and b"slower than" in answers[3]


def test_a_client_who_reads_nothing_is_let_go(url, client, monkeypatch):
    monkeypatch.setattr(guard, "IDLE_TIMEOUT", 0.4)
    with connected(url) as deaf, pytest.raises(ConnectionError):
        for _ in range(100_000):
            deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
    assert client.models.list().data


def test_a_host_does_not_open_a_path(monkeypatch):
    """Older versions of Starlette read the path from an address that begins with this header."""
    monkeypatch.setattr(guard.Request, "url", URL("http://x/health?/v1/files"))
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/files",
        "headers": [(b"host", b"x/health?")],
    }
    checks = guard.Guard(None, ["a-key-of-16-characters"], LARGEST, ["/health"])
    refusal = checks.check_headers(guard.Request(scope))
    assert refusal is not None and refusal.status_code == 401
    assert refusal.headers["www-authenticate"] == "Bearer"  # as RFC 9110 asks


def test_large_bodies_together_are_bounded(url, client, monkeypatch):
    monkeypatch.setattr(guard, "AT_ONCE", 0.05)
    monkeypatch.setattr(guard, "AROUND", 1000)
    assert client.models.list().data
    # Which goes to disk for files alone.
    for headers in ({}, {"content-type": "multipart/form-data; boundary=x"}):
        with pytest.raises(openai.RateLimitError, match="large requests"):
            ask(client, [{"role": "user", "content": "x" * LARGEST}], extra_headers=headers)
    monkeypatch.undo()
    with pytest.raises(openai.BadRequestError, match="positions"):
        ask(client, [{"role": "user", "content": "x" * LARGEST}])


HALF = "\ud800"


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("responses", {"model": VARIANT, "input": []}, "input"),
        ("responses", {"model": VARIANT, "input": "a", "text": {"format": "x"}}, "format"),
        (
            "responses",
            {"model": VARIANT, "input": "a", "text": {"format": {"type": "grammar"}}},
            "text.format.type",
        ),
        ("responses", {"model": VARIANT, "input": HALF}, "not Unicode"),
        ("responses", {"model": HALF, "input": "a"}, "not Unicode"),
        (
            "responses",
            {"model": VARIANT, "input": "a", "previous_response_id": HALF},
            "not Unicode",
        ),
        (
            "chat/completions",
            {"model": VARIANT, "messages": [{"role": "user", "content": HALF}]},
            "not Unicode",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": HALF, "cache_control": {"type": "ephemeral"}}
                        ],
                    }
                ],
            },
            "not Unicode",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "messages": [
                    {"role": "user", "content": [{"type": "file", "file": {"file_id": HALF}}]}
                ],
            },
            "not Unicode",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "messages": [
                    {"role": "user", "content": [{"type": "file", "file": {"file_id": {"a": 1}}}]}
                ],
            },
            "string",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "file", "file": {"file_data": "no base64!"}}],
                    }
                ],
            },
            "base64",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ],
            },
            "a text or a file here",
        ),
        (
            "chat/completions",
            {"model": VARIANT, "messages": [{"role": "tool", "content": "x"}]},
            "role",
        ),
        (
            "chat/completions",
            {"model": VARIANT, "messages": [{"role": "user", "content": None}]},
            "text",
        ),
        (
            "chat/completions",
            {
                "model": VARIANT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": ["x" * 40_000]}},
                },
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "text",
                                "text": TEXT,
                                "cache_control": {"type": "ephemeral"},
                                "prompt_cache_breakpoint": {"mode": "explicit"},
                            },
                            {"type": "text", "text": "Who?"},
                        ],
                    }
                ],
            },
            "more than 32,768 characters",
        ),
    ],
)
def test_made_up_requests_get_a_sentence(url, path, body, message):
    request = Request(
        f"{url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(HTTPError) as caught:
        urlopen(request)
    assert caught.value.code in (400, 404)
    assert message in json.loads(caught.value.read())["error"]["message"]


def test_texts_longer_than_the_model_are_refused_at_once(client, file, monkeypatch):
    with pytest.raises(openai.BadRequestError, match="longer than the model"):
        ask(client, about(file, question="why " * 9000))
    # A short text stands for a huge one.
    monkeypatch.setattr(document_checks, "_find_longest_token", lambda tokenizer: 1)
    with pytest.raises(openai.BadRequestError, match="characters"):
        ask(client, about(file, question="x" * 70_000))
    made = upload(client, OTHER.encode() * 250, "long.txt")
    assert made.status == "error" and "characters" in made.status_details


def test_what_is_said_of_a_text_that_is_too_long_names_no_flag_of_other_commands(client):
    made = upload(client, OTHER.encode() * 120, "long.txt")
    assert made.status == "error"
    said = (
        "The text has N tokens, and the model's N positions have room for N and a question; "
        "shorten it, split it and ask "
    )
    said += "about the parts one by one, or choose a server whose --model has more positions."
    assert re.sub("[0-9,]*[0-9]", "N", made.status_details) == said


def test_a_file_inside_a_request_is_a_document(client, file):
    expected = ask(client, about(file)).choices[0].message.content
    coded = base64.b64encode(TEXT.encode()).decode()
    for name, data in {"doc.txt": coded, None: f"data:text/plain;base64,{coded}"}.items():
        part = {"type": "file", "file": {"file_data": data, **({"filename": name} if name else {})}}
        answer = ask(
            client, [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        )
        assert answer.choices[0].message.content == expected
        assert answer.usage.prompt_tokens_details.cache_write_tokens == 0


def test_what_frameworks_send_is_taken(client, file):
    """Names, an empty message of the assistant, and answers sent back unchanged."""
    first = {"name": "ada", **about(file)[0]}
    turns = [
        first,
        {"role": "assistant", "content": None},
        {"role": "user", "name": "ada", "content": "And?"},
    ]
    assert ask(client, turns).choices
    parts = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": QUESTION}]
    answer = client.responses.create(
        model=VARIANT, input=[{"role": "user", "content": parts}], max_output_tokens=4
    )
    given = [
        {"role": "user", "content": parts},
        *(each.model_dump() for each in answer.output),
        {"role": "user", "content": "And?"},
    ]
    assert client.responses.create(model=VARIANT, input=given, max_output_tokens=4).output


def test_names_are_kept_on_one_line(client):
    name = "a\nb" + "x" * 500 + ".txt"
    made = upload(client, b"\xff", name)
    assert made.filename.isprintable() and len(made.filename) <= 120
    assert made.status_details.startswith(made.filename)


@pytest.mark.parametrize("kind", ["unfinished comments", "a PDF bomb", "a zip bomb", "entities"])
def test_files_that_unfold_without_end_are_refused(kind, monkeypatch):
    monkeypatch.setattr(extract, "CPU_SECONDS", dict.fromkeys(extract.CPU_SECONDS, 2))
    case = next(each for each in uploads.strange() if each.kind == kind)
    with pytest.raises(ValueError, match=r"too much memory|can be read"):
        extract_text(case.name.decode(), case.content)


def make_blank_pdf(pages: int) -> bytes:
    """Return a PDF without text; all its pages are the same object."""
    kids = "3 0 R " * pages
    return (
        "%PDF-1.4\n"
        "1 0 obj <</Type /Catalog /Pages 2 0 R>> endobj\n"
        f"2 0 obj <</Type /Pages /Count {pages} /Kids [{kids}]>> endobj\n"
        "3 0 obj <</Type /Page /Parent 2 0 R /MediaBox [0 0 9 9]>> endobj\n"
        "trailer <</Root 1 0 R>>\nstartxref\n0\n%%EOF\n"
    ).encode()


def test_a_pdf_of_too_many_pages_is_refused_and_not_cut():
    with pytest.raises(RestoreKVError, match=r"^a\.pdf has no text"):
        extract_text("a.pdf", make_blank_pdf(2))
    with pytest.raises(RestoreKVError, match=r"^a\.pdf has more than 20,000 pages; split it"):
        extract_text("a.pdf", make_blank_pdf(MAX_PAGES + 1))


def test_a_file_deleted_while_it_is_compressed_leaves_no_cache(client, store):
    before = set((store / "caches").iterdir())
    made = [upload(client, f"{n} {OTHER}", f"{n}.txt", wait=False) for n in range(4)]
    for each in made:
        client.files.delete(each.id)
    last = upload(client, f"last {OTHER}", "last.txt")
    client.files.delete(last.id)
    assert set((store / "caches").iterdir()) == before


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    sqlite3.OperationalError("database or disk is full"),
]


@pytest.mark.parametrize("error", FULL, ids=["file", "index"])
def test_a_full_disk_gets_a_sentence(client, monkeypatch, error):
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(Store, "add_upload", full)
    with pytest.raises(openai.APIStatusError, match="cannot store the file") as caught:
        client.files.create(file=("a.txt", b"a"), purpose="user_data")
    assert caught.value.status_code == 507


@pytest.mark.parametrize(
    ("header", "is_let_in"),
    [
        ("Bearer one-key", True),
        ("bearer  one-key", True),
        ("one-key", True),
        ("Basic one-key", False),
        ("Bearer one", False),
        ("Bearer ", False),
        ("", False),
    ],
)
def test_the_scheme_of_a_key_may_have_any_case(header, is_let_in):
    assert guard.has_key(header, ["one-key", "another"]) is is_let_in


def test_idle_connections_outlive_those_of_clients():
    """Otherwise both sides may close a connection at the same moment, and a request would fail."""
    assert httpx2.Limits().keepalive_expiry < HTTP["timeout_keep_alive"] < guard.IDLE_TIMEOUT


def test_remembered_answers_are_bounded(monkeypatch):
    monkeypatch.setattr("restorekv.serve.responses.LARGEST", 10_000)
    remembered = ResponseMemory()
    for number in range(100):
        remembered.add(str(number), [], "x" * 1000, {})
    assert len(remembered.turns) == len(remembered.sizes) < 11
    # What is sent counts too: it holds the text and the instructions.
    for number in range(100):
        remembered.add(str(number), [], "yes", {"instructions": "x" * 1000})
    assert len(remembered.turns) == len(remembered.answers) < 11


def test_a_message_counts_once_in_a_conversation(monkeypatch):
    monkeypatch.setattr("restorekv.serve.responses.LARGEST", 10_000)
    remembered = ResponseMemory()
    others = [Message(role="user", content="x" * 1000)]
    remembered.add("another client's", others, "yes", {})
    turns = [Message(role="user", content="y" * 3000)]
    for number in range(30):
        turns = [*turns, Message(role="user", content="And then?")]
        remembered.add(str(number), turns, "yes", {})
        turns = remembered.find(str(number))
    assert remembered.find("another client's")[:1] == others
    # What is forgotten is counted no more, and the rest still is.
    large = Message(role="user", content="z" * 8000)
    remembered.add("large", [large], "yes", {})
    assert "another client's" not in remembered.turns
    kept = {id(message) for turns in remembered.turns.values() for message in turns}
    assert kept == set(remembered.sizes) == set(remembered.uses)


def test_questions_that_nobody_waits_for_take_no_place():
    questions = [
        SimpleNamespace(started=started, cancelled=cancelled)
        for started in (False, True)
        for cancelled in (False, True)
    ]
    engine = SimpleNamespace(tasks=dict(enumerate(questions)))
    assert Engine.count_waiting(engine) == 1


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD"),
        ("/metrics", "GET"),
        ("/v1/models", "GET"),
        ("/v1/models/tiny", "GET"),
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-none", "DELETE, GET"),
        ("/v1/files/file-none/content", "GET"),
    ],
)
def test_another_method_gets_a_sentence_that_names_the_right_ones(url, path, allowed):
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
        if method in allowed:
            continue
        with connected(url) as connection:
            lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            head, _, body = said(connection).decode().partition("\r\n\r\n")
        assert " 405 " in head.splitlines()[0] and f"allow: {allowed}" in head.splitlines()
        if method == "HEAD":
            assert body == ""
            continue
        error = json.loads(body)["error"]
        right = allowed.replace(", ", " or ")
        assert error["message"] == f"{method} {path}: Method Not Allowed; use {right}."
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "status", "code", "param"),
    [
        ("models/none", 404, "model_not_found", "model"),
        ("files/file-none", 404, "file_not_found", None),
        ("files/file-none/content", 404, "file_not_found", None),
        ("files/file-none/cache", 404, "file_not_found", None),
        ("files?limit=0", 400, None, "limit"),
        ("files?order=up", 400, None, "order"),
        ("nothing", 404, None, None),
    ],
)
def test_what_is_not_there_gets_a_sentence(url, path, status, code, param):
    with pytest.raises(HTTPError) as caught:
        urlopen(f"{url}/{path}")
    error = json.loads(caught.value.read())["error"]
    assert (caught.value.code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error" and "query" not in error["message"]


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("/models", "use /v1/models, with a client whose base URL"),
        ("//v1/models", "use /v1/models,"),
        ("/v1/v1/models", "use /v1/models,"),
        ("/api/v1/files/file-a", "use /v1/files/file-a,"),
        ("/v1/embeddings", "/docs lists the paths"),
        ("/v1/", "/docs lists the paths"),
        ("/api/tags", "/docs lists the paths"),
        ("/" + "a" * 5000, "/docs lists the paths"),
    ],
)
def test_a_path_that_is_not_there_is_told_the_right_one(url, path, fix):
    with pytest.raises(HTTPError) as caught:
        urlopen(url.removesuffix("/v1") + path)
    message = json.loads(caught.value.read())["error"]["message"]
    assert caught.value.code == 404 and f"Not Found; {fix}" in message and len(message) < 500


def test_the_description_is_true_of_errors(client):
    described = client.get("/../openapi.json", cast_to=object)
    answers = [each["responses"] for path in described["paths"].values() for each in path.values()]
    assert all("4XX" in each and "422" not in each for each in answers)
    with pytest.raises(openai.APIStatusError) as caught:
        client.patch("/files/x", cast_to=object)
    assert caught.value.response.headers["allow"] == "DELETE, GET"
