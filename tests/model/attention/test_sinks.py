"""Learned sinks: one logit of each query head in every softmax, once, in whatever computes it.

The definition here is a softmax in float64 over the pairs and one more column, whose value is 0.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.cache import quantized
from restorekv.evictors import attend
from restorekv.evictors.query_moments import compute_expected_weights
from restorekv.model import attention
from restorekv.model.attention import BACKENDS, blocked, packed, reference, sliding
from restorekv.model.attention.sinks import attend_with_sinks
from tests.helpers.attention import (
    EXACT,
    GROUPS,
    HEADS,
    SEEN,
    WIDTH,
    build,
    draw,
    make_layer,
    make_window_case,
    run_scoring_pass,
)

WITHOUT_GRADIENTS = {"cascade"}
SCALE = 0.3


def with_column(logits, sinks):
    """The weights of logits (..., H, G, Q, K) beside those of sinks (H, G), which are dropped."""
    column = sinks[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def dense(query, keys, values, visible, sinks):
    """query (B, H, G, Q, D), keys and values (B, H, K, D), visible (B or 1, H or 1, Q, K)."""
    logits = query @ keys[:, :, None].mT * SCALE
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    return with_column(logits, sinks) @ values[:, :, None]


def ragged_case(queries, tail, batch=2, seed=0, groups=GROUPS):
    lengths = [23, 0, 5]
    case = {"seed": seed, "lengths": lengths, "batch": batch, "queries": queries, "tail": tail}
    keep, leaves, fixed, _, mask = build(case | {"bias": False, "padding": True})
    leaves["query"] = leaves["query"][:, :, :groups]
    return keep, leaves, fixed, mask


def answer_densely(keep, leaves, fixed, mask, sinks):
    query = leaves["query"]
    batch, heads, _, queries, _ = query.shape
    keys = torch.cat([fixed["keys"].expand(batch, -1, -1, -1), leaves["tail_keys"]], 2)
    values = torch.cat([fixed["values"].expand(batch, -1, -1, -1), leaves["tail_values"]], 2)
    context = keep[None, :, None].expand(batch, -1, queries, -1)
    visible = torch.cat([context, mask.expand(-1, heads, -1, -1)], -1)
    return dense(query, keys, values, visible, sinks)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 4), (2, 2), (5, 8)]),
    st.integers(1, 3),
    st.sampled_from([1, GROUPS]),
    st.sampled_from([-30.0, 0.0, 2.0, 30.0]),
    st.integers(0, 999),
)
@pytest.mark.parametrize("backend", EXACT)
def test_every_backend_adds_them_once(backend, shape, batch, groups, level, seed):
    """After context and tail are merged, forward and backward; sinks may be far above every logit,
    or below.
    """
    keep, leaves, fixed, mask = ragged_case(*shape, batch, seed, groups)
    sinks = level + draw(HEADS, groups, seed=seed) * 3
    learns = backend not in WITHOUT_GRADIENTS
    found = []
    for exact in (False, True):
        inputs = {name: x.clone().requires_grad_(learns) for name, x in leaves.items()}
        if exact:
            result = answer_densely(keep, inputs, fixed, mask, sinks)
        else:
            tail = {name: x for name, x in inputs.items() if name != "query"}
            layer = make_layer(keep, **fixed, **tail, bias=None)
            result = BACKENDS[backend](inputs["query"], layer, mask, SCALE, sinks)
        if learns:
            result.sin().sum().backward()
        gradients = [x.grad for x in inputs.values() if learns]
        found.append([result.detach(), *gradients])
    for own, wished in zip(*found, strict=True):
        torch.testing.assert_close(own, wished, rtol=0, atol=1e-10)


def test_over_a_context_in_8_bits():
    keep, leaves, fixed, mask = ragged_case(3, 5)
    tail = {name: x for name, x in leaves.items() if name != "query"}
    layer = make_layer(keep, **fixed, **tail, bias=None)
    sinks = draw(HEADS, GROUPS) * 3
    rows = quantized.quantize(layer.context_keys, layer.context_values, layer.bounds, "int8")
    unpacked = [x.dequantize(slice(None), torch.float64) for x in rows]
    layer.context_keys, layer.context_values = unpacked
    wished = reference.attend_ragged(leaves["query"], layer, mask, SCALE, sinks)
    layer.context_keys, layer.context_values = rows
    found = packed.attend_ragged(leaves["query"], layer, mask, SCALE, sinks)
    torch.testing.assert_close(found, wished, rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", [5, 6, 7, 8, 64, 80])
@pytest.mark.parametrize("learns", [False, True])
def test_dense_attention_has_them_and_their_gradients(width, learns):
    query, keys, values = (draw(2, 6, 9, width), draw(2, 3, 12, width), draw(2, 3, 12, width))
    sinks = draw(6, seed=1) * 3
    visible = reference.make_causal_mask(9, 12, query.device)[None, None]
    leaves = [x.requires_grad_(learns) for x in (query, keys, values, sinks)]
    with torch.set_grad_enabled(learns):
        found = attend_with_sinks(query, keys, values, visible, SCALE, sinks)
        exact = dense(query.unflatten(1, (3, 2)), keys, values, visible, sinks.view(3, 2))
        exact = exact.flatten(1, 2)
    # The logit of a sink passes through float32.
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)
    if learns:
        ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (found, exact))
        for own, wished in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, wished, rtol=0, atol=1e-5)


def test_a_mask_may_be_added_to_the_logits():
    query, keys, values = draw(1, 6, 9, 8), draw(1, 3, 12, 8), draw(1, 3, 12, 8)
    sinks = draw(6, seed=1) * 3
    visible = reference.make_causal_mask(9, 12, query.device)[None, None]
    added = torch.zeros(1, 6, 9, 12, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    found = attend_with_sinks(query, keys, values, added, SCALE, sinks)
    exact = attend_with_sinks(query, keys, values, visible, SCALE, sinks)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_dropout_drops_weights_and_is_right_on_average():
    query, keys, values = draw(1, 2, 1, 8), draw(1, 1, 5, 8, seed=1), draw(1, 1, 5, 8, seed=2)
    sinks = draw(2, seed=3)
    exact = attend_with_sinks(query, keys, values, None, SCALE, sinks)
    rows = 20_000
    torch.manual_seed(0)
    dropped = attend_with_sinks(
        *(x.expand(rows, -1, -1, -1) for x in (query, keys, values)), None, SCALE, sinks, 0.3
    )
    assert dropped.std(0).min() > 0.01
    torch.testing.assert_close(dropped.mean(0), exact[0], rtol=0, atol=0.03)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_layer_without_a_cache_is_causal(queries):
    """transformers leaves out a mask where every query sees what is before it."""
    query, keys, values = draw(1, 6, queries, 8), draw(1, 3, 9, 8), draw(1, 3, 9, 8)
    sinks = draw(6, seed=1) * 3
    found, _ = attention.attend_layer(
        torch.nn.Module(), query, keys, values, None, scaling=SCALE, s_aux=sinks
    )
    visible = reference.make_causal_mask(queries, 9, query.device)[None, None]
    exact = dense(query.unflatten(1, (3, 2)), keys, values, visible, sinks.view(3, 2))
    torch.testing.assert_close(found, exact.flatten(1, 2).transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sink_is_not_rounded_to_16_bits(dtype):
    """One pair and one sink: the output is the pair's share of its value."""
    query = torch.zeros(1, 1, 1, 64, dtype=dtype)
    keys = torch.zeros(1, 1, 1, 64, dtype=dtype)
    values = torch.ones(1, 1, 1, 64, dtype=dtype)
    sink = torch.tensor([5.0117])
    found = attend_with_sinks(query, keys, values, None, 0.125, sink)
    share = 1 / (1 + sink.exp())
    assert abs(float(found[0, 0, 0, 0]) / float(share) - 1) < 2**-8  # rounding of the output


@pytest.mark.parametrize("masked", [False, True])
def test_layers_with_a_window_have_them(masked):
    query, layer, mask, keys, values, visible = make_window_case()
    sinks = draw(6, seed=3) * 3
    found = sliding.attend_rows(query, layer, mask if masked else None, SCALE, sinks)
    grouped = query.unflatten(1, (3, 2))
    exact = dense(grouped, keys, values, visible[None, None], sinks.view(3, 2)).flatten(1, 2)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attend_pass", [blocked.attend_pass, reference.attend_pass])
def test_passes_of_scorers_have_them_in_output_and_weights(attend_pass, monkeypatch):
    """The output is over all columns; the weights are a softmax over some columns and the sink."""
    monkeypatch.setattr(blocked, "TILE", 8)
    monkeypatch.setattr(reference, "ROWS", 4)
    sinks = draw(HEADS, GROUPS, seed=3) * 3
    output, weights, logits, later, values, columns = run_scoring_pass(attend_pass, SCALE, sinks)
    logits = logits.masked_fill(later, -torch.inf)
    exact = with_column(logits, sinks) @ values[:, None]
    torch.testing.assert_close(output, exact.permute(2, 0, 1, 3).flatten(1, 2), rtol=0, atol=1e-10)
    wished = with_column(logits[..., columns], sinks)
    torch.testing.assert_close(weights, wished, rtol=0, atol=1e-10)


def test_blocks_of_weights_have_them():
    query, key = draw(HEADS, GROUPS, 9, WIDTH), draw(HEADS, 20, WIDTH, seed=1)
    sinks = draw(HEADS, GROUPS, seed=2) * 3
    logits = query @ key[:, None].mT * SCALE
    logits = logits.masked_fill(~reference.make_causal_mask(9, 20, query.device), -torch.inf)
    wished = with_column(logits, sinks).float()
    blocks = attend.iterate_attention_blocks(query, key, SCALE, block=200, sinks=sinks)
    for low, high, weights in blocks:
        own = wished[:, :, low:high, : weights.shape[-1]]
        torch.testing.assert_close(weights, own, rtol=0, atol=1e-5)


def test_expected_weights_have_them():
    """Queries without spread, so that what is expected is one softmax."""
    keys, mean = draw(HEADS, SEEN, WIDTH), draw(HEADS, GROUPS, WIDTH, seed=1)
    sinks = draw(HEADS, GROUPS, seed=2) * 3
    nothing = torch.zeros(HEADS, GROUPS, WIDTH, WIDTH, dtype=torch.float64)
    found = compute_expected_weights(keys, mean, nothing, SCALE, sinks)
    logits = (mean @ keys.mT * SCALE)[:, :, None]
    torch.testing.assert_close(found, with_column(logits, sinks)[:, :, 0].mean(1))


def test_kernels_without_them_are_not_used(monkeypatch):
    class Kernels:
        @staticmethod
        def supports_query(query):
            return True

    monkeypatch.setattr(attend, "triton_maxima", Kernels)
    query = draw(HEADS, GROUPS, 2, WIDTH)
    assert attend.can_use_kernels(query)
    assert not attend.can_use_kernels(query, draw(HEADS, GROUPS))
