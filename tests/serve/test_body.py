"""Requests that no program should compute with: half characters, deep nesting, huge numbers, forms
with many fields, wrong Host headers.
"""

import asyncio
import http.client
import json
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")

from restorekv.serve import body  # noqa: E402
from restorekv.serve.body import parse_body  # noqa: E402
from restorekv.serve.service import ApiError, Limits  # noqa: E402
from tests.helpers.serving import TEXT, VARIANT, client_of, serving  # noqa: E402

HALF = "\ud800"
EDGE = "edge"


def deep(levels: int) -> dict:
    made: dict = {}
    for _ in range(levels - 1):
        made = {"a": made}
    return made


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, tmp_path_factory):
    with serving(
        model,
        tiny_tokenizer,
        tmp_path_factory.mktemp("store"),
        limits=Limits(upload=4 << 20, tokens=16),
    ) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def send(
    url: str, method: str, path: str, content: bytes | None = None, **headers: str
) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, named)
    answer = connection.getresponse()
    status, said = answer.status, answer.read()
    connection.close()
    return status, json.loads(said)


def asked(cache_control: object = None, **more: object) -> dict:
    document = {
        "type": "input_text",
        "text": TEXT,
        "cache_control": cache_control or {"type": "ephemeral"},
    }
    parts = [document, {"type": "input_text", "text": "Who?"}]
    return {
        "model": VARIANT,
        "input": [{"role": "user", "content": parts}],
        "max_output_tokens": 2,
        **more,
    }


BAD = [
    asked({"type": HALF}),
    asked(deep(260)),
    asked({"type": [deep(body.DEPTH)]}),
    asked({HALF: 1}),
    asked(metadata={"a": HALF}),
    asked(metadata={HALF: "a"}),
    asked(user=HALF),
    asked(tools=[deep(300)]),
    asked(text={"format": {"type": "json_schema", "schema": deep(200)}}),
    asked(previous_response_id=HALF),
    {**asked(), HALF: 1},
    asked(temperature=float("nan")),
    asked(temperature=float("inf")),
    asked(seed=10**400),
    asked(user=2**64),
    asked(include=[deep(900)]),
]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_cannot_be_computed_with_is_refused(url, path, number):
    chat = {"model": VARIANT, "messages": BAD[number]["input"]}
    chat |= {
        name: value
        for name, value in BAD[number].items()
        if name not in ("model", "input", "max_output_tokens")
    }
    given = BAD[number] if path.endswith("responses") else chat
    status, answer = send(
        url, "POST", path, json.dumps(given).encode(), content_type="application/json"
    )
    message = answer["error"]["message"]
    assert (
        status == 400
        and message.endswith(".")
        and message.isprintable()
        and "log says why" not in message
    )


@pytest.mark.parametrize(
    "raw, message",
    [
        (b'{"model": "a", "model": "b"}', "a key is twice"),
        (b"[" * 100_000, "more than 100 levels"),
        (b'{"model": ' + b"1" * 10_000 + b"}", "an integer of 10,000 digits has more than 64 bits"),
        (b'{"seed": -1' + b"0" * 30 + b"}", "an integer of 31 digits has more than 64 bits"),
        (b'{"seed": 1%s}' % (b"0" * 20), "the number 100000000000000000000 has more than 64 bits"),
        (b'{"seed": 18446744073709551616}', "the number 18446744073709551616 has more than 64"),
        (b"\xff\xfe", "not UTF-8 (at byte 0)"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": "\\ud800"}', "The field a is not Unicode"),
        (b'{"a": ' + b"[0," * 1_000_001, "commas and brackets"),
        (b"{", "not valid JSON (at character 1)"),
        (b"", "JSON"),
    ],
)
def test_json_that_is_no_data_gets_a_sentence(raw, message):
    with pytest.raises(ApiError) as caught:
        parse_body(raw)
    assert message in caught.value.detail and caught.value.status_code == 400


def test_json_that_is_data_passes():
    for value in (
        {"a": deep(body.DEPTH - 1)},
        {"a": "\U0001f600"},
        [1, 2.5, None, True, -(2**63)],
        "x",
        {"": ""},
    ):
        assert parse_body(json.dumps(value).encode()) == value
    assert parse_body(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def form(*parts: tuple[str, str | None, bytes], head: bytes = b"") -> bytes:
    """Return the body of a form with these parts: (name, filename, content)."""
    made = b""
    for name, filename, content in parts:
        file = f'; filename="{filename}"' if filename is not None else ""
        made += f'--{EDGE}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'.encode()
        made += head + b"\r\n" + content + b"\r\n"
    return made + f"--{EDGE}--\r\n".encode()


FILE = ("file", "a.txt", b"The red house.")


@pytest.mark.parametrize(
    "content, message",
    [
        (
            form(*[(f"x{number}", None, b"a" * (1 << 16)) for number in range(60)], FILE),
            "exceeded maximum size",
        ),
        (form(*[("purpose", None, b"a")] * 60, FILE), "Too many fields"),
        (
            form(*[("file", f"{number}.txt", b"a" * 50_000) for number in range(60)]),
            "Too many files",
        ),
        (
            form(("purpose", None, b"a"), ("purpose", None, b"b"), FILE),
            "the field purpose comes 2 times",
        ),
        (form(("file", None, b"a.txt")), "the field file has a text and not a file"),
        (form(("purpose", None, b"a")), "no whole file is in it"),
        (form(FILE).removesuffix(f"--{EDGE}--\r\n".encode()), "no whole file is in it"),
        (form(("nonsense", None, b"a"), FILE), "there is no field 'nonsense'"),
        (form(("a" * 3000, None, b"a"), FILE), "there is no field 'aaa"),
        (form(FILE, head=b"X: " + b"a" * 100_000 + b"\r\n"), "The form cannot be used"),
        (form(FILE, head=b"X: a\r\n" * 10_000), "The form cannot be used"),
        (form(("purpose", None, b"a" * 1025), FILE), "exceeded maximum size of 1KB"),
    ],
)
def test_a_form_is_one_file_and_small_fields(url, content, message):
    status, answer = send(
        url, "POST", "/v1/files", content, content_type=f"multipart/form-data; boundary={EDGE}"
    )
    assert status == 400 and message in answer["error"]["message"]
    assert "send one file and, of at most 1,024 bytes each, purpose" in answer["error"]["message"]


def test_a_refused_form_that_has_arrived_is_answered_at_once():
    """After the end of a body, only the client's disconnect can be received, maybe never."""
    parts = [form(("nonsense" * 1000, None, b"a" * 2000), FILE)]

    async def receive() -> dict:
        assert parts, "nobody waits after the last part"
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    content_type = f"multipart/form-data; boundary={EDGE}".encode()
    scope = {"type": "http", "app": None, "headers": [(b"content-type", content_type)]}
    with pytest.raises(ApiError, match="The form cannot be used"):
        asyncio.run(body.CheckedRequest(scope, receive).form())


def test_a_form_as_openai_sends_it_is_taken(client):
    made = client.files.create(
        file=FILE[1:], purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600


def test_a_body_that_is_no_form_is_told_what_an_upload_is(url):
    content = b'{"file": "a.txt", "purpose": "user_data"}'
    status, answer = send(url, "POST", "/v1/files", content, content_type="application/json")
    assert status == 400 and answer["error"]["param"] == "file"
    assert "its Content-Type is not multipart/form-data" in answer["error"]["message"]


def test_an_encoded_form_is_bounded_too(url):
    content = b"&".join(b"x%d=%s" % (number, b"a" * 2000) for number in range(100))
    status, answer = send(
        url, "POST", "/v1/files", content, content_type="application/x-www-form-urlencoded"
    )
    assert status == 400 and "The form cannot be used" in answer["error"]["message"]


def test_fields_of_a_form_take_no_memory(url):
    """Sixty fields of a megabyte once took sixty megabytes, and most of it was not freed."""
    content = form(*[(f"x{number}", None, b"a" * 60_000) for number in range(60)], FILE)

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

    kind = f"multipart/form-data; boundary={EDGE}"
    assert send(url, "POST", "/v1/files", content, content_type=kind)[0] == 400
    before = peak()
    for _ in range(20):
        assert send(url, "POST", "/v1/files", content, content_type=kind)[0] == 400
    assert peak() - before < 20 * len(content) // 1024 // 4


@pytest.mark.parametrize(
    "host, status",
    [
        ("testserver", 403),
        ("TESTSERVER:80", 403),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("[::1].evil.example", 403),
        ("localhost:80.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("0.0.0.0:80", 403),
    ],
)
def test_only_names_of_this_machine_pass(url, host, status):
    assert send(url, "GET", "/v1/models", Host=host)[0] == status


def test_the_own_name_of_the_machine_passes(model, tiny_tokenizer, tmp_path):
    with serving(model, tiny_tokenizer, tmp_path, host_names=("my-machine",)) as url:
        for host in ("my-machine", "My-Machine:8080", "localhost"):
            assert send(url, "GET", "/v1/models", Host=host)[0] == 200
        for host in ("my-machine.evil.example", "other", "0.0.0.0"):
            status, answer = send(url, "GET", "/v1/models", Host=host)
            assert status == 403 and "call this server localhost" in answer["error"]["message"]
        headers = {"Host": "my-machine", "Origin": "http://evil.example"}
        assert send(url, "GET", "/v1/models", **headers)[0] == 403


@pytest.mark.parametrize(
    ("content", "header", "message"),
    [
        (b"[]", "application/json", "The body is JSON, but not an object; send one."),
        (b'"text"', "application/json", "The body is JSON, but not an object; send one."),
        (b"{}", "text/plain", "The body is not read as JSON; send a JSON object with the header "),
        (b"", "application/json", "The body is empty; send a JSON object."),
    ],
)
def test_a_body_that_is_no_object_is_told_what_is_wrong(url, content, header, message):
    status, said = send(url, "POST", "/v1/chat/completions", content, content_type=header)
    assert status == 400
    assert said["error"]["message"].startswith(message)


def test_a_field_of_several_forms_is_named_without_its_form(url):
    messages = [{"role": "user", "content": "Who?"}]
    content = json.dumps({"model": VARIANT, "messages": messages, "stop": 3}).encode()
    _, said = send(url, "POST", "/v1/chat/completions", content, content_type="application/json")
    assert said["error"]["param"] == "stop"
