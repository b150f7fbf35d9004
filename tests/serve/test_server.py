"""A live server and the official client: documents, questions, streams, errors, restarts."""

import asyncio
import base64
import http.client
import importlib.util
import json
import re
import runpy
import sys
import threading
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

openai = pytest.importorskip("openai")

import httpx2  # noqa: E402

from restorekv import CompressedContext, compose, compress  # noqa: E402
from restorekv.errors import AdapterError, RestoreKVError  # noqa: E402
from restorekv.generation import decoding  # noqa: E402
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids  # noqa: E402
from restorekv.model.shape import get_backbone  # noqa: E402
from restorekv.readers.extract import extract_text, load_document, read_document  # noqa: E402
from restorekv.serve import service  # noqa: E402
from restorekv.serve.replies import describe_logprobs  # noqa: E402
from restorekv.serve.requests import AnswerDefaults, ChatRequest  # noqa: E402
from restorekv.serve.run import Settings, build_app  # noqa: E402
from restorekv.serve.service import Limits, Service  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from tests.helpers.chat_templates import build_chat_tokenizer  # noqa: E402
from tests.helpers.compressing import compress_with, make_adapter  # noqa: E402
from tests.helpers.models import build_model  # noqa: E402
from tests.helpers.pdf import make_pdf_with_a_damaged_page  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    KEY,
    OTHER,
    QUESTION,
    TEXT,
    VARIANT,
    about,
    ask,
    client_of,
    expected,
    generate_plainly,
    listening,
    serving,
    until,
    upload,
)


@pytest.fixture(scope="module")
def client(model, tiny_tokenizer, tmp_path_factory):
    with serving(
        model,
        tiny_tokenizer,
        tmp_path_factory.mktemp("store"),
        limits=Limits(upload=1 << 20, tokens=64),
    ) as url:
        yield client_of(url)


def test_downloads_say_their_names(client):
    made = upload(client, name="größe 1.txt")
    names = {"content": "gr%C3%B6%C3%9Fe%201.txt", "cache": "gr%C3%B6%C3%9Fe%201.txt.rkv"}
    for path, name in names.items():
        asked = Request(f"{client.base_url}files/{made.id}/{path}")
        asked.add_header("authorization", f"Bearer {client.api_key}")
        with urlopen(asked) as answer:
            told = answer.headers["content-disposition"]
        assert told == f"attachment; filename*=UTF-8''{name}"


@pytest.mark.parametrize("path", ["health", "ready"])
def test_load_balancers_ask_with_head(client, path):
    with urlopen(Request(str(client.base_url.join(f"/{path}")), method="HEAD")) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_answers_are_the_librarys(client, file, model, tiny_tokenizer):
    assert file.status == "processed"
    small = expected(model, tiny_tokenizer)
    answer = ask(client, about(file))
    assert answer.choices[0].message.content == small.ask(QUESTION, 12)
    assert ask(client, about(file), "tiny").choices[0].message.content == expected(
        model, tiny_tokenizer, ratio=1
    ).ask(QUESTION, 12)
    hot = ask(client, about(file), temperature=1.2, seed=5, n=2, logprobs=True, top_logprobs=3)
    drawn = small.ask(QUESTION, 12, temperature=1.2, seed=5, samples=2, details=True, logprobs=3)
    assert [choice.message.content for choice in hot.choices] == [each.text for each in drawn]
    assert [each.logprob for each in hot.choices[0].logprobs.content] == pytest.approx(
        drawn[0].logprobs, abs=1e-4
    )


def test_usage_is_true(client, file, model, tiny_tokenizer):
    small, answer = expected(model, tiny_tokenizer), ask(client, about(file))
    usage, written = answer.usage, small.ask(QUESTION, 12, details=True)
    assert usage.prompt_tokens == small.context.num_tokens + written.prompt_tokens
    assert usage.completion_tokens == len(written.ids)
    assert usage.prompt_tokens_details.cached_tokens == small.context.num_tokens
    assert answer.restorekv["pairs"] == small.manifest.pairs_held
    text = [{"type": "text", "text": OTHER, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    fresh = [{"role": "user", "content": [*text, {"type": "text", "text": "Who?"}]}]
    counts = [ask(client, fresh).usage.prompt_tokens_details for _ in range(2)]
    assert [each.cached_tokens > 0 for each in counts] == [False, True]
    assert counts[0].cache_write_tokens == counts[1].cached_tokens


def test_the_chat_prefix_counts_once(client, model, tiny_tokenizer):
    """First one of three documents is known already, then all are."""
    one, *new = [f"{name} {OTHER}" for name in ("one", "two", "three")]
    known, *fresh = [expected(model, tiny_tokenizer, text).context for text in (one, *new)]
    tokens = [known.prefix_length, *(each.text_tokens for each in (known, *fresh))]

    def usage(*texts: str) -> tuple[int, int]:
        parts = [
            {"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in texts
        ]
        details = ask(
            client, [{"role": "user", "content": [*parts, {"type": "text", "text": "Who?"}]}]
        ).usage
        return (
            details.prompt_tokens_details.cached_tokens,
            details.prompt_tokens_details.cache_write_tokens,
        )

    assert usage(one) == (0, sum(tokens[:2]))
    assert usage(one, *new) == (tokens[1], sum(tokens) - tokens[1])
    assert usage(one, *new) == (sum(tokens), 0)
    assert usage(f"a {one}", f"b {one}")[0] == 0


def test_streams_are_the_answer_in_pieces(client, file):
    whole = ask(client, about(file)).choices[0].message.content
    chunks = list(ask(client, about(file), stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    )
    assert chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason in (
        "stop",
        "length",
    )


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_proxy_holds_no_stream_back(client, path):
    asked = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Who?"}]}
    if path != "chat/completions":
        asked[{"completions": "prompt", "responses": "input"}[path]] = "Who?"
        del asked["messages"]
    answer = client.post(path, body=asked, cast_to=httpx2.Response)
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"


def test_pieces_of_a_stream_have_their_log_probabilities(client, file):
    options = {"temperature": 1.2, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole, streamed = ask(client, about(file), **options).choices, [[], []]
    for chunk in ask(client, about(file), stream=True, **options):
        for choice in chunk.choices:
            assert bool(choice.logprobs) or not choice.delta.content
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice, pieces in zip(whole, streamed, strict=True):
        assert [each.token for each in pieces] == [each.token for each in choice.logprobs.content]
        assert [len(each.top_logprobs) for each in pieces] == [2] * len(pieces)
        expected = [each.logprob for each in choice.logprobs.content]
        assert [each.logprob for each in pieces] == pytest.approx(expected, abs=1e-4)


def input_of(file: object, question: str = QUESTION) -> list[dict]:
    parts = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": question}]
    return [{"role": "user", "content": parts}]


def test_a_stream_that_cannot_begin_is_refused(client, file):
    long = "why " * 9000
    with pytest.raises(openai.BadRequestError, match="longer than the model"):
        ask(client, about(file, question=long), stream=True)
    with pytest.raises(openai.BadRequestError, match="longer than the model"):
        client.responses.create(model=VARIANT, input=input_of(file, long), stream=True)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_who_leaves_before_the_first_token_ends_the_answer(model, tiny_tokenizer, tmp_path, path):
    inside, gone = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread().name == "restorekv-answer":
            inside.set()
            gone.wait(30)

    with serving(model, tiny_tokenizer, tmp_path, limits=Limits(tokens=1000)) as url:
        client = client_of(url)
        made = upload(client)
        many = {"max_tokens": 1000, "n": 16, "messages": about(made)}
        one = {"max_output_tokens": 1000, "input": input_of(made)}
        body = {
            "model": VARIANT,
            "temperature": 2,
            "stream": True,
            **(many if path != "responses" else one),
        }
        hook = get_backbone(model).layers[1].register_forward_pre_hook(wait)
        connection = http.client.HTTPConnection(*url.split("/")[2].split(":"))
        connection.request(
            "POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"}
        )
        assert inside.wait(30)
        connection.close()
        time.sleep(0.1)
        gone.set()
        hook.remove()
        until(lambda: counted(client, "questions_total"))
        assert counted(client, "tokens_total") < 200


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_in_the_middle_of_an_answer_ends_it(
    model, tiny_tokenizer, tmp_path, path, stream, monkeypatch
):
    monkeypatch.setattr(decoding, "get_stop_ids", lambda *_: set())  # only the limit ends an answer
    steps = []

    def slow_down(*_: object) -> None:
        if threading.current_thread().name == "restorekv-answer":
            steps.append(1)
            time.sleep(0.01)

    with serving(model, tiny_tokenizer, tmp_path, limits=Limits(tokens=1000)) as url:
        body = {
            "chat/completions": {
                "max_tokens": 1000,
                "messages": [{"role": "user", "content": "a"}],
            },
            "completions": {"max_tokens": 1000, "prompt": "a"},
        }[path]
        body |= {"model": "tiny", "temperature": 2, "stream": stream}
        hook = get_backbone(model).layers[1].register_forward_pre_hook(slow_down)
        connection = http.client.HTTPConnection(*url.split("/")[2].split(":"))
        connection.request(
            "POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"}
        )
        until(lambda: len(steps) > 20)
        connection.close()
        client = client_of(url)
        until(lambda: counted(client, "questions_total"))
        hook.remove()
        # The server looks every second for clients who wait for a whole answer.
        assert counted(client, "tokens_total") < 400


def test_turns_are_those_of_a_chat(client, file, model, tiny_tokenizer):
    small = expected(model, tiny_tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, *about(file)]
    assert ask(client, messages).choices[0].message.content == small.chat(system="Be brief.").ask(
        QUESTION, 12
    )
    messages += [
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "And then?"},
    ]
    suffix = small.context.suffix_text
    said = (
        f"\n\nBe brief.\n\n{QUESTION}{suffix}seven<|im_end|>\n<|im_start|>user\nAnd then?{suffix}"
    )
    ids = torch.tensor(tiny_tokenizer.encode(said, add_special_tokens=False))
    (answer,) = generate_ids(model, tiny_tokenizer, small.cache, [ids], 12)
    text = decode_answer(
        tiny_tokenizer, answer.tolist(), get_stop_ids(model, tiny_tokenizer)
    ).lstrip()
    assert ask(client, messages).choices[0].message.content == text


def test_many_at_once_and_asynchronously(client, file, model, tiny_tokenizer):
    small, questions = (
        expected(model, tiny_tokenizer),
        [f"Which code is {number}?" for number in range(24)],
    )

    async def all_of_them() -> list[str]:
        asking = client_of(str(client.base_url), kind=openai.AsyncOpenAI)
        answers = await asyncio.gather(
            *(ask(asking, about(file, question=each)) for each in questions)
        )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(all_of_them()) == small.ask(questions, 12)


def test_several_documents_are_composed(client, file):
    other = upload(client, OTHER, "other.md")
    both = ask(client, about(file, other))
    alone = [ask(client, about(each)).usage.prompt_tokens for each in (file, other)]
    assert max(alone) < both.usage.prompt_tokens < sum(alone)
    assert client.files.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(other.id)


def test_a_document_that_a_client_sends_in_every_turn_is_read_once(client, file):
    other = upload(client, OTHER, "other.md")
    once = ask(client, about(file, other))
    again = ask(client, about(file, other, file, other))
    assert again.usage.prompt_tokens == once.usage.prompt_tokens
    assert again.choices[0].message.content == once.choices[0].message.content


def test_a_deleted_document_leaves_memory(client):
    before = counted(client, "documents_held")
    made = upload(client, f"Gone soon. {OTHER}", "gone.txt")
    ask(client, about(made))
    assert counted(client, "documents_held") == before + 1
    client.files.delete(made.id)
    assert counted(client, "documents_held") == before


def counted(client, name: str) -> int:
    text = urlopen(f"{str(client.base_url).removesuffix('v1/')}metrics").read().decode()
    return int(float(re.search(rf"^restorekv_{name} (\S+)", text, re.MULTILINE)[1]))


def test_files_are_listed_given_back_and_kept_apart(client, file):
    assert client.files.retrieve(file.id).filename == "doc.txt"
    assert file.id in [each.id for each in client.files.list()]
    assert client.files.content(file.id).read() == TEXT.encode()
    bad = upload(client, b"\xff\x00", "x.txt")
    assert bad.status == "error" and "is binary" in bad.status_details
    with pytest.raises(openai.BadRequestError, match="could not be processed"):
        ask(client, about(bad))


def test_an_upload_says_what_of_it_could_not_be_read(client, caplog, monkeypatch):
    content = make_pdf_with_a_damaged_page(TEXT)
    read = []

    def note_reading(name, content):
        read.append(name)
        return read_document(name, content)

    monkeypatch.setattr(service, "read_document", note_reading)
    for name in ("first.pdf", "second.pdf"):  # the second one finds the cache of the first
        made = upload(client, content, name)
        assert made.status == "processed"
        assert made.status_details.startswith(f"Not all of {name} could be read: page 2 is damaged")
    assert read == ["first.pdf"]
    assert ask(client, about(made)).choices
    data = "data:application/pdf;base64," + base64.b64encode(content).decode()
    part = {"type": "file", "file": {"filename": "third.pdf", "file_data": data}}
    text = {"type": "text", "text": QUESTION}
    with caplog.at_level("WARNING", "restorekv.serve"):
        assert ask(client, [{"role": "user", "content": [part, text]}]).choices
    assert "Not all of third.pdf could be read: page 2 is damaged" in caplog.text


@pytest.mark.parametrize(
    "change, status, message",
    [
        ({"model": "gpt-4"}, 404, "There is no model"),
        ({"model": "tiny:fast"}, 404, "There is no model"),
        ({"model": "tiny:kvzp-0.1"}, 404, r"here \(did you mean tiny:kvzip-0.1\?\)"),
        ({"model": "tiny:fast-0.1-bse"}, 404, r"\(did you mean tiny:fast-0.1-base\?\)"),
        ({"model": "tony"}, 404, r"There is no model 'tony' here \(did you mean tiny\?\)"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "The question is empty"),
        ({"messages": [{"role": "system", "content": "hi"}]}, 400, "There is no question"),
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"n": 0}, 400, "n:"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"tool_choice": "required"}, 400, "tool_choice is not supported"),
        ({"stop": [""]}, 400, "stop must be"),
        ({"model": "tiny:snapkv-7"}, 400, "ratio must be above 0"),
    ],
)
def test_wrong_requests_get_a_sentence(client, file, change, status, message):
    request = {"model": VARIANT, "messages": about(file), "max_tokens": 4, **change}
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.chat.completions.create(**request)
    assert caught.value.status_code == status
    assert "Traceback" not in json.dumps(caught.value.body)


def test_a_stop_string_may_be_long(client, file):
    """OpenAI limits how many there are, not how long one is."""
    answer = ask(client, about(file), stop="and they lived there happily until the end " * 3)
    assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="stop"):
        ask(client, about(file), stop=["x"] * 65)


def test_a_body_that_is_no_json_is_said_to_be_none(client):
    broken = Request(
        f"{client.base_url}chat/completions", b'{"model": ', {"content-type": "application/json"}
    )
    with pytest.raises(HTTPError) as caught:
        urlopen(broken)
    assert caught.value.code == 400 and b"is not valid JSON (at character" in caught.value.read()


def read_answer(reply) -> tuple[str, int]:
    return reply.choices[0].message.content, reply.usage.prompt_tokens


def test_documents_may_be_before_or_after_the_text_and_in_system_messages(client, file):
    parts = about(file)[0]["content"]
    expected_answer = read_answer(ask(client, about(file)))
    assert read_answer(ask(client, [{"role": "user", "content": parts[::-1]}])) == expected_answer
    in_system = [
        {"role": "system", "content": parts[:1]},
        {"role": "user", "content": QUESTION},
    ]
    assert read_answer(ask(client, in_system)) == expected_answer
    marked = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
    in_text = [{"role": "system", "content": [marked]}, {"role": "user", "content": QUESTION}]
    assert read_answer(ask(client, in_text)) == expected_answer


def test_a_document_of_a_later_turn_joins_those_of_the_conversation(client, file):
    second = upload(client, OTHER, "other.txt")
    turns = [{"role": "assistant", "content": "Seven."}, {"role": "user", "content": "Who?"}]
    together = [*about(file, second), *turns]
    file_part = {"type": "file", "file": {"file_id": second.id}}
    later = [
        *about(file),
        turns[0],
        {"role": "user", "content": [{"type": "text", "text": "Who?"}, file_part]},
    ]
    assert read_answer(ask(client, later)) == read_answer(ask(client, together))


def test_messages_of_the_same_role_are_one(client, file):
    """A file in a message of its own, and the question in the next one."""
    document, question = about(file)[0]["content"]
    apart = [{"role": "user", "content": [document]}, {"role": "user", "content": [question]}]
    reply = ask(client, apart)
    assert read_answer(reply) == read_answer(ask(client, about(file)))
    assert reply.restorekv["documents"] == 1


def test_a_marked_system_text_is_found_again_and_a_plain_one_is_an_instruction(
    client, model, tiny_tokenizer
):
    text = f"Other words. {OTHER}"
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [marked, {"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": QUESTION},
    ]
    first, again = (ask(client, messages).usage.prompt_tokens_details for _ in range(2))
    assert first.cache_write_tokens == again.cached_tokens > 0 == again.cache_write_tokens
    small = expected(model, tiny_tokenizer, text).chat(system="Be brief.")
    assert ask(client, messages).choices[0].message.content == small.ask(QUESTION, 12)


def test_documents_that_cannot_be_had_get_a_sentence(client, file):
    said = {"role": "assistant", "content": about(file)[0]["content"][:1]}
    with pytest.raises(openai.BadRequestError, match="An assistant message cannot have documents"):
        ask(client, [*about(file), said, {"role": "user", "content": "And?"}])
    with pytest.raises(openai.NotFoundError, match="no file"):
        ask(client, about(type("Gone", (), {"id": "file-none"})))


PLAIN_CHATS = {
    "hello": [{"role": "user", "content": "What is the code of the market?"}],
    "turns": [
        {"role": "user", "content": "What is the code of the market?"},
        {"role": "assistant", "content": "It is K 7."},
        {"role": "user", "content": "And of the mill?"},
    ],
}


@pytest.mark.parametrize("name", PLAIN_CHATS)
def test_without_a_document_the_plain_model_answers(client, model, tiny_tokenizer, name):
    messages = PLAIN_CHATS[name]
    answer, tokens = generate_plainly(model, tiny_tokenizer, messages)
    for variant in VARIANT, "tiny":
        reply = ask(client, messages, variant)
        assert reply.choices[0].message.content == answer
        assert reply.usage.prompt_tokens == tokens
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        assert reply.usage.prompt_tokens_details.cache_write_tokens == 0
        assert (reply.restorekv["pairs"], reply.restorekv["bytes"]) == (0, 0)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(client, messages, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == answer


def test_plain_chats_sample_stop_and_follow_schemas(client):
    messages = PLAIN_CHATS["hello"]
    several = ask(client, messages, n=3, temperature=1, seed=5, logprobs=True)
    alone = ask(client, messages, temperature=1, seed=5)
    assert len(several.choices) == 3
    assert several.choices[0].message.content == alone.choices[0].message.content
    assert several.choices[0].logprobs.content
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answered = ask(client, messages, response_format=form, max_tokens=60)
    assert answered.choices[0].message.content.lstrip().startswith("{")


def test_plain_chats_and_documents_are_answered_together(client, file):
    plain, with_document = PLAIN_CHATS["hello"], about(file)
    expected_answers = [read_answer(ask(client, each)) for each in (plain, with_document)]

    async def ask_all():
        asking = client_of(str(client.base_url), kind=openai.AsyncOpenAI)
        each = [ask(asking, messages) for messages in (plain, with_document) * 4]
        return [read_answer(reply) for reply in await asyncio.gather(*each)]

    assert asyncio.run(ask_all()) == expected_answers * 4


def test_a_plain_chat_longer_than_the_model_is_refused(client):
    words = "the code of the mill and of the market " * 2000
    with pytest.raises(openai.BadRequestError, match=r"longer than the model's|characters"):
        ask(client, [{"role": "user", "content": words}])


def test_responses_need_no_document(client):
    first = client.responses.create(model=VARIANT, input="What is the code?", temperature=0)
    again = client.responses.create(
        model=VARIANT, input="And now?", temperature=0, previous_response_id=first.id
    )
    messages = [
        {"role": "user", "content": "What is the code?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    assert again.output_text == ask(client, messages, max_tokens=64).choices[0].message.content


def test_a_restart_loads_and_goes_on(model, tiny_tokenizer, tmp_path):
    """Documents and caches survive; a damaged cache is set aside and made again, half a file is
    removed.
    """
    with serving(model, tiny_tokenizer, tmp_path) as url:
        client = client_of(url)
        made = upload(client)
        first = ask(client, about(made))
    (half := tmp_path / "files" / f"file-{0:024x}").write_bytes(b"x")
    with serving(model, tiny_tokenizer, tmp_path) as url:
        again = ask(client_of(url), about(made))
        assert again.choices[0].message.content == first.choices[0].message.content
        assert again.usage.prompt_tokens_details.cache_write_tokens == 0
        assert not half.exists()
    (cache,) = (tmp_path / "caches").iterdir()
    cache.write_bytes(cache.read_bytes()[:-100])
    with serving(model, tiny_tokenizer, tmp_path) as url:
        third = ask(client_of(url), about(made))
    assert third.choices[0].message.content == first.choices[0].message.content
    assert third.usage.prompt_tokens_details.cache_write_tokens > 0
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [cache.name]


def test_another_model_looks_again_at_what_failed_and_at_cache_files(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    """The status of an upload is valid only for the model that processed it."""
    other = build_model("qwen3", seed=1)
    caches = []
    for number, each in enumerate((model, other)):
        path = tmp_path / f"{number}.rkv"
        expected(each, tiny_tokenizer).save(path)
        caches.append(path.read_bytes())

    def get_statuses(client) -> dict[str, str]:
        for each in client.files.list():
            client.files.wait_for_processing(each.id, poll_interval=0.02)
        return {each.filename: each.status for each in client.files.list()}

    store = tmp_path / "store"
    with serving(other, tiny_tokenizer, store) as url:
        client = client_of(url)
        own = upload(client, caches[0], "own.rkv")
        upload(client, caches[1], "other.rkv")
        text = upload(client)
        before = {"own.rkv": "error", "other.rkv": "processed", "doc.txt": "processed"}
        assert get_statuses(client) == before

    processed = []
    start_processing = Service.start_processing

    def note_processing(self, upload) -> None:
        processed.append(upload.name)
        start_processing(self, upload)

    monkeypatch.setattr(Service, "start_processing", note_processing)
    with serving(model, tiny_tokenizer, store) as url:
        client = client_of(url)
        after = {"own.rkv": "processed", "other.rkv": "error", "doc.txt": "processed"}
        assert get_statuses(client) == after
        small = expected(model, tiny_tokenizer)
        for each, name in ((own, "tiny"), (text, VARIANT)):
            answer = ask(client, about(each), name)
            assert answer.choices[0].message.content == small.ask(QUESTION, 12)
    assert sorted(processed) == ["other.rkv", "own.rkv"]
    # The same model does nothing twice.
    with serving(model, tiny_tokenizer, store) as url:
        assert get_statuses(client_of(url)) == after
    assert len(processed) == 2


def test_a_model_may_have_an_owner(model, tiny_tokenizer, tmp_path):
    with listening(
        build_app(model, tiny_tokenizer, Settings(tmp_path, "Org/tiny", "Org/tiny:snapkv-0.4"))
    ) as url:
        for name in ("Org/tiny", "Org/tiny:snapkv-0.4"):
            assert (
                client_of(url).models.retrieve(name).id
                == json.load(urlopen(f"{url}/models/{name}"))["id"]
                == name
            )


def test_a_named_adapter_restores_every_document(model, tiny_tokenizer, tmp_path):
    make_adapter(model).save_pretrained(tmp_path / "adapter")
    options = {"evictor": "snapkv", "ratio": "0.4"}
    whole = make_adapter(model).restore_tokens

    def ask_variants(adapter: str | None) -> dict[str, int]:
        """Return the restore tokens of each variant; its answers are those of `compress`."""
        counts = {}
        with serving(model, tiny_tokenizer, tmp_path / "store", adapter=adapter) as url:
            client = client_of(url)
            file = upload(client)
            for name in (VARIANT, "tiny:knorm-0.9", f"{VARIANT}-base"):
                answer = ask(client, about(file), name).choices[0].message.content
                asked = urlopen(f"{url}/files/{file.id}/kept?model={name}")
                counts[name] = json.load(asked)["restore_tokens"]
                if name == VARIANT:
                    small = compress_with(model, tiny_tokenizer, TEXT, **options, adapter=adapter)
                    assert answer == small.ask(QUESTION, 12)
        return counts

    folder = str(tmp_path / "adapter")
    assert list(ask_variants(folder).values()) == [whole, whole, 0]
    # Over the same store: what the adapter restored is not taken for what nothing restored.
    assert list(ask_variants(None).values()) == [0, 0, 0]
    assert list(ask_variants(folder).values()) == [whole, whole, 0]


def test_an_adapter_that_cannot_be_used_is_refused_before_the_server_starts(
    model, tiny_tokenizer, tmp_path
):
    make_adapter(build_model("llama")).save_pretrained(tmp_path / "other")
    for name, message in (
        (str(tmp_path / "none"), "There is no adapter folder"),
        (str(tmp_path / "other"), "adapter"),
        ("published", "There is no published adapter for"),
    ):
        settings = Settings(tmp_path / "store", "tiny", VARIANT, adapter=name)
        with pytest.raises(AdapterError, match=message):
            build_app(model, tiny_tokenizer, settings)
    assert not (tmp_path / "store").exists()


def test_keys_limits_and_quotas(model, tiny_tokenizer, tmp_path):
    limits = {"keys": (KEY,), "limits": Limits(upload=2000), "memory": 1, "disk": 1}
    with serving(model, tiny_tokenizer, tmp_path, **limits) as url:
        with pytest.raises(openai.AuthenticationError, match="key"):
            client_of(url, "another-key-of-16-characters").models.list()
        client = client_of(url)
        assert [each.id for each in client.models.list()] == ["tiny", VARIANT]
        assert abs(next(iter(client.models.list())).created - time.time()) < 3600
        with pytest.raises(openai.APIStatusError, match="larger than"):
            client.files.create(file=("big.txt", b"x" * 3000), purpose="user_data")
        files = [
            upload(client, f"{TEXT} {number}", f"{number}.txt", wait=False) for number in range(3)
        ]
        for each in files:
            client.files.wait_for_processing(each.id, poll_interval=0.05)
        # The newest stays, whatever the quota.
        assert len(list((tmp_path / "caches").iterdir())) == 1
        answers = [ask(client, about(each)).choices[0].message.content for each in files]
        assert all(isinstance(answer, str) for answer in answers)


def test_what_is_asked_from_memory_stays_on_disk(model, tiny_tokenizer, tmp_path):
    expected(model, tiny_tokenizer).save(tmp_path / "probe.rkv")
    # Room for two caches and a half.
    disk = (tmp_path / "probe.rkv").stat().st_size * 5 // 2
    caches = tmp_path / "store" / "caches"
    with serving(model, tiny_tokenizer, tmp_path / "store", disk=disk) as url:
        client = client_of(url)
        first, second = (upload(client, f"{TEXT} {number}", f"{number}.txt") for number in (1, 2))
        ask(client, about(first))
        third = upload(client, f"{TEXT} 3", "3.txt")
        files = set(caches.iterdir())
        assert len(files) == 2
        # The second file was never asked about: its cache has left the disk, though not memory.
        for each in (first, third):
            get_bytes(client, f"/files/{each.id}/cache")
        assert set(caches.iterdir()) == files
        get_bytes(client, f"/files/{second.id}/cache")
        assert set(caches.iterdir()) != files


def test_uploads_of_many_kinds(tmp_path):
    page = (
        b"<html><head><title>no</title></head><body><p>Who lives "
        b"<b>here</b>?</p><script>x</script><p>Nobody.</p>"
    )
    assert extract_text("a.html", page) == "Who lives here?\nNobody."
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_paragraph("The miller lives here.")
    document.save(tmp_path / "a.docx")
    assert extract_text("a.docx", (tmp_path / "a.docx").read_bytes()) == "The miller lives here."
    for name in ("a.pdf", "a.docx", "a.txt", "a.html"):
        with pytest.raises(Exception, match=r"a\."):
            extract_text(name, b"\x00\xff")


@pytest.mark.parametrize(
    "page, text",
    [
        (
            "<table><tr><th>Who</th><th>Age</th></tr><tr><td>Alice</td><td>42</td></table>",
            "Who\tAge\nAlice\t42",
        ),
        ("<dl><dt>Age</dt><dd>7</dd></dl><select><option>a<option>b</select>", "Age\n7\na\nb"),
        (
            "<ul>one</ul><footer>two</footer><figcaption>three</figcaption>four",
            "one\ntwo\nthree\nfour",
        ),
        ("<!doctype html><html><head><meta charset=utf-8><title>t</title><body><p>Hello", "Hello"),
        ("<title>a<title>b</title>one<noscript><noscript><style></noscript> two", "one two"),
        (
            "one<template>no<template>no</template>no</template> two</template> three",
            "one two three",
        ),
        ("<template>one", "one"),
        ("<script src=x /><style/>one<script>no", "one"),
        (
            "a  b<pre>\ndef f(x):\r\n    if <b>x</b>:\n\n\treturn  1\n</pre>c  d",
            "a b\ndef f(x):\n    if x:\n\n\treturn  1\nc d",
        ),
        ("<pre>  a\n</pre><pre> b</pre></pre> c<pre> \n </pre>", "  a\n b\nc"),
        ("<template><pre></template>a  b<pre>  c", "a b\n  c"),
    ],
)
def test_pages_lose_and_glue_no_text(page, text):
    assert extract_text("a.html", page.encode()) == text


def test_tables_of_word_files_are_read(tmp_path):
    """Rows by lines and cells by tabs, merged cells in their columns, tables in cells too."""
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_paragraph("Ages:")
    table = document.add_table(3, 3)
    for number, name in enumerate("abcdefghi"):
        table.cell(number // 3, number % 3).text = name
    for first, last, name in (((0, 0), (0, 1), "wide"), ((1, 0), (2, 0), "tall")):
        table.cell(*first).merge(table.cell(*last)).text = name
    inner = table.cell(2, 2).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "in", "ner"
    document.add_paragraph("End.")
    document.save(tmp_path / "a.docx")
    text = extract_text("a.docx", (tmp_path / "a.docx").read_bytes())
    assert text == "Ages:\n\nwide\t\tc\ntall\te\tf\ntall\th\ti in ner\n\nEnd."


def test_controls_and_tracked_changes_of_word_files_are_read(tmp_path):
    docx = pytest.importorskip("docx")
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    run = "<w:r><w:t>{}</w:t></w:r>"
    control = "<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>"
    paragraphs = [
        f"<w:p>{run.format('It burned in ')}<w:ins>{run.format('1902')}</w:ins>"
        f"<w:del><w:r><w:delText>1903</w:delText></w:r></w:del></w:p>",
        control.format(f"<w:p>{run.format('In a control.')}</w:p>"),
        f"<w:p>{run.format('Owner: ')}{control.format(run.format('Mary'))}"
        "<w:r><w:tab/><w:br/><w:noBreakHyphen/></w:r></w:p>",
        "<w:tbl><w:tr>"
        + control.format(f"<w:tc><w:p>{run.format('cell')}</w:p></w:tc>")
        + "</w:tr></w:tbl>",
    ]
    document = docx.Document()
    end = document.element.body[-1]
    for xml in paragraphs:
        name, rest = xml[1:].split(">", 1)
        end.addprevious(docx.oxml.parse_xml(f'<{name} xmlns:w="{word}">{rest}'))
    document.save(tmp_path / "a.docx")
    text = extract_text("a.docx", (tmp_path / "a.docx").read_bytes())
    assert text == "It burned in 1902\n\nIn a control.\n\nOwner: Mary\t\n-\n\ncell"


def test_other_texts_of_word_files_are_read(tmp_path):
    """Text with a set direction, the base text of furigana, equations, and text boxes once."""
    docx = pytest.importorskip("docx")
    namespaces = {
        "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
        "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
        "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    }
    named = " ".join(f'xmlns:{name}="{uri}"' for name, uri in namespaces.items())
    run = "<w:r><w:t>{}</w:t></w:r>"
    ruby = f"<w:rt>{run.format('kan')}</w:rt><w:rubyBase>{run.format('漢')}</w:rubyBase>"
    box = f"<w:txbxContent><w:p>{run.format('In a box.')}</w:p></w:txbxContent>"
    equation = (
        "<m:oMath><m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e>"
        "<m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup><m:r><m:t>=</m:t></m:r>"
        "<m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>4</m:t></m:r></m:den></m:f>"
        "</m:oMath>"
    )
    paragraphs = [
        f'<w:bdo w:val="rtl">{run.format("one")}</w:bdo><w:dir>{run.format(" two")}</w:dir>',
        f"<w:r><w:ruby>{ruby}</w:ruby></w:r>{run.format('字')}",
        run.format("So ") + equation,
        f"{run.format('Before')}<w:r><mc:AlternateContent>"
        f"<mc:Choice><w:drawing>{box}</w:drawing></mc:Choice>"
        f"<mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent></w:r>"
        f"{run.format(' and after.')}<w:del><w:r><w:pict>{box}</w:pict></w:r></w:del>",
    ]
    document = docx.Document()
    end = document.element.body[-1]
    for xml in paragraphs:
        end.addprevious(docx.oxml.parse_xml(f"<w:p {named}>{xml}</w:p>"))
    document.save(tmp_path / "a.docx")
    text = extract_text("a.docx", (tmp_path / "a.docx").read_bytes())
    assert text == "one two\n\n漢字\n\nSo x^2=1/4\n\nBefore and after.\n\nIn a box."


def test_a_response_that_is_not_there_names_no_field(client):
    """The response's name is in the path, so the error names no field of the request."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.retrieve("resp-nowhere")
    assert refused.value.param is None, refused.value.body


def test_responses_go_on_from_the_one_before(client, file):
    options = {"model": VARIANT, "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input=input_of(file), **options)
    assert first.output_text == ask(client, about(file)).choices[0].message.content
    second = client.responses.create(input="And then?", previous_response_id=first.id, **options)
    messages = [*about(file), {"role": "assistant", "content": first.output_text}]
    chat = ask(client, [*messages, {"role": "user", "content": "And then?"}])
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    pieces = client.responses.create(input=input_of(file), stream=True, **options)
    events = list(pieces)
    assert (
        "".join(each.delta for each in events if each.type == "response.output_text.delta")
        == first.output_text
    )
    # Streamed or not, an answer can be fetched as it was sent.
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    streamed = events[-1].response
    assert client.responses.retrieve(streamed.id).to_dict() == streamed.to_dict()
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="ask again"):
        client.responses.retrieve(second.id)
    status = events[-1].response.status
    assert (
        events[-1].type == f"response.{status}"
        and events[-1].response.output_text == first.output_text
    )
    short = list(
        client.responses.create(
            **{**options, "max_output_tokens": 1}, input=input_of(file), stream=True
        )
    )
    assert short[-1].type == "response.incomplete" and short[-1].response.status == "incomplete"
    assert {each.item.status for each in short if each.type == "response.output_item.done"} == {
        "incomplete"
    }
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.create(input="And then?", previous_response_id="resp-none", **options)


def test_a_response_that_is_deleted_is_forgotten(client, file):
    options = {"model": VARIANT, "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input=input_of(file), **options)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **options)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.create(input="And then?", previous_response_id=first.id, **options)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.delete(first.id)
    # What the second shares with it stays.
    again = client.responses.create(input="Why?", previous_response_id=second.id, **options)
    assert again.status in ("completed", "incomplete")


def test_responses_say_the_temperature_and_top_p_that_were_used(client, file):
    options = {"model": VARIANT, "input": input_of(file), "max_output_tokens": 4}
    silent = client.responses.create(**options)
    assert (silent.temperature, silent.top_p) == (1, 1)
    given = client.responses.create(temperature=0.5, top_p=0.25, **options)
    assert (given.temperature, given.top_p) == (0.5, 0.25)
    events = list(client.responses.create(stream=True, **options))
    assert {events[place].response.temperature for place in (0, -1)} == {1}


def test_responses_go_on_with_documents_of_system_messages(client, file):
    options = {"model": VARIANT, "temperature": 0, "max_output_tokens": 12}
    asked = input_of(file)
    # The document in a message of the system, the question in one of the user.
    parts = [part for part in asked[-1]["content"] if part["type"] == "input_file"]
    system = {"role": "system", "content": [*parts, {"type": "input_text", "text": "Be brief."}]}
    conversation = [system, {"role": "user", "content": QUESTION}]
    first = client.responses.create(input=conversation, instructions="Be kind.", **options)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **options)
    said = [{"role": "assistant", "content": first.output_text}]
    whole = [*conversation, *said, {"role": "user", "content": "And then?"}]
    again = client.responses.create(input=whole, **options)
    assert second.restorekv["documents"] == 1
    assert second.output_text == again.output_text
    # The system's text is read again, the instructions of the request before are not.
    assert second.usage.input_tokens == again.usage.input_tokens


def test_a_file_without_an_ending_is_read_as_its_kind_says(client):
    page = "<html><style>p {color: red}</style><body><p>The code is seven.</p></body></html>"
    encoded = base64.b64encode(page.encode()).decode()

    def count(name):
        inline = {"filename": name, "file_data": f"data:text/html;base64,{encoded}"}
        parts = [{"type": "file", "file": inline}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": parts}]
        return ask(client, messages).usage.prompt_tokens

    assert count("report") == count("report.html") < count("report.txt")


def test_a_dot_in_a_name_is_no_ending(client):
    """The part's media type decides, unless the name has a known ending."""
    page = "<html><script>var x = 1</script><body><p>The blue house.</p></body></html>"
    encoded = base64.b64encode(page.encode()).decode()
    tokens = []
    for name in ("notes v1.2", "notes", "notes.html"):
        part = {"filename": name, "file_data": f"data:text/html;base64,{encoded}"}
        content = [{"type": "file", "file": part}, {"type": "text", "text": QUESTION}]
        answer = ask(client, [{"role": "user", "content": content}])
        tokens.append(answer.usage.prompt_tokens)
    assert len(set(tokens)) == 1


PAGE = b"<html><script>var x = 1</script><body><p>The blue house.</p></body></html>"


def ask_about_data(client, data, **part):
    inline = {"file_data": data, **part}
    content = [{"type": "file", "file": inline}, {"type": "text", "text": QUESTION}]
    return ask(client, [{"role": "user", "content": content}])


def test_the_format_of_a_file_is_heeded(client):
    """litellm puts into this field what otherwise a data: URL or a file name says."""
    encoded = base64.b64encode(PAGE).decode()
    plain = ask_about_data(client, encoded, filename="page.html").usage.prompt_tokens
    unknown = f"data:application/octet-stream;base64,{encoded}"
    for data, part in (
        (encoded, {"format": "text/html"}),
        (encoded, {"format": "TEXT/HTML", "filename": "page"}),
        (encoded, {"format": "application/xhtml+xml", "filename": "page v1.2"}),
        (encoded, {"format": "text/html", "filename": "page.html"}),
        (unknown, {"format": "text/html"}),
        (f"data:text/html;base64,{encoded}", {"format": "text/html"}),
        (f"DATA:Text/HTML;charset=UTF-8;base64,{encoded}", {}),
        (f"data:text/html;base64,\n{encoded[:40]}\r\n{encoded[40:]}\n", {}),
        (encoded, {"format": "application/octet-stream", "filename": "page.html"}),
    ):
        assert ask_about_data(client, data, **part).usage.prompt_tokens == plain, part


@pytest.mark.parametrize(
    ("data", "part", "sentence"),
    [
        ("{}", {"format": "image/png"}, "type image/png cannot be read here"),
        ("data:image/png;base64,{}", {}, "type image/png cannot be read here"),
        ("data:application/msword;base64,{}", {"filename": "a"}, "application/msword cannot"),
        ("{}", {"format": "pdf"}, "media type such as application/pdf"),
        ("{}", {"format": "application/pdf", "filename": "page.html"}, "make them agree"),
        ("data:text/plain;base64,{}", {"format": "text/html"}, "make them agree"),
        ("data:text/html,{}", {}, "file_data must be base64"),
        ("text/html;base64,{}", {}, "file_data must be base64"),
        ("data:text/html;charset=iso-8859-1;base64,{}", {}, "save it as UTF-8"),
    ],
)
def test_files_whose_kind_cannot_be_heeded_are_refused(client, data, part, sentence):
    encoded = base64.b64encode(PAGE).decode()
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        ask_about_data(client, data.format(encoded), **part)
    assert refused.value.param == "messages.0.content.0.file"


def test_the_format_of_an_upload_is_how_it_is_read(client, file):
    part = {"type": "file", "file": {"file_id": file.id, "format": "text/plain"}}
    text = {"type": "text", "text": QUESTION}
    told = ask(client, [{"role": "user", "content": [part, text]}])
    assert told.choices[0].message.content == ask(client, about(file)).choices[0].message.content
    part["file"]["format"] = "application/pdf"
    with pytest.raises(openai.BadRequestError, match=r"does not match doc\.txt"):
        ask(client, [{"role": "user", "content": [part, text]}])


def test_a_file_of_which_nothing_says_its_kind_is_read_as_it_begins(client):
    """LlamaIndex sends files that it reads from a path with this name and the media type "None"."""
    plain = ask_about_data(client, base64.b64encode(PAGE).decode(), filename="page.html")
    page = base64.b64encode(b"\xef\xbb\xbf\n<!DOCTYPE html>" + PAGE).decode()
    told = ask_about_data(client, f"data:None;base64,{page}", filename="input_document")
    assert told.usage.prompt_tokens == plain.usage.prompt_tokens
    text = base64.b64encode(TEXT.encode()).decode()
    told = ask_about_data(client, f"data:None;base64,{text}", filename="input_document")
    named = ask_about_data(client, text, filename="doc.txt")
    assert told.usage.prompt_tokens == named.usage.prompt_tokens


@pytest.mark.parametrize(
    ("name", "media_type", "content", "stored"),
    [
        ("upload", None, PAGE, "upload.html"),  # openai's name of plain bytes
        ("upload", None, b"%PDF-1.7 ...", "upload.pdf"),
        ("novel", "application/epub+zip", b"PK\x03\x04", "novel.epub"),
        ("page v1.2", "text/html; charset=utf-8", b"<p>One.", "page v1.2.html"),
        ("Makefile", "application/octet-stream", b"all:\n\techo", "Makefile"),
        ("page.txt", "text/html", PAGE, "page.txt"),
        ("page.php", "application/octet-stream", PAGE, "page.php"),
        ("script", "application/x-sh", b"echo", "script"),
    ],
)
def test_an_upload_without_an_ending_is_read_as_its_type_or_start_says(
    client, name, media_type, content, stored
):
    part = (name, content) if media_type is None else (name, content, media_type)
    made = client.files.create(file=part, purpose="user_data")
    assert made.filename == stored
    client.files.delete(made.id)


@pytest.mark.parametrize(
    ("media_type", "name"),
    [
        ("text/plain", "my_file.pdf"),  # which litellm calls every file without a name
        ("text/html", "a.docx"),
        ("application/epub+zip", "a.txt"),
        ("application/pdf", "a.txt"),
        ("application/pdf", "a.html"),
    ],
)
def test_a_name_of_another_kind_than_the_type_is_refused(client, media_type, name):
    encoded = base64.b64encode(PAGE).decode()
    sentence = f"is named {name}, and its type is {media_type}; send a filename with the ending"
    with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
        ask_about_data(client, f"data:{media_type};base64,{encoded}", filename=name)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"%PDF-1.7\n1 0 obj", r"a\.txt is a PDF file by its content; give it a name"),
        ("a", b"PK\x03\x04\0\0", "is a ZIP file by its content"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "older office program; save it as DOCX"),
        ("a.rtf", rb"{\rtf1\ansi Caf\'e9}", "is RTF by its content"),
    ],
)
def test_a_file_that_is_no_plain_text_is_told_what_it_is(tmp_path, name, content, sentence):
    with pytest.raises(RestoreKVError, match=sentence):
        extract_text(name, content)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RestoreKVError, match=f"The file .*{sentence}"):
        load_document(tmp_path / name)


@pytest.mark.parametrize(
    "wrong", [{"anchor": "created_at"}, {"anchor": "last_active_at", "seconds": 3600}]
)
def test_an_expiry_that_would_be_ignored_is_refused(client, wrong):
    fields = {f"expires_after[{name}]": value for name, value in wrong.items()}
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=("a.txt", b"A text."), purpose="user_data", extra_body=fields)


def test_a_temperature_of_nearly_nothing_is_greedy():
    """Some clients use such a temperature to ask for the likeliest tokens."""
    messages = [{"role": "user", "content": QUESTION}]
    for temperature, taken in ((1e-8, 0.0), (0.009, 0.0), (0.01, 0.01)):
        request = ChatRequest(model="tiny", messages=messages, temperature=temperature)
        assert request.make_sampling(AnswerDefaults()).temperature == taken


def test_bytes_of_parts_of_characters_are_not_made_up(tiny_tokenizer):
    ids = tiny_tokenizer("é", add_special_tokens=False).input_ids
    pieces = [tiny_tokenizer.decode([each]) for each in ids]
    assert any("\ufffd" in piece for piece in pieces)
    rows = [(each, -1.0, {each: -1.0}) for each in ids]
    for piece, described in zip(pieces, describe_logprobs(rows, tiny_tokenizer), strict=True):
        known = None if "\ufffd" in piece else list(piece.encode())
        assert described.bytes == described.top_logprobs[0].bytes == known


@pytest.mark.parametrize("name", ["llama2", "mistral3", "gemma2", "llama3"])
def test_the_bytes_of_tokens_together_are_the_text(name):
    """Also if the tokenizer drops the space before a token that it decodes alone."""
    tokenizer = build_chat_tokenizer(name)
    ids = tokenizer("the code, the code", add_special_tokens=False).input_ids
    rows = [(each, -1.0, {each: -1.0}) for each in ids[1:]]
    described = describe_logprobs(rows, tokenizer)
    text = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:1]))
    assert " the " in text
    assert "".join(each.token for each in described) == text
    assert b"".join(bytes(each.bytes) for each in described).decode() == text
    assert all(each.top_logprobs[0].token == each.token for each in described)


def test_a_cache_file_goes_out_and_in(client, file, model, tiny_tokenizer, tmp_path):
    cache = get_bytes(client, f"/files/{file.id}/cache")
    (tmp_path / "doc.rkv").write_bytes(cache)
    loaded = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert loaded.ask(QUESTION, 12) == expected(model, tiny_tokenizer).ask(QUESTION, 12)
    states = {}
    for name, content in {"doc.rkv": cache, "bad.rkv": cache[:-50]}.items():
        states[name] = upload(client, content, name)
    answer = ask(client, about(states["doc.rkv"]), "tiny")
    assert answer.choices[0].message.content == loaded.ask(QUESTION, 12)
    assert get_bytes(client, f"/files/{states['doc.rkv'].id}/cache") == cache
    # Next to a cache file, a text is kept whole, whatever the evictor of the file.
    both = ask(client, about(states["doc.rkv"], file), "tiny").choices[0].message.content
    whole = compress(model, tiny_tokenizer, TEXT, ratio=1, adapter=None)
    assert both == compose([loaded, whole]).ask(QUESTION, 12)
    other = compress(model, tiny_tokenizer, TEXT, ratio=0.5, evictor="knorm", adapter=None)
    other.save(tmp_path / "other.rkv")
    other = upload(client, (tmp_path / "other.rkv").read_bytes(), "other.rkv")
    # The library's own sentence names what only its users can do.
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, about(states["doc.rkv"], other), "tiny")
    assert refused.value.body["message"] == (
        "These documents cannot be asked together, since they were compressed differently; ask "
        "about one at a time, or upload the text of a .rkv file instead of the file."
    )
    assert states["bad.rkv"].status == "error"
    # By the name that the client knows, not by the server's.
    assert states["bad.rkv"].status_details.startswith("bad.rkv ")


def test_a_cache_file_is_no_other_variant(client, file):
    """A cache file would answer as it was compressed, under the name of another variant."""
    cache = get_bytes(client, f"/files/{file.id}/cache")
    made = upload(client, cache, "own.rkv")
    for model in ("tiny:snapkv-0.9", f"{VARIANT}-base", VARIANT):
        with pytest.raises(
            openai.BadRequestError, match=f"cannot be served as {model}; use the model"
        ):
            ask(client, about(made), model)
        with pytest.raises(openai.BadRequestError, match="cannot be served"):
            get_bytes(client, f"/files/{made.id}/cache?model={model}")
    plain = ask(client, about(made), "tiny").choices[0].message.content
    assert plain == ask(client, about(file)).choices[0].message.content


def test_a_cache_is_that_of_the_model_that_is_named(client, file):
    other = "tiny:snapkv-0.7"
    with pytest.raises(openai.NotFoundError, match=f"not compressed as {other} yet"):
        get_bytes(client, f"/files/{file.id}/cache?model={other}")
    ask(client, about(file), other)
    wanted = get_bytes(client, f"/files/{file.id}/cache?model={other}")
    assert wanted != get_bytes(client, f"/files/{file.id}/cache")
    assert get_bytes(client, f"/files/{file.id}/cache?model={VARIANT}") == get_bytes(
        client, f"/files/{file.id}/cache"
    )


def get_bytes(client, path):
    kind = openai._legacy_response.HttpxBinaryResponseContent
    return client.get(path, cast_to=kind).read()


def test_lists_of_files_are_those_that_were_asked_for(client, file):
    mine = [upload(client, f"{TEXT} {number}", f"{number}.txt").id for number in range(3)]
    newest = [each.id for each in client.files.list()]
    assert newest[:3] == mine[::-1]
    page = client.files.list(limit=2)
    assert [each.id for each in page.data] == newest[:2] and page.has_more
    # The client asks for one page after the other, as long as there is more.
    assert [each.id for each in client.files.list(limit=2)] == newest
    assert [each.id for each in client.files.list(order="asc", after=mine[0])] == mine[1:]
    assert not client.files.list(purpose="batch").data
    with pytest.raises(openai.NotFoundError, match="There is no file 'file-none'"):
        client.files.list(after="file-none")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.files.list(limit=0)


def test_a_list_after_a_file_that_expires_meanwhile_says_that_it_is_gone(client, file, monkeypatch):
    """Listing deletes what has expired, also if it was still there a moment ago."""
    mine = upload(client, f"{TEXT} of a moment", "moment.txt").id
    list_uploads = Store.list_uploads

    def expire_and_list(store):
        store.delete_upload(mine)
        return list_uploads(store)

    monkeypatch.setattr(Store, "list_uploads", expire_and_list)
    with pytest.raises(openai.NotFoundError, match=f"There is no file '{mine}'"):
        client.files.list(after=mine)


def test_parameters_that_would_be_ignored_are_refused(client, file):
    for path, names in (
        (f"/files/{file.id}", "none"),
        ("/files", "after, limit, order and purpose;"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"colour is not a parameter.*{names}"):
            client.get(f"{path}?colour=red", cast_to=object)


def test_a_body_without_its_header_is_told_so(client):
    request = Request(
        f"{client.base_url}chat/completions",
        b'{"model": "tiny"}',
        {"Authorization": f"Bearer {KEY}"},
    )
    with pytest.raises(HTTPError) as error:
        urlopen(request)
    assert "Content-Type: application/json" in error.value.read().decode()


def test_answers_that_repeat_themselves_can_be_ended(client, file):
    options = {"max_tokens": 60, "temperature": 0}
    whole = ask(client, about(file), **options).choices[0].message.content
    ended = ask(client, about(file), extra_body={"stop_repeats": 2}, **options)
    assert whole.startswith(ended.choices[0].message.content)
    with pytest.raises(openai.BadRequestError, match="stop_repeats"):
        ask(client, about(file), extra_body={"stop_repeats": 1}, **options)


def test_a_stream_leaves_out_the_repetition_that_the_answer_leaves_out(
    client, file, tiny_tokenizer
):
    options = {"max_tokens": 60, "temperature": 0, "logprobs": True}
    # A token that comes again and again, after a few others.
    word = tiny_tokenizer(" red", add_special_tokens=False).input_ids[0]
    options |= {"logit_bias": {str(word): 100}, "frequency_penalty": 0}
    options["extra_body"] = {"stop_repeats": 3}
    whole = ask(client, about(file), **options).choices[0]
    assert whole.message.content == "red", "the copies were cut off"
    content = ""
    tokens = []
    for chunk in ask(client, about(file), stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            tokens += choice.logprobs.content if choice.logprobs else []
    assert content == whole.message.content
    assert [each.token for each in tokens] == [each.token for each in whole.logprobs.content]


def test_the_server_decides_what_a_request_leaves_open(model, tiny_tokenizer, tmp_path):
    """Clients such as Open WebUI send no temperature."""
    defaults = AnswerDefaults(temperature=0.0, stop_repeats=3)
    with serving(model, tiny_tokenizer, tmp_path, defaults=defaults) as url:
        client = client_of(url)
        messages = about(upload(client))
        plain = ask(client, messages).choices[0].message.content
        assert ask(client, messages, temperature=0).choices[0].message.content == plain
        prompts = [client.completions.create(model="tiny", prompt="Which") for _ in range(2)]
        assert prompts[0].choices[0].text == prompts[1].choices[0].text
    asked = ChatRequest(model="tiny", messages=messages, temperature=0.5, stop_repeats=0)
    assert asked.make_sampling(defaults).temperature == 0.5
    assert asked.make_sampling(defaults).stop_repeats == 0
    silent = ChatRequest(model="tiny", messages=messages)
    assert silent.make_sampling(defaults).stop_repeats == 3
    assert silent.make_sampling(AnswerDefaults()).temperature == 1
    with pytest.raises(RestoreKVError, match="stop_repeats"):
        AnswerDefaults(stop_repeats=1)


def test_an_empty_upload_is_refused_at_once(client):
    with pytest.raises(openai.BadRequestError, match="The file is empty"):
        upload(client, b"", "empty.txt")


def test_an_empty_question_is_refused_before_its_document_is_compressed(client):
    unread = f"Nobody asked yet. {OTHER}"
    text = {"type": "text", "text": unread, "cache_control": {"type": "ephemeral"}}
    with pytest.raises(openai.BadRequestError, match="The question is empty"):
        ask(client, [{"role": "user", "content": [text]}])
    question = {"type": "text", "text": QUESTION}
    usage = ask(client, [{"role": "user", "content": [text, question]}]).usage
    assert usage.prompt_tokens_details.cache_write_tokens


def test_a_text_too_short_for_its_ratio_is_kept_whole(client, file):
    """A tenth of eight tokens is less than a token, and there is nothing to save."""
    short = upload(client, "31 goats", "short.txt")
    reply = ask(client, about(short), "tiny:kvzip-0.1")
    whole = ask(client, about(short), "tiny")
    assert reply.choices[0].message.content == whole.choices[0].message.content
    assert reply.restorekv["pairs"] == whole.restorekv["pairs"]


def test_metrics_count_requests(client, file):
    def count(path, status):
        with urlopen(str(client.base_url).removesuffix("v1/") + "metrics") as answer:
            text = answer.read().decode()
        line = f'restorekv_http_requests_total{{path="{path}",status="{status}"}} '
        return float(
            ([each for each in text.splitlines() if each.startswith(line)] or [line + "0"])[
                0
            ].split()[-1]
        )

    before = count("/v1/files/{name}", 404), count("other", 404)
    for path in ("/files/file-none", "/nothing/here"):
        with pytest.raises(openai.NotFoundError):
            client.get(path, cast_to=object)
    assert (count("/v1/files/{name}", 404), count("other", 404)) == tuple(x + 1 for x in before)


def test_metrics_tell_of_the_process(client):
    """Every exporter reports these; so does vLLM (tests/hostile/load.py reads one of them)."""
    with urlopen(str(client.base_url).removesuffix("v1/") + "metrics") as answer:
        lines = answer.read().decode().splitlines()
    held = next(line for line in lines if line.startswith("process_resident_memory_bytes "))
    assert float(held.split()[1]) > 1e6


def test_pages_of_other_sites_cannot_ask(client, file):
    pages = {"Origin": "http://evil.example"}, {"Host": "evil.example:8080"}
    for headers in (*pages, {**pages[1], "X-Forwarded-For": "8.8.8.8"}):
        with pytest.raises(openai.PermissionDeniedError, match="another site"):
            client.models.list(extra_headers=headers)
    host = str(client.base_url).split("/")[2]
    assert client.models.list(extra_headers={"Origin": f"http://{host}"}).data


def test_a_client_who_leaves_takes_nobody_along(client, file):
    """A request that is cancelled while it waits ends only itself."""

    async def leave() -> None:
        asking = client_of(str(client.base_url), kind=openai.AsyncOpenAI)
        tasks = [
            asyncio.create_task(ask(asking, about(file, question=f"{n}?"), max_tokens=64))
            for n in range(20)
        ]
        await asyncio.sleep(0.05)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    assert ask(client, about(file)).choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "name, needs, options",
    [
        ("ask_server", "openai", {}),
        ("ask_langchain", "langchain_openai", {}),
        ("ask_llamaindex", "llama_index.llms.openai_like", {"model": VARIANT}),
    ],
)
def test_the_examples_ask(client, model, tiny_tokenizer, tmp_path, name, needs, options):
    pytest.importorskip(needs)
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "examples" / f"{name}.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / "doc.txt").write_text(TEXT)
    found = example.ask(str(client.base_url), tmp_path / "doc.txt", [QUESTION, "Who?"], **options)
    assert found == expected(model, tiny_tokenizer).ask([QUESTION, "Who?"], 64)


@pytest.mark.parametrize(
    "name, needs",
    [
        ("ask_server", "openai"),
        ("ask_langchain", "langchain_openai"),
        ("ask_llamaindex", "llama_index.llms.openai_like"),
    ],
)
def test_an_example_passes_on_what_the_server_says(client, tmp_path, monkeypatch, name, needs):
    """Here about an address without /v1."""
    pytest.importorskip(needs)
    (tmp_path / "doc.txt").write_text(TEXT)
    monkeypatch.setenv("OPENAI_BASE_URL", str(client.base_url).partition("/v1")[0])
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "doc.txt"), QUESTION])
    with pytest.raises(SystemExit, match="whose base URL is this server's address and /v1"):
        runpy.run_path(str(path), run_name="__main__")


def test_answers_go_on_inside_a_phase_of_a_compression(model, tiny_tokenizer, tmp_path):
    """A question about another document is answered while the model still reads the new one."""
    inside, answered = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread().name.startswith("restorekv-compress") and inside.is_set():
            answered.wait(30)

    with serving(model, tiny_tokenizer, tmp_path) as url:
        client = client_of(url)
        first = upload(client)
        alone = ask(client, about(first)).choices[0].message.content
        hook = get_backbone(model).layers[1].register_forward_pre_hook(wait)
        try:
            inside.set()
            second = upload(client, OTHER, "other.txt", wait=False)
            address = f"{url}/files/{second.id}/progress?model={VARIANT}"
            until(lambda: "prefill" in urlopen(address).read().decode())
            beside = ask(client, about(first)).choices[0].message.content
            assert "prefill" in urlopen(address).read().decode()
        finally:
            answered.set()
            hook.remove()
        assert client.files.wait_for_processing(second.id, poll_interval=0.05).status == "processed"
    assert beside == alone
