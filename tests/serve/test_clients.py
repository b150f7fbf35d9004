"""The first requests of clients: each gets an answer.

A client may offer tools, which are not called. A request that demands a call, or that has an image,
is refused with a sentence.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("openai")

from restorekv.serve.requests import AnswerDefaults
from restorekv.serve.service import Limits
from tests.helpers.serving import KEY, serving

HELLO = {"role": "user", "content": "hello"}
CHAT = "chat/completions"
# Recorded from the real clients, each of which asked "hello" or for a name. The texts of Open
# WebUI's, Continue's and aider's prompts are replaced by short ones, and most tools are left out.
REQUESTS = json.loads(Path(__file__).with_name("clients.json").read_text())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHOICE = {"type": "function", "function": {"name": "f"}}
HARMLESS = {
    "user": "a",
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "n": 1,
    "logprobs": False,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": None,
    "functions": None,
    "response_format": {"type": "text"},
    "stop": None,
    "seed": None,
}


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    # Most clients name no temperature, and an answer that is sampled may be empty.
    greedy = AnswerDefaults(temperature=0.0)
    with serving(model, tiny_tokenizer, folder, limits=Limits(tokens=16), defaults=greedy) as url:
        yield url


def send(url: str, path: str, body: dict) -> tuple[int, str]:
    """Return the status of an answer and its text."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_text(path: str, body: dict, answer: str) -> str:
    """Return the text of an answer, which may be a stream."""
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    said = json.loads(answer)
    if path == "responses":
        return said["output"][0]["content"][0]["text"]
    return said["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", REQUESTS)
def test_first_requests_are_answered(url, name):
    path, body = REQUESTS[name]
    status, answer = send(url, path, body)
    assert status == 200, answer
    text = read_text(path, body, answer)
    assert text
    if name == "instructor":
        assert text.lstrip().startswith("{")  # which this model writes for a schema alone


def test_fields_that_ask_for_nothing_change_nothing(url):
    plain = {"model": "tiny", "messages": [HELLO], "temperature": 0}
    status, answer = send(url, CHAT, {**plain, **HARMLESS})
    assert status == 200, answer
    wanted = read_text(CHAT, plain, send(url, CHAT, plain)[1])
    assert read_text(CHAT, plain, answer) == wanted


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "server calls no tools"),
        # Which is how LangChain and LlamaIndex may ask for an answer in JSON.
        ({"tools": [TOOL], "tool_choice": CHOICE}, "ask for an answer in JSON by response_format"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "f"}}, "calls no tools"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                    }
                ]
            },
            "a text or a file here",
        ),
        ({"repeat_penalty": 1.1}, "use repetition_penalty"),
        ({"num_ctx": 2048}, "not a field of this request; leave it out"),
        ({"messages": [HELLO, {"role": "tool", "content": "a"}]}, "role"),
    ],
)
def test_calls_of_tools_and_images_get_a_sentence(url, more, sentence):
    status, answer = send(url, CHAT, {"model": "tiny", "messages": [HELLO], **more})
    assert status == 400 and sentence in json.loads(answer)["error"]["message"]
