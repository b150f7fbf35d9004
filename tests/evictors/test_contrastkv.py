"""ContrastKV: signals from attention written out in float64, fusions as loops over layers, heads
and columns.
"""

import bisect
import copy
from itertools import chain

import pytest
import torch

from restorekv import evictors
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors.contrastkv import ContrastKV, ContrastKVSimple
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context
from tests.helpers.models import build_model
from tests.helpers.scoring import TEXT, assert_relative, projected, repeat_ids

NAMES = ["contrastkv", "contrastkv-simple"]


@pytest.fixture
def context(tiny_tokenizer):
    return make_context(tiny_tokenizer, TEXT * 2)


def looked_at(model, context, chunk, passes):
    """(L, H, T) float64: the most that any row of a chunk's pass, on top of the context, looks at
    each column.
    """
    model = copy.deepcopy(model).double()
    heads = model.config.num_key_value_heads
    groups, positions = model.config.num_attention_heads // heads, context.num_tokens
    signal = torch.zeros(
        model.config.num_hidden_layers, heads, context.text_tokens, dtype=torch.float64
    )
    for ids, start in zip(passes, range(context.prefix_length, positions, chunk), strict=True):
        end, sinks = min(start + chunk, positions), min(4, start)
        columns = [*range(sinks), *range(start, end), *range(positions, positions + ids.shape[1])]
        for layer, (_, query, key, _) in enumerate(
            projected(model, torch.cat([context.ids, ids], 1))
        ):
            for number in range(len(query)):
                logits = (
                    query[number, positions:]
                    @ key[number // groups, columns].T
                    / query.shape[-1] ** 0.5
                )
                hidden = torch.tensor(
                    [[c > positions + row for c in columns] for row in range(ids.shape[1])]
                )
                weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)[
                    :, sinks : sinks + end - start
                ]
                part = signal[
                    layer,
                    number // groups,
                    start - context.prefix_length : end - context.prefix_length,
                ]
                part.copy_(torch.maximum(part, weights.amax(0)))
    return signal


def quantile(values, level):
    ordered, place = sorted(values), level * (len(values) - 1)
    above = ordered[min(int(place) + 1, len(ordered) - 1)]
    return ordered[int(place)] + (place - int(place)) * (above - ordered[int(place)])


def paper_bump(positive, negative, gamma):
    lowest, highest = min(negative), max(negative)
    return [
        gamma * (value - lowest) / (highest - lowest) if highest > lowest else 0.0
        for value in negative
    ]


def simple_bump(positive, negative, gamma):
    ordered, median, top = sorted(negative), quantile(positive, 0.5), quantile(negative, 0.8)
    span = max(positive) - min(positive)
    bumps = []
    for look, value in zip(positive, negative, strict=True):
        rank = bisect.bisect_left(ordered, value) / (len(ordered) - 1) if len(ordered) > 1 else 0.0
        bumps.append(gamma * span * rank if look >= median and value >= top else 0.0)
    return bumps


def fused(positive, negative, bump, beta=0.10, gamma=0.12):
    """Both levels, number by number, on the signals in double precision."""
    result = torch.zeros(positive.shape, dtype=torch.float64)
    for layer, (plus, minus) in enumerate(zip(positive.tolist(), negative.tolist(), strict=True)):
        flat = [*chain(*plus)]
        bumps = bump(flat, [*chain(*minus)], gamma)
        for head, (looks, noises) in enumerate(zip(plus, minus, strict=True)):
            limits = [quantile(row, level) for level in (1 - beta, beta) for row in (looks, noises)]
            for column, (look, noise) in enumerate(zip(looks, noises, strict=True)):
                if look >= limits[0] and noise >= limits[1]:
                    score = 1.0
                elif look <= limits[2] and noise <= limits[3]:
                    score = 0.0
                else:
                    score = min(look + bumps[head * len(looks) + column], max(flat))
                result[layer, head, column] = score
    return result


BUMPS = {"contrastkv": paper_bump, "contrastkv-simple": simple_bump}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1000, 37])
def test_signals_equal_the_definition(tiny_model, tiny_tokenizer, context, name, chunk):
    evictor = evictors.make_evictor(f"{name}:chunk={chunk},noise=20,seed=5")
    positive, negative = evictor.collect_signals(
        tiny_model, tiny_tokenizer, context, prefill(tiny_model, context.ids)
    )
    assert positive.dtype == negative.dtype == torch.float32
    generator, first = torch.Generator().manual_seed(5), 5 if name == "contrastkv-simple" else 0
    starts = range(context.prefix_length, context.num_tokens, chunk)
    noise = [
        torch.randint(first, len(tiny_tokenizer), (1, 20), generator=generator) for _ in starts
    ]
    spans = [(start, min(start + chunk, context.num_tokens)) for start in starts]
    if name == "contrastkv":
        passes = [
            repeat_ids(tiny_tokenizer, context, *span, span[0] == context.prefix_length)
            for span in spans
        ]
    else:
        passes = [context.ids[:, start:end] for start, end in spans]
    assert_relative(positive, looked_at(tiny_model, context, chunk, passes), 2e-4)
    assert_relative(negative, looked_at(tiny_model, context, chunk, noise), 2e-4)


def test_the_papers_positive_signal_is_kvzip(tiny_model, tiny_tokenizer, context):
    full = prefill(tiny_model, context.ids)
    positive, _ = ContrastKV(chunk=30).collect_signals(tiny_model, tiny_tokenizer, context, full)
    assert positive.equal(
        evictors.make_evictor("kvzip:chunk=30").score(tiny_model, tiny_tokenizer, context, full)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.25, "gamma": 0.7}, {"beta": 0.0}, {"beta": 0.5, "gamma": 0.0}]
)
def test_scores_are_the_fused_signals(tiny_model, tiny_tokenizer, context, name, settings):
    full, evictor = prefill(tiny_model, context.ids), evictors.EVICTORS[name](chunk=40, **settings)
    signals = evictor.collect_signals(tiny_model, tiny_tokenizer, context, full)
    scores = evictor.score(tiny_model, tiny_tokenizer, context, full)
    assert scores.dtype == torch.float32
    exact = fused(*signals, BUMPS[name], **settings)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-6, atol=1e-7)
    if not settings:
        assert all((scores == forced).any() for forced in (0.0, 1.0)), (
            "the head level decided nothing"
        )
        undecided = (scores > 0) & (scores < 1)
        assert (scores - signals[0])[undecided].max() > 0.01, "the layer level lifted nothing"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ties", [False, True])
def test_fusion_of_long_signals(name, ties):
    generator = torch.Generator().manual_seed(0)
    positive, negative = torch.rand(2, 2, 3, 501, generator=generator) ** 3
    if ties:  # as bfloat16 models give
        positive, negative = positive.mul(16).round() / 16, negative.mul(8).round() / 8
    scores = evictors.make_evictor(name).fuse_signals(positive, negative)
    torch.testing.assert_close(
        scores.double(), fused(positive, negative, BUMPS[name]), rtol=1e-6, atol=1e-7
    )


def ramp():
    """One layer and head with S+ = 0.1 .. 0.9 over 81 columns."""
    return torch.linspace(0.1, 0.9, 81).view(1, 1, -1)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_level_forces_what_both_signals_agree_on(name):
    evictor, positive = evictors.make_evictor(name), ramp()
    agreeing, opposed = (
        evictor.fuse_signals(positive, positive / 2),
        evictor.fuse_signals(positive, positive.flip(-1) / 2),
    )
    assert agreeing[0, 0, :9].eq(0).all() and agreeing[0, 0, 9:72].ne(0).all()
    assert agreeing[0, 0, 72:].eq(1).all() and agreeing[0, 0, :72].ne(1).all()
    assert opposed.ne(0).all() and opposed.ne(1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_bump_ends_at_the_highest_positive_signal(name):
    positive, negative = ramp(), torch.zeros(1, 1, 81)
    negative[..., 70] = 1
    scores = evictors.EVICTORS[name](beta=0.0, gamma=0.5).fuse_signals(positive, negative)
    assert scores[0, 0, 70] == positive.max() < 1
    assert scores[0, 0, 1:70].equal(positive[0, 0, 1:70])
    small = (
        evictors.EVICTORS[name](beta=0.0, gamma=0.01).fuse_signals(positive, negative)[0, 0, 70]
        - positive[0, 0, 70]
    )
    assert float(small) == pytest.approx(0.01 if name == "contrastkv" else 0.01 * 0.8, rel=1e-4)


def test_quantiles_are_of_a_head_and_bumps_of_a_layer():
    """Scaling one head moves its own limits only; its S- sets the range for the other heads of the
    layer.
    """
    positive = torch.cat([ramp(), ramp()], 1).repeat(2, 1, 1)
    negative = positive.flip(-1).clone()
    plain = ContrastKV().fuse_signals(positive, negative)
    negative[0, 0] *= 10
    scaled = ContrastKV().fuse_signals(positive, negative)
    assert scaled[1].equal(plain[1])
    assert ((scaled == 1) == (plain == 1)).all()
    middle = slice(20, 60)
    assert (scaled[0, 1, middle] < plain[0, 1, middle]).all()


@pytest.mark.parametrize("name", NAMES)
def test_degenerate_signals(name):
    evictor = evictors.make_evictor(name)
    for shape in [(1, 1, 1), (3, 2, 1), (2, 2, 2), (2, 2, 50)]:
        generator = torch.Generator().manual_seed(0)
        varied, flat = torch.rand(shape, generator=generator), torch.full(shape, 0.25)
        for signals in [
            (varied, flat),
            (flat, varied),
            (flat, flat),
            (0 * flat, 0 * flat),
            (varied, varied * 1e-44),
        ]:
            scores = evictor.fuse_signals(*signals)
            assert scores.isfinite().all() and scores.min() >= 0 and scores.max() <= 1
            if shape[-1] == 1 or signals[0] is flat is signals[1]:
                assert scores.eq(1).all()
            if signals[0] is varied and signals[1] is flat and shape[-1] == 50:
                undecided = (scores > 0) & (scores < 1)
                assert undecided.any() and scores[undecided].equal(varied[undecided])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "chunk"), [(1, 2000), (7, 2000), (7, 3), (4, 1)])
def test_short_contexts_and_chunks_of_one_token(tiny_tokenizer, name, length, chunk):
    model = build_model("qwen3")
    ids = torch.randint(3, 300, (1, 2 + length), generator=torch.Generator().manual_seed(1))
    context = Context(ids, 2, ids[:, :1])
    scores = evictors.make_evictor(f"{name}:chunk={chunk}").score(
        model, tiny_tokenizer, context, prefill(model, ids)
    )
    assert scores.shape == (3, 2, length) and scores.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_the_bits(tiny_tokenizer, context, name):
    model = build_model("qwen3")
    full, before = prefill(model, context.ids), torch.get_rng_state()
    runs = []
    for spec in (f"{name}:chunk=50", f"{name}:chunk=50,seed=3", f"{name}:chunk=50"):
        runs.append(
            evictors.make_evictor(spec).collect_signals(model, tiny_tokenizer, context, full)
        )
        torch.rand(1)  # a global draw between the runs changes nothing
    (plus, minus), (other_plus, other_minus), again = runs
    assert plus.equal(again[0]) and minus.equal(again[1])
    assert plus.equal(other_plus) and not minus.equal(other_minus)
    torch.set_rng_state(before)
    evictors.make_evictor(name).score(model, tiny_tokenizer, context, full)
    assert torch.get_rng_state().equal(before)


def test_noise_is_fresh_in_every_chunk_and_of_the_vocabulary(monkeypatch, tiny_tokenizer, context):
    model, seen = build_model("llama"), []
    monkeypatch.setattr(
        ContrastKV,
        "collect_maxima",
        lambda self, model, context, full, passes: seen.append(list(passes)),
    )
    for evictor, lowest in (
        (ContrastKV(chunk=1, noise=128), 0),
        (ContrastKVSimple(chunk=1, noise=128), 5),
    ):
        seen.clear()
        evictor.collect_signals(model, tiny_tokenizer, context, None)
        positive, noise = seen
        assert [(part.start, part.end) for part in noise] == [
            (part.start, part.end) for part in positive
        ]
        ids = torch.cat([part.ids for part in noise])
        assert ids.shape == (context.text_tokens, 128) and len(ids.unique(dim=0)) == len(ids)
        assert ids.unique().tolist() == list(range(lowest, len(tiny_tokenizer)))


@pytest.mark.parametrize("name", NAMES)
def test_scoring_leaves_the_cache_alone(tiny_model, tiny_tokenizer, context, name):
    full = prefill(tiny_model, context.ids)
    held = [(layer.keys, layer.values) for layer in full.layers]
    copies = [(keys.clone(), values.clone()) for keys, values in held]
    evictors.make_evictor(f"{name}:chunk=30").score(tiny_model, tiny_tokenizer, context, full)
    for layer, kept, copied in zip(full.layers, held, copies, strict=True):
        assert layer.keys is kept[0] and layer.values is kept[1]
        assert layer.keys.equal(copied[0]) and layer.values.equal(copied[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["free", "counted"])
def test_end_to_end_with_exact_pairs(tiny_model, tiny_tokenizer, context, name, policy):
    eviction = Eviction.make(f"{name}:chunk=40", prefix_policy=policy)
    prepared = eviction.prepare(tiny_model, tiny_tokenizer, context)
    cache = prepared.evict(0.2)
    columns = context.text_tokens if policy == "free" else context.num_tokens
    counted = cache.pairs_held - (
        cache.count_prefix_pairs(context.prefix_length) if policy == "free" else 0
    )
    assert counted == columns * 3 * 2 // 5


def test_specs():
    assert evictors.make_evictor("contrastkv:beta=0.2,seed=3") == ContrastKV(beta=0.2, seed=3)
    assert evictors.make_evictor("contrastkv-simple") == ContrastKVSimple(
        chunk=2000, noise=64, beta=0.1, gamma=0.12
    )
    assert evictors.make_evictor("contrastkv").chunk == 2048
    assert evictors.make_evictor("contrastkv:beta=0.2,seed=3").spec == "contrastkv:seed=3,beta=0.2"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "setting",
    [
        "noise=0",
        "noise=129",
        "beta=0.6",
        "beta=-0.1",
        "beta=nan",
        "gamma=-1",
        "gamma=inf",
        "chunk=0",
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(name, setting):
    with pytest.raises(RestoreKVError) as refused:
        evictors.make_evictor(f"{name}:{setting}")
    assert str(refused.value).startswith(f"{name} takes ") and str(refused.value).endswith(".")
    assert str(refused.value).count(". ") == 0


def test_a_negative_seed_is_refused():
    with pytest.raises(RestoreKVError, match="seed from 0"):
        ContrastKV(seed=-1)
