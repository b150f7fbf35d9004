"""A cap on logits, c * tanh(logit / c), before a bias and beside sinks, in whatever computes it.

The definition here is a softmax in float64 over logits that are written out.
"""

import pytest
import torch

from restorekv.cache import quantized
from restorekv.compression.attention_matching.matching import fit_head, observe_layer
from restorekv.errors import ModelError, RestoreKVError
from restorekv.evictors import attend
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.model import attention
from restorekv.model.attention import BACKENDS, blocked, caps, packed, reference, sliding
from restorekv.model.attention.caps import attend_with_cap
from restorekv.model.support import get_support
from tests.helpers.attention import (
    GROUPS,
    HEADS,
    WIDTH,
    build,
    draw,
    make_layer,
    make_window_case,
    run_scoring_pass,
)
from tests.helpers.compressing import compress_with
from tests.helpers.hybrids import build_hybrid

SCALE = 0.7
CAP = 1.5
WITHOUT_CAP = [name for name in BACKENDS if name in ("cascade", "triton")]
WITH_CAP = [name for name in BACKENDS if name not in WITHOUT_CAP]
CLOSE = {"rtol": 0, "atol": 1e-10}


def bend(logits):
    return CAP * torch.tanh(logits / CAP)


def dense(query, keys, values, visible, bias=0.0):
    """query (B, H, G, Q, D), keys and values (B, H, K, D), visible (B or 1, H or 1, Q, K)."""
    logits = bend(query @ keys[:, :, None].mT * SCALE) + bias
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    return logits.softmax(-1) @ values[:, :, None]


def ragged_case(bias):
    case = {"seed": 0, "lengths": [23, 0, 5], "batch": 2, "queries": 3, "tail": 5}
    keep, leaves, fixed, kept_bias, mask = build(case | {"bias": bias, "padding": True})
    return keep, leaves, fixed, kept_bias, mask


def make_case_layer(keep, inputs, fixed, bias):
    tail = {name: x for name, x in inputs.items() if name != "query"}
    return make_layer(keep, **fixed, **tail, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", WITH_CAP)
def test_backends_cap_logits_before_the_bias(backend, bias):
    """Forward and backward."""
    keep, leaves, fixed, kept_bias, mask = ragged_case(bias)
    batch = len(leaves["query"])
    found = []
    for exact in (False, True):
        inputs = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        if exact:
            keys = torch.cat([fixed["keys"].expand(batch, -1, -1, -1), inputs["tail_keys"]], 2)
            values = torch.cat(
                [fixed["values"].expand(batch, -1, -1, -1), inputs["tail_values"]], 2
            )
            queries = inputs["query"].shape[-2]
            context = keep[None, :, None].expand(batch, -1, queries, -1)
            visible = torch.cat([context, mask.expand(-1, HEADS, -1, -1)], -1)
            added = torch.zeros(HEADS, keys.shape[2], dtype=torch.float64)
            if bias:
                added[:, : keep.shape[1]] = kept_bias.double()
            result = dense(inputs["query"], keys, values, visible, added[None, :, None, None])
        else:
            layer = make_case_layer(keep, inputs, fixed, kept_bias)
            result = BACKENDS[backend](inputs["query"], layer, mask, SCALE, None, CAP)
        result.sin().sum().backward()
        found.append([result.detach(), *(x.grad for x in inputs.values())])
    for own, wished in zip(*found, strict=True):
        torch.testing.assert_close(own, wished, **CLOSE)


def test_kernels_without_a_cap_are_not_chosen():
    keep, leaves, fixed, kept_bias, mask = ragged_case(False)
    layer = make_case_layer(keep, leaves, fixed, kept_bias)
    query = leaves["query"]
    assert attention.choose_backend(query, layer) is BACKENDS["cascade"]
    assert attention.choose_backend(query, layer, CAP) is BACKENDS["autograd"]
    for backend in WITHOUT_CAP:
        with pytest.raises(RestoreKVError, match="cap on logits"):
            BACKENDS[backend](query, layer, mask, SCALE, None, CAP)
    assert not attend.can_use_kernels(query[0].float(), None, CAP)


def test_over_a_context_in_8_bits():
    keep, leaves, fixed, kept_bias, mask = ragged_case(True)
    layer = make_case_layer(keep, leaves, fixed, kept_bias)
    rows = quantized.quantize(layer.context_keys, layer.context_values, layer.bounds, "int8")
    unpacked = [x.dequantize(slice(None), torch.float64) for x in rows]
    layer.context_keys, layer.context_values = unpacked
    wished = reference.attend_ragged(leaves["query"], layer, mask, SCALE, None, CAP)
    layer.context_keys, layer.context_values = rows
    found = packed.attend_ragged(leaves["query"], layer, mask, SCALE, None, CAP)
    torch.testing.assert_close(found, wished, **CLOSE)


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
@pytest.mark.parametrize("form", ["causal", "added", "of each head"])
def test_dense_attention_in_blocks_has_it_and_its_gradients(form, block, monkeypatch):
    monkeypatch.setattr(caps, "BLOCK", block)
    query, keys, values = draw(2, 6, 9, 8), draw(2, 3, 12, 8), draw(2, 3, 12, 8)
    visible = reference.make_causal_mask(9, 12, query.device)[None, None]
    mask = visible
    if form == "added":
        mask = torch.zeros(1, 1, 9, 12, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    if form == "of each head":
        visible = visible & (draw(1, 6, 9, 12, seed=4) < 1)
        visible[..., 0] = True
        mask = visible
    leaves = [x.requires_grad_() for x in (query, keys, values)]
    found = attend_with_cap(query, keys, values, mask, SCALE, CAP)
    grouped = visible.unflatten(1, (3, 2)) if form == "of each head" else visible[:, :, None]
    logits = bend(query.unflatten(1, (3, 2)) @ keys[:, :, None].mT * SCALE)
    weights = logits.masked_fill(~grouped, -torch.inf).softmax(-1)
    exact = (weights @ values[:, :, None]).flatten(1, 2)
    torch.testing.assert_close(found, exact, **CLOSE)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (found, exact))
    for own, wished in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wished, **CLOSE)


def test_sinks_are_not_capped():
    query, keys, values = draw(1, 6, 9, 8), draw(1, 3, 12, 8), draw(1, 3, 12, 8)
    sinks = draw(6, seed=1) * 9
    visible = reference.make_causal_mask(9, 12, query.device)[None, None]
    found = attend_with_cap(query, keys, values, visible, SCALE, CAP, sinks)
    logits = bend(query.unflatten(1, (3, 2)) @ keys[:, :, None].mT * SCALE)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    column = sinks.view(3, 2)[None, ..., None, None].expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(found, (weights @ values[:, :, None]).flatten(1, 2), **CLOSE)


def test_dropout_drops_weights_and_is_right_on_average():
    query, keys, values = draw(1, 2, 1, 8), draw(1, 1, 5, 8, seed=1), draw(1, 1, 5, 8, seed=2)
    everything = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    exact = attend_with_cap(query, keys, values, everything, SCALE, CAP)
    torch.manual_seed(0)
    many = [x.expand(20_000, -1, -1, -1) for x in (query, keys, values)]
    dropped = attend_with_cap(*many, everything, SCALE, CAP, dropout=0.3)
    assert dropped.std(0).min() > 0.01
    torch.testing.assert_close(dropped.mean(0), exact[0], rtol=0, atol=0.03)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_layer_without_a_cache_is_causal(queries):
    query, keys, values = draw(1, 6, queries, 8), draw(1, 3, 9, 8), draw(1, 3, 9, 8)
    found, _ = attention.attend_layer(
        torch.nn.Module(), query, keys, values, None, scaling=SCALE, softcap=CAP
    )
    visible = reference.make_causal_mask(queries, 9, query.device)[None, None]
    exact = dense(query.unflatten(1, (3, 2)), keys, values, visible)
    torch.testing.assert_close(found, exact.flatten(1, 2).transpose(1, 2), **CLOSE)


@pytest.mark.parametrize("masked", [False, True])
def test_layers_with_a_window_have_it(masked):
    query, layer, mask, keys, values, visible = make_window_case()
    found = sliding.attend_rows(query, layer, mask if masked else None, SCALE, None, CAP)
    exact = dense(query.unflatten(1, (3, 2)), keys, values, visible[None, None]).flatten(1, 2)
    torch.testing.assert_close(found, exact, **CLOSE)


@pytest.mark.parametrize("attend_pass", [blocked.attend_pass, reference.attend_pass])
def test_passes_of_scorers_have_it_in_output_and_weights(attend_pass, monkeypatch):
    monkeypatch.setattr(blocked, "TILE", 8)
    monkeypatch.setattr(reference, "ROWS", 4)
    case = run_scoring_pass(attend_pass, SCALE, None, CAP)
    output, weights, products, later, values, columns = case
    logits = bend(products).masked_fill(later, -torch.inf)
    exact = (logits.softmax(-1) @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    torch.testing.assert_close(output, exact, **CLOSE)
    torch.testing.assert_close(weights, logits[..., columns].softmax(-1), **CLOSE)


def test_blocks_of_weights_have_it():
    query, key = draw(HEADS, GROUPS, 9, WIDTH), draw(HEADS, 20, WIDTH, seed=1)
    logits = bend(query @ key[:, None].mT * SCALE)
    later = ~reference.make_causal_mask(9, 20, query.device)
    wished = logits.masked_fill(later, -torch.inf).softmax(-1)
    for low, high, weights in attend.iterate_attention_blocks(query, key, SCALE, 500, cap=CAP):
        seen = wished[..., low:high, : weights.shape[-1]]
        torch.testing.assert_close(weights.double(), seen, rtol=1e-5, atol=1e-6)


def test_attention_matching_fits_what_capped_logits_give():
    """Where every pair is kept, bias and values reproduce the outputs."""
    query, key, value = draw(2, 40, 8), draw(2, 7, 8, seed=1), draw(2, 7, 8, seed=2)
    targets, scores = observe_layer(query.float(), key.float(), value.float(), SCALE, cap=CAP)
    weights = bend(query @ key.mT * SCALE).softmax(-1)
    torch.testing.assert_close(targets.output.double(), weights @ value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        scores.double(), weights.square().mean(1).sqrt(), rtol=1e-4, atol=1e-6
    )
    bias, values = fit_head(targets, 0, key[0].float(), 2, 3.0)
    fitted = (bend(query[0] @ key[0].T * SCALE) + bias.double()).softmax(-1) @ values.double()
    torch.testing.assert_close(fitted, (weights @ value)[0], rtol=1e-3, atol=1e-4)


def test_what_has_no_formula_under_a_cap_is_refused(tiny_tokenizer, monkeypatch):
    model = build_hybrid("gemma2")
    assert get_support(model).has_cap and not get_support(build_hybrid("gemma3_text")).has_cap
    text = "The house is red. " * 9
    with pytest.raises(ModelError, match="caps the logits of its attention"):
        compress_with(
            model, tiny_tokenizer, text, ratio=0.5, evictor="expected-attention", adapter=None
        )
    bridge = object.__new__(FromKVPress)
    with pytest.raises(RestoreKVError, match="without the cap on the logits"):
        bridge.score(model, tiny_tokenizer, None, None)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_caps_that_are_none_are_refused(cap):
    model = build_hybrid("gemma2")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
    model.config.attn_logit_softcapping = cap
    with pytest.raises(ModelError, match="cap on its logits that is not above 0"):
        get_support(model)


def test_a_class_that_leaves_out_its_cap_is_refused(monkeypatch):
    """What the class computes decides, not what it hands to attention."""
    model = build_hybrid("gemma2")
    module = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
    own = module.eager_attention_forward

    def without_cap(*args, softcap=None, **options):
        return own(*args, **options)

    monkeypatch.setattr(module, "eager_attention_forward", without_cap)
    model.config.name = "without a cap"  # so that it counts as new
    with pytest.raises(ModelError, match="such as with a different cap or sink"):
        get_support(model)
