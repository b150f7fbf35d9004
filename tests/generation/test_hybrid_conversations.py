"""Conversations, growing texts and texts read in parts with models in which some layers have a
window, compared with dense passes of transformers' own model with a mask for every layer and head.
"""

import pytest
import torch

from restorekv import CompressedContext, ask_many, compose, compress, evictors
from restorekv.cli import execute
from restorekv.compression.streaming import Stream, split_context
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.generation import decoding
from restorekv.model.prompt import encode_question
from tests.helpers import exactness
from tests.helpers.compressing import QUESTIONS, TEXT, compress_with, make_adapter
from tests.helpers.damage import change, check_refused, record
from tests.helpers.hybrids import (
    HYBRIDS,
    LATENT,
    WINDOW,
    WITH_STATES,
    build_hybrid,
    dense_logits,
    mark_alike,
)
from tests.helpers.models import build_model

LONG = TEXT * 3
CLOSE = 2e-5


GEMMAS = [kind for kind in HYBRIDS if kind.startswith("gemma")]  # 3, and what it became


KINDS = mark_alike([*GEMMAS, "qwen2", "gpt_oss", *WITH_STATES, *LATENT])


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return build_hybrid(request.param)


def plain_argmax(model, ids, count):
    """Return the tokens that a plain model finds likeliest in place of the last `count` ids."""
    with torch.no_grad():
        logits = exactness.plain_copy(model)(input_ids=ids).logits[0]
    return logits[-count - 1 : -1].argmax(-1).tolist()


def check_turns(model, document, chat):
    """Check that a plain model that reads text and conversation at once gives the latest answer."""
    answer = list(chat.turns[-1].answer.ids)
    ids = torch.tensor([[*document.context.ids[0].tolist(), *chat.ids(), answer[-1]]])
    assert plain_argmax(model, ids, len(answer)) == answer


def test_turns_forget_what_leaves_the_window(model, tiny_tokenizer):
    small = compress(model, tiny_tokenizer, LONG, ratio=1)
    chat = small.chat()
    for question in QUESTIONS:
        chat.ask(question, WINDOW)
        check_turns(model, small, chat)
    before = chat.turns[-2].answer.ids
    other = chat.fork()
    chat.undo(2)
    chat.ask(QUESTIONS[1], WINDOW)
    assert chat.turns[-1].answer.ids == before
    check_turns(model, small, chat)
    other.ask(QUESTIONS[0], WINDOW)
    check_turns(model, small, other)


def test_a_folded_conversation_goes_on_as_if_it_were_whole(model, tiny_tokenizer):
    small = compress(model, tiny_tokenizer, LONG, ratio=1)
    chat = small.chat()
    for question in QUESTIONS:
        chat.ask(question, WINDOW)
    chat.fold()
    assert chat.document.kept.all()
    chat.ask(QUESTIONS[0], 2 * WINDOW)
    check_turns(model, chat.document, chat)


@pytest.mark.parametrize("evictor", ["snapkv:window=8", "kvzip:chunk=40", "random"])
def test_what_is_appended_reads_what_was_kept_and_its_window(model, tiny_tokenizer, evictor):
    first = exactness.random_ids(80, 1)[0].tolist()
    second = exactness.random_ids(60, 2)[0].tolist()
    options = {"ratio": 0.4, "adapter": None, "evictor": evictor}
    small = compress_with(model, tiny_tokenizer, first, **options)
    grown = small.append(second)
    old, total = small.context.num_tokens, grown.context.num_tokens
    asked = encode_question(tiny_tokenizer, grown.context, QUESTIONS[1])
    ids = torch.cat([grown.context.ids, asked], -1)
    rows = [(old, total, small.kept), (total, ids.shape[1], grown.kept)]
    expected = dense_logits(model, ids, rows)[:, total:]
    check_logits(model, grown.cache, asked, expected)
    assert grown.kept[..., :old].equal(small.kept)


@pytest.mark.parametrize("evictor", ["snapkv:window=8", "kvzip:chunk=40", "h2o", "random"])
def test_a_part_of_a_stream_reads_what_is_held_and_its_window(
    model, tiny_tokenizer, evictor, monkeypatch
):
    """SnapKV reads the last columns of a part again with the next one, which moves windows back."""
    text = exactness.random_ids(150, 1)[0].tolist()
    held = []
    choose = Stream.choose_kept

    def remember(stream, last):
        held.append(choose(stream, last))
        return held[-1]

    monkeypatch.setattr(Stream, "choose_kept", remember)
    small = compress_with(
        model, tiny_tokenizer, text, streaming_chunk=64, ratio=0.3, adapter=None, evictor=evictor
    )
    prefix, total = small.context.prefix_length, small.context.num_tokens
    parts = split_context(
        evictors.make_evictor(evictor), small.context, small.manifest.streaming_chunk
    )
    assert len(parts) == len(held) == 3
    asked = encode_question(tiny_tokenizer, small.context, QUESTIONS[1])
    ids = torch.cat([small.context.ids, asked], -1)
    # Every part sees what is left of those before it, and the question what is left in the end.
    starts = [part.start for part in parts[1:]] + [total]
    rows = [(total, ids.shape[1], small.kept)]
    for start, end, keep in zip(starts, starts[1:], held, strict=False):
        kept = keep[..., :start].clone()
        kept[..., :prefix] = True
        rows.append((start, end, kept))
    expected = dense_logits(model, ids, rows)[:, total:]
    check_logits(model, small.cache, asked, expected)


def check_logits(model, cache, asked, expected):
    first = cache.get_seq_length()
    positions = torch.arange(first, first + asked.shape[-1])[None]
    with torch.no_grad():
        own = model(
            input_ids=asked, position_ids=positions, past_key_values=cache.fork(), use_cache=True
        ).logits
    assert float((own.double() - expected).abs().max() / expected.abs().max()) < CLOSE


def test_several_texts_answer_in_one_batch_as_alone(model, tiny_tokenizer):
    adapter = make_adapter(model)
    documents = [
        compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=adapter),
        compress_with(model, tiny_tokenizer, TEXT[:60], ratio=0.6, adapter=None),
        compress_with(model, tiny_tokenizer, LONG, ratio=0.3, adapter=None, streaming_chunk=60),
    ]
    questions = QUESTIONS[:2]
    pairs = [(document, questions) for document in documents]
    # With the question, more tokens than a window has.
    count = WINDOW // 2 + 4
    alone = [document.ask(questions, count) for document in documents]
    assert ask_many(pairs, count) == alone
    one_by_one = [[each.ask(question, count) for question in questions] for each in documents]
    assert one_by_one == alone


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"offset": 5, "adapter": None}])
def test_a_file_holds_both_kinds_of_layers(model, tiny_tokenizer, tmp_path, options, capsys):
    if model.config.model_type in LATENT:
        pytest.skip("tests/model/test_latent.py has its files")
    settings = {"ratio": 0.4, "adapter": make_adapter(model), **options}
    small = compress_with(model, tiny_tokenizer, LONG, **settings)
    path = tmp_path / "doc.rkv"
    small.save(path)
    again = CompressedContext.load(path, model, tiny_tokenizer)
    assert again.manifest == small.manifest and again.digest == small.digest
    assert again.ask(QUESTIONS[:2], 8) == small.ask(QUESTIONS[:2], 8)
    m = small.manifest
    # Layers that share the pairs of others hold none.
    own = model.config.layer_types[: len(small.cache.layers)]
    assert m.bytes_held == small.cache.nbytes
    if small.cache.with_states:
        kept = {kind: [] for kind in own}
        for index, kind in enumerate(own):
            kept[kind].append(index)
        layers = len(small.cache.layers)
        beside = list(range(layers // 2, layers)) if "hybrid" in own else []
        assert m.states == kept.get("linear_attention", kept.get("conv", beside))
        assert not m.windows
        assert m.empty_layers == sorted(kept.get("moe", []) + kept.get("mlp", []))
        tensors = [tensor for layer in small.cache.with_states for tensor in layer.list_tensors()]
        assert m.state_bytes == sum(tensor.nbytes for tensor in tensors)
        shown = "keep a state beside pairs" if beside else "keep a state instead of pairs"
    else:
        assert m.windows == [WINDOW * (kind[0] == "s") for kind in own]
        layers = small.cache.sliding
        tensors = [tensor for layer in layers for tensor in layer.list_tensors()]
        assert m.sliding_bytes == sum(tensor.nbytes for tensor in tensors)
        held = sum(layer.heads * (layer.context_columns + layer.restore_length) for layer in layers)
        assert m.sliding_pairs == held
        shown = f"see the last {WINDOW} tokens alone"
    assert execute(["inspect", str(path)]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())
    if m.offset:
        return  # such a cache cannot grow
    grown = again.append(exactness.random_ids(50, 3)[0].tolist(), adapter=None, restore="none")
    grown.save(path)
    assert CompressedContext.load(path, model, tiny_tokenizer).digest == grown.digest


SLIDING = {"heads": 2, "head_dim": 8}  # those of every layer of this model
DAMAGE = {
    "fewer columns": change("sliding.0.keys", lambda x: x[:, 1:].clone()),
    "more columns": change("sliding.0.values", lambda x: torch.cat([x, x[:, :1]], 1)),
    "fewer heads": change("sliding.1.keys", lambda x: x[:1].clone()),
    "another dtype": change("sliding.1.values", lambda x: x.half()),
    "not finite": change("sliding.0.keys", lambda x: x * float("nan")),
    "huge numbers": change("sliding.0.values", lambda x: x + 1e30),
    "another restore cache": change("sliding.0.restore_keys", lambda x: x[:, :-1].clone()),
    "a wider window": record(windows=[WINDOW + 1, 0] * 2),
    "a huge window": record(windows=[2**40, 0] * 2),
    "no window": record(windows=[0, 0, 0, 0]),
    "a window of one": record(windows=[1, 0, 1, 0]),
    "a negative window": record(windows=[-16, 0, -16, 0]),
    "windows in other layers": record(windows=[0, WINDOW, 0, WINDOW]),
    "too many layers": record(windows=[WINDOW, 0] * 2 + [WINDOW]),
    "no windows at all": record(windows=[]),
    "other heads": record(sliding_shape=SLIDING | {"heads": 1}),
    "narrower heads": record(sliding_shape=SLIDING | {"head_dim": 4}),
    "heads without a size": record(sliding_shape={"heads": 2}),
    "no heads": record(sliding_shape=SLIDING | {"heads": 0}),
    "huge heads": record(sliding_shape=SLIDING | {"head_dim": 2**40}),
    "other names": record(sliding_shape=SLIDING | {"layers": 2}),
    "the same heads again": record(sliding_shape=SLIDING),
    "words": record(windows=["16", 0, "16", 0]),
    "endless layers": record(windows=[WINDOW] * 100_000 + [0, 0]),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_files_that_contradict_themselves_are_refused(tiny_tokenizer, tmp_path, harm):
    hybrid = build_hybrid("qwen3")
    small = compress_with(hybrid, tiny_tokenizer, LONG, ratio=0.4, adapter=make_adapter(hybrid))
    check_refused(small, DAMAGE[harm], tmp_path / "doc.rkv")


def state(shapes=None, dtypes=None, **more):
    """Return a function that changes the record of a file's states."""

    def apply(tensors, manifest):
        manifest["state_shapes"].update(shapes or {})
        manifest["state_dtypes"].update(dtypes or {})
        manifest.update(more)

    return apply


def without(name):
    """Return a function that takes a tensor out of a file."""

    def apply(tensors, manifest):
        del tensors[name]

    return apply


def reshape(name, make):
    """Return a function that changes a state of every layer, and its record with it."""

    def apply(tensors, manifest):
        for index in range(len(manifest["states"])):
            tensors[f"states.{index}.{name}"] = make(tensors[f"states.{index}.{name}"])
        changed = tensors[f"states.0.{name}"]
        manifest["state_shapes"][name] = list(changed.shape)
        manifest["state_dtypes"][name] = str(changed.dtype).removeprefix("torch.")

    return apply


DAMAGED_STATES = {
    "not finite": change("states.0.recurrent.0", lambda x: x * float("nan")),
    "huge numbers": change("states.1.conv.0", lambda x: x + 1e30),
    "another shape": change("states.0.recurrent.0", lambda x: x[:, :-1].clone()),
    "another dtype": change("states.1.conv.0", lambda x: x.half()),
    "a state less": without("states.2.conv.0"),
    "a shorter convolution, recorded": reshape("conv.0", lambda x: x[:, 1:].clone()),
    "smaller states, recorded": reshape("recurrent.0", lambda x: x[:, :1].clone()),
    "another dtype, recorded": reshape("recurrent.0", lambda x: x.double()),
    "no states": record(states=[], state_shapes={}, state_dtypes={}),
    "shapes of no layers": record(states=[]),
    "other layers": record(states=[0, 1, 3]),
    "a layer twice": record(states=[0, 0, 1]),
    "a layer too many": record(states=[0, 1, 2, 3]),
    "a negative layer": record(states=[-1, 0, 1]),
    "a layer far away": record(states=[0, 1, 2**40]),
    "endless layers": record(states=list(range(100_000))),
    "a huge shape": state({"conv.0": [2**40, 2**40]}),
    "no shape": state({"conv.0": []}),
    "many dimensions": state({"conv.0": [1] * 9}),
    "an unknown state": state({"other.0": [1]}, {"other.0": "float32"}),
    "a state that is skipped": state({"conv.7": [1]}, {"conv.7": "float32"}),
    "an unknown dtype": state(dtypes={"conv.0": "bits"}),
    "windows besides": state(windows=[WINDOW, 0, 0, 0, 0]),
}


# The layers 1, 3 and 6 of this model hold nothing, and the layers 0 and 4 states.
DAMAGED_EMPTY_LAYERS = {
    "none": record(empty_layers=[]),
    "one too few": record(empty_layers=[1, 3]),
    "one too many": record(empty_layers=[1, 3, 6, 7]),
    "another": record(empty_layers=[1, 3, 5]),
    "another order": record(empty_layers=[3, 1, 6]),
    "one twice": record(empty_layers=[1, 1, 3]),
    "one with states": record(empty_layers=[0, 1, 3]),
    "a negative one": record(empty_layers=[-1, 1, 3]),
    "one far away": record(empty_layers=[1, 3, 2**40]),
    "endless ones": record(empty_layers=list(range(100_000))),
    "words": record(empty_layers=["1", "3", "6"]),
    "no states": record(states=[], state_shapes={}, state_dtypes={}),
}


OF_KIND = {"qwen3_5_text": DAMAGED_STATES, "nemotron_h": DAMAGED_EMPTY_LAYERS}


@pytest.mark.skipif(not WITH_STATES, reason="each class keeps states in its own way")
@pytest.mark.parametrize(
    ("kind", "harm"), [(kind, harm) for kind in OF_KIND for harm in OF_KIND[kind]]
)
def test_files_with_wrong_layers_without_pairs_are_refused(tiny_tokenizer, tmp_path, kind, harm):
    small = compress_with(build_hybrid(kind), tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    check_refused(small, OF_KIND[kind][harm], tmp_path / "doc.rkv")


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_conversation_with_states_can_be_interrupted(kind, tiny_tokenizer):
    """States cannot be cut back: an interrupted turn leaves those from before it."""
    model = build_hybrid(kind)
    chat = compress_with(model, tiny_tokenizer, LONG, ratio=1, adapter=None).chat()
    chat.ask(QUESTIONS[0], 8)
    other = chat.fork()
    pieces = chat.ask(QUESTIONS[1], 20, stream=True)
    next(pieces)
    pieces.close()
    assert chat.ask(QUESTIONS[1], 20) == other.ask(QUESTIONS[1], 20)
    # A stop string takes back what was written after it.
    text = other.turns[-1].answer.text
    chat.undo()
    cut = chat.ask(QUESTIONS[1], 20, stop=[text[5:8]])
    assert text.startswith(cut)
    chat.ask(QUESTIONS[2], 12)
    check_turns(model, chat.document, chat)


@pytest.mark.skipif(not WITH_STATES, reason="each class keeps states in its own way")
def test_caches_with_states_are_not_composed(tiny_tokenizer):
    model = build_hybrid("qwen3_5_text")
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    with pytest.raises(RestoreKVError, match="or state-space layers cannot be composed"):
        compose([small, small])
    with pytest.raises(RestoreKVError, match=r"no layers with states.* from the cache file itself"):
        small.portable()


def test_a_file_without_windows_is_not_for_a_hybrid_model(tiny_tokenizer, tmp_path):
    plain = build_model("qwen3")
    small = compress_with(plain, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    assert small.manifest.windows == [] and "windows" not in small.manifest.to_json()
    small.save(tmp_path / "doc.rkv")
    # Of these, the second has another RoPE too.
    for kind in ("qwen3", "gemma3_text"):
        with pytest.raises(CacheFileError, match="was made with a different model"):
            CompressedContext.load(tmp_path / "doc.rkv", build_hybrid(kind), tiny_tokenizer)


def test_what_moves_keys_is_refused(tiny_tokenizer):
    hybrid = build_hybrid("qwen3")
    small = compress_with(
        hybrid, tiny_tokenizer, LONG, ratio=0.4, adapter=None, allocation="per-head"
    )
    with pytest.raises(RestoreKVError, match="cannot be composed"):
        compose([small, small])
    with pytest.raises(RestoreKVError, match=r"window.* from the cache file itself"):
        small.portable()


def test_the_first_token_of_a_question_comes_after_the_restore_tokens(model, tiny_tokenizer):
    """Greedy answers over a restored cache, token by token as in one pass over the question."""
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=make_adapter(model))
    asked = encode_question(tiny_tokenizer, small.context, QUESTIONS[1])[0]
    written = decoding.generate_ids(model, tiny_tokenizer, small.cache, [asked], 2 * WINDOW)[0]
    ids = torch.cat([asked, written])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=small.cache.fork(), use_cache=True).logits[0]
    assert logits[-len(written) - 1 : -1].argmax(-1).tolist() == written.tolist()
