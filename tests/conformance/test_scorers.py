"""The training-free evictors and the bridge against the presses of kvpress 0.5.5, run by `make
conformance`.

Tiny random models in float32. Their scores are caught where kvpress hands them to its own top-k.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from restorekv import evictors
from restorekv.compression.allocate import mark_highest
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.generation.answers import answer_greedily
from restorekv.model import attention
from restorekv.model.prompt import Context
from tests.helpers.models import build_model

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make conformance` installs and uses it"
)
pytestmark = pytest.mark.kvpress

SNAPKV = "snapkv:window=64,kernel=5,pool=avg"
OURS = {  # spec: press, columns that stay whatever they score: from the front, from the back
    SNAPKV: (lambda: kvpress.SnapKVPress(0.5), 0, 64),
    "expected-attention": (lambda: kvpress.ExpectedAttentionPress(0.5), 4, 0),
    "expected-attention:sinks=2,future=9,epsilon=0.01": (
        lambda: kvpress.ExpectedAttentionPress(0.5, n_future_positions=9, n_sink=2, epsilon=0.01),
        2,
        0,
    ),
    "expected-attention:covariance=false,values=false": (
        lambda: kvpress.ExpectedAttentionPress(0.5, use_covariance=False, use_vnorm=False),
        4,
        0,
    ),
    "keydiff": (lambda: kvpress.KeyDiffPress(0.5), 0, 0),
    "knorm": (lambda: kvpress.KnormPress(0.5), 0, 0),
    "tova": (lambda: kvpress.TOVAPress(0.5), 0, 1),
}
BRIDGED = {
    "knorm": lambda: kvpress.KnormPress(0.5),
    "snapkv": lambda: kvpress.SnapKVPress(0.5, window_size=20),
    "expected attention": lambda: kvpress.ExpectedAttentionPress(0.5),
    "keydiff": lambda: kvpress.KeyDiffPress(0.5),
    "tova": lambda: kvpress.TOVAPress(0.5),
    "streaming": lambda: kvpress.StreamingLLMPress(0.5),
    "random": lambda: kvpress.RandomPress(0.5, seed=3),
    "lagkv": lambda: kvpress.LagKVPress(0.5, lag_size=16),
    "leverage": lambda: kvpress.LeverageScorePress(0.5),
    "non-causal": lambda: kvpress.NonCausalAttnPress(0.5),
    "compactor": lambda: kvpress.CompactorPress(0.5),
    "cur": lambda: kvpress.CURPress(0.5),
    "cap": lambda: kvpress.CapPress(0.5),
    "critical": lambda: kvpress.CriticalKVPress(kvpress.KnormPress(0.5)),
    "observed attention": lambda: kvpress.ObservedAttentionPress(0.5),
}
TEXT = (
    "The code of the red house is seven. Nobody lives in the blue house since May, and its door "
    "is open. " * 3
)


def make_context(length=150, prefix=0):
    ids = torch.randint(3, 320, (1, prefix + length), generator=torch.Generator().manual_seed(1))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def note(worst, model, kind, found, exact):
    """The largest relative error of any element; fails above 1e-4."""
    error = float(((found - exact).abs() / exact.abs().clamp_min(1e-30)).max())
    kind = f"{model.config.model_type} {kind} scores, relative"
    worst[kind] = max(worst.get(kind, 0.0), error)
    assert error <= 1e-4


def press_scores(press, model, context, implementation="sdpa"):
    """(L, H, S + T) from a prefill under the press's own context manager, in a model that is not
    ours.
    """
    model, seen, score = copy.deepcopy(model), [], press.score
    model.set_attn_implementation(implementation)
    press.score = lambda *args, **kwargs: seen.append(score(*args, **kwargs)) or seen[-1]
    torch.manual_seed(5)
    with torch.no_grad(), press(model):
        model.model(input_ids=context.ids, past_key_values=DynamicCache())
    del press.score
    return torch.cat(seen)


@pytest.mark.parametrize("spec", OURS)
@pytest.mark.parametrize("length", [66, 150, 700])
def test_scores(tiny_model, spec, length, worst):
    make, first, last = OURS[spec]
    context = make_context(length)
    found = Eviction.make(spec).prepare(tiny_model, None, context).scores
    exact = press_scores(make(), tiny_model, context)
    assert found.shape == exact.shape
    kept = torch.zeros(length, dtype=torch.bool)
    kept[:first], kept[length - last :] = True, True
    for scores in (found, exact):
        if kept.any():
            assert (scores[..., kept].amin(-1) > scores[..., ~kept].amax(-1)).all()
    note(worst, tiny_model, spec, found[..., ~kept], exact[..., ~kept])


@pytest.mark.parametrize("spec", OURS)
def test_a_prefix_changes_nothing(tiny_model, spec, worst):
    """Ours beside a prefix is kvpress's over the whole; but our SnapKV pools the context's columns
    alone.
    """
    make, _, last = OURS[spec]
    edge = 2 if spec == SNAPKV else 0
    context = make_context(prefix=6)
    found = Eviction.make(spec).prepare(tiny_model, None, context).scores
    exact = press_scores(make(), tiny_model, context)[..., 6:]
    free = slice(edge, context.text_tokens - last)
    note(worst, tiny_model, spec, found[..., free], exact[..., free])


def build_gemma3():
    """The class whose layers with a window kvpress leaves alone, with a small image encoder."""
    text = build_model("gemma3").config.to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision)
    model = Gemma3ForConditionalGeneration._from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):  # else every key has the same norm
            torch.nn.init.normal_(weight, std=0.3)
    return model.float().eval().requires_grad_(False)


@pytest.mark.parametrize("spec", OURS)
def test_gemma3_keeps_the_same_pairs(spec, worst):
    """kvpress, too, leaves layers with a window alone; the text is longer than the window."""
    model = build_gemma3()
    context = make_context()
    found = Eviction.make(spec, allocation="per-head").prepare(model, None, context)
    make, _, _ = OURS[spec]
    try:
        exact = press_scores(make(), model, context)
    except AttributeError as error:
        # kvpress 0.5.5 does not know that Gemma 3 rotates by kind of layer.
        assert "None_inv_freq" in str(error) and spec.startswith("expected-attention")
        pytest.skip("kvpress cannot score Gemma 3 with this press")
    assert found.scores.shape == exact.shape and len(exact) == 2
    ours = found.evict(0.5).mark_held(context.text_tokens)
    theirs = torch.zeros_like(ours)
    theirs.scatter_(-1, exact.topk(context.text_tokens // 2, dim=-1).indices, True)
    worst[f"gemma3 {spec}, pairs kept otherwise"] = int((ours != theirs).sum())
    assert ours.equal(theirs)


@pytest.mark.parametrize("compression", [0.0, 0.1, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("sinks", [0, 4])
def test_streaming_keeps_the_same_pairs(tiny_model, compression, sinks, worst):
    """kvpress's scores are ones and zeros for a single ratio; ours rank all columns."""
    context, press = make_context(), kvpress.StreamingLLMPress(max(compression, 1e-9), n_sink=sinks)
    exact = press_scores(press, tiny_model, context).bool()
    found = Eviction.make(f"streaming:sinks={sinks}").prepare(tiny_model, None, context).scores
    keep = mark_highest(found, int(exact.sum()))
    kind = f"{tiny_model.config.model_type} streaming, pairs kept otherwise"
    worst[kind] = worst.get(kind, 0) + int((keep != exact).sum())
    assert keep.equal(exact)


def bridged(press, model, context, eager=False):
    torch.manual_seed(5)
    return Eviction(FromKVPress(press, eager)).prepare(model, None, context).scores


@pytest.mark.parametrize("name", BRIDGED)
@pytest.mark.parametrize("prefix", [0, 6])
def test_the_bridge_hands_over_a_presss_own_scores(tiny_model, name, prefix, worst):
    context, eager = make_context(prefix=prefix), name == "observed attention"
    exact = press_scores(BRIDGED[name](), tiny_model, context, "eager" if eager else "sdpa")[
        ..., prefix:
    ]
    before = tiny_model(context.ids).logits
    found = bridged(BRIDGED[name](), tiny_model, context, eager)
    assert found.dtype == torch.float32
    note(worst, tiny_model, f"bridge, {name}", found, exact)
    assert tiny_model.config._attn_implementation == attention.NAME
    modules = [layer.self_attn for layer in tiny_model.model.layers]
    assert not any(hasattr(module, "rotary_emb") or module._forward_hooks for module in modules)
    assert tiny_model(context.ids).logits.equal(before)


@pytest.mark.parametrize(
    "name", ["knorm", "keydiff", "tova", "expected attention", "lagkv", "compactor"]
)
def test_the_bridge_from_text_to_answers(tiny_model, tiny_tokenizer, name):
    prepared = Eviction(FromKVPress(BRIDGED[name]())).prepare(tiny_model, tiny_tokenizer, TEXT)
    cache = prepared.evict(0.2)
    assert prepared.config.count_pairs(cache, prepared.context) == prepared.make_budget(0.2).pairs
    if (own := name.replace(" ", "-")) in evictors.EVICTORS:
        ours = Eviction.make(own).prepare(tiny_model, tiny_tokenizer, TEXT).evict(0.2)
        assert all(
            a.positions.equal(b.positions) for a, b in zip(cache.layers, ours.layers, strict=True)
        )
    assert answer_greedily(tiny_model, tiny_tokenizer, prepared.context, cache, ["Which code?"], 8)


def test_attention_is_the_same_under_kvpresss_wrapper(tiny_model, tiny_tokenizer, monkeypatch):
    """Importing kvpress wraps every attention function, ours included."""
    assert ALL_ATTENTION_FUNCTIONS[attention.NAME] is not attention.attend_layer

    def logits():
        prepared = Eviction.make("expected-attention").prepare(tiny_model, tiny_tokenizer, TEXT)
        return prepared.scores, tiny_model(
            prepared.context.ids[:, :7], past_key_values=prepared.evict(0.2).fork()
        ).logits

    wrapped = logits()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, attention.NAME, attention.attend_layer)
    assert all(with_it.equal(without) for with_it, without in zip(wrapped, logits(), strict=True))


def test_the_spec_of_a_press():
    spec = "kvpress:press=SnapKVPress:window_size=32;kernel_size=7"
    assert (
        evictors.make_evictor(spec).spec == FromKVPress(kvpress.SnapKVPress(0, 32, 7)).spec == spec
    )
    assert evictors.make_evictor(spec) == FromKVPress("SnapKVPress:window_size=32,kernel_size=7")
    assert (
        evictors.make_evictor(
            "kvpress:press=ExpectedAttentionPress:use_vnorm=false"
        ).scorer.use_vnorm
        is False
    )
    assert (
        FromKVPress(kvpress.CompactorPress(0.5)).spec
        == "kvpress:press=CompactorPress:compression_ratio=0.5"
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("kvpress", "use one of .*KnormPress"),
        ("kvpress:press=Nothing", "no press of kvpress 'Nothing'"),
        ("kvpress:press=AdaKVPress", "no press of kvpress"),
        ("kvpress:press=KnormPress:window=3", "no setting 'window=3'"),
        ("kvpress:press=KnormPress:compression_ratio=2", "between 0 and 1"),
        ("kvpress:press=CriticalKVPress", "in Python"),
    ],
)
def test_presses_that_cannot_be_made(spec, said):
    with pytest.raises(RestoreKVError, match=said):
        evictors.make_evictor(spec)


def test_presses_that_cannot_score(tiny_model):
    for press, length, said in [
        ("SnapKVPress", 30, "window size"),
        ("ObservedAttentionPress", 30, "eager"),
        ("StreamingLLMPress", 30, "compression_ratio=0.9"),
    ]:
        with pytest.raises(RestoreKVError, match=said):
            bridged(press, tiny_model, make_context(length))
    assert tiny_model.config._attn_implementation == attention.NAME
    assert not hasattr(tiny_model.model.layers[0].self_attn, "rotary_emb")
    with pytest.raises(RestoreKVError, match="ScorerPress"):
        FromKVPress(kvpress.AdaKVPress(kvpress.KnormPress()))
