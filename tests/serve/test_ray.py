"""Replicas of Ray Serve as the engine of the server: answers stay equal, whatever happens to a
replica.
"""

import asyncio
import errno
import importlib.util
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

openai = pytest.importorskip("openai")
if not importlib.util.find_spec("ray"):  # importing it would be too early for its settings
    pytest.skip(
        "ray is not installed; the extra 'serve-ray' is part of 'dev'", allow_module_level=True
    )

from restorekv.errors import CacheFileError, RestoreKVError  # noqa: E402
from restorekv.generation.sampling import SamplingConfig  # noqa: E402
from restorekv.serve.cache_origin import CacheOrigin  # noqa: E402
from restorekv.serve.engine import (  # noqa: E402
    READY,
    WAITING,
    BusyError,
    DeletedError,
    Reply,
    ServedDocument,
    ServedQuestion,
    UnavailableError,
)
from restorekv.serve.ray import options  # noqa: E402
from restorekv.serve.ray.engine import (  # noqa: E402
    TRIES,
    RayEngine,
    deploy_replicas,
    explain_failed_start,
    import_modules,
    read_payload,
)
from restorekv.serve.ray.options import RayOptions  # noqa: E402
from restorekv.serve.run import Settings, build_engine_app, open_store  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.variants import Variant  # noqa: E402
from tests.helpers.grid_world import save_world  # noqa: E402
from tests.helpers.models import build_model  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
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
    until,
    upload,
)
from tests.helpers.workers import children, running  # noqa: E402

LONG = {"max_tokens": 700, "temperature": 2.0, "seed": 3, "n": 4}  # some of these answers end late
PATIENCE = 240  # seconds
# What Ray says when its own processes need more than its 30 seconds.
TOO_BUSY = "timed out during startup"


class Handle:
    """A deployment's handle with scripted methods: each call of a method yields the next of its
    lists; an error in a list is raised.
    """

    def __init__(self, tokenizer, **scripts) -> None:
        self.scripts, self.calls = scripts, []
        origin = CacheOrigin(("weights", "float32", "template"), {"snapkv": ("code", "adapter")})
        describe_model = tokenizer, {2}, origin
        self.describe_model = types.SimpleNamespace(
            remote=lambda: types.SimpleNamespace(result=lambda: describe_model)
        )

    def options(self, **chosen) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            **{
                name: types.SimpleNamespace(
                    remote=lambda *given, origin, name=name: self.call(name, chosen, given)
                )
                for name in self.scripts
            }
        )

    def call(self, name, chosen, given):
        self.calls.append((name, chosen["multiplexed_model_id"], given))
        return Stream(self.scripts[name].pop(0))


class Stream:
    """The stream that a call of a handle's method returns."""

    def __init__(self, items) -> None:
        self.items = iter(items)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            if item is None:
                await asyncio.sleep(60)
            return item
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.items = iter(())


def dead():
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def missing():
    from ray.exceptions import RayTaskError

    return RayTaskError("ask", "a traceback", import_modules()[1].MissingError("not here"))


REPLY = Reply([], 3, 4, 5, 6, {})
PLACE = "ab" * 32, Variant.parse(VARIANT, "tiny")


def settled(tokenizer, waiting=4, leaves=False, count=1, **scripts):
    """Ask one question; return the reply or the error, the tokens that were passed on, and the
    handle's calls.
    """
    handle, passed = Handle(tokenizer, **scripts), []

    async def asked():
        engine = RayEngine(handle, waiting)
        documents = [
            ServedDocument(sha256, PLACE[1], 9, False, content=lambda: "the text")
            for sha256 in (PLACE[0], "cd" * 32)
        ][:count]
        two = SamplingConfig.make(samples=2)
        question = ServedQuestion(
            documents, [], "Which?", "", 8, two, lambda *item: passed.append(item)
        )
        question.cancelled = leaves
        return await asyncio.wait_for(asyncio.wrap_future(engine.ask(question)), 20)

    try:
        return asyncio.run(asked()), passed, handle.calls
    except (Exception, asyncio.CancelledError) as error:
        return error, passed, handle.calls


def test_a_repeated_answer_is_passed_on_once(tiny_tokenizer):
    likely = -0.5, {8: -0.5}
    first, whole = [[(0, 5), (1, 6)], dead()], [[(0, 5)], [(1, 6), (0, 7)], [(1, 8, likely)], REPLY]
    reply, passed, calls = settled(tiny_tokenizer, ask=[first, [dead()], whole])
    assert reply == REPLY and passed == [(0, 5), (1, 6), (0, 7), (1, 8, likely)] and len(calls) == 3
    error, passed, _ = settled(tiny_tokenizer, ask=[first, [[(0, 9)], REPLY]])
    assert (
        isinstance(error, UnavailableError)
        and "continue differently" in str(error)
        and passed == [(0, 5), (1, 6)]
    )
    error, _, calls = settled(tiny_tokenizer, ask=[[dead()]] * (TRIES + 1))
    assert (
        isinstance(error, UnavailableError)
        and f"{TRIES} replicas ended" in str(error)
        and len(calls) == TRIES
    )


def test_a_document_that_is_gone_is_brought_again(tiny_tokenizer):
    """The content of a document is sent only if the replica lacks the document."""
    placed = [
        [missing()],
        [(9, True), import_modules()[1].ReplicaReport("one", {"compressed": 1}, {})],
    ]
    reply, _, calls = settled(tiny_tokenizer, ask=[[missing()], [REPLY]], get_document=placed)
    assert reply == REPLY and [name for name, *_ in calls] == [
        "ask",
        "get_document",
        "get_document",
        "ask",
    ]
    assert [given[1] for name, _, given in calls if name == "get_document"] == [None, "the text"]
    assert len({key for _, key, _ in calls}) == 1


def test_a_document_that_is_compressed_again_counts_as_written(tiny_tokenizer):
    async def ask_twice():
        handle = Handle(
            tiny_tokenizer, ask=[[missing()], [REPLY]], get_document=[[missing()], [(9, True)]]
        )
        engine = RayEngine(handle, 4)
        documents = [ServedDocument(*PLACE, 9, False, content=lambda: "the text")]
        question = ServedQuestion(documents, [], "Which?", "", 8, SamplingConfig())
        await asyncio.wait_for(asyncio.wrap_future(engine.ask(question)), 20)
        return question

    assert [document.fresh for document in asyncio.run(ask_twice()).documents] == [True]


def test_a_deleted_document_is_looked_for_again(tiny_tokenizer, tmp_path):
    """Its replica may have forgotten it, so an upload of the same text is not there yet."""

    async def get_twice():
        handle = Handle(tiny_tokenizer, get_document=[[(9, False)], [missing()], [(9, True)]])
        engine = RayEngine(handle, 4)
        settings = Settings(tmp_path, "tiny", VARIANT)
        store = open_store(settings)
        build_engine_app(engine, store, settings)
        first = await engine.get_document(*PLACE, lambda: "the text")
        assert engine.get_state(*PLACE) == READY
        store.on_delete(PLACE[0])
        assert engine.get_state(*PLACE) == WAITING
        second = await engine.get_document(*PLACE, lambda: "the text")
        store.close()
        return first.fresh, second.fresh

    assert asyncio.run(get_twice()) == (False, True)


def test_documents_are_brought_to_where_the_question_is(tiny_tokenizer):
    """That holds for the second of two as well, which alone would go to a different replica; and
    it is not tried forever.
    """
    placed = [[(9, True)], [(9, True)]]
    reply, _, calls = settled(
        tiny_tokenizer, count=2, ask=[[missing()], [REPLY]], get_document=placed
    )
    assert reply == REPLY and len(calls) == 4 and len({key for _, key, _ in calls}) == 1
    assert [given[0][0][:2] for name, _, given in calls if name == "get_document"] == ["ab", "cd"]
    again = {"ask": [[missing()]] * TRIES, "get_document": [[(9, False)]] * TRIES}
    assert isinstance(settled(tiny_tokenizer, **again)[0], UnavailableError)


def test_an_error_of_a_replica_is_its_own_kind(tiny_tokenizer):
    from ray.exceptions import RayTaskError

    error, _, calls = settled(
        tiny_tokenizer, ask=[[RayTaskError("ask", "a traceback", RestoreKVError("too long"))]]
    )
    assert type(error) is RestoreKVError and str(error) == "too long" and len(calls) == 1


def test_a_replica_with_another_model_under_the_same_name_answers_nothing():
    """A node may have a different revision of the model; its answers would be another model's."""
    module = import_modules()[1]
    new, old = (CacheOrigin((weights,), {"snapkv": ("code", "")}) for weights in ("new", "old"))
    looked_for = []

    async def find_document(*place):
        looked_for.append(place)

    replica = module.Replica.__new__(module.Replica)
    replica.engine = types.SimpleNamespace(
        origin=new, find_document=find_document, get_state=lambda *_: READY, close=lambda: None
    )
    replica.store = replica.lasting = types.SimpleNamespace(close=lambda: None)
    calls = {"get_document": (PLACE, None), "ask": ([PLACE], {}), "find_survivors": (PLACE, 0, 0)}

    async def call(name, origin):
        async for item in getattr(replica, name)(*calls[name], origin=origin.digest):
            if item != READY:
                return item

    for name in calls:
        with pytest.raises(UnavailableError, match="give every node the same model"):
            asyncio.run(call(name, old))
        assert not looked_for
        # With its own origin it looks for the document, which is not there.
        with pytest.raises(module.MissingError):
            asyncio.run(call(name, new))
        assert looked_for.pop() == PLACE


def test_a_full_disk_and_a_damaged_file_travel_as_what_they_are(tmp_path):
    """Causes of an error are lost on the way, and a path on the replica means nothing here."""
    make_portable_error = import_modules()[1].make_portable_error
    full = CacheFileError("Cannot write /caches/a.rkv.")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert make_portable_error(full, "a text") is full.__cause__
    path = tmp_path / ".upload-1" / "upload.rkv"
    said = make_portable_error(CacheFileError(f"{path} is damaged; make it again."), path)
    assert type(said) is CacheFileError and str(said) == "The file is damaged; make it again."
    other = RestoreKVError("The text is empty.")
    assert make_portable_error(other, path) is other


@pytest.mark.parametrize("error", [BusyError(), DeletedError()])
def test_errors_travel_from_a_replica(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)


def test_who_has_gone_and_who_is_too_many(tiny_tokenizer):
    start = time.monotonic()
    error, _, _ = settled(tiny_tokenizer, leaves=True, ask=[[[(0, 5)], None]])
    assert isinstance(error, asyncio.CancelledError) and time.monotonic() - start < 10
    assert isinstance(settled(tiny_tokenizer, waiting=0, ask=[])[0], BusyError)


def test_the_order_of_replicas_is_the_documents():
    """The order is the same everywhere, spreads documents evenly, and changes little when a replica
    goes.
    """
    router = import_modules()[1].DocumentRouter
    replicas = [
        types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id=name)) for name in "abcd"
    ]

    def order(key, among):
        routing = types.SimpleNamespace(should_backoff=False)
        metadata = types.SimpleNamespace(multiplexed_model_id=key)
        request = types.SimpleNamespace(metadata=metadata, routing_context=routing)
        ranks = asyncio.run(router.choose_replicas(None, among, request))
        assert routing.should_backoff and all(len(rank) == 1 for rank in ranks)
        return [rank[0] for rank in ranks]

    keys = [str(number) for number in range(400)]
    orders = {key: order(key, replicas) for key in keys}
    assert all(order(key, replicas[::-1]) == orders[key] for key in keys)
    assert all(
        order(key, replicas[1:]) == [each for each in orders[key] if each is not replicas[0]]
        for key in keys
    )
    firsts = [orders[key][0].replica_id.unique_id for key in keys]
    assert min(firsts.count(name) for name in "abcd") > 70


def test_what_is_deployed():
    _, replica = import_modules()
    fixed = replica.make_deployment(2, 2, {"CPU": 1, "GPU": 0.5})
    assert fixed.num_replicas == 2 and fixed.ray_actor_options["num_gpus"] == 0.5
    growing = replica.make_deployment(
        1, 3, RayOptions("auto", 1, 3).find_resources("cuda")
    )._deployment_config.autoscaling_config
    assert (growing.min_replicas, growing.max_replicas) == (1, 3)
    assert (
        RayOptions("auto").find_resources("cuda") == {"CPU": 1, "GPU": 1}
        and RayOptions("auto").find_resources("cpu")["GPU"] == 0
    )


@pytest.mark.parametrize(
    "given", [{"replicas": 0}, {"replicas": 3, "max_replicas": 2}, {"replica_cpus": 0}]
)
def test_numbers_that_make_no_sense(given):
    with pytest.raises(RestoreKVError, match="must be at least 1"):
        RayOptions("local", **given)


def test_replicas_have_folders_of_their_own(tmp_path):
    lock_folder = import_modules()[1].lock_folder
    first, second = ExitStack(), ExitStack()
    assert [lock_folder(tmp_path, each).name for each in (first, second)] == ["0", "1"]
    first.close()
    assert lock_folder(tmp_path, first).name == "0"
    first.close(), second.close()


def test_a_replica_restores_with_the_adapter_that_is_named(tmp_path):
    replica = import_modules()[1]

    def make_replica(adapter):
        return replica.Replica(
            replica.ReplicaConfig(
                model="tiny",
                dtype="auto",
                device="cpu",
                threads=1,
                folder=str(tmp_path),
                shared=str(tmp_path / "shared"),
                memory=1 << 20,
                disk=1 << 20,
                default="tiny:kvzip-0.1",
                base="tiny",
                adapter=adapter,
            )
        )

    variant = Variant.parse("tiny:kvzip-0.5", "tiny")
    found = {}
    for adapter in ("auto", "tiny:kvzip", None):
        made = make_replica(adapter)  # it ends when nothing refers to it any more
        document = made.engine.make_document("0" * 64, variant, lambda: TEXT)
        found[adapter] = made.engine.load_document(document).manifest.restore_tokens
    assert found == {"auto": 0, "tiny:kvzip": 3, None: 0}


def test_why_replicas_do_not_start_is_our_own_sentence():
    """Ray's error only says that a deployment failed; its status quotes a replica's stack trace."""
    trace = (
        "The deployment failed to start 3 times in a row. Error:\nTraceback (most recent call):\n"
        '  File "replica.py", line 3, in __init__\n    open_adapter(name)\n'
        "restorekv.errors.AdapterError: There is no adapter 'x'; use a folder.\n"
    )

    def describe(message: str) -> types.SimpleNamespace:
        deployment = types.SimpleNamespace(message=message)
        application = types.SimpleNamespace(deployments={"documents": deployment})
        return types.SimpleNamespace(applications={"restorekv": application})

    told = explain_failed_start(describe(trace), "restorekv")
    assert str(told) == "There is no adapter 'x'; use a folder."
    assert explain_failed_start(describe("RuntimeError: none"), "restorekv") is None
    assert explain_failed_start(describe(trace), "another") is None


def test_a_payload_is_a_text_or_the_bytes_of_a_cache(tmp_path):
    (tmp_path / "a.rkv").write_bytes(b"cache")
    assert (
        read_payload(lambda: "text") == "text"
        and read_payload(lambda: tmp_path / "a.rkv") == b"cache"
    )


def own(tokenizer, text=TEXT, ratio="0.4"):
    """Return the document as the library compresses it, with the model that the replicas load."""
    return expected(build_model("qwen3"), tokenizer, text, ratio)


@pytest.fixture(scope="module")
def engine(tiny_tokenizer, tmp_path_factory):
    """An engine with two replicas in a separate cluster."""
    root = tmp_path_factory.mktemp("ray")
    save_world(root, tiny_tokenizer)
    settings = Settings(
        root / "store", "tiny", VARIANT, shared=f"file://{root}/shared", limits=Limits(tokens=700)
    )
    with ExitStack() as lasting:
        try:
            made = lasting.enter_context(
                deploy_replicas(
                    settings, RayOptions("local", 2), str(root / "model"), "auto", "cpu"
                )
            )
        except RestoreKVError as error:
            if TOO_BUSY not in str(error):
                raise
            pytest.skip(str(error))
        made.settings = settings
        yield made


@pytest.fixture(scope="module")
def client(engine):
    with listening(build_engine_app(engine, open_store(engine.settings), engine.settings)) as url:
        yield client_of(url)


def replicas():
    """Return the actors of the replicas, by name."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return {
        name.rpartition("#")[2]: ray.get_actor(name, namespace="serve")
        for name in names
        if "#documents#" in name
    }


def kill(name):
    import ray

    ray.kill(replicas()[name], no_restart=True)


def counted(engine):
    return {name: dict(report.counted) for name, report in engine.reports.items()}


def holder(engine, client, file):
    """Return the name of the replica that answers questions about a file."""
    before = counted(engine)
    ask(client, about(file))
    after = counted(engine)
    (name,) = [
        name
        for name in after
        if after[name]["questions"] > before.get(name, {"questions": 0})["questions"]
    ]
    return name


def both_up(without=None):
    until(lambda: len(options.REPLICAS - {without}) == 2, PATIENCE)


@pytest.mark.slow
def test_answers_are_the_librarys(client, file, tiny_tokenizer):
    assert file.status == "processed"
    small = own(tiny_tokenizer)
    assert ask(client, about(file)).choices[0].message.content == small.ask(QUESTION, 12)
    whole = own(tiny_tokenizer, ratio=1)
    assert ask(client, about(file), "tiny").choices[0].message.content == whole.ask(QUESTION, 12)
    hot = ask(client, about(file), temperature=1.2, seed=5, n=2, logprobs=True, top_logprobs=3)
    drawn = small.ask(QUESTION, 12, temperature=1.2, seed=5, samples=2, details=True, logprobs=3)
    assert [choice.message.content for choice in hot.choices] == [each.text for each in drawn]
    assert [each.logprob for each in hot.choices[0].logprobs.content] == pytest.approx(
        drawn[0].logprobs, abs=1e-4
    )
    chunks = list(ask(client, about(file), stream=True, stream_options={"include_usage": True}))
    assert "".join(
        each.choices[0].delta.content or "" for each in chunks if each.choices
    ) == small.ask(QUESTION, 12)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == small.context.num_tokens


@pytest.mark.slow
def test_without_a_document_any_replica_answers_as_the_plain_model(client, tiny_tokenizer):
    model = own(tiny_tokenizer).model
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "And the other?"},
    ]
    answer, tokens = generate_plainly(model, tiny_tokenizer, messages)
    for _ in range(3):
        reply = ask(client, messages)
        assert reply.choices[0].message.content == answer
        assert (reply.usage.prompt_tokens, reply.restorekv["pairs"]) == (tokens, 0)


@pytest.mark.slow
def test_questions_go_where_the_document_is(client, engine, file):
    """One replica compresses it and answers; nothing is loaded a second time."""
    both_up()  # a test before may have killed one
    names = {holder(engine, client, file) for _ in range(4)}
    assert len(names) == 1
    files, owners = [file], [*names]
    while len(files) < 4 or len(set(owners)) == 1:
        files.append(upload(client, f"{TEXT} Number {len(files)}."))
        owners.append(holder(engine, client, files[-1]))
        assert len(files) < 40
    assert [holder(engine, client, each) for each in files] == owners
    total, now = engine.collect_metrics()
    assert total["loaded"] == 0 and total["compressed"] == sum(
        each["compressed"] for each in counted(engine).values()
    )
    assert now["replicas"] == 2 and now["documents_held"] >= 4
    figures = urlopen(f"{str(client.base_url).removesuffix('v1/')}metrics").read().decode()
    assert (
        "restorekv_replicas 2.0" in figures
        and f"restorekv_compressed_total {total['compressed']}" in figures
    )


@pytest.mark.slow
def test_many_at_once_about_several_documents(client, file, tiny_tokenizer):
    other = upload(client, OTHER)
    small = [own(tiny_tokenizer, text) for text in (TEXT, OTHER)]
    questions = [f"Which code is {number}?" for number in range(40)]

    async def all_of_them():
        asking = client_of(str(client.base_url), kind=openai.AsyncOpenAI)
        files = [(file, other)[number % 2] for number in range(len(questions))]
        pairs = zip(files, questions, strict=True)
        return await asyncio.gather(
            *(ask(asking, about(each, question=question)) for each, question in pairs)
        )

    answers = [each.choices[0].message.content for each in asyncio.run(all_of_them())]
    assert answers == [
        small[number % 2].ask(question, 12) for number, question in enumerate(questions)
    ]
    both = ask(client, about(file, other))
    assert both.usage.prompt_tokens > max(each.context.num_tokens for each in small)


@pytest.mark.slow
def test_a_killed_replicas_documents_are_served_by_the_others(client, engine, file):
    """From the shared caches: nothing is compressed again. An upload while it is down is
    processed.
    """
    both_up()
    name, before = holder(engine, client, file), engine.collect_metrics()[0]["compressed"]
    said = ask(client, about(file)).choices[0].message.content
    kill(name)
    assert ask(client, about(file), timeout=PATIENCE).choices[0].message.content == said
    assert (
        engine.collect_metrics()[0]["compressed"] == before and holder(engine, client, file) != name
    )
    new = upload(client, f"{OTHER} While it was down.")
    assert new.status == "processed" and ask(client, about(new)).choices[0].message.content
    both_up(without=name)
    assert ask(client, about(file), timeout=PATIENCE).choices[0].message.content == said


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_survives_the_replica_that_writes_it(client, engine, file, stream):
    """Another replica repeats the answer; the client gets every token once."""
    both_up()
    name = holder(engine, client, file)
    whole = [choice.message.content for choice in ask(client, about(file), **LONG).choices]
    questions = counted(engine)[name]["questions"]
    if stream:
        texts = [""] * LONG["n"]
        pieces = iter(ask(client, about(file), stream=True, timeout=PATIENCE, **LONG))
        for number, chunk in enumerate(pieces):
            if number == LONG["n"] + 4:
                kill(name)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        killing = threading.Timer(0.3, kill, (name,))
        killing.start()
        texts = [
            each.message.content
            for each in ask(client, about(file), timeout=PATIENCE, **LONG).choices
        ]
        killing.join()
    assert texts == whole
    assert counted(engine)[name]["questions"] == questions, "it was too quick to be killed"


@pytest.mark.slow
def test_who_leaves_ends_the_writing(client, engine, file):
    """The replica stops, too, and is free for others long before the answer would have ended."""
    name = holder(engine, client, file)
    tokens = counted(engine)[name]["tokens"]
    stream = ask(client, about(file), stream=True, **{**LONG, "n": 16})
    next(iter(stream))
    stream.close()
    until(lambda: not engine.tasks, PATIENCE)
    holder(engine, client, file)
    until(lambda: holder(engine, client, file) == name, PATIENCE)
    assert counted(engine)[name]["tokens"] - tokens < 16 * LONG["max_tokens"] // 2


@pytest.mark.slow
def test_too_many_and_wrong_requests_are_refused(client, engine, file, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(engine, "max_waiting", 0)
        with pytest.raises(openai.RateLimitError, match="Too many questions"):
            ask(client, about(file))
    with pytest.raises(openai.BadRequestError, match=r"regex|schema|JSON"):
        schema = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        }
        ask(client, about(file), response_format=schema)
    bad = upload(client, b"not a cache", "bad.rkv")
    assert bad.status == "error" and "Traceback" not in bad.status_details


@pytest.mark.slow
def test_caches_go_out_and_in(client, engine, file, tiny_tokenizer):
    """The page's numbers and cache files come from whichever replica has them."""
    small, root = own(tiny_tokenizer), str(client.base_url)
    kept = urlopen(f"{root}files/{file.id}/kept?model={VARIANT}").read().decode()
    assert f'"after":{small.manifest.pairs_held}' in kept
    assert "ready" in urlopen(f"{root}files/{file.id}/progress?model={VARIANT}").read().decode()
    cache = urlopen(f"{root}files/{file.id}/cache").read()
    made = upload(client, cache, "doc.rkv")
    answer = ask(client, about(made), VARIANT.partition(":")[0])
    assert answer.choices[0].message.content == small.ask(QUESTION, 12)
    assert client.files.delete(made.id).deleted


@pytest.mark.slow
def test_the_command_drains_and_leaves_no_process(tmp_path):
    """On SIGTERM, the answer that is being written is completed; then every process ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "restorekv",
        "serve",
        "--model",
        "tiny",
        "--preset",
        "best",
        "--ratio",
        "0.2",
    ]
    command += ["--ray", "local", "--replicas", "1", "--max-replicas", "2", "--port", str(port)]
    with subprocess.Popen([*command, "--store", str(tmp_path)], stderr=subprocess.PIPE) as process:
        address = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or is_up(port), PATIENCE)
        if process.poll() is not None:
            refused = process.stderr.read().decode()
            assert TOO_BUSY in refused, refused
            pytest.skip(refused)
        client = client_of(f"{address}/v1")
        made = upload(client, TEXT)
        started = children(process.pid)
        facts = [
            Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            for child in filter(running, started)
        ]
        assert all(
            b"RAY_AUTH_MODE=token" in each and b"RAY_USAGE_STATS_ENABLED=0" in each
            for each in facts
            if each[0]
        )
        stream = ask(
            client, about(made), "tiny:best-0.2", stream=True, max_tokens=300, temperature=2, seed=1
        )
        pieces = [next(iter(stream))]
        process.send_signal(signal.SIGTERM)
        pieces += list(stream)
        error = process.communicate(timeout=PATIENCE)[1].decode()
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    assert started and "Traceback" not in error
    until(lambda: not [child for child in started if running(child)], PATIENCE)


def is_up(port):
    """Return whether the server answers; it accepts connections long before it does."""
    try:
        return urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def test_replicas_without_ray_are_not_ignored():
    with pytest.raises(RestoreKVError, match="--replicas is for --ray; add --ray local"):
        RayOptions(replicas=3)
    with pytest.raises(RestoreKVError, match="--replica-gpus is for --ray"):
        RayOptions(replica_gpus=1.0)
    assert RayOptions().ray is None
