"""Layers with a window against a softmax written out row by row in float64, tails and paddings of
any length included.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.cache.sliding import SlidingLayer
from restorekv.errors import ModelError
from restorekv.model import attention
from restorekv.model.attention import sliding

HEADS, GROUPS, WIDTH = 2, 3, 8
SCALE = 0.3


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_layer(batch, window, context, tail, first, seen):
    nothing = draw(1, HEADS, 0, WIDTH)
    held = draw(1, HEADS, context, WIDTH, seed=1), draw(1, HEADS, context, WIDTH, seed=2)
    layer = SlidingLayer(*held, first, window, seen, nothing, nothing)
    layer.keys = draw(batch, HEADS, tail, WIDTH, seed=3)
    layer.values = draw(batch, HEADS, tail, WIDTH, seed=4)
    return layer


def write_out(query, layer, padding, restored=0):
    """The outputs (B, H*G, Q, D), and which queries are no padding (B, Q).

    Row b has `padding[b]` columns of padding after the first `restored` ones of its tail.
    """
    batch, heads, queries, _ = query.shape
    outputs = torch.zeros_like(query)
    is_read = torch.zeros(batch, queries, dtype=torch.bool)
    for row in range(batch):
        hidden = range(restored, restored + padding[row])
        columns = [column for column in range(layer.columns) if column not in hidden]
        context = range(layer.first, layer.first + layer.context_columns)
        positions = torch.tensor([*context, *(layer.seen + i for i in range(len(columns)))])
        keys = torch.cat([layer.context_keys[0], layer.keys[row][:, columns]], 1)
        values = torch.cat([layer.context_values[0], layer.values[row][:, columns]], 1)
        for index in range(queries):
            column = layer.columns - queries + index
            if column in hidden:
                continue
            is_read[row, index] = True
            own = layer.seen + columns.index(column)
            near = (positions <= own) & (positions > own - layer.window)
            for head in range(heads):
                kv_head = head // GROUPS
                logits = keys[kv_head, near] @ query[row, head, index] * SCALE
                outputs[row, head, index] = logits.softmax(0) @ values[kv_head, near]
    return outputs, is_read


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(2, 9),
    held=st.integers(0, 8),
    tail=st.integers(1, 24),
    queries=st.integers(1, 24),
    offset=st.integers(0, 3),
    batch=st.integers(1, 2),
    learns=st.booleans(),
)
def test_a_sequence_sees_its_window(window, held, tail, queries, offset, batch, learns):
    """Also where the tail is longer than the window, and none of the context is seen."""
    queries = min(queries, tail)
    held = min(held, window - 1)
    layer = make_layer(batch, window, held, tail, 11, 11 + held + offset)
    query = draw(batch, HEADS * GROUPS, queries, WIDTH, seed=5)
    exact, _ = write_out(query, layer, [0] * batch)
    with torch.set_grad_enabled(learns):
        in_sequence = sliding.attend_sequence(query, layer, None, SCALE)
        causal = torch.ones(queries, tail, dtype=torch.bool).tril(tail - queries)
        rows = causal[None, None].expand(batch, -1, -1, -1)
        as_rows = sliding.attend_rows(query, layer, rows, SCALE)
    torch.testing.assert_close(in_sequence, exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(as_rows, exact, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(2, 9),
    held=st.integers(0, 8),
    restored=st.integers(0, 3),
    padding=st.tuples(st.integers(0, 6), st.just(0)),
    asked=st.integers(1, 14),
    step=st.booleans(),
)
def test_padding_has_no_place_in_a_window(window, held, restored, padding, asked, step):
    """Positions skip it, in the prompt's own pass and in a step after it."""
    held = min(held, window - 1)
    tail = restored + max(padding) + asked
    layer = make_layer(2, window, held, tail, 11, 11 + held)
    queries = 1 if step else tail - restored
    query = draw(2, HEADS * GROUPS, queries, WIDTH, seed=5)
    columns = torch.arange(tail)
    visible = torch.stack([(columns < restored) | (columns >= restored + each) for each in padding])
    causal = torch.ones(queries, tail, dtype=torch.bool).tril(tail - queries)
    found = sliding.attend_rows(query, layer, visible[:, None, None] & causal, SCALE)
    exact, is_read = write_out(query, layer, padding, restored)
    assert found.isfinite().all()
    is_read = is_read[:, None, :, None].expand_as(exact)
    torch.testing.assert_close(found[is_read], exact[is_read], rtol=0, atol=1e-12)


def test_a_cache_of_another_window_is_refused():
    layer = make_layer(1, 6, 5, 7, 0, 5)
    query = draw(1, HEADS * GROUPS, 2, WIDTH, seed=5)
    module = torch.nn.Module()
    found, _ = attention.attend_layer(
        module, query, layer, layer, None, scaling=SCALE, sliding_window=6
    )
    exact, _ = write_out(query, layer, [0])
    torch.testing.assert_close(found.transpose(1, 2), exact, rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="made for a window of 6 positions, and the layer has 7"):
        attention.attend_layer(module, query, layer, layer, None, sliding_window=7)
