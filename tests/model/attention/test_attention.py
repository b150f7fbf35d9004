"""Ragged attention against dense masked attention in float64, every backend: outputs, and gradients
if it has them.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.errors import ModelError
from restorekv.model import attention
from restorekv.model.attention import BACKENDS, autograd
from tests.helpers.attention import EXACT, HEADS, ON_CPU, SEEN, build, make_layer
from tests.helpers.ragged_layers import TOLERANCE, defined
from tests.helpers.ragged_layers import build as random_layer
from tests.helpers.ragged_layers import cases as of_every_shape

WITHOUT_GRADIENTS = {"cascade"}


def dense(query, keep, keys, values, tail_keys, tail_values, bias, tail_mask, scale):
    """One softmax over all SEEN + t columns with the dropped ones at -inf; NaN-free rows only."""
    batch, heads, _groups, queries, _ = query.shape
    all_keys = torch.cat([keys.expand(batch, -1, -1, -1), tail_keys], 2)
    all_values = torch.cat([values.expand(batch, -1, -1, -1), tail_values], 2)
    logits = torch.einsum("bhgqd,bhkd->bhgqk", query, all_keys) * scale
    if bias is not None:
        logits = torch.cat([logits[..., :SEEN] + bias[None, :, None, None], logits[..., SEEN:]], -1)
    visible = torch.cat(
        [keep[None, :, None].expand(batch, -1, queries, -1), tail_mask.expand(-1, heads, -1, -1)],
        -1,
    )
    weights = logits.masked_fill(~visible[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, all_values)


@st.composite
def cases(draw):
    queries = draw(st.sampled_from([1, 2, 5]))
    return {
        "seed": draw(st.integers(0, 2**20)),
        "lengths": draw(st.lists(st.integers(0, SEEN), min_size=HEADS, max_size=HEADS)),
        "batch": draw(st.integers(1, 3)),
        "queries": queries,
        "tail": queries + draw(st.integers(0, 4)),
        "bias": draw(st.booleans()),
        "padding": draw(st.booleans()),
    }


@settings(max_examples=40, deadline=None)
@given(cases())
@pytest.mark.parametrize("backend", EXACT)
def test_equals_dense_attention_forward_and_backward(backend, case):
    keep, leaves, fixed, bias, mask = build(case)
    gradient, learning = (
        torch.randn(leaves["query"].shape, dtype=torch.float64),
        backend not in WITHOUT_GRADIENTS,
    )

    def run(attend):
        inputs = {name: leaf.clone().requires_grad_(learning) for name, leaf in leaves.items()}
        result = attend(**inputs)
        if learning:
            result.backward(gradient)
        return [result.detach(), *(leaf.grad for leaf in inputs.values() if learning)]

    def ragged(query, tail_keys, tail_values):
        layer = make_layer(keep, **fixed, tail_keys=tail_keys, tail_values=tail_values, bias=bias)
        passed = (
            None if mask.equal(torch.ones_like(mask).tril(case["tail"] - case["queries"])) else mask
        )
        return BACKENDS[backend](query, layer, passed, 0.3)

    expected = run(lambda **x: dense(keep=keep, **fixed, bias=bias, tail_mask=mask, scale=0.3, **x))
    for ours, theirs in zip(run(ragged), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", EXACT)
def test_a_query_that_sees_nothing_stays_finite(backend):
    """A padding row without a restore cache has no key at all in a head that kept nothing."""
    case = {
        "seed": 0,
        "lengths": [0, 0, 3],
        "batch": 2,
        "queries": 3,
        "tail": 3,
        "bias": False,
        "padding": False,
    }
    keep, leaves, fixed, _, mask = build(case)
    mask[0, :, :2] = False
    mask[0, :, 2, :2] = False
    query = leaves.pop("query")
    layer = make_layer(keep, **fixed, **leaves, bias=None)
    result = BACKENDS[backend](query, layer, mask, 0.3)
    assert result.isfinite().all()
    expected = dense(query, keep, **fixed, **leaves, bias=None, tail_mask=mask, scale=0.3)
    torch.testing.assert_close(result[0, :, :, 2], expected[0, :, :, 2], rtol=0, atol=1e-10)
    torch.testing.assert_close(result[1], expected[1], rtol=0, atol=1e-10)


@settings(max_examples=80, deadline=None)
@given(of_every_shape(), st.integers(5, 12))
def test_frozen_in_every_shape_and_dtype(case, block):
    """Forward and backward, a block of rows at a time."""
    query, layer, mask = random_layer(case)
    layer.keys, layer.values = (x.detach().clone() for x in layer.keys_and_values)
    leaves = [x.requires_grad_() for x in (query, *layer.keys_and_values)]
    gradient = torch.randn(query.shape, generator=torch.Generator().manual_seed(case["seed"])).to(
        query.dtype
    )
    tolerance = TOLERANCE[query.dtype]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "BLOCK", 1 << block)
        found = autograd.attend_ragged(query, layer, mask, query.shape[-1] ** -0.5)
        ours = [found, *torch.autograd.grad(found, leaves, gradient)]
    assert all(x.dtype == case["dtype"] for x in ours)
    wished = defined(query, layer, mask)
    theirs = [wished, *torch.autograd.grad(wished, leaves, gradient.double())]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_what_a_mask_hides_of_a_tail_does_not_reach_beyond_a_window():
    case = {"seed": 1, "lengths": [5, 0, SEEN], "batch": 2, "queries": 2, "tail": 6}
    keep, leaves, fixed, _, mask = build(case | {"bias": False, "padding": False})
    query = leaves.pop("query").flatten(1, 2)
    layer = make_layer(keep, **fixed, **leaves, bias=None)

    def attend(mask, window):
        return attention.attend_layer(
            torch.nn.Module(), query, layer, layer, mask, scaling=0.3, sliding_window=window
        )[0]

    # Both rows have padding in two columns, one of them in one more.
    mask[:, :, :, :2] = False
    mask[0, :, :, 2] = False
    assert attend(mask, SEEN + 4).equal(attend(mask, 1000))
    for too_many, window in ((mask, SEEN + 3), (None, SEEN + 5)):
        with pytest.raises(ModelError, match=f"sees {window} positions"):
            attend(too_many, window)
    assert attend(None, SEEN + 6).equal(attend(None, None))


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close(backend, dtype):
    case = {
        "seed": 1,
        "lengths": [5, 0, SEEN],
        "batch": 2,
        "queries": 2,
        "tail": 4,
        "bias": False,
        "padding": True,
    }
    keep, leaves, fixed, _, mask = build(case)
    expected = dense(keep=keep, **fixed, bias=None, tail_mask=mask, scale=0.3, **leaves)
    leaves = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    query = leaves.pop("query")
    layer = make_layer(keep, *(x.to(dtype) for x in fixed.values()), **leaves, bias=None)
    result = BACKENDS[backend](query, layer, mask, 0.3)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
