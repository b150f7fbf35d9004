"""Allocations compared with sorting: counts are exact for any scores, ties go to the lower index,
and pinned pairs stay.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.compression import allocate
from restorekv.compression.allocate import ALLOCATIONS, mark_highest
from restorekv.errors import RestoreKVError
from restorekv.evictors.base import pin_columns

# A few values only, so that most cases tie; pinned and hopeless pairs among them.
VALUES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, float("inf"), float("-inf"), 1e-30])


@settings(deadline=None, max_examples=200)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)),
    fraction=st.floats(0, 1),
)
def test_the_best_and_of_equals_the_first(data, shape, fraction):
    count = shape[0] * shape[1] * shape[2]
    values = data.draw(st.lists(VALUES, min_size=count, max_size=count))
    pairs = round(fraction * count)
    keep = mark_highest(torch.tensor(values).view(shape), pairs)
    order = sorted(range(count), key=lambda index: (-values[index], index))
    assert keep.shape == shape and keep.dtype == torch.bool
    assert keep.flatten().nonzero().flatten().tolist() == sorted(order[:pairs])


def test_float32_neighbours_are_told_apart():
    scores = torch.rand(4, 4, 1000, generator=torch.Generator().manual_seed(0))
    keep = mark_highest(scores, 777)
    assert keep.sum() == 777 and scores[keep].min() >= scores[~keep].max()


def test_impossible_counts_and_scores_are_refused():
    with pytest.raises(ValueError):
        mark_highest(torch.zeros(1, 1, 4), 5)
    with pytest.raises(ValueError):
        mark_highest(torch.zeros(1, 1, 4), -1)
    with pytest.raises(RestoreKVError, match="NaN"):
        mark_highest(torch.tensor([[[0.0, float("nan")]]]), 1)


SPECS = [*ALLOCATIONS, "adakv:safeguard=0", "adakv:safeguard=0.5", "adakv:safeguard=1"]
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12))


def drawn(data, shape, values=VALUES):
    count = shape[0] * shape[1] * shape[2]
    return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).view(shape)


@pytest.mark.parametrize("spec", SPECS)
@settings(deadline=None, max_examples=100)
@given(data=st.data(), shape=SHAPES)
def test_every_allocation_keeps_exactly_the_budget(spec, data, shape):
    scores = drawn(data, shape)
    pairs = data.draw(st.integers(0, scores.numel()))
    keep = allocate.make_allocation(spec)(scores, pairs)
    assert keep.shape == shape and keep.dtype == torch.bool and int(keep.sum()) == pairs
    assert keep.equal(allocate.make_allocation(spec)(scores.clone(), pairs))


def best(group, count):
    """Return the indices of the highest scores; among equal scores, lower indices are preferred."""
    return sorted(sorted(range(len(group)), key=lambda index: (-group[index], index))[:count])


def shares(pairs, parts):
    return [pairs // parts + (part < pairs % parts) for part in range(parts)]


@pytest.mark.parametrize("name", ["per-layer", "per-head"])
@settings(deadline=None, max_examples=100)
@given(data=st.data(), shape=SHAPES)
def test_uniform_allocations_are_a_ranking_in_every_part(name, data, shape):
    scores = drawn(data, shape)
    pairs = data.draw(st.integers(0, scores.numel()))
    parts = scores.flatten(1) if name == "per-layer" else scores.flatten(0, 1)
    keep = allocate.make_allocation(name)(scores, pairs).view_as(parts)
    for part, kept, count in zip(parts, keep, shares(pairs, len(parts)), strict=True):
        assert kept.nonzero().flatten().tolist() == best(part.tolist(), count)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), shape=SHAPES, safeguard=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_adakv_secures_a_share_and_ranks_the_rest(data, shape, safeguard):
    scores = drawn(data, shape)
    pairs = data.draw(st.integers(0, scores.numel()))
    keep = allocate.make_allocation(f"adakv:safeguard={safeguard}")(scores, pairs)
    for layer, kept, count in zip(scores, keep, shares(pairs, shape[0]), strict=True):
        sure = int(Fraction(str(safeguard)) * (count // shape[1]))
        secured = {
            (head, column)
            for head in range(shape[1])
            for column in best(layer[head].tolist(), sure)
        }
        others = [
            place
            for place in torch.cartesian_prod(*map(torch.arange, shape[1:])).view(-1, 2).tolist()
            if tuple(place) not in secured
        ]
        chosen = best([float(layer[head, column]) for head, column in others], count - len(secured))
        assert {tuple(place) for place in kept.nonzero().tolist()} == secured | {
            tuple(others[i]) for i in chosen
        }


@pytest.mark.parametrize("spec", SPECS)
@settings(deadline=None, max_examples=100)
@given(data=st.data(), shape=SHAPES)
def test_window_and_sinks_stay(spec, data, shape):
    finite = st.sampled_from([0.0, -3.5, 0.25, 1.0, 1e-30, 700.0])
    layers, heads, tokens = shape
    window, sinks = data.draw(st.integers(0, tokens)), data.draw(st.integers(0, 2))
    columns = [*range(min(sinks, tokens - window)), *range(tokens - window, tokens)]
    scores = pin_columns(drawn(data, shape, finite), columns)
    pairs = data.draw(st.integers(len(columns) * layers * heads, scores.numel()))
    assert allocate.make_allocation(spec)(scores, pairs)[..., columns].all()


def test_the_safeguard_is_the_decimal_that_was_written():
    scores = torch.arange(200.0).view(1, 2, 100)
    assert (
        allocate.make_allocation("adakv:safeguard=0.29")(scores, 100)[0, 0].sum() == 14
    )  # 0.29 * 50 = 14.5
    # In floats 28.999999999999996.
    assert allocate.make_allocation("adakv:safeguard=0.58")(scores, 100)[0, 0].sum() == 29
    scores = torch.arange(400.0).view(1, 2, 200)
    # In floats 28.999999999999996.
    assert allocate.make_allocation("adakv:safeguard=0.29")(scores, 200)[0, 0].sum() == 29


@pytest.mark.parametrize("highest", [0.0, -5.0, 3e7, 1e30, 1e-30])
def test_pinned_columns_stand_above_scores_of_any_size(highest):
    scores = torch.full((1, 2, 10), highest - abs(highest))
    scores[0, 1, 3] = highest
    pinned = pin_columns(scores, [2, 9, 5])
    order = pinned[0, 0, [3, 2, 9, 5]].tolist()
    assert highest < order[1] < order[2] < order[3] < float("inf") and order[0] <= highest
    assert pinned[..., [0, 1, 3, 4, 6, 7, 8]].equal(scores[..., [0, 1, 3, 4, 6, 7, 8]])


def test_a_global_ranking_may_empty_a_head():
    scores = torch.zeros(2, 2, 10)
    scores[1, 0] = 1
    keep = allocate.make_allocation("global")(scores, 10)
    assert keep[1, 0].all() and not keep[0].any() and not keep[1, 1].any()
    assert allocate.make_allocation("adakv")(scores, 20)[1].sum(-1).tolist() == [9, 1]
    assert allocate.make_allocation("per-head")(scores, 8).sum(-1).eq(2).all()


@pytest.mark.parametrize("spec", SPECS)
def test_no_allocation_takes_nan(spec):
    scores = torch.zeros(2, 2, 4)
    scores[1, 1, 2] = float("nan")
    with pytest.raises(RestoreKVError, match="NaN"):
        allocate.make_allocation(spec)(scores, 4)


@pytest.mark.parametrize("spec", SPECS)
def test_impossible_counts_are_refused_everywhere(spec):
    for pairs in (-1, 17):
        with pytest.raises(ValueError):
            allocate.make_allocation(spec)(torch.zeros(2, 2, 4), pairs)


@pytest.mark.parametrize(
    "spec", ["best", "adakv:safeguard=2", "adakv:safeguard=x", "global:heads=2", ""]
)
def test_wrong_specs_are_refused(spec):
    with pytest.raises(RestoreKVError):
        allocate.make_allocation(spec)


@pytest.mark.parametrize(
    "values", [[0.0, -0.0, 1.5], [-torch.inf, torch.inf, -3.0, 2e-42, -2e-42], None]
)
def test_many_scores_are_selected_by_their_digits(monkeypatch, values):
    """The value is the one that PyTorch's own selection finds, at every rank, with ties, zeros of
    both signs and infinities.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(403, generator=generator)
    if values:
        scores = torch.tensor(values)[torch.randint(len(values), (403,), generator=generator)]
    expected = [scores.kthvalue(len(scores) - count + 1).values for count in range(1, 404)]
    masks = [mark_highest(scores, count) for count in range(404)]
    monkeypatch.setattr(allocate, "SCORES_AT_ONCE", 100)
    for count, value in enumerate(expected, 1):
        found = allocate.find_nth_highest(scores, count)
        assert found.dtype == torch.float32 and found.shape == () and found == value
    assert all(mark_highest(scores, count).equal(mask) for count, mask in enumerate(masks))
