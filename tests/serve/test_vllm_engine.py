"""The engine that asks vLLM, against a small server that answers as vLLM's does; tests/vllm asks
the real one.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from restorekv import CompressionConfig

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")

from restorekv import compose, compress, load_model  # noqa: E402
from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.generation.decoding import get_stop_ids  # noqa: E402
from restorekv.generation.sampling import SamplingConfig  # noqa: E402
from restorekv.model.identity import fingerprint_model  # noqa: E402
from restorekv.model.prompt import encode_question  # noqa: E402
from restorekv.serve import vllm_client, vllm_engine  # noqa: E402
from restorekv.serve.run import find_engine_class  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from restorekv.serve.vllm_client import RemoteVllm, _iter_lines  # noqa: E402
from restorekv.serve.vllm_documents import find_form  # noqa: E402
from restorekv.serve.vllm_files import VllmFiles  # noqa: E402
from restorekv.storage.cache_file import open_cache_file  # noqa: E402
from restorekv.vllm.ragged_documents import identify  # noqa: E402
from tests.helpers.compressing import make_adapter  # noqa: E402
from tests.helpers.fake_vllm import LONGEST, FakeVllm  # noqa: E402
from tests.helpers.models import build_model  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    OTHER,
    QUESTION,
    TEXT,
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

TOO_LONG = "Documents and question are longer than the model's 512 positions; shorten them"


def test_a_bound_that_vllm_would_let_through_is_refused():
    """vLLM has the same library look after schemas."""
    share = {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}
    with pytest.raises(RestoreKVError, match="exclusiveMinimum cannot be enforced"):
        vllm_engine.check_supported(SamplingConfig(json_schema=share))


@pytest.fixture(scope="module", params=["ragged", "portable"])
def fake(request, model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return FakeVllm(model, tiny_tokenizer, folder, request.param)


@pytest.fixture(scope="module")
def address(fake):
    with listening(fake.app) as url:
        yield url


def engine(url: str, fake: FakeVllm) -> dict:
    options = {"url": url, "folder": fake.store.folder, "documents": fake.form}
    return {"engine": "vllm", "options": options}


@pytest.fixture(scope="module")
def client(model, tiny_tokenizer, fake, address, tmp_path_factory):
    options = engine(address, fake)
    with serving(
        model,
        tiny_tokenizer,
        tmp_path_factory.mktemp("store"),
        limits=Limits(tokens=64, max_waiting=6),
        **options,
    ) as url:
        yield client_of(url)


def small_of(model, tokenizer, form, text=TEXT, adapter=None):
    """Compress as the engine does for documents of a form."""
    settings = find_form(form).compress_settings
    return compress(
        model,
        tokenizer,
        text,
        evictor="snapkv",
        ratio="0.4",
        adapter=adapter,
        config=CompressionConfig(**settings),
    )


def expected_answers(small, form, model, tokenizer, questions):
    if form == "portable":
        return small.portable().ask(model, tokenizer, questions, 12)
    return small.ask(questions, 12)


def test_answers_are_those_of_ask(client, file, fake, model, tiny_tokenizer):
    questions = [QUESTION, "Who lives there?", "Why?"]
    small = small_of(model, tiny_tokenizer, fake.form)
    wanted = expected_answers(small, fake.form, model, tiny_tokenizer, questions)
    assert file.status == "processed"
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda each: ask(client, about(file, question=each)), questions))
    assert [each.choices[0].message.content for each in answers] == wanted
    whole = ask(client, about(file), "tiny")
    assert whole.choices[0].message.content == expected(model, tiny_tokenizer, ratio=1).ask(
        QUESTION, 12
    )


def test_a_named_adapter_restores_documents(fake, address, model, tiny_tokenizer, tmp_path):
    make_adapter(model).save_pretrained(tmp_path / "adapter")
    options = {**engine(address, fake), "adapter": str(tmp_path / "adapter")}
    with serving(model, tiny_tokenizer, tmp_path / "store", **options) as url:
        client = client_of(url)
        answer = ask(client, about(upload(client)))
    small = small_of(model, tiny_tokenizer, fake.form, adapter=tmp_path / "adapter")
    assert small.manifest.restore_tokens > 0
    wanted = expected_answers(small, fake.form, model, tiny_tokenizer, [QUESTION])
    assert [answer.choices[0].message.content] == wanted


def test_a_plain_chat_is_vllms_own(client, fake, model, tiny_tokenizer):
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "And the other?"},
    ]
    answer = ask(client, messages)
    text, tokens = generate_plainly(model, tiny_tokenizer, messages)
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == tokens
    assert (answer.restorekv["pairs"], answer.restorekv["bytes"]) == (0, 0)


@pytest.mark.parametrize("prompt", ["The blue house", "t"])
def test_a_completion_is_vllms_own(client, fake, model, tiny_tokenizer, prompt):
    ids = tiny_tokenizer(prompt, return_tensors="pt").input_ids
    stops = sorted(get_stop_ids(model, tiny_tokenizer))
    written = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=stops)
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    expected = tiny_tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.choices[0].text == expected
    assert answer.usage.prompt_tokens == ids.shape[1]


def test_usage_is_true(client, file, fake, model, tiny_tokenizer):
    small, answer = small_of(model, tiny_tokenizer, fake.form), ask(client, about(file))
    (written,) = small.ask([QUESTION], 12, details=True)
    usage, positions = answer.usage, small.context.num_tokens
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        positions + written.prompt_tokens,
        len(written.ids),
    )
    assert usage.prompt_tokens_details.cached_tokens == positions
    assert answer.restorekv["pairs"] == small.manifest.pairs_held
    whole = ask(client, about(file), "tiny").usage
    assert whole.prompt_tokens == usage.prompt_tokens
    assert whole.prompt_tokens_details.cached_tokens == 7  # what the server said that it had


def test_streams_samples_stops_and_likelihoods(client, file, fake, model, tiny_tokenizer):
    small = small_of(model, tiny_tokenizer, fake.form)
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
    stop = plain.text[3:5]
    ended = ask(client, about(file), stop=stop).choices[0]
    assert (ended.message.content, ended.finish_reason) == (
        plain.text[: plain.text.find(stop)].lstrip(),
        "stop",
    )
    assert fake.asked[-1]["stop"] == [stop] and "seed" not in fake.asked[-1]
    ask(client, about(file), response_format={"type": "json_object"})
    assert fake.asked[-1]["structured_outputs"] == {"json": {"type": "object"}}


def test_only_a_seed_of_the_client_goes_to_vllm_and_none_to_one_on_a_cpu(client, file, fake):
    """vLLM 0.32 on a CPU ends when it reads a question with a seed in pieces."""
    drawing = {"temperature": 1.2, "n": 3, "top_p": 0.9}
    texts = {choice.message.content for choice in ask(client, about(file), **drawing).choices}
    assert len(texts) == 3 and "seed" not in fake.asked[-1]
    if fake.form == "ragged":
        sentence = "vLLM on a CPU takes no seed.*leave seed out, or set temperature to 0"
        with pytest.raises(openai.BadRequestError, match=sentence):
            ask(client, about(file), seed=5, **drawing)
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.completions.create(model="tiny", prompt="t", temperature=1, seed=5)
    else:
        drawn = [ask(client, about(file), seed=5, **drawing) for _ in range(2)]
        first, again = ([choice.message.content for choice in each.choices] for each in drawn)
        assert first == again and len(set(first)) == 3
    # A greedy answer has no use for one.
    ask(client, about(file), seed=5)
    assert "seed" not in fake.asked[-1]


def test_turns_follow_the_placeholders(client, file, fake, model, tiny_tokenizer, tmp_path):
    small = small_of(model, tiny_tokenizer, fake.form)
    messages = [
        *about(file),
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "And then?"},
    ]
    ask(client, [{"role": "system", "content": "Be brief."}, *messages])
    suffix = small.context.suffix_text
    placeholders = find_form(fake.form).write_file(small, tmp_path / "document").ids
    said = (
        f"\n\nBe brief.\n\n{QUESTION}{suffix}seven<|im_end|>\n<|im_start|>user\nAnd then?{suffix}"
    )
    expected_ids = placeholders + tiny_tokenizer.encode(said, add_special_tokens=False)
    assert fake.asked[-1]["prompt"] == expected_ids


def test_without_a_document_vllm_reads_the_plain_conversation(client, fake, tiny_tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    answer = ask(client, messages)
    ids = tiny_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert fake.asked[-1]["prompt"] == ids
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 7  # what the server said
    assert (answer.restorekv["documents"], answer.restorekv["pairs"]) == (0, 0)


def test_several_documents(client, file, fake, model, tiny_tokenizer):
    other = upload(client, OTHER)
    texts = (TEXT, OTHER)
    both = compose([small_of(model, tiny_tokenizer, fake.form, text) for text in texts])
    answer = ask(client, about(file, other))
    (wanted,) = expected_answers(both, fake.form, model, tiny_tokenizer, [QUESTION])
    assert answer.choices[0].message.content == wanted
    assert (
        answer.usage.prompt_tokens
        == both.context.num_tokens + both.ask(QUESTION, 1, details=True).prompt_tokens
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
    """Six questions are in flight; the seventh is told to come again, and those with clients that
    have left end.
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


def test_questions_that_are_written_do_not_wait(client, file, fake):
    """They count neither in the metric of waiting questions nor against the limit of six."""
    metrics = str(client.base_url).replace("/v1/", "/metrics")

    def count(name: str) -> float:
        lines = urlopen(metrics).read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name)))

    fake.goes_on = False
    asked = len(fake.asked)
    try:
        with ThreadPoolExecutor(8) as pool:
            questions = [about(file, question=f"{number}?") for number in range(8)]
            streams = list(pool.map(lambda each: ask(client, each, stream=True), questions[:6]))
            firsts = [next(iter(stream)) for stream in streams]
            until(lambda: count("restorekv_questions_answering ") == 6)
            assert count("restorekv_questions_waiting ") == 0 and len(firsts) == 6
            late = [pool.submit(ask, client, each) for each in questions[6:]]
            until(lambda: len(fake.asked) == asked + 8)
            fake.goes_on = True
            assert all(each.result(30).choices for each in late)
            for stream in streams:
                assert list(stream)
    finally:
        fake.goes_on = True


def succeeds(call) -> bool:
    try:
        return bool(call())
    except openai.RateLimitError:
        return False


def test_what_vllm_refuses_is_a_sentence(client, file, fake, tmp_path):
    with pytest.raises(openai.BadRequestError, match=rf"reads at most {LONGEST:,} tokens"):
        ask(client, about(file, question="Q" * LONGEST))
    own = fake.store
    fake.store = type(own)(tmp_path, own.model)
    try:
        with pytest.raises(openai.InternalServerError, match=rf"It must see {own.folder}"):
            ask(client, about(file))
    finally:
        fake.store = own
    assert ask(client, about(file)).choices[0].message.content


def test_answers_end_with_the_models_positions(tiny_tokenizer, tmp_path, fake):
    """vLLM counts placeholders, which are fewer than the document's tokens. The library's own
    engine ends answers at the same position.
    """
    positions = 512
    short = build_model("qwen3", max_position_embeddings=positions)
    own = FakeVllm(short, tiny_tokenizer, tmp_path / "documents", fake.form)
    small = small_of(short, tiny_tokenizer, fake.form)
    room = positions - small.cache.get_seq_length() - count_question(small, QUESTION)
    long_question = QUESTION + "Q" * room
    found = []
    with listening(own.app) as url:
        for options in (engine(url, own), {}):
            folder = tmp_path / f"store of {options.get('engine')}"
            limits = Limits(tokens=2 * positions)
            with serving(short, tiny_tokenizer, folder, limits=limits, **options) as address:
                client = client_of(address)
                file = upload(client)
                answer = ask(client, about(file), max_tokens=2 * positions)
                found.append(answer.usage.completion_tokens)
                with pytest.raises(openai.BadRequestError, match=TOO_LONG):
                    ask(client, about(file, question=long_question))
                assert ask(client, about(file, question=long_question[:-1]), max_tokens=9)
    assert [each["max_tokens"] for each in own.asked[-2:]] == [room, 1]
    assert found[0] <= room
    if fake.form == "ragged":
        assert found[0] == found[1]


def count_question(small, question):
    return encode_question(small.tokenizer, small.context, question).shape[1]


def test_a_restart_loads_and_portable_caches_are_others(
    model, tiny_tokenizer, fake, address, tmp_path
):
    """Both engines share ragged caches; those with heads of one length have different keys."""
    is_portable = fake.form == "portable"
    options = engine(address, fake)
    with serving(model, tiny_tokenizer, tmp_path) as url:
        made = upload(client_of(url))
        ours = ask(client_of(url), about(made)).choices[0].message.content
    (ragged,) = (path.read_bytes() for path in (tmp_path / "caches").iterdir())
    for fresh in (True, False):
        with serving(model, tiny_tokenizer, tmp_path, **options) as url:
            answer = ask(client_of(url), about(made))
            written = answer.usage.prompt_tokens_details.cache_write_tokens
            assert (written > 0) == (fresh and is_portable)
            given = upload(client_of(url), ragged, f"{fresh}.rkv")
            if is_portable:
                assert given.status == "error" and "heads of one length" in given.status_details
            else:
                assert answer.choices[0].message.content == ours
                plain = ask(client_of(url), about(given), "tiny")
                assert plain.choices[0].message.content == ours
    with serving(model, tiny_tokenizer, tmp_path) as url:
        again = ask(client_of(url), about(made))
    assert again.choices[0].message.content == ours
    assert again.usage.prompt_tokens_details.cache_write_tokens == 0


def test_a_server_that_ends_is_no_fault_of_the_request(model, tiny_tokenizer, tmp_path):
    fake = FakeVllm(model, tiny_tokenizer, tmp_path / "ragged")
    with contextlib.ExitStack() as ours:
        with listening(fake.app) as url:
            options = engine(url, fake)
            client = client_of(
                ours.enter_context(serving(model, tiny_tokenizer, tmp_path / "store", **options))
            )
            made = upload(client)
            assert ask(client, about(made)).choices[0].message.content
        with pytest.raises(openai.InternalServerError, match="does not answer") as caught:
            ask(client, about(made))
        assert caught.value.status_code == 503


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        ("cut", 503, "vLLM aborted the answer"),
        ("abort", 503, "vLLM aborted the answer"),
        (429, 503, "cannot answer now: No"),
        (500, 503, "cannot answer now: No"),
        (401, 503, "set VLLM_API_KEY"),
        (422, 400, "refuses the request: No"),
    ],
)
def test_what_fails_at_vllm_is_no_answer(client, file, fake, failure, status, message):
    fake.failure = failure
    try:
        with pytest.raises(openai.APIStatusError, match=message) as caught:
            ask(client, about(file))
    finally:
        fake.failure = None
    assert caught.value.status_code == status


def test_servers_that_cannot_serve_documents(model, tiny_tokenizer, tmp_path):
    kind = find_engine_class("vllm")
    if not find_spec("vllm"):
        with pytest.raises(RestoreKVError, match="pip install vllm"):
            kind.check_options({})
    with pytest.raises(RestoreKVError, match="--vllm-store is for --vllm-url"):
        kind.check_options({"folder": tmp_path})
    with pytest.raises(RestoreKVError, match="cannot be combined with --vllm-url"):
        kind.check_options({"url": "http://127.0.0.1:1/v1", "documents_memory": 1})
    with pytest.raises(RestoreKVError, match="--vllm-documents must be one of ragged, portable"):
        kind.check_options({"documents": "round"})
    for other, wanted, start in (
        (None, "portable", "start it with --kv-tr"),
        (None, "ragged", "start it with RESTOREKV_VLLM=1 and --kv-tr"),
        ("portable", "ragged", ".* or pass --vllm-documents portable here"),
        ("ragged", "portable", ".* or pass --vllm-documents ragged here"),
    ):
        server = FakeVllm(model, tiny_tokenizer, tmp_path / "documents", other)
        message = f"reads no {wanted} documents; {start}"
        with listening(server.app) as url, pytest.raises(RestoreKVError, match=message):
            side(model, tmp_path, url, wanted).start()
    with pytest.raises(RestoreKVError, match="There is no vLLM server at"):
        side(model, tmp_path, "http://127.0.0.1:1/v1", "ragged").start()
    with pytest.raises(RestoreKVError, match="one of embedded, vllm"):
        find_engine_class("none")


def side(model, folder: Path, url: str, form: str):
    return RemoteVllm(url, folder / "documents", model.config.vocab_size, find_form(form))


def test_events_end_at_line_feeds_alone():
    """JSON may hold Unicode's line separators unescaped, at which `aiter_lines` also splits."""
    event = 'data: {"text": "a\u2028b\u0085c"}'.encode()
    stream = event + b"\n\ndata: [DONE]"

    async def read(size):
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        response = httpx2.Response(200, content=iterate(parts))
        return [line async for line in _iter_lines(response)]

    async def iterate(parts):
        for part in parts:
            yield part

    for size in (1, 7, 1000):
        assert asyncio.run(read(size)) == [event, b"", b"data: [DONE]"]


@pytest.mark.parametrize("form", ["ragged", "portable"])
def test_files_that_are_asked_stay(model, tiny_tokenizer, tmp_path, form):
    """One file fits; files that questions need are kept in addition, and removed afterwards."""
    left = [tmp_path / f"{'0' * 32}{suffix}" for suffix in (".rkv", ".safetensors")]
    for path in (*left, tmp_path / "mine.rkv"):
        path.write_bytes(b"")
    files, small = VllmFiles(tmp_path, 1, find_form(form)), small_of(model, tiny_tokenizer, form)
    assert not any(path.exists() for path in left) and (tmp_path / "mine.rkv").exists()
    names = [(str(number),) for number in range(3)]
    ids = [files.take(name, small) for name in names]
    if form == "portable":
        assert ids == [small.portable().ids.tolist()] * 3
    else:
        assert ids == [list(identify(open_cache_file(files.find_path(names[0]))).ids)] * 3
    assert all(files.find_path(name).exists() for name in names)
    for name in names[:2]:
        files.give_back(name)
    assert [files.find_path(name).exists() for name in names] == [False, False, True]
    files.forget("2")
    assert files.find_path(names[2]).exists()
    files.give_back(names[2])
    assert not files.find_path(names[2]).exists()


@pytest.mark.parametrize("form", ["ragged", "portable"])
def test_a_document_that_is_deleted_while_its_file_is_written_leaves_none(
    model, tiny_tokenizer, tmp_path, monkeypatch, form
):
    files, small = (
        VllmFiles(tmp_path, 1 << 30, find_form(form)),
        small_of(model, tiny_tokenizer, form),
    )
    write = files.form.write_file

    def write_and_forget(*given):
        written = write(*given)
        files.forget("0")
        return written

    monkeypatch.setattr(files.form, "write_file", write_and_forget)
    files.take(("0",), small)
    assert files.find_path(("0",)).exists()  # for the question that is on its way
    files.give_back(("0",))
    assert list(tmp_path.iterdir()) == []
    # One that cannot be written is not remembered as deleted.
    monkeypatch.setattr(files.form, "write_file", lambda *_: files.forget("0") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.take(("0",), small)
    monkeypatch.setattr(files.form, "write_file", write)
    files.take(("0",), small)
    files.give_back(("0",))
    assert files.find_path(("0",)).exists()


def test_a_document_that_is_deleted_before_its_question_is_sent_leaves_no_file(
    client, file, fake, monkeypatch
):
    before = set(fake.store.folder.iterdir())
    other = upload(client, OTHER + " Gone.")
    compose_documents = vllm_engine.compose_documents

    def delete_and_compose(caches):
        client.files.delete(other.id)
        return compose_documents(caches)

    monkeypatch.setattr(vllm_engine, "compose_documents", delete_and_compose)
    assert ask(client, about(other)).choices[0].message.content
    assert set(fake.store.folder.iterdir()) == before


def test_caches_with_a_bias_are_refused_at_the_upload(model, tiny_tokenizer):
    fitted = compress(model, tiny_tokenizer, TEXT, evictor="am-fast", ratio="0.4", adapter=None)
    with pytest.raises(RestoreKVError, match="add a bias to logits"):
        find_form("ragged").check_context(fitted)


def test_in_process_vllm_gets_a_folder_of_the_model_and_its_fingerprint(
    model, tiny_tokenizer, tmp_path
):
    """This checks what happens before vLLM itself starts, which only tests/vllm do."""
    engine = find_engine_class("vllm")(model, tiny_tokenizer, Store(tmp_path, 1 << 30), 1 << 20, 4)
    assert engine.client.fingerprint == fingerprint_model(model)
    assert engine.form.name == "ragged" and engine.files.folder == tmp_path / "ragged"
    assert fingerprint_model(
        load_model(engine.client.options["model"], dtype="float32")[0]
    ) == fingerprint_model(model)


def test_a_killed_copy_of_one_dtype_is_no_part_of_another(tmp_path, monkeypatch, tiny_tokenizer):
    model = build_model("qwen3")
    model.config.name_or_path = ""

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            vllm_engine.find_model_folder(model, tiny_tokenizer, tmp_path, "weights")
    (half,) = tmp_path.iterdir()
    (half / "model-00002-of-00002.safetensors").write_bytes(b"half")
    other = Path(
        vllm_engine.find_model_folder(model.bfloat16(), tiny_tokenizer, tmp_path, "weights")
    )
    assert "model-00002-of-00002.safetensors" not in {each.name for each in other.iterdir()}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllm_leaves_memory_to_the_server(on_cpu, monkeypatch):
    """By default, vLLM takes nine tenths of the memory on a CPU."""
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    free = SimpleNamespace(available=10 * 2**30)
    modules = {
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "psutil": SimpleNamespace(virtual_memory=lambda: free),
    }
    monkeypatch.setattr(vllm_client, "import_module", modules.__getitem__)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    taken = {"kv_cache_memory_bytes": 5 * 2**30} if on_cpu else {}
    assert vllm_client.limit_cpu_memory({"model": "a"}) == {"model": "a", **taken}
    for told in ({"kv_cache_memory_bytes": 7}, {"gpu_memory_utilization": 0.2}):
        assert vllm_client.limit_cpu_memory(told) == told
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert vllm_client.limit_cpu_memory({"model": "a"}) == {"model": "a"}
