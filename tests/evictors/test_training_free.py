"""The training-free evictors against float64 oracles, from one dense pass of transformers' own
eager attention.
"""

import copy
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GraniteConfig, GraniteForCausalLM

from restorekv import evictors
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.model import attention
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from tests.helpers.hybrids import WITH_STATES, build_hybrid
from tests.helpers.models import build_model

T = 61
NAMES = ["expected_attention", "keydiff", "knorm", "streaming", "tova", "random"]
SPECS = [name.replace("_", "-") for name in NAMES]


def make_context(length=T, prefix=3, seed=1):
    ids = torch.randint(3, 320, (1, prefix + length), generator=torch.Generator().manual_seed(seed))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def score(spec, model, context, chunk=4096):
    evictor = evictors.make_evictor(spec)
    observer = evictor.make_observer(model, context)
    if observer is None:
        return evictor.score(model, None, context, prefill(model, context.ids, chunk))
    with observe_layers(model, observer.on_layer):
        full = prefill(model, context.ids, chunk)
    return evictor.score(model, None, context, full, observer)


class Dense:
    """Per layer in float64: keys and values (H, K, D), attention (H * G, K, K), queries before RoPE
    (H * G, K, D).
    """

    def __init__(self, model, context):
        model = copy.deepcopy(model).double()
        model.set_attn_implementation("eager")
        self.queries, cache = [], DynamicCache()

        def keep(module, args, output):
            self.queries.append(
                output.view(context.num_tokens, -1, model.config.head_dim).transpose(0, 1)
            )

        for layer in model.model.layers:
            getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj).register_forward_hook(keep)
        with torch.no_grad():
            out = model.model(context.ids, past_key_values=cache, output_attentions=True)
        self.attention = [weights[0] for weights in out.attentions]
        self.keys = [layer.keys[0] for layer in cache.layers]
        self.values = [layer.values[0] for layer in cache.layers]
        self.theta = model.config.rope_parameters["rope_theta"]


def mean_rotation(dim, theta, positions):
    """The D x D rotation of `rotate_half` RoPE, built entry by entry and averaged over
    positions.
    """
    total = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim // 2):
        angles = [position * theta ** (-2 * i / dim) for position in positions]
        cos, sin = (sum(map(f, angles)) / len(angles) for f in (math.cos, math.sin))
        j = i + dim // 2
        total[i, i] = total[j, j] = cos
        total[i, j], total[j, i] = -sin, sin
    return total


def expected(
    dense, context, sinks=4, future=512, covariance=True, values=True, epsilon=0.0, scale=None
):
    """(L, H, S + T), zero in the first `sinks` columns."""
    ahead, result = range(context.num_tokens, context.num_tokens + future), []
    for keys, value, queries in zip(dense.keys, dense.values, dense.queries, strict=True):
        heads, _, dim = keys.shape
        rotation, scores = (
            mean_rotation(dim, dense.theta, ahead),
            torch.zeros(keys.shape[:2], dtype=torch.float64),
        )
        for head in range(heads):
            shares = []
            for query in queries.view(heads, -1, *queries.shape[1:])[head]:
                past = query[sinks:] @ rotation.T
                factor = scale or dim**-0.5
                logits = keys[head, sinks:] @ past.mean(0) * factor
                if covariance:
                    spread = torch.cov(past.T, correction=0)
                    spreads = torch.stack([k @ spread @ k for k in keys[head, sinks:]])
                    logits += spreads * factor**2 / 2
                shares.append(logits.exp() / logits.exp().sum())
            looked = sum(shares) / len(shares)
            scores[head, sinks:] = (
                (looked + epsilon) * value[head, sinks:].norm(dim=-1) if values else looked
            )
        result.append(scores)
    return torch.stack(result)


def pinned(scores, columns):
    """Whether these columns of (L, H, T), and no others, are above all the rest of the tensor, in
    falling order.
    """
    columns = list(columns)
    others = [i for i in range(scores.shape[-1]) if i not in columns]
    above = not columns or not others or scores[..., columns].min() > scores[..., others].max()
    return bool(above and (scores[..., columns].diff() < 0).all()), others


CHANGES = [
    {},
    {"sinks": 0, "future": 1},
    {"covariance": False, "epsilon": 0.01},
    {"values": False, "epsilon": 0.5},
    {"sinks": 9, "future": 3, "epsilon": 0.02},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prefix", [0, 3, 6])
def test_expected_attention(tiny_model, prefix, change):
    context = make_context(prefix=prefix)
    settings = ",".join(f"{name}={str(value).lower()}" for name, value in change.items())
    found = score(f"expected-attention:{settings}", tiny_model, context).double()
    sinks = range(max(change.get("sinks", 4) - prefix, 0))
    above, others = pinned(found, sinks)
    exact = expected(Dense(tiny_model, context), context, **change)[..., prefix:]
    assert above
    torch.testing.assert_close(found[..., others], exact[..., others], rtol=2e-4, atol=0)


@pytest.mark.parametrize("chunk", [20, 5, 1])
def test_expected_attention_of_a_chunked_prefill(tiny_model, chunk):
    context = make_context()
    whole, parts = (
        score("expected-attention", tiny_model, context, size) for size in (4096, chunk)
    )
    torch.testing.assert_close(parts, whole, rtol=2e-4, atol=0)


def test_the_covariance_stands_a_large_mean():
    """With a common offset of 1e3 raw sums of squares would lose the spread of 1 in float32;
    deviations keep it.
    """
    model, context = build_model("llama"), make_context(400, 0)
    moments = evictors.make_evictor("expected-attention").make_observer(model, context)
    shape, generator = CacheShape.from_model(model), torch.Generator().manual_seed(0)
    hidden = torch.randn(400, shape.hidden, generator=generator)
    projection = model.model.layers[0].self_attn.q_proj
    projection.bias = torch.nn.Parameter(
        torch.full((projection.out_features,), 1e3), requires_grad=False
    )
    queries = (hidden.double() @ projection.weight.double().T + 1e3).unflatten(
        -1, (shape.heads, shape.groups, -1)
    )

    class View:
        layer, module, scale = 0, model.model.layers[0].self_attn, shape.head_dim**-0.5
        rotation = sinks = None

    for start in range(0, 400, 50):
        view = View()
        view.hidden, view.key = (
            hidden[start : start + 50],
            torch.zeros(shape.heads, start + 50, shape.head_dim),
        )
        view.query = queries[start : start + 50].permute(1, 2, 0, 3).float()
        moments.on_layer(view)
    spread = torch.cov(queries[4:, 0, 0].T, correction=0)
    assert moments.count[0] == 396
    torch.testing.assert_close(moments.spread[0, 0, 0].double() / 396, spread, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("prefix", [0, 3, 6])
@pytest.mark.parametrize("chunk", [4096, 20])
def test_keydiff_knorm_and_tova(tiny_model, prefix, chunk):
    context = make_context(prefix=prefix)
    dense = Dense(tiny_model, context)
    exact = {"knorm": [], "keydiff": [], "tova": []}
    for keys, weights in zip(dense.keys, dense.attention, strict=True):
        norms = (keys * keys).sum(-1).sqrt()
        anchor = (keys / norms[..., None]).mean(1)
        exact["knorm"].append(-norms)
        exact["keydiff"].append(
            -torch.einsum("hkd,hd->hk", keys, anchor) / norms / anchor.norm(dim=-1)[:, None]
        )
        exact["tova"].append(weights[:, -1].mean(0).expand(len(keys), -1))
    for name, layers in exact.items():
        found, wanted = (
            score(name, tiny_model, context, chunk).double(),
            torch.stack(layers)[..., prefix:],
        )
        if name == "tova":
            assert pinned(found, [context.text_tokens - 1])[0]
            found, wanted = found[..., :-1], wanted[..., :-1]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_scores_use_the_scale_of_the_model():
    """Granite multiplies its logits by a number of its config; sqrt(D) would be another softmax."""
    torch.manual_seed(0)
    sizes = vars(build_model("llama").config)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = GraniteConfig(
        vocab_size=320,
        intermediate_size=48,
        attention_multiplier=1.7,
        **{name: sizes[name] for name in names},
    )
    config.head_dim = config.hidden_size // config.num_attention_heads
    model = GraniteForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:  # queries and keys large enough for a softmax that is not flat
        layer.self_attn.q_proj.weight *= 20
        layer.self_attn.k_proj.weight *= 20
    context = make_context()
    dense = Dense(model, context)
    attention.install_attention(model)
    heads = CacheShape.from_model(model).heads

    last = torch.stack([weights[:, -1].mean(0).expand(heads, -1) for weights in dense.attention])
    found = score("tova", model, context)[..., :-1].double()
    torch.testing.assert_close(found, last[..., 3:-1], rtol=1e-4, atol=1e-6)

    window = torch.stack(
        [weights[:, -5:].mean(1).view(heads, -1, T + 3).mean(1) for weights in dense.attention]
    )
    found = score("snapkv:window=5,kernel=1", model, context)[..., :-5].double()
    torch.testing.assert_close(found, window[..., 3:-5], rtol=1e-4, atol=1e-6)

    exact = expected(dense, context, scale=1.7)[..., 4:]
    found = score("expected-attention", model, context)[..., 1:].double()
    torch.testing.assert_close(found, exact, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize("sinks", [0, 4, 8])
@pytest.mark.parametrize("prefix", [0, 3, 6])
def test_streaming_keeps_sinks_then_the_latest(tiny_model, prefix, sinks):
    prepared = Eviction.make(f"streaming:sinks={sinks}").prepare(
        tiny_model, None, make_context(prefix=prefix)
    )
    layers, heads, _ = prepared.scores.shape
    first = max(sinks - prefix, 0)
    for count in (0, 1, first, first + 1, 20, T):
        keep = prepared.config.allocation(prepared.competing_scores(), count * layers * heads)
        wanted = {*range(min(first, count)), *range(T - max(count - first, 0), T)}
        assert all(set(head.nonzero().flatten().tolist()) == wanted for head in keep.flatten(0, 1))


def test_random_is_drawn_from_the_seed_and_the_context():
    model, context = build_model("qwen3"), make_context()
    before = torch.get_rng_state()
    one, again = (score("random", model, context) for _ in range(2))
    assert one.equal(again) and torch.get_rng_state().equal(before)
    others = [score("random:seed=1", model, context), score("random", model, make_context(seed=2))]
    assert len({tuple(scores.flatten().tolist()) for scores in (one, *others)}) == 3
    assert (
        abs(float(one.mean()) - 0.5) < 0.1
        and one.min() >= 0
        and one.max() < 1
        and not one[0].equal(one[1])
    )


@pytest.mark.parametrize("spec", SPECS)
def test_the_default_dtype_of_pytorch_changes_nothing(spec):
    """Code that loads models often sets it."""
    model, context = build_model("llama"), make_context()
    expected = score(spec, model, context)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert score(spec, model, context).equal(expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_in_float64(spec):
    model, context = build_model("llama"), make_context()
    expected = score(spec, model, context)
    found = score(spec, model.double(), context)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("prefix", [0, 3, 6])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_small_contexts(spec, length, prefix):
    model, context = build_model("llama"), make_context(length, prefix)
    shape, scores = CacheShape.from_model(model), score(spec, model, context)
    assert scores.shape == (shape.layers, shape.heads, length) and scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_from_the_model_to_a_cache(tiny_model, spec):
    """Determinism, any ratio, and a cache that scoring leaves as it was; bfloat16 scores are finite
    float32.
    """
    context, eviction = make_context(), Eviction.make(spec)
    prepared, again = (eviction.prepare(tiny_model, None, context) for _ in range(2))
    plain = prefill(tiny_model, context.ids)
    assert prepared.scores.equal(again.scores)
    assert all(
        mine.keys.equal(its.keys)
        for mine, its in zip(prepared.full.layers, plain.layers, strict=True)
    )
    for ratio in ("0.2", "1"):
        assert (
            prepared.evict(ratio).pairs_held
            == prepared.make_budget(ratio).pairs + 3 * 2 * context.prefix_length
        )
    rough = eviction.prepare(tiny_model.bfloat16(), None, context).scores
    assert rough.dtype == torch.float32 and rough.isfinite().all()


@pytest.mark.parametrize(
    "setting", ["epsilon=nan", "epsilon=inf", "epsilon=-1", "future=0", "sinks=-1", "eps=1"]
)
def test_wrong_settings_are_refused(setting):
    with pytest.raises(RestoreKVError):
        evictors.make_evictor(f"expected-attention:{setting}")


@pytest.mark.parametrize(
    "spec", ["streaming:sinks=-1", "random:seed=4294967296", "knorm:sinks=4", "tova:window=1"]
)
def test_other_wrong_settings_are_refused(spec):
    with pytest.raises(RestoreKVError):
        evictors.make_evictor(spec)


def test_a_model_without_q_proj_is_refused():
    model = build_model("llama")
    del model.model.layers[1].self_attn.q_proj
    with pytest.raises(RestoreKVError, match="q_proj"):
        evictors.make_evictor("expected-attention").make_observer(model, make_context())


@pytest.mark.parametrize("press", ["KnormPress", object()])
def test_without_kvpress_the_bridge_says_what_to_install(monkeypatch, press):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(RestoreKVError, match=r"pip install kvpress==0\.5\.5"):
        FromKVPress(press)


@dataclass
class KeyLengthPress:
    """A press as kvpress writes them, which scores a pair by minus the length of its key."""

    compression_ratio: float = 0.0

    def post_init_from_model(self, model):
        pass

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_bridge_scores_with_a_press(monkeypatch, family):
    """Runs without kvpress too, whose own presses tests/conformance has."""
    monkeypatch.setitem(
        sys.modules,
        "kvpress",
        SimpleNamespace(ScorerPress=KeyLengthPress, KeyLengthPress=KeyLengthPress),
    )
    model = build_model(family)
    context = make_context()
    scores = FromKVPress(KeyLengthPress()).score(model, None, context, DynamicCache())
    full = DynamicCache()
    model(context.ids, past_key_values=full)
    expected = [-layer.keys[0, :, context.prefix_length :].norm(dim=-1) for layer in full.layers]
    assert torch.allclose(scores, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_press_scores_layers_beside_those_with_states(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(ScorerPress=KeyLengthPress))
    model = build_hybrid(kind)
    context = make_context()
    scores = FromKVPress(KeyLengthPress()).score(model, None, context, DynamicCache())
    assert torch.allclose(scores, score("knorm", model, context), atol=1e-5)


class EqualPress(KeyLengthPress):
    """What StreamingLLMPress computes without a compression_ratio."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.ones(keys.shape[:-1])


class OtherRotationPress(KeyLengthPress):
    """What ExpectedAttentionPress does with Gemma 3, which rotates in two ways."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AttributeError("'Gemma3RotaryEmbedding' object has no attribute 'None_inv_freq'")


class FetchingPress(KeyLengthPress):
    """What QFilterPress does without a network."""

    def post_init_from_model(self, model):
        raise OSError("We cannot find the file.\nCheck your connection.")


@pytest.mark.parametrize(
    ("press", "said"),
    [
        (EqualPress(), "the same score, .*:compression_ratio=0.9"),
        (OtherRotationPress(), "cannot score this context; .* 'None_inv_freq'"),
        (FetchingPress(), r"cannot score this context; .* \(We cannot find the file\)"),
    ],
)
def test_a_press_that_cannot_score_is_one_sentence(monkeypatch, press, said):
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(ScorerPress=KeyLengthPress))
    model = build_model("qwen3")
    with pytest.raises(RestoreKVError, match=said):
        FromKVPress(press).score(model, None, make_context(), DynamicCache())
    assert not model.model.layers[0].self_attn._forward_hooks
