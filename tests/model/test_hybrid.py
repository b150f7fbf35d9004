"""Models with sliding-window layers beside layers that see the whole text: what they answer over a
small cache, against transformers' own model with a mask for every layer and head.
"""

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.cache.sliding import RecentLayer, SlidingLayer
from restorekv.cache.states import EmptyLayer, StateLayer, mark_position
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.compression.streaming import Stream
from restorekv.errors import ModelError, RestoreKVError
from restorekv.evictors.kvzip import make_repetitions
from restorekv.generation import decoding
from restorekv.model import attention
from restorekv.model.prefill import make_full_cache, prefill, read_only_view
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape, list_windows
from restorekv.model.support import UNLIMITED, get_support
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.gate import train_gate
from restorekv.train.gate_config import GateConfig
from tests.helpers import decoders, exactness
from tests.helpers.exactness import TOKENIZER, measure_error, random_ids, read_question
from tests.helpers.gates import save_gate
from tests.helpers.hybrids import (
    ALIKE,
    HYBRIDS,
    LATENT,
    MIXED,
    WINDOW,
    WITH_STATES,
    attention_weights,
    build_hybrid,
    dense_logits,
    full_rows,
    keep_old_states,
    list_targets,
    make_masks,
    mark_alike,
)

S, TEXT, QUESTION = 3, 90, 40  # the question alone is longer than the window
CLOSE = 2e-5  # relative to the largest logit, in float32
GEMMAS = [kind for kind in HYBRIDS if kind.startswith("gemma")]  # 3, and what it became
SPECS = ["kvzip:chunk=32", "snapkv:window=24", "random"]  # a window of SnapKV longer than 16


def make_context(count=TEXT, seed=0):
    return Context(random_ids(count, seed), S, random_ids(2, 9))


def prepare(model, spec="random", context=None, **config):
    compressor = make_compressor(spec, CompressionConfig(**config))
    return compressor.prepare(model, TOKENIZER, context or make_context())


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_of_both_kinds_are_told_apart_and_tested(kind):
    model = build_hybrid(kind)
    full = list(full_rows(model))
    layer_types = model.config.layer_types
    assert get_support(model).positions == UNLIMITED
    assert CacheShape.from_model(model).layers == len(full) < len(list_windows(model.config))
    cache = prepare(model).evict(0.5)
    kinds = [type(layer) for layer in cache.layers]
    assert [index for index, each in enumerate(kinds) if each is RaggedLayer] == full
    assert cache.lengths.shape[0] == len(full)
    if kind in WITH_STATES:
        states = [index for index, each in enumerate(kinds) if each is StateLayer]
        own = [i for i, each in enumerate(layer_types) if each in ("linear_attention", "conv")]
        # States beside pairs are in layers of their own, behind all others.
        beside = [len(kinds) - len(full) + i for i in full if layer_types[i] == "hybrid"]
        assert states == own + beside
        empty = [index for index, each in enumerate(kinds) if each is EmptyLayer]
        assert empty == [i for i, each in enumerate(layer_types) if each in ("moe", "mlp")]
        assert len(states) + len(empty) + len(full) - len(beside) == len(layer_types)
    else:
        assert {layer.context_columns for layer in cache.sliding} == {WINDOW - 1}


@pytest.mark.parametrize("kind", [*HYBRIDS, *LATENT])
def test_nothing_is_lost_at_ratio_1(kind):
    model = build_hybrid(kind)
    plain = exactness.plain_copy(model).double()
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, context=context).evict(1)
    whole = torch.cat([context.ids, asked], -1)
    with torch.no_grad():
        expected = plain(input_ids=whole).logits[:, TEXT:]
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", [*HYBRIDS, *LATENT])
def test_a_question_sees_what_is_kept_and_its_window(kind, spec):
    model = build_hybrid(kind)
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, spec, context).evict(0.3)
    keep = cache.mark_held(TEXT)
    shape = CacheShape.from_model(model)
    budget = int(0.3 * (TEXT - S) * shape.layers * shape.heads)
    assert int(keep[..., S:].sum()) == budget == cache.pairs_held - shape.layers * shape.heads * S
    whole = torch.cat([context.ids, asked], -1)
    expected = dense_logits(model, whole, [(TEXT, whole.shape[-1], keep)])[:, TEXT:]
    with torch.no_grad():
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE


@pytest.mark.parametrize("kind", mark_alike([*HYBRIDS, *LATENT]))
def test_greedy_answers_beyond_the_window_are_those_of_generate(kind):
    model = build_hybrid(kind)
    plain = exactness.plain_copy(model)
    context = make_context()
    lengths = (1, 5, WINDOW, QUESTION)
    asked = [random_ids(length, length) for length in lengths]
    answer = WINDOW + 8
    wanted = []
    for each in asked:
        ids = torch.cat([context.ids, each], -1)
        written = plain.generate(
            ids, max_new_tokens=answer, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        wanted.append(written[0, ids.shape[-1] :].tolist())
    cache = prepare(model, context=context).evict(1)
    for graph in (False, True):  # rows of one batch with padding, and steps of fixed work
        written = decoding.generate_ids(model, TOKENIZER, cache, asked, answer, graph=graph)
        assert [each.tolist() for each in written] == wanted
    other = prepare(model, context=make_context(50, 7)).evict(1)
    caches = [cache, other, cache, other]
    written = decoding.generate_ids(model, TOKENIZER, caches, asked, answer)
    assert [written[0].tolist(), written[2].tolist()] == [wanted[0], wanted[2]]


@pytest.mark.parametrize("kind", mark_alike(HYBRIDS))
def test_transformers_own_generate_reads_a_fork(kind):
    model = build_hybrid(kind)
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, context=context).evict(0.4)
    own = decoding.generate_ids(model, TOKENIZER, cache, [asked], 24)[0].tolist()
    ids = torch.cat([context.ids, asked], -1)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache.fork(), **options
    )
    assert written[0, ids.shape[-1] :].tolist() == own
    padding = torch.ones_like(ids)
    padding[:, TEXT + 3] = 0
    with pytest.raises(ModelError, match="Rows with padding"):
        model.generate(ids, attention_mask=padding, past_key_values=cache.fork(), **options)


@pytest.mark.parametrize("chunk", [7, 32, 4096])
def test_a_prefill_in_chunks_holds_the_end_in_layers_with_a_window(chunk):
    model = build_hybrid("gemma3_text")
    ids = random_ids(TEXT)
    full = prefill(model, ids, chunk, into=make_full_cache(model, 5))
    expected = exactness.plain_copy(model)(input_ids=ids, use_cache=True).past_key_values
    for ours, theirs in zip(full.layers, expected.layers, strict=True):
        held = ours.keys.shape[-2]
        assert held == (WINDOW - 1 + 5 if isinstance(ours, RecentLayer) else TEXT)
        common = min(held, theirs.keys.shape[-2])
        for name in ("keys", "values"):
            own = getattr(ours, name)[:, :, -common:]
            torch.testing.assert_close(
                own, getattr(theirs, name)[:, :, -common:], rtol=1e-4, atol=1e-5
            )
    with pytest.raises(ValueError, match="not held"):
        full.layers[0].take_columns(0, TEXT)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_end_of_a_text_is_read_again_only_where_its_windows_are_held(kind):
    model = build_hybrid(kind)
    text = random_ids(TEXT, 0)
    again = 5
    with torch.no_grad():
        expected = model(input_ids=text).logits[:, -again:]
        full = make_full_cache(model, margin=again)
        mark_position(full.layers, TEXT - again)
        view = read_only_view(prefill(model, text, into=full), TEXT - again)
        found = model(input_ids=text[:, -again:], past_key_values=view).logits
        assert measure_error(found, expected) < CLOSE
        with pytest.raises(ValueError, match="are not held"):
            view = read_only_view(prefill(model, text), TEXT - again)
            model(input_ids=text[:, -again:], past_key_values=view)


WEIGHED = ["gpt_oss", *GEMMAS, *WITH_STATES, *LATENT]


@pytest.mark.parametrize("kind", WEIGHED)
def test_scores_are_those_of_the_layers_that_see_everything(kind):
    """Against the weights of transformers' own eager attention, in float64; those of a model with
    sinks do not sum to 1.
    """
    model = build_hybrid(kind, double=True)
    context = make_context()
    weights = attention_weights(model, context.ids)
    h2o = prepare(model, "h2o", context).scores
    snapkv = prepare(model, "snapkv:window=24,kernel=1", context).scores
    highest = prepare(model, "snapkv:window=24,kernel=1,groups=max", context).scores
    tova = prepare(model, "tova", context).scores
    close = {"rtol": 1e-4, "atol": 1e-6}
    for row, own in enumerate(weights):  # (H, G, K, K)
        torch.testing.assert_close(h2o[row].double(), own.amax((1, 2))[..., S:], **close)
        window = own[..., -24:, S:-24].mean(2)
        torch.testing.assert_close(snapkv[row, :, :-24].double(), window.mean(1), **close)
        torch.testing.assert_close(highest[row, :, :-24].double(), window.amax(1), **close)
        last = own[..., -1, S:-1].mean((0, 1)).expand_as(tova[row, :, :-1])
        torch.testing.assert_close(tova[row, :, :-1].double(), last, **close)


@pytest.mark.parametrize("kind", ["gemma3_text", "cohere2"])
def test_expected_attention_rotates_as_the_layers_that_see_everything(kind):
    """Scores from transformers' own queries, moved to later positions as its own RoPE moves them:
    of Gemma 3 the one of these layers, of Cohere 2 none.
    """
    model = build_hybrid(kind, double=True)
    context = make_context()
    found = prepare(model, "expected-attention:sinks=0,future=5,covariance=false", context).scores
    plain = exactness.plain_copy(model)
    queries = {}

    def note(module, args, output):
        queries[module.layer_idx] = output[0].unflatten(-1, (-1, model.config.head_dim))

    handles = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, output, own=layer.self_attn: note(own, args, output)
        )
        for layer in plain.model.layers
    ]
    cache = plain(input_ids=context.ids, use_cache=True, past_key_values=DynamicCache())
    for each in handles:
        each.remove()
    positions = torch.arange(TEXT, TEXT + 5)
    for layer, row in full_rows(model).items():
        query = queries[layer]
        if kind == "gemma3_text":
            query = plain.model.layers[layer].self_attn.q_norm(query)
        mean = query.mean(0)  # (H * G, D)
        if kind == "gemma3_text":
            half = mean.shape[-1] // 2
            frequencies = 1_000_000.0 ** (-torch.arange(half, dtype=torch.float64) / half) / 8
            angles = positions[:, None, None] * frequencies
            first, second = mean[:, :half], mean[:, half:]
            turned = [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ]
            mean = torch.cat(turned, -1).mean(0)
        keys = cache.past_key_values.layers[layer].keys[0]
        values = cache.past_key_values.layers[layer].values[0]
        grouped = mean.unflatten(0, (len(keys), -1)).double()
        scale = plain.model.layers[layer].self_attn.scaling
        weights = (grouped @ keys.mT * scale).softmax(-1).mean(1)
        expected = weights * values.norm(dim=-1)
        torch.testing.assert_close(
            found[row].double(), expected[:, S:], rtol=1e-3, atol=1e-6, check_dtype=False
        )


EVERY = [
    *["kvzip:chunk=32", "kvzip+:chunk=32", "contrastkv:chunk=32", "contrastkv-simple:chunk=32"],
    *["snapkv", "h2o", "expected-attention", "keydiff", "knorm", "streaming", "tova", "random"],
]


# One evictor for each way to score; these are asked on every kind each time, the others at night.
WAYS = ("kvzip+:chunk=32", "contrastkv:chunk=32", "snapkv", "h2o", "expected-attention", "keydiff")


def list_marks(kind, spec):
    whole = kind in ("gemma3_text", "gpt_oss", "deepseek_v3")
    return [] if whole or (spec in WAYS and kind not in ALIKE) else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        pytest.param(kind, spec, marks=list_marks(kind, spec))
        for kind in WEIGHED
        for spec in EVERY
        if kind not in (*LATENT, "gemma2") or spec != "expected-attention"
    ],
)
def test_every_evictor_evicts_the_layers_that_see_everything(kind, spec):
    model = build_hybrid(kind)
    context = make_context()
    asked = random_ids(QUESTION, 1)
    prepared = prepare(model, spec, context)
    shape = CacheShape.from_model(model)
    assert prepared.scores.shape == (len(full_rows(model)), shape.heads, TEXT - S)
    offloaded = prepare(model, spec, context, offload=kind not in LATENT)
    assert offloaded.scores.equal(prepared.scores)
    cache = offloaded.evict(0.3)
    whole = torch.cat([context.ids, asked], -1)
    keep = cache.mark_held(TEXT)
    expected = dense_logits(model, whole, [(TEXT, whole.shape[-1], keep)])[:, TEXT:]
    with torch.no_grad():
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE


@pytest.mark.parametrize("name", ["qwen3", *GEMMAS[1:], *WITH_STATES[:1], *LATENT[1:2]])
@pytest.mark.parametrize("kind", ["fastkvzip", "kvzap-linear"])
def test_gates_are_trained_for_the_layers_that_see_everything(kind, name, tmp_path):
    model = build_hybrid(name)
    texts = ["The code of the red house is seven, and nobody lives there. " * 3, "Who? " * 30]
    steps = {"steps": 3} if kind == "fastkvzip" else {}
    config = GateConfig(kind=kind, tokens=30, **steps)
    path = tmp_path / "gate.safetensors"
    gate = train_gate(model, TOKENIZER, texts, config, path, tmp_path / "features")
    assert len(gate.layers) == len(full_rows(model))
    scores = prepare(model, f"{kind.partition('-')[0]}:gate={path}").scores
    heads = CacheShape.from_model(model).heads
    assert scores.shape == (len(full_rows(model)), heads, TEXT - S)


@pytest.mark.parametrize("kind", GEMMAS)
@pytest.mark.parametrize("chunk", [60, 80])
def test_windows_stay_whole_between_parts_of_a_stream(chunk, kind, tmp_path, monkeypatch):
    """Fast KVzip reads a share of a part twice, so less of a part that is shorter than `chunk`."""
    model = build_hybrid(kind)
    gate = save_gate(tmp_path / "gate", "fastkvzip", model)
    held = []
    evict_part = Stream._evict_part

    def watch(self, cache, part, restored, last):
        evict_part(self, cache, part, restored, last)
        held.append({layer.context_columns for layer in cache.sliding})

    monkeypatch.setattr(Stream, "_evict_part", watch)
    spec = f"fastkvzip:gate={gate},window=0.3"
    prepare(model, spec, make_context(180), streaming_chunk=chunk).evict(0.3)
    assert len(held) > 2 and held == [{WINDOW - 1}] * len(held)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", *GEMMAS[1:], *WITH_STATES[1:]])
def test_attention_matching_fits_the_layers_that_see_everything(kind):
    """A head that keeps all its pairs is left alone, so nothing is lost at ratio 1."""
    model = build_hybrid(kind)
    cache = prepare(model, "am-fast:queries=400").evict(0.4)
    pairless = len(cache.sliding) + len(cache.with_states)
    assert len(cache.full_attention) == pairless == len(full_rows(model))
    whole = prepare(model, "am-fast:queries=400").evict(1)
    plain = prepare(model, "random").evict(1)
    asked = random_ids(QUESTION, 1)
    with torch.no_grad():
        assert read_question(model, whole, asked).equal(read_question(model, plain, asked))
        assert not read_question(model, cache, asked).equal(read_question(model, plain, asked))


@pytest.mark.parametrize("kind", WEIGHED)
def test_every_pass_of_kvzip_begins_with_the_windows_of_the_texts_end(kind):
    """Of a dense pass over text and repetition, KVzip's softmax is the part over sinks, chunk and
    repetition: the windows of the second chunk must not have moved with the first. The sinks that a
    model has learned have their share of it too.
    """
    model = build_hybrid(kind, double=True)
    context = make_context()
    scores = prepare(model, "kvzip:chunk=48", context).scores
    for each in make_repetitions(TOKENIZER, context, 48):
        weights = attention_weights(model, torch.cat([context.ids, each.ids], -1))
        sinks = min(4, each.start)
        for row, own in enumerate(weights):
            asking = own[..., TEXT:, :]
            inside = [*range(sinks), *range(each.start, each.end), *range(TEXT, own.shape[-1])]
            learned = 1 - asking.sum(-1, keepdim=True)
            shared = asking[..., inside].sum(-1, keepdim=True) + learned
            part = asking[..., each.start : each.end] / shared
            found = scores[row, :, each.start - S : each.end - S]
            torch.testing.assert_close(found.double(), part.amax((1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not decoders.HAS_LAYER_CONFIGS, reason="the class is not known")
def test_layers_that_leave_no_pairs_read_only_what_is_used():
    """They are 18 of the 42 layers of Gemma 4 E4B."""
    model = build_hybrid("gemma4_sharing")
    get_support(model)  # the probe's own passes compute every token
    read = []
    for layer in model.model.layers[4:]:
        layer.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    prepared = prepare(model, "streaming")
    prepared.with_restore_cache(make_adapter(model))
    assert read == [1] * 4  # two layers in the prefill, and two in the restore pass
    read.clear()
    prepare(model, "h2o")
    assert read == [TEXT] * 2


def make_adapter(model, n=6):
    adapter = RestoreAdapter.create(model, n, rank=2, alpha=4, targets=list_targets(model))
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    return adapter


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", mark_alike([*HYBRIDS, *LATENT[:-1]]))
def test_the_restore_pass_and_its_gradients_are_those_of_a_dense_model(kind, offload):
    """The restore tokens read all there is, and questions read what is kept and the restore
    tokens; in layers with a window both see what is near, and in layers with states questions
    follow the text.
    """
    model = build_hybrid(kind, double=True)
    adapter = make_adapter(model)
    context = make_context()
    asked = random_ids(QUESTION, 1)
    total = TEXT + 6 + QUESTION
    with torch.enable_grad():
        prepared = prepare(model, "random", context, offload=offload and kind not in LATENT)
        cache = prepared.with_restore_cache(adapter).evict(0.4)
        own = read_question(model, cache, asked)
        own.square().mean().backward()
    keep = cache.mark_held(TEXT)
    gradients = {
        name: weight.grad.clone()
        for name, weight in adapter.named_parameters()
        if weight.grad is not None
    }
    adapter.zero_grad()

    plain = exactness.plain_copy(model)
    plain.set_attn_implementation("eager")
    dense = DynamicCache(config=plain.config) if kind in WITH_STATES else DynamicCache()
    plain(input_ids=context.ids, past_key_values=dense, use_cache=True)
    keep_old_states(dense)
    after_text = [copy.deepcopy(layer) for layer in dense.layers]
    with torch.enable_grad():
        twin = adapter.adapted_model.get_decoder()
        masks = make_masks(model, TEXT + 6, [], first=TEXT)
        with exactness.masked(adapter.adapted_model, masks):
            arguments = {"inputs_embeds": adapter.embeddings.double()[None]}
            if getattr(model.config, "hidden_size_per_layer_input", 0):
                # Tokens without an id have the padding's embeddings in every layer.
                padding = torch.full((1, 6), model.config.pad_token_id)
                arguments["per_layer_inputs"] = twin.get_per_layer_inputs(padding)
            twin(
                **arguments,
                position_ids=torch.arange(TEXT, TEXT + 6)[None],
                past_key_values=dense,
                use_cache=True,
            )
        for index, layer in enumerate(after_text):
            if not hasattr(layer, "keys"):
                dense.layers[index] = layer
            elif hasattr(layer, "conv_states"):  # pairs and states
                dense.layers[index].conv_states = layer.conv_states
                dense.layers[index].recurrent_states = layer.recurrent_states
        masks = make_masks(model, total, [(TEXT + 6, total, keep)], first=TEXT + 6)
        with exactness.masked(plain, masks):
            expected = plain(
                input_ids=asked,
                position_ids=torch.arange(TEXT + 6, total)[None],
                past_key_values=dense,
                use_cache=True,
            ).logits
        expected.square().mean().backward()
    assert measure_error(own.detach(), expected.detach()) < 5e-6  # softmaxes of float32 are in it
    assert gradients
    for name, weight in adapter.named_parameters():
        if name not in gradients:
            assert weight.grad is None or not weight.grad.any()
            continue
        size = weight.grad.abs().max()
        assert float((gradients[name] - weight.grad).abs().max()) <= 1e-4 * float(size) + 1e-9, name


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_text_read_in_pieces_has_the_states_of_one_read_at_once(kind):
    """Also if a token is left over: Nemotron-H computes the state of a token alone differently."""
    model = build_hybrid(kind)
    ids = random_ids(49)
    at_once = prefill(model, ids)
    pieces = prefill(model, ids, chunk=16)
    for layer, other in zip(at_once.layers, pieces.layers, strict=True):
        for name, state in getattr(layer, "named_tensors", {}).items():
            torch.testing.assert_close(other.named_tensors[name], state)


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_restore_pass_of_one_token_has_gradients(kind):
    """A step of one token writes into the states of some models; the gradient of the embedding is
    the slope of the answers' logits.
    """
    model = build_hybrid(kind, double=True)
    adapter = make_adapter(model)
    prepared = prepare(model, "random", restore_from="evicted")
    asked = random_ids(QUESTION, 1)

    def measure():
        cache = prepared.with_restore_cache(adapter).evict(0.4, 1)
        return read_question(model, cache, asked).square().mean()

    with torch.enable_grad():
        measure().backward()
    slope = adapter.embeddings.grad[0].clone()
    # A shorter step would be lost in the rounding of layers that compute in float32, and a longer
    # one leave the neighborhood in which the loss is straight.
    step = min(5e-5 / float(slope.norm()), 0.01)
    moved = step * slope / slope.norm()
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            adapter.embeddings[0] += sign * moved
            ends.append(float(measure()))
            adapter.embeddings[0] -= sign * moved
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(slope.norm()), rel=1e-2)


@pytest.mark.parametrize("kind", [*GEMMAS, *WITH_STATES[:1]])
def test_8_bits_hold_what_is_evicted_and_not_the_windows(kind):
    model = build_hybrid(kind)
    asked = random_ids(QUESTION, 1)
    cache = prepare(model).evict(0.5)
    with torch.no_grad():
        before = read_question(model, cache, asked)
        attention.quantize_context(cache, "int8", CacheShape.from_model(model).groups)
        after = read_question(model, cache, asked)
    assert all(layer.context_keys.dtype == torch.float32 for layer in cache.sliding)
    assert 0 < measure_error(after, before.double()) < 0.2


def test_a_model_with_a_window_in_every_layer_is_used_within_it():
    model = decoders.build("mistral", sliding_window=WINDOW)
    assert CacheShape.from_model(model).layers == decoders.LAYERS
    with pytest.raises(ModelError, match="every layer sees at most 16 positions"):
        prepare(model)


@pytest.mark.parametrize("window", [2, 5, 11])
def test_windows_may_be_shorter_than_the_texts_of_the_probe(window):
    model = decoders.build(
        "qwen3", layer_types=MIXED, sliding_window=window, use_sliding_window=True
    )
    context = make_context()
    asked = random_ids(QUESTION, 1)
    cache = prepare(model, "snapkv:window=24", context).evict(0.3)
    whole = torch.cat([context.ids, asked], -1)
    rows = [(TEXT, whole.shape[-1], cache.mark_held(TEXT))]
    expected = dense_logits(model, whole, rows)[:, TEXT:]
    with torch.no_grad():
        assert measure_error(read_question(model, cache, asked), expected) < CLOSE


def test_a_window_that_a_mask_does_not_show_is_refused():
    model = build_hybrid("qwen3")
    model.model.layers[0].self_attn.sliding_window = WINDOW + 1
    model.config.name = "another config, which is probed anew"
    with pytest.raises(ModelError, match="a different window"):
        get_support(model)


@pytest.mark.parametrize("kind", mark_alike([*GEMMAS, *WITH_STATES]))
def test_threads_share_one_cache(kind):
    model = build_hybrid(kind)
    cache = prepare(model).evict(0.4)
    asked = [random_ids(length, length) for length in (3, 9, 20, 33)]
    alone = [
        decoding.generate_ids(model, TOKENIZER, cache, [each], 12)[0].tolist() for each in asked
    ]
    found: dict[int, list[int]] = {}

    def ask(number):
        found[number] = decoding.generate_ids(model, TOKENIZER, cache, [asked[number]], 12)[
            0
        ].tolist()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [found[number] for number in range(4)] == alone


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_plain_cache_has_no_states(kind):
    cache = prepare(build_hybrid(kind), allocation="per-head").evict(0.5)
    with pytest.raises(RestoreKVError, match="no layers with states"):
        cache.to_dynamic_cache()


@pytest.mark.parametrize("kind", WITH_STATES)
def test_beams_and_rows_have_states_of_their_own(kind):
    model = build_hybrid(kind)
    plain = exactness.plain_copy(model)
    cache = prepare(model).evict(1)
    ids = torch.cat([make_context().ids, random_ids(9, 1)], -1)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    several = {"num_beams": 3, "num_return_sequences": 2}
    wanted = plain.generate(ids, **several, **options)
    found = model.generate(ids, past_key_values=cache.fork(3), **several, **options)
    assert found.equal(wanted)
    rows = torch.cat([ids, torch.cat([ids[:, :-1], random_ids(1, 3)], -1)])
    wanted = plain.generate(rows, **options)
    assert model.generate(rows, past_key_values=cache.fork(2), **options).equal(wanted)
    with pytest.raises(RestoreKVError, match="do not follow what the cache has seen"):
        model.generate(ids, past_key_values=cache.fork(), use_cache=False, **options)


@pytest.mark.parametrize("kind", WITH_STATES)
def test_padding_that_is_fed_alone_is_refused(kind):
    """A pass of one token reads its padding into the states as a longer one does."""
    model = build_hybrid(kind)
    cache = prepare(model).evict(0.5).fork(2)
    rows = torch.cat([random_ids(1, 1), random_ids(1, 2)])
    seen = torch.ones(2, TEXT + 1, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=rows, attention_mask=seen, past_key_values=cache, use_cache=True)
        seen = torch.cat([seen, torch.tensor([[0], [1]])], -1)
        with pytest.raises(ModelError, match="Rows with padding"):
            model(input_ids=rows, attention_mask=seen, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_copied_state_is_not_written_into(kind):
    """A step of one token writes into the states of some models."""
    model = build_hybrid(kind)
    cache = prepare(model).evict(0.5)
    before = [tensor.clone() for layer in cache.with_states for tensor in layer.list_tensors()]
    for _ in range(2):
        decoding.generate_ids(model, TOKENIZER, cache, [random_ids(1, 1), random_ids(7, 2)], 5)
        model.generate(
            torch.cat([make_context().ids, random_ids(1, 1)], -1),
            past_key_values=cache.fork(),
            max_new_tokens=5,
        )
    after = [tensor for layer in cache.with_states for tensor in layer.list_tensors()]
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


@pytest.mark.skipif(not WITH_STATES, reason="each class keeps states in its own way")
def test_models_that_continue_a_text_otherwise_are_refused():
    """Jamba reads several tokens after a state as if there were none; Bamba numbers them from 0."""
    with pytest.raises(ModelError, match="other states in parts than at once"):
        prepare(decoders.build("jamba"))
    with pytest.raises(ModelError, match="numbers the tokens after those in its cache from 0"):
        prepare(decoders.build("bamba"))
    with pytest.raises(ModelError, match="has no layers with keys and values"):
        prepare(decoders.build("mamba2"))


def test_what_a_plain_cache_cannot_be_is_refused():
    cache = prepare(build_hybrid("qwen3"), allocation="per-head").evict(0.5)
    with pytest.raises(RestoreKVError, match="no layers with a sliding window"):
        cache.to_dynamic_cache()
    assert isinstance(cache, RaggedCache) and isinstance(cache.layers[0], SlidingLayer)
