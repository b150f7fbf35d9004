"""Ragged documents inside the real vLLM: `make vllm`, which uses a separate environment."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from restorekv import CompressionConfig, compose, compress
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.restore.adapter import RestoreAdapter
from restorekv.vllm import prompt, ragged_config
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from tests.helpers.engine import ENVIRONMENT, TOKENS, answers, ask, ask_and_leave, without_halves
from tests.helpers.grown import GROWN, make_grown_documents
from tests.helpers.models import build_model, build_tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
QUESTIONS = ["Which code?", "Who lives there?", "Tell me more about the color of the house."]
PLAIN = "The sea is"
# Repetitions of a sentence, ratio, conventions: lengths and heads differ much.
DOCUMENTS = {
    "red": (10, 0.2, CompressionConfig()),
    "blue": (60, 0.05, CompressionConfig()),
    "green": (4, 0.5, CompressionConfig(allocation="per-head")),
    "white": (20, 0.1, CompressionConfig(kv_dtype="int8")),
    "black": (20, 0.1, CompressionConfig(prefix_policy="counted")),
}
# Asked as one text: some begin alike, and one comes twice.
TOGETHER = (["red", "blue"], ["red", "appended"], ["blue", "red", "composed"], ["red", "red"])
MODES = {
    "as it comes": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "pieces of 16 tokens": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preemption": {
        "num_gpu_blocks_override": 10,
        "max_num_seqs": 4,
        "max_model_len": 224,
        "disable_log_stats": False,
    },
}


@dataclass(frozen=True)
class RaggedWorld:
    """Documents in a store, and the answers of `ask` by document and question."""

    folder: Path
    store: Path
    plain: list[int]
    prompts: list[list[int]]
    expected: list[str]


def save_model(
    place: Path, **overrides: object
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, RestoreAdapter]:
    """Make a small model and an adapter; save the model for vLLM, next to an empty store."""
    model = build_model("llama", **{"hidden_size": 128, "head_dim": 32, **overrides})
    tokenizer = build_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(place / "model")
    (place / "store").mkdir()
    return model, tokenizer, RestoreAdapter.create(model, 4, rank=2)


def make_ragged_world(place: Path, **overrides: object) -> RaggedWorld:
    """Compress the documents with a small model and ask them; overrides go into its config."""
    model, tokenizer, adapter = save_model(place, **overrides)
    prompts, expected = [], []
    for name, (repetitions, ratio, config) in DOCUMENTS.items():
        text = f"The code of the {name} house is seven; nobody lives there. " * repetitions
        small: CompressedContext = compress(
            model,
            tokenizer,
            text,
            ratio=ratio,
            adapter=None if name in ("green", "black") else adapter,
            config=config,
        )
        small.save(place / "store" / f"{name}.rkv")
        prompts += [prompt(place / "store" / f"{name}.rkv", q, tokenizer) for q in QUESTIONS]
        expected += [small.ask(question, max_new_tokens=TOKENS) for question in QUESTIONS]
    return RaggedWorld(place / "model", place / "store", tokenizer.encode(PLAIN), prompts, expected)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> RaggedWorld:
    return make_ragged_world(tmp_path_factory.mktemp("ragged"))


@contextmanager
def engine(world: RaggedWorld, documents_memory: int | None = None, **options) -> Iterator:
    """Start vLLM in this process, with restorekv's attention."""
    os.environ.update({**ENVIRONMENT, "RESTOREKV_VLLM": "1"})
    import vllm

    from restorekv.vllm.plugin import register

    register()
    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": 32}
    config = ragged_config(world.store, documents_memory=documents_memory)
    llm = vllm.LLM(str(world.folder), kv_transfer_config=config, **{**own, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        os.environ.pop("RESTOREKV_VLLM", None)


def preemptions(llm) -> int:
    return sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


@pytest.fixture(scope="module")
def plain_answer(world) -> str:
    """The answer of vLLM without restorekv to the plain prompt."""
    os.environ.update(ENVIRONMENT)
    import vllm

    llm = vllm.LLM(
        str(world.folder), dtype="float32", enforce_eager=True, max_model_len=512, block_size=32
    )
    try:
        return answers(llm, [world.plain])[0]
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_ask_in_one_batch_with_plain_requests(world, plain_answer, mode):
    with engine(world, **MODES[mode]) as llm:
        for _ in range(2):  # cold, then with whatever vLLM kept
            found = answers(llm, [*world.prompts, world.plain])
            assert without_halves(found[:-1]) == without_halves(world.expected)
            assert found[-1] == plain_answer
        if mode == "preemption":
            assert preemptions(llm) > 0


@pytest.mark.parametrize("heads, memory", [(4, None), (1, None), (4, 200_000)])
def test_two_ranks_answer_as_one(tmp_path, heads, memory):
    """Each rank has its own pool: of two of the four heads, or of the one head that both share.

    200,000 bytes hold only some of the documents, so documents come and go on both ranks.
    """
    world = make_ragged_world(tmp_path, num_attention_heads=8, num_key_value_heads=heads)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(world, memory, **ranks) as llm:
        for _ in range(2):  # cold, then with whatever vLLM kept
            found = answers(llm, [*world.prompts, world.plain])
            assert without_halves(found[:-1]) == without_halves(world.expected)
        unknown = list(world.prompts[1])
        unknown[10] ^= 1
        outputs = ask(llm, [unknown, world.prompts[0]])
        assert [each.finish_reason for each in outputs] == ["error", "length"]
    assert len(set(found)) > len(DOCUMENTS)


def test_answers_are_the_same_head_by_head(world, monkeypatch):
    """Small documents are attended head by head here, which they usually are not."""
    from restorekv.vllm import cpu_backend, head_loop

    monkeypatch.setattr(head_loop, "MIN_TOKENS", 1)
    monkeypatch.setattr(head_loop, "MIN_WORK", 1)
    calls = []
    attend = cpu_backend.attend_by_head
    monkeypatch.setattr(
        cpu_backend, "attend_by_head", lambda *args: (calls.append(len(args[0])), attend(*args))[1]
    )
    with engine(world, **MODES["pieces of 16 tokens"]) as llm:
        found = answers(llm, world.prompts)
        assert without_halves(found) == without_halves(world.expected)
    assert len(calls) > 100


def test_logits_of_hundreds_are_attended(tmp_path, monkeypatch):
    """The biases on Qwen 2's keys cause such logits, which once ended the engine."""
    build_plainly = build_model

    def build_biased_model(*args, **options) -> PreTrainedModel:
        model = build_plainly(*args, attention_bias=True, **options)
        for layer in model.model.layers:
            for projection, bias in ((layer.self_attn.q_proj, 15), (layer.self_attn.k_proj, 40)):
                # Of the numbers that RoPE rotates least, in every head of 32.
                projection.bias.view(-1, 2, 16)[..., -2:] += bias
        return model

    monkeypatch.setattr(sys.modules[__name__], "build_model", build_biased_model)
    world = make_ragged_world(tmp_path)
    with engine(world) as llm:
        assert without_halves(answers(llm, world.prompts)) == without_halves(world.expected)


@pytest.fixture(scope="module")
def grown_world(tmp_path_factory) -> RaggedWorld:
    """Documents that were appended to, folded or composed, and requests for several documents."""
    place = tmp_path_factory.mktemp("grown")
    model, tokenizer, adapter = save_model(place)
    store = place / "store"
    documents = make_grown_documents(store, model, tokenizer, adapter=adapter)
    prompts, expected = [], []
    for names in (*[[name] for name in GROWN], *TOGETHER):
        paths = [store / f"{name}.rkv" for name in names]
        whole = documents[names[0]]
        if len(names) > 1:
            whole = compose([documents[name] for name in names])
        prompts += [prompt(paths if len(paths) > 1 else paths[0], q, tokenizer) for q in QUESTIONS]
        expected += [whole.ask(question, max_new_tokens=TOKENS) for question in QUESTIONS]
    assert len(set(expected)) > len(expected) // 2, "the documents hardly differ"
    return RaggedWorld(place / "model", store, tokenizer.encode(PLAIN), prompts, expected)


def test_grown_documents_and_several_in_a_request_are_answered_as_by_ask(grown_world):
    with engine(grown_world) as llm:
        for _ in range(2):
            found = answers(llm, grown_world.prompts)
            assert without_halves(found) == without_halves(grown_world.expected)
        damaged = list(grown_world.prompts[-1])
        damaged[20] ^= 1
        outputs = ask(llm, [damaged, grown_world.prompts[0]])
        assert [each.finish_reason for each in outputs] == ["error", "length"]


def test_a_pool_that_is_too_small_for_all_serves_all(world):
    """The pool has room for two or three documents at a time, so the others wait."""
    with engine(world, documents_memory=300_000) as llm:
        from restorekv.vllm import worker_state

        pool = worker_state.get_pool()
        found = answers(llm, world.prompts)
        assert without_halves(found) == without_halves(world.expected)
        assert len(pool.tables) < len(DOCUMENTS)
        alone = [answers(llm, [ids])[0] for ids in world.prompts[::4]]
        assert without_halves(alone) == without_halves(world.expected[::4])


def test_requests_that_cannot_be_served_end_alone(world, tmp_path):
    unknown = list(world.prompts[1])
    unknown[10] = unknown[10] ^ 1
    with engine(world) as llm:
        outputs = ask(llm, [unknown, world.prompts[0], unknown])
        failed = [each.finish_reason == "error" for each in outputs]
        assert failed == [True, False, True]
        assert without_halves([outputs[1].text]) == without_halves(world.expected[:1])
        # A file that goes while vLLM still has the document's blocks.
        path = world.store / "green.rkv"
        place = list(DOCUMENTS).index("green") * len(QUESTIONS)
        assert ask(llm, [world.prompts[place]])[0].finish_reason != "error"
        path.rename(tmp_path / "green.rkv")
        try:
            assert ask(llm, [world.prompts[place]])[0].finish_reason == "error"
        finally:
            (tmp_path / "green.rkv").rename(path)
        again = answers(llm, [world.prompts[place]])
        assert without_halves(again) == without_halves([world.expected[place]])
        # A prompt of one token, of which nothing can be promised.
        named = {"extra_args": {"kv_transfer_params": {"document": "green"}}}
        assert ask(llm, [world.plain[-1:]], **named)[0].finish_reason == "error"
        again = answers(llm, [world.prompts[place]])
        assert without_halves(again) == without_halves([world.expected[place]])


def test_who_leaves_before_the_error_spoils_nothing(world, tmp_path):
    """vLLM takes a request's blocks into its prefix cache at once if nothing is loaded for it."""
    places = range(len(QUESTIONS))
    with engine(world) as llm:
        path = world.store / "red.rkv"
        path.rename(tmp_path / "red.rkv")
        try:
            for place in places:
                ask_and_leave(llm, world.prompts[place])
        finally:
            (tmp_path / "red.rkv").rename(path)
        found = answers(llm, [world.prompts[place] for place in places])
        assert without_halves(found) == without_halves(world.expected[: len(QUESTIONS)])
        # What was asked before without a document is refused with one, although vLLM has all blocks
        # of the prompt but that of its last token.
        ids = [(7 * place) % 200 + 5 for place in range(2 * 32 + 1)]
        named = {"extra_args": {"kv_transfer_params": {"document": "red"}}}
        assert ask(llm, [ids])[0].finish_reason == "length"
        assert ask(llm, [ids], **named)[0].finish_reason == "error"


def test_positions_are_those_of_the_text(tmp_path):
    """A question beyond the model's last position ends its request, and answers end there."""
    model, tokenizer, _ = save_model(tmp_path, max_position_embeddings=512)
    text = "The code of the red house is seven; nobody lives there. " * 12
    small = compress(model, tokenizer, text, ratio=0.2, adapter=None)
    path = tmp_path / "store" / "red.rkv"
    small.save(path)
    ids = prompt(path, QUESTIONS[0], tokenizer)
    room = 512 - small.cache.get_seq_length() - len(ids[PLACEHOLDERS:])
    assert TOKENS < room < 300
    expected = small.ask(QUESTIONS[0], max_new_tokens=TOKENS)
    world = RaggedWorld(tmp_path / "model", tmp_path / "store", [], [ids], [expected])
    too_long = prompt(path, QUESTIONS[0] + "Q" * (room + 1), tokenizer)
    with engine(world) as llm:
        found = ask(llm, [too_long, ids], max_tokens=room + 50, ignore_eos=True)
        assert [each.finish_reason for each in found] == ["error", "length"]
        assert len(found[1].token_ids) == room
        assert without_halves(answers(llm, [ids])) == without_halves([expected])


def test_a_document_larger_than_the_pool_ends_its_request(world):
    with engine(world, documents_memory=60_000) as llm:
        outputs = ask(llm, [world.prompts[0], world.plain])
        assert outputs[0].finish_reason == "error" and outputs[1].finish_reason == "length"


def test_who_wants_the_prompts_likelihoods_is_refused(world):
    """vLLM would compute the placeholders itself, as if they were a text."""
    unknown = list(world.prompts[1])
    unknown[10] = unknown[10] ^ 1
    with engine(world) as llm:
        found = ask(llm, [world.prompts[0], unknown, world.plain], prompt_logprobs=1)
        assert [each.finish_reason for each in found] == ["error", "error", "length"]
        # As if nothing were skipped.
        both = {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}
        assert ask(llm, [world.prompts[0]], **both)[0].finish_reason == "error"
        # It would count the placeholders.
        found = ask(llm, [world.prompts[0], world.plain], repetition_penalty=1.5)
        assert [each.finish_reason for each in found] == ["error", "length"]
        assert without_halves(answers(llm, world.prompts[:1])) == without_halves(world.expected[:1])


def test_float16_is_refused(world):
    """float16 is too coarse for the small share of attention that a sink takes."""
    with pytest.raises(RestoreKVError, match="in float16"), engine(world, dtype="float16"):
        pass


def test_an_engine_of_embeddings_is_refused(world):
    """A pooler that needs all tokens of a prompt would end the engine, and with it all requests."""
    with pytest.raises(RestoreKVError, match="for embeddings"), engine(world, runner="pooling"):
        pass


@pytest.mark.parametrize("earlier", [False, True], ids=["first engine", "after an engine with it"])
def test_without_the_backend_the_connector_refuses(world, earlier):
    """Without it, vLLM would read the placeholders' blocks, into which nothing was written."""
    os.environ.update(ENVIRONMENT)
    import vllm
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES

    from restorekv.vllm import worker_state

    worker_state.forget_pools()
    if earlier:
        with engine(world):
            pass
    _ATTN_OVERRIDES.clear()
    selector._cached_get_attn_backend.cache_clear()
    with pytest.raises(Exception, match="RESTOREKV_VLLM=1"):
        vllm.LLM(
            str(world.folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=32,
            kv_transfer_config=ragged_config(world.store),
        )
