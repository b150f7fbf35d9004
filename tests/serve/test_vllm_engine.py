"""The engine that asks vLLM, against a small server that answers as vLLM's does; tests/vllm asks
the real one.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from restorekv import CompressionConfig

openai = pytest.importorskip("openai")

from restorekv import compose, compress, load_model  # noqa: E402
from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.model.identity import fingerprint_model  # noqa: E402
from restorekv.serve.portables import Portables  # noqa: E402
from restorekv.serve.run import find_engine_class  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from restorekv.serve.vllm_client import RemoteVllm  # noqa: E402
from restorekv.vllm.portable_store import PortableStore  # noqa: E402
from tests.helpers.fake_vllm import LONGEST, FakeVllm  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    OTHER,
    QUESTION,
    TEXT,
    about,
    ask,
    client_of,
    expected,
    listening,
    serving,
    until,
    upload,
)


@pytest.fixture(scope="module")
def fake(model, tiny_tokenizer, tmp_path_factory):
    return FakeVllm(model, tiny_tokenizer, tmp_path_factory.mktemp("portable"))


@pytest.fixture(scope="module")
def address(fake):
    with listening(fake.app) as url:
        yield url


def engine(url: str, folder: Path) -> dict:
    return {"engine": "vllm", "options": {"url": url, "folder": folder}}


@pytest.fixture(scope="module")
def client(model, tiny_tokenizer, fake, address, tmp_path_factory):
    options = engine(address, fake.store.folder)
    with serving(
        model,
        tiny_tokenizer,
        tmp_path_factory.mktemp("store"),
        limits=Limits(tokens=64, waiting=6),
        **options,
    ) as url:
        yield client_of(url)


def small_of(model, tokenizer, text=TEXT):
    return compress(
        model,
        tokenizer,
        text,
        evictor="snapkv",
        ratio="0.4",
        adapter=None,
        config=CompressionConfig(allocation="per-head", on_small_budget="fewer"),
    )


def test_answers_are_those_of_the_portable_cache(client, file, model, tiny_tokenizer):
    portable, questions = (
        small_of(model, tiny_tokenizer).portable(),
        [QUESTION, "Who lives there?", "Why?"],
    )
    assert file.status == "processed"
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda each: ask(client, about(file, question=each)), questions))
    assert [each.choices[0].message.content for each in answers] == portable.ask(
        model, tiny_tokenizer, questions, 12
    )
    whole = ask(client, about(file), "tiny")
    assert whole.choices[0].message.content == expected(model, tiny_tokenizer, ratio=1).ask(
        QUESTION, 12
    )


def test_usage_is_true(client, file, model, tiny_tokenizer):
    small, answer = small_of(model, tiny_tokenizer), ask(client, about(file))
    (written,) = small.ask([QUESTION], 12, details=True)
    usage, positions = answer.usage, small.context.positions
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        positions + written.read,
        len(written.ids),
    )
    assert usage.prompt_tokens_details.cached_tokens == positions
    assert answer.restorekv["pairs"] == small.manifest.pairs_held
    whole = ask(client, about(file), "tiny").usage
    assert whole.prompt_tokens == usage.prompt_tokens
    assert whole.prompt_tokens_details.cached_tokens == 7  # what the server said that it had


def test_streams_samples_stops_and_likelihoods(client, file, fake, model, tiny_tokenizer):
    small = small_of(model, tiny_tokenizer)
    plain = small.ask(QUESTION, 12, details=True, logprobs=3)
    likely = ask(client, about(file), logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [each.logprob for each in likely] == pytest.approx(list(plain.logprobs), abs=1e-3)
    assert [len(each.top_logprobs) for each in likely] == [3] * len(plain.ids)
    streamed = ask(client, about(file), stream=True, logprobs=True, top_logprobs=3)
    pieces = [
        each
        for chunk in streamed
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert [each.logprob for each in pieces] == pytest.approx(list(plain.logprobs), abs=1e-3)
    chunks = list(ask(client, about(file), stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == plain.text
    )
    assert (
        chunks[-1].usage.completion_tokens == len(plain.ids)
        and chunks[-2].choices[0].finish_reason == plain.finish
    )
    drawn = ask(client, about(file), temperature=1.2, seed=5, n=3, top_p=0.9)
    again = ask(client, about(file), temperature=1.2, seed=5, n=3, top_p=0.9)
    texts = [[choice.message.content for choice in each.choices] for each in (drawn, again)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    stop = plain.text[3:5]
    ended = ask(client, about(file), stop=stop).choices[0]
    assert (ended.message.content, ended.finish_reason) == (
        plain.text[: plain.text.find(stop)].lstrip(),
        "stop",
    )
    assert fake.asked[-1]["stop"] == [stop] and "seed" not in fake.asked[-1]
    ask(client, about(file), response_format={"type": "json_object"})
    assert fake.asked[-1]["structured_outputs"] == {"json": {"type": "object"}}


def test_turns_follow_the_placeholders(client, file, fake, model, tiny_tokenizer):
    small = small_of(model, tiny_tokenizer)
    messages = [
        *about(file),
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "And then?"},
    ]
    ask(client, [{"role": "system", "content": "Be brief."}, *messages])
    suffix, portable = small.context.suffix_text, small.portable()
    said = (
        f"\n\nBe brief.\n\n{QUESTION}{suffix}seven<|im_end|>\n<|im_start|>user\nAnd then?{suffix}"
    )
    expected_ids = portable.ids.tolist() + tiny_tokenizer.encode(said, add_special_tokens=False)
    assert fake.asked[-1]["prompt"] == expected_ids


def test_several_documents(client, file, model, tiny_tokenizer):
    other = upload(client, OTHER)
    texts = (TEXT, OTHER)
    both = compose([small_of(model, tiny_tokenizer, text) for text in texts])
    answer = ask(client, about(file, other))
    assert (
        answer.choices[0].message.content
        == both.portable().ask(model, tiny_tokenizer, [QUESTION], 12)[0]
    )
    assert (
        answer.usage.prompt_tokens
        == both.context.positions + both.ask(QUESTION, 1, details=True).read
    )
    whole = ask(client, about(file, other), "tiny")
    assert whole.usage.prompt_tokens == answer.usage.prompt_tokens


def test_deleted_documents_leave_no_file(client, file, fake):
    folder, before = fake.store.folder, set(fake.store.folder.iterdir())
    other = upload(client, OTHER + " Really.")
    ask(client, about(other))
    ask(client, about(file, other))
    assert len(set(folder.iterdir()) - before) == 2
    client.files.delete(other.id)
    assert set(folder.iterdir()) - before == set()
    assert ask(client, about(file)).choices[0].message.content


def test_more_questions_than_wait_and_clients_who_leave(client, file, fake):
    """Six questions are in flight; the seventh is told to come again, and those that are
    left end.
    """
    fake.open, left, asked = False, fake.left, len(fake.asked)

    async def many() -> None:
        asking = client_of(str(client.base_url), kind=openai.AsyncOpenAI)
        tasks = [
            asyncio.create_task(ask(asking, about(file, question=f"{n}?"), stream=True))
            for n in range(6)
        ]
        await asyncio.to_thread(until, lambda: len(fake.asked) == asked + 6)
        with pytest.raises(openai.RateLimitError):
            await ask(asking, about(file))
        assert len(fake.asked) == asked + 6
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        asyncio.run(many())
        until(lambda: fake.left == left + 6, 10)
    finally:
        fake.open = True
    until(lambda: succeeds(lambda: ask(client, about(file))))


def succeeds(call) -> bool:
    try:
        return bool(call())
    except openai.RateLimitError:
        return False


def test_what_vllm_refuses_is_a_sentence(client, file, fake, tmp_path):
    with pytest.raises(openai.BadRequestError, match=rf"reads at most {LONGEST:,} tokens"):
        ask(client, about(file, question="why " * LONGEST))
    own = fake.store
    fake.store = PortableStore(tmp_path, own.model)
    try:
        with pytest.raises(openai.BadRequestError, match=rf"It must see {own.folder}"):
            ask(client, about(file))
    finally:
        fake.store = own
    assert ask(client, about(file)).choices[0].message.content


def test_a_restart_loads_and_each_engine_has_its_own_caches(
    model, tiny_tokenizer, fake, address, tmp_path
):
    options = engine(address, fake.store.folder)
    with serving(model, tiny_tokenizer, tmp_path) as url:
        made = upload(client_of(url))
        ours = ask(client_of(url), about(made)).choices[0].message.content
    (ragged,) = (path.read_bytes() for path in (tmp_path / "caches").iterdir())
    for fresh in (True, False):
        with serving(model, tiny_tokenizer, tmp_path, **options) as url:
            answer = ask(client_of(url), about(made))
            assert (answer.usage.prompt_tokens_details.cache_write_tokens > 0) == fresh
            refused = upload(client_of(url), ragged, f"{fresh}.rkv")
            assert refused.status == "error" and "heads of one length" in refused.status_details
    with serving(model, tiny_tokenizer, tmp_path) as url:
        again = ask(client_of(url), about(made))
    assert again.choices[0].message.content == ours
    assert again.usage.prompt_tokens_details.cache_write_tokens == 0


def test_a_server_that_ends_is_no_fault_of_the_request(model, tiny_tokenizer, tmp_path):
    fake = FakeVllm(model, tiny_tokenizer, tmp_path / "portable")
    with contextlib.ExitStack() as ours:
        with listening(fake.app) as url:
            options = engine(url, fake.store.folder)
            client = client_of(
                ours.enter_context(serving(model, tiny_tokenizer, tmp_path / "store", **options))
            )
            made = upload(client)
            assert ask(client, about(made)).choices[0].message.content
        with pytest.raises(openai.InternalServerError, match="does not answer") as caught:
            ask(client, about(made))
        assert caught.value.status_code == 503


def test_servers_that_cannot_serve_documents(model, tiny_tokenizer, tmp_path):
    kind = find_engine_class("vllm")
    if not find_spec("vllm"):
        with pytest.raises(RestoreKVError, match="pip install vllm"):
            kind.check_options({})
    with pytest.raises(RestoreKVError, match="goes with --vllm-url"):
        kind.check_options({"folder": tmp_path})
    plain = FakeVllm(model, tiny_tokenizer, tmp_path / "portable", connector=False)
    with (
        listening(plain.app) as url,
        pytest.raises(RestoreKVError, match="reads no documents; start it with --kv-tr"),
    ):
        side(model, tiny_tokenizer, tmp_path, url).start()
    with pytest.raises(RestoreKVError, match="There is no vLLM server at"):
        side(model, tiny_tokenizer, tmp_path, "http://127.0.0.1:1/v1").start()
    with pytest.raises(RestoreKVError, match="one of embedded, vllm"):
        find_engine_class("none")


def side(model, tokenizer, folder: Path, url: str):
    return RemoteVllm(url, folder / "portable", model.config.vocab_size)


def test_files_that_are_asked_stay(model, tiny_tokenizer, tmp_path):
    """One file fits; those under a question are kept beside it, and go afterwards."""
    left = tmp_path / f"{'0' * 32}.safetensors"
    for path in (left, tmp_path / "mine.safetensors"):
        path.write_bytes(b"")
    portables, small = Portables(tmp_path, 1), small_of(model, tiny_tokenizer)
    assert not left.exists() and (tmp_path / "mine.safetensors").exists()
    names = [(str(number),) for number in range(3)]
    ids = [portables.take(name, small) for name in names]
    assert ids == [small.portable().ids.tolist()] * 3
    assert all(portables.find_path(name).exists() for name in names)
    for name in names[:2]:
        portables.give_back(name)
    assert [portables.find_path(name).exists() for name in names] == [False, False, True]
    portables.forget("2")
    assert portables.find_path(names[2]).exists()
    portables.give_back(names[2])
    assert not portables.find_path(names[2]).exists()


def test_in_process_vllm_gets_a_folder_of_the_model_and_its_fingerprint(
    model, tiny_tokenizer, tmp_path
):
    """All that comes before vLLM itself, which only tests/vllm has."""
    engine = find_engine_class("vllm")(model, tiny_tokenizer, Store(tmp_path, 1 << 30), 1 << 20, 4)
    assert engine.client.fingerprint == fingerprint_model(model)
    assert fingerprint_model(
        load_model(engine.client.options["model"], dtype="float32")[0]
    ) == fingerprint_model(model)
