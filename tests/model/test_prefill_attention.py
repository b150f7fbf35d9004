"""SnapKV and H2O against the attention matrix itself, in float64 from projections of this file's
own.
"""

import pytest
import torch
import torch.nn.functional as F

from restorekv import evictors
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import iterate_attention_blocks
from restorekv.model.attention import blocked
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from tests.helpers.models import build_model

S, T = 3, 75


def make_context(length=T, prefix=S):
    ids = torch.randint(3, 320, (1, prefix + length), generator=torch.Generator().manual_seed(1))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def matrices(model, context):
    """(L, H, G, S + T, S + T) float64: causal attention weights of one plain prefill in double
    precision.
    """
    found = {}

    def on_layer(view):
        logits = (
            view.query.double()
            @ view.key.double()[:, None].transpose(-1, -2)
            / view.query.shape[-1] ** 0.5
        )
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        found[view.layer] = logits.masked_fill(later, float("-inf")).softmax(-1)

    with observe_layers(model.double(), on_layer):
        prefill(model, context.ids)
    model.float()
    return torch.stack([found[layer] for layer in sorted(found)])


def score(spec, model, context, chunk=4096):
    evictor = evictors.make_evictor(spec)
    observer = evictor.make_observer(model, context)
    if observer is None:
        return evictor.score(model, None, context, prefill(model, context.ids, chunk), observer)
    with observe_layers(model, observer.on_layer):
        full = prefill(model, context.ids, chunk)
    return evictor.score(model, None, context, full, observer)


def reduced(weights, groups):
    return weights.amax(2) if groups == "max" else weights.mean(2)


@pytest.mark.parametrize("groups", ["max", "mean"])
@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize(("window", "kernel"), [(32, 7), (5, 1), (10, 3)])
def test_snapkv_is_the_windows_attention(tiny_model, window, kernel, pool, groups):
    context = make_context()
    found = score(
        f"snapkv:window={window},kernel={kernel},pool={pool},groups={groups}", tiny_model, context
    )
    looked = reduced(matrices(tiny_model, context)[..., -window:, S:-window].mean(-2), groups)
    smooth = {"max": F.max_pool1d, "avg": F.avg_pool1d}[pool](
        looked.flatten(0, 1), kernel, 1, kernel // 2
    )
    torch.testing.assert_close(
        found[..., :-window].double(), smooth.view_as(looked), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("length", [T, 33, 32, 10])
def test_the_window_always_stays(tiny_model, length, sinks):
    context = make_context(length)
    prepared = Eviction.make(f"snapkv:sinks={sinks}").prepare(tiny_model, None, context)
    layers, heads, tokens = prepared.scores.shape
    window, first = min(32, tokens), min(sinks, max(tokens - 32, 0))
    keep = prepared.config.allocation(
        prepared.competing_scores(), (window + first) * layers * heads
    )
    assert keep[..., tokens - window :].all() and keep[..., :first].all()
    assert int(keep.sum()) == (window + first) * layers * heads


def test_a_budget_below_the_window_keeps_its_end_in_every_head(tiny_model):
    prepared = Eviction.make("snapkv").prepare(tiny_model, None, make_context())
    layers, heads, _ = prepared.scores.shape
    keep = prepared.config.allocation(prepared.competing_scores(), 7 * layers * heads)
    assert keep[..., -7:].all() and int(keep.sum()) == 7 * layers * heads


@pytest.mark.parametrize("chunk", [4096, 20, 1])
@pytest.mark.parametrize("groups", ["max", "mean"])
@pytest.mark.parametrize("diagonal", [True, False])
def test_h2o_is_the_column_maximum(tiny_model, groups, diagonal, chunk):
    context = make_context()
    found = score(
        f"h2o:groups={groups},diagonal={str(diagonal).lower()}", tiny_model, context, chunk
    )
    weights = matrices(tiny_model, context)
    if not diagonal:
        weights = weights.clone()
        weights.diagonal(dim1=-2, dim2=-1).zero_()
    exact = reduced(weights.amax(-2), groups)[..., S:]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-7)


def test_blocks_of_any_size_are_the_same_rows(tiny_model):
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(2, 3, 11, 8, generator=generator),
        torch.randn(2, 30, 8, generator=generator),
    )
    [(low, high, whole)] = iterate_attention_blocks(query, key, 8**-0.5)
    assert (low, high) == (0, 11) and whole.sum(-1).allclose(torch.ones(2, 3, 11))
    for block in (1, 6 * 30 * 4):
        seen = 0
        for low, high, weights in iterate_attention_blocks(query, key, 8**-0.5, block):
            assert weights.shape[-1] == 30 - 11 + high and weights.numel() <= max(block, 6 * 30)
            torch.testing.assert_close(weights, whole[:, :, low:high, : weights.shape[-1]])
            seen += high - low
        assert seen == 11


def test_scoring_leaves_the_cache_alone(tiny_model):
    context = make_context()
    full = prefill(tiny_model, context.ids)
    before = [layer.keys.clone() for layer in full.layers]
    evictors.make_evictor("snapkv").score(tiny_model, None, context, full)
    assert all(layer.keys.equal(keys) for layer, keys in zip(full.layers, before, strict=True))


def test_no_square_matrix(monkeypatch):
    """Of 600 tokens H2O holds blocks of rows only, however large the context."""
    model, context = build_model("qwen3"), make_context(600)
    expected = score("h2o", model, context)
    largest, exp2 = [], torch.Tensor.exp2_
    monkeypatch.setattr(blocked, "BLOCK", 40_000)
    monkeypatch.setattr(torch.Tensor, "exp2_", lambda x: largest.append(x.numel()) or exp2(x))
    torch.testing.assert_close(score("h2o", model, context), expected)
    assert 20_000 < max(largest) <= 40_000 < 603 * 603


def test_h2o_leaves_the_prefill_alone(tiny_model):
    """It computes attention itself, and what it gives is what the model gives without it."""
    context, evictor = make_context(), evictors.make_evictor("h2o:diagonal=false")
    with observe_layers(tiny_model, evictor.make_observer(tiny_model, context).on_layer):
        watched = prefill(tiny_model, context.ids, 20)
    for ours, plain in zip(watched.layers, prefill(tiny_model, context.ids).layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, plain.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec", ["snapkv:window=0", "snapkv:kernel=4", "snapkv:pool=sum", "h2o:groups=min"]
)
def test_wrong_settings_are_refused(spec):
    with pytest.raises(RestoreKVError):
        evictors.make_evictor(spec)
