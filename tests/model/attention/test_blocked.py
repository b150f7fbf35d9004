"""Attention in blocks of rows against the matrix written out in float64; which columns share a
softmax; memory.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from restorekv.model.attention import blocked
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill, query_only_view
from tests.helpers.blocked import TOLERANCE, make, written_out


def run(query, own, context, scale, inside=()):
    """The output and the weights of `blocked.attend`, weights of later pairs zero."""
    heads, groups, rows, _ = query.shape
    width = sum(part.stop - part.start for part in inside)
    seen = torch.zeros(heads, groups, rows, width + rows, dtype=torch.float64)

    def see(head, low, high, weights):
        assert weights.shape == (groups, high - low, width + high)
        seen[head, :, low:high, : width + high] = weights
        weights.fill_(math.nan)  # free to be changed

    pairs = [x.unbind(0) for x in context]
    return blocked.attend_pass(
        query, own, lambda head: tuple(x[head] for x in pairs), scale, inside, see
    ), seen


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 8),
    rows=st.integers(1, 40),
    held=st.integers(0, 60),
    dim=st.sampled_from([32, 64, 80, 128, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    block=st.integers(0, 14),
    edges=st.lists(st.integers(0, 60), max_size=6),
    seed=st.integers(0, 99),
)
def test_it_is_the_matrix(heads, groups, rows, held, dim, dtype, block, edges, seed):
    edges = sorted(min(edge, held) for edge in edges[: len(edges) // 2 * 2])
    inside = [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
    columns = [column for part in inside for column in range(part.start, part.stop)]
    case = make(heads, groups, rows, held, dim, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK", 1 << block)
        output, weights = run(*case, dim**-0.5, inside)
    exact, exact_weights = written_out(*case, dim**-0.5, columns)
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() <= TOLERANCE[dtype] * 4
    assert (weights - exact_weights).abs().max() <= max(
        TOLERANCE[torch.float32], TOLERANCE[dtype]
    ) * (1 if dtype in (torch.float32, torch.float64) else 1e-3)


def test_tiles_of_what_takes_no_part(monkeypatch):
    monkeypatch.setattr(blocked, "TILE", 7)
    case = make(2, 2, 30, 60, 32, torch.float32, 0)
    for inside in ([], [slice(0, 4), slice(21, 50)], [slice(4, 4), slice(53, 60)]):
        columns = [column for part in inside for column in range(part.start, part.stop)]
        rest = [
            column
            for part in blocked.split_outside(inside, 60)
            for column in range(part.start, part.stop)
        ]
        assert sorted(columns + rest) == list(range(60))
        output, weights = run(*case, 0.2, inside)
        exact, exact_weights = written_out(*case, 0.2, columns)
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, exact_weights, rtol=1e-4, atol=1e-7)


def test_logits_of_any_size():
    """Far apart, so that one softmax has all its weight where the other has none: 2^x must not
    underflow to 0 / 0.
    """
    query, own, (keys, values) = make(1, 1, 5, 20, 32, torch.float32, 0)
    case = query.fill_(10.0), (own[0].fill_(-10.0), own[1]), (keys.fill_(10.0), values)
    output, weights = run(*case, 1.0, [slice(0, 0)])
    exact, exact_weights = written_out(*case, 1.0, [])
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weights, exact_weights, rtol=1e-3, atol=1e-7)


class Largest(TorchDispatchMode):
    """The most entries any tensor had that was made inside the block; views of `known` ones were
    not made.
    """

    entries = 0

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.untyped_storage().data_ptr() not in self.known
        ):
            self.entries = max(
                self.entries, result.untyped_storage().nbytes() // result.element_size()
            )
        return result


def test_memory_is_bounded_by_the_block(monkeypatch):
    monkeypatch.setattr(blocked, "TILE", 100)
    monkeypatch.setattr(blocked, "BLOCK", 20_000)
    query, own, context = make(2, 3, 500, 9000, 8, torch.float32, 0)
    pairs = [tuple(x[head].clone() for x in context) for head in range(2)]
    with Largest(*own, *pairs[0], *pairs[1]) as largest:
        blocked.attend_pass(query, own, pairs.__getitem__, 1.0, [slice(0, 300)])
    assert largest.entries <= max(20_000, query.numel()) < pairs[0][0].numel() / 2


@pytest.mark.parametrize("held", [0, 20])
def test_a_pass_behind_a_cache(tiny_model, held):
    """A model whose attention an observer computes gives what it gives over a joined cache."""
    ids = torch.randint(3, 300, (1, held + 9), generator=torch.Generator().manual_seed(0))
    full = prefill(tiny_model, ids[:, :held]) if held else None

    def on_layer(view):
        assert view.key.shape[1] == 9
        columns = (
            [x[0] for x in (full.layers[view.layer].keys, full.layers[view.layer].values)]
            if held
            else None
        )
        nothing = [view.key[:, :0], view.value[:, :0]]
        return blocked.attend_pass(
            view.query,
            (view.key, view.value),
            lambda head: tuple(x[head] for x in columns or nothing),
            view.scale,
        )

    expected = tiny_model(ids).logits[:, held:]
    with observe_layers(tiny_model, on_layer):
        given_cache = query_only_view(full) if held else None
        logits = tiny_model(ids[:, held:], past_key_values=given_cache, use_cache=bool(held)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
