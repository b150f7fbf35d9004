"""The CPU's backend against the definition: every shape and dtype, long heads in pieces, and what it refuses."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.model.attention import cascade, naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def cases(draw):
    queries = draw(st.sampled_from([1, 1, 2, 7]))
    return {
        "seed": draw(st.integers(0, 2**20)),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "lengths": draw(st.lists(st.sampled_from([0, 1, 2, 5, 31, 64, 90]), min_size=1, max_size=4)),
        "groups": draw(st.integers(1, 8)),
        "dim": draw(st.sampled_from([32, 64, 80, 128, 256])),
        "batch": draw(st.integers(1, 3)),
        "queries": queries,
        "tail": queries + draw(st.integers(0, 5)),
        "bias": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "one", "each"])),
        "threads": draw(st.sampled_from([1, 2, 5])),
        "room": draw(st.integers(0, 3)),
    }


def build(case):
    """A layer whose tail is the beginning of a buffer, a query and a mask."""
    generator = torch.Generator().manual_seed(case["seed"])
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(case["dtype"])  # noqa: E731
    heads, dim, batch, tail = len(case["lengths"]), case["dim"], case["batch"], case["tail"]
    offsets = torch.tensor([0, *case["lengths"]]).cumsum(0).int()
    kept = int(offsets[-1])
    bias = draw(kept).to(torch.promote_types(case["dtype"], torch.float32)) if case["bias"] else None
    nothing = draw(1, heads, 0, dim)
    context = draw(kept, dim), draw(kept, dim)
    layer = RaggedLayer(*context, offsets, torch.zeros(kept, dtype=torch.int32), 99, nothing, nothing, bias)
    layer.keys, layer.values = (draw(batch, heads, tail + case["room"], dim)[:, :, :tail] for _ in range(2))
    mask, queries = None, case["queries"]
    if case["mask"] != "none":
        mask = naive.causal(queries, tail, offsets.device).expand(1 if case["mask"] == "one" else batch, 1, -1, -1)
        mask = mask.clone()
        mask[0, :, :, 0] = tail == queries  # a column that no query needs, unless it is all that the first one sees
    return draw(batch, heads, case["groups"], queries, dim) * 2, layer, mask


def defined(query, layer, mask):
    """By the definition in float64, through which gradients pass."""
    exact = RaggedLayer(
        layer.context_keys.double(), layer.context_values.double(), layer.offsets, layer.positions, 99,
        layer.restore_keys.double(), layer.restore_values.double(), layer.bias,
    )  # fmt: skip
    exact.keys, exact.values = layer.keys.double(), layer.values.double()
    every = None if mask is None else mask.expand(len(query), -1, -1, -1)
    return naive.attend(query.double(), exact, every, query.shape[-1] ** -0.5)


def check(case):
    query, layer, mask = build(case)
    with patch.object(torch, "get_num_threads", lambda: case["threads"]):
        found = cascade.attend(query, layer, mask, case["dim"] ** -0.5)
    assert found.dtype == case["dtype"] and found.shape == query.shape
    tolerance = TOLERANCE[case["dtype"]]
    torch.testing.assert_close(found.double(), defined(query, layer, mask), rtol=tolerance, atol=tolerance)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_equals_the_definition(case):
    with patch.object(cascade, "LEAST", 8):
        check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_as_long_as_the_kernel_takes(dtype, bias):
    """Beside a head that keeps nothing, one of one pair and one of a piece and a row."""
    case = CASE | {"lengths": [0, 1, 513, 1600], "groups": 8, "dim": 128, "batch": 1, "dtype": dtype, "bias": bias}
    with patch.object(cascade, "fused", wraps=cascade.fused) as fused:
        check(case)
    read = [call.args[1].shape[1:3] for call in fused.call_args_list]
    assert read == [(1, 1), (1, 513), (3, 533), (1, 1), (4, 4)]  # the last is the tail


CASE = {
    "seed": 3, "dtype": torch.float32, "lengths": [31, 90], "groups": 2, "dim": 32, "batch": 2, "queries": 1, "tail": 4,
    "bias": False, "mask": "none", "threads": 4, "room": 0,
}  # fmt: skip


def test_long_heads_are_cut_into_pieces_that_are_views():
    """Every row is read once, where it lies, by all queries at once."""
    query, layer, mask = build(CASE)
    seen, fused = [], cascade.fused

    def watched(query, keys, values, **more):
        seen.append((tuple(query.shape), keys))
        return fused(query, keys, values, **more)

    with (
        patch.object(cascade, "LEAST", 8),
        patch.object(torch, "get_num_threads", lambda: 4),
        patch.object(cascade, "fused", watched),
    ):
        cascade.attend(query, layer, mask, 0.3)
    pieces = [(shape[1], keys.shape[2]) for shape, keys in seen]
    assert pieces == [
        (3, 10),
        (1, 1),
        (4, 22),
        (1, 2),
        (2, 4),
    ]  # heads of 31 and 90 rows, then two tails
    assert {shape[2] for shape, _ in seen[:-1]} == {4}  # two questions of two group heads
    held = layer.context_keys.untyped_storage().data_ptr()
    assert all(keys.untyped_storage().data_ptr() == held for _, keys in seen[:-1])
    firsts = [keys.storage_offset() // 32 for _, keys in seen[:-1]]
    assert firsts == [0, 30, 31, 119]


def test_many_queries_leave_heads_whole():
    """The kernel shares out blocks of queries by itself."""
    query, layer, mask = build(CASE | {"queries": 60, "tail": 60})
    with (
        patch.object(cascade, "LEAST", 8),
        patch.object(torch, "get_num_threads", lambda: 4),
        patch.object(cascade, "fused", wraps=cascade.fused) as fused,
    ):
        cascade.attend(query, layer, mask, 0.3)
    assert [call.args[1].shape[1:3] for call in fused.call_args_list] == [(1, 31), (1, 90), (2, 60)]


def test_gradients_and_mixed_dtypes_are_refused():
    query, layer, mask = build(CASE)
    with pytest.raises(RestoreKVError, match="cascade"):
        cascade.attend(query.requires_grad_(), layer, mask, 0.3)
    with pytest.raises(RestoreKVError, match="cascade"), torch.no_grad():
        cascade.attend(query.bfloat16(), layer, mask, 0.3)
