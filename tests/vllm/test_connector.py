"""The connector's own logic, against stand-ins for vLLM's classes and for its blocks."""

import importlib
import json
import sys
import threading
from concurrent.futures import wait
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.generation.chat import encode_conversation
from restorekv.model.prompt import encode_question
from restorekv.vllm import chat, prompt, transfer_config
from tests.helpers.models import VOCABULARY
from tests.helpers.portables import QUESTION, TEXTS, portable_of

BLOCK, BLOCKS = 8, 12
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STATE = "vllm.distributed.parallel_state"


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    def __init__(self, *args):
        self.metadata = None

    def _get_connector_metadata(self):
        return self.metadata


@dataclass
class Layer:
    """A layer of one rank; `update`, in place of vLLM's backend, fills its cache
    (2, blocks, tokens, H, D).
    """

    kv_cache: torch.Tensor
    num_kv_heads: int
    impl: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(do_kv_cache_update=update)
    )


def update(layer, keys, values, cache, slots):
    for x, pages in zip((keys, values), cache, strict=True):
        pages.flatten(0, 1)[slots] = x


@pytest.fixture
def connector(monkeypatch, tiny_model, tiny_tokenizer, tmp_path):
    """The module with stand-ins for vLLM, a store of two documents, and a maker of connectors."""
    for name in list(sys.modules):
        if name == "vllm" or name.startswith(("vllm.", "restorekv.vllm.connector")):
            monkeypatch.delitem(sys.modules, name)
    parts = BASE.split(".")
    for name in [".".join(parts[:count]) for count in range(1, len(parts) + 1)] + [STATE]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in (
        ("KVConnectorBase_V1", Base),
        ("KVConnectorMetadata", object),
        ("KVConnectorRole", Role),
    ):
        setattr(sys.modules[BASE], name, value)
    ranks = SimpleNamespace(rank=0, count=1)
    sys.modules[STATE].get_tensor_model_parallel_rank = lambda: ranks.rank
    sys.modules[STATE].get_tensor_model_parallel_world_size = lambda: ranks.count
    module = importlib.import_module("restorekv.vllm.connector")
    yield World(module, tiny_model, tiny_tokenizer, tmp_path, ranks)
    for name in ("restorekv.vllm.connector", "restorekv.vllm.connector_base"):
        sys.modules.pop(name, None)


class World:
    def __init__(self, module, model, tokenizer, store, ranks):
        self.module, self.model, self.tokenizer, self.store, self.ranks = (
            module,
            model,
            tokenizer,
            store,
            ranks,
        )
        self.documents = [portable_of(model, tokenizer, text) for text in TEXTS]
        for document, name in zip(self.documents, ("red", "blue"), strict=True):
            document.save(store / f"{name}.safetensors")

    def config(
        self, speculative=None, lora=None, failure_policy="fail", runner="generate", **parallel
    ):
        text = self.model.config
        transfer = {**transfer_config(self.store), "kv_load_failure_policy": failure_policy}
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(**transfer),
            speculative_config=speculative,
            lora_config=lora,
            model_config=SimpleNamespace(
                hf_text_config=text,
                runner_type=runner,
                dtype=torch.float32,
                get_head_size=lambda: self.documents[0].keys.shape[-1],
            ),
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(
                **{
                    "decode_context_parallel_size": 1,
                    "prefill_context_parallel_size": 1,
                    **parallel,
                }
            ),
        )

    def make(self, role, **parallel):
        return self.module.RestoreKVConnector(self.config(**parallel), role, None)

    def layers(self, heads):
        shape = (2, BLOCKS, BLOCK, heads, self.documents[0].keys.shape[-1])
        names = [
            f"model.layers.{index}.self_attn.attn" for index in range(len(self.documents[0].keys))
        ]
        return {name: Layer(torch.zeros(shape), heads) for name in names} | {"lm_head": object()}

    def prompt(self, number):
        return prompt(self.documents[number], QUESTION, self.tokenizer)

    def request(self, ids, name="a", **params):
        return SimpleNamespace(
            request_id=name,
            prompt_token_ids=ids,
            num_tokens=len(ids),
            max_tokens=16,
            kv_transfer_params=params,
            skip_reading_prefix_cache=False,
            sampling_params=None,
        )


def schedule(scheduler, request, computed, blocks, beside=True):
    """Do what vLLM's scheduler does with a request that has `computed` tokens in the prefix cache;
    return how many tokens the connector promises.
    """
    tokens, later = scheduler.get_num_new_matched_tokens(request, computed)
    assert later is beside
    scheduler.update_state_after_alloc(
        request, SimpleNamespace(get_block_ids=lambda: (list(blocks),)), tokens
    )
    return tokens


def load(worker, meta, layers):
    """Run a step's loads to their end; return the requests that waited for their document."""
    worker.metadata = meta
    worker.start_load_kv(SimpleNamespace(no_compile_layers=layers))
    wait(list(worker.reading.values()))
    return worker.get_finished(set())[1]


@pytest.mark.parametrize("computed", [0, BLOCK, 2 * BLOCK])
def test_a_document_goes_to_the_blocks_of_its_request(connector, computed):
    """The blocks may lie anywhere, and those that vLLM still has are not written."""
    scheduler, worker = connector.make(Role.SCHEDULER), connector.make(Role.WORKER)
    document, blocks = connector.documents[1], [7, 2, 9, 4, 11, 1]
    ids, m, layers = connector.prompt(1), document.tokens, connector.layers(document.keys.shape[1])
    assert m <= len(blocks) * BLOCK
    assert schedule(scheduler, connector.request(ids), computed, blocks) == m - computed
    load(worker, scheduler.build_connector_meta(None), layers)
    assert worker.get_block_ids_with_load_errors() == set()
    for index, layer in enumerate(list(layers.values())[:-1]):
        for pages, own in zip(
            layer.kv_cache, (document.keys[index], document.values[index]), strict=True
        ):
            there = pages[blocks].flatten(0, 1)  # by the request's positions
            assert there[computed:m].equal(own[:, computed:].transpose(0, 1))
            assert not there[:computed].any() and not there[m:].any()
    assert scheduler.build_connector_meta(None).loads == []


def test_every_rank_takes_its_heads(connector):
    document, heads = connector.documents[0], connector.documents[0].keys.shape[1]
    for rank in range(heads):
        connector.ranks.rank, connector.ranks.count = rank, heads
        scheduler, worker, layers = (
            connector.make(Role.SCHEDULER),
            connector.make(Role.WORKER),
            connector.layers(1),
        )
        schedule(scheduler, connector.request(connector.prompt(0)), 0, range(BLOCKS))
        load(worker, scheduler.build_connector_meta(None), layers)
        first = next(iter(layers.values())).kv_cache[0].flatten(0, 1)[: document.tokens, 0]
        assert first.equal(document.keys[0, rank])


def test_a_request_that_fails_names_its_last_block(connector):
    scheduler, worker = connector.make(Role.SCHEDULER), connector.make(Role.WORKER)
    ids, layers = connector.prompt(0), connector.layers(2)
    strange = [*ids[:10], (ids[10] + 1) % VOCABULARY, *ids[11:]]
    blocks = [5, 6, 8, 10, 3, 0]
    # It waits as if for a load, so that vLLM caches none of its blocks.
    bad = connector.request(strange, "bad")
    assert schedule(scheduler, bad, BLOCK, blocks) == len(ids) - BLOCK
    schedule(scheduler, connector.request(ids, "good"), 0, [7, 2, 9, 4, 11, 1])
    assert load(worker, scheduler.build_connector_meta(None), layers) == {"bad", "good"}
    assert worker.get_block_ids_with_load_errors() == {blocks[(len(ids) - 1) // BLOCK]}
    assert worker.get_block_ids_with_load_errors() == set()
    written = next(iter(layers.values())).kv_cache[0]
    assert not written[[5, 6, 8, 10, 3, 0]].any() and written[7].any()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"failure_policy": "recompute"}, "set it to 'fail'"),
        ({"lora": object()}, "leave out enable_lora"),
        ({"speculative": SimpleNamespace(method="draft_model")}, "with a draft model"),
        ({"decode_context_parallel_size": 2}, "context parallel ranks"),
        ({"runner": "pooling"}, "for embeddings and scores; leave out runner and convert"),
    ],
)
def test_engines_that_would_answer_wrongly_are_refused(connector, options, sentence):
    with pytest.raises(RestoreKVError, match=sentence):
        connector.make(Role.SCHEDULER, **options)
    connector.make(Role.SCHEDULER, speculative=SimpleNamespace(method="ngram"))


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs is not possible"),
        ({"repetition_penalty": 1.5}, "leave it out, or use frequency_penalty"),
        ({}, "cannot skip the prefix cache"),
        (None, "cannot be given more input later"),
    ],
)
def test_requests_that_would_be_answered_wrongly_are_refused(connector, options, sentence):
    scheduler = connector.make(Role.SCHEDULER)
    request = connector.request(connector.prompt(0))
    request.resumable = options is None
    request.sampling_params = SimpleNamespace(
        **{"prompt_logprobs": None, "repetition_penalty": 1.0, **(options or {})}
    )
    request.skip_reading_prefix_cache = not options
    schedule(scheduler, request, 0, [5, 6, 8, 10, 3, 0])
    [refused] = scheduler.build_connector_meta(None).loads
    assert refused.document is None and sentence in refused.problem
    assert not request.skip_reading_prefix_cache


def test_a_request_beyond_the_models_positions_ends_and_answers_are_shortened(connector):
    """The placeholders of the prompt are fewer than the positions of the text."""
    ids = connector.prompt(0)
    document = connector.documents[0]
    end = document.manifest.positions + len(ids) - document.tokens
    blocks = [5, 6, 8, 10, 3, 0]
    for positions, longest in ((end + 99, 16), (end + 5, 5), (end, 1)):
        connector.model.config.max_position_embeddings = positions
        request = connector.request(ids)
        scheduler = connector.make(Role.SCHEDULER)
        schedule(scheduler, request, 0, blocks)
        assert request.max_tokens == longest
        # vLLM asks again about a request that it preempted.
        schedule(scheduler, request, 0, blocks)
        assert request.max_tokens == longest
    connector.model.config.max_position_embeddings = end - 1
    scheduler = connector.make(Role.SCHEDULER)
    schedule(scheduler, connector.request(ids), 0, blocks)
    [refused] = scheduler.build_connector_meta(None).loads
    assert refused.document is None
    assert f"needs {end} positions, and the model has {end - 1}; ask less" in refused.problem


def test_two_layers_of_one_number_are_refused(connector):
    """A draft model's layers have the same numbers as the model's own."""
    layers = connector.layers(2)
    name = next(iter(layers))
    layers[f"draft_model.{name}"] = layers[name]
    with pytest.raises(RestoreKVError, match="have the number 0"):
        connector.module.find_attention_layers(SimpleNamespace(no_compile_layers=layers))


def test_a_file_that_could_not_be_read_is_no_document_that_was(connector):
    """The next request for it waits as well, so that vLLM caches nothing unwritten."""
    scheduler, worker = connector.make(Role.SCHEDULER), connector.make(Role.WORKER)
    path, ids, blocks = (
        connector.store / "red.safetensors",
        connector.prompt(0),
        [5, 6, 8, 10, 3, 0],
    )
    layers = connector.layers(2)
    for is_there in (False, True):
        schedule(scheduler, connector.request(ids), 0, blocks)
        if not is_there:
            path.rename(path.with_suffix(".away"))
        done = load(worker, scheduler.build_connector_meta(None), layers)
        bad = worker.get_block_ids_with_load_errors()
        assert done == {"a"} and bool(bad) is not is_there
        output = SimpleNamespace(finished_recving=done, invalid_block_ids=bad)
        scheduler.update_connector_output(output)
        if not is_there:
            path.with_suffix(".away").rename(path)
    schedule(scheduler, connector.request(ids), 0, blocks, beside=False)


def test_a_document_is_read_beside_other_steps_and_then_at_once(connector, monkeypatch):
    """Steps continue while a request waits for a file. The next request for the same document gets
    it in its first step.
    """
    scheduler, worker, layers = (
        connector.make(Role.SCHEDULER),
        connector.make(Role.WORKER),
        connector.layers(2),
    )
    go, real = threading.Event(), worker.store.load_pairs
    monkeypatch.setattr(worker.store, "load_pairs", lambda document: go.wait(30) and real(document))
    schedule(scheduler, connector.request(connector.prompt(0), "first"), 0, [7, 2, 9, 4, 11, 1])
    worker.metadata = scheduler.build_connector_meta(None)
    worker.start_load_kv(SimpleNamespace(no_compile_layers=layers))
    assert worker.get_finished(set()) == (None, set())
    go.set()
    wait(list(worker.reading.values()))
    assert worker.get_finished(set()) == (None, {"first"}) and worker.get_finished(set()) == (
        None,
        set(),
    )
    scheduler.update_connector_output(
        SimpleNamespace(finished_recving={"first"}, invalid_block_ids=set())
    )
    schedule(
        scheduler,
        connector.request(connector.prompt(0), "second"),
        0,
        [0, 3, 5, 6, 8, 10],
        beside=False,
    )
    assert load(worker, scheduler.build_connector_meta(None), layers) == set()
    pages = next(iter(layers.values())).kv_cache[0]
    assert pages[[0, 3, 5]].equal(pages[[7, 2, 9]]) and pages[0].any()
    worker.shutdown()


def test_a_file_that_vanishes_ends_the_request_that_waits(connector):
    scheduler, worker = connector.make(Role.SCHEDULER), connector.make(Role.WORKER)
    blocks, ids = [5, 6, 8, 10, 3, 0], connector.prompt(0)
    schedule(scheduler, connector.request(ids), 0, blocks)
    (connector.store / "red.safetensors").unlink()
    assert load(worker, scheduler.build_connector_meta(None), connector.layers(2)) == {"a"}
    assert worker.get_block_ids_with_load_errors() == set(
        blocks[: -(-connector.documents[0].tokens // BLOCK)]
    )


def test_requests_without_documents_are_left_alone(connector):
    scheduler, worker = connector.make(Role.SCHEDULER), connector.make(Role.WORKER)
    request = connector.request(connector.tokenizer.encode(QUESTION))
    assert schedule(scheduler, request, 0, [1], False) == 0
    load(worker, scheduler.build_connector_meta(None), {})
    scheduler.get_num_new_matched_tokens(connector.request(connector.prompt(0), "gone"), 0)
    assert scheduler.request_finished(connector.request([], "gone"), []) == (False, None)
    assert scheduler.matched == {}


def test_a_chat_request_carries_ids_and_the_name(connector):
    """A server that ignores the ids sees a prompt without placeholders, and refuses it."""
    body = json.loads(json.dumps(chat(connector.documents[0], QUESTION, connector.tokenizer)))
    params = body["kv_transfer_params"]
    assert params.pop("prompt_token_ids") == connector.prompt(0)
    scheduler = connector.make(Role.SCHEDULER)
    text = connector.tokenizer.encode(body["messages"][0]["content"])
    schedule(scheduler, connector.request(text, **params), 0, [1, 2])
    [refused] = scheduler.build_connector_meta(None).loads
    assert refused.document is None and "does not begin with placeholders" in refused.problem


def test_earlier_turns_stand_before_the_question(connector):
    """The ids are those of the library's own conversation about the same document."""
    document, tokenizer = connector.documents[0], connector.tokenizer
    turns = [("Which code?", "Seven."), ("Who lives there?", "Nobody.")]
    ids = prompt(document, QUESTION, tokenizer, "It", turns)
    assert ids[: document.tokens] == document.ids.tolist()
    asked = encode_conversation(tokenizer, document.context, turns, QUESTION)
    assert ids[document.tokens :] == [
        *asked.tolist(),
        *tokenizer.encode("It", add_special_tokens=False),
    ]
    body = chat(document, QUESTION, tokenizer, turns=turns)
    assert [each["role"] for each in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert body["kv_transfer_params"]["prompt_token_ids"] == prompt(
        document, QUESTION, tokenizer, turns=turns
    )
    alone = encode_question(tokenizer, document.context, QUESTION)[0].tolist()
    assert prompt(document, QUESTION, tokenizer) == document.ids.tolist() + alone
    with pytest.raises(RestoreKVError, match="must be text, not a list"):
        prompt(document, [QUESTION], tokenizer)


def test_what_cannot_work_is_said_at_the_start(connector, caplog):
    with pytest.raises(RestoreKVError, match="context parallel"):
        connector.make(Role.SCHEDULER, decode_context_parallel_size=2)
    (connector.store / "other.safetensors").write_bytes(b"other")
    connector.make(Role.SCHEDULER)
    assert "other.safetensors" in caplog.text
