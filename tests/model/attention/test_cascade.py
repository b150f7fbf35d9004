"""The CPU's backend against the definition: every shape and dtype, long heads in pieces, and what
it refuses.
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from restorekv.errors import RestoreKVError
from restorekv.model.attention import cascade
from tests.helpers.ragged_layers import TOLERANCE, build, cases, defined


def check(case):
    query, layer, mask = build(case)
    with patch.object(torch, "get_num_threads", lambda: case["threads"]):
        found = cascade.attend_ragged(query, layer, mask, case["dim"] ** -0.5)
    assert found.dtype == case["dtype"] and found.shape == query.shape
    tolerance = TOLERANCE[case["dtype"]]
    torch.testing.assert_close(
        found.double(), defined(query, layer, mask), rtol=tolerance, atol=tolerance
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_equals_the_definition(case):
    with patch.object(cascade, "_LEAST_ROWS", 8):
        check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_as_long_as_the_kernel_takes(dtype, bias):
    """Beside a head that keeps nothing, one of one pair and one of a piece and a row."""
    case = CASE | {
        "lengths": [0, 1, 513, 1600],
        "groups": 8,
        "dim": 128,
        "batch": 1,
        "dtype": dtype,
        "bias": bias,
    }
    with patch.object(cascade, "attend_fused", wraps=cascade.attend_fused) as fused:
        check(case)
    read = [call.args[1].shape[1:3] for call in fused.call_args_list]
    assert read == [(1, 1), (1, 513), (3, 533), (1, 1), (4, 4)]  # the last is the tail


CASE = {
    "seed": 3,
    "dtype": torch.float32,
    "lengths": [31, 90],
    "groups": 2,
    "dim": 32,
    "batch": 2,
    "queries": 1,
    "tail": 4,
    "bias": False,
    "mask": "none",
    "threads": 4,
    "room": 0,
}


def test_long_heads_are_cut_into_pieces_that_are_views():
    """Every row is read once, where it lies, by all queries at once."""
    query, layer, mask = build(CASE)
    seen, fused = [], cascade.attend_fused

    def watched(query, keys, values, **more):
        seen.append((tuple(query.shape), keys))
        return fused(query, keys, values, **more)

    with (
        patch.object(cascade, "_LEAST_ROWS", 8),
        patch.object(torch, "get_num_threads", lambda: 4),
        patch.object(cascade, "attend_fused", watched),
    ):
        cascade.attend_ragged(query, layer, mask, 0.3)
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
        patch.object(cascade, "_LEAST_ROWS", 8),
        patch.object(torch, "get_num_threads", lambda: 4),
        patch.object(cascade, "attend_fused", wraps=cascade.attend_fused) as fused,
    ):
        cascade.attend_ragged(query, layer, mask, 0.3)
    assert [call.args[1].shape[1:3] for call in fused.call_args_list] == [(1, 31), (1, 90), (2, 60)]


def test_gradients_and_mixed_dtypes_are_refused():
    query, layer, mask = build(CASE)
    with pytest.raises(RestoreKVError, match="cascade"):
        cascade.attend_ragged(query.requires_grad_(), layer, mask, 0.3)
    with pytest.raises(RestoreKVError, match="cascade"), torch.no_grad():
        cascade.attend_ragged(query.bfloat16(), layer, mask, 0.3)
